"""Processes and devices: torchrun, precision, shares of a batch; and the `engine` section of a recipe.

Nothing here changes what is computed: global batch, seeds and weights are the same for any number of
processes, up to the rounding of sums. All that several processes need is torch's own; gloo runs it on a CPU.
"""

import os
from collections.abc import Generator, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.rendezvous import rendezvous

from mvm.network.fast.float8 import GRANULARITY
from mvm.options import check

PRECISIONS: dict[str, torch.dtype | None] = {"auto": None, "fp32": torch.float32, "bf16": torch.bfloat16}
PATIENCE = 1800  # seconds that processes wait for each other: rank 0 may be writing a report meanwhile


@dataclass(frozen=True)
class EngineConfig:
    """How a run is executed: precision, compilation, memory, several GPUs; may change on resume.

    With `compile` blocks the gradients of a block are reduced while the next is computed. Values rounded by `fp8` are
    not stored, and samples are not made with it.
    """

    parallel: str = "ddp"
    """Data parallelism: every process has all weights (ddp), or a shard of them (fsdp). One of: ddp, fsdp."""
    shard: int = 0
    """Processes that share a copy of the weights under fsdp, e.g. 8 of 64 (hybrid sharding). 0: all of them."""
    precision: str = "auto"
    """Precision of matrix products (mixed precision); auto is bf16 on a GPU and fp32 on a CPU.
    One of: auto, fp32, bf16."""
    fp8: str = "off"
    """FP8 matrix products of the blocks in training: with a scale per tensor, per tensor from a sample of its rows, per
    row, or per row except for gradients of weights (partly). One of: off, tensor, sampled, row, partly."""
    compile: str = "auto"
    """torch.compile: block by block, the full step, or full and replayed as CUDA graphs. auto: off on a CPU, graph on
    one GPU (full with accumulation), blocks on more. One of: auto, off, blocks, full, graph."""
    recompute: float = 0.0
    """Activation checkpointing: fraction of the blocks whose activations are recomputed in the backward pass, to save
    memory; 0: none."""
    keep: str = "products"
    """What recomputed blocks keep: matrix products and attention (costs little time), or nothing (saves most memory).
    One of: products, nothing."""
    kernels: bool = False
    """Use the GPU kernels of this package, for bf16."""
    deterministic: bool = False
    """Deterministic GPU kernels: two runs, or a run and its continuation, are bit-equal also when compiled.
    On a CPU they always are."""
    accumulate: int = 1
    """Gradient accumulation: parts into which each process splits its share of train.batch, to save memory."""
    resident: str = "auto"
    """Where training images are held: in device memory (GPU), or in files read one step ahead (host); auto: on the
    device if they fit. One of: auto, device, host."""
    timeout: int = PATIENCE
    """Timeout in seconds: how long processes wait for one that hangs or was stopped, before they end with an error."""

    def __post_init__(self) -> None:
        check(
            "engine", self, parallel=("ddp", "fsdp"), precision=PRECISIONS, fp8=("off", *GRANULARITY),
            compile=("auto", "off", "blocks", "full", "graph"), keep=("products", "nothing"),
            resident=("auto", "device", "host"), shard=0, accumulate=1, timeout=1, recompute=(0, 1),
        )  # fmt: skip


@dataclass(frozen=True)
class Processes:
    """This process among `world`: rank, and the device it computes on."""

    rank: int = 0
    world: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @property
    def main(self) -> bool:
        """Whether this process writes the files."""
        return self.rank == 0

    def share(self, size: int) -> slice:
        """Return this process's part of a batch: contiguous, sizes at most one apart."""
        if size < self.world:
            raise ValueError(f"train.batch={size} is smaller than the {self.world} processes; use a larger batch")
        return [*parts_of(size, self.world)][self.rank]

    def sum(self, values: Tensor) -> Tensor:
        """Return the sum over all processes."""
        if self.world > 1:
            dist.all_reduce(values)
        return values

    def any(self, flag: bool) -> bool:
        """Return whether the flag is set in any process; all must ask. Reduced on the CPU, not to wait for a GPU."""
        return bool(self.sum(torch.tensor(float(flag))) > 0)

    def max(self, value: int) -> int:
        """Return the largest value of all processes; all must ask."""
        return int(self.gather(torch.tensor([value])).max())

    def gather(self, mine: Tensor) -> Tensor:
        """Return CPU tensors of one shape from all processes, one after another along the first axis."""
        if self.world == 1:
            return mine
        parts = [torch.empty_like(mine) for _ in range(self.world)]
        dist.all_gather(parts, mine)
        return torch.cat(parts)

    def broadcast(self, value: Any) -> Any:
        """Return rank 0's value in every process."""
        box = [value]
        if self.world > 1:
            dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
        return box[0]

    def share_tensor(self, values: Tensor, owner: int) -> Tensor:
        """Return the tensor of the process `owner`; the others give one of its shape and type, which is filled."""
        if self.world > 1:
            dist.broadcast(values.reshape(-1).view(torch.uint8), src=owner)  # gloo does not know every type
        return values

    @contextmanager
    def together(self) -> Generator[None]:
        """Run the body in all processes; an error in one is raised in all, of several that of the lowest rank."""
        failure: Exception | None = None
        try:
            yield
        except Exception as error:
            failure = error
        messages = [str(failure or "")] * self.world
        if self.world > 1:
            dist.all_gather_object(messages, messages[0])
        if message := next(filter(None, messages), ""):
            raise failure if failure and str(failure) == message else ValueError(message)

    @contextmanager
    def main_first(self) -> Generator[None]:
        """Run the body on rank 0 before any other process; an error there stops all of them."""
        failure: Exception | None = None
        if self.main:
            try:
                yield
            except Exception as error:  # broadcast, then raised here
                failure = error
        message = self.broadcast(f"{type(failure).__name__}: {failure}" if failure else "")
        if message:
            raise failure or ValueError(f"the first process failed: {message}")
        if not self.main:
            yield


@contextmanager
def processes(device: torch.device | str = "cpu", timeout: int = PATIENCE) -> Generator[Processes]:
    """Yield this process among those of torchrun's environment, else as the only one; ends the group on the way out.

    timeout: seconds that the processes wait for each other.
    """
    device = torch.device(device)
    if dist.is_initialized() or "WORLD_SIZE" not in os.environ:
        ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        yield Processes(*ranks, device)
        return
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    store, rank, world = next(rendezvous("env://", timeout=timedelta(seconds=PATIENCE)))
    # torchrun keeps one store over its restarts, where the new processes would find the addresses of the dead and wait
    # for them (pytorch#135712): each attempt has its own part of it. The count of restarts is the same in all processes
    # only on one node; several nodes set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 (docs/how-to/many-gpus.md).
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if os.environ.get("GROUP_WORLD_SIZE") == "1" else "0"
    store = dist.PrefixStore(f"attempt-{attempt}", store)
    # gloo as well as nccl: objects and flags are exchanged on the CPU
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timedelta(seconds=timeout))
    try:
        yield Processes(rank, world, device)
    finally:
        dist.destroy_process_group()


def precision(config: EngineConfig, device: torch.device) -> torch.dtype:
    """Return the dtype of matrix products."""
    return PRECISIONS[config.precision] or (torch.bfloat16 if device.type == "cuda" else torch.float32)


def autocast(config: EngineConfig, device: torch.device) -> AbstractContextManager[Any]:
    """Return the context in which matrix products run in the asked precision; weights stay float32."""
    dtype = precision(config, device)
    return nullcontext() if dtype == torch.float32 else torch.autocast(device.type, dtype)


@contextmanager
def determinism(config: EngineConfig) -> Generator[None]:
    """Inside, GPU kernels add in one order, when `engine.deterministic`; torch refuses those that cannot."""
    if not config.deterministic:
        yield
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS asks for it; read at its first product
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def parts_of(size: int, parts: int) -> Iterator[slice]:
    """Yield contiguous slices of range(size), sizes at most one apart, none empty."""
    parts = min(parts, size)
    for part in range(parts):
        yield slice(size * part // parts, size * (part + 1) // parts)
