"""Feature networks by name: what they give of an image, in which precision, and what they tell of themselves."""

import pytest
import torch
from torch import nn
from torch.nn.functional import interpolate

from mvm.metrics import extractors
from mvm.metrics.distances import shrunken_features
from mvm.metrics.extractors import EXTRACTORS, Extractor, Sources, open_extractor
from mvm.metrics.inception import InceptionFeatures, fingerprint
from mvm.network import efficientnet
from mvm.network.pretrained import IMAGENET, ConvTokens, Encoder, load_encoder

SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "num_channels": 3, "patch_size": 4}


def pictures(count=3, channels=3, side=16, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (count, channels, side, side), generator=generator, dtype=torch.uint8)


def stirred(model, seed=0):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return model.eval()


def scaled(images, side):
    """Pixels as an encoder of ImageNet sees them."""
    unit = interpolate(images / 255, size=(side, side), mode="bicubic", antialias=True).clamp(0, 1)
    mean, std = (torch.tensor(values)[:, None, None] for values in (IMAGENET.mean, IMAGENET.std))
    return (unit - mean) / std


# ---- pixels, and any


def test_pixels():
    found = open_extractor("pixels")
    assert torch.equal(found(pictures())["pool"], shrunken_features(pictures()))
    assert found.facts == {"name": "pixels", "fingerprint": "none", "resize": "means of at most 8x8 boxes"}


def test_an_unknown_name():
    with pytest.raises(ValueError, match=r"features='inceptoin'.*'inception'"):
        open_extractor("inceptoin")


def test_the_names():
    assert list(EXTRACTORS) == ["inception", "dino", "clip", "effnet", "pixels"]


def test_features_are_made_in_full_float32_without_gradient():
    inside = []
    weight = torch.ones(16, 4, requires_grad=True)

    def compute(images):
        inside.append((torch.is_autocast_enabled("cpu"), torch.backends.mkldnn.matmul.fp32_precision))
        return {"pool": images.flatten(1)[:, :16].float() @ weight}

    torch.set_float32_matmul_precision("medium")
    try:
        with torch.autocast("cpu", torch.bfloat16):
            found = Extractor("x", compute, torch.device("cpu"))(pictures())["pool"]
    finally:
        torch.set_float32_matmul_precision("highest")
    assert inside == [(False, "ieee")]
    assert found.dtype == torch.float32
    assert not found.requires_grad


# ---- inception


class StandIn(nn.Module):
    """What `load_inception` returns, tiny."""

    fingerprint = "f" * 64

    def __init__(self, classifier):
        super().__init__()
        self.classifier = classifier

    def forward(self, images):
        flat = images.flatten(1).float()
        return InceptionFeatures(flat[:, :8], flat[:, 8:14], flat[:, :5] if self.classifier else None)


@pytest.mark.parametrize("classifier", [True, False])
def test_inception_names_its_parts(monkeypatch, classifier):
    asked = []
    monkeypatch.setattr(extractors, "load_inception", lambda source: asked.append(source) or StandIn(classifier))
    found = open_extractor("inception", Sources(inception="somewhere"))
    named, flat = found(pictures()), pictures().flatten(1).float()
    assert asked == ["somewhere"]
    assert list(named) == ["pool", "spatial", *(["probabilities"] if classifier else [])]
    assert torch.equal(named["pool"], flat[:, :8])
    assert torch.equal(named["spatial"], flat[:, 8:14])
    if classifier:
        assert torch.allclose(named["probabilities"].sum(1), torch.ones(3))
        assert torch.equal(named["probabilities"], flat[:, :5].softmax(1))
    assert found.facts["fingerprint"] == "f" * 64
    assert "299" in found.facts["resize"]


def test_missing_weights_say_how_to_get_them(monkeypatch, tmp_path):
    monkeypatch.setenv("MVM_OFFLINE", "1")
    monkeypatch.setenv("MVM_CACHE", str(tmp_path))
    message = r"MVM_OFFLINE forbids to download.*pt_inception-2015-12-05.*--inception FILE_OR_FOLDER, or put it into"
    with pytest.raises(ValueError, match=message):
        open_extractor("inception")
    with pytest.raises(ValueError, match=r"nothing\.pth' is not there\. FID needs the weights"):
        open_extractor("inception", Sources(inception=str(tmp_path / "nothing.pth")))


# ---- EfficientNet


@pytest.fixture(scope="module")
def lite():
    return stirred(efficientnet.EfficientNetLite0()).requires_grad_(False)


def test_the_summary_of_efficientnet_is_what_its_classifier_sees(lite):
    seen = []
    hook = lite.fc.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    pixels = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    logits = lite(pixels)
    hook.remove()
    assert seen[0].shape == (2, 1280)
    for stride in (16, 32):
        assert torch.equal(ConvTokens(lite, stride).summary(pixels), seen[0])
    assert torch.equal(lite.fc(seen[0]), logits)


def test_effnet_gives_that_summary(lite, monkeypatch):
    asked = []

    def load(name, resolution, *, option):
        asked.append((name, resolution, option))
        return encoder

    encoder = Encoder("efficientnet-lite0", ConvTokens(lite, 16), resolution=64, side=4, width=112, scaling=IMAGENET)
    monkeypatch.setattr(extractors, "load_encoder", load)
    found = open_extractor("effnet", Sources(resolution=64))
    features = found(pictures())["pool"]
    assert asked == [("efficientnet-lite0", 64, "effnet")]
    assert features.shape == (3, 1280)
    assert torch.allclose(features, lite.pooled(scaled(pictures(), 64)), rtol=1e-4, atol=1e-5)
    assert found.facts["fingerprint"] == fingerprint(encoder.state_dict())


# ---- DINO


@pytest.fixture
def dino(tmp_path):
    transformers = pytest.importorskip("transformers", reason="needs mean-velocity-matching[encoders]")
    model = stirred(transformers.Dinov2Model(transformers.Dinov2Config(**SMALL, image_size=16)))
    model.save_pretrained(tmp_path / "secret" / "tiny-dino")
    return model, tmp_path / "secret" / "tiny-dino"


def test_dino_gives_the_class_token(dino):
    model, folder = dino
    found = open_extractor("dino", Sources(dino=str(folder), resolution=16))
    with torch.no_grad():
        hidden = model(pixel_values=scaled(pictures(), 16)).last_hidden_state
    features = found(pictures())["pool"]
    assert hidden.shape == (3, 17, 16)
    assert torch.allclose(features, hidden[:, 0], rtol=1e-4, atol=1e-5)
    assert not torch.allclose(features, hidden[:, 1], atol=0.1)
    assert torch.allclose(features, model(pixel_values=scaled(pictures(), 16)).pooler_output, rtol=1e-4, atol=1e-5)


def test_dino_tells_its_name_and_weights_but_not_its_place(dino):
    _, folder = dino
    facts = open_extractor("dino", Sources(dino=f"{folder}/", resolution=16)).facts
    assert (facts["name"], facts["encoder"]) == ("dino", "tiny-dino")
    assert facts["fingerprint"] == fingerprint(load_encoder(str(folder), 16).state_dict())
    assert "secret" not in repr(facts)
    assert facts["resize"] == "antialiased bicubic to 16"


def test_models_without_a_class_token_give_a_mean(tmp_path):
    transformers = pytest.importorskip("transformers", reason="needs mean-velocity-matching[encoders]")
    config = transformers.SiglipVisionConfig(**SMALL, intermediate_size=24, image_size=16)
    stirred(transformers.SiglipVisionModel(config)).save_pretrained(tmp_path)
    encoder = load_encoder(str(tmp_path), 16)
    assert torch.allclose(encoder.summary(pictures()), encoder(pictures()).mean(1), rtol=1e-5, atol=1e-6)


def test_clip_and_siglip_give_clip_features_and_nothing_else_does(dino, tmp_path):
    transformers = pytest.importorskip("transformers")
    side = {**SMALL, "intermediate_size": 24, "image_size": 16}
    clip = stirred(transformers.CLIPVisionModel(transformers.CLIPVisionConfig(**side)))
    clip.save_pretrained(tmp_path / "tiny-clip")
    found = open_extractor("clip", Sources(clip=str(tmp_path / "tiny-clip")))
    encoder = load_encoder(str(tmp_path / "tiny-clip"))
    assert torch.equal(found(pictures())["pool"], encoder.summary(pictures()))
    assert found.facts["encoder"] == "tiny-clip"
    transformers.SiglipVisionModel(transformers.SiglipVisionConfig(**side)).save_pretrained(tmp_path / "siglip")
    assert open_extractor("clip", Sources(clip=str(tmp_path / "siglip")))(pictures())["pool"].shape == (3, 16)
    with pytest.raises(ValueError, match=r"clip\.encoder=.* is a dinov2; features clip are of clip, siglip"):
        open_extractor("clip", Sources(clip=str(dino[1])))
    with pytest.raises(ValueError, match="is a clip_vision_model; features dino are of dino"):
        open_extractor("dino", Sources(dino=str(tmp_path / "tiny-clip")))


def test_grey_images_are_three_equal_channels(dino):
    found = open_extractor("dino", Sources(dino=str(dino[1]), resolution=16))
    grey = pictures(channels=1)
    assert torch.equal(found(grey)["pool"], found(grey.expand(-1, 3, -1, -1))["pool"])
