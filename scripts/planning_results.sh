#!/bin/sh
# Makes everything in results/planning anew: an hour on two cores, most of it the TPU compiler's (pip install -e '.[tpu-aot]').
#   scripts/planning_results.sh [PYTHON]
set -e
cd "$(dirname "$0")/.."
python=${1:-python}
out=results/planning
$python -m mtf_experiments.plan --table1 --output=$out
for study in gin/planning/*.gin; do
    $python -m mtf_experiments.plan --study=planning/"$(basename "$study")" --output=$out
done
$python scripts/bench_layouts.py --output=$out
$python scripts/check_plans.py --output=$out
