#!/usr/bin/env bash
# Both stages on Imagenette-224 on one GPU, for docs/explanation/latents.md: reconstruction by averaged layers and by the last one, a DDT in the
# latents, the paper's four rows (ODE and SDE, without and with internal guidance, 90 evaluations), scales of internal guidance, sharing.
#
#   bash benchmarks/imagenette_study.sh PARQUET ENCODER LPIPS WEIGHTS WORK [STAGE1_STEPS [STAGE2_STEPS]]
#
# PARQUET: folder of Imagenette's parquet. ENCODER: folder of a DINOv2 ViT-S/14. LPIPS: its weights. WEIGHTS: of the FID network.
# FID of 2,000 samples against 2,000 images has a large bias and is no published FID; fd-effnet has fewer dimensions. Both are told.
set -euo pipefail
parquet=$1 encoder=$2 lpips=$3 inception=$4 work=$5 stage1=${6:-5000} stage2=${7:-4000}
mvm="python3 -m mvm"
mkdir -p "$work"
$mvm data prepare "$parquet" --out "$work/imagenette" --size 224 --classes 10

rae() {  # rae NAME LAYERS
  $mvm train imagenette-rae-s --data.path "$work/imagenette" --encoder.name "$encoder" --encoder.layers "$2" \
    --reconstruction.lpips_weights "$lpips" --train.steps "$stage1" --out "$work/rae-$1"
}
rae averaged 3,6,9,12
rae last last
for kind in averaged last; do  # rFID of all 2,000 images; 1,800 of them were trained on
  $mvm eval "$work/rae-$kind/rae" --ref "$work/imagenette" --metrics fid,kid,fd-effnet --inception "$inception" --json "$work/restored-$kind.json"
done

$mvm train imagenette-ddt-s --data.path "$work/imagenette" --codec.path "$work/rae-averaged/rae" --train.steps "$stage2" --out "$work/ddt"

judged="--ref $work/imagenette --metrics fid,kid,fd-effnet --inception $inception --num 2000 --batch 200 --precision bf16 --compile"
$mvm sweep "$work/ddt" $judged --nfe 90 --rho 0,0.75 --internal 1,1.45 --out "$work/rows"
$mvm sweep "$work/ddt" $judged --nfe 90 --rho 0.75 --internal 2,3 --out "$work/scales"
$mvm sweep "$work/ddt" $judged --nfe 90 --rho 0 --share 0,0.25,0.5,0.75 --out "$work/sharing"
