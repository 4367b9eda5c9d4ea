#!/bin/bash
# One process a GPU, on the hosts of a file with lines such as "node1 slots=8": ./openmpi.sh hosts
# Open MPI 5 needs mpi4py in the environment of train.py: JAX asks it for the processes.
mpirun --hostfile "${1:-hosts}" --map-by slot -x CLUSTER python train.py
