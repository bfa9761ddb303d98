#!/usr/bin/env bash
# Short runs that choose the CIFAR-10 recipe, one change at a time; each is trained for a fixed number of steps and judged by FID of 5,000 images.
#
#   bash benchmarks/cifar10_trials.sh DATA REFERENCE WEIGHTS WORK STEPS TRIAL...
#
# DATA: prepared CIFAR-10. REFERENCE: its moments (mvm data stats). WEIGHTS: of the FID network. EXTRA: more options for all of them.
# RECIPE: cifar10, or cifar10-small. ENCODER: of the trials with alignment, a folder or name with 16x16 tokens at 224 pixels (DINOv2 ViT-S/14 here).
# SCALES: of guidance on [0.6, 0.8] that are judged, by the ODE at 26 evaluations.
# FID of 5,000 images has a bias of about +5: good for comparing trials, not with published figures. WORK/TRIAL.json holds each result.
set -euo pipefail
data=$1 reference=$2 inception=$3 work=$4 steps=$5
shift 5
mkdir -p "$work"

began=${BEGAN---train.lr 1e-3 --objective.weight none}  # as the recipe was when the trials began; BEGAN= takes it as it is
plain="--network.skip false --network.local false"  # the recipe has both, and Muon
aligned="--repa.encoder ${ENCODER:-} --repa.resolution 224"

options() {  # options TRIAL: what differs from where they began
  case $1 in
    adamw) echo "--train.optimizer adamw $plain" ;;
    muon) echo "$plain" ;;
    muon-fast) echo "$plain --train.lr 3e-3" ;;
    skip) echo "--network.local false" ;;
    local) ;;
    clean) echo "--path.law.mean 1.2 --path.law.std 1.2" ;;
    noisy) echo "--path.law.mean 0" ;;
    narrow) echo "--path.law.std 1.2" ;;
    as-flow) echo "--objective.weight flow" ;;
    unit) echo "--codec.scale 2 --path.law.mean -0.1931471806" ;;  # pixels of std 1 instead of 0.5, the same noise: 0.5 - log(2)
    unit-as-flow) options unit && options as-flow ;;
    augment) echo "--data.augment 0.12" ;;
    dropout) echo "--network.dropout 0.1" ;;
    slow) echo "--train.lr 5e-4" ;;
    fast) echo "--train.lr 2e-3" ;;
    faster) echo "--train.lr 4e-3" ;;
    local-adamw) echo "--train.optimizer adamw" ;;
    local-adamw-slow) echo "--train.optimizer adamw --train.lr 3e-4" ;;
    small-batch) echo "--train.batch 256" ;;
    repa) echo "$aligned" ;;
    repa-conv) echo "$aligned --repa.projector conv --repa.normalise 0.6" ;;
    repa-clean) echo "$aligned --path.law.mean 1.2 --path.law.std 1.2" ;;
    repa-noisy) echo "$aligned --path.law.mean 0" ;;
    repa-fast) echo "$aligned --train.lr 2e-3" ;;
    repa-adamw) echo "$aligned --train.optimizer adamw" ;;
    repa-again) echo "$aligned --seed 1" ;;
    *) echo "unknown trial '$1'" >&2; exit 2 ;;
  esac
}

for trial in "$@"; do
  changes=$(options "$trial")
  SECONDS=0
  # shellcheck disable=SC2086
  python3 -m mvm train "${RECIPE:-cifar10}" --data.path "$data" --train.steps "$steps" --train.warmup 200 --train.save_every "$steps" --train.snapshot_every 0 \
    --train.power 0.1 --train.keep_best false --preview.every 0 $began $changes ${EXTRA:-} --out "$work/$trial" > "$work/$trial.log" 2>&1
  trained=$SECONDS
  python3 -m mvm sweep "$work/$trial" --ref "$reference" --metrics fid --inception "$inception" --num "${NUM:-5000}" --batch "${BATCH:-1000}" \
    --nfe 26 --rho 0 --cfg "${SCALES:-1,3}" --interval 0.6,0.8 --precision bf16 --out "$work/$trial-sweep" >> "$work/$trial.log" 2>&1
  python3 - "$work" "$trial" "$trained" <<'P'
import csv, json, pathlib, sys
work, trial, seconds = pathlib.Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
lines = [json.loads(line) for line in (work / trial / "metrics.jsonl").read_text().splitlines()]
steps = [line for line in lines if "loss" in line]
rates = sorted(line["images_per_second"] for line in steps)
rows = list(csv.DictReader((work / f"{trial}-sweep" / "results.csv").open()))
told = {"trial": trial, "seconds": seconds, "steps": steps[-1]["step"], "loss": steps[-1]["loss"], "images_per_second": rates[len(rates) // 2]}
told |= {f"fid cfg {row['cfg']}": float(row["fid value"]) for row in rows}
(work / f"{trial}.json").write_text(json.dumps(told) + "\n")
print(json.dumps(told), flush=True)
P
done
