"""The adapter of diffusers' VAEs, with a stand-in that has their interface."""

import builtins
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from mvm.latent import VAE, load_vae


class Stub(nn.Module):
    """Two by two pixels of three colours are a latent of twelve channels; the posterior is never sampled."""

    def __init__(self, shift=0.5):
        super().__init__()
        self.config = SimpleNamespace(
            scaling_factor=0.25, shift_factor=shift, block_out_channels=(8, 8), latent_channels=12
        )
        self.gain = nn.Parameter(torch.tensor(2.0))

    def encode(self, x):
        latents = self.gain * nn.functional.pixel_unshuffle(x, 2)
        return SimpleNamespace(latent_dist=SimpleNamespace(mode=lambda: latents, sample=lambda: pytest.fail("random")))

    def decode(self, z):
        return SimpleNamespace(sample=nn.functional.pixel_shuffle(z / self.gain, 2))


@pytest.mark.parametrize(("given", "shift"), [(0.5, 0.5), (None, 0.0)])
def test_there_and_back(images, given, shift):
    vae = VAE(Stub(given), 16)
    assert vae.latent_shape == (12, 8, 8)
    latents = vae.encode(images)
    plain = nn.functional.pixel_unshuffle(images / 127.5 - 1, 2)
    assert torch.allclose(latents, (2 * plain - shift) * 0.25, atol=1e-6)
    assert torch.equal(vae.decode(latents), images)
    assert not vae.train().training
    assert not latents.requires_grad


def test_fingerprint_and_size():
    assert VAE(Stub(), 16).fingerprint != VAE(Stub(None), 16).fingerprint
    with pytest.raises(ValueError, match="size=15 does not suit this VAE; it must be a multiple of 2"):
        VAE(Stub(), 15)


def test_missing_package(monkeypatch):
    real = builtins.__import__

    def refuse(wanted, *rest, **named):
        if wanted.partition(".")[0] == "diffusers":
            raise ImportError(wanted)
        return real(wanted, *rest, **named)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(ValueError, match=r"load_vae\(name='x/y'\) needs diffusers; install"):
        load_vae("x/y", 16)
