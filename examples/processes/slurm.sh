#!/bin/bash
#SBATCH --job-name=train
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
# One process a GPU: sbatch slurm.sh
# --kill-on-bad-exit ends the step as soon as one process has failed.
cd "${SLURM_SUBMIT_DIR:-.}" || exit 1
srun --kill-on-bad-exit=1 python train.py
