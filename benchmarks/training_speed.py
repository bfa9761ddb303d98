"""Training speed at the sizes that SiT publishes: batch 256, 256 tokens (32x32x4, patch 2), one GPU.

    python benchmarks/training_speed.py S B XL XL-nothing B-repa B-live --json benchmarks/results/training-speed.json

A step is everything: batch, forward, backward, clipping, AdamW, one average of the weights. SiT's figures are of its
published code on the same machine in bf16 with torch.compile, without EMA's cost counted apart.
--warm runs a few steps of each case and measures nothing: compilation is then found in the cache.
--plain-local: the local convolution by the compiler, whatever kernels do the rest (case cifar10-small, batch 512).
"""

import argparse
import gc
import json
import subprocess
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from mvm.bench import RandomBank, bench_training, machine, random_images, table
from mvm.distributed.processes import EngineConfig, Processes
from mvm.network import DiTConfig
from mvm.network.extras import Local
from mvm.network.fast import gpu
from mvm.network.pretrained import load_encoder
from mvm.objective import RepaConfig
from mvm.optim.optimizers import TrainConfig
from mvm.recipes import DataConfig, Recipe, load_recipe, override
from mvm.training.features import FeatureBank, LiveBank

BATCH = 256
SIT_COMPILED = {"S": 6918, "B": 2686, "XL": 588}  # images per second
SIT_HEADS = {"XL": 16}  # of 72; our own XL has 18 of 64, as the other sizes have in both
TEACHER = (256, 768)  # tokens and width of DINOv2-B at 224 pixels


def recipe(size: str, channels: int = 4, **engine: Any) -> Recipe:
    """Return the published shape at one size."""
    return Recipe(
        name=size,
        data=DataConfig(name="folder", path="random", channels=channels, size=32, classes=1000),
        network=DiTConfig(size=size, patch=2, heads=SIT_HEADS.get(size, 0)),
        train=TrainConfig(batch=BATCH),
        engine=EngineConfig(**engine),
    )


def classic(chosen: Recipe) -> Recipe:
    """Return the recipe with SiT's own blocks: LayerNorm, sine positions, GELU, no norm of queries and keys."""
    return replace(chosen, network=replace(chosen.network, design="classic"))


def with_heads(chosen: Recipe, heads: int) -> Recipe:
    """Return the recipe with another number of attention heads; depth, width and multiply-adds stay."""
    return replace(chosen, network=replace(chosen.network, heads=heads))


def cached_teacher(chosen: Recipe, device: torch.device) -> FeatureBank:
    """Return features that only need to be looked up."""
    return RandomBank(4 * chosen.train.batch, *TEACHER, device)


def live_teacher(chosen: Recipe, device: torch.device) -> FeatureBank:
    """Return DINOv2-B with random weights, run on every batch: it costs what the trained one does."""
    from transformers import Dinov2Config, Dinov2Model

    with tempfile.TemporaryDirectory() as folder:
        Dinov2Model(Dinov2Config(image_size=224)).save_pretrained(folder)  # its defaults are the B size
        encoder = load_encoder(folder, 224).to(device).to(torch.bfloat16)
    return LiveBank(encoder, random_images(chosen, 4 * chosen.train.batch).images.to(device), encoder.side)


# as benchmarks/equal_terms.sh trains it: every kernel, one average
EQUAL_TERMS = {"engine.kernels": "true", "train.ema": "0.998", "train.power": "", "train.snapshot_every": "0"}
CASES = {
    "S": (recipe("S"), None),
    "B": (recipe("B"), None),
    "S-kernels": (recipe("S", kernels=True), None),
    "B-kernels": (recipe("B", kernels=True), None),
    "S-deterministic": (recipe("S", deterministic=True), None),
    "B-deterministic": (recipe("B", deterministic=True), None),
    "XL-kernels": (recipe("XL", recompute=0.25, kernels=True), None),
    "XL": (recipe("XL", recompute=0.25), None),
    "XL-18-heads": (with_heads(recipe("XL", recompute=0.25), 18), None),  # our own XL
    "XL-18-heads-kernels": (with_heads(recipe("XL", recompute=0.25, kernels=True), 18), None),
    "XL-18-heads-kernels-whole": (with_heads(recipe("XL", kernels=True), 18), None),  # nothing recomputed
    "S-classic": (classic(recipe("S")), None),
    "B-classic": (classic(recipe("B")), None),
    "S-classic-kernels": (classic(recipe("S", kernels=True)), None),
    "B-classic-kernels": (classic(recipe("B", kernels=True)), None),
    "XL-classic-kernels": (classic(recipe("XL", recompute=0.25, kernels=True)), None),
    "XL-classic-kernels-whole": (classic(recipe("XL", kernels=True)), None),  # nothing recomputed
    "XL-classic-18-heads-kernels-whole": (classic(with_heads(recipe("XL", kernels=True), 18)), None),
    "XL-classic-fp8-whole": (classic(recipe("XL", kernels=True, fp8="tensor")), None),
    "XL-classic-18-heads-sampled-whole": (classic(with_heads(recipe("XL", kernels=True, fp8="sampled"), 18)), None),
    "XL-classic-sampled-whole": (classic(recipe("XL", kernels=True, fp8="sampled")), None),
    "XL-18-heads-sampled-whole": (with_heads(recipe("XL", kernels=True, fp8="sampled"), 18), None),
    "XL-classic-18-heads-fp8-whole": (classic(with_heads(recipe("XL", kernels=True, fp8="tensor"), 18)), None),
    "S-fp8": (recipe("S", kernels=True, fp8="tensor"), None),
    "B-fp8": (recipe("B", kernels=True, fp8="tensor"), None),
    "XL-fp8": (recipe("XL", recompute=0.25, kernels=True, fp8="tensor"), None),
    "XL-fp8-row": (recipe("XL", recompute=0.25, kernels=True, fp8="row"), None),
    "XL-18-heads-fp8": (with_heads(recipe("XL", recompute=0.25, kernels=True, fp8="tensor"), 18), None),
    "XL-18-heads-fp8-whole": (with_heads(recipe("XL", kernels=True, fp8="tensor"), 18), None),  # nothing recomputed
    "XL-18-heads-fp8-row": (with_heads(recipe("XL", recompute=0.25, kernels=True, fp8="row"), 18), None),
    "XL-18-heads-fp8-partly": (with_heads(recipe("XL", recompute=0.25, kernels=True, fp8="partly"), 18), None),
    "XL-half": (recipe("XL", recompute=0.5), None),
    "XL-products": (recipe("XL", recompute=1.0), None),
    "XL-nothing": (recipe("XL", recompute=1.0, keep="nothing"), None),
    "S-repa": (replace(recipe("S", channels=3), repa=RepaConfig(encoder="random")), cached_teacher),
    "B-repa": (replace(recipe("B", channels=3), repa=RepaConfig(encoder="random")), cached_teacher),
    "B-live": (replace(recipe("B", channels=3), repa=RepaConfig(encoder="random", cache="none")), live_teacher),
    "cifar10-small": (override(load_recipe("cifar10-small"), EQUAL_TERMS), None),
    "smoke": (replace(recipe("S"), network=DiTConfig(size="tiny"), train=TrainConfig(batch=4)), None),
}


def measure(name: str, place: Processes, steps: int) -> dict[str, Any]:
    """Return the figures of one case."""
    chosen, teacher = CASES[name]
    torch.compiler.reset()
    bank = None if teacher is None else teacher(chosen, place.device)
    found = bench_training(chosen, place, steps=steps, teacher=bank, progress=False)
    del bank
    gc.collect()
    if place.device.type == "cuda":
        torch.cuda.empty_cache()
    engine = chosen.engine
    told = {"case": name, "recompute": engine.recompute, "keep": engine.keep if engine.recompute else "all"}
    published = SIT_COMPILED.get(name.partition("-")[0])
    against = {"over_sit": found["images_per_second"] / published} if published else {}
    return {**told, **found, **against}


def commit() -> str:
    """Return the commit measured; unknown outside a checkout."""
    asked = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return asked.stdout.strip() or "unknown"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="+", choices=CASES)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--warm", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--commit", default=commit())
    parser.add_argument("--plain-local", action="store_true")
    options = parser.parse_args()
    if options.plain_local:
        gpu.BLOCKS = {kind: faster for kind, faster in gpu.BLOCKS.items() if kind is not Local}
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    place = Processes(device=device)
    rows = []
    for name in options.cases:
        rows.append(measure(name, place, 1 if options.warm else options.steps))
        print(json.dumps(rows[-1]), flush=True)
        if options.json is not None:  # after every case: a run that is cut short keeps what it has
            told = {"commit": options.commit, "batch": BATCH, "machine": machine(device), "rows": rows}
            options.json.parent.mkdir(parents=True, exist_ok=True)
            options.json.write_text(json.dumps(told, indent=2) + "\n")
    print(table(rows, "case"))


if __name__ == "__main__":
    main()
