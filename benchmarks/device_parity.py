"""CPU against GPU: is the noise bit-equal, do the pictures agree, how fast is each?

PYTHONPATH=src python benchmarks/device_parity.py > parity.txt
"""

import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import gelu, silu

import mvm
from mvm import noise
from mvm.data import digits
from mvm.likelihood import bits_per_dim
from mvm.network.extras import Local
from mvm.network.layers import NORM_EPS, modulate, norm_rotate, rotary_table, rotary_waves
from mvm.optim.optimizers import optimizers, step_unless
from mvm.path import MeanVelocity
from mvm.recipes import load_recipe, override
from mvm.solver import SOLVERS, sample
from mvm.training.loop import train
from mvm.verify.solvers import digits_oracle, rmse

MODES = (  # precision, compile, deterministic
    ("fp32", "off", False),
    ("fp32", "graph", False),
    ("fp32", "graph", True),
    ("bf16", "graph", False),
    ("bf16", "graph", True),
)


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
    law, x = digits_oracle(), noise.initial(torch.arange(64), (64,), torch.float64)
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


def training_gap(precision: str, compiled: str, deterministic: bool, steps: int = 20) -> tuple[float, bool]:
    """Return the largest relative gap of the loss, and whether 10 + resume + 10 steps are bit-equal on the GPU."""
    changes = {"train.steps": str(steps), "train.log_every": "1", "train.warmup": "2"}
    plain = override(load_recipe("digits"), changes)
    engine = {"precision": precision, "compile": compiled, "deterministic": str(deterministic)}
    recipe = override(plain, {f"engine.{name}": value for name, value in engine.items()})
    losses: dict[str, list[float]] = {"cpu": [], "cuda": []}
    with tempfile.TemporaryDirectory() as folder:
        for device, log in losses.items():
            whole = train(
                recipe if device == "cuda" else plain,
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


def _gaps(
    by_kernel: Callable, plain: Callable, inputs: Sequence[Tensor], wide: Sequence[Tensor], grads: Sequence[Tensor]
) -> list[float]:
    """Return ||kernel - plain|| / ||plain|| of values and gradients; plain in float64, `wide` at least in float32."""
    found = []
    for work, narrow, broad in ((by_kernel, inputs[0].dtype, torch.float32), (plain, torch.float64, torch.float64)):
        given = [t.detach().to(narrow, copy=True).requires_grad_() for t in inputs]
        given += [t.detach().to(broad, copy=True).requires_grad_() for t in wide]
        values = work(*given)
        values = values if isinstance(values, tuple) else (values,)
        torch.autograd.backward(values, [grad.to(narrow) for grad in grads])
        found.append([t.detach().double() for t in (*values, *(t.grad for t in given))])
    return [float((a - b).norm() / b.norm()) for a, b in zip(*found, strict=True)]


def _listed(gaps: Sequence[float]) -> str:
    return ", ".join(f"{gap:.1e}" for gap in gaps)


def placed_gaps(head: int, dtype: torch.dtype) -> list[float]:
    """Return the gaps of placed: its three values, gradients of the product and of both weights."""
    from mvm.network.fast.kernels import placed

    draw = torch.Generator(device="cuda").manual_seed(0)
    qkv = torch.randn(64, 256, 3, 12, head, generator=draw, device="cuda").to(dtype)
    grads = [torch.randn(64, 256, 12, head, generator=draw, device="cuda").to(dtype) for _ in range(3)]
    weights = [torch.rand(head, generator=draw, device="cuda") + 0.5 for _ in range(2)]
    cos, sin = (table.cuda() for table in rotary_waves(rotary_table(16, head)))
    waves = cos.double(), sin.double()

    def plain(qkv: Tensor, v: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value = qkv.unbind(2)
        return norm_rotate(query, v, *waves), norm_rotate(key, w, *waves), value

    return _gaps(lambda x, v, w: placed(x, v, w, cos, sin, NORM_EPS), plain, (qkv,), weights, grads)


def gated_gaps(width: int, dtype: torch.dtype) -> list[float]:
    """Return the gaps of gated: its value, gradients of both halves and of the bias."""
    from mvm.network.fast.kernels import gated

    draw = torch.Generator(device="cuda").manual_seed(0)
    both = torch.randn(64, 256, 2 * width, generator=draw, device="cuda").to(dtype)
    grad = torch.randn(64, 256, width, generator=draw, device="cuda").to(dtype)
    bias = torch.randn(2 * width, generator=draw, device="cuda")

    def plain(both: Tensor, bias: Tensor) -> Tensor:
        gate, up = (both + bias).chunk(2, dim=-1)
        return silu(gate) * up

    return _gaps(gated, plain, (both,), (bias,), (grad,))


def gated_product_gaps(width: int, hidden: int, rows: int) -> list[float]:
    """Return the gaps of gated_product in bf16: its value with a float32 bias, and with one in bf16."""
    from mvm.network.fast.kernels import gated_product

    draw = torch.Generator(device="cuda").manual_seed(0)
    x, weight = (torch.randn(n, width, generator=draw, device="cuda").bfloat16() for n in (rows, 2 * hidden))
    weight *= width**-0.5
    gaps = []
    for dtype in (torch.float32, torch.bfloat16):
        bias = torch.randn(2 * hidden, generator=draw, device="cuda").to(dtype)
        gate, up = (x.double() @ weight.double().t() + bias.double()).chunk(2, dim=-1)
        wanted = silu(gate) * up
        gaps.append(float((gated_product(x, weight, bias).double() - wanted).norm() / wanted.norm()))
    return gaps


def gelu_gaps(width: int, dtype: torch.dtype) -> list[float]:
    """Return the gaps of biased_gelu: its value, gradients of the product and of the bias."""
    from mvm.network.fast.kernels import biased_gelu

    draw = torch.Generator(device="cuda").manual_seed(0)
    x, grad = (torch.randn(64, 256, width, generator=draw, device="cuda").to(dtype) for _ in range(2))
    bias = torch.randn(width, generator=draw, device="cuda")
    return _gaps(biased_gelu, lambda x, bias: gelu(x + bias, approximate="tanh"), (x,), (bias,), (grad,))


def parted_gaps(head: int, dtype: torch.dtype) -> list[float]:
    """Return the gaps of parted: its three values, gradients of the product and of the bias that is in it."""
    from mvm.network.fast.kernels import parted

    draw = torch.Generator(device="cuda").manual_seed(0)
    qkv = torch.randn(64, 256, 3, 12, head, generator=draw, device="cuda").to(dtype)
    grads = [torch.randn(64, 256, 12, head, generator=draw, device="cuda").to(dtype) for _ in range(3)]
    bias = torch.zeros(3 * 12 * head, device="cuda")
    return _gaps(parted, lambda x, b: (x + b.view(3, 12, head)).unbind(2), (qkv,), (bias,), grads)


def residual_gaps(width: int, dtype: torch.dtype, centred: bool = False) -> list[float]:
    """Return the gaps of add_modulate: the sum, its modulated norm, gradients of both terms, bias and modulation."""
    from mvm.network.fast.kernels import add_modulate

    def plain(x: Tensor, y: Tensor, bias: Tensor, modulation: Tensor) -> tuple[Tensor, Tensor]:
        shift, scale, gate = modulation.chunk(6, dim=-1)[:3]
        x = x + gate * (y + bias)
        return x, modulate(x, shift, scale, centred)

    def by_kernel(x: Tensor, y: Tensor, bias: Tensor, modulation: Tensor) -> tuple[Tensor, Tensor]:
        shift, scale, gate = modulation.chunk(6, dim=-1)[:3]
        return add_modulate(x, y + bias.detach(), bias, gate, shift, scale, NORM_EPS, centred)

    draw = torch.Generator(device="cuda").manual_seed(0)
    x, y, *grads = (torch.randn(64, 256, width, generator=draw, device="cuda").to(dtype) for _ in range(4))
    modulation = torch.randn(64, 1, 6 * width, generator=draw, device="cuda").to(dtype)
    bias = torch.randn(width, generator=draw, device="cuda").to(dtype)
    return _gaps(by_kernel, plain, (x, y, bias, modulation), (), grads)


def norm_modulate_gaps(width: int, dtype: torch.dtype, centred: bool = False) -> list[float]:
    """Return the gaps of norm_modulate: its value, gradients of the tokens and of the modulation."""
    from mvm.network.fast.kernels import norm_modulate

    draw = torch.Generator(device="cuda").manual_seed(0)
    x, grad = (torch.randn(64, 256, width, generator=draw, device="cuda").to(dtype) for _ in range(2))
    modulation = torch.randn(64, 1, 2 * width, generator=draw, device="cuda").to(dtype)
    return _gaps(
        lambda x, m: norm_modulate(x, *m.chunk(2, dim=-1), NORM_EPS, centred),
        lambda x, m: modulate(x, *m.chunk(2, dim=-1), centred),
        (x, modulation),
        (),
        (grad,),
    )


def local_gaps(width: int, dtype: torch.dtype, side: int = 16, images: int = 64) -> list[float]:
    """Return the gaps of add_local: its value, gradients of the tokens and of the weight."""
    from mvm.network.fast.kernels import add_local

    draw = torch.Generator(device="cuda").manual_seed(0)
    x, grad = (torch.randn(images, side**2, width, generator=draw, device="cuda").to(dtype) for _ in range(2))
    weight = torch.randn(3, 3, width, generator=draw, device="cuda")
    layer = Local(width, side).to("cuda", torch.float64)

    def plain(x: Tensor, weight: Tensor) -> Tensor:
        return torch.func.functional_call(layer, {"weight": weight}, (x,))

    return _gaps(add_local, plain, (x,), (weight,), (grad,))


def cast_mismatches(rows: int, width: int, source: torch.dtype, dtype: torch.dtype) -> int:
    """Return how many bytes of rounded_both_ways differ from torch's own, of a random matrix and its transpose."""
    from mvm.network.fast.kernels.cast import rounded_both_ways

    draw = torch.Generator(device="cuda").manual_seed(0)
    x = torch.randn(rows, width, generator=draw, device="cuda")
    x = (x * torch.randn(rows, 1, generator=draw, device="cuda").exp()).to(source)
    factor = torch.finfo(dtype).max / x.abs().amax().float()
    wanted = (x.float() * factor).to(dtype)
    pairs = zip(rounded_both_ways(x, factor, dtype), (wanted, wanted.t()), strict=True)
    return sum(int((found.view(torch.uint8) != want.view(torch.uint8)).sum()) for found, want in pairs)


def compiled_noise_mismatches() -> int:
    """Return how many normals differ in any bit between compiled and eager noise, both on the GPU."""
    seeds = torch.arange(512, device="cuda")
    compiled = torch.compile(lambda seeds: noise.normal(seeds, noise.STEP, (3072,)))
    return int((compiled(seeds) != noise.normal(seeds, noise.STEP, (3072,))).sum())


def skips_bad_steps() -> bool:
    """Return whether an infinite gradient leaves weights and moments as they are, bit for bit."""
    network = torch.nn.Linear(8, 8, device="cuda")
    (optimizer,) = optimizers(load_recipe("digits").train, network.named_parameters())
    for bad in (False, True):
        before = [t.clone() for t in network.state_dict().values()]
        for parameter in network.parameters():
            parameter.grad = torch.full_like(parameter, torch.inf if bad else 1.0)
        step_unless(optimizer, torch.tensor(bad, device="cuda"))
    return all(torch.equal(a, b) for a, b in zip(before, network.state_dict().values(), strict=True))


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
        if solver in ("adaptive", "dopri5"):  # torchdiffeq is not on every GPU machine
            continue
        rho = 1.0 if SOLVERS[solver]().weak_order else 0.0
        print(
            f"- largest pixel difference, digits model, {solver}, rho {rho:g}, nfe 26: {picture_gap(solver, rho):.1e}"
        )
    print(f"- RMSE between devices, digits oracle in float64, adams ODE, nfe 26: {oracle_gap():.1e}")
    print(f"- largest difference of bits per dimension, digits model: {likelihood_gap():.1e}")
    for precision, compiled, ordered in MODES:
        gap, equal = training_gap(precision, compiled, ordered)
        mode = f"{precision}, compile {compiled}, deterministic {ordered}"
        print(f"- {mode}: largest relative difference of the loss over 20 steps: {gap:.1e}")
        print(f"  10 steps + resume + 10 on the GPU give the weights of 20, bit for bit: {'yes' if equal else 'no'}")
    for head, dtype in ((64, torch.float32), (72, torch.float32), (64, torch.bfloat16), (72, torch.bfloat16)):
        gaps = _listed(placed_gaps(head, dtype))
        print(f"- placed kernel, head {head}, {dtype}: relative errors of values and gradients: {gaps}")
    for width, dtype in ((1024, torch.float32), (1024, torch.bfloat16), (1000, torch.bfloat16)):
        print(f"- gated kernel, width {width}, {dtype}: likewise: {_listed(gated_gaps(width, dtype))}")
    if torch.cuda.get_device_capability() == (9, 0):  # of no other GPU
        for (width, hidden), rows in product(((384, 1024), (256, 688), (768, 2048)), (1000, 4096)):
            told = f"- gated_product kernel, {rows} x {width} to {hidden}, bf16: relative errors with a bias of"
            print(f"{told} float32, bf16: {_listed(gated_product_gaps(width, hidden, rows))}")
    for width, dtype in ((1536, torch.float32), (4608, torch.bfloat16)):
        print(f"- biased_gelu kernel, width {width}, {dtype}: likewise: {_listed(gelu_gaps(width, dtype))}")
    for head, dtype in ((64, torch.bfloat16), (72, torch.bfloat16)):
        print(f"- parted kernel, head {head}, {dtype}: likewise: {_listed(parted_gaps(head, dtype))}")
    for width, dtype in product((256, 384), (torch.float32, torch.bfloat16)):
        print(f"- add_local kernel, width {width}, {dtype}: likewise: {_listed(local_gaps(width, dtype))}")
    for side, images in ((9, 3), (1, 1)):  # grids of no power of two, widths of no whole block
        gaps = _listed(local_gaps(200, torch.float32, side, images))
        print(f"- add_local kernel, width 200, {side} x {side} tokens, {images} images, float32: likewise: {gaps}")
    for width, dtype, centred in product((384, 1152), (torch.float32, torch.bfloat16), (False, True)):
        for name, measure in (("add_modulate", residual_gaps), ("norm_modulate", norm_modulate_gaps)):
            told = f"- {name} kernel, width {width}, {dtype}, centred {centred}: likewise: "
            print(told + _listed(measure(width, dtype, centred)))
    for (rows, width), source in product(((16384, 1152), (4096, 6144), (1000, 1000)), (torch.bfloat16, torch.float32)):
        bad = [cast_mismatches(rows, width, source, dtype) for dtype in (torch.float8_e4m3fn, torch.float8_e5m2)]
        told = f"- rounded_both_ways kernel, {rows} x {width}, {source}: bytes that differ from torch's cast"
        print(f"{told}: e4m3 {bad[0]}, e5m2 {bad[1]} of {2 * rows * width:,}")
    print(f"- normals that differ in any bit when compiled: {compiled_noise_mismatches()} of {512 * 3072:,}")
    print(f"- a step with a gradient that is not finite changes no weight on the GPU: {skips_bad_steps()}")
    for device in ("cpu", "cuda"):
        print(f"- normals per second, {device}: {noise_speed(device):.2e}")


if __name__ == "__main__":
    main()
