"""The arithmetic of a network, switched for a while: full float32, TF32, bfloat16, or 8-bit products on a CPU."""

from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

from mvm.options import choose

# How float32 products are computed, in torch's older and newer words, and the dtype that autocast casts them to.
PRECISIONS: dict[str, tuple[str, str, torch.dtype | None]] = {
    "fp32": ("highest", "ieee", None),
    "tf32": ("high", "tf32", None),
    "bf16": ("highest", "ieee", torch.bfloat16),
    "int8": ("highest", "ieee", None),  # but the large products of blocks: see CPU_WAYS
}

# How a CPU computes float32 blocks where no gradient is asked for: by the formulas of training; by the same with fewer
# passes over memory, equal but for rounding; or with the large products in 8-bit integers besides.
CPU_WAYS = ("plain", "lean", "int8")
_cpu_way: ContextVar[str] = ContextVar("cpu_way", default="lean")


@contextmanager
def cpu_way(name: str) -> Generator[None]:
    """Compute blocks on a CPU in the way of that name, one of CPU_WAYS, in this thread."""
    token = _cpu_way.set(choose("cpu_way", name, dict.fromkeys(CPU_WAYS, name)))
    try:
        yield
    finally:
        _cpu_way.reset(token)


def way_of(x: Tensor) -> str:
    """Return the way to compute a block of x: "plain" but for float32 on a CPU, without gradient or a compiler."""
    if torch.compiler.is_compiling() or torch.is_grad_enabled() or not x.is_cpu or x.dtype != torch.float32:
        return "plain"
    return "plain" if torch.is_autocast_enabled("cpu") else _cpu_way.get()


@contextmanager
def arithmetic(name: str, device: torch.device) -> Generator[None]:
    """Compute in the precision of that name, whatever surrounds it, and leave every switch as it was found."""
    older, newer, dtype = choose("precision", name, PRECISIONS)
    if name == "int8" and device.type != "cpu":
        raise ValueError(f"precision='int8' is for a CPU, not for {device.type}; there use bf16, or give --device cpu")
    cuda, cudnn, mkldnn = torch.backends.cuda, torch.backends.cudnn, torch.backends.mkldnn
    backends = cuda.matmul, cudnn.conv, mkldnn.matmul, mkldnn.conv  # ty: ignore (torch makes them at import)
    before, matmul = [backend.fp32_precision for backend in backends], torch.get_float32_matmul_precision()
    try:
        # Both: where the older switch and the newer ones disagree, torch raises an error when it asks itself.
        torch.set_float32_matmul_precision(older)
        for backend in backends:
            backend.fp32_precision = newer
        blocks = cpu_way("int8" if name == "int8" else "lean")
        with blocks, torch.autocast(device.type, dtype, enabled=dtype is not None):
            yield
    finally:
        torch.set_float32_matmul_precision(matmul)
        for backend, value in zip(backends, before, strict=True):
            backend.fp32_precision = value


def full_float32(device: torch.device) -> AbstractContextManager[None]:
    """Return the context without autocast, TF32 and its kin on CPUs: for figures that others must find again."""
    return arithmetic("fp32", device)
