"""The decoder: published sizes, fixed positions, pixels where their latents are."""

import pytest
import torch
from torch import nn
from torch.nn.functional import layer_norm

from mvm.latent import Decoder, DecoderConfig
from mvm.latent.codec import Origin

ORIGIN = Origin("e" * 64, "'an encoder'")


def decoder(size="tiny", patch=4, shape=(16, 4, 4), origin=ORIGIN, seed=0):
    torch.manual_seed(seed)
    return Decoder(DecoderConfig(size, patch), shape, origin)


@pytest.mark.parametrize(("size", "millions"), [("B", 86), ("L", 304), ("XL", 415)])
def test_published_numbers_of_parameters(size, millions):
    with torch.device("meta"):
        network = decoder(size, 16, (768, 16, 16))
    count = sum(parameter.numel() for parameter in network.parameters())
    assert abs(count / (millions * 1e6) - 1) < 0.01
    assert network.image_shape == (3, 256, 256)


def test_small_size():
    """By hand: per block 4 d^2 + 2 d m + (4 d + m + d) + 4 d; around them two maps, a token and a norm."""
    d, m = 384, 1536
    with torch.device("meta"):
        network = decoder("S", 14, (384, 16, 16))
    block = 4 * d * d + 2 * d * m + 4 * d + m + d + 4 * d
    want = 8 * block + 384 * d + d + d + 2 * d + d * 588 + 588
    assert sum(parameter.numel() for parameter in network.parameters()) == want
    assert network.image_shape == (3, 224, 224)
    assert (network.blocks[0].heads, len(network.blocks)) == (6, 8)


def test_block_formula():
    network = decoder()
    block = network.blocks[0]
    reference = nn.TransformerEncoderLayer(64, 4, 128, 0.0, "gelu", 1e-12, batch_first=True, norm_first=True)
    names = {
        "attention_norm": "norm1",
        "mlp_norm": "norm2",
        "out": "self_attn.out_proj",
        "up": "linear1",
        "down": "linear2",
    }
    weights = {}
    for name, value in block.state_dict().items():
        stem, kind = name.split(".")
        weights[f"self_attn.in_proj_{kind}" if stem == "qkv" else f"{names[stem]}.{kind}"] = value
    reference.load_state_dict(weights)
    x = torch.randn(2, 5, 64)
    assert torch.allclose(block(x), reference.eval()(x), atol=1e-5)


def test_pixels_come_of_their_own_latents():
    """Without blocks every latent is mapped alone: norm, head, and its patch of the image."""
    network = decoder()
    network.blocks = nn.ModuleList()
    latents = torch.randn(2, 16, 4, 4)
    images = network(latents)
    assert images.shape == (2, 3, 16, 16)
    token = network.embed(latents[1, :, 2, 3]) + network.positions[2 * 4 + 3]
    patch = network.head(layer_norm(token, (64,), eps=1e-12)).reshape(3, 4, 4)
    assert torch.allclose(images[1, :, 8:12, 12:16], patch, atol=1e-5)


def test_every_part_learns():
    network = decoder()
    network(torch.randn(2, 16, 4, 4)).square().mean().backward()
    assert all(parameter.grad is not None and parameter.grad.abs().sum() > 0 for parameter in network.parameters())
    assert "positions" not in network.state_dict()


def test_fingerprint():
    found = {
        decoder().fingerprint,
        decoder(seed=1).fingerprint,
        decoder(patch=2).fingerprint,
        decoder(origin=Origin("d" * 64, "'an encoder'")).fingerprint,
    }
    assert len(found) == 4
    assert decoder().fingerprint in found


def test_what_cannot_be():
    with pytest.raises(ValueError, match=r"decoder\.size='XXL' is unknown"):
        DecoderConfig("XXL")
    with pytest.raises(ValueError, match=r"decoder\.patch=0 is out of range"):
        DecoderConfig(patch=0)
    with pytest.raises(ValueError, match="needs a square"):
        decoder(shape=(16, 4, 5))
    with pytest.raises(ValueError, match=r"latents have shape \(2, 16, 4, 5\)"):
        decoder()(torch.zeros(2, 16, 4, 5))
