#!/usr/bin/env bash
# Both stages on Imagenette in latents of CLIP at the same time on one GPU, and what they are worth, for docs/explanation/latents.md.
#
#   bash benchmarks/imagenette_both.sh ASSETS WORK STEPS1 STEPS2 [PART...]
#
# ASSETS and WORK as for imagenette_stage1.sh and imagenette_stage2.sh, which this calls. Latents need the encoder and their
# statistics alone, so that stage 2 need not wait for the decoder: a run of one step measures the statistics, both stages are
# trained on them, and samples are decoded by the decoder as it is in the end. PART: begin, stages, judge (all by default).
# WORK/minutes.txt has the seconds since 1970 at which each began and ended. STAGE1, STAGE2: more options of training.
set -euo pipefail
assets=$1 work=$2 steps1=$3 steps2=$4
shift 4
here=$(dirname "$0") mvm="python3 -m mvm" run=$work/recipe-$steps1
mkdir -p "$work"
note() { echo "$(date +%s) $*" >> "$work/minutes.txt"; }
stage2() { bash "$here/imagenette_stage2.sh" "$assets" "$work" "$work/rae" "$steps2" "$@"; }

stage1() {
  EXTRA=${STAGE1:-} bash "$here/imagenette_stage1.sh" "$assets" "$work" "$steps1" recipe &
  local trained=$!
  while kill -0 $trained && [ ! -f "$run/start.json" ]; do sleep 1; done
  cp -r "$work/statistics/rae" "$run/rae"  # statistics that are there are kept at the end, whatever the decoder
  wait $trained
  note stage 1 ends
}

[ $# -gt 0 ] || set -- begin stages judge
for part in "$@"; do
  note "$part begins"
  case $part in
    begin)
      $mvm data prepare "$assets/train" --out "$work/train" --size 224 --classes 10
      # shellcheck disable=SC2086
      $mvm train imagenette-rae-clip --data.path "$work/train" --encoder.name "$assets/clip" --reconstruction.gan 0 --reconstruction.lpips 0 \
        --train.steps 1 --train.warmup 0 --engine.compile off --preview.every 0 --no-report ${STAGE1:-} --out "$work/statistics"
      cp -r "$work/statistics/rae" "$work/rae" ;;
    stages)
      stage1 &
      EXTRA="--preview.every 0 ${STAGE2:-}" stage2 train > "$work/ddt.log" 2>&1
      note stage 2 ends
      wait $!
      for there in "$work/rae" "$work/ddt/codec"; do rm -r "$there" && cp -r "$run/rae" "$there"; done ;;
    judge)
      for what in rows curves scales samples; do stage2 $what > "$work/$what.log" 2>&1 && note "$what end" & done
      wait ;;
    *) echo "unknown part $part" >&2 && exit 2 ;;
  esac
  note "$part ends"
done
