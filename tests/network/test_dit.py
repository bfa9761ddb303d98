"""The DiT: what it is at the start, what it may be told, and what every part of it does."""

import pytest
import torch
from torch.nn.functional import conv2d, silu

from mvm.network import SIZES, DDTConfig, DiT, DiTConfig
from mvm.network.extras import Local
from mvm.network.fast import recompute as selective
from mvm.network.fast import swap
from mvm.network.layers import patchify, unpatchify

SMALL = {"size": "tiny", "depth": 3, "width": 16, "heads": 2, "patch": 2}


def build(seed=0, num_classes=5, shape=(1, 8, 8), **changes):
    torch.manual_seed(seed)
    return DiT(DiTConfig(**{**SMALL, **changes}), shape, num_classes)


def shaken(**changes):
    """A network with every weight random, so that nothing is hidden by a zero."""
    network = build(**changes)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.normal_(0, 0.2)
    return network


def inputs(batch=4, shape=(1, 8, 8), num_classes=5):
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(batch, *shape, generator=generator)
    level = torch.rand(batch, generator=generator, dtype=torch.float64)
    return x, level, torch.arange(batch) % (num_classes + 1)


@pytest.mark.parametrize("inner_block", [0, 2])
def test_output_is_exactly_zero_at_the_start(inner_block):
    network = build(inner_block=inner_block)
    out = network(*inputs())
    assert out.prediction.shape == (4, 1, 8, 8)
    assert torch.count_nonzero(out.prediction) == 0
    if inner_block:
        assert torch.count_nonzero(out.inner) == 0
    else:
        assert out.inner is None


def test_blocks_are_the_identity_at_the_start():
    network = build()
    x, level, labels = inputs()
    tokens = network.embed(patchify(x, 2))
    features = network(x, level, labels, taps=(1, 2, 3)).features
    assert all(torch.equal(features[n], tokens) for n in (1, 2, 3))


def test_taps_are_the_outputs_of_the_blocks_asked_for():
    network = shaken()
    x, level, labels = inputs()
    out = network(x, level, labels, taps=(1, 3))
    assert sorted(out.features) == [1, 3]
    condition = silu(network.level(level) + network.label(labels))
    tokens = network.embed(patchify(x, 2))
    for n, block in enumerate(network.blocks, start=1):
        tokens = block(tokens, condition, network.cos, network.sin)
        if n in out.features:
            assert out.features[n].shape == (4, 16, 16)
            assert torch.equal(out.features[n], tokens)
    want = unpatchify(network.head(tokens, condition), 2, 1, (4, 4))
    assert torch.equal(out.prediction, want)
    assert network(x, level, labels).features == {}


@pytest.mark.parametrize("keep_products", [False, True])
@pytest.mark.parametrize("recompute", [1, 2, 3])
def test_taps_with_recompute_are_the_same_and_carry_the_same_gradient(recompute, keep_products):
    """A tapped block's tokens are a leaf of a second loss (REPA): its gradient must go through what is recomputed."""
    grads, outputs = [], []
    for blocks in (0, recompute):
        network = shaken(inner_block=1)
        network.blocks.recompute = blocks
        if keep_products:
            selective.apply(network)
        out = network(*inputs(), taps=(1, 2, 3))
        (out.prediction.square().mean() + sum(f.sin().mean() for f in out.features.values())).backward()
        grads.append({name: p.grad for name, p in network.named_parameters() if p.grad is not None})
        outputs.append(out)
    assert outputs[0].features.keys() == outputs[1].features.keys() == {1, 2, 3}
    assert all(torch.equal(outputs[0].features[n], outputs[1].features[n]) for n in (1, 2, 3))
    assert torch.equal(outputs[0].prediction, outputs[1].prediction)
    assert grads[0].keys() == grads[1].keys()
    assert all(torch.equal(grads[0][name], grads[1][name]) for name in grads[0])
    assert all(torch.count_nonzero(value) for value in grads[0].values())


@pytest.mark.parametrize("keep_products", [False, True])
def test_blocks_that_checkpoint_themselves_are_the_same_and_can_be_undone(keep_products):
    """An inner layer of the first two of three blocks runs twice, before and after the swap is undone."""
    network, calls, found = shaken(), [], []
    network.blocks.recompute = 2
    if keep_products:
        selective.apply(network)
    for block in network.blocks:
        block.mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    kinds = [type(module) for module in network.modules()]
    for change in (lambda: None, lambda: selective.inside(network), lambda: swap.plain(network)):
        change()
        calls.clear()
        network.zero_grad()
        network(*inputs()).prediction.square().mean().backward()
        found.append([p.grad.clone() for p in network.parameters() if p.grad is not None])
        assert len(calls) == 5
    assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(*found, strict=True))
    assert [type(module) for module in network.modules()] == kinds


def test_nothing_is_recomputed_without_a_gradient():
    network, calls = shaken(), []
    network.blocks.recompute = 3
    network.blocks[0].register_forward_pre_hook(lambda *_: calls.append(1))
    with torch.no_grad():
        found = network(*inputs()).prediction
    network.blocks.recompute = 0
    assert torch.equal(found, network(*inputs()).prediction)
    assert len(calls) == 2


def test_inner_head_reads_its_block_and_nothing_after_it():
    network = shaken(inner_block=2)
    x, level, labels = inputs()
    before = network(x, level, labels, taps=(2,))
    condition = silu(network.level(level) + network.label(labels))
    want = unpatchify(network.inner_head(before.features[2], condition), 2, 1, (4, 4))
    assert torch.equal(before.inner, want)
    with torch.no_grad():
        for parameter in network.blocks[2].parameters():
            parameter.add_(0.1)
    after = network(x, level, labels)
    assert torch.equal(after.inner, before.inner)
    assert not torch.allclose(after.prediction, before.prediction, atol=1e-4)


def test_null_class_is_one_more_label():
    network = shaken()
    assert network.null == 5
    assert network.label.num_embeddings == 6
    x, level, _ = inputs()
    null, third = torch.full((4,), network.null), torch.full((4,), 3)
    before = network(x, level, null).prediction, network(x, level, third).prediction
    assert not torch.allclose(*before, atol=1e-4)
    with torch.no_grad():
        network.label.weight[network.null] += 1
    assert not torch.allclose(network(x, level, null).prediction, before[0], atol=1e-4)
    assert torch.equal(network(x, level, third).prediction, before[1])
    with pytest.raises(IndexError):
        network(x, level, null + 1)


@pytest.mark.parametrize("design", ["modern", "classic"])
def test_level_and_position_matter(design):
    network = shaken(design=design)
    x, level, labels = inputs()
    base = network(x, level, labels).prediction
    assert not torch.allclose(network(x, level * 0.5, labels).prediction, base, atol=1e-4)
    # moved by one patch the picture is not simply moved: the torus is cut, positions are known
    moved = network(x.roll(2, -1), level, labels).prediction.roll(-2, -1)
    assert not torch.allclose(moved, base, atol=1e-4)


def test_rows_of_a_batch_do_not_see_each_other():
    network = shaken()
    x, level, labels = inputs()
    together = network(x, level, labels).prediction
    for i in range(4):
        alone = network(x[i : i + 1], level[i : i + 1], labels[i : i + 1]).prediction
        assert torch.allclose(alone[0], together[i], atol=1e-4)


def test_gradient_reaches_every_parameter_in_three_steps():
    """adaLN-Zero opens from the back: head first, then gates, then what they gate."""
    network = build(inner_block=2)
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-2)
    x, level, labels = inputs(batch=12)
    reached = []
    for _ in range(3):
        out = network(x, level, labels)
        loss = ((out.prediction - x) ** 2).mean() + ((out.inner - x) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        reached.append({name for name, p in network.named_parameters() if torch.count_nonzero(p.grad)})
        optimizer.step()
    names = {name for name, _ in network.named_parameters()}
    assert reached[0] == {
        "head.linear.weight",
        "head.linear.bias",
        "inner_head.linear.weight",
        "inner_head.linear.bias",
    }
    assert {name for name in names if "modulation" in name} <= reached[1]
    assert reached[2] == names


@pytest.mark.parametrize("design", ["modern", "classic"])
def test_gradient_of_every_parameter_by_finite_difference(design):
    network = shaken(depth=1, width=8, heads=1, patch=4, design=design).double()
    x, level, labels = inputs()
    x = x.double()

    def value():
        return (network(x, level, labels).prediction ** 2).sum()

    network.zero_grad()
    value().backward()
    torch.manual_seed(3)
    for name, parameter in network.named_parameters():
        direction = torch.randn_like(parameter)
        h = 1e-6
        with torch.no_grad():
            parameter.add_(h * direction)
            above = value()
            parameter.sub_(2 * h * direction)
            below = value()
            parameter.add_(h * direction)
        slope = float((above - below) / (2 * h))
        assert float((parameter.grad * direction).sum()) == pytest.approx(slope, rel=1e-4, abs=1e-5), name


@pytest.mark.parametrize("design", ["modern", "classic"])
@pytest.mark.parametrize(("size", "millions"), [("S", 33), ("B", 130), ("L", 458), ("XL", 675)])
def test_parameter_counts_are_those_of_dit(size, millions, design):
    """DiT/2 on 4 x 32 x 32 latents with 1000 classes (Peebles and Xie 2023)."""
    with torch.device("meta"):
        network = DiT(DiTConfig(size=size, design=design), (4, 32, 32), 1000)
    assert sum(p.numel() for p in network.parameters()) / 1e6 == pytest.approx(millions, rel=0.02)
    assert len(network.blocks) == SIZES[size][0]


@pytest.mark.parametrize("design", ["modern", "classic"])
def test_state_holds_parameters_only(design):
    """Tables of positions and rates are rebuilt, not stored: a checkpoint of the parameters is the whole network."""
    network = build(inner_block=1, design=design)
    assert set(network.state_dict()) == {name for name, _ in network.named_parameters()}


def test_overrides_replace_the_named_size():
    assert DiTConfig(size="S").dimensions == (12, 384, 6)
    assert DiTConfig(size="S", depth=2, heads=12).dimensions == (2, 384, 12)
    assert len(build(depth=5).blocks) == 5


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"size": "XXL"}, r"network\.size='XXL'.*'XL'"),
        ({"design": "old"}, r"network\.design='old'.*classic"),
        ({"patch": 0}, r"network\.patch=0"),
        ({"patch": -2}, r"network\.patch=-2"),
        ({"width": 18}, "multiple of 4"),
        ({"width": 12, "heads": 2}, "multiple of 4"),
        ({"depth": -1}, "depth"),
        ({"heads": -2}, "heads"),
        ({"inner_block": 3}, r"network\.inner_block=3.*\[0, 2\]"),
        ({"inner_block": -1}, r"network\.inner_block=-1"),
    ],
)
def test_bad_configs_name_the_option(changes, words):
    with pytest.raises(ValueError, match=words):
        DiTConfig(**{**SMALL, **changes})


@pytest.mark.parametrize("shape", [(1, 8, 7), (1, 9, 9), (1, 9), (1, 2, 2, 2, 2), (1,), (1, 0, 0)])
def test_bad_shapes_name_the_patch(shape):
    with pytest.raises(ValueError, match=r"network\.patch=2"):
        build(shape=shape)


@pytest.mark.parametrize("options", [{"skip": True}, {"local": True}, {"skip": True, "local": True}], ids=str)
def test_options_change_nothing_at_the_start(options):
    """What they add is zero: blocks are the identity, and the same seed gives the same other weights' shapes."""
    network = build(**options)
    x, level, labels = inputs()
    tokens = network.embed(patchify(x, 2))
    out = network(x, level, labels, taps=(1, 2, 3))
    assert all(torch.equal(out.features[n], tokens) for n in (1, 2, 3))
    assert set(build().state_dict()) < set(network.state_dict())


@pytest.mark.parametrize("depth", [3, 4])
def test_skips_join_mirrored_blocks(depth):
    network = shaken(skip=True, depth=depth)
    x, level, labels = inputs()
    taps = tuple(range(1, depth + 1))
    features = network(x, level, labels, taps=taps).features
    condition = silu(network.level(level) + network.label(labels))
    for number in taps[1:]:
        seen, mirrored = features[number - 1], depth + 1 - number
        if mirrored < number:
            seen = seen + network.skips[mirrored - 1](features[mirrored])
        assert torch.equal(features[number], network.blocks[number - 1](seen, condition, network.cos, network.sin))
    assert len(network.skips) == depth // 2


def test_local_adds_a_depthwise_convolution():
    torch.manual_seed(0)
    local = Local(6, (5, 5))
    torch.nn.init.normal_(local.weight)
    x = torch.randn(2, 25, 6)
    kernel = local.weight.permute(2, 0, 1)[:, None]  # (d, 1, 3, 3)
    grid = x.unflatten(1, (5, 5)).permute(0, 3, 1, 2)
    expected = conv2d(grid, kernel, padding=1, groups=6).permute(0, 2, 3, 1).flatten(1, 2)
    assert torch.allclose(local(x), x + expected, atol=1e-6)
    assert local(x.bfloat16()).dtype == torch.bfloat16


def test_every_weight_of_the_options_learns():
    network = shaken(skip=True, local=True)
    network(*inputs()).prediction.square().sum().backward()
    assert all(
        p.grad is not None and p.grad.abs().sum() > 0 for name, p in network.named_parameters() if "label" not in name
    )


def test_shared_modulation_is_one_map_and_offsets():
    """With the shared map in every block of its own, and its offset in the bias, the network is the same."""
    shared = shaken(modulation="shared")
    own = build(modulation="own")
    state = {
        name: value for name, value in shared.state_dict().items() if "shared" not in name and "offset" not in name
    }
    for number, block in enumerate(shared.blocks):
        state[f"blocks.{number}.modulation.weight"] = shared.shared.weight
        state[f"blocks.{number}.modulation.bias"] = shared.shared.bias + block.offset
    own.load_state_dict(state)
    for one, other in zip(shared(*inputs())[:1], own(*inputs())[:1], strict=True):
        assert torch.allclose(one, other, atol=1e-5, rtol=1e-4)


def test_shared_modulation_starts_as_the_identity():
    network = build(modulation="shared")
    x, level, labels = inputs()
    tokens = network.embed(patchify(x, 2))
    assert torch.equal(network(x, level, labels, taps=(3,)).features[3], tokens)


@pytest.mark.parametrize(
    "changes", [{"skip": True}, {"local": True}, {"modulation": "shared"}, {"design": "classic"}], ids=str
)
def test_a_ddt_refuses_what_is_a_dits(changes):
    with pytest.raises(ValueError, match=rf"network\.{next(iter(changes))}="):
        DDTConfig(size="tiny", **changes)


def test_the_classic_design_is_written_out():
    """One block and the head of SiT's own network, in torch's own layers."""
    network = shaken(depth=1, design="classic", inner_block=0).double()
    x, level, labels = inputs()
    block, d = network.blocks[0], network.embed.out_features
    tokens = network.embed(patchify(x.double(), 2)) + network.positions
    c = torch.nn.functional.silu(network.level(level) + network.label(labels))

    def normed(tokens, shift, scale):
        return torch.nn.functional.layer_norm(tokens, (d,), eps=1e-6) * (1 + scale) + shift

    shift_a, scale_a, gate_a, shift_m, scale_m, gate_m = block.modulation(c)[:, None].chunk(6, dim=-1)
    tokens = tokens + gate_a * block.attention(normed(tokens, shift_a, scale_a), network.cos, network.sin)
    tokens = tokens + gate_m * block.mlp(normed(tokens, shift_m, scale_m))
    pixels = network.head.linear(normed(tokens, *network.head.modulation(c)[:, None].chunk(2, dim=-1)))
    assert torch.allclose(unpatchify(pixels, 2, 1, (4, 4)), network(x.double(), level, labels).prediction, atol=1e-10)
