"""Stage 1's objective: its parts by hand, lambda from gradients known in closed form, and a decoder that learns."""

import dataclasses

import pytest
import torch
from torch import nn

from mvm import noise
from mvm.latent import RAE
from mvm.metrics.lpips import LPIPS
from mvm.network.pretrained import IMAGENET, Encoder, PatchTokens
from mvm.objective import reconstruction
from mvm.objective.adversarial import Discriminator, TransformerFeatures, discriminator_hinge, eight_bit
from mvm.objective.reconstruction import Reconstruction, ReconstructionConfig, build

transformers = pytest.importorskip("transformers", reason="needs mean-velocity-matching[encoders]")

SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "num_channels": 3, "patch_size": 4}
SEEDS = torch.arange(8)
SIDE = 32  # what LPIPS needs at least, about


def draw(*shape, seed=0):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed)) * 2 - 1


@pytest.fixture
def judge():
    torch.manual_seed(0)
    network = transformers.Dinov2Model(transformers.Dinov2Config(**SMALL, image_size=16))
    for parameter in network.parameters():
        nn.init.normal_(parameter, std=0.3)
    encoder = Encoder("tiny", PatchTokens(network, 1, {}), resolution=16, side=4, width=16, scaling=IMAGENET)
    return Discriminator(TransformerFeatures(encoder))


@pytest.fixture(scope="module")
def lpips():
    torch.manual_seed(0)
    network = LPIPS()
    for name, value in network.state_dict().items():
        if name.startswith("lin"):
            value.uniform_(0, 0.1)
        elif value.ndim == 4:
            value.normal_(0, (2 / value[0].numel()) ** 0.5)
    return network


class Decoder(nn.Module):
    """A row of 4 numbers -> a small image."""

    def __init__(self, side=SIDE, width=6, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.side, self.enter, self.out = side, nn.Linear(4, width), nn.Linear(width, 3 * side * side)

    def forward(self, latents):
        return self.out(self.enter(latents).tanh()).unflatten(1, (3, self.side, self.side))


NOW = ReconstructionConfig(disc_start=0, gan_start=0)


def grads(module):
    return [parameter.grad for parameter in module.parameters()]


# ---- parts ----


def test_restoration_by_hand(lpips):
    output, target = draw(2, 3, SIDE, SIDE), draw(2, 3, SIDE, SIDE, seed=1)
    objective = Reconstruction(ReconstructionConfig(l1=2, lpips=3, gan=0), lpips)
    loss = objective.restore(output, target)
    l1 = ((output + 1) / 2 - (target + 1) / 2).abs().mean()
    distance = lpips(output, target).mean()
    assert float(loss.parts["l1"]) == pytest.approx(float(l1), rel=1e-6)
    assert torch.equal(loss.parts["lpips"], distance)
    assert float(loss.total) == pytest.approx(float(2 * l1 + 3 * distance), rel=1e-6)


def test_a_part_of_weight_zero_is_not_computed(lpips):
    output, target = draw(2, 3, 8, 8), draw(2, 3, 8, 8, seed=1)  # too small for LPIPS
    loss = Reconstruction(ReconstructionConfig(lpips=0, gan=0)).generator(output, target, SEEDS[:2], 0, output)
    assert set(loss.parts) == {"l1", "total"}
    assert torch.equal(loss.total, loss.parts["l1"])
    large = draw(2, 2, 3, SIDE, SIDE)
    loss = Reconstruction(ReconstructionConfig(l1=0, gan=0), lpips).generator(*large, SEEDS[:2], 0, output)
    assert set(loss.parts) == {"lpips", "total"}


def test_restoration_ignores_autocast(lpips):
    output, target = draw(2, 3, SIDE, SIDE), draw(2, 3, SIDE, SIDE, seed=1)
    objective = Reconstruction(ReconstructionConfig(gan=0), lpips)
    want = objective.restore(output, target).total
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(objective.restore(output, target).total, want)


# ---- the decoder's loss ----


def test_the_total_and_its_gradient_are_those_of_the_weighted_sum(lpips, judge):
    """Against the plain way: losses added up, lambda from two backward passes to the last layer."""
    decoder, latents, target = Decoder(), draw(8, 4), draw(8, 3, SIDE, SIDE, seed=1)
    objective = Reconstruction(NOW, lpips, judge)
    found = objective.generator(decoder(latents), target, SEEDS, 0, decoder.out.weight)
    found.total.backward()
    ours = [gradient.clone() for gradient in grads(decoder)]

    decoder.zero_grad()
    output = decoder(latents)
    restored = objective.restore(output, target).total
    judge.eval()
    gan = -judge(objective.augment(output, SEEDS)).mean()
    pulls = [torch.autograd.grad(loss, decoder.out.weight, retain_graph=True)[0].norm() for loss in (restored, gan)]
    ratio = pulls[0] / (pulls[1] + 1e-6)
    total = restored + 0.75 * ratio * gan
    total.backward()

    assert 0 < float(ratio) < 1e4
    assert float(found.parts["lambda"]) == pytest.approx(float(ratio), rel=1e-4)
    assert float(found.parts["gan"]) == pytest.approx(gan.item(), rel=1e-4, abs=1e-6)
    assert found.total.item() == pytest.approx(total.item(), rel=1e-4)
    assert torch.equal(found.parts["total"], found.total.detach())
    assert set(found.parts) == {"l1", "lpips", "gan", "lambda", "total"}
    for mine, theirs in zip(ours, grads(decoder), strict=True):
        assert (mine - theirs).norm() < 1e-4 * theirs.norm()


def test_lambda_is_the_ratio_of_known_gradients(monkeypatch):
    """The last layer is y = W h; of sum(a y) the gradient is the sum of a h^T, worked out here by numbers."""
    last = nn.Parameter(torch.zeros(12, 2))
    hidden = torch.tensor([[3.0, 4.0]])
    output = (hidden @ last.T).unflatten(1, (3, 2, 2))
    objective = Reconstruction(dataclasses.replace(NOW, lpips=0), None, nn.Identity())
    # L1 to images of -1: its gradient at each of 12 outputs is 1/24; |a h^T| = sqrt(12) / 24 * 5
    target = -torch.ones(1, 3, 2, 2)
    # the adversarial loss here: 0.3 of one output alone; |a h^T| = 0.3 * 5
    monkeypatch.setattr(Reconstruction, "fool", lambda self, images, seeds: 0.3 * images[0, 1, 0, 1])
    loss = objective.generator(output, target, torch.zeros(1), 0, last)
    want = (12**0.5 / 24 * 5) / (0.3 * 5 + 1e-6)
    assert float(loss.parts["lambda"]) == pytest.approx(want, rel=1e-5)
    loss.total.backward()
    direction = torch.full((12,), 1 / 24)
    direction[5] += 0.75 * want * 0.3  # channel 1, row 0, column 1
    assert last.grad is not None
    assert torch.allclose(last.grad, direction[:, None] * hidden, rtol=1e-5)


def test_the_generators_loss_moves_nothing_of_the_discriminator(lpips, judge):
    judge.train()
    decoder = Decoder()
    state = {name: value.clone() for name, value in judge.state_dict().items()}
    objective = Reconstruction(NOW, lpips, judge)
    objective.generator(decoder(draw(8, 4)), draw(8, 3, SIDE, SIDE), SEEDS, 0, decoder.out.weight).total.backward()
    assert all(gradient is None for gradient in grads(judge))
    assert all(torch.equal(value, state[name]) for name, value in judge.state_dict().items())
    assert judge.heads.training
    assert all(gradient is not None and gradient.norm() > 0 for gradient in grads(decoder))


@pytest.mark.parametrize(("step", "calls"), [(0, 0), (4, 0), (5, 1), (6, 1)])
def test_before_its_start_the_adversarial_part_is_absent(lpips, judge, step, calls):
    counted = []
    judge.register_forward_hook(lambda *_: counted.append(1))
    objective = Reconstruction(ReconstructionConfig(disc_start=3, gan_start=5), lpips, judge)
    decoder, target = Decoder(), draw(8, 3, SIDE, SIDE)
    loss = objective.generator(decoder(draw(8, 4)), target, SEEDS, step, decoder.out.weight)
    assert len(counted) == calls
    assert ("gan" in loss.parts) == ("lambda" in loss.parts) == (calls == 1)
    if not calls:
        assert torch.equal(loss.total, objective.restore(decoder(draw(8, 4)), target).total)


# ---- the discriminator's loss ----


def test_the_discriminators_loss_by_hand(judge):
    objective = Reconstruction(dataclasses.replace(NOW, lpips=0, disc_start=3, gan_start=3), None, judge)
    output, target = (2 * draw(8, 3, 16, 16)).requires_grad_(), draw(8, 3, 16, 16, seed=1)
    judge.eval()
    loss = objective.discriminator(output, target, SEEDS, 3)
    real, fake = (judge(objective.augment(images, SEEDS)) for images in (target, eight_bit(output)))
    by_hand = discriminator_hinge(real, fake), real.mean(), fake.mean()  # in two passes: other sums in the last bits
    torch.testing.assert_close((loss.total, loss.parts["real"], loss.parts["fake"]), by_hand, rtol=1e-6, atol=1e-6)
    loss.total.backward()
    assert output.grad is None
    assert all(gradient is not None for gradient in grads(judge.heads))
    with pytest.raises(ValueError, match=r"step 2 has no discriminator to train.*disc_start=3.*judged"):
        objective.discriminator(output, target, SEEDS, 2)


def test_both_losses_are_functions_of_their_arguments(lpips, judge):
    judge.eval()
    objective, decoder = Reconstruction(NOW, lpips, judge), Decoder()
    output, target = decoder(draw(8, 4)), draw(8, 3, SIDE, SIDE)
    state = torch.get_rng_state()
    for seeds, same in ((SEEDS, True), (SEEDS + 1, False)):
        one = objective.generator(output, target, SEEDS, 0, decoder.out.weight).total
        other = objective.generator(output, target, seeds, 9, decoder.out.weight).total
        assert torch.equal(one, other) == same
        one, other = (objective.discriminator(output, target, s, 0).total for s in (SEEDS, seeds))
        assert torch.equal(one, other) == same
    assert torch.equal(torch.get_rng_state(), state)


def test_the_discriminators_loss_is_the_mean_of_its_halves(judge):
    """So processes, whose gradients are averaged, do together what one does alone: each group of 8 stays whole."""
    judge.eval()
    objective = Reconstruction(dataclasses.replace(NOW, lpips=0), None, judge)
    output, target, seeds = draw(16, 3, 16, 16), draw(16, 3, 16, 16, seed=1), torch.arange(16)
    whole = objective.discriminator(output, target, seeds, 0).total
    halves = [objective.discriminator(output[s], target[s], seeds[s], 0).total for s in (slice(8), slice(8, 16))]
    assert whole.item() == pytest.approx(sum(half.item() for half in halves) / 2, rel=1e-5)


# ---- training ----


def test_a_decoder_learns_with_two_optimizers(judge):
    config = ReconstructionConfig(lpips=0, disc_start=5, gan_start=10)
    objective, decoder = Reconstruction(config, None, judge), Decoder(16)
    latents, target = draw(8, 4), Decoder(16, seed=3)(draw(8, 4)).detach().clamp(-1, 1)
    ours = torch.optim.Adam(decoder.parameters(), 2e-2)
    theirs = torch.optim.Adam(judge.heads.parameters(), 1e-3)
    judge.train()
    first = [parameter.detach().clone() for parameter in judge.heads.parameters()]
    parts = []
    for step in range(30):
        seeds = noise.derive(step, torch.arange(8))
        ours.zero_grad()
        loss = objective.generator(decoder(RAE.noised(latents, seeds, 0.1)), target, seeds, step, decoder.out.weight)
        loss.total.backward()
        ours.step()
        parts.append(loss.parts)
        if config.judged(step):
            theirs.zero_grad()
            with torch.no_grad():
                fake = decoder(latents)
            objective.discriminator(fake, target, seeds, step).total.backward()
            theirs.step()
        elif step == 4:
            assert all(torch.equal(a, b) for a, b in zip(first, judge.heads.parameters(), strict=True))
    assert ["gan" in part for part in parts] == [False] * 10 + [True] * 20
    assert parts[-1]["l1"] < 0.5 * parts[0]["l1"]
    assert parts[9]["l1"] < parts[0]["l1"]
    assert not any(torch.equal(a, b) for a, b in zip(first, judge.heads.parameters(), strict=True))


# ---- latents ----


def test_noise_of_the_latents():
    seeds, latents = torch.arange(400), torch.zeros(400, 16, 5, 5)
    noisy = RAE.noised(latents, seeds, 0.8)
    level = noisy.flatten(1).std(1)
    uniform = noise.uniform(seeds, noise.TIME, (1,))[:, 0]
    assert noisy.dtype == torch.float32
    assert torch.allclose(level.double(), 0.8 * uniform, rtol=0.2, atol=1e-4)
    assert float(level.mean()) == pytest.approx(0.4, abs=0.03)
    assert torch.equal(RAE.noised(latents[7:9] + 1, seeds[7:9], 0.8) - 1, (noisy[7:9] + 1) - 1)
    assert torch.equal(RAE.noised(latents, seeds, 0), latents)
    assert RAE.noised(torch.zeros(2, 4), seeds[:2], 1).shape == (2, 4)


# ---- configuration ----


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gan": -1}, r"reconstruction\.gan=-1 is out of range"),
        ({"lpips": float("nan")}, r"reconstruction\.lpips=nan is out of range"),
        ({"tau": -0.1}, r"reconstruction\.tau=-0\.1 is out of range"),
        ({"disc_start": -1}, r"reconstruction\.disc_start=-1 is out of range"),
        ({"disc_start": 9, "gan_start": 8}, r"gan_start=8 comes before reconstruction\.disc_start=9"),
        ({"norm": "layer"}, r"reconstruction\.norm='layer' is unknown"),
        ({"disc_schedule": "onw"}, r"reconstruction\.disc_schedule='onw' is unknown \(did you mean 'own'"),
        ({"cutout": 1.5}, r"reconstruction\.cutout=1\.5 is out of range"),
        ({"l1": 0, "lpips": 0}, "leave nothing to restore by"),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        ReconstructionConfig(**options)


def test_published_values():
    config = ReconstructionConfig()
    assert (config.l1, config.lpips, config.gan, config.tau) == (1.0, 1.0, 0.75, 0.8)
    assert (config.translate, config.colour, config.cutout) == (0.125, True, 0.0)
    assert [config.judged(step) for step in (14_999, 15_000)] == [False, True]
    assert [config.adversarial(step) for step in (19_999, 20_000)] == [False, True]
    assert not ReconstructionConfig(gan=0, disc_start=0).judged(5)


def test_missing_networks_are_named(lpips, judge):
    with pytest.raises(ValueError, match=r"reconstruction\.lpips=1\.0 needs the LPIPS network"):
        Reconstruction(NOW, None, judge)
    with pytest.raises(ValueError, match=r"reconstruction\.gan=0\.75 needs a discriminator"):
        Reconstruction(NOW, lpips)
    with pytest.raises(ValueError, match=r"reconstruction\.gan=0\.75 needs reconstruction\.encoder"):
        build(NOW)


def test_build_reads_the_networks(tmp_path, lpips, monkeypatch):
    transformers.Dinov2Model(transformers.Dinov2Config(**SMALL, image_size=16)).save_pretrained(tmp_path)
    asked = []
    monkeypatch.setattr(reconstruction, "load_lpips", lambda *which, dtype: asked.append((*which, dtype)) or lpips)
    options = {"encoder": str(tmp_path), "resolution": 16, "blocks": (2,), "norm": "group", "cutout": 0.25}
    options["last_norm"] = False
    options |= {"lpips_net": "vgg", "lpips_precision": "bf16"}
    objective = build(dataclasses.replace(NOW, lpips_weights="somewhere", **options))
    assert asked == [("somewhere", "vgg", torch.bfloat16)]
    assert objective.lpips is lpips
    assert objective.judge is not None
    assert objective.judge.features.blocks == (2,)
    assert not objective.judge.features.last_norm
    assert isinstance(objective.judge.heads[0].enter_norm, nn.GroupNorm)
    assert objective.config.cutout == 0.25
    bare = build(ReconstructionConfig(lpips=0, gan=0))
    assert bare.lpips is bare.judge is None
