"""LPIPS v0.1 with AlexNet or VGG16 (Zhang et al. 2018): how differently two images look, as a loss and as a figure.

    network = load_lpips("lpips_alex.safetensors")         # load_lpips("lpips_vgg.safetensors", "vgg")
    distance = network(a, b)                     # (B,); images in [-1, 1], the gradient flows to both
    figures = network.measure(images, others)    # (B,) float64; uint8 images, full float32, no gradient

Maps after five of the ReLUs are scaled to length 1 at each pixel; squared differences are weighted per channel by what
was learned from people's judgements, averaged over the pixels, and summed over the five. By custom figures are of
AlexNet and losses of VGG16.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
from torch import Tensor, nn
from torch.nn.functional import max_pool2d

from mvm.metrics.inception import fingerprint
from mvm.metrics.weights import cache_folder, files_of, filled, read_tensors
from mvm.options import choose
from mvm.pixels import to_unit
from mvm.precision import full_float32

UNUSED = "classifier."  # the rest of the network, in torchvision's file
SHIFT, SCALE = (-0.030, -0.088, -0.188), (0.458, 0.448, 0.450)  # of images in [-1, 1]
LENGTH_EPS = 1e-10


@dataclass(frozen=True)
class Convolution:
    """A convolution of the torchvision network, by its number there, and the ReLU after it.

    shape: inputs, outputs, kernel, stride, padding. pooled: a maximum goes before. compared: the map takes part.
    """

    name: str
    shape: tuple[int, int, int, int, int]
    pooled: bool = False
    compared: bool = True


@dataclass(frozen=True)
class Backbone:
    """What LPIPS compares maps of. pool: kernel and stride of its maxima; fingerprint: of the published weights."""

    title: str
    layers: tuple[Convolution, ...]
    pool: tuple[int, int]
    smallest: int  # pixels a side, of which one pixel is left after the last ReLU
    fingerprint: str
    pieces: str


def _vgg16() -> tuple[Convolution, ...]:
    layers, number, inputs = [], 0, 3
    for block, (width, depth) in enumerate(((64, 2), (128, 2), (256, 3), (512, 3), (512, 3))):
        for place in range(depth):
            pooled, compared = block > 0 and place == 0, place == depth - 1
            layers.append(Convolution(str(number), (inputs, width, 3, 1, 1), pooled, compared))
            number, inputs = number + 2, width  # a ReLU has the number between
        number += 1  # the maximum
    return tuple(layers)


BACKBONES = {
    "alex": Backbone(
        "AlexNet",
        (
            Convolution("0", (3, 64, 11, 4, 2)),
            Convolution("3", (64, 192, 5, 1, 2), pooled=True),
            Convolution("6", (192, 384, 3, 1, 1), pooled=True),
            Convolution("8", (384, 256, 3, 1, 1)),
            Convolution("10", (256, 256, 3, 1, 1)),
        ),
        (3, 2),
        31,
        "815991aa12e4eb67a6be70f80197c853ed56e47ec755caa6c1ee435a16d7e445",
        "alexnet-owt-*.pth of torchvision and lpips/weights/v0.1/alex.pth of the package lpips",
    ),
    "vgg": Backbone(
        "VGG16",
        _vgg16(),
        (2, 2),
        16,
        "92f8d35a575355309045c32d8f162dbaa3a5e4a1e4207adbcf669ac3db1f7780",
        "vgg16-*.pth of torchvision and lpips/weights/v0.1/vgg.pth of the package lpips",
    ),
}


class LPIPS(nn.Module):
    """lpips(a, b) -> distances (B,), float32; frozen and always in eval (the published dropout never acts).

    Weights have the published names: features.* of the backbone, lin*.model.1.weight. dtype: in which the convolutions
    are computed; all else is in float32, whatever autocast surrounds it. TF32 is as the surroundings have it.
    """

    def __init__(self, backbone: str = "alex", dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.backbone, self.dtype = choose("backbone", backbone, BACKBONES), dtype
        self.features = nn.ModuleDict({layer.name: nn.Conv2d(*layer.shape) for layer in self.backbone.layers})
        compared = (layer.shape[1] for layer in self.backbone.layers if layer.compared)
        for index, channels in enumerate(compared):
            linear = nn.Conv2d(channels, 1, 1, bias=False)
            self.add_module(f"lin{index}", nn.ModuleDict({"model": nn.ModuleDict({"1": linear})}))
        self.requires_grad_(False).train(False)

    def train(self, mode: bool = True) -> Self:
        """Stay in eval, whatever mode a surrounding module is in."""
        return super().train(False)

    @property
    def fingerprint(self) -> str:
        """The sha256 of the weights as they are now."""
        return fingerprint(self.state_dict())

    def forward(self, a: Tensor, b: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Return the distances; dtype: another than the network's own."""
        shape = tuple(a.shape)
        if a.shape != b.shape or a.ndim != 4 or shape[1] not in (1, 3):
            raise ValueError(f"LPIPS compares images (B, 1 or 3, H, W) of one shape, not {shape} with {tuple(b.shape)}")
        if min(shape[2:]) < (smallest := self.backbone.smallest):
            raise ValueError(f"LPIPS needs images of {smallest} pixels a side or more, not {shape[2]}x{shape[3]}")
        pairs = zip(self._maps(a, dtype or self.dtype), self._maps(b, dtype or self.dtype), strict=True)
        with torch.autocast(a.device.type, enabled=False):
            weighted = (  # the convolution is the sum over channels
                self.get_submodule(f"lin{index}.model.1")((x - y) ** 2) for index, (x, y) in enumerate(pairs)
            )
            return torch.stack([squares.mean((1, 2, 3)) for squares in weighted]).sum(0)

    @torch.no_grad()
    def measure(self, images: Tensor, others: Tensor) -> Tensor:
        """Return distances (B,) of uint8 images, in float64, to be reported."""
        if images.dtype != torch.uint8 or others.dtype != torch.uint8:
            raise ValueError(f"measure takes uint8 images, not {images.dtype} and {others.dtype}; call the network")
        with full_float32(images.device):  # never compiled: a figure is the same whatever trains by the network
            return self.forward(to_unit(images), to_unit(others), torch.float32).double()

    def _maps(self, images: Tensor, dtype: torch.dtype) -> list[Tensor]:
        """Return the five maps of images in [-1, 1], of unit length at each pixel."""
        half = dtype != torch.float32
        shift, scale = (images.new_tensor(values, dtype=torch.float32)[:, None, None] for values in (SHIFT, SCALE))
        x, maps = (images.float() - shift) / scale, []  # one channel becomes three here
        if half:
            x = x.contiguous(memory_format=torch.channels_last)  # the layout that cuDNN has its kernels for
        for layer in self.backbone.layers:
            x = max_pool2d(x, *self.backbone.pool) if layer.pooled else x
            with torch.autocast(x.device.type, dtype if half else None, enabled=half):
                x = self.features[layer.name](x).relu()
            if layer.compared:  # the norm has a gradient where x is 0; sqrt has none
                length = torch.linalg.vector_norm(x, dim=1, keepdim=True, dtype=torch.float32)
                maps.append(x / (length + LENGTH_EPS))
        return maps


def load_lpips(
    source: str | Path | None = None,
    backbone: str = "alex",
    *,
    dtype: torch.dtype = torch.float32,
    trust: bool = False,
) -> LPIPS:
    """Return the network with the weights of a file, a folder, or of the cache's folder "lpips" (nothing or "").

    backbone: alex or vgg; VGG's folder in the cache is "lpips-vgg". Weights of another fingerprint than the published
    ones are refused, unless `trust`.
    """
    facts = choose("backbone", backbone, BACKBONES)
    cached = cache_folder() / ("lpips" if backbone == "alex" else f"lpips-{backbone}")

    def needed(problem: str) -> ValueError:
        """Return the error that names the problem and says how to get the weights."""
        return ValueError(
            f"{problem}. LPIPS needs the {facts.title} features and its linear layers: give one .safetensors with "
            f"features.* and lin*.model.1.weight, or a folder with {facts.pieces} (or put them into '{cached}')"
        )

    path = Path(source) if source else cached
    weights = read_tensors(files_of(path, needed), needed, lambda name: not name.startswith(UNUSED))
    network = filled(lambda: LPIPS(backbone, dtype), weights, path, f"LPIPS with {facts.title}", needed)
    if network.fingerprint != facts.fingerprint and not trust:
        raise ValueError(
            f"the weights in '{path}' have the fingerprint {network.fingerprint}, the published ones "
            f"{facts.fingerprint}: figures made with them are no LPIPS v0.1. Give the published ones, or trust=True in "
            "code"
        )
    return network
