"""The discriminator: its features, its heads by a second writing, hinge losses, the adaptive weight."""

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.nn.functional import conv1d, interpolate, leaky_relu

from mvm.network.pretrained import HALF, IMAGENET, Encoder, PatchTokens
from mvm.objective.adversarial import (
    NORMS,
    Discriminator,
    LocalBatchNorm,
    TransformerFeatures,
    adaptive_weight,
    discriminator_hinge,
    eight_bit,
    logits_of_both,
    quarter_blocks,
)

transformers = pytest.importorskip("transformers", reason="needs mean-velocity-matching[encoders]")

SMALL = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "num_channels": 3, "patch_size": 4}
DEEP = {**SMALL, "intermediate_size": 24}


def draw(*shape, seed=0):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed)) * 2 - 1


def stirred(model, seed=0):
    """The model with every parameter drawn anew: defaults such as zero biases would hide mistakes."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return model


def dinov2(dropout=0.0):
    config = transformers.Dinov2Config(**SMALL, image_size=16, hidden_dropout_prob=dropout, drop_path_rate=dropout)
    return stirred(transformers.Dinov2Model(config))


def tiny(model=None, extra=1, arguments=None, scaling=IMAGENET):
    body = PatchTokens(model or dinov2(), extra, arguments or {})
    return Encoder("tiny", body, resolution=16, side=4, width=16, scaling=scaling)


def discriminator(norm="batch", seed=0, **options):
    torch.manual_seed(seed)
    return Discriminator(TransformerFeatures(tiny(dinov2(**options))), norm)


# ---- features ----


def kinds():
    registers = transformers.Dinov2WithRegistersConfig(**SMALL, image_size=16, num_register_tokens=3)
    return [
        (dinov2(), 1, {}, IMAGENET),
        (stirred(transformers.Dinov2WithRegistersModel(registers)), 4, {}, IMAGENET),
        (
            stirred(transformers.DINOv3ViTModel(transformers.DINOv3ViTConfig(**DEEP, num_register_tokens=2))),
            3,
            {},
            IMAGENET,
        ),
        (
            stirred(transformers.SiglipVisionModel(transformers.SiglipVisionConfig(**DEEP, image_size=16))),
            0,
            {"interpolate_pos_encoding": True},
            HALF,
        ),
    ]


@pytest.mark.parametrize("kind", range(4), ids=["dinov2", "registers", "dinov3", "siglip"])
def test_taps_are_the_blocks_outputs_and_the_last_state(kind):
    model, extra, arguments, scaling = kinds()[kind]
    features = TransformerFeatures(tiny(model, extra, arguments, scaling), (1, 3))
    seen = []
    blocks = next(m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == 3)
    for block in blocks:
        block.register_forward_hook(lambda _m, _i, out: seen.append(out if torch.is_tensor(out) else out[0]))
    images = draw(2, 3, 16, 16)
    found = features(images)
    mean, std = (torch.tensor(values)[:, None, None] for values in (scaling.mean, scaling.std))
    want = model(pixel_values=((images + 1) / 2 - mean) / std, **arguments).last_hidden_state
    assert features.taps == len(found) == 3
    assert all(tap.shape == (2, 16, 16) for tap in found)
    assert torch.equal(found[0], seen[0][:, extra:])
    assert torch.equal(found[1], seen[2][:, extra:])
    assert torch.allclose(found[2], want[:, extra:], atol=1e-5)
    assert not torch.allclose(found[1], found[2])
    published = TransformerFeatures(tiny(model, extra, arguments, scaling), (1, 2), last_norm=False)(images)
    assert torch.equal(published[0], found[0])
    assert torch.equal(published[2], found[1])  # the last block's tokens, though it is not among the chosen ones


def test_images_are_resized_with_a_gradient_and_grey_ones_are_spread():
    features = TransformerFeatures(tiny())
    images = draw(2, 1, 9, 11).requires_grad_()
    large = interpolate(images, size=(16, 16), mode="bilinear", align_corners=False).expand(-1, 3, -1, -1)
    found = features(images)
    for ours, theirs in zip(found, features(large), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-4)
    (gradient,) = torch.autograd.grad(found[-1].square().sum(), images)
    assert (gradient != 0).all()


def test_quarters_of_the_depth():
    assert quarter_blocks(12) == (3, 6, 9, 12)
    assert quarter_blocks(24) == (6, 12, 18, 24)
    assert quarter_blocks(3) == (1, 2, 3)
    assert quarter_blocks(1) == (1,)
    assert TransformerFeatures(tiny()).blocks == (1, 2, 3)


def test_features_refuse_other_encoders_and_blocks():
    other = Encoder("conv", nn.Conv2d(3, 16, 4, 4), resolution=16, side=4, width=16, scaling=HALF)
    with pytest.raises(ValueError, match="'conv' is no vision transformer"):
        TransformerFeatures(other)
    for block in (0, 4):
        with pytest.raises(ValueError, match=rf"blocks=\[1, {block}\]: 'tiny' has the blocks 1 to 3, so no {block}"):
            TransformerFeatures(tiny(), (1, block))


# ---- heads ----


def head_by_hand(head, tokens, norm):
    """The head by functions; norm(x, weight, bias)."""
    x = conv1d(tokens.transpose(1, 2), head.enter.weight, head.enter.bias)
    x = leaky_relu(norm(x, head.enter_norm), 0.2)
    ring = torch.cat((x[..., -4:], x, x[..., :4]), dim=-1)
    y = leaky_relu(norm(conv1d(ring, head.mix.weight, head.mix.bias), head.mix_norm), 0.2)
    return conv1d((x + y) / 2**0.5, head.leave.weight, head.leave.bias)[:, 0]


def local_batch_norm(x, module):
    parts = []
    for start in range(0, len(x), 8):
        part = x[start : start + 8]
        centred = part - part.mean((0, 2), keepdim=True)
        parts.append(centred / (centred.square().mean((0, 2), keepdim=True) + 1e-5).sqrt())
    return torch.cat(parts) * module.weight[None, :, None] + module.bias[None, :, None]


def image_norm(x, module):
    centred = x - x.mean(2, keepdim=True)
    standard = centred / (centred.square().mean(2, keepdim=True) + 1e-6).sqrt()
    return standard * module.weight[None, :, None] + module.bias[None, :, None]


def image_group_norm(x, module):
    grouped = x.reshape(len(x), 8, -1)
    centred = grouped - grouped.mean(2, keepdim=True)
    standard = (centred / (centred.square().mean(2, keepdim=True) + 1e-5).sqrt()).reshape(x.shape)
    return standard * module.weight[None, :, None] + module.bias[None, :, None]


@pytest.mark.parametrize(
    ("name", "norm"), [("batch", local_batch_norm), ("image", image_norm), ("group", image_group_norm)]
)
@pytest.mark.parametrize("batch", [3, 8, 21])
def test_heads_equal_the_plain_writing(name, norm, batch):
    judge = discriminator(name)
    stirred(judge.heads, seed=1)
    judge.eval()
    images = draw(batch, 3, 16, 16)
    taps = judge.features(images)
    want = torch.cat([head_by_hand(head, tap, norm) for head, tap in zip(judge.heads, taps, strict=True)], 1)
    found = judge(images)
    assert found.shape == (batch, 4 * 16)
    assert found.dtype == torch.float32
    assert torch.allclose(found, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["batch", "image", "group"])
def test_a_batch_equals_its_halves_joined(name):
    """Of the local batch norm: when it is cut between its groups of 8; of the others: wherever it is cut."""
    judge = discriminator(name).eval()
    images = draw(24, 3, 16, 16)
    whole = judge(images)
    assert torch.allclose(torch.cat((judge(images[:8]), judge(images[8:]))), whole, atol=1e-5)
    elsewhere = torch.cat((judge(images[:5]), judge(images[5:])))
    assert torch.allclose(elsewhere, whole, atol=1e-5) == (name != "batch")


def test_the_image_norm_to_the_last_digits():
    """Channels of a deviation near the root of eps, where eps counts: against float64."""
    norm, x = NORMS["image"](3), 2e-3 * draw(5, 3, 64)
    stirred(norm)
    want = image_norm(x.double(), norm.double())
    found = norm.float()(x)
    assert (found - want).abs().max() < 5e-7
    assert (found - LocalBatchNorm(3, together=1)(x)).abs().max() > 0.1


def test_local_norm_has_no_memory():
    norm, x = LocalBatchNorm(4), draw(8, 4, 5)
    before = norm(x)
    norm(100 * draw(8, 4, 5, seed=1))
    assert torch.equal(norm(x), before)
    assert list(dict(norm.named_buffers())) == []


def test_spectral_norms_come_to_one():
    judge = discriminator("group")
    stirred(judge.heads, seed=2)
    layers = [layer for head in judge.heads for layer in (head.enter, head.mix, head.leave)]

    def norms():
        return [float(torch.linalg.matrix_norm(layer.weight.detach().flatten(1), ord=2)) for layer in layers]

    judge.eval()
    assert max(norms()) > 1.1
    judge.train()
    for layer in layers:
        for _ in range(500):
            _ = layer.weight  # a step of the power iteration, as each forward takes one
    judge.eval()
    assert norms() == pytest.approx([1.0] * 12, abs=1e-4)


@pytest.mark.parametrize("count", [8, 5])
def test_one_step_of_the_power_iteration_per_pair(count):
    """Real and fake are judged by the same weights: in one pass, or in two where a batch norm would join them."""
    one, other = discriminator(), discriminator()
    for judge in (one, other):
        stirred(judge.heads, seed=2)
        judge.train()
    real, fake = draw(count, 3, 16, 16), draw(count, 3, 16, 16, seed=1)
    logits = logits_of_both(one, torch.cat((real, fake)))
    torch.testing.assert_close(logits[0], other(real), rtol=0, atol=1e-6)
    assert all(torch.equal(a, b) for a, b in zip(one.buffers(), other.buffers(), strict=True))
    other.eval()
    torch.testing.assert_close(logits[1], other(fake), rtol=0, atol=1e-6)


def test_heads_compile_as_one_program_for_learning_and_one_for_judging():
    """A program per head would be more than the compiler allows; what they give is what they give uncompiled."""
    judge, plain, counter = discriminator("image"), discriminator("image"), CompileCounter()
    judge.heads.compile(backend=counter, fullgraph=True)
    images = draw(4, 3, 16, 16)
    for _ in range(3):
        for each in (judge, plain):
            each.train()
        learned = [logits_of_both(each, torch.cat((images, -images)))[0] for each in (judge, plain)]
        torch.testing.assert_close(*learned, rtol=0, atol=1e-6)
        with judge.judging(), plain.judging():
            torch.testing.assert_close(judge(images), plain(images), rtol=0, atol=1e-6)
    assert counter.frame_count == 2


def test_unknown_norm_and_too_few_tokens():
    with pytest.raises(ValueError, match=r"norm='bach' is unknown.*'batch'"):
        Discriminator(TransformerFeatures(tiny()), "bach")
    small = Encoder("tiny", PatchTokens(dinov2(), 1, {}), resolution=4, side=1, width=16, scaling=HALF)
    with pytest.raises(ValueError, match="a head needs 4 tokens or more, the encoder gives 1"):
        Discriminator(TransformerFeatures(small))(draw(1, 3, 4, 4))


# ---- learning ----


def test_heads_learn_and_features_do_not():
    judge = discriminator(dropout=0.5)
    judge.train()
    assert judge.heads.training
    assert not any(module.training for module in judge.features.modules())
    frozen = {name: value.clone() for name, value in judge.features.state_dict().items()}
    before = [parameter.detach().clone() for parameter in judge.heads.parameters()]
    optimizer = torch.optim.SGD(judge.parameters(), 0.1)
    real, fake = draw(8, 3, 16, 16), draw(8, 3, 16, 16, seed=1)
    discriminator_hinge(*logits_of_both(judge, torch.cat((real, fake)))).backward()
    optimizer.step()
    assert all(parameter.grad is None for parameter in judge.features.parameters())
    assert all(torch.equal(value, frozen[name]) for name, value in judge.features.state_dict().items())
    moved = [not torch.equal(a, b) for a, b in zip(before, judge.heads.parameters(), strict=True)]
    # a bias before a batch norm does nothing, so its gradient is rounding alone
    assert sum(moved) >= len(moved) - 2 * len(judge.heads)


def test_what_is_judged_gets_a_gradient_and_the_judge_none():
    judge = discriminator()
    judge.train()
    buffers = [value.clone() for value in judge.buffers()]
    images = draw(8, 3, 16, 16).requires_grad_()
    with judge.judging():
        assert not judge.heads.training
        logits = judge(images)
    assert judge.heads.training
    assert all(parameter.requires_grad for parameter in judge.heads.parameters())
    (-logits.mean()).backward()
    assert images.grad is not None
    assert images.grad.norm() > 0
    assert all(parameter.grad is None for parameter in judge.parameters())
    assert all(torch.equal(a, b) for a, b in zip(buffers, judge.buffers(), strict=True))


@pytest.mark.parametrize(("norm", "steps"), [("group", 25), ("batch", 130), ("image", 130)])
def test_two_constants_are_told_apart_after_a_few_steps(norm, steps):
    """The batch norm needs more: it takes real and fake apart, so that nothing is left of a mean they do not share."""
    real, fake = torch.full((8, 3, 16, 16), 0.5), torch.full((8, 3, 16, 16), -0.5)
    judge = discriminator(norm)
    judge.train()
    optimizer = torch.optim.Adam(judge.heads.parameters(), 1e-2)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = discriminator_hinge(*logits_of_both(judge, torch.cat((real, fake))))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    judge.eval()
    assert losses[0] > 0.7
    assert losses[-1] < 0.3
    assert judge(real).mean() > 0.5
    assert judge(fake).mean() < -0.5


# ---- losses ----


def test_hinge_by_hand():
    real, fake = torch.tensor([2.0, 0.5, -1.0, 1.0]), torch.tensor([-3.0, 0.0, 2.0, -1.0])
    assert float(discriminator_hinge(real, fake)) == ((0 + 0.5 + 2 + 0) / 4 + (0 + 1 + 3 + 0) / 4) / 2


def test_eight_bit_levels():
    values = torch.tensor([-1.7, -1.0, -0.001, 0.5, 1.0, 1.2], requires_grad=True)
    found = eight_bit(values)
    assert not found.requires_grad
    assert torch.allclose((found + 1) * 127.5, torch.tensor([0.0, 0.0, 127.0, 191.0, 255.0, 255.0]), atol=1e-4)
    assert torch.equal(eight_bit(found), found)


def test_adaptive_weight_by_hand():
    assert float(adaptive_weight(torch.tensor([[3.0, 4.0]]), torch.tensor([0.0, 2.0]))) == pytest.approx(2.5, rel=1e-6)
    assert float(adaptive_weight(torch.ones(1), torch.zeros(1))) == 1e4
    assert float(adaptive_weight(torch.zeros(1), torch.zeros(1))) == 0
    assert float(adaptive_weight(torch.full((4,), 1e-4), torch.full((1,), 1e-6))) == pytest.approx(100, rel=1e-4)


def test_adaptive_weight_is_taken_in_float32():
    """The squares of 300 overflow float16."""
    big = torch.full((4,), 300.0, dtype=torch.float16)
    assert float(adaptive_weight(big, big)) == pytest.approx(1, rel=1e-5)
