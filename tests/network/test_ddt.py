"""The DDT: what it is at the start, that its two parts make the whole, and what every part of it does."""

import pytest
import torch
from torch.nn.functional import silu

from mvm.network import DDT, DDTConfig, DiT, DiTConfig, build_network
from mvm.network.fast import recompute as selective
from mvm.network.layers import patchify, unpatchify

SMALL = {
    "size": "tiny", "depth": 3, "width": 16, "heads": 2, "patch": 2, "head_width": 32, "head_heads": 4, "head_depth": 2,
}  # fmt: skip
CONDITIONINGS = ["adaln", "in-context"]


def build(seed=0, num_classes=5, shape=(3, 8, 8), **changes):
    torch.manual_seed(seed)
    return DDT(DDTConfig(**{**SMALL, **changes}), shape, num_classes)


def shaken(**changes):
    """A network with every weight random, so that nothing is hidden by a zero."""
    network = build(**changes)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.normal_(0, 0.2)
    return network


def inputs(batch=4, shape=(3, 8, 8), num_classes=5):
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(batch, *shape, generator=generator)
    level = torch.rand(batch, generator=generator, dtype=torch.float64)
    return x, level, torch.arange(batch) % (num_classes + 1)


@pytest.mark.parametrize("conditioning", CONDITIONINGS)
@pytest.mark.parametrize("inner_block", [0, 2])
def test_output_is_exactly_zero_at_the_start(inner_block, conditioning):
    out = build(inner_block=inner_block, conditioning=conditioning)(*inputs())
    assert out.prediction.shape == (4, 3, 8, 8)
    assert torch.count_nonzero(out.prediction) == 0
    if inner_block:
        assert out.inner.shape == (4, 3, 8, 8)
        assert torch.count_nonzero(out.inner) == 0
    else:
        assert out.inner is None


def test_blocks_are_the_identity_at_the_start_where_they_are_modulated():
    network = build()
    x, level, labels = inputs()
    tokens = network.embed(patchify(x, 2))
    features = network(x, level, labels, taps=(1, 2, 3)).features
    assert all(torch.equal(features[n], tokens) for n in (1, 2, 3))


@pytest.mark.parametrize("conditioning", CONDITIONINGS)
def test_condition_then_head_is_the_call_to_the_bit(conditioning):
    network = shaken(inner_block=2, conditioning=conditioning)
    x, level, labels = inputs()
    whole = network(x, level, labels, taps=(1, 3))
    condition = network.condition(x, level, labels, taps=(1, 3))
    assert condition.tokens.shape == (4, 16, 16)
    assert torch.equal(network.head(x, level, condition), whole.prediction)
    assert torch.equal(condition.inner, whole.inner)
    assert sorted(whole.features) == sorted(condition.features) == [1, 3]
    assert all(torch.equal(condition.features[n], whole.features[n]) for n in (1, 3))
    assert torch.equal(condition.features[3], condition.tokens)


def test_the_backbone_is_that_of_a_dit():
    """Given the weights of a DiT of the same shape, the tokens are a DiT's to the bit."""
    network = shaken()
    dit = DiT(DiTConfig(**{name: SMALL[name] for name in ("size", "depth", "width", "heads", "patch")}), (3, 8, 8), 5)
    own = network.state_dict()
    dit.load_state_dict({name: own.get(name, value) for name, value in dit.state_dict().items()})
    assert set(dit.state_dict()) - set(own) == {
        "head.linear.bias", "head.linear.weight", "head.modulation.bias", "head.modulation.weight"
    }  # fmt: skip
    x, level, labels = inputs()
    assert torch.equal(network.condition(x, level, labels).tokens, dit(x, level, labels, taps=(3,)).features[3])


@pytest.mark.parametrize("conditioning", CONDITIONINGS)
def test_head_by_hand(conditioning):
    """The latent embedded anew, every token modulated by silu(project(silu(level + z)))."""
    network = shaken(conditioning=conditioning)
    x, level, labels = inputs()
    z = network.condition(x, level, labels).tokens
    wide, c = network.wide, silu(network.wide.project(silu(network.level(level)[:, None] + z)))
    tokens = wide.embed(patchify(x, 2))
    for block in wide.blocks:
        shift_a, scale_a, gate_a, shift_m, scale_m, gate_m = block.modulation(c).split(32, dim=-1)
        normed = tokens / (tokens.square().mean(-1, keepdim=True) + 1e-6).sqrt()
        tokens = tokens + gate_a * block.attention(normed * (1 + scale_a) + shift_a, wide.cos, wide.sin)
        normed = tokens / (tokens.square().mean(-1, keepdim=True) + 1e-6).sqrt()
        tokens = tokens + gate_m * block.mlp(normed * (1 + scale_m) + shift_m)
    shift, scale = wide.out.modulation(c).split(32, dim=-1)
    normed = tokens / (tokens.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    want = unpatchify(wide.out.linear(normed * (1 + scale) + shift), 2, 3, (4, 4))
    torch.testing.assert_close(network(x, level, labels).prediction, want, rtol=1e-4, atol=1e-4)


def test_a_token_of_the_condition_moves_its_own_patch_first():
    """With attention in the head switched off, a changed token is felt in its own patch and nowhere else."""
    network = shaken()
    with torch.no_grad():
        for block in network.wide.blocks:
            block.attention.out.weight.zero_()
    x, level, labels = inputs()
    condition = network.condition(x, level, labels)
    tokens = condition.tokens.clone()
    tokens[:, 6] += 1  # second row of four, third column: pixels 2 and 3 down, 4 and 5 across
    before, after = network.head(x, level, condition), network.head(x, level, condition._replace(tokens=tokens))
    moved = (before != after).any(1).any(0)
    want = torch.zeros(8, 8, dtype=torch.bool)
    want[2:4, 4:6] = True
    assert torch.equal(moved, want)


def test_in_context_blocks_by_hand():
    network = shaken(conditioning="in-context", time_tokens=2, class_tokens=3)
    x, level, labels = inputs()
    out = network(x, level, labels, taps=(1, 2, 3))
    time = network.context.time + network.level(level)[:, None]
    kind = network.context.kind + network.label(labels)[:, None]
    tokens = torch.cat((network.embed(patchify(x, 2)), time, kind), 1)
    assert tokens.shape == (4, 16 + 5, 16)
    assert torch.equal(network.cos[16:], torch.ones(5, 8))  # tokens without a place are not turned
    assert torch.count_nonzero(network.sin[16:]) == 0
    assert torch.equal(network.cos[:16], build().cos)
    for number, block in enumerate(network.blocks, start=1):
        normed = tokens / (tokens.square().mean(-1, keepdim=True) + 1e-6).sqrt()
        tokens = tokens + block.attention(normed, network.cos, network.sin)
        normed = tokens / (tokens.square().mean(-1, keepdim=True) + 1e-6).sqrt()
        tokens = tokens + block.mlp(normed)
        torch.testing.assert_close(out.features[number], tokens[:, :16], rtol=1e-4, atol=1e-4)


def test_in_context_tokens_differ_at_the_start_and_blocks_have_no_modulation():
    network = build(conditioning="in-context")
    assert (network.context.time.shape, network.context.kind.shape) == ((4, 16), (8, 16))
    assert len(torch.cat((network.context.time, network.context.kind)).unique(dim=0)) == 12
    assert not [name for name, _ in network.blocks.named_parameters() if "modulation" in name]
    assert build().context is None


@pytest.mark.parametrize("conditioning", CONDITIONINGS)
def test_inner_head_reads_its_block_and_nothing_after_it(conditioning):
    network = shaken(inner_block=2, conditioning=conditioning)
    x, level, labels = inputs()
    before = network(x, level, labels, taps=(2,))
    c = silu(network.level(level)[:, None] + before.features[2])
    assert torch.equal(before.inner, unpatchify(network.inner_head(c, c), 2, 3, (4, 4)))
    with torch.no_grad():
        for parameter in (*network.blocks[2].parameters(), *network.wide.parameters()):
            parameter.add_(0.1)
    after = network(x, level, labels)
    assert torch.equal(after.inner, before.inner)
    assert not torch.allclose(after.prediction, before.prediction, atol=1e-4)


@pytest.mark.parametrize("conditioning", CONDITIONINGS)
def test_level_class_position_and_each_part_of_x_matter(conditioning):
    network = shaken(conditioning=conditioning)
    x, level, labels = inputs()
    base = network(x, level, labels).prediction
    assert not torch.allclose(network(x, level * 0.5, labels).prediction, base, atol=1e-4)
    assert not torch.allclose(network(x, level, (labels + 1) % 6).prediction, base, atol=1e-4)
    moved = network(x.roll(2, -1), level, labels).prediction.roll(-2, -1)
    assert not torch.allclose(moved, base, atol=1e-4)
    condition = network.condition(x, level, labels)
    assert not torch.allclose(network.head(x + 0.1, level, condition), base, atol=1e-4)  # the head sees x itself
    assert not torch.allclose(network.head(x, level * 0.5, condition), base, atol=1e-4)  # and the level of the moment
    other = network.condition(x + 0.1, level, labels)
    assert not torch.allclose(network.head(x, level, other), base, atol=1e-4)


@pytest.mark.parametrize("conditioning", CONDITIONINGS)
def test_null_class_is_one_more_label(conditioning):
    network = shaken(conditioning=conditioning)
    assert network.null == 5
    assert network.label.num_embeddings == 6
    x, level, _ = inputs()
    null, third = torch.full((4,), network.null), torch.full((4,), 3)
    before = network(x, level, null).prediction, network(x, level, third).prediction
    with torch.no_grad():
        network.label.weight[network.null] += 1
    assert not torch.allclose(network(x, level, null).prediction, before[0], atol=1e-4)
    assert torch.equal(network(x, level, third).prediction, before[1])
    with pytest.raises(IndexError):
        network(x, level, null + 1)


def test_rows_of_a_batch_do_not_see_each_other():
    network = shaken(conditioning="in-context")
    x, level, labels = inputs()
    together = network(x, level, labels).prediction
    for i in range(4):
        alone = network(x[i : i + 1], level[i : i + 1], labels[i : i + 1]).prediction
        assert torch.allclose(alone[0], together[i], atol=1e-4)


@pytest.mark.parametrize("conditioning", CONDITIONINGS)
def test_gradient_reaches_every_parameter_in_four_steps(conditioning):
    """It opens from the back: last maps first, then the head's modulations, then what they gate and what told them."""
    network = build(inner_block=2, conditioning=conditioning)
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-2)
    x, level, labels = inputs(batch=12)
    reached = []
    for _ in range(4):
        out = network(x, level, labels)
        loss = ((out.prediction - x) ** 2).mean() + ((out.inner - x) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        reached.append({name for name, p in network.named_parameters() if torch.count_nonzero(p.grad)})
        optimizer.step()
    last = {f"{head}.linear.{kind}" for head in ("wide.out", "inner_head") for kind in ("weight", "bias")}
    assert reached[0] == last
    assert reached[3] == {name for name, _ in network.named_parameters()}


@pytest.mark.parametrize("conditioning", CONDITIONINGS)
@pytest.mark.parametrize("keep_products", [False, True])
@pytest.mark.parametrize("recompute", [1, 3])
def test_recompute_changes_neither_answers_nor_gradients(recompute, keep_products, conditioning):
    grads, outputs, calls = [], [], []
    for blocks in (0, recompute):
        network = shaken(inner_block=1, conditioning=conditioning)
        network.blocks.recompute = blocks
        if keep_products:
            selective.apply(network)
        network.blocks[0].attention.register_forward_pre_hook(lambda *_: calls.append(1))
        out = network(*inputs(), taps=(1, 2, 3))
        loss = out.prediction.square().mean() + out.inner.square().mean()
        (loss + sum(f.sin().mean() for f in out.features.values())).backward()
        grads.append({name: p.grad for name, p in network.named_parameters()})
        outputs.append(out)
    assert len(calls) == 1 + 2
    assert torch.equal(outputs[0].prediction, outputs[1].prediction)
    assert torch.equal(outputs[0].inner, outputs[1].inner)
    assert all(torch.equal(outputs[0].features[n], outputs[1].features[n]) for n in (1, 2, 3))
    assert all(torch.equal(grads[0][name], grads[1][name]) for name in grads[0])
    assert all(torch.count_nonzero(value) for value in grads[0].values())


@pytest.mark.parametrize("conditioning", CONDITIONINGS)
def test_bfloat16_by_autocast_and_by_weights(conditioning):
    network = shaken(inner_block=1, conditioning=conditioning)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.mul_(0.5)
    x, level, labels = inputs()
    with torch.no_grad():
        exact = network(x, level, labels)
        with torch.autocast("cpu", torch.bfloat16):
            cast = network(x, level, labels, taps=(3,))
        assert cast.prediction.dtype == cast.inner.dtype == cast.features[3].dtype == torch.bfloat16
        for ours, want in ((cast.prediction, exact.prediction), (cast.inner, exact.inner)):
            assert not torch.equal(ours.float(), want)
            assert float((ours.float() - want).norm() / want.norm()) < 0.05
        half = network.bfloat16()(x.bfloat16(), level, labels)
    assert half.prediction.dtype == half.inner.dtype == torch.bfloat16
    assert bool(half.prediction.isfinite().all())


def test_compiles_in_one_piece():
    """No branch depends on data: torch traces the whole, and both parts alone, without a break."""
    network = shaken(inner_block=1, conditioning="in-context")
    x, level, labels = inputs()
    call, condition, head = (
        torch.compile(part, backend="eager", fullgraph=True) for part in (network, network.condition, network.head)
    )
    want = network(x, level, labels, taps=(2,))
    got = call(x, level, labels, taps=(2,))
    assert torch.equal(got.prediction, want.prediction)
    assert torch.equal(got.features[2], want.features[2])
    assert torch.equal(head(x, level, condition(x, level, labels)), want.prediction)


@pytest.mark.parametrize("conditioning", CONDITIONINGS)
def test_state_holds_parameters_only(conditioning):
    network = build(inner_block=1, conditioning=conditioning)
    assert set(network.state_dict()) == {name for name, _ in network.named_parameters()}


def test_reset_forgets_all_training():
    network = shaken(inner_block=1, conditioning="in-context")
    torch.manual_seed(0)
    network.reset()
    out = network(*inputs())
    assert torch.count_nonzero(out.prediction) == torch.count_nonzero(out.inner) == 0
    assert float(network.context.kind.detach().std()) == pytest.approx(0.02, rel=0.3)


@pytest.mark.parametrize(("size", "head"), [("tiny", (2, 128, 4)), ("S", (2, 2048, 16)), ("XL", (2, 2048, 16))])
def test_the_head_has_its_size_by_default(size, head):
    assert DDTConfig(size=size).head_dimensions == head
    assert DDTConfig(size=size).patch == 1
    assert DDTConfig(size=size).dimensions == DiTConfig(size=size).dimensions
    assert DDTConfig(size=size, head_depth=3, head_heads=8).head_dimensions == (3, head[1], 8)


def test_a_config_builds_its_own_network():
    ddt, dit = DDTConfig(**SMALL), DiTConfig(size="tiny")
    assert type(build_network(ddt, (3, 8, 8), 5)) is DDT
    assert type(build_network(dit, (3, 8, 8), 5)) is DiT


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"size": "XXL"}, r"network\.size='XXL'.*'XL'"),
        ({"conditioning": "adln"}, r"network\.conditioning='adln'.*'adaln'"),
        ({"time_tokens": 0}, r"network\.time_tokens=0"),
        ({"class_tokens": -1}, r"network\.class_tokens=-1"),
        ({"head_width": 30}, r"network\.head_width=30.*multiple of 4"),
        ({"head_width": 24, "head_heads": 4}, r"network\.head_heads=4.*multiple of 4"),
        ({"head_depth": -1}, r"network\.head_depth=-1"),
        ({"head_heads": -2}, r"network\.head_heads=-2"),
        ({"patch": 0}, r"network\.patch=0"),
        ({"inner_block": 3}, r"network\.inner_block=3.*\[0, 2\]"),
    ],
)
def test_bad_configs_name_the_option(changes, words):
    with pytest.raises(ValueError, match=words):
        DDTConfig(**{**SMALL, **changes})


@pytest.mark.parametrize("shape", [(1, 8, 7), (1, 9, 9)])
def test_bad_shapes_name_the_patch(shape):
    with pytest.raises(ValueError, match=r"network\.patch=2"):
        build(shape=shape)


@pytest.mark.parametrize("taps", [(0,), (4,)])
def test_bad_taps_are_named(taps):
    with pytest.raises(ValueError, match=r"taps=.*1 to 3"):
        build().condition(*inputs(), taps=taps)
