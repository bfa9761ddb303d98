#!/usr/bin/env bash
# Stage 2 on Imagenette in latents of CLIP, for docs/explanation/latents.md: training, then what its samples are worth.
#
#   bash benchmarks/imagenette_stage2.sh ASSETS WORK RAE STEPS PART...
#
# ASSETS and WORK as for imagenette_stage1.sh, whose data are used; RAE: RUN/rae of its run. PART, one after another:
#   train    imagenette-ddt-clip for STEPS steps; EXTRA: more options of it
#   rows     the paper's four: ODE and SDE, without and with internal guidance SCALE, 90 evaluations, as many samples as images
#   curves   FID of FEW samples against the number of evaluations, adams and sa, ODE and SDE, times shifted and not
#   scales   FID of FEW samples against the scale of internal guidance, SDE
#   samples  64 of the classes in turn, not picked
# Frechet distances are against the images of training; val's are those of `rows` once more, against images never seen.
set -euo pipefail
assets=$1 work=$2 rae=$3 steps=$4
shift 4
mvm="python3 -m mvm" run=$work/ddt scale=${SCALE:-1.45} few=${FEW:-2000}
judging="--inception $assets/inception --clip $assets/clip --batch ${BATCH:-256} ${FAST---precision bf16 --compile}"
seen="--ref $work/train --metrics fid,kid,fd-clip $judging"

for part in "$@"; do
  # shellcheck disable=SC2086
  case $part in
    train)
      $mvm train imagenette-ddt-clip --data.path "$work/train" --codec.path "$rae" --train.steps "$steps" --train.save_every "$steps" \
        --preview.every $((steps / 3)) ${EXTRA:-} --no-report --out "$run" ;;
    rows)
      $mvm sweep "$run" $seen --num "${NUM:-9469}" --jackknife 20 --nfe 90 --rho 0,0.75 --internal "1,$scale" --out "$work/rows"
      $mvm sweep "$run" --ref "$work/val" --metrics fid,fd-clip $judging --num "${VAL:-3925}" --nfe 90 --rho 0.75 --internal "$scale" --out "$work/val-rows" ;;
    curves)
      $mvm sweep "$run" $seen --num "$few" --solvers adams,sa --nfe "${NFES:-7,13,26,50}" --rho 0,0.75 --shift 0,1 --internal "$scale" --out "$work/curves" ;;
    scales)
      $mvm sweep "$run" $seen --num "$few" --nfe 50 --rho 0.75 --internal 1,1.2,1.45,1.8,2.5 --out "$work/scales" ;;
    samples)
      $mvm sample "$run" --num 64 --nfe 90 --rho 0.75 --internal "$scale" --out "$work/samples.png" ;;
    *) echo "unknown part $part" >&2 && exit 2 ;;
  esac
done
