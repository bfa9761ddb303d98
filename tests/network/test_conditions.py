"""What a network is given beside x: each kind of condition, its null, and samples of one to three axes of space."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import rms_norm, silu
from torch.utils.flop_counter import FlopCounterMode

from mvm.network import ConditionConfig, DDTConfig, DiTConfig, build_network, multiply_adds, parameters
from mvm.network.fast import cpu
from mvm.network.layers import patchify, unpatchify
from mvm.path.condition import cat, dropped, null_of, rows

SMALL = {"size": "tiny", "depth": 3, "width": 16, "heads": 2, "patch": 2}
KINDS = {
    "labels": ConditionConfig(),
    "none": ConditionConfig("none"),
    "vector": ConditionConfig("vector", width=3),
    "image": ConditionConfig("image", width=2),
    "tokens": ConditionConfig("tokens", width=5, length=4),
}
SPACES = [(12,), (4, 6), (2, 4, 6)]


def shaken(config, shape, condition, classes=5):
    torch.manual_seed(0)
    network = build_network(config, shape, classes, condition=condition)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.normal_(0, 0.3)
    return network


def given(kind, batch, shape, seed=1):
    draw = torch.Generator().manual_seed(seed)
    match kind:
        case "labels":
            return torch.arange(batch) % 5
        case "none":
            return None
        case "vector":
            return torch.randn(batch, 3, generator=draw)
        case "image":
            return torch.rand(batch, 2, *shape[1:], generator=draw) * 2 - 1
    mask = torch.arange(4) < torch.arange(1, batch + 1)[:, None] % 4 + 1
    return {"tokens": torch.randn(batch, 4, 5, generator=draw), "mask": mask}


def inputs(shape, batch=4):
    draw = torch.Generator().manual_seed(2)
    return torch.randn(batch, *shape, generator=draw), torch.rand(batch, generator=draw)


CONFIGS = {
    "dit": DiTConfig(**SMALL, inner_block=1),
    "all": DiTConfig(**SMALL, inner_block=2, skip=True, local=True, modulation="shared"),
    "classic": DiTConfig(**SMALL, design="classic"),
    "ddt": DDTConfig(**SMALL, inner_block=1, head_depth=1, head_width=16, head_heads=2),
    "context": DDTConfig(**SMALL, conditioning="in-context", head_depth=1, head_width=16, head_heads=2),
}


@pytest.mark.parametrize("space", SPACES)
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_network_takes_every_condition_on_any_axes(name, kind, space):
    """Shapes, gradients of all parameters, rows that do not see each other, and a condition that matters."""
    config, shape = CONFIGS[name], (3, *space)
    network = shaken(config, shape, KINDS[kind]).double()
    (x, level), condition = inputs(shape), given(kind, 4, shape)
    x = x.double()
    null = null_of(network.null, condition, x)
    mixed = dropped(condition, null, torch.arange(4) == 2)
    out = network(x, level, mixed)
    assert out.prediction.shape == x.shape
    assert (out.inner is None) == (not config.inner_block)
    (out.prediction.square().mean() + (0 if out.inner is None else out.inner.square().mean())).backward()
    assert all(torch.count_nonzero(p.grad) for p in network.parameters())
    with torch.no_grad():
        alone = network(x[2:3], level[2:3], rows(null, slice(2, 3))).prediction
        assert torch.allclose(out.prediction[2:3], alone, atol=1e-9)
        if kind != "none":
            plain = network(x, level, condition).prediction
            kept = torch.tensor([0, 1, 3])
            assert torch.allclose(plain[kept], out.prediction[kept], atol=1e-9)
            assert not torch.allclose(plain[2], out.prediction[2], atol=1e-3)
            both = network(torch.cat((x, x)), torch.cat((level, level)), cat(null, condition)).prediction
            assert torch.allclose(both[4:], plain, atol=1e-9)
            assert torch.allclose(both[2:3], alone, atol=1e-9)


@pytest.mark.parametrize("kind", ["vector", "image", "tokens"])
def test_a_null_is_no_zero_condition(kind):
    shape = (3, 4, 6)
    network = shaken(CONFIGS["dit"], shape, KINDS[kind])
    (x, level), condition = inputs(shape), given(kind, 4, shape)
    zeros = {**condition, "tokens": torch.zeros(4, 4, 5)} if kind == "tokens" else torch.zeros_like(condition)
    null = null_of(network.null, condition, x)
    assert not torch.allclose(network(x, level, null).prediction, network(x, level, zeros).prediction, atol=1e-3)


def test_padding_of_text_is_not_read():
    network = shaken(CONFIGS["all"], (3, 4, 6), KINDS["tokens"])
    (x, level), text = inputs((3, 4, 6)), given("tokens", 4, None)
    other = {**text, "tokens": torch.where(text["mask"][..., None], text["tokens"], torch.nan)}
    assert torch.equal(network(x, level, text).prediction, network(x, level, other).prediction)


def test_text_is_joint_attention_written_out():
    """Image and text in one sequence, text without positions on the grid; taps and heads read the image alone."""
    network = shaken(CONFIGS["dit"], (3, 4, 6), KINDS["tokens"])
    (x, level), text = inputs((3, 4, 6)), given("tokens", 4, None)
    out, module = network(x, level, text, taps=(2,)), network.label
    texts = [tokens[mask] for tokens, mask in zip(text["tokens"], text["mask"], strict=True)]
    normed = [rms_norm(words, (5,), eps=1e-6) for words in texts]
    own = torch.stack(
        [
            torch.stack([module.map(row[i]) if i < len(row) else module.missing for i in range(4)]) + module.positions
            for row in normed
        ]
    )
    c = silu(network.level(level) + module.mean(torch.stack([row.mean(0) for row in normed])))
    tokens = torch.cat((network.embed(patchify(x, 2)), own), 1)
    assert torch.equal(network.cos[6:], torch.ones(4, 8))
    assert torch.equal(network.sin[6:], torch.zeros(4, 8))
    seen = []
    for block in network.blocks:
        tokens = block(tokens, c, network.cos, network.sin)
        seen.append(tokens[:, :6])
    assert torch.allclose(out.features[2], seen[1], atol=1e-4)
    assert torch.allclose(out.inner, unpatchify(network.inner_head(seen[0], c), 2, 3, (2, 3)), atol=1e-4)
    assert torch.allclose(out.prediction, unpatchify(network.head(seen[2], c), 2, 3, (2, 3)), atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_a_cpu_computes_parts_of_a_batch_the_same(kind):
    shape = (3, 4, 6)
    network = shaken(CONFIGS["all"], shape, KINDS[kind])
    (x, level), condition = inputs(shape, 5), given(kind, 5, shape)
    with torch.no_grad():
        want = network(x, level, condition, taps=(1,))
        cpu.apply(network, at_once=200)
        found = network(x, level, condition, taps=(1,))
    for one, other in zip(found[:2], want[:2], strict=True):
        assert torch.allclose(one, other, rtol=1e-4, atol=1e-3)
    assert torch.allclose(found.features[1], want.features[1], rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("kind", KINDS)
def test_costs_are_what_torch_counts(name, kind):
    config, shape, condition = CONFIGS[name], (3, 4, 6), KINDS[kind]
    network = build_network(config, shape, 5, condition=condition)
    counter = FlopCounterMode(display=False)
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), counter:
        network(*inputs(shape, 1), given(kind, 1, shape))
    assert 2 * multiply_adds(config, shape, 5, condition) == counter.get_total_flops()
    assert parameters(config, shape, 5, condition=condition) == sum(p.numel() for p in network.parameters())


@pytest.mark.parametrize("kind", KINDS)
def test_state_holds_parameters_only(kind):
    network = build_network(CONFIGS["dit"], (3, 4, 6), 5, condition=KINDS[kind])
    assert set(network.state_dict()) == {name for name, _ in network.named_parameters()}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kind": "text"}, r"condition\.kind='text'"),
        ({"kind": "labels", "width": 3}, r"condition\.width=3"),
        ({"kind": "vector", "length": 3, "width": 1}, r"condition\.length"),
        ({"kind": "vector", "width": -1}, r"condition\.width=-1"),
    ],
)
def test_bad_conditions_name_the_option(options, words):
    with pytest.raises(ValueError, match=words):
        ConditionConfig(**options)


@pytest.mark.parametrize(("kind", "option"), [("vector", "width"), ("image", "width"), ("tokens", "width")])
def test_a_network_needs_the_shape_of_its_condition(kind, option):
    with pytest.raises(ValueError, match=rf"condition\.{option}=0"):
        build_network(CONFIGS["dit"], (3, 4, 6), 5, condition=ConditionConfig(kind))
