#!/usr/bin/env bash
# Stage 1 on Imagenette in latents of CLIP, for docs/explanation/latents.md: the recipe, and shorter runs of it that change one thing.
#
#   bash benchmarks/imagenette_stage1.sh ASSETS WORK STEPS RUN...
#
# ASSETS has train, val (parquet of Imagenette at 224 pixels), clip, dino (encoders in transformers' format), vgg, alex
# (weights of LPIPS v0.1) and inception. RUN: recipe, no-gan, alex, batch-norm, last-block, four-blocks. Each is trained
# for STEPS steps, the discriminator from 40 % of them on and the decoder against it from 50 %, then judged on val.
# WORK/RUN-STEPS.json has the figures. EXTRA: more options of training. Runs named together are trained at the same time.
set -euo pipefail
assets=$1 work=$2 steps=$3
shift 3
mvm="python3 -m mvm"
mkdir -p "$work"

options() {  # options RUN: what differs from the recipe
  case $1 in
    recipe) ;;
    no-gan) echo "--reconstruction.gan 0" ;;
    alex) echo "--reconstruction.lpips_net alex --reconstruction.lpips_weights $assets/alex" ;;
    batch-norm) echo "--reconstruction.norm batch --reconstruction.last_norm true --reconstruction.disc_schedule shared" ;;
    last-block) echo "--encoder.layers last --reconstruction.tau 0.8" ;;
    four-blocks) echo "--encoder.layers 3,6,9,12" ;;
    *) echo "unknown run $1" >&2 && exit 2 ;;
  esac
}

one() {  # one RUN
  local run=$work/$1-$steps
  # shellcheck disable=SC2046
  $mvm train imagenette-rae-clip --data.path "$work/train" --encoder.name "$assets/clip" --reconstruction.encoder "$assets/dino" \
    --reconstruction.lpips_weights "$assets/vgg" --train.steps "$steps" --train.warmup $((steps / 13)) \
    --reconstruction.disc_start $((steps * 2 / 5)) --reconstruction.gan_start $((steps / 2)) --train.save_every "$steps" \
    --preview.every $((steps / 4)) $(options "$1") ${EXTRA:-} --no-report --out "$run" > "$run.log" 2>&1
  $mvm eval --reconstruct "$run/rae" --ref "$work/val" --metrics fid,fd-clip,psnr,ssim,lpips --inception "$assets/inception" --clip "$assets/clip" \
    --lpips "$assets/alex" --json "$run.json" >> "$run.log" 2>&1
}

for part in train val; do
  [ -d "$work/$part" ] || $mvm data prepare "$assets/$part" --out "$work/$part" --size 224 --classes 10
done
for run in "$@"; do one "$run" & done
wait
