"""Mean Velocity Matching on a page: path, loss, network, solver and sampler in plain torch, trained on 8x8 digits.

    python examples/mvm_on_a_page.py --out page.png      # about a minute on one core of a CPU

t = 0 is data and t = 1 is noise. Every part equals the library's to 1e-6 (tests/test_examples.py).
"""

import argparse
import copy
import math
from collections import OrderedDict
from operator import mul
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import nn
from torch.nn.functional import fold, pad, rms_norm, scaled_dot_product_attention, silu, unfold
from tqdm import tqdm


# ---- 1. Path ---------------------------------------------------------------------------------------------------------
#     x_t = alpha x0 + sigma eps,    alpha = 1 - t,  sigma = sqrt(t)
#     v   = (x0 - x_t)/t                    mean velocity: E[v | x_t] is the drift of the reverse SDE
#     u   = sqrt(t) v = sqrt(t) x0 - eps    what the network learns: bounded at t -> 0
#     x0_hat = x_t + sqrt(t) u              E[x0 | x_t], which is all that the solver needs
def per_sample(coefficient, x):
    """Return a coefficient (B,) shaped and typed to multiply x (B, ...); times are float64 until here."""
    return coefficient.to(x.dtype).reshape(-1, *(1,) * (x.ndim - 1))


def perturb(x0, t, eps):
    """Return x_t and the target u."""
    alpha, sigma = per_sample(1 - t, x0), per_sample(t.sqrt(), x0)
    return alpha * x0 + sigma * eps, sigma * x0 - eps


def denoiser(network, labels):
    """Return the field (x, t) -> x0_hat of these labels."""
    return lambda x, t: x + per_sample(t.sqrt(), x) * network(x, t.sqrt(), labels)


# ---- 2. Loss ---------------------------------------------------------------------------------------------------------
#     E |u_theta(x_t, sqrt(t), y) - u|^2,    t ~ U(0, 1),  eps ~ N(0, I)
def matching_loss(network, x0, labels, t, eps):
    """Return the mean squared error of u; x0 and eps (B, C, H, W), labels int64 (B,), t float64 (B,)."""
    x, u = perturb(x0, t, eps)
    return (network(x, t.sqrt(), labels) - u).square().mean()


# ---- 3. Network: a DiT with RMSNorm, 2-D rotary positions, QK-norm, SwiGLU and adaLN-Zero ----------------------------
def modulate(x, shift, scale):
    """Return RMSNorm(x) (1 + scale) + shift; x (B, N, d), shift and scale (B, 1, d)."""
    return rms_norm(x, x.shape[-1:], eps=1e-6) * (1 + scale) + shift


def rotate(x, cos, sin):
    """Return x (B, heads, N, head) with its halves, as real and imaginary parts, rotated; cos and sin (N, head/2)."""
    real, imaginary = x.chunk(2, -1)
    return torch.cat((real * cos - imaginary * sin, imaginary * cos + real * sin), -1)


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads, self.qkv, self.out = heads, nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width)
        self.query_norm, self.key_norm = (nn.RMSNorm(width // heads, eps=1e-6) for _ in range(2))

    def forward(self, x, cos, sin):
        query, key, value = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        query, key = rotate(self.query_norm(query), cos, sin), rotate(self.key_norm(key), cos, sin)
        return self.out(scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2))


class SwiGLU(nn.Module):
    def __init__(self, width):
        super().__init__()
        hidden = 16 * math.ceil(2 / 3 * 4 * width / 16)  # as many multiply-adds as an MLP of 4 * width
        self.gate_up, self.down = nn.Linear(width, 2 * hidden), nn.Linear(hidden, width)

    def forward(self, x):
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down(silu(gate) * up)


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.attention, self.mlp = Attention(width, heads), SwiGLU(width)
        self.modulation = nn.Linear(width, 6 * width)

    def forward(self, x, c, cos, sin):
        shift_a, scale_a, gate_a, shift_m, scale_m, gate_m = self.modulation(c)[:, None].chunk(6, -1)
        x = x + gate_a * self.attention(modulate(x, shift_a, scale_a), cos, sin)
        return x + gate_m * self.mlp(modulate(x, shift_m, scale_m))


class DiT(nn.Module):
    """network(x (B, C, H, W), level (B,) = sqrt(t), labels (B,)) -> u; the label `classes` is the null class."""

    def __init__(self, shape=(1, 8, 8), classes=10, depth=4, width=64, heads=4, patch=2):
        super().__init__()
        self.patch, side, pixels = patch, shape[1] // patch, shape[0] * patch**2
        self.embed, self.label = nn.Linear(pixels, width), nn.Embedding(classes + 1, width)
        mlp = {"up": nn.Linear(256, width), "activation": nn.SiLU(), "out": nn.Linear(width, width)}
        self.level = nn.Sequential(OrderedDict(mlp))
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.head = nn.ModuleDict({"modulation": nn.Linear(width, 2 * width), "linear": nn.Linear(width, pixels)})
        # sinusoids of 1000 sqrt(t); rotary angles (N, head/2), one half by the token's row, one by its column
        rates = 1000 * torch.exp(-math.log(10_000) * torch.arange(128) / 128)
        frequencies = 100.0 ** -torch.linspace(0, 1, width // heads // 4 + 1, dtype=torch.float64)[:-1]
        angle = torch.arange(side)[:, None] * frequencies
        rows, columns = angle[:, None].expand(-1, side, -1), angle[None].expand(side, -1, -1)
        angles = torch.cat((rows, columns), -1).flatten(0, 1).float()
        for name, buffer in (("rates", rates), ("cos", angles.cos()), ("sin", angles.sin())):
            self.register_buffer(name, buffer, persistent=False)
        for layer in (module for module in self.modules() if isinstance(module, nn.Linear)):
            nn.init.xavier_uniform_(layer.weight)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
        nn.init.normal_(self.label.weight, std=0.02)
        for layer in (*(block.modulation for block in self.blocks), *self.head.values()):
            nn.init.zeros_(layer.weight)  # adaLN-Zero: at first every block is the identity, and u is 0

    def forward(self, x, level, labels):
        tokens = self.embed(unfold(x, self.patch, stride=self.patch).mT)  # (B, N, d)
        angle = level[:, None].float() * self.rates
        c = silu(self.level(torch.cat((angle.cos(), angle.sin()), -1)) + self.label(labels))  # (B, d)
        for block in self.blocks:
            tokens = block(tokens, c, self.cos, self.sin)
        tokens = self.head["linear"](modulate(tokens, *self.head["modulation"](c)[:, None].chunk(2, -1)))
        return fold(tokens.mT, x.shape[2:], self.patch, stride=self.patch)


# ---- 4. Solver: the table of a predictor-corrector -------------------------------------------------------------------
# The processes dx = [v - (1 - rho^2)/2 score] dtau + rho dw, tau = 1 - t, all have the marginals of x_t: rho = 0 is the
# probability-flow ODE, rho = 1 the reverse SDE. With a = (1 + rho^2)/2 their step from s to t is exactly
#     x_t = (t/s)^a x_s + INT_t^s t^a [a r^(-a-1) + (1-a) r^(-a)] x0_hat(r) dr + sqrt(t (1 - (t/s)^(rho^2))) xi.
# x0_hat(r) is replaced by a polynomial through evaluations, in a log-SNR that saturates at both ends,
#     phi_b(t) = log((q + b)/(1 + d q)),    q = sigma/alpha.
def phi(t, b, d):
    alpha, sigma = 1 - t, np.sqrt(t)
    return np.log((sigma + b * alpha) / (alpha + d * sigma))


def lagrange(points, at):
    """Return the Lagrange basis polynomials of points (K,), evaluated: (K, len(at))."""
    basis = np.ones((len(points), len(at)))
    for j, k in np.argwhere(~np.eye(len(points), dtype=bool)):
        basis[j] *= (at - points[k]) / (points[j] - points[k])
    return basis


def table(nfe, rho, size):
    """Return times (nfe + 1), a (decay, std, predict, correct) for every step but the last, and the last's weights.

    size: values in a sample. predictor, ending: evaluations used by the predictor and by the last step; the corrector
    uses 4. Times are uniform in phi_c, x0_hat is a polynomial in phi_b. Constants chosen by FID and on exact spectra.
    """
    spread = max(0.18 * size**0.5, 5.0)  # an estimate of the data's largest standard deviation in any direction
    if rho == 0:
        predictor, ending, c, b, d = 4, 4 if nfe >= 8 else 3, 0.16 / max(nfe, 8), 0.5, 0.36 / spread
    else:
        predictor, ending, c, b, d = 3, 3 if nfe <= 12 else 1, 0.3 / nfe, 3.0, 0.5 / spread
    # times uniform in phi_c, from exactly 1 to exactly 0; sqrt(t) = q (1 - t)
    e = np.exp(np.linspace(phi(1.0, c, d), phi(0.0, c, d), nfe + 1)[1:-1])
    q = (e - c) / (1 - d * e)
    times = np.array([1.0, *(2 * q / (1 + np.sqrt(1 + 4 * q**2))) ** 2, 0.0])
    # coefficients: the integral of the weight against each basis polynomial, by Gauss-Legendre quadrature in log r
    a, rows, (nodes, weights) = (1 + rho**2) / 2, [], np.polynomial.legendre.leggauss(32)
    for i in range(nfe - 1):
        s, t = times[i], times[i + 1]
        r = np.exp((np.log(s * t) + np.log(s / t) * nodes) / 2)
        weight = weights * np.log(s / t) / 2 * t**a * (a * r**-a + (1 - a) * r ** (1 - a))  # dr = r d(log r)
        known = times[i::-1][:predictor], times[i + 1 :: -1][:4]  # newest first; the corrector knows t as well
        predict, correct = (lagrange(phi(past, b, d), phi(r, b, d)) @ weight for past in known)
        rows.append(((t / s) ** a, np.sqrt(t * (1 - (t / s) ** rho**2)), predict, correct))
    # as t -> 0 the weight becomes a point mass at t: x0_hat is extrapolated to 0, in phi with a b of its own
    last = min(times[-2], 0.5)
    b = max(1.4 * np.sqrt(last) / (1 - last), 0.025)
    return times, rows, lagrange(phi(times[-2::-1][:ending], b, d), phi(np.zeros(1), b, d))[:, 0]


# ---- 5. Sampler: predict, evaluate, correct with the same noise; one evaluation a step -------------------------------
@torch.no_grad()
def sample(field, x, nfe=26, rho=0.0, noise=None):
    """Return samples at t = 0 from noise x (B, ...) at t = 1, by `nfe` evaluations of field(x, t (B,)) -> x0_hat."""
    times, rows, ending = table(nfe, rho, x[0].numel())
    t = torch.from_numpy(times)[:, None].expand(-1, len(x))  # (nfe + 1, B)
    x0s = [field(x, t[0])]  # newest first
    for i, (decay, std, predict, correct) in enumerate(rows):
        xi = noise(i) if noise else torch.randn_like(x)  # noise: step index -> xi, to repeat a sample
        predicted = decay * x + sum(map(mul, predict, x0s)) + std * xi
        x0s.insert(0, field(predicted, t[i + 1]))
        x = decay * x + sum(map(mul, correct, x0s)) + std * xi
    return sum(map(mul, ending, x0s))


# ---- 6. Training on the digits ---------------------------------------------------------------------------------------
def digits():
    """Return the 1,400 training images, float32 (N, 1, 8, 8) in [-1, 1], and their labels."""
    archive = np.load(Path(__file__).parents[1] / "src/mvm/data/digits.npz")
    images = torch.from_numpy(np.round(archive["levels"] * (255 / 16))).float().reshape(-1, 1, 8, 8) / 127.5 - 1
    return images[397:], torch.from_numpy(archive["labels"]).long()[397:]


def train(images, labels, steps, batch=64, lr=4e-3, label_drop=0.1):
    """Return a network trained by AdamW: the exponential moving average of its weights."""
    network = DiT()
    average = copy.deepcopy(network).requires_grad_(False)
    optimizer = torch.optim.AdamW(network.parameters(), lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    for step in (bar := tqdm(range(steps), desc="train", mininterval=1)):
        optimizer.param_groups[0]["lr"] = lr * min((step + 1) / 100, 1 - 0.95 * step / steps)  # warm-up, decay
        chosen, t = torch.randint(len(images), (batch,)), torch.rand(batch, dtype=torch.float64)
        y = torch.where(torch.rand(batch) < label_drop, 10, labels[chosen])  # null class: for guidance
        loss = matching_loss(network, images[chosen], y, t, torch.randn_like(images[chosen]))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        for mean, weight in zip(average.parameters(), network.parameters(), strict=True):
            mean.lerp_(weight.detach(), 1 - min(0.998, (1 + step) / (10 + step)))
        bar.set_postfix(loss=f"{loss.item():.3f}", refresh=False)
    return average


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000, help="training steps")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", default="page.png", help="a picture: samples by the ODE left, by the SDE right")
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    torch.set_num_threads(1)  # products are small: on a busy machine two threads took four times as long
    images, labels = digits()
    network = train(images, labels, options.steps)
    start, asked, grids = torch.randn(100, 1, 8, 8), torch.arange(100) % 10, []
    for name, rho in (("ODE", 0.0), ("SDE", 1.0)):
        x = sample(denoiser(network, asked), start, nfe=26, rho=rho)
        nearest = labels[torch.cdist(x.flatten(1), images.flatten(1)).argmin(1)]
        print(f"{name}: {(nearest == asked).sum()} of 100 samples lie nearest to a training image of their class")
        tiles = pad(x, (1, 1, 1, 1), value=1.0).reshape(10, 10, 10, 10).transpose(1, 2).reshape(100, 100)
        grids.append(pad(tiles, (4, 4, 4, 4), value=1.0))
    grey = ((torch.cat(grids, 1) + 1) * 127.5).round().clamp(0, 255).byte().numpy()
    Image.fromarray(grey.repeat(4, 0).repeat(4, 1)).save(options.out)


if __name__ == "__main__":
    main()
