"""CPU against GPU: is the noise bit-equal, do the pictures agree, how fast is each?

PYTHONPATH=src python benchmarks/device_parity.py > benchmarks/results/device_parity.md
"""

import os
import platform
import sys
import tempfile
import time
from pathlib import Path

import torch

import mvm
from mvm import noise
from mvm.data import digits
from mvm.likelihood import bits_per_dim
from mvm.path import MeanVelocity
from mvm.recipes import load_recipe, override
from mvm.solver import SOLVERS, sample
from mvm.training.loop import train
from mvm.verify import digits_noise, digits_oracle, rmse


def noise_mismatches(count: int = 512, elements: int = 3072) -> tuple[int, int]:
    """Return how many normals differ in any bit between the devices, and how many were compared."""
    seeds = torch.arange(count)
    here, there = (noise.normal(seeds.to(device), noise.STEP, (elements,)) for device in ("cpu", "cuda"))
    return int((here != there.cpu()).sum()), here.numel()


def picture_gap(solver: str, rho: float) -> float:
    """Return the largest difference of a pixel (range [-1, 1]) between CPU and GPU samples of the digits model."""
    seeds, out = torch.arange(64), []
    for device in ("cpu", "cuda"):
        model = mvm.load("digits").to(device)
        x = noise.initial(seeds.to(device), model.sample_shape)
        out.append(sample(model, x, solver=solver, rho=rho, condition=(seeds % 10).to(device), seeds=seeds).cpu())
    return float((out[0] - out[1]).abs().max())


def oracle_gap() -> float:
    law, x = digits_oracle(), digits_noise(64)
    gpu = sample(law.to("cuda").field(MeanVelocity()), x.cuda())
    return rmse(gpu.cpu(), sample(law.field(MeanVelocity()), x))


def likelihood_gap() -> float:
    """Return the largest difference in bits per dimension, 8 held-out digits, 10 steps."""
    few, found = digits("held-out")[:8], []
    for device in ("cpu", "cuda"):
        model, here = mvm.load("digits").to(device), few.to(device)
        bits = bits_per_dim(model, here.images, steps=10, seeds=range(8), condition=here.labels)
        found.append(bits.cpu())
    return float((found[0] - found[1]).abs().max())


def training_gap(steps: int = 20) -> tuple[float, bool]:
    """Return the largest relative gap of the loss, and whether 10 + resume + 10 steps are bit-equal on the GPU."""
    recipe = override(load_recipe("digits"), {"train.steps": str(steps), "train.log_every": "1", "train.warmup": "2"})
    losses: dict[str, list[float]] = {"cpu": [], "cuda": []}
    with tempfile.TemporaryDirectory() as folder:
        for device, log in losses.items():
            whole = train(
                recipe,
                Path(folder) / device,
                device=device,
                progress=False,
                on_log=lambda line, to=log: to.append(line["loss"]),
            )
        train(recipe, Path(folder) / "split", device="cuda", until=steps // 2, progress=False)
        split = train(recipe, Path(folder) / "split", device="cuda", resume=True, progress=False)
    pairs = zip(whole.state_dict().values(), split.state_dict().values(), strict=True)
    gap = max(abs(a / b - 1) for a, b in zip(losses["cpu"], losses["cuda"], strict=True))
    return gap, all(torch.equal(a, b) for a, b in pairs)


def noise_speed(device: str, batch: int = 512, elements: int = 3072) -> float:
    """Return normals per second, median of 5."""
    seeds, times = torch.arange(batch, device=device), []
    for _ in range(7):
        start = time.perf_counter()
        noise.normal(seeds, noise.STEP, (elements,))
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return batch * elements / sorted(times[2:])[2]


def main() -> None:
    if not torch.cuda.is_available():
        sys.exit("this benchmark needs a CUDA device")
    print("# CPU against GPU\n")
    print("Command: `PYTHONPATH=src python benchmarks/device_parity.py`. ", end="")
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}, {platform.machine()} host. ", end="")
    print(f"Commit {os.environ.get('MVM_COMMIT', 'not told (MVM_COMMIT)')}.\n")
    different, total = noise_mismatches()
    print(f"- normals that differ in any bit: {different} of {total:,}")
    for solver in SOLVERS:
        if solver == "adaptive":
            continue
        rho = 0.0 if solver in ("euler", "heun") else 1.0
        print(
            f"- largest pixel difference, digits model, {solver}, rho {rho:g}, nfe 26: {picture_gap(solver, rho):.1e}"
        )
    print(f"- RMSE between devices, digits oracle in float64, adams ODE, nfe 26: {oracle_gap():.1e}")
    print(f"- largest difference of bits per dimension, digits model: {likelihood_gap():.1e}")
    gap, equal = training_gap()
    print(f"- largest relative difference of the loss over 20 training steps: {gap:.1e}")
    print(f"- 10 steps + resume + 10 on the GPU give the weights of 20, bit for bit: {'yes' if equal else 'no'}")
    for device in ("cpu", "cuda"):
        print(f"- normals per second, {device}: {noise_speed(device):.2e}")


if __name__ == "__main__":
    main()
