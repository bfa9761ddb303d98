"""The arithmetic of a network, switched for a while: full float32, TF32 or bfloat16."""

from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager

import torch

from mvm.options import choose

# How float32 products are computed, in torch's older and newer words, and the dtype that autocast casts them to.
PRECISIONS: dict[str, tuple[str, str, torch.dtype | None]] = {
    "fp32": ("highest", "ieee", None),
    "tf32": ("high", "tf32", None),
    "bf16": ("highest", "ieee", torch.bfloat16),
    "int8": ("highest", "ieee", None),  # but the large products of blocks: mvm.network.fast.int8
}


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
        with torch.autocast(device.type, dtype, enabled=dtype is not None):
            yield
    finally:
        torch.set_float32_matmul_precision(matmul)
        for backend, value in zip(backends, before, strict=True):
            backend.fp32_precision = value


def full_float32(device: torch.device) -> AbstractContextManager[None]:
    """Return the context without autocast, TF32 and its kin on CPUs: for figures that others must find again."""
    return arithmetic("fp32", device)
