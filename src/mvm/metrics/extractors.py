"""Feature networks by name: uint8 images -> named features, in full float32, and the facts that identify each.

| name      | features of an image                                                  | figures                        |
|-----------|-----------------------------------------------------------------------|--------------------------------|
| inception | pool (2048), spatial (2023), probabilities (1008) with the classifier | fid, kid, ...; sfid; is        |
| dino      | class token of DINOv2 or DINOv3                                       | fd-dino, kd-dino               |
| clip      | class token of CLIP, mean token of SigLIP                             | fd-clip, kd-clip               |
| effnet    | means of EfficientNet-Lite0's last map (1280)                         | fd-effnet, kd-effnet, no FIDs  |
| pixels    | means of at most 8x8 boxes per channel                                | fd-pixels, kd-pixels           |

And, by the names of their figures, psnr, ssim, lpips (AlexNet) and lpips-vgg: a value of each image and its original.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from mvm.metrics.distances import shrunken_features
from mvm.metrics.inception import SIDE, fingerprint
from mvm.metrics.lpips import load_lpips
from mvm.metrics.restoration import psnr, ssim
from mvm.metrics.weights import load_inception
from mvm.network.pretrained import EFFICIENTNET, load_encoder
from mvm.options import choose
from mvm.precision import full_float32

DINO = "facebook/dinov2-large"  # of the published FD-DINOv2 figures
CLIP = "openai/clip-vit-large-patch14"

AT_ONCE = 64  # pairs
FAMILIES = {"dino": ("dino",), "clip": ("clip", "siglip")}  # parts of the model_type of what may stand there

Named = dict[str, Tensor]


@dataclass(frozen=True)
class Extractor:
    """extractor(images uint8 (B, C, H, W)) -> {part: features (B, d)}; facts: what a reference must share.

    One of pairs takes the images' originals, too.
    """

    name: str
    compute: Callable[..., Named]
    device: torch.device
    facts: dict[str, Any] = field(default_factory=dict)

    @torch.no_grad()
    def __call__(self, *images: Tensor) -> Named:
        with full_float32(self.device):
            return self.compute(*(each.to(self.device, non_blocking=True) for each in images))


@dataclass(frozen=True)
class Sources:
    """Where weights are: inception and lpips files or folders ("": the cache), dino and clip hub names or folders, and
    the side of their input."""

    inception: str = ""
    dino: str = DINO
    clip: str = CLIP
    resolution: int = 0
    lpips: str = ""
    lpips_vgg: str = ""


def _inception(sources: Sources, device: torch.device) -> Extractor:
    network = load_inception(sources.inception)
    facts = {"fingerprint": network.fingerprint, "resize": f"TensorFlow 1 bilinear to {SIDE}"}
    network = network.to(device)

    def compute(images: Tensor) -> Named:
        pool, spatial, logits = network(images)
        classified = {} if logits is None else {"probabilities": logits.softmax(1)}
        return {"pool": pool, "spatial": spatial, **classified}

    return Extractor("inception", compute, device, facts)


def _encoder(name: str, source: str, resolution: int, device: torch.device) -> Extractor:
    encoder = load_encoder(source, resolution, option=name)
    families = FAMILIES.get(name, ("",))
    if not any(family in encoder.kind for family in families):
        raise ValueError(f"{name}.encoder='{source}' is a {encoder.kind}; features {name} are of {', '.join(families)}")
    facts = {
        "encoder": encoder.name.rstrip("/").rsplit("/", 1)[-1],  # not its path
        "fingerprint": fingerprint(encoder.state_dict()),
        "resize": f"antialiased bicubic to {encoder.resolution}",
    }
    encoder = encoder.to(device)
    return Extractor(name, lambda images: {"pool": encoder.summary(images)}, device, facts)


def _pixels(sources: Sources, device: torch.device) -> Extractor:
    facts = {"fingerprint": "none", "resize": "means of at most 8x8 boxes"}
    return Extractor("pixels", lambda images: {"pool": shrunken_features(images)}, device, facts)


def _of_pairs(name: str, value: Callable[[Tensor, Tensor], Tensor], facts: dict[str, Any], device: Any) -> Extractor:
    """Return an extractor of a value (B,) of images and their originals, a few at a time: SSIM is in float64."""

    def compute(images: Tensor, originals: Tensor) -> Named:
        parts = zip(images.split(AT_ONCE), originals.split(AT_ONCE), strict=True)
        return {"pairs": torch.cat([value(one, other) for one, other in parts])[:, None]}

    return Extractor(name, compute, device, facts)


def _lpips(name: str, source: str, backbone: str, device: torch.device) -> Extractor:
    network = load_lpips(source, backbone)
    facts = {"backbone": network.backbone.title, "fingerprint": network.fingerprint}
    return _of_pairs(name, network.to(device).measure, facts, device)


EXTRACTORS: dict[str, Callable[[Sources, torch.device], Extractor]] = {
    "inception": _inception,
    "dino": lambda sources, device: _encoder("dino", sources.dino, sources.resolution, device),
    "clip": lambda sources, device: _encoder("clip", sources.clip, sources.resolution, device),
    "effnet": lambda sources, device: _encoder("effnet", EFFICIENTNET, sources.resolution, device),
    "pixels": _pixels,
}


PAIRED: dict[str, Callable[[Sources, torch.device], Extractor]] = {
    "psnr": lambda _, device: _of_pairs("psnr", psnr, {"fingerprint": "none"}, device),
    "ssim": lambda _, device: _of_pairs("ssim", ssim, {"fingerprint": "none"}, device),
    "lpips": lambda sources, device: _lpips("lpips", sources.lpips, "alex", device),
    "lpips-vgg": lambda sources, device: _lpips("lpips-vgg", sources.lpips_vgg, "vgg", device),
}


def open_extractor(name: str, sources: Sources | None = None, device: torch.device | str = "cpu") -> Extractor:
    """Return the feature network of that name on a device."""
    extractor = choose("features", name, EXTRACTORS | PAIRED)(sources or Sources(), torch.device(device))
    return replace(extractor, facts={"name": name, **extractor.facts})
