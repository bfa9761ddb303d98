"""mvm eval, mvm data stats."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from mvm.cli.app import Device, Drawing, JsonFile, SamplerOptions, Whole, app, say_from_first
from mvm.cli.data import data

if TYPE_CHECKING:
    from mvm.distributed.processes import Processes
    from mvm.evaluation.evaluate import ComparedSet as Side
    from mvm.evaluation.evaluate import Evaluation, Judge
    from mvm.model import Model


@Parameter(name="*")
@dataclass(frozen=True)
class Features:
    """The networks whose features are compared.

    Parameters
    ----------
    inception
        Weights of the FID network: a file or a folder; default: the cache, or a download.
    encoder
        For fd-dino: a hub name or folder of DINOv2 or DINOv3; default facebook/dinov2-large.
    """

    inception: str = ""
    encoder: str = ""

    def judge(self, place: "Processes", batch: int, **how: Any) -> "Judge":
        """Return what gathers the features."""
        from mvm.evaluation.evaluate import Judge
        from mvm.metrics.extractors import DINO, Sources

        return Judge(Sources(self.inception, self.encoder or DINO), place, batch, **how)


@Parameter(name="*")
@dataclass(frozen=True)
class Judging(Features):
    """The figures, and what images are compared with.

    Parameters
    ----------
    ref
        What images are compared with (see: mvm eval); default, for a run: the images it was trained on.
    metrics
        Separated by commas: fid, sfid, kid, precision, recall, density, coverage, is (FID's Inception network);
        fd-dino, kd-dino (DINO); fd-effnet, kd-effnet (EfficientNet-Lite0, never an FID); fd-pixels, kd-pixels.
        Default: fid for colour images, fd-pixels for grey ones.
    """

    ref: str = ""
    metrics: str = ""

    def names(self, channels: int) -> tuple[str, ...]:
        """Return the figures, the usual one for images of so many channels where none is named."""
        from mvm.metrics.measures import parse_metrics, usual_metric

        return parse_metrics(self.metrics or usual_metric(channels))

    def reference(self, model: "Model") -> "Side":
        """Return the asked reference, or the images that a model was trained on."""
        from mvm.evaluation.evaluate import open_side

        return open_side(self.ref) if self.ref else training_side(model)


def training_side(model: "Model") -> "Side":
    """Return the images that a model was trained on."""
    from mvm.evaluation.evaluate import ComparedSet as Side
    from mvm.evaluation.images import of_training

    return Side(model.recipe.data.name, of_training(model))


@Parameter(name="*")
@dataclass(frozen=True)
class Pictures:
    """How stored pictures are read.

    Parameters
    ----------
    size
        Resize pictures to this side first; else all must have one size.
    resize
        How: box, centre-crop, none, or auto (box up to 64 pixels, centre-crop above).
    channels
        1 or 3; default: what the first picture has.
    split
        Which split, where files hold several.
    """

    size: Whole = 0
    resize: str = "auto"
    channels: Whole = 0
    split: str = ""

    def side(self, name: str) -> "Side":
        """Return stored images or moments."""
        from mvm.evaluation.evaluate import open_side

        return open_side(name, **vars(self))


@dataclass(frozen=True)
class Sides:
    """What `mvm eval` compares, by name: runs are sampled, stored images read."""

    sampler: SamplerOptions
    drawing: Drawing
    pictures: Pictures
    num: int | None
    batch: int
    place: "Processes"

    @property
    def count(self) -> int:
        """How many images a run samples."""
        from mvm.metrics.moments import PUBLISHED

        return PUBLISHED if self.num is None else self.num

    def side(self, name: str, skipped: int = 0) -> "Side":
        """Return a run, stored images or moments; skipped: how many seeds lie before a run's first image."""
        from mvm.model import is_model, shipped_models
        from mvm.options import nearest

        if name in shipped_models() and Path(name).exists():
            raise ValueError(f"'{name}' is a shipped model and a file here; write ./{name} for the file")
        if is_model(name):
            return self._run(name, skipped)
        if name.isidentifier() and not Path(name).exists() and (hint := nearest(name, shipped_models())):
            raise ValueError(f"'{name}' is no run, no shipped model and no file{hint}")
        return self.pictures.side(name)

    def restored(self, name: str, ref: str) -> "Side":
        """Return what an autoencoder makes of the reference's images."""
        from mvm.evaluation.evaluate import ComparedSet as Side
        from mvm.evaluation.images import of_restored
        from mvm.latent import load_rae

        if not ref or (stored := self.side(ref).images) is None:
            raise ValueError(f"'{name}' is an autoencoder; give images for it to restore: --ref IMAGES")
        base = Path(name).name
        return Side(base, of_restored(load_rae(Path(name)).to(self.place.device), stored, base))

    def reference(self, images: "Side", ref: str) -> "Side | None":
        """Return the asked reference; of a run, by default, the images it was trained on.

        A run as reference has seeds of its own: images of the same noise would be too near.
        """
        if ref:
            return self.side(ref, skipped=self.count)
        return None if images.model is None else training_side(images.model)

    def _run(self, name: str, skipped: int) -> "Side":
        """Return a run or a shipped model as images sampled now."""
        from mvm.evaluation.evaluate import ComparedSet as Side
        from mvm.evaluation.images import of_model

        if self.num is None and self.place.device.type == "cpu":
            raise ValueError(
                f"'{name}' would sample {self.count:,} images on a CPU, for hours; say how many, e.g. --num 1000"
            )
        if self.num is None:
            say_from_first(f"mvm: '{name}' samples {self.count:,} images; -n asks for fewer", error=True)
        base, opened = Path(name).name, self.drawing.open(name, self.place)
        model = opened.model
        draw = self.drawing.draw(self.count, self.batch, model.classes)
        draw, settings = replace(draw, seed=draw.seed + skipped), self.sampler.settings(model.recipe.sample)
        return Side(base, of_model(opened, draw, settings, name=base), model=model)


def _as_text(found: "Evaluation") -> str:
    """Return the figures as a table, and what they compare."""
    lines = []
    for name, figure in found.metrics.items():
        error = "" if figure.error is None else f" ± {figure.error:.2g}"
        lines.append(f"{name:<10} {figure.value:.6g}{error}" + (f"   ({figure.note})" if figure.note else ""))
    sides = {"images": found.images, "reference": found.reference}
    for role, facts in sides.items():
        if facts:
            count = f"{facts['count']:,} images" if facts.get("count") else "the number of images is not recorded"
            lines.append(f"{role:<10} {facts.get('name')}, {count}")
    lines.append(f"{'seconds':<10} {found.seconds:.1f} on {found.software['device']}")
    return "\n".join(lines)


@app.command(name="eval")
def evaluate(
    images: str,
    /,
    *,
    judging: Judging = Judging(),
    num: Annotated[Whole | None, Parameter(alias="-n")] = None,
    sampler: SamplerOptions = SamplerOptions(),
    drawing: Drawing = Drawing(),
    pictures: Pictures = Pictures(),
    jackknife: Whole = 0,
    kid_size: Whole = 1000,
    batch: Whole = 250,
    device: Device = "auto",
    json_file: JsonFile = None,
) -> int:
    """Compare images with a reference: FID, KID and others, with everything that made the figures.

    IMAGES and REF are each a run or shipped model (sampled now, as its recipe and the options of the sampler say), a
    folder or zip of pictures, parquet, webdataset tars, an .npz or .npy of uint8 images, what `mvm data prepare` wrote,
    a file of moments (`mvm data stats`, ADM, EDM, pytorch-fid), or data:digits. IMAGES may also be an autoencoder
    (RUN/rae of stage 1): then it is REF's own images, restored, that are judged: rFID. Under torchrun the processes
    share the work. Features are always float32.

    Parameters
    ----------
    images
        What is judged.
    num
        How many images a run samples; default 50000.
    jackknife
        Blocks to estimate the error of Frechet distances with, e.g. 20; 0: no error.
    kid_size
        Images in each of the 100 subsets of KID.
    batch
        Images at a time.
    """
    from mvm.distributed.processes import processes
    from mvm.evaluation.evaluate import evaluate as run_evaluation
    from mvm.files import write_text
    from mvm.latent import is_rae
    from mvm.model import choose_device, is_model
    from mvm.options import at_least, choose
    from mvm.precision import PRECISIONS

    judging.names(channels=3)  # refuses what is no figure before the work
    blocks, ref = jackknife_blocks(jackknife), judging.ref
    at_least("batch", batch, 1)
    if num is not None:
        at_least("num", num, 2)  # a covariance needs two
    asked = {"num": num, **vars(sampler), **vars(drawing)}
    usual = {"num": None, **vars(SamplerOptions()), **vars(Drawing())}
    given = [f"--{name.replace('_', '-')} {value}" for name, value in asked.items() if value != usual[name]]
    if given and not (is_model(images) or is_model(ref)):
        raise ValueError(f"{given[0]} says how a run is sampled, and '{images}' is no run; leave it out")
    if pictures.size and is_model(images) and (not ref or is_model(ref)):
        raise ValueError(f"--size {pictures.size} is for pictures in files; runs sample at their own size")
    choose("precision", drawing.precision, PRECISIONS)
    if json_file is not None:
        json_file.resolve().parent.mkdir(parents=True, exist_ok=True)  # if that fails, before the work
    with processes(choose_device(device)) as place:
        judge = judging.judge(place, batch, blocks=blocks, kid_size=kid_size)
        sides = Sides(sampler, drawing, pictures, num, batch, place)
        side = sides.restored(images, ref) if is_rae(Path(images)) else sides.side(images)
        names = judging.names(side.images.shape[0] if side.images else 3)
        found = run_evaluation(judge, side, sides.reference(side, ref), names)
        for warning in found.warnings:
            say_from_first(f"mvm: {warning}", error=True)
        say_from_first(_as_text(found))
        if json_file is not None and place.main:
            write_text(json_file, json.dumps(found.as_dict(), indent=2) + "\n")
    return 0


def jackknife_blocks(asked: int) -> int:
    """Return the blocks of a jackknife; 0 stands for none."""
    if asked < 0 or asked == 1:
        raise ValueError(f"jackknife={asked}: give 0 for no error, or 2 blocks or more, e.g. 20")
    return asked or 1


@data.command
def stats(
    source: str,
    /,
    *,
    out: Path,
    features: str = "inception",
    networks: Features = Features(),
    pictures: Pictures = Pictures(),
    batch: Whole = 250,
    device: Device = "auto",
) -> int:
    """Write mean and covariance of a data set's features: a reference for `mvm eval` that says how it was made.

    Parameters
    ----------
    source
        Images: what `mvm eval` takes, but for runs.
    out
        The .npz to write; EDM's and pytorch-fid's tools read it too.
    features
        inception (for FID and sFID), dino, effnet or pixels.
    batch
        Images at a time.
    """
    from mvm.distributed.processes import processes
    from mvm.evaluation.evaluate import write_statistics
    from mvm.model import choose_device, is_model

    if out.suffix != ".npz":
        raise ValueError(f"--out {out}: moments are kept in an .npz file; end the name with .npz")
    if is_model(source):
        raise ValueError(f"'{source}' is a run or a shipped model; moments are made of stored images, e.g. data:digits")
    if out.resolve() == Path(source).resolve():
        raise ValueError(f"--out {out} is the source; its images would be lost: give another name")
    with processes(choose_device(device)) as place:
        made = write_statistics(networks.judge(place, batch), pictures.side(source), features, out)
    if made["warning"]:
        say_from_first(f"mvm: {made['warning']}", error=True)
    count, seconds = made["images"]["count"], made["seconds"]
    say_from_first(f"{out}: moments of {count:,} images by {features}, in {seconds:.1f} s")
    return 0
