"""A learner made ready for its processes and device: DDP or FSDP2, compiled, in the asked precision."""

import math
from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from mvm.distributed.processes import EngineConfig, Processes, autocast, precision
from mvm.network import DDT, DiT, Own, blocks_of
from mvm.network.fast import cpu, gpu, recompute

FP8_CAPABILITY = (8, 9)  # of the first GPUs with 8-bit products: Ada; Hopper has 9.0


def compile_mode(config: EngineConfig, processes: Processes, own: bool = False) -> str:
    """Return "off", "blocks", "full" or "graph", with auto decided: off for a network of the user's own."""
    if config.compile == "auto":
        if own or processes.device.type == "cpu":
            return "off"
        return "blocks" if processes.world > 1 else "graph" if config.accumulate == 1 else "full"
    if config.compile in ("full", "graph") and config.parallel == "fsdp" and processes.world > 1:
        raise ValueError(f"engine.compile='{config.compile}' does not go with engine.parallel='fsdp'; use blocks")
    if config.compile == "graph" and (processes.device.type != "cuda" or processes.world > 1 or config.accumulate > 1):
        raise ValueError("engine.compile='graph' needs one GPU and engine.accumulate=1; use full, or auto")
    return config.compile


def _blocks(network: DiT | DDT | Own) -> list[nn.Module]:
    """Return the blocks that are compiled and sharded one by one; none of an own network that has no `blocks`."""
    return network.blocks if isinstance(network, Own) else blocks_of(network)


def _shard(config: EngineConfig, learner: nn.Module, network: DiT | DDT | Own, processes: Processes) -> None:
    """Shard weights, gradients and moments over the processes (FSDP2), in copies of `engine.shard` processes each."""
    size, blocks = config.shard or processes.world, _blocks(network)
    if processes.world % size:
        raise ValueError(f"engine.shard={size} must divide the {processes.world} processes")
    if not blocks:
        raise ValueError(
            "engine.parallel='fsdp' shards block by block, and network has no `blocks` (a ModuleList or Sequential of "
            "that name); use ddp"
        )
    copies = processes.world // size
    shape, names = ((size,), ("shard",)) if copies == 1 else ((copies, size), ("copy", "shard"))
    mesh = init_device_mesh(processes.device.type, shape, mesh_dim_names=names)
    # Blocks are gathered in the compute precision; sums of gradients stay float32.
    dtype = precision(config, processes.device)
    policy = MixedPrecisionPolicy(
        param_dtype=None if dtype == torch.float32 else dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    for block in blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    # The network is its own root, apart from any projector, so that sampling during training can call it alone;
    # it is spread again after each forward pass, since averages are swapped in and out between passes.
    for child in learner.children():
        fully_shard(child, mesh=mesh, reshard_after_forward=True)


def _kernels(config: EngineConfig, processes: Processes) -> Any:
    """Return the kernels to train with, None without; raise where they or 8-bit products cannot run, or never did."""
    device, fp8 = processes.device, f"engine.fp8='{config.fp8}'"
    kernels = gpu.gpu_kernels() if config.kernels else None
    if config.kernels and kernels is None:
        raise ValueError("engine.kernels=True needs a GPU and Triton, of torch's GPU builds; set it to False")
    if config.fp8 != "off" and config.parallel == "fsdp" and processes.world > 1:
        raise ValueError(f"{fp8} does not go with engine.parallel='fsdp'; use ddp, or engine.fp8='off'")
    on_gpu = config.fp8 != "off" and device.type == "cuda"
    if (config.kernels or on_gpu) and precision(config, device) != torch.bfloat16:
        what, where = ("engine.kernels=True", "") if config.kernels else (fp8, " on a GPU")
        raise ValueError(f"{what} does not go with engine.precision='{config.precision}'{where}; use bf16")
    if on_gpu and (capability := torch.cuda.get_device_capability(device)) < FP8_CAPABILITY:
        needed, there = (".".join(map(str, each)) for each in (FP8_CAPABILITY, capability))
        raise ValueError(f"{fp8} needs a GPU of compute capability {needed}, and this one has {there}; set it to off")
    return kernels


def _let_python_in(block: nn.Module, given: Any, output: Any) -> None:
    """Have the backward pass come by Python at every block: only there a signal's handler is run, and on a CPU a
    whole pass may take minutes."""
    if isinstance(output, torch.Tensor) and output.requires_grad:
        output.register_hook(lambda gradient: None)


class Engine:
    """A learner made ready for its processes and device: call it, and control when gradients are summed."""

    def __init__(
        self, config: EngineConfig, learner: nn.Module, network: DiT | DDT | Own, processes: Processes, unused: bool
    ) -> None:
        self.config, self.processes, self.network = config, processes, network
        self.sharded = config.parallel == "fsdp" and processes.world > 1
        if not isinstance(network, Own):
            network.blocks.recompute = math.ceil(config.recompute * len(network.blocks))
            if config.keep == "products":
                recompute.apply(network)
        on_cpu, own = processes.device.type == "cpu", isinstance(network, Own)
        if on_cpu:
            cpu.apply(network)  # for previews: with gradients the formulas stay plain
        kernels = _kernels(config, processes)
        if kernels is not None or config.fp8 != "off":
            gpu.apply(network, kernels, config.fp8)
        self.mode = compile_mode(config, processes, own)
        if self.mode == "blocks":
            if not isinstance(network, Own):
                recompute.inside(network)
            for block in _blocks(network) or [network]:
                block.compile()
        if self.mode in ("full", "graph"):
            learner.compile(mode="reduce-overhead" if self.mode == "graph" else None)
        if on_cpu and processes.world == 1 and not own:
            for block in _blocks(network):
                block.register_forward_hook(_let_python_in)
        self.module: nn.Module = learner
        if self.sharded:
            _shard(config, learner, network, processes)
        elif processes.world > 1:
            self.module = DistributedDataParallel(learner, find_unused_parameters=unused, gradient_as_bucket_view=True)

    def __call__(self, *arguments: Any) -> Any:
        if self.mode == "graph":
            torch.compiler.cudagraph_mark_step_begin()  # what the last replay returned may be overwritten now
        with autocast(self.config, self.processes.device):
            return self.module(*arguments)

    @contextmanager
    def gradients_stay(self, stay: bool) -> Generator[None]:
        """Inside, backward adds to this process's gradients without summing over processes, when `stay`."""
        if isinstance(self.module, DistributedDataParallel):
            with self.module.no_sync() if stay else nullcontext():
                yield
            return
        if self.sharded:
            for child in self.module.children():
                child.set_requires_gradient_sync(not stay)  # ty: ignore[call-non-callable]
        yield

    def release(self) -> None:
        """Let go of DDP, which must die before its process group does.

        If it holds the group last, its end waits for gloo's threads with Python's lock in hand, and one of them may be
        waiting for that lock: the process then never ends (one in ten interrupted runs on a busy machine).
        """
        self.module = self.network
