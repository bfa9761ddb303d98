"""Metrics as pure functions of features, in float64."""

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool1d, adaptive_avg_pool2d, adaptive_avg_pool3d

from mvm.metrics.moments import Accumulator, Moments, merged, random_blocks
from mvm.metrics.moments import moments as moments  # one import for those who have features and want a figure
from mvm.pixels import to_unit

TILE = 1024  # rows and columns of a distance or kernel matrix in memory at once: 8 MB, which malloc reuses; 34 it maps
TIE = 1e-12  # squared distances closer than this part of the squared norms are equal: products round
SEED = 2020  # torch-fidelity's, so that its published figures can be met


class SubsetScore(NamedTuple):
    """Mean and standard deviation (divided by n) over subsets or splits, as published."""

    mean: float
    std: float


def _square_root(matrix: Tensor) -> Tensor:
    """Return the symmetric square root of a positive semidefinite matrix; rounding below 0 is cut."""
    values, vectors = torch.linalg.eigh(matrix)
    return (vectors * values.clamp_min(0).sqrt()) @ vectors.T


def _frechet(a: Moments, root: Tensor, b: Moments) -> float:
    """Return the Frechet distance, root = C_a^1/2 given."""
    if a.mean.shape != b.mean.shape:
        raise ValueError(f"features have {len(a.mean)} and {len(b.mean)} dimensions; they must come from one space")
    covariance = b.covariance.to(root)
    cross = torch.linalg.eigvalsh(root @ covariance @ root).clamp_min(0).sqrt().sum()
    gap = ((a.mean - b.mean.to(root)) ** 2).sum()
    return float(gap + a.covariance.trace() + covariance.trace() - 2 * cross)


def frechet_distance(a: Moments, b: Moments) -> float:
    """Return |m_a - m_b|^2 + tr(C_a + C_b - 2 (C_a^1/2 C_b C_a^1/2)^1/2)."""
    return _frechet(a, _square_root(a.covariance), b)


def sampling_bias(covariance: Tensor, count: int) -> float:
    """Return how much too high a Frechet distance comes out because one side is `count` samples of a Gaussian.

    To first order in 1/count, with eigenvalues l of the covariance: sum l / n for the mean, and for the covariance
    1/2 sum_ij E d_ij^2 / (l_i + l_j) with E d_ij^2 = l_i l_j (1 + [i = j]) / n, the Bures distance's second variation.
    """
    values = torch.linalg.eigvalsh(covariance.double()).clamp_min(0)
    sums = (values[:, None] + values).clamp_min(torch.finfo(values.dtype).tiny)
    shared = (values[:, None] * values / sums).sum() / 2 + values.sum() / 4  # the diagonal once more: l / 2, halved
    return float((values.sum() + shared) / count)


def _check_pair(a: Tensor, b: Tensor, least: int) -> None:
    """Refuse sets of features that are too small, of two spaces, or not finite (NaN is near nothing: 0, silently)."""
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[1]:
        raise ValueError(f"features have shapes {tuple(a.shape)} and {tuple(b.shape)}; (N, d) and (M, d) are needed")
    if min(len(a), len(b)) < least:
        raise ValueError(f"there are {len(a)} and {len(b)} features; at least {least} of each are needed")
    if not bool(a.isfinite().all() and b.isfinite().all()):
        raise ValueError("features hold NaN or infinity; look at the images they were made from")


def _kernel_sum(x: Tensor, y: Tensor) -> Tensor:
    """Return the sum of k(x_i, y_j) = (x_i . y_j / d + 1)^3 over all pairs, a tile of rows at a time."""
    return sum(((part @ y.T / x.shape[1] + 1) ** 3).sum() for part in x.split(TILE))


def kernel_distance(a: Tensor, b: Tensor, subsets: int = 100, size: int = 1000, seed: int = SEED) -> SubsetScore:
    """Return the mean of unbiased MMD^2 over random subsets (KID, arXiv 1801.01401), kernel (x . y / d + 1)^3.

    Subsets are drawn as torch-fidelity draws them: one RandomState, for every subset first from a, then from b.
    """
    if size < 2 or subsets < 1:
        raise ValueError(f"subsets={subsets}, size={size}; subsets >= 1 and size >= 2 are needed")
    _check_pair(a, b, size)
    draw = np.random.RandomState(seed)  # numpy's newer generators draw other subsets
    distances = []
    for _ in range(subsets):
        x, y = (z[torch.from_numpy(draw.choice(len(z), size, replace=False)).to(z.device)].double() for z in (a, b))
        y = y.to(x)
        # pairs of one feature with itself are left out within a set
        within = sum(_kernel_sum(z, z) - ((z.square().mean(1) + 1) ** 3).sum() for z in (x, y))
        distances.append(float(within / (size * (size - 1)) - 2 * _kernel_sum(x, y) / size**2))
    return SubsetScore(float(np.mean(distances)), float(np.std(distances)))


class LeaveOneOut(NamedTuple):
    """A figure of all features, and without each block of them in turn."""

    value: float
    left_out: list[float]


def kernel_leave_one_out(a: Tensor, b: Tensor, dealt: Tensor) -> LeaveOneOut:
    """Return the unbiased MMD^2 of all of a and b, and with each block of a left out; dealt (N,): the block of each.

    No subsets are drawn, whose chance would drown what a block changes; sums of kernels by blocks serve for all.
    """
    _check_pair(a, b, 2)
    a, b = a.double(), b.to(a.device).double()
    member = torch.nn.functional.one_hot(dealt.to(a.device)).double()  # (N, blocks)
    sizes, n, m = member.sum(0), len(a), len(b)
    within = torch.zeros(member.shape[1], member.shape[1], dtype=torch.float64, device=a.device)
    cross = torch.zeros(member.shape[1], dtype=torch.float64, device=a.device)
    for rows, mine in zip(a.split(TILE), member.split(TILE), strict=True):
        within += mine.T @ (((rows @ a.T / a.shape[1] + 1) ** 3) @ member)
        cross += mine.T @ sum(((rows @ part.T / a.shape[1] + 1) ** 3).sum(1) for part in b.split(TILE))
    own = member.T @ (a.square().mean(1) + 1) ** 3
    theirs = (_kernel_sum(b, b) - ((b.square().mean(1) + 1) ** 3).sum()) / (m * (m - 1))

    def figure(pairs: Tensor, mixed: Tensor, count: Tensor | float) -> float:
        return float(pairs / (count * (count - 1)) + theirs - 2 * mixed / (count * m))

    pairs = within.sum() - within.sum(1) - within.sum(0) + within.diagonal() - (own.sum() - own)
    left_out = [figure(*rest) for rest in zip(pairs, cross.sum() - cross, n - sizes, strict=True)]
    return LeaveOneOut(figure(within.sum() - own.sum(), cross.sum(), float(n)), left_out)


def _tiles(rows: Tensor, columns: Tensor, centre: Tensor) -> Iterator[tuple[slice, slice, Tensor, Tensor]]:
    """Yield some rows and columns, their squared distances (r, c), and below which gaps two of these are equal.

    |x - y|^2 = |x|^2 + |y|^2 - 2 x . y about a centre, which keeps the norms, hence the rounding, small.
    """
    for i in range(0, len(rows), TILE):
        x = rows[i : i + TILE].double() - centre
        for j in range(0, len(columns), TILE):
            y = columns[j : j + TILE].double() - centre
            norms = x.square().sum(1)[:, None] + y.square().sum(1)
            squared = torch.addmm(norms, x, y.T, alpha=-2)  # may round below 0: within the slack
            yield slice(i, i + len(x)), slice(j, j + len(y)), squared, norms.mul_(TIE)


def _squared_radii(x: Tensor, k: int, centre: Tensor) -> Tensor:
    """Return squared distances (N,) to the k-th nearest other feature; the nearest of all is the feature itself."""
    nearest = torch.full((len(x), k + 1), torch.inf, dtype=torch.float64, device=x.device)
    for rows, _, squared, _ in _tiles(x, x, centre):
        nearest[rows] = torch.cat((nearest[rows], squared), 1).topk(k + 1, largest=False).values
    return nearest[:, k]


def _manifold_inputs(real: Tensor, fake: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the real features where the fake ones are, and their mean."""
    if k < 1:
        raise ValueError(f"k={k}; at least 1 neighbour is needed")
    _check_pair(real, fake, k + 1)
    real = real.to(fake.device)
    return real, real.mean(0, dtype=torch.float64)


class PrecisionRecall(NamedTuple):
    """Part of the fake features near real ones, and of the real near fake ones."""

    precision: float
    recall: float


def precision_recall(real: Tensor, fake: Tensor, k: int = 3) -> PrecisionRecall:
    """Return the part of fake (real) features in a ball |x - y| <= distance to y's k-th neighbour, y real (fake).

    Improved precision and recall, arXiv 1904.06991. Every ball is closed and no ball is pruned, as in ADM's figures.
    """
    real, centre = _manifold_inputs(real, fake, k)
    real_radii, fake_radii = (_squared_radii(x, k, centre) for x in (real, fake))
    precise = torch.zeros(len(fake), dtype=torch.bool, device=fake.device)
    recalled = torch.zeros(len(real), dtype=torch.bool, device=fake.device)
    for rows, columns, squared, slack in _tiles(fake, real, centre):
        lowest = squared - slack
        precise[rows] |= (lowest <= real_radii[columns]).any(1)
        recalled[columns] |= (lowest <= fake_radii[rows, None]).any(0)
    return PrecisionRecall(float(precise.double().mean()), float(recalled.double().mean()))


class DensityCoverage(NamedTuple):
    """How many real balls a fake feature lies in, over k, and the part of real balls with a fake feature."""

    density: float
    coverage: float


def density_coverage(real: Tensor, fake: Tensor, k: int = 5) -> DensityCoverage:
    """Return density and coverage (arXiv 2002.09797) by open balls |x - y| < distance to y's k-th neighbour, y real."""
    real, centre = _manifold_inputs(real, fake, k)
    radii = _squared_radii(real, k, centre)
    covered = torch.zeros(len(real), dtype=torch.bool, device=fake.device)
    hits = torch.zeros((), dtype=torch.int64, device=fake.device)
    for _, columns, squared, slack in _tiles(fake, real, centre):
        inside = squared + slack < radii[columns]
        hits += inside.sum()
        covered[columns] |= inside.any(0)
    return DensityCoverage(int(hits) / (k * len(fake)), float(covered.double().mean()))


def inception_score(probabilities: Tensor, splits: int = 10, seed: int | None = SEED) -> SubsetScore:
    """Return exp(H(mean p) - mean H(p)) over splits of class probabilities (N, classes), arXiv 1606.03498.

    They are shuffled first, as torch-fidelity does: samples often stand in order of class. `seed=None` keeps the order.
    """
    if probabilities.ndim != 2 or not 1 <= splits <= len(probabilities):
        raise ValueError(f"probabilities have shape {tuple(probabilities.shape)}, splits={splits}; N >= splits >= 1")
    p = probabilities.double()
    if not bool(((p >= 0).all(1) & ((p.sum(1) - 1).abs() < 0.01)).all()):  # float16's softmax is good to 0.001
        raise ValueError("rows are no probabilities (at least 0, of sum 1); if they are logits, take softmax(1) first")
    if seed is not None:
        p = p[torch.from_numpy(np.random.RandomState(seed).permutation(len(p))).to(p.device)]
    parts = [p[start:stop] for start, stop in pairwise(i * len(p) // splits for i in range(splits + 1))]
    entropy = torch.special.entr
    scores = [float((entropy(part.mean(0)).sum() - entropy(part).sum(1).mean()).exp()) for part in parts]
    return SubsetScore(float(np.mean(scores)), float(np.std(scores)))


NORMAL_95 = 1.959964
STUDENT_95 = (12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469)  # of 1 to 6 degrees of freedom


def student_95(blocks: int) -> float:
    """Return the half-width of a 95 % interval in standard errors that were estimated from so many blocks.

    From 8 blocks on Cornish and Fisher's series for Student's t, good to 0.01 there.
    """
    z, n = NORMAL_95, blocks - 1
    if n <= len(STUDENT_95):
        return STUDENT_95[n - 1]
    return z + (z**3 + z) / (4 * n) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n**2)


class Jackknife(NamedTuple):
    """A figure, the same with bias of order 1/N taken off, its standard error, and what each block adds to that.

    The error is the root of the sum of the squared parts. Parts of b - a are those of b less those of a where both
    sets were dealt into blocks alike: what both owe to common seeds and labels cancels.
    """

    value: float
    corrected: float
    error: float
    parts: tuple[float, ...]


def jackknife_error(value: float, left_out: Sequence[float], sizes: Sequence[int]) -> Jackknife:
    """Return the delete-a-block jackknife for blocks of m_j of n (Busing, Meijer and van der Leeden 1999).

    With h_j = n/m_j the pseudo-values are h_j value - (h_j - 1) left_out_j; equal blocks give the textbook formula.
    """
    left, h = np.array(left_out), sum(sizes) / np.array(sizes)
    corrected = len(sizes) * value - float(((1 - 1 / h) * left).sum())
    pseudo = h * value - (h - 1) * left
    parts = (pseudo - corrected) / np.sqrt(len(sizes) * (h - 1))
    return Jackknife(value, corrected, float(np.linalg.norm(parts)), tuple(parts.tolist()))


def jackknife(metric: Callable[[Tensor], float], features: Tensor, blocks: int = 20, seed: int = 0) -> Jackknife:
    """Return metric(features) with its error, from the metric without each of `blocks` random blocks of rows."""
    parts = random_blocks(len(features), blocks, seed)
    others = (torch.cat(parts[:j] + parts[j + 1 :]).sort().values for j in range(blocks))
    left_out = [metric(features[rows.to(features.device)]) for rows in others]
    return jackknife_error(metric(features), left_out, [len(part) for part in parts])


def paired_difference(a: LeaveOneOut, b: LeaveOneOut, sizes: Sequence[int]) -> Jackknife:
    """Return b - a with its error, the same blocks of pairs left out of both."""
    left_out = [theirs - ours for ours, theirs in zip(a.left_out, b.left_out, strict=True)]
    return jackknife_error(b.value - a.value, left_out, sizes)


def jackknife_frechet(parts: Sequence[Accumulator], reference: Moments) -> Jackknife:
    """Return the Frechet distance of all parts together with its error, each part left out in turn.

    No feature is needed twice; the reference is taken as known. Parts must be random blocks of the features.
    """
    if len(parts) < 2 or min(part.count for part in parts) < 1:
        raise ValueError(f"parts hold {[part.count for part in parts]} features; two parts or more, none empty")
    total, root = merged(parts), _square_root(reference.covariance)
    left_out = [_frechet(reference, root, total.without(part).result()) for part in parts]
    return jackknife_error(_frechet(reference, root, total.result()), left_out, [part.count for part in parts])


def pixel_features(images: Tensor) -> Tensor:
    """Return uint8 images (N, ...) as vectors in [-1, 1] (N, d): a space that needs no network."""
    return to_unit(images).flatten(1).double()


SHRUNKEN_SIDE = 8


def shrunken_features(images: Tensor) -> Tensor:
    """Return uint8 images (N, C, H, W) as vectors of at most 8x8 means per channel: layout and colour, no detail.

    Samples of one or three axes, and float arrays, likewise; those of other axes as they are.
    """
    unit = to_unit(images) if images.dtype == torch.uint8 else images.float()
    size = [min(SHRUNKEN_SIDE, extent) for extent in unit.shape[2:]]
    pools: Any = {1: adaptive_avg_pool1d, 2: adaptive_avg_pool2d, 3: adaptive_avg_pool3d}
    return (pools[len(size)](unit, size) if len(size) in pools else unit).flatten(1).double()
