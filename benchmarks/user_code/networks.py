"""The user's own networks and data, the same for every library: none of these lines is counted."""

import numpy as np
import torch
from diffusers import UNet2DConditionModel, UNet2DModel
from PIL import Image
from sklearn.datasets import load_digits, make_moons
from torch import Tensor, nn

EPOCHS, STEPS = 1, 28  # enough to run every line, and the same for images: 1,797 digits in whole batches of 64


class MLP(nn.Module):
    """A network of points: (x (B, d), t (B,)) -> (B, d)."""

    def __init__(self, size: int = 2, width: int = 64) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(size + 1, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, size)
        )

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        return self.layers(torch.cat((x, t[:, None]), 1))


class Convolutions(nn.Module):
    """A network of signals: (x (B, 1, L), t (B,)) -> (B, 1, L)."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv1d(2, width, 5, padding=2), nn.SiLU(), nn.Conv1d(width, width, 5, padding=2), nn.SiLU(),
            nn.Conv1d(width, 1, 5, padding=2),
        )  # fmt: skip

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        return self.layers(torch.cat((x, t[:, None, None].expand_as(x)), 1))


def moons(count: int) -> Tensor:
    """Return points of two moons (count, 2)."""
    return torch.tensor(make_moons(count, noise=0.05, random_state=0)[0], dtype=torch.float32)


def sines(count: int) -> Tensor:
    """Return signals (count, 1, 64)."""
    phase = torch.rand(count, 1, 1, generator=torch.Generator().manual_seed(0))
    return torch.sin(2 * np.pi * (phase + torch.linspace(0, 4, 64)))


class Digits(torch.utils.data.Dataset):
    """The user's own Dataset: images (1, 8, 8) in [-1, 1]."""

    def __init__(self) -> None:
        self.images = torch.tensor(load_digits().images, dtype=torch.float32)[:, None] / 8 - 1

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Tensor:
        return self.images[index]


class Captioned(Digits):
    """The same with embedded captions: (image, tokens (4, 16))."""

    def __init__(self) -> None:
        super().__init__()
        words = torch.randn(10, 4, 16, generator=torch.Generator().manual_seed(0))
        self.tokens = words[torch.tensor(load_digits().target)]

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.images[index], self.tokens[index]


def save_grid(images: Tensor, path: str) -> None:
    """Save 16 images (16, 1, 8, 8) in [-1, 1] as one: the one line that torchvision's save_image is elsewhere."""
    pixels = ((images + 1) * 127.5).round().clamp(0, 255).byte()
    Image.fromarray(pixels.reshape(4, 4, 8, 8).permute(0, 2, 1, 3).reshape(32, 32).numpy()).save(path)


def unet() -> UNet2DModel:
    """Return diffusers' network of images."""
    return UNet2DModel(
        sample_size=8, in_channels=1, out_channels=1, layers_per_block=1, block_out_channels=(16, 32),
        down_block_types=("DownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "UpBlock2D"), norm_num_groups=8,
    )  # fmt: skip


def text_unet() -> UNet2DConditionModel:
    """Return diffusers' network of images and embedded texts."""
    return UNet2DConditionModel(
        sample_size=8, in_channels=1, out_channels=1, layers_per_block=1, block_out_channels=(16, 32),
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        norm_num_groups=8, cross_attention_dim=16, attention_head_dim=8,
    )  # fmt: skip
