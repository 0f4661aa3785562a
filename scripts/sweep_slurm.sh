#!/bin/sh
# A SLURM array job with one task for each member of a sweep:
#
#   python -m mtf_experiments.sweep --gin_file=sweeps/table2.gin --output=DIR --print > members.txt
#   sbatch --array=1-$(wc -l < members.txt) [--nodes=... --gres=...] scripts/sweep_slurm.sh members.txt
#
# A member that is stopped (SIGTERM before the time limit) goes on from its last step when it is submitted again.
#SBATCH --signal=TERM@120
#SBATCH --requeue
set -e
line=$(sed -n "${SLURM_ARRAY_TASK_ID:?this is a task of an array: sbatch --array=1-N}p" "${1:?want the file of sweep --print}")
test -n "$line" || { echo "error: $1 has no line $SLURM_ARRAY_TASK_ID" >&2; exit 2; }
echo "$line"
exec sh -c "$line"
