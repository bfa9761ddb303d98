"""Pictures of a model.

    python benchmarks/model_pictures.py one-noise cifar10 --cfg 3 --interval 0.6,0.8 --out cifar10-one-noise.png
    python benchmarks/model_pictures.py both cifar10 --cfg 3 --interval 0.6,0.8 --out cifar10-ode-sde.png
    python benchmarks/model_pictures.py by-class cifar10 --cfg 3 --interval 0.6,0.8 --out cifar10-by-class.png
    python benchmarks/model_pictures.py scales cifar10 --out cifar10-scales.png    the same noise, more and more guided
    python benchmarks/model_pictures.py augment cifar10 --cfg 3 --interval 0.6,0.8 --out cifar10-augment.png
                                                        what data.augment would make of the model's images in training

Each takes minutes on a CPU, and nothing in them is picked: seeds are 0, 1, 2, ...
"""

import argparse
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path

import torch
from PIL import Image, ImageDraw, ImageFont
from tqdm import tqdm

import mvm
from mvm.data import augmentation, augmented
from mvm.data.augment import PARTS
from mvm.evaluation.sweep_report import guidance_text, rho_name
from mvm.files import atomic
from mvm.generate import Sampler, class_numbers, cycle_labels
from mvm.pictures import grid
from mvm.recipes import SampleConfig
from mvm.solver import DEFAULT_NFE

NOISE_NFES = (5, 8, 13, 26, 52)
NOISE_RHOS = (0.0, 0.75, 1.0)
SCALES = (  # and intervals
    (1.0, 0.0, 1.0), (1.2, 0.6, 0.8), (2.0, 0.6, 0.8), (3.0, 0.6, 0.8), (5.0, 0.6, 0.8), (2.0, 0.3, 0.9),
    (3.0, 0.3, 0.9), (3.0, 0.0, 1.0),
)  # fmt: skip
WARPS = ("flip", "size", "rotation", "stretch", "translation")  # as mvm.data.augment numbers them
GAP = 2  # pixels between two images


def labelled(body: Image.Image, rows: Sequence[str], columns: Sequence[str], size: int = 13) -> Image.Image:
    """Return a grid of images with a name before every row and, where given, above every column."""
    font = ImageFont.load_default(size)
    left = 10 + round(max(font.getlength(name) for name in rows))
    top = 2 * size if columns else 0
    picture = Image.new("RGB", (left + body.width, top + body.height), "white")
    picture.paste(body, (left, top))
    pen = ImageDraw.Draw(picture)
    for i, name in enumerate(rows):
        pen.text((left - 5, top + (i + 0.5) * body.height / len(rows)), name, "black", font, anchor="rm")
    for i, name in enumerate(columns):
        pen.text((left + (i + 0.5) * body.width / len(columns), top / 2), name, "black", font, anchor="mm")
    return picture


def write_picture(picture: Image.Image, out: Path) -> None:
    with atomic(out) as temporary:
        picture.save(temporary, format="PNG", optimize=True)


def one_noise(model: mvm.Model, classes: Sequence[int], guided: Mapping[str, float]) -> Image.Image:
    """Return a row for each class and process, a column for each NFE; one class keeps one noise throughout."""
    labels, seeds = torch.tensor(classes), torch.arange(len(classes))
    made: dict[tuple[float, int], torch.Tensor] = {}
    for rho, nfe in tqdm(list(product(NOISE_RHOS, NOISE_NFES)), desc="one noise", unit="setting"):
        settings = SampleConfig(nfe=nfe, rho=rho, **guided)
        made[rho, nfe] = Sampler(model).images(labels, seeds, settings, progress=False).images
    cells = [made[rho, nfe][i] for i in range(len(classes)) for rho in NOISE_RHOS for nfe in NOISE_NFES]
    rows = [f"{model.classes[c]}, {rho_name(rho)}" for c in classes for rho in NOISE_RHOS]
    body = grid(torch.stack(cells), len(NOISE_NFES), 3, GAP)
    return labelled(body, rows, [f"NFE {nfe}" for nfe in NOISE_NFES])


def both(model: mvm.Model, nfe: int, guided: Mapping[str, float]) -> Image.Image:
    """Return a row of the ODE and one of the SDE, a column for each class; the class's number is its noise's seed."""
    labels = cycle_labels((), model.num_classes, model.num_classes)
    every = [SampleConfig(nfe=nfe, rho=rho, **guided) for rho in (0.0, 1.0)]
    images = [Sampler(model).images(labels, labels, settings).images for settings in every]
    return labelled(grid(torch.cat(images), model.num_classes, 3, GAP), ["ODE", "SDE"], model.classes)


def by_class(model: mvm.Model, columns: int, settings: SampleConfig) -> Image.Image:
    """Return a row for each class; image i in reading order by column has seed i, as `mvm sample` numbers them."""
    count = model.num_classes * columns
    labels = cycle_labels((), count, model.num_classes)
    images = Sampler(model).images(labels, torch.arange(count), settings, batch=20).images
    rows = images.unflatten(0, (columns, model.num_classes)).transpose(0, 1).flatten(0, 1)
    return labelled(grid(rows, columns, 2, GAP), model.classes, ())


def scales(model: mvm.Model, nfe: int) -> Image.Image:
    """Return a row for each guidance, a column for each class; a column has one noise, the class's number its seed."""
    every = [SampleConfig(nfe=nfe, cfg=cfg, low=low, high=high) for cfg, low, high in SCALES]
    labels = cycle_labels((), model.num_classes, model.num_classes)
    shown = tqdm(every, desc="scales", unit="row")
    images = [Sampler(model).images(labels, labels, settings, progress=False).images for settings in shown]
    body = grid(torch.cat(images), model.num_classes, 2, GAP)
    return labelled(body, [guidance_text(settings) for settings in every], model.classes)


def warps(images: torch.Tensor, seeds: torch.Tensor) -> list[torch.Tensor]:
    """Return uint8 images as they are, by each warp of data.augment alone as their seeds have it, and by all."""
    told, part = augmentation(seeds, 1.0), torch.tensor(PARTS)
    alone = [torch.where(part == number, told, 0) for number in range(len(WARPS))]
    return [augmented(images, made).round().byte() for made in (torch.zeros_like(told), *alone, told)]


def augment(model: mvm.Model, settings: SampleConfig) -> Image.Image:
    """Return a row for each warp, a column for each class; the class's number is its image's seed."""
    labels = cycle_labels((), model.num_classes, model.num_classes)
    images = Sampler(model).images(labels, labels, settings).images
    body = grid(torch.cat(warps(images, labels)), model.num_classes, 2, GAP)
    return labelled(body, ["as it is", *WARPS, "all at once"], model.classes)


def _guided(arguments: argparse.Namespace) -> dict[str, float]:
    low, high = map(float, arguments.interval.split(","))
    return {"cfg": arguments.cfg, "low": low, "high": high}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("one-noise", "both", "by-class", "scales", "augment"):
        command = commands.add_parser(name)
        command.add_argument("model")
        command.add_argument("--cfg", type=float, default=1.0)
        command.add_argument("--interval", default="0,1")
        command.add_argument("--nfe", type=int, default=DEFAULT_NFE, help="of all but one-noise")
        command.add_argument("--columns", type=int, default=8, help="of by-class")
        command.add_argument("--classes", default="7,8", help="of one-noise, e.g. horse,ship")
        command.add_argument("--out", type=Path, required=True)
    return parser


def main() -> None:
    arguments = _parser().parse_args()
    model = mvm.load(arguments.model)
    match arguments.command:
        case "one-noise":
            classes = class_numbers(arguments.classes, model.classes)
            picture = one_noise(model, classes, _guided(arguments))
        case "both":
            picture = both(model, arguments.nfe, _guided(arguments))
        case "by-class":
            picture = by_class(model, arguments.columns, SampleConfig(nfe=arguments.nfe, **_guided(arguments)))
        case "scales":
            picture = scales(model, arguments.nfe)
        case "augment":
            picture = augment(model, SampleConfig(nfe=arguments.nfe, **_guided(arguments)))
    write_picture(picture, arguments.out)


if __name__ == "__main__":
    main()
