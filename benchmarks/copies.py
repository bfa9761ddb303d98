"""Are samples copies of training images? Their nearest ones, beside what photographs never trained on have.

    mvm sample cifar10 --num 1000 --out samples.npz
    python benchmarks/copies.py samples.npz --data PREPARED [--held-out PHOTOS] [--out nearest.png]

PREPARED: the training images, searched as they are and mirrored. PHOTOS: photographs of the same kind that were not
trained on. All three may be whatever `mvm eval` reads: prepared folders, arrays, pictures. A distance is the root mean
square over pixels, of 255 levels. Smooth images lie near everything, so what counts is the ratio of the nearest
distance to the mean of the next 49: near 1 for an image with no original, 0 for a copy. Below which ratios one in
twenty, and one in four, of the held-out photographs lie is the measure: the table has how many samples do, and the
95 % interval of such a share (Wilson's). Few photographs know those ratios roughly, which the intervals of the samples
leave out: compare the rows. The picture has the samples of the smallest ratios, each above its nearest training image:
the worst there are. 512 samples and 256 photographs among 50,000 images of 3x32x32: 104 s on two cores.
"""

import argparse
from pathlib import Path
from typing import NamedTuple

import torch
from model_pictures import GAP, labelled, write_picture
from PIL import Image
from torch import Tensor
from tqdm import tqdm

from mvm.evaluation.images import open_images
from mvm.metrics.distances import NORMAL_95
from mvm.pictures import grid

NEAREST = 50
PART = 5000  # training images at a time: 5,000 of 3x32x32 are 61 MB
ONE_IN = (20, 4)
SHOWN = 10


class Neighbours(NamedTuple):
    """Of every image: distances (N, k), rising; numbers (N, k) of training images, those from M on mirrored."""

    distances: Tensor
    numbers: Tensor

    @property
    def ratios(self) -> Tensor:
        """The nearest distance over the mean of the others (N,)."""
        return self.distances[:, 0] / self.distances[:, 1:].mean(1)


def neighbours(images: Tensor, training: Tensor, k: int = NEAREST) -> Neighbours:
    """Return the k nearest of training images (M, C, H, W) and of their mirrored ones, all uint8."""
    if images.shape[1:] != training.shape[1:]:
        shapes = (list(found.shape[1:]) for found in (images, training))
        raise ValueError("images are {}, the training images {}; give samples of a model of those".format(*shapes))
    rows = images.flatten(1).float()
    best = torch.full((len(rows), k), torch.inf)
    numbers = torch.zeros(len(rows), k, dtype=torch.int64)
    starts = [(start, mirrored) for mirrored in (False, True) for start in range(0, len(training), PART)]
    for start, mirrored in tqdm(starts, desc="nearest", unit="part"):
        part = training[start : start + PART].float()
        columns = (part.flip(-1) if mirrored else part).flatten(1)
        # not by |x|^2 + |y|^2 - 2 xy, which would leave a copy some way off
        apart = torch.cdist(rows, columns, compute_mode="donot_use_mm_for_euclid_dist")
        mine = torch.arange(start, start + len(part)) + mirrored * len(training)
        best, chosen = torch.cat((best, apart), 1).topk(k, largest=False)
        numbers = torch.cat((numbers, mine.expand(len(rows), -1)), 1).gather(1, chosen)
    return Neighbours(best / rows.shape[1] ** 0.5, numbers)


def share(found: int, count: int) -> str:
    """Return a number, its share and the share's 95 % interval (Wilson's, which also serves a share of 0)."""
    z2 = NORMAL_95**2
    middle = (found + z2 / 2) / (count + z2)
    reach = NORMAL_95 / (count + z2) * (found * (count - found) / count + z2 / 4) ** 0.5
    return f"{found} ({found / count:.1%}; {max(middle - reach, 0.0):.1%} to {min(middle + reach, 1.0):.1%})"


def table(samples: Neighbours, held_out: Neighbours | None) -> str:
    """Return what is near as Markdown."""
    lines = [float(held_out.ratios.quantile(1 / count)) for count in ONE_IN] if held_out is not None else []
    heads = ["images", "number", "nearest, median", "ratio, median", "smallest", *(f"below {x:.3f}" for x in lines)]
    rows = [heads, ["---"] * len(heads)]
    for name, found in (("samples", samples), ("held out", held_out)):
        if found is None:
            continue
        ratios, nearest = found.ratios, found.distances[:, 0]
        figures = [f"{nearest.median():.1f}", f"{ratios.median():.3f}", f"{ratios.min():.3f}"]
        below = [share(int((ratios < x).sum()), len(ratios)) for x in lines]
        rows.append([name, f"{len(ratios):,}", *figures, *below])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def originals(training: Tensor, numbers: Tensor) -> Tensor:
    """Return the training images of such numbers (N,), those from M on mirrored."""
    images = training[numbers % len(training)]
    return torch.where((numbers >= len(training))[:, None, None, None], images.flip(-1), images)


def worst(samples: Tensor, training: Tensor, found: Neighbours) -> Image.Image:
    """Return the samples of the smallest ratios above their nearest training images."""
    order = found.ratios.argsort()[:SHOWN]
    nearest = originals(training, found.numbers[order, 0])
    body = grid(torch.cat((samples[order], nearest)), len(order), 2, GAP)
    return labelled(body, ("sample", "nearest"), [f"{ratio:.2f}" for ratio in found.ratios[order]])


def loaded(name: str) -> Tensor:
    """Return a set of images as uint8 (N, C, H, W)."""
    return torch.cat([images for _, images in open_images(name).read(PART)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("samples")
    parser.add_argument("--data", required=True)
    parser.add_argument("--held-out")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    training, samples = loaded(arguments.data), loaded(arguments.samples)
    found = neighbours(samples, training)
    held_out = neighbours(loaded(arguments.held_out), training) if arguments.held_out else None
    print(table(found, held_out))
    if arguments.out:
        write_picture(worst(samples, training, found), arguments.out)


if __name__ == "__main__":
    main()
