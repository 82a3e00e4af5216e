#!/bin/bash
#SBATCH --job-name=vitrail
#SBATCH --nodes=16
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=14
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@120
#SBATCH --requeue
#SBATCH --open-mode=append

export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_PORT=${MASTER_PORT:-29500}

srun --kill-on-bad-exit=0 bash -c '
  export RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS LOCAL_RANK=$SLURM_LOCALID LOCAL_WORLD_SIZE=$SLURM_NTASKS_PER_NODE
  exec vitrail train "$@"' train "$@"
code=$?

# 3: stopped by the signal, with a checkpoint saved.
if [ "$code" -eq 3 ]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
