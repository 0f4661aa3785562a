#!/bin/sh
# The members of a sweep one after another on all workers of a Cloud TPU slice, where the project is installed:
#
#   python -m mtf_experiments.sweep --gin_file=sweeps/table2.gin --output=gs-or-shared-folder --print > members.txt
#   scripts/sweep_cloud_tpu.sh members.txt NAME ZONE
#
# GCLOUD=echo shows what would be run.
set -e
members=${1:?want the file of sweep --print} name=${2:?want the name of the TPU} zone=${3:?want its zone}
failed=0
while IFS= read -r line; do
    test -n "$line" || continue
    ${GCLOUD:-gcloud} compute tpus tpu-vm ssh "$name" --zone="$zone" --worker=all --command="$line" < /dev/null || {
        echo "failed: $line" >&2
        failed=1
    }
done < "$members"
exit $failed
