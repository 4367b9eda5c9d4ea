"""The proof of a plan: the sharded step computes what the step on one device computes, and sends what was planned.

`verify` runs both and `judge` compares them, given the changes that `perturb` causes; `one_for_one` matches planned collectives
to compiled ones. `mutate` breaks a plan on purpose, to show that the proof notices. `child` compiles in a process of its own
where the compiler may crash, `stand_ins` replaces kernels that CPUs lack.
"""
