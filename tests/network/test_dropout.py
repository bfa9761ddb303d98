"""Dropout of whole channels: what it multiplies, who draws it, and that nothing of it is left outside of training."""

import math

import pytest
import torch

from mvm import noise
from mvm.network import DDTConfig, DiT, DiTConfig
from mvm.network.fast import recompute
from mvm.network.layers import drop, modulate, patchify

SMALL = {"size": "tiny", "depth": 3, "width": 16, "heads": 2, "patch": 2}
SEEDS = torch.tensor([5, 1, 2**40, 7])


def shaken(**changes):
    """A network with every weight random, so that nothing is hidden by a zero."""
    torch.manual_seed(1)
    network = DiT(DiTConfig(**{**SMALL, **changes}), (1, 8, 8), 5)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.normal_(0, 0.2)
    return network


def inputs(batch=4):
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(batch, 1, 8, 8, generator=generator)
    return x, torch.rand(batch, generator=generator, dtype=torch.float64), torch.arange(batch) % 6


def branch_inputs(network, given, seeds):
    """What attention and MLP of every block see: a list of (B, N, d)."""
    seen = []
    hooks = [
        branch.register_forward_pre_hook(lambda _, given: seen.append(given[0].detach()))
        for block in network.blocks
        for branch in (block.attention, block.mlp)
    ]
    network(*given, seeds=seeds)
    for hook in hooks:
        hook.remove()
    return seen


@pytest.mark.parametrize("centred", [False, True])
def test_a_dropped_modulation_is_the_modulation_dropped(centred):
    draw = torch.Generator().manual_seed(0)
    x, shift, scale = (torch.randn(3, n, 8, generator=draw, dtype=torch.float64) for n in (5, 1, 1))
    kept = torch.tensor([0.0, 1.25]).double()[torch.randint(2, (3, 1, 8), generator=draw)]
    found = modulate(x, *drop(shift, scale, kept), centred)
    torch.testing.assert_close(found, kept * modulate(x, shift, scale, centred), rtol=0, atol=1e-14)
    assert torch.equal(found == 0, (kept == 0).expand_as(found))  # dropped to nothing, not to next to nothing


def test_half_precision_stays_what_it_was():
    """Else a GPU's products after it would be of float32, and its kernels not be taken."""
    shift, scale = torch.ones(2, 1, 4, dtype=torch.bfloat16), torch.ones(2, 1, 4, dtype=torch.bfloat16)
    assert [value.dtype for value in drop(shift, scale, torch.ones(2, 1, 4))] == [torch.bfloat16] * 2


@pytest.mark.parametrize("changes", [{}, {"modulation": "shared"}, {"design": "classic"}], ids=str)
def test_without_seeds_or_share_there_is_none(changes):
    plain, dropping = shaken(**changes), shaken(**changes, dropout=0.5)
    want = plain(*inputs()).prediction
    assert torch.equal(dropping(*inputs()).prediction, want)
    assert torch.equal(plain(*inputs(), seeds=SEEDS).prediction, want)
    assert not torch.allclose(dropping(*inputs(), seeds=SEEDS).prediction, want, atol=1e-2)
    assert plain.state_dict().keys() == dropping.state_dict().keys()


@pytest.mark.parametrize("changes", [{}, {"modulation": "shared"}, {"design": "classic"}], ids=str)
def test_the_network_by_hand(changes):
    """Every branch's input is multiplied by what its own place in the stream of the image's seed says."""
    network = shaken(**changes, dropout=0.25)
    x, level, labels = inputs()
    kept = (noise.uniform(SEEDS, noise.DROPOUT, (3, 2, 16)) >= 0.25).float() / 0.75
    tokens = network.embed(patchify(x, 2)) + (0 if network.positions is None else network.positions)
    c = torch.nn.functional.silu(network.level(level) + network.label(labels))
    condition = c if network.shared is None else network.shared(c)
    for n, block in enumerate(network.blocks):
        shift, scale, gate, shift_m, scale_m, gate_m = block.modulations(condition, None)
        seen = kept[:, n, :1] * modulate(tokens, shift, scale, block.centred)
        tokens = tokens + gate * block.attention(seen, network.cos, network.sin)
        seen = kept[:, n, 1:] * modulate(tokens, shift_m, scale_m, block.centred)
        tokens = tokens + gate_m * block.mlp(seen)
    found = network(x, level, labels, taps=(3,), seeds=SEEDS)
    torch.testing.assert_close(found.features[3], tokens, rtol=0, atol=2e-5)


def test_the_mean_over_seeds_is_what_would_be_seen_without():
    """Of the first branch, which stands behind no other that drops."""
    count, share = 4000, 0.2
    network = shaken(dropout=share)
    given = [value.expand(count, *value.shape[1:]) for value in inputs(1)]
    (plain, *_), (seen, *_) = (branch_inputs(network, given, seeds) for seeds in (None, torch.arange(count)))
    # one factor 0 or 1/(1-p) has variance p/(1-p): its mean over the seeds is off by that, five times at most
    error = 5 * math.sqrt(share / (1 - share) / count)
    assert bool(((seen.mean(0) - plain[0]).abs() <= error * plain[0].abs() + 1e-6).all())
    assert float((seen == 0).double().mean()) == pytest.approx(share, abs=5 * math.sqrt(share / (count * 16)))


def test_channels_are_dropped_of_all_tokens_and_others_in_every_branch():
    seen = branch_inputs(shaken(dropout=0.5), inputs(), SEEDS)
    gone = [(value == 0).all(1) for value in seen]  # (B, d)
    for value, dropped in zip(seen, gone, strict=True):
        assert torch.equal((value == 0).any(1), dropped)
    drawn = {tuple(row.tolist()) for dropped in gone for row in dropped}
    assert len(drawn) == len(gone) * len(SEEDS) == 24


def test_a_mask_depends_on_the_seed_alone():
    network = shaken(dropout=0.4)
    together = torch.stack(list(network.dropout_masks(SEEDS)))
    for place, seed in enumerate(SEEDS):
        assert torch.equal(torch.stack(list(network.dropout_masks(seed[None])))[:, 0], together[:, place])
    given = inputs()
    want = network(*given, seeds=SEEDS).prediction
    order = torch.tensor([2, 0, 3])
    found = network(*(value[order] for value in given), seeds=SEEDS[order]).prediction
    torch.testing.assert_close(found, want[order], rtol=0, atol=1e-5)


@pytest.mark.parametrize("keep_products", [False, True])
def test_what_is_computed_again_drops_the_same(keep_products):
    grads = []
    for blocks in (0, 3):
        network = shaken(dropout=0.5)
        network.blocks.recompute = blocks
        if keep_products:
            recompute.apply(network)
        network(*inputs(), seeds=SEEDS).prediction.square().mean().backward()
        grads.append([parameter.grad for parameter in network.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_compiled_it_is_the_same():
    network = shaken(dropout=0.5)
    want = network(*inputs(), seeds=SEEDS).prediction
    network.compile(backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(network(*inputs(), seeds=SEEDS).prediction, want, rtol=0, atol=1e-5)


@pytest.mark.parametrize("share", [-0.1, 1.0, math.nan])
def test_a_share_out_of_range_is_named(share):
    with pytest.raises(ValueError, match=rf"network\.dropout={share}.*at least 0 and less"):
        DiTConfig(dropout=share)


def test_a_ddt_has_none():
    with pytest.raises(ValueError, match=r"network\.dropout=0\.1 is for network\.kind='dit'"):
        DDTConfig(dropout=0.1)
