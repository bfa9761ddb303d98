"""Latents of frozen encoders: the reference's hidden states, normalised without weights and averaged."""

import os
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import interpolate, layer_norm

from mvm.latent import EncoderConfig, LatentEncoder, load_latent_encoder
from mvm.latent.encoder import chosen_blocks, plain_norm
from mvm.network.pretrained import HALF, IMAGENET, OPENAI, Encoder, load_encoder

transformers = pytest.importorskip("transformers", reason="needs mean-velocity-matching[encoders]")

KINDS = {"dinov2": 1, "dinov2_with_registers": 4, "dinov3": 3}  # and the tokens before the patches
EXTRA = list(KINDS.items())


def reference(folder, images):
    """Hidden states of the reference: what enters the first block, and what leaves each; and its normed output."""
    model = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    mean, std = (torch.tensor(values)[:, None, None] for values in (IMAGENET.mean, IMAGENET.std))
    with torch.no_grad():
        found = model(pixel_values=(images / 255 - mean) / std, output_hidden_states=True)
    norm = model.norm if hasattr(model, "norm") else model.layernorm
    return found.hidden_states, found.last_hidden_state, norm


def grid(tokens):
    return tokens.transpose(1, 2).reshape(-1, 16, 4, 4)


@pytest.mark.parametrize(("kind", "extra"), EXTRA)
def test_last_block_is_the_final_norm_without_its_weights(folders, encoders, images, kind, extra):
    states, normed, norm = reference(folders(kind), images)
    assert len(states) == 5
    assert torch.allclose(norm(states[-1]), normed, atol=1e-6)  # the states are from before the norm
    found = encoders(kind)(images)
    assert found.shape == (10, 16, 4, 4)
    assert found.dtype == torch.float32
    assert torch.allclose(found, grid(layer_norm(states[-1], (16,), eps=1e-5)[:, extra:]), atol=1e-6)


@pytest.mark.parametrize(("kind", "extra"), EXTRA)
@pytest.mark.parametrize(("layers", "blocks"), [("last-3", (2, 3, 4)), ((3, 1), (1, 3)), ([2], (2,))])
def test_layers_are_averaged_each_after_the_norm(folders, encoders, images, kind, extra, layers, blocks):
    states, _, _ = reference(folders(kind), images)
    encoder = encoders(kind, layers=layers)
    assert encoder.blocks == blocks
    normed = [layer_norm(states[number], (16,), eps=1e-5)[:, extra:] for number in blocks]
    assert torch.allclose(encoder(images), grid(sum(normed) / len(normed)), atol=1e-6)
    added = encoders(kind, layers=layers, global_mean=True)(images)
    assert torch.allclose(added, grid(sum(normed) / len(normed) + normed[-1].mean(1, keepdim=True)), atol=1e-6)


def test_the_norm_has_no_weights():
    x = torch.randn(5, 7, 16) * 3 + 2
    want = (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True, unbiased=False) + 1e-5).sqrt()
    assert torch.allclose(plain_norm(x), want, atol=1e-6)
    assert torch.equal(plain_norm(x), layer_norm(x, (16,), None, None, 1e-5))


def test_numbers_of_blocks():
    assert chosen_blocks("last", 12) == (12,)
    assert chosen_blocks("last-1", 12) == (12,)
    assert chosen_blocks("last-12", 12) == tuple(range(1, 13))
    assert chosen_blocks((24, 12, 18), 24) == (12, 18, 24)
    for wrong in ("last-13", "last-0", "first", "", (), (0, 1), (13,), (3, 3)):
        with pytest.raises(ValueError, match=r"encoder\.layers=.* does not suit 12 blocks; give 'last', 'last-K'"):
            chosen_blocks(wrong, 12)


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_deterministic_and_frozen(encoders, images, kind):
    """A DINOv3 in training mode would rescale its positions at random."""
    encoder = encoders(kind)
    first = encoder(images)
    around = nn.Sequential(encoder).train()
    assert around.training
    assert not any(module.training for module in encoder.modules())
    assert torch.equal(encoder(images), first)
    assert not encoder(images).requires_grad
    assert not any(parameter.requires_grad for parameter in encoder.parameters())


@pytest.mark.parametrize("kind", KINDS)
def test_mirrored_latents_are_not_flipped_latents(encoders, images, kind):
    encoder = encoders(kind)
    assert not torch.allclose(encoder(images.flip(-1)), encoder(images).flip(-1), atol=0.1)


def test_resize_is_bicubic_and_antialiased(encoders):
    large = torch.randint(0, 256, (2, 3, 40, 40), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)
    small = interpolate(large / 255, size=(16, 16), mode="bicubic", antialias=True).clamp(0, 1)
    encoder = encoders()
    tokens = encoder.encoder.body.after_blocks(IMAGENET(small), [4])[0]
    assert torch.allclose(encoder(large), grid(plain_norm(tokens)), atol=1e-5)


def test_fingerprint_tells_what_changes_latents(folders, encoders, tmp_path):
    base = encoders().fingerprint
    others = [
        encoders(seed=1),
        encoders(layers="last-2"),
        encoders(layers=(3,)),
        encoders(resolution=20),
        encoders(global_mean=True),
        encoders("dinov2_with_registers"),
    ]
    assert len({base, *(encoder.fingerprint for encoder in others)}) == 7
    assert encoders(layers=(4,)).fingerprint == base
    moved = tmp_path / "moved"
    shutil.copytree(folders(), moved)
    assert load_latent_encoder(EncoderConfig(str(moved), resolution=16)).fingerprint == base
    rounded = encoders().to(torch.bfloat16)
    assert rounded.fingerprint == base


def test_fingerprint_sees_scaling(folders):
    encoder = load_encoder(folders(), 16)
    before = LatentEncoder(encoder).fingerprint
    encoder.scaling = HALF
    assert LatentEncoder(encoder).fingerprint != before


@pytest.mark.parametrize(("family", "extra", "scaling"), [("CLIP", 1, OPENAI), ("Siglip", 0, HALF)])
def test_latents_of_clip_and_siglip_are_what_leaves_their_blocks(tmp_path, images, family, extra, scaling):
    config = getattr(transformers, f"{family}VisionConfig")(
        hidden_size=16, intermediate_size=24, num_hidden_layers=3, num_attention_heads=2, patch_size=4, image_size=16
    )
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}VisionModel")(config).eval()
    model.save_pretrained(tmp_path)
    left = []  # by hooks, not by the list of hidden states
    blocks = next(module for name, module in model.named_modules() if name.endswith("encoder.layers"))
    for block in blocks:
        block.register_forward_hook(lambda module, given, out: left.append(out[0] if isinstance(out, tuple) else out))
    mean, std = (torch.tensor(values)[:, None, None] for values in (scaling.mean, scaling.std))
    with torch.no_grad():
        model(pixel_values=(images / 255 - mean) / std)
    encoder = load_latent_encoder(EncoderConfig(str(tmp_path), layers="1,3", resolution=16))
    want = torch.stack([layer_norm(left[number][:, extra:], (16,), eps=1e-5) for number in (0, 2)]).mean(0)
    assert torch.allclose(encoder(images), grid(want), atol=1e-5)
    assert encoder(images).std() > 0.1


def test_encoders_that_give_no_latents(tmp_path):
    body = nn.Conv2d(3, 4, 4)
    other = Encoder("patches", body, resolution=16, side=4, width=4, scaling=HALF)
    with pytest.raises(ValueError, match=r"'patches' \(no vision transformer\) gives no latents; known: dinov2, "):
        LatentEncoder(other)
    small = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "patch_size": 4}
    config = transformers.Siglip2VisionConfig(**small, intermediate_size=24, num_patches=9)
    transformers.Siglip2VisionModel(config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"\(siglip2_vision_model\) gives no latents"):
        load_latent_encoder(EncoderConfig(str(tmp_path)))


@pytest.mark.skipif(not os.environ.get("MVM_ASSETS"), reason="set MVM_ASSETS to the folder of real data and weights")
def test_real_dinov2():
    folder = Path(os.environ["MVM_ASSETS"]) / "encoder-dinov2-vits14"
    encoder = load_latent_encoder(EncoderConfig(str(folder), layers="last-12"))
    images = torch.randint(0, 256, (2, 3, 224, 224), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    assert encoder.latent_shape == (384, 16, 16)
    found = encoder(images)
    assert found.shape == (2, 384, 16, 16)
    states, _, _ = reference(folder, images)
    want = torch.stack([layer_norm(state, (384,), eps=1e-5)[:, 1:] for state in states[1:]]).mean(0)
    assert torch.allclose(found, want.transpose(1, 2).reshape(2, 384, 16, 16), atol=1e-4)
