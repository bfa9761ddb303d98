"""How well images are restored, against the originals and image by image: PSNR and SSIM.

Both are taken on 8-bit levels in float64: of uint8 images, or of floats in [0, 1] times 255 (not rounded).
SSIM is that of Wang et al. 2004: Gaussian window of 11x11 with sigma 1.5, K1 = 0.01, K2 = 0.03, covariances of the
window's weights, only windows that lie inside the image. Colour: the mean over the channels, not the SSIM of the luma.
So do scikit-image (gaussian_weights=True, sigma=1.5, use_sample_covariance=False, data_range=255), and torchmetrics
inside the border that it pads.
"""

import torch
from torch import Tensor
from torch.nn.functional import conv2d

PEAK = 255.0
WINDOW, SPREAD = 11, 1.5
K1, K2 = 0.01, 0.03


def _levels(images: Tensor) -> Tensor:
    """Return the images on the scale 0..255 in float64."""
    if images.dtype == torch.uint8:
        return images.double()
    if not images.is_floating_point():
        raise ValueError(f"images are {images.dtype}; uint8 or floats in [0, 1] are needed")
    if images.numel() and not bool((images.amin() >= 0) & (images.amax() <= 1)):  # NaN fails too
        span = f"[{float(images.amin()):.4g}, {float(images.amax()):.4g}]"
        raise ValueError(f"float images lie in {span}; [0, 1] is needed: clamp them, or shift them from [-1, 1]")
    return images.double() * PEAK


def _pair(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    if a.shape != b.shape or a.ndim != 4:
        raise ValueError(f"images (B, C, H, W) of one shape are needed, not {tuple(a.shape)} with {tuple(b.shape)}")
    return _levels(a.detach()), _levels(b.detach())


def psnr(a: Tensor, b: Tensor) -> Tensor:
    """Return 10 log10(255^2 / mean squared error) of each image, in dB (B,); infinite where both are equal."""
    x, y = _pair(a, b)
    return 10 * torch.log10(PEAK**2 / ((x - y) ** 2).mean((1, 2, 3)))


def _smooth(x: Tensor) -> Tensor:
    """Return the means over all windows inside the planes (P, 1, H, W), weighted by a Gaussian of sum 1."""
    offset = torch.arange(WINDOW, dtype=x.dtype, device=x.device) - WINDOW // 2
    weight = torch.exp(-(offset**2) / (2 * SPREAD**2))
    weight = weight / weight.sum()
    return conv2d(conv2d(x, weight.view(1, 1, -1, 1)), weight.view(1, 1, 1, -1))


def ssim(a: Tensor, b: Tensor) -> Tensor:
    """Return the structural similarity of each image (B,), at most 1: the mean over places and channels."""
    x, y = _pair(a, b)
    batch, _, height, width = x.shape
    if min(height, width) < WINDOW:
        raise ValueError(f"SSIM needs images of {WINDOW} pixels a side or more, not {height}x{width}")
    x, y = x.flatten(0, 1)[:, None], y.flatten(0, 1)[:, None]
    mean_x, mean_y = _smooth(x), _smooth(y)
    var_x, var_y = _smooth(x * x) - mean_x**2, _smooth(y * y) - mean_y**2
    covariance = _smooth(x * y) - mean_x * mean_y
    c1, c2 = (K1 * PEAK) ** 2, (K2 * PEAK) ** 2
    brightness = (2 * mean_x * mean_y + c1) / (mean_x**2 + mean_y**2 + c1)
    structure = (2 * covariance + c2) / (var_x + var_y + c2)
    return (brightness * structure).reshape(batch, -1).mean(1)
