"""Sampling on a CPU: lean is plain but for rounding, int8 is near, and nothing else takes them."""

import contextlib
import copy
import pickle

import pytest
import torch

from mvm.network import DDTConfig, DiTConfig, build_network
from mvm.network.extras import DESIGNS, Local
from mvm.network.fast import cpu, int8, swap
from mvm.network.layers import Block, Head, RotaryAttention, SwiGLU, modulate, norm_rotate, rotary_table, rotary_waves
from mvm.precision import arithmetic

CPU = torch.device("cpu")
NETWORKS = {
    "own": (DiTConfig(size="tiny"), (3, 12, 12)),
    "all": (
        DiTConfig(size="tiny", depth=5, inner_block=2, skip=True, local=True, modulation="shared"),
        (3, 12, 12),
    ),
    "classic": (DiTConfig(size="tiny", design="classic"), (3, 12, 12)),
    "ddt": (DDTConfig(size="tiny", inner_block=2), (4, 6, 6)),
    "ddt in context": (DDTConfig(size="tiny", conditioning="in-context"), (4, 6, 6)),
}
WAYS = {"lean": (cpu, 1e-5), "int8": (int8, 0.1)}
every_network = pytest.mark.parametrize("name", NETWORKS)
both_ways = pytest.mark.parametrize("way", WAYS)


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def shaken(module):
    """The module with every weight random, so that nothing is hidden by a zero."""
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(0, 0.2)
    return module


def network_of(name):
    config, shape = NETWORKS[name]
    return shaken(build_network(config, shape, 5)), (draw(7, *shape), torch.rand(7), torch.arange(7) % 6)


def gap(found, plain):
    """How far an answer is from the plain one, over its size."""
    assert found.shape == plain.shape
    assert found.dtype == plain.dtype
    return float((found - plain).norm() / plain.norm())


def layer_calls():
    x, each, every = draw(3, 36, 32), draw(3, 32, seed=1), draw(3, 36, 32, seed=2)
    waves = rotary_waves(rotary_table((6, 6), 8))
    return {
        "block": (Block(32, 4), (x, each, *waves)),
        "block, classic": (Block(32, 4, DESIGNS["classic"]), (x, each, *waves)),
        "block by token": (Block(32, 4), (x, every, *waves)),
        "block, dropout": (Block(32, 4), (x, each, *waves, draw(3, 2, 32, seed=3).relu())),
        "head": (Head(32, 12), (x, each)),
        "head by token": (Head(32, 12), (x, every)),
        "attention": (RotaryAttention(32, 4), (x, *waves)),
        "mlp": (SwiGLU(32), (x,)),
        "local": (Local(32, (6, 6)), (x,)),
    }


@pytest.mark.parametrize("name", layer_calls())
@torch.no_grad()
def test_lean_layers_are_plain_but_for_rounding_and_leave_their_input_alone(name):
    layer, given = layer_calls()[name]
    plain, before = shaken(layer)(*given), [value.clone() for value in given]
    cpu.apply(layer)
    found = layer(*given)
    assert gap(found, plain) < 2e-6
    assert torch.equal(layer(*given), found)
    assert all(torch.equal(*pair) for pair in zip(given, before, strict=True))


@torch.no_grad()
def test_lean_formulas():
    x, tokens, waves = draw(3, 36, 32), draw(3, 36, 4, 8), rotary_waves(rotary_table((6, 6), 8))
    for scale in (draw(3, 1, 32, seed=1), draw(3, 36, 32, seed=2)):
        for centred in (False, True):
            given = x, scale, scale + 1, centred
            assert gap(cpu.modulate(*given), modulate(*given)) < 1e-6
    for heads in (tokens, tokens.mT.contiguous().mT):
        given = heads, draw(8, seed=3), *waves
        assert gap(cpu.norm_rotate(*given), norm_rotate(*given)) < 1e-6


@pytest.mark.parametrize("name", ["attention", "mlp"])
@torch.no_grad()
def test_int8_layers_are_near_and_not_equal(name):
    layer, given = layer_calls()[name]
    plain = shaken(layer)(*given)
    int8.apply(layer)
    assert 1e-4 < gap(layer(*given), plain) < 0.03


@every_network
@both_ways
@torch.no_grad()
def test_a_network_is_near_the_plain_one(name, way):
    (part, most), (network, given) = WAYS[way], network_of(name)
    plain = network(*given, taps=(1, 3))
    part.apply(network)
    found = network(*given, taps=(1, 3))
    assert found.features.keys() == {1, 3}
    pairs = [(found.prediction, plain.prediction), *((found.features[n], plain.features[n]) for n in (1, 3))]
    if plain.inner is not None:
        pairs.append((found.inner, plain.inner))
    else:
        assert found.inner is None
    assert all(0 < gap(a, b) < most for a, b in pairs)


@pytest.mark.parametrize("name", ["own", "all"])
@torch.no_grad()
def test_a_network_in_parts_is_one_whole(name):
    network, given = network_of(name)
    cpu.apply(network)
    whole = network(*given, taps=(1, 3))
    cpu.apply(network, at_once=-(-3 * 36 * 64 // torch.get_num_threads()))  # parts of 3, 3 and 1
    seen = []
    network.blocks[0].register_forward_pre_hook(lambda _, given: seen.append(len(given[0])))
    found = network(*given, taps=(1, 3))
    assert seen == [3, 3, 1]
    pairs = [(found.prediction, whole.prediction), *((found.features[n], whole.features[n]) for n in (1, 3))]
    assert all(gap(a, b) < 1e-5 for a, b in pairs)
    assert (found.inner is None) == (whole.inner is None)
    assert found.inner is None or gap(found.inner, whole.inner) < 1e-5


@every_network
@both_ways
def test_with_a_gradient_nothing_changes(name, way):
    network, given = network_of(name)
    found = []
    for apply in (lambda network: None, WAYS[way][0].apply):
        apply(network)
        network.zero_grad()
        out = network(*given, taps=(2,))
        (out.prediction.square().sum() + out.features[2].sum()).backward()
        found.append([out.prediction, *(parameter.grad for parameter in network.parameters())])
    for a, b in zip(*found, strict=True):
        assert (a is None and b is None) or torch.equal(a, b)


@both_ways
@torch.no_grad()
def test_only_float32_without_autocast_takes_a_way(way):
    network, (x, level, labels) = network_of("all")
    other = copy.deepcopy(network)
    WAYS[way][0].apply(other)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(other(x, level, labels).prediction, network(x, level, labels).prediction)
    for dtype in (torch.float64, torch.bfloat16):
        given = x.to(dtype), level, labels
        assert torch.equal(other.to(dtype)(*given).prediction, network.to(dtype)(*given).prediction)
    assert other.to("meta")(x.to("meta"), level.to("meta"), labels.to("meta")).prediction.is_meta


@every_network
@both_ways
@torch.no_grad()
def test_state_dict_stays_and_undone_it_is_the_plain_network(name, way):
    network, given = network_of(name)
    plain, weights = network(*given).prediction, {k: v.clone() for k, v in network.state_dict().items()}
    kinds = [type(module) for module in network.modules()]
    WAYS[way][0].apply(network)
    assert [type(module) for module in network.modules()] != kinds
    assert list(network.state_dict()) == list(weights)
    assert all(torch.equal(value, weights[name]) for name, value in network.state_dict().items())
    assert not torch.equal(network(*given).prediction, plain)
    swap.plain(network)
    assert [type(module) for module in network.modules()] == kinds
    assert torch.equal(network(*given).prediction, plain)


@torch.no_grad()
def test_a_context_gives_back_what_was_there():
    network, given = network_of("all")
    plain = network(*given).prediction
    with int8.applied(network):
        coarse = network(*given).prediction
    assert torch.equal(network(*given).prediction, plain)
    cpu.apply(network)
    lean = network(*given).prediction
    with int8.applied(network):
        assert torch.equal(network(*given).prediction, coarse)
    with contextlib.suppress(RuntimeError), int8.applied(network):
        raise RuntimeError
    assert torch.equal(network(*given).prediction, lean)


@every_network
@both_ways
@pytest.mark.parametrize("way_to_copy", [copy.deepcopy, lambda network: pickle.loads(pickle.dumps(network))])
@torch.no_grad()
def test_a_copy_computes_the_same_way(name, way, way_to_copy):
    network, given = network_of(name)
    WAYS[way][0].apply(network)
    assert torch.equal(way_to_copy(network)(*given).prediction, network(*given).prediction)


def test_a_compiler_sees_the_plain_formulas():
    seen = []

    def backend(graph, _):
        seen.extend(node.target for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    local = shaken(Local(8, (4, 4)))
    cpu.apply(local)
    with torch.no_grad():
        torch.compile(local, backend=backend)(draw(1, 16, 8))
    assert len(seen) > 20  # nine shifts
    assert torch.nn.functional.conv2d not in seen


def test_precision_int8_is_for_a_cpu():
    with arithmetic("int8", CPU):
        assert torch.get_float32_matmul_precision() == "highest"
    with (
        pytest.raises(ValueError, match=r"precision='int8' is for a CPU, not for cuda.*bf16"),
        arithmetic("int8", torch.device("cuda")),
    ):
        pass
