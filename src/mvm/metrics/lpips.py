"""LPIPS v0.1 with AlexNet (Zhang et al. 2018): how differently two images look, as a loss and as a figure.

    network = load_lpips("lpips_alex.safetensors")
    distance = network(a, b)                     # (B,); images in [-1, 1], the gradient flows to both
    figures = network.measure(images, others)    # (B,) float64; uint8 images, full float32, no gradient

Maps after the five ReLUs are scaled to length 1 at each pixel; squared differences are weighted per channel by what
was learned from people's judgements, averaged over the pixels, and summed over the five.
"""

from pathlib import Path
from typing import Self

import torch
from torch import Tensor, nn
from torch.nn.functional import max_pool2d

from mvm.metrics.inception import fingerprint
from mvm.metrics.weights import cache_folder, files_of, filled, read_tensors
from mvm.pixels import to_unit
from mvm.precision import full_float32

# of the published weights, by inception.fingerprint
FINGERPRINT = "815991aa12e4eb67a6be70f80197c853ed56e47ec755caa6c1ee435a16d7e445"
PIECES = "alexnet-owt-*.pth of torchvision and lpips/weights/v0.1/alex.pth of the package lpips"
UNUSED = "classifier."  # the rest of AlexNet, in torchvision's file
SHIFT, SCALE = (-0.030, -0.088, -0.188), (0.458, 0.448, 0.450)  # of images in [-1, 1]
LENGTH_EPS = 1e-10
SMALLEST = 31  # pixels a side, of which one pixel is left after the last ReLU


# convolutions, each followed by a ReLU whose output takes part: name, (inputs, outputs, kernel, stride, padding), and
# whether a 3x3 maximum of stride 2 goes before
LAYERS = (
    ("0", (3, 64, 11, 4, 2), False),
    ("3", (64, 192, 5, 1, 2), True),
    ("6", (192, 384, 3, 1, 1), True),
    ("8", (384, 256, 3, 1, 1), False),
    ("10", (256, 256, 3, 1, 1), False),
)


class LPIPS(nn.Module):
    """lpips(a, b) -> distances (B,), float32; frozen and always in eval (the published dropout never acts).

    Weights have the published names: features.* of AlexNet, lin*.model.1.weight. Autocast is off inside; TF32 is as the
    surroundings have it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.ModuleDict({name: nn.Conv2d(*arguments) for name, arguments, _ in LAYERS})
        for index, (_, (_, outputs, *_), _) in enumerate(LAYERS):
            linear = nn.Conv2d(outputs, 1, 1, bias=False)
            self.add_module(f"lin{index}", nn.ModuleDict({"model": nn.ModuleDict({"1": linear})}))
        self.requires_grad_(False).train(False)

    def train(self, mode: bool = True) -> Self:
        """Stay in eval, whatever mode a surrounding module is in."""
        return super().train(False)

    @property
    def fingerprint(self) -> str:
        """The sha256 of the weights as they are now."""
        return fingerprint(self.state_dict())

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        shape = tuple(a.shape)
        if a.shape != b.shape or a.ndim != 4 or shape[1] not in (1, 3):
            raise ValueError(f"LPIPS compares images (B, 1 or 3, H, W) of one shape, not {shape} with {tuple(b.shape)}")
        if min(shape[2:]) < SMALLEST:
            raise ValueError(f"LPIPS needs images of {SMALLEST} pixels a side or more, not {shape[2]}x{shape[3]}")
        with torch.autocast(a.device.type, enabled=False):
            weighted = (  # the convolution is the sum over channels
                self.get_submodule(f"lin{index}.model.1")((x - y) ** 2)
                for index, (x, y) in enumerate(zip(self._maps(a), self._maps(b), strict=True))
            )
            return torch.stack([squares.mean((1, 2, 3)) for squares in weighted]).sum(0)

    @torch.no_grad()
    def measure(self, images: Tensor, others: Tensor) -> Tensor:
        """Return distances (B,) of uint8 images, in float64, to be reported."""
        if images.dtype != torch.uint8 or others.dtype != torch.uint8:
            raise ValueError(f"measure takes uint8 images, not {images.dtype} and {others.dtype}; call the network")
        with full_float32(images.device):
            return self(to_unit(images), to_unit(others)).double()

    def _maps(self, images: Tensor) -> list[Tensor]:
        """Return the five maps of images in [-1, 1], of unit length at each pixel."""
        shift, scale = (images.new_tensor(values, dtype=torch.float32)[:, None, None] for values in (SHIFT, SCALE))
        x, maps = (images.float() - shift) / scale, []  # one channel becomes three here
        for name, _, pooled in LAYERS:
            x = self.features[name](max_pool2d(x, 3, 2) if pooled else x).relu()
            length = torch.linalg.vector_norm(x, dim=1, keepdim=True)  # has a gradient where x is 0; sqrt has none
            maps.append(x / (length + LENGTH_EPS))
        return maps


def _needed(problem: str) -> ValueError:
    """Return the error that names the problem and says how to get the weights."""
    return ValueError(
        f"{problem}. LPIPS needs the AlexNet features and its linear layers: give one .safetensors with features.* and "
        f"lin*.model.1.weight, or a folder with {PIECES} (or put them into '{cache_folder() / 'lpips'}')"
    )


def load_lpips(source: str | Path | None = None, *, trust: bool = False) -> LPIPS:
    """Return the network with the weights of a file, a folder, or of the cache's folder "lpips" (nothing or "").

    Weights of another fingerprint than FINGERPRINT are refused, unless `trust`.
    """
    path = Path(source) if source else cache_folder() / "lpips"
    weights = read_tensors(files_of(path, _needed), _needed, lambda name: not name.startswith(UNUSED))
    network = filled(LPIPS, weights, path, "LPIPS with AlexNet", _needed)
    if network.fingerprint != FINGERPRINT and not trust:
        raise ValueError(
            f"the weights in '{path}' have the fingerprint {network.fingerprint}, the published ones {FINGERPRINT}: "
            "figures made with them are no LPIPS v0.1. Give the published ones, or trust=True in code"
        )
    return network
