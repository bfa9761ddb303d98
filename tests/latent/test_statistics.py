"""Streaming statistics of latents: exact in float64, however they are cut."""

import numpy as np
import pytest
import torch

from mvm.latent import LatentMoments, Statistics, load_statistics, measure
from mvm.latent.codec import Origin

ORIGIN = Origin("f" * 64, "'some encoder'")


def far_latents(count=41, seed=0):
    """Latents whose mean is a million times their spread: sums of squares would lose every digit."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, 3, 2, 2, generator=generator, dtype=torch.float64) * 1e-3 + 1e3


def moments_of(latents, *cuts):
    found = LatentMoments(latents.shape[1:])
    for part in latents.tensor_split(cuts):
        found.add(part)
    return found


def close(a, b):
    return torch.allclose(torch.as_tensor(a), torch.as_tensor(b), rtol=1e-12, atol=0)


def test_equal_numpy():
    latents = torch.randn(41, 3, 2, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 2 + 5
    found = moments_of(latents, 1, 1, 20, 37)
    assert found.count == 41
    assert found.mean.dtype == torch.float64
    assert close(found.mean, latents.numpy().mean(0))
    assert close(found.variance, latents.numpy().var(0))


def test_no_digits_are_lost_far_from_zero():
    """The squares themselves: 1e6 each, of which the variance, 1e-6, is the twelfth digit."""
    latents = far_latents()
    want = (latents - latents.mean(0)).square().mean(0)
    assert torch.allclose(moments_of(latents, 7, 30).variance, want, rtol=1e-8, atol=0)


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_processes_agree(parts):
    latents = torch.randn(41, 3, 2, 2, generator=torch.Generator().manual_seed(2)) + 3
    whole = moments_of(latents)
    states = [moments_of(part, 2).state() for part in latents.tensor_split(parts)]
    joined = LatentMoments.from_state({name: torch.cat([state[name] for state in states]) for name in states[0]})
    assert joined.count == whole.count
    assert close(joined.mean, whole.mean)
    assert close(joined.variance, whole.variance)
    merged = LatentMoments((3, 2, 2))
    for part in latents.tensor_split(parts):
        merged.merge(moments_of(part))
    merged.merge(LatentMoments((3, 2, 2)))
    assert close(merged.variance, whole.variance)


def test_measured_over_both_mirrors(encoders, images):
    encoder = encoders("dinov3", layers="last-2")
    found = measure(encoder, images, batch=4, progress=False)
    views = [encoder(view[part]) for part in torch.arange(10).split(4) for view in (images, images.flip(-1))]
    everything = torch.cat(views).double().numpy()
    assert found.count == 20
    assert np.allclose(found.mean, everything.mean(0), rtol=1e-12, atol=1e-13)
    assert np.allclose(found.variance, everything.var(0), rtol=1e-12, atol=0)


@pytest.mark.parametrize("world", [2, 3, 4])
def test_measured_on_several_processes(encoders, images, world):
    """There are three batches: the fourth of four processes has none."""
    encoder = encoders()
    whole = measure(encoder, images, batch=4, progress=False)
    states = [measure(encoder, images, batch=4, rank=r, world=world, progress=False).state() for r in range(world)]
    joined = LatentMoments.from_state({name: torch.cat([state[name] for state in states]) for name in states[0]})
    assert joined.count == whole.count == 20
    assert torch.allclose(joined.mean, whole.mean, rtol=1e-12, atol=1e-12)
    assert close(joined.variance, whole.variance)


def test_normalised_latents_have_mean_0_and_variance_1():
    latents = torch.randn(64, 3, 2, 2) * torch.rand(3, 2, 2) * 4 + torch.randn(3, 2, 2)
    statistics = moments_of(latents).result(ORIGIN)
    assert {value.dtype for value in statistics.state_dict().values()} == {torch.float32}
    assert set(statistics.state_dict()) == {"mean", "variance"}
    z = statistics.normalise(latents)
    variance = latents.double().var(0, unbiased=False)
    assert z.mean(0).abs().max() < 1e-5
    assert torch.allclose(z.double().var(0, unbiased=False), variance / (variance + 1e-5), atol=1e-5)
    assert torch.allclose(statistics.restore(z), latents, atol=1e-5)


def test_saved_and_loaded(tmp_path):
    statistics = moments_of(far_latents()).result(ORIGIN)
    path = tmp_path / "new" / "statistics.safetensors"
    statistics.save(path)
    found = load_statistics(path)
    assert torch.equal(found.mean, statistics.mean)
    assert torch.equal(found.variance, statistics.variance)
    assert (found.encoder, found.count, found.fingerprint) == (ORIGIN, 41, statistics.fingerprint)
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(ValueError, match=r"statistics\.safetensors'.*measure them again"):
        load_statistics(path)
    with pytest.raises(ValueError, match="holds no latent statistics"):
        load_statistics(tmp_path / "none.safetensors")


def test_fingerprint():
    mean, variance = torch.zeros(3, 2, 2), torch.ones(3, 2, 2)
    found = {
        Statistics(mean, variance, ORIGIN, 5).fingerprint,
        Statistics(mean + 1e-6, variance, ORIGIN, 5).fingerprint,
        Statistics(variance, mean, ORIGIN, 5).fingerprint,
        Statistics(mean, variance, Origin("0" * 64, ""), 5).fingerprint,
    }
    assert len(found) == 4


def test_what_cannot_be():
    found = LatentMoments((3, 2, 2))
    with pytest.raises(ValueError, match="at least 2 latents; there are 0"):
        found.result(ORIGIN)
    with pytest.raises(ValueError, match=r"shape \(5, 3, 2, 1\)"):
        found.add(torch.zeros(5, 3, 2, 1))
    with pytest.raises(ValueError, match="do not mix"):
        found.merge(LatentMoments((3, 2)))
    found.add(torch.full((2, 3, 2, 2), float("nan")))
    with pytest.raises(ValueError, match="NaN or infinity"):
        found.result(ORIGIN)
