"""The InceptionV3 of 2015-12-05 behind every published FID: uint8 images -> features.

    network = mvm.metrics.weights.load_inception("pt_inception-2015-12-05-6726825d.pth")
    pool, spatial, logits = network(images)    # FID and KID, sFID, Inception Score

Parameters have the names of pytorch-fid. Of torchvision's InceptionV3 the weights, two kinds of pools, the resize and
the scaling differ: figures made with it are no FID.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d, max_pool2d, relu

from mvm.precision import full_float32

SIDE = 299  # of the network's input
NORM_EPS = 1e-3  # TensorFlow's, which trained the weights
WIDTH, CLASSES = 2048, 1008
SPATIAL_LAYER, SPATIAL_CHANNELS = "Mixed_6d", 7
SPATIAL_WIDTH = SPATIAL_CHANNELS * 17 * 17

# Where channels lie innermost: 1.5 to 2 times as fast on a CPU; on GPUs nobody measured it in float32.
CHANNELS_LAST = {"cpu": True, "cuda": False}
CLASSIFIER, COUNTER = ("fc.weight", "fc.bias"), "num_batches_tracked"


class InceptionFeatures(NamedTuple):
    """Features of B images, in float32.

    pool: (B, 2048), means of the last map: FID, KID, precision and recall.
    spatial: (B, 2023), for sFID as ADM's evaluator takes it: the first 7 channels of "mixed_6/conv", which is the 1x1
    branch of Mixed_6d after its ReLU, 17x17, in the order row, column, channel of the published `mu_s` and `sigma_s`.
    logits: (B, 1008) without the bias, from which the Inception Score has always been computed; None without fc.
    """

    pool: Tensor
    spatial: Tensor
    logits: Tensor | None


class Unit(nn.Module):
    """Convolution without bias, batch normalisation, ReLU; `same` keeps the side at stride 1."""

    def __init__(self, width: int, out: int, kernel: tuple[int, int], stride: int = 1, same: bool = True) -> None:
        super().__init__()
        padding = (kernel[0] // 2, kernel[1] // 2) if same else 0
        self.conv = nn.Conv2d(width, out, kernel, stride, padding, bias=False)
        self.bn = nn.BatchNorm2d(out, eps=NORM_EPS)

    def forward(self, x: Tensor) -> Tensor:
        return relu(self.bn(self.conv(x)))


# over 3x3, of the same side; means at the border over the pixels that exist, as in TensorFlow
mean_pool = partial(avg_pool2d, kernel_size=3, stride=1, padding=1, count_include_pad=False)
max_pool = partial(max_pool2d, kernel_size=3, stride=1, padding=1)
halving_pool = partial(max_pool2d, kernel_size=3, stride=2)


class Step(NamedTuple):
    """One convolution of a branch; of stride 2 it has no padding."""

    out: int
    kernel: tuple[int, int] = (1, 1)
    stride: int = 1


class Branch(NamedTuple):
    """Convolutions one after the other, name_1, name_2 (one alone: name), then, side by side, name_3a and name_3b."""

    name: str
    steps: tuple[Step, ...]
    ends: tuple[Step, ...] = ()


class InceptionBlock(nn.Module):
    """Branches and a pool of one input, concatenated along the channels in that order; pooled: its channels."""

    def __init__(
        self, width: int, branches: Sequence[Branch], pool: Callable[[Tensor], Tensor] = halving_pool, pooled: int = 0
    ) -> None:
        super().__init__()
        self.pool = pool
        self.branches: list[tuple[list[str], list[str]]] = []  # names of the steps and ends of each
        for name, steps, ends in branches:
            count = len(steps)
            step_names = [name] if count == 1 and not ends else [f"{name}_{i}" for i in range(1, count + 1)]
            end_names = [f"{name}_{count + 1}{letter}" for letter in "ab"[: len(ends)]]
            widths = [width, *(step.out for step in steps), steps[-1].out]  # of the input of each; both ends have one
            for label, inputs, step in zip(step_names + end_names, widths, steps + ends, strict=False):
                self.add_module(label, Unit(inputs, *step, same=step.stride == 1))
            self.branches.append((step_names, end_names))
        self.branch_pool = Unit(width, pooled, (1, 1)) if pooled else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        parts = []
        for step_names, end_names in self.branches:
            y = x
            for name in step_names:
                y = self.get_submodule(name)(y)
            parts += [self.get_submodule(name)(y) for name in end_names] or [y]
        return torch.cat([*parts, self.branch_pool(self.pool(x))], 1)


def _block_35(width: int, pooled: int) -> InceptionBlock:
    """Return a block on 35x35; the letters A to E of torchvision are 35, to_17, 17, to_8 and 8 here."""
    single = Branch("branch1x1", (Step(64),))
    five = Branch("branch5x5", (Step(48), Step(64, (5, 5))))
    double = Branch("branch3x3dbl", (Step(64), Step(96, (3, 3)), Step(96, (3, 3))))
    return InceptionBlock(width, (single, five, double), mean_pool, pooled)


def _block_to_17() -> InceptionBlock:
    three = Branch("branch3x3", (Step(384, (3, 3), 2),))
    double = Branch("branch3x3dbl", (Step(64), Step(96, (3, 3)), Step(96, (3, 3), 2)))
    return InceptionBlock(288, (three, double))


def _block_17(inner: int) -> InceptionBlock:
    row, column = (1, 7), (7, 1)
    single = Branch("branch1x1", (Step(192),))
    seven = Branch("branch7x7", (Step(inner), Step(inner, row), Step(192, column)))
    back_and_forth = (Step(inner, column), Step(inner, row), Step(inner, column), Step(192, row))
    return InceptionBlock(768, (single, seven, Branch("branch7x7dbl", (Step(inner), *back_and_forth))), mean_pool, 192)


def _block_to_8() -> InceptionBlock:
    three = Branch("branch3x3", (Step(192), Step(320, (3, 3), 2)))
    seven = Branch("branch7x7x3", (Step(192), Step(192, (1, 7)), Step(192, (7, 1)), Step(192, (3, 3), 2)))
    return InceptionBlock(768, (three, seven))


def _block_8(width: int, pool: Callable[[Tensor], Tensor]) -> InceptionBlock:
    ends = (Step(384, (1, 3)), Step(384, (3, 1)))
    single = Branch("branch1x1", (Step(320),))
    three = Branch("branch3x3", (Step(384),), ends)
    double = Branch("branch3x3dbl", (Step(448), Step(384, (3, 3))), ends)
    return InceptionBlock(width, (single, three, double), pool, 192)


def _layers() -> dict[str, nn.Module]:
    """Return the layers in their order; the comments give channels and side of what comes out."""
    return {
        "Conv2d_1a_3x3": Unit(3, 32, (3, 3), stride=2, same=False),  # 32, 149
        "Conv2d_2a_3x3": Unit(32, 32, (3, 3), same=False),  # 32, 147
        "Conv2d_2b_3x3": Unit(32, 64, (3, 3)),  # 64, 147
        "pool_2": nn.MaxPool2d(3, stride=2),  # 64, 73
        "Conv2d_3b_1x1": Unit(64, 80, (1, 1)),  # 80, 73
        "Conv2d_4a_3x3": Unit(80, 192, (3, 3), same=False),  # 192, 71
        "pool_4": nn.MaxPool2d(3, stride=2),  # 192, 35
        "Mixed_5b": _block_35(192, pooled=32),  # 256, 35
        "Mixed_5c": _block_35(256, pooled=64),  # 288, 35
        "Mixed_5d": _block_35(288, pooled=64),  # 288, 35
        "Mixed_6a": _block_to_17(),  # 768, 17
        "Mixed_6b": _block_17(128),  # 768, 17
        "Mixed_6c": _block_17(160),  # 768, 17
        "Mixed_6d": _block_17(160),  # 768, 17; TensorFlow's mixed_6
        "Mixed_6e": _block_17(192),  # 768, 17
        "Mixed_7a": _block_to_8(),  # 1280, 8
        "Mixed_7b": _block_8(1280, mean_pool),  # 2048, 8
        "Mixed_7c": _block_8(2048, max_pool),  # 2048, 8; the maximum is the 2015 graph's, later ones have the mean
    }


def _neighbours(length: int, out: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return the pixels left and right of each output position i * length / out, and the weight of
    the right one, in [0, 1).

    Steps are float32 as in TensorFlow: in float64 some positions would come out a rounding aside.
    """
    scale = np.float32(length) / np.float32(out)
    position = np.arange(out, dtype=np.float32) * scale
    floor = np.floor(position)
    left = torch.from_numpy(floor.astype(np.int64)).to(device).clamp_max(length - 1)
    return left, (left + 1).clamp_max(length - 1), torch.from_numpy(position - floor).to(device)


def resize_tf1(images: Tensor, side: int = SIDE) -> Tensor:
    """Return float images (B, C, H, W) as (B, C, side, side) by TensorFlow 1's bilinear resize.

    Its corners of pixels coincide, not their centres (no half-pixel shift), and shrinking does not smooth: both are
    flaws, but every published figure has them. Gathers and single products, so that all devices give the same bits.
    """
    left, right, weight = _neighbours(images.shape[3], side, images.device)
    west, east = images[..., left], images[..., right]
    images = west + (east - west) * weight  # (B, C, H, side)
    upper, lower, weight = _neighbours(images.shape[2], side, images.device)
    north, south = images[:, :, upper], images[:, :, lower]
    return north + (south - north) * weight[:, None]


def _pixels(images: Tensor) -> Tensor:
    """Return uint8 images (B, 1 or 3, H, W) as the network's input (B, 3, 299, 299), (g - 128) / 128."""
    if images.dtype != torch.uint8 or images.ndim != 4 or images.shape[1] not in (1, 3) or 0 in images.shape[2:]:
        given = f"{images.dtype} of shape {tuple(images.shape)}"
        raise ValueError(f"Inception takes uint8 images (B, 1 or 3, H, W), not {given}")
    x = ((resize_tf1(images.float()) - 128) / 128).expand(-1, 3, -1, -1)
    return x.contiguous(memory_format=torch.channels_last) if CHANNELS_LAST.get(x.device.type) else x


class Inception(nn.Module):
    """network(images uint8 (B, 1 or 3, H, W)) -> InceptionFeatures; frozen, no gradient, always in eval, in float32.

    classifier: whether there is an fc, hence logits.
    """

    def __init__(self, classifier: bool = False) -> None:
        super().__init__()
        for name, layer in _layers().items():
            self.add_module(name, layer)
        self.order = tuple(self._modules)
        self.fc = nn.Linear(WIDTH, CLASSES) if classifier else None
        self.requires_grad_(False).train(False)

    def train(self, mode: bool = True) -> Self:
        """Stay in eval, whatever mode a surrounding module is in: batch statistics would make figures of the batch."""
        return super().train(False)

    @property
    def fingerprint(self) -> str:
        """The sha256 of the weights as they are now, without fc."""
        return fingerprint(self.state_dict())

    @torch.no_grad()
    def forward(self, images: Tensor) -> InceptionFeatures:
        with full_float32(images.device):
            x = spatial = _pixels(images)
            for name in self.order:
                x = self.get_submodule(name)(x)
                if name == SPATIAL_LAYER:  # the 1x1 branch stands first, so these channels are its first
                    spatial = x[:, :SPATIAL_CHANNELS].permute(0, 2, 3, 1).flatten(1)
            pool = x.mean((2, 3))
            return InceptionFeatures(pool, spatial, None if self.fc is None else pool @ self.fc.weight.T)


def fingerprint(weights: Mapping[str, Tensor]) -> str:
    """Return the sha256 over names, shapes and float32 bytes in the order of names: the same in any container.

    The classifier is left out, which may be absent, and so are the counters, which do nothing.
    """
    digest = hashlib.sha256()
    for name in sorted(weights):
        if name in CLASSIFIER or name.endswith(COUNTER):
            continue
        values = weights[name].detach().cpu().float().contiguous().numpy().astype("<f4", copy=False)
        digest.update(f"{name} {values.shape}\n".encode())
        digest.update(values.tobytes())
    return digest.hexdigest()
