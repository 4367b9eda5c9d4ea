"""The proof of a plan: the sharded step computes what the step on one device computes, and sends what was planned.

`verify` runs both and `judge` compares them, given the changes that `perturb` causes; `one_for_one` sets planned collectives
beside compiled ones. `mutate` breaks a plan on purpose, to show that the proof notices. `child` compiles where the compiler may
end its process, `stand_ins` run kernels that CPUs lack.
"""
