#!/usr/bin/env bash
# REPA on and off, and what its encoder's semantics are worth: short runs of cifar10-small, three seeds each, trained at the same time.
#
#   bash benchmarks/repa_study.sh DATA REFERENCE WEIGHTS WORK STEPS NAME=ENCODER...
#
# DATA, REFERENCE, WEIGHTS as for cifar10_trials.sh, whose trials these are. NAME=ENCODER: an arm, e.g. clip=FOLDER; NAME= alone
# trains without. Arms run side by side, seeds one after another. WORK/NAME-SEED/TRIAL.json has each figure. SEEDS: 0 1 2 by default.
# EXTRA: more options of all runs. FID is of NUM images (5,000), ODE, 26 evaluations, without guidance and by 3 on [0.6, 0.8].
set -euo pipefail
data=$1 reference=$2 inception=$3 work=$4 steps=$5
shift 5
here=$(dirname "$0")
mkdir -p "$work"

for arm in "$@"; do
  name=${arm%%=*} encoder=${arm#*=}
  for seed in ${SEEDS:-0 1 2}; do
    RECIPE=cifar10-small BEGAN="" SCALES=1,3 ENCODER=$encoder EXTRA="--seed $seed --no-report ${EXTRA:-}" bash "$here/cifar10_trials.sh" \
      "$data" "$reference" "$inception" "$work/$name-$seed" "$steps" "$([ -n "$encoder" ] && echo repa || echo local)" > "$work/$name-$seed.log" 2>&1 || echo "$name-$seed failed"
  done &
done
wait
python3 - "$work" <<'P'
import json, pathlib, statistics, sys
work, arms = pathlib.Path(sys.argv[1]), {}
for file in sorted(work.glob("*/*.json")):
    name, seed = file.parent.name.rsplit("-", 1)
    arms.setdefault(name, {})[seed] = json.loads(file.read_text())
lines = ["| | FID by seed | mean | guided, by seed | mean | images/s |", "|---|---|---|---|---|---|"]
for name, runs in arms.items():
    cells = [name]
    for scale in ("1.0", "3.0"):
        fids = [run[f"fid cfg {scale}"] for run in runs.values()]
        cells += [", ".join(f"{fid:.2f}" for fid in fids), f"{statistics.mean(fids):.2f}"]
    rates = ", ".join(f"{run['images_per_second']:,.0f}" for run in runs.values())
    lines.append(f"| {' | '.join([*cells, rates])} |")
(work / "repa.md").write_text("\n".join(lines) + "\n")
print("\n".join(lines))
P
