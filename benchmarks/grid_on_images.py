"""Do grid, variable and orders of the default sampler suit a trained model? FID of candidates on the same noise.

    python benchmarks/grid_on_images.py MODEL --ref MOMENTS --inception WEIGHTS      (one GPU)
    python benchmarks/grid_on_images.py MODEL --inception WEIGHTS --num 48 --precision fp32 --names default sa  (a CPU)

MODEL: a run, or a shipped model (cifar10). MOMENTS: of the training images (mvm data stats); without them, no FID.
NAMES: how the candidates begin that are to be tried. The ODE, no guidance.
grid_search.py judges them on exact oracles; here every candidate makes the same NUM images, from the same noise
and labels. Besides FID: its distance from the default's, with the error of that difference (block after block of
pairs left out of both), and how far the images are from those of many small steps.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

from mvm import noise
from mvm.evaluation.extractors import Extractor, Sources, open_extractor
from mvm.evaluation.metrics import Leaving, frechet_leaving, paired_difference
from mvm.evaluation.moments import Moments, accumulate_blocks, load_moments
from mvm.generate import compile_network, cycle_labels, sampling_precision
from mvm.model import Model, choose_device, load
from mvm.solver import Solver, adams, sa, sample

BLOCKS = 8
NFE = 26
MANY = 200  # evaluations of the images that are taken for converged


class Candidate(NamedTuple):
    """A solver, and its evaluations of the field."""

    name: str
    solver: Solver
    nfe: int = NFE


DEFAULT = Candidate("default (r = 4, p = 1.4, phi = t^0.8, P3/C4)", adams())


def candidates() -> Iterator[Candidate]:
    yield Candidate("default", adams(), 13)
    yield Candidate("default", adams(), 39)
    yield Candidate("default", adams(), 52)
    for nfe in (26, 39, 52):
        yield Candidate("sa, t_min = 1e-4", sa(t_min=1e-4), nfe)
    for nfe in (13, 26):
        for p, r in ((1.0, 3.5), (1.25, 4.0), (1.5, 4.0), (1.5, 4.5), (2.0, 4.5)):
            yield Candidate(f"r = {r}, p = {p}", adams(r=r, p=p), nfe)
    for r in (3.0, 3.5, 4.5):
        yield Candidate(f"r = {r}", adams(r=r))
    for q in (0.5, 1.0):
        yield Candidate(f"phi = t^{q}", adams(q=q))
    for orders in ((2, 0), (2, 2), (2, 3), (3, 3), (4, 5)):
        yield Candidate(f"P{orders[0]}/C{orders[1]}", adams(*orders))


class Made(NamedTuple):
    """Images in [-1, 1] (N, C, H, W), on the host, and the features of those as bytes (N, d)."""

    images: Tensor
    features: Tensor


class Maker:
    """Images of one model from one set of noises."""

    def __init__(self, model: Model, judge: Extractor, num: int, batch: int, precision: str) -> None:
        self.model, self.judge, self.batch, self.precision = model, judge, batch, precision
        self.labels = cycle_labels((), num, model.num_classes)
        self.seeds = noise.derive(0, torch.arange(num))

    @torch.no_grad()
    def __call__(self, solver: Solver, nfe: int) -> Made:
        """Return all images by a solver."""
        images, features = [], []
        device = self.model.device
        for labels, seeds in zip(self.labels.split(self.batch), self.seeds.split(self.batch), strict=True):
            x = noise.initial(seeds.to(device), self.model.sample_shape)
            with sampling_precision(self.precision, device):
                made = sample(self.model, x, condition=labels.to(device), solver=solver, nfe=nfe)
            images.append(made.float().cpu())
            features.append(self.judge(self.model.codec.decode(made))["pool"])
        return Made(torch.cat(images), torch.cat(features))


class Judged:
    """FID of candidates, and its distance from the default's, as they are printed; neither without a reference."""

    def __init__(self, base: Made, reference: Moments | None) -> None:
        self.reference = reference
        self.ours = self._found(base)

    def _found(self, made: Made) -> tuple[Leaving, list[int]] | None:
        if self.reference is None:
            return None
        parts = accumulate_blocks(made.features, BLOCKS)
        return frechet_leaving(parts, self.reference), [part.count for part in parts]

    def __call__(self, made: Made) -> tuple[str, str]:
        found = self._found(made)
        if found is None or self.ours is None:
            return "not judged", "not judged"
        gap = paired_difference(self.ours[0], *found)
        return f"{found[0].value:.2f}", f"{gap.value:+.2f} ± {gap.error:.2f}"


def row(candidate: Candidate, made: Made, truth: Made, judged: Judged) -> str:
    apart = (made.images - truth.images).square().mean((1, 2, 3)).sqrt()
    moved = (made.features - truth.features).square().sum(1).mean()
    cells = (*judged(made), f"{apart.median():.4f}", f"{apart.max():.4f}", f"{moved:.2f}")
    return f"| {candidate.name} | {candidate.nfe} | {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--ref", type=Path)
    parser.add_argument("--inception", default="")
    parser.add_argument("--num", type=int, default=10_000)
    parser.add_argument("--batch", type=int, default=1250)
    parser.add_argument("--many", type=int, default=MANY)
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--names", nargs="*", default=[""])
    options = parser.parse_args()
    device = choose_device("auto")
    model = load(options.model).to(device).eval().requires_grad_(False)
    if device.type == "cuda":
        compile_network(model, replay=False, kernels=False)
    judge = open_extractor("inception", Sources(options.inception), device)
    reference = load_moments(options.ref).moments.to(device) if options.ref else None
    maker = Maker(model, judge, options.num, options.batch, options.precision)
    truth, base = maker(adams(), options.many), maker(*DEFAULT[1:])
    judged = Judged(base, reference)
    print(f"{options.model}, {options.num} images, {options.precision}, torch {torch.__version__}\n")
    print("| candidate | NFE | FID | against the default | median RMSE | largest | features |")
    print("|---|---|---|---|---|---|---|")
    print(row(DEFAULT, base, truth, judged), flush=True)
    print(row(Candidate("default", adams(), options.many), truth, truth, judged), flush=True)
    asked = [found for found in candidates() if found.name.startswith(tuple(options.names))]
    for candidate in tqdm(asked, desc="candidates"):
        made = maker(candidate.solver, candidate.nfe)
        print(row(candidate, made, truth, judged), flush=True)


if __name__ == "__main__":
    main()
