"""The arithmetic of a network, switched for a while: full float32, TF32 or bfloat16."""

from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

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
    cuda, mkldnn = torch.backends.cuda, torch.backends.mkldnn
    cudnn: Any = torch.backends.cudnn  # torch makes its operators at import, and those of mkldnn
    switches: tuple[Any, ...] = cudnn.conv, cudnn.rnn, cuda.matmul, mkldnn.matmul, mkldnn.conv  # ty: ignore
    before, matmul = [switch.fp32_precision for switch in switches], torch.get_float32_matmul_precision()
    try:
        # Older and newer switches, and both operators of cuDNN: where they disagree, torch raises an error when it asks
        # itself. They agree even when two threads come here and leave in turn.
        torch.set_float32_matmul_precision(older)
        cudnn.allow_tf32 = newer == "tf32"
        for switch in switches:
            switch.fp32_precision = newer
        with torch.autocast(device.type, dtype, enabled=dtype is not None):
            yield
    finally:
        torch.set_float32_matmul_precision(matmul)
        cudnn.allow_tf32 = "tf32" in before[:2]
        for switch, value in zip(switches, before, strict=True):
            switch.fp32_precision = value


def full_float32(device: torch.device) -> AbstractContextManager[None]:
    """Return the context without autocast, TF32 and its kin on CPUs: for figures that others must find again."""
    return arithmetic("fp32", device)
