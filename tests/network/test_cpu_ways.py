"""The ways of a CPU without a gradient: lean is plain but for rounding, int8 is near, and nothing else takes them."""

import pytest
import torch

from mvm.network import DDTConfig, DiTConfig, build_network, dit
from mvm.network.branches import RotaryAttention, SwiGLU
from mvm.network.layers import Local, add_gated, modulate, norm_rotate, rotary_table, rotary_waves
from mvm.precision import CPU_WAYS, arithmetic, cpu_way, way_of

CPU = torch.device("cpu")
DITS = {
    "own": {"size": "tiny"},
    "all": {"size": "tiny", "depth": 5, "inner_block": 2, "skip": True, "local": True, "modulation": "shared"},
}


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def shaken(module):
    """The module with every weight random, so that nothing is hidden by a zero."""
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(0, 0.2)
    return module


def by_way(way, call):
    with torch.no_grad(), cpu_way(way):
        return call()


def apart(call, way):
    """How far the way's answer is from the plain one, over its size."""
    plain, found = by_way("plain", call), by_way(way, call)
    assert found.shape == plain.shape
    assert found.dtype == plain.dtype
    return float((found - plain).norm() / plain.norm())


def layer_calls():
    x, tokens = draw(3, 36, 32), draw(3, 36, 4, 8)
    each, every = draw(3, 1, 32, seed=1), draw(3, 36, 32, seed=2)
    waves = rotary_waves(rotary_table(6, 8))
    attention, mlp, local = shaken(RotaryAttention(32, 4)), shaken(SwiGLU(32)), shaken(Local(32, 6))
    return {
        "modulate": lambda: modulate(x, each, each + 1),
        "modulate by token": lambda: modulate(x, every, every + 1),
        "gate": lambda: add_gated(x, each, every),
        "norm_rotate": lambda: norm_rotate(tokens, draw(8, seed=3), *waves),
        "norm_rotate, strided": lambda: norm_rotate(tokens.mT.contiguous().mT, draw(8, seed=3), *waves),
        "attention": lambda: attention(x, *waves),
        "mlp": lambda: mlp(x),
        "local": lambda: local(x),
    }


@pytest.mark.parametrize("name", layer_calls())
def test_lean_layers_are_plain_but_for_rounding_and_leave_their_input_alone(name):
    call = layer_calls()[name]
    assert apart(call, "lean") < 1e-6
    assert torch.equal(by_way("lean", call), by_way("lean", call))


@pytest.mark.parametrize("name", ["attention", "mlp"])
def test_int8_layers_are_near_and_not_equal(name):
    assert 1e-4 < apart(layer_calls()[name], "int8") < 0.03


@pytest.mark.parametrize(("way", "most"), [("lean", 1e-5), ("int8", 0.1)])
@pytest.mark.parametrize("options", DITS.values(), ids=DITS)
def test_a_network_in_parts_is_one_whole(options, way, most, monkeypatch):
    network = shaken(build_network(DiTConfig(**options), (3, 12, 12), 5))
    inputs = draw(7, 3, 12, 12), torch.rand(7), torch.arange(7) % 6
    plain = by_way("plain", lambda: network(*inputs, taps=(1, 3)))
    monkeypatch.setattr(dit, "AT_ONCE", -(-3 * 36 * 64 // torch.get_num_threads()))  # parts of 3, 3 and 1
    seen = []
    network.blocks[0].register_forward_pre_hook(lambda _, given: seen.append(len(given[0])))
    found = by_way(way, lambda: network(*inputs, taps=(1, 3)))
    assert seen == [3, 3, 1]
    assert found.features.keys() == {1, 3}
    pairs = [(found.prediction, plain.prediction), *((found.features[n], plain.features[n]) for n in (1, 3))]
    if options.get("inner_block"):
        pairs.append((found.inner, plain.inner))
    else:
        assert found.inner is None
    assert all(a.shape == b.shape and float((a - b).norm() / b.norm()) < most for a, b in pairs)


def test_a_ddt_takes_the_ways_too():
    network = shaken(build_network(DDTConfig(size="tiny"), (4, 6, 6), 5))
    inputs = draw(2, 4, 6, 6), torch.rand(2), torch.arange(2)
    call = lambda: network(*inputs).prediction  # noqa: E731
    assert apart(call, "lean") < 1e-5
    assert 1e-4 < apart(call, "int8") < 0.1


def test_only_float32_on_a_cpu_without_gradient_and_autocast_has_a_way():
    x = draw(2, 2)
    assert way_of(x) == "plain"
    with torch.no_grad():
        assert way_of(x) == "lean"
        assert way_of(x.double()) == way_of(x.bfloat16()) == way_of(x.to("meta")) == "plain"
        with torch.autocast("cpu", torch.bfloat16):
            assert way_of(x) == "plain"
        for way in CPU_WAYS:
            with cpu_way(way):
                assert way_of(x) == way
        assert way_of(x) == "lean"


def test_a_compiler_sees_the_plain_formulas():
    seen = []

    def backend(graph, _):
        seen.extend(node.target for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    local = shaken(Local(8, 4))
    with torch.no_grad():
        torch.compile(local, backend=backend)(draw(1, 16, 8))
    assert len(seen) > 20  # nine shifts
    assert torch.nn.functional.conv2d not in seen


def test_precision_int8_is_the_way_and_only_on_a_cpu():
    x = draw(2, 2)
    with torch.no_grad():
        with arithmetic("int8", CPU):
            assert way_of(x) == "int8"
            with arithmetic("fp32", CPU):
                assert way_of(x) == "lean"
            assert way_of(x) == "int8"
        assert way_of(x) == "lean"
    with (
        pytest.raises(ValueError, match=r"precision='int8' is for a CPU, not for cuda.*bf16"),
        arithmetic("int8", torch.device("cuda")),
    ):
        pass
    with pytest.raises(ValueError, match="cpu_way='int4' is unknown"), cpu_way("int4"):
        pass
