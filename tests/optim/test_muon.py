"""Muon over processes: each matrix is made orthogonal by one of them, and all have the steps that one process makes."""

from itertools import pairwise

import pytest
import torch
from torch import distributed, multiprocessing, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.flop_counter import FlopCounterMode

from mvm.distributed.processes import Processes
from mvm.distributed.sharding import like_parameter, local, whole
from mvm.network import DDTConfig, DiTConfig, build_network
from mvm.optim import optimizers as optimizers_module
from mvm.optim.optimizers import TrainConfig, muon_parts, newton_schulz_flops, optimizers, step_unless
from mvm.store import balanced

SKIPPED = [False, True, False, False]  # a bad step among good ones
MATRICES = [(9, 5), (14, 5), (5, 7), (1, 5)]
COPIES, SHARDS, HYBRID = "copies", "shards", "hybrid"


class Odd(nn.Module):
    """Matrices whose rows two or four processes cannot share evenly; of one row some processes have none."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(3, 5)
        layers = ("qkv", "gate_up", "down", "one")
        self.blocks = nn.ModuleList(
            nn.ModuleDict({name: nn.Linear(n, m) for name, (m, n) in zip(layers, MATRICES, strict=True)})
            for _ in range(3)
        )


def odd():
    torch.manual_seed(0)
    return Odd()


def train(network, split=False, processes=None):
    """Do some steps with gradients from a seed; return weights and state by name, and the FLOP of each Muon step."""
    config = TrainConfig(optimizer="muon", muon_split=split, lr=0.01, weight_decay=0.1)
    found = optimizers(config, network.named_parameters(), processes)
    flops = []
    for step, skip in enumerate(SKIPPED):
        generator = torch.Generator().manual_seed(step)
        for p in network.parameters():
            value = torch.randn(p.shape, generator=generator)
            p.grad = like_parameter(value * torch.nan if skip else value, p)
        for optimizer in found:
            with FlopCounterMode(display=False) as counter:
                step_unless(optimizer, torch.tensor(skip))
            flops += [counter.get_total_flops()] * isinstance(optimizer, torch.optim.Muon)
    state = dict(network.named_parameters())
    for name, p in network.named_parameters():
        state |= {f"{name}/{key}": value for optimizer in found for key, value in optimizer.state[p].items()}
    return state, flops


def work(rank, world, folder):
    """One process: train in every way, and keep what it has and what it did."""
    torch.set_num_threads(1)
    store = distributed.FileStore(str(folder / "store"), world)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=world)
    kept = {}
    for how in (COPIES, SHARDS, *([HYBRID] if world == 4 else [])):
        for split, dtype in ((False, torch.float32), (True, torch.float32), (False, torch.bfloat16)):
            network = odd()
            if how != COPIES:
                shape, names = ((2, 2), ("copy", "shard")) if how == HYBRID else ((world,), ("shard",))
                mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
                fully_shard(network, mesh=mesh)
            optimizers_module.product_dtype = lambda device, dtype=dtype: dtype
            state, flops = train(network, split, Processes(rank, world))
            held = {name: local(value.detach()).clone() for name, value in state.items()}
            kept[how, split, dtype] = {name: whole(value) for name, value in state.items()}, held, flops
    torch.save(kept, folder / f"{rank}.pt")
    distributed.destroy_process_group()


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)])
def ranks(request, tmp_path_factory):
    """What every process kept."""
    if not distributed.is_gloo_available():
        pytest.skip("torch was built without gloo")
    folder = tmp_path_factory.mktemp("ranks")
    multiprocessing.spawn(work, (request.param, folder), nprocs=request.param)
    return [torch.load(folder / f"{rank}.pt") for rank in range(request.param)]


def assert_close(state, expected, within):
    assert state.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.allclose(state[name], value, rtol=0, atol=within), name


def test_any_number_of_processes_makes_the_steps_of_one(ranks):
    for split in (False, True):
        expected, _ = train(odd(), split)
        for rank in ranks:
            for how in {how for how, *_ in rank}:
                assert_close(rank[how, split, torch.float32][0], expected, 1e-6)


def test_each_matrix_is_made_orthogonal_once_over_all_processes(ranks):
    """And the work is shared: nobody has more than his share and one matrix."""
    for key in ranks[0]:
        _, alone = train(odd(), split=key[1])
        each = [rank[key][-1] for rank in ranks]
        assert [sum(step) for step in zip(*each, strict=True)] == alone
        largest = newton_schulz_flops((14, 5))
        assert max(map(max, each)) <= alone[0] / len(ranks) + largest < alone[0]


def test_copies_of_weights_and_state_stay_bit_identical(ranks):
    """Every rank's under DDP; in hybrid shards ranks 0, 1 are one copy and 2, 3 the other."""
    for key in ranks[0]:
        held = [rank[key][1] for rank in ranks]
        pairs = {COPIES: pairwise(held), SHARDS: (), HYBRID: zip(held[:2], held[2:], strict=True)}[key[0]]
        for one, other in pairs:
            assert all(torch.equal(one[name], other[name]) for name in one)


def test_processes_make_the_steps_of_torchs_muon(ranks):
    """In bf16, up to its rounding: 1e-2 of a step; momentum to the bit."""
    network = odd()
    hidden = {name: p for name, p in network.named_parameters() if name.startswith("blocks") and p.ndim == 2}
    published = torch.optim.Muon(list(hidden.values()), lr=0.01, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    for step in (step for step, skip in enumerate(SKIPPED) if not skip):
        generator = torch.Generator().manual_seed(step)
        for p in network.parameters():
            p.grad = torch.randn(p.shape, generator=generator)
        published.step()
    for rank in ranks:
        for how in {how for how, *_ in rank}:
            state = rank[how, False, torch.bfloat16][0]
            for name, p in hidden.items():
                assert torch.allclose(state[name], p, rtol=0, atol=1e-2 * 0.01), name
                assert torch.equal(state[f"{name}/momentum_buffer"], published.state[p]["momentum_buffer"]), name


def test_split_steps_are_those_of_matrices_that_were_apart_all_along():
    """q, k, v and gate, up as layers of their own have the same steps, as long as theirs."""
    together, apart = odd(), nn.Module()
    apart.blocks = nn.ParameterList()
    rows = {"qkv": 3, "gate_up": 7, "down": 5, "one": 1}
    names = [f"blocks.{block}.{layer}.weight" for block in range(3) for layer in rows]
    for name in names:
        apart.blocks.extend(together.get_parameter(name).detach().clone().split(rows[name.split(".")[-2]]))
    config = TrainConfig(optimizer="muon", muon_split=True, lr=0.01)
    (one, _), (other, _) = (optimizers(config, network.named_parameters()) for network in (together, apart))
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        for name in names:
            p = together.get_parameter(name)
            p.grad = torch.randn(p.shape, generator=generator)
        gradients = [g for name in names for g in together.get_parameter(name).grad.split(rows[name.split(".")[-2]])]
        for p, gradient in zip(apart.blocks, gradients, strict=True):
            p.grad = gradient.clone()
        one.step()
        other.step()
    found = torch.cat([together.get_parameter(name).flatten() for name in names])
    assert torch.allclose(found, torch.cat([p.flatten() for p in apart.blocks]), rtol=0, atol=1e-7)


CUT = {"attention.qkv": 3, "mlp.gate_up": 2}


@pytest.mark.parametrize("config", [DiTConfig(size="tiny"), DDTConfig(size="tiny", conditioning="in-context")])
def test_what_is_cut_is_what_the_networks_have_fused(config):
    named = list(build_network(config, (4, 8, 8), 10).named_parameters())
    fused, split = (TrainConfig(optimizer="muon", muon_split=split) for split in (False, True))
    cut = {name: muon_parts(split, name, p) for name, p in named}
    for name, parts in cut.items():
        layer = ".".join(name.split(".")[-3:-1])
        assert parts == (0 if "blocks" not in name or name.endswith("bias") or "norm" in name else CUT.get(layer, 1))
    assert 3 in cut.values()
    assert {muon_parts(fused, name, p) for name, p in named} == {0, 1}


def test_a_layer_that_cannot_be_cut_is_named():
    with pytest.raises(ValueError, match=r"train\.muon_split=True cuts blocks\.0\.qkv\.weight of 8 rows into 3"):
        muon_parts(TrainConfig(optimizer="muon", muon_split=True), "blocks.0.qkv.weight", torch.zeros(8, 2))


@pytest.mark.parametrize(("shape", "parts"), [((12, 12), 1), ((8, 20), 1), ((30, 6), 1), ((30, 6), 3), ((12, 20), 2)])
def test_flops_are_those_that_torch_counts(shape, parts):
    stack = torch.randn(shape).unflatten(0, (parts, -1))
    with FlopCounterMode(display=False) as counter:
        optimizers_module.orthogonal(stack, (1.0, 1.0, 1.0), 5, 1e-7)
    assert counter.get_total_flops() == newton_schulz_flops(shape, parts)


def test_work_is_balanced_largest_first():
    assert balanced([3, 3, 5, 4, 3], 2) == [1, 0, 0, 1, 1]
    assert balanced([1, 2], 4) == [1, 0]
