"""mvm eval, mvm data stats."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from mvm.cli.app import Whole, app, say_from_first
from mvm.cli.data import data

if TYPE_CHECKING:
    from mvm.distributed.processes import Processes
    from mvm.evaluation.evaluate import Evaluation, Side


@dataclass(frozen=True)
class Asked:
    """How runs are sampled and stored images are read."""

    num: int | None
    batch: int
    precision: str
    size: int
    resize: str
    channels: int
    split: str

    def side(self, name: str, place: "Processes", seed: int = 0) -> "Side":
        """Return a run, stored images or moments by name; seed: of a run's first image."""
        from mvm.evaluation.evaluate import open_side
        from mvm.model import is_model, shipped_models
        from mvm.options import nearest

        if name in shipped_models() and Path(name).exists():
            raise ValueError(f"'{name}' is a shipped model and a file here; write ./{name} for the file")
        if is_model(name):
            return self._run(name, place, seed)
        if name.isidentifier() and not Path(name).exists() and (hint := nearest(name, shipped_models())):
            raise ValueError(f"'{name}' is no run, no shipped model and no file{hint}")
        return open_side(name, size=self.size, resize=self.resize, channels=self.channels, split=self.split)

    def restored(self, name: str, ref: str, place: "Processes") -> "Side":
        """Return what an autoencoder makes of the reference's images."""
        from mvm.evaluation.evaluate import Side
        from mvm.evaluation.images import of_restored
        from mvm.latent import load_rae

        if not ref or (stored := self.side(ref, place).images) is None:
            raise ValueError(f"'{name}' is an autoencoder; give images for it to restore: --ref IMAGES")
        base = Path(name).name
        return Side(base, of_restored(load_rae(Path(name)).to(place.device), stored, base))

    @property
    def count(self) -> int:
        """How many images a run samples."""
        from mvm.metrics.moments import PUBLISHED

        return PUBLISHED if self.num is None else self.num

    def _run(self, name: str, place: "Processes", seed: int) -> "Side":
        """Return a run or a shipped model as images sampled now, by its recipe's sampler."""
        from mvm.evaluation.evaluate import Side
        from mvm.evaluation.images import of_model
        from mvm.generate import Draw
        from mvm.model import load

        if self.num is None and place.device.type == "cpu":
            raise ValueError(
                f"'{name}' would sample {self.count:,} images on a CPU, for hours; say how many, e.g. --num 1000"
            )
        if self.num is None:
            say_from_first(f"mvm: '{name}' samples {self.count:,} images; -n asks for fewer", error=True)
        draw, base, model = Draw(self.count, seed, batch=self.batch), Path(name).name, load(name).to(place.device)
        return Side(base, of_model(model, draw, precision=self.precision, name=base), model=model)


def _reference(images: "Side", ref: str, asked: Asked, place: "Processes") -> "Side | None":
    """Return the asked reference; of a run, by default, the images it was trained on.

    A run as reference has seeds of its own: images of the same noise would be too near.
    """
    from mvm.evaluation.evaluate import Side
    from mvm.evaluation.images import of_training

    if ref:
        return asked.side(ref, place, seed=asked.count)
    if images.model is None:
        return None
    return Side(images.model.recipe.data.name, of_training(images.model))


def _value(number: float) -> str:
    return f"{number:.6g}"


def _told(found: "Evaluation") -> str:
    """Return the figures as a table, and what they compare."""
    lines = []
    for name, figure in found.metrics.items():
        error = "" if figure.error is None else f" ± {figure.error:.2g}"
        lines.append(f"{name:<10} {_value(figure.value)}{error}" + (f"   ({figure.note})" if figure.note else ""))
    sides = {"images": found.images, "reference": found.reference}
    for role, facts in sides.items():
        if facts:
            count = f"{facts['count']:,} images" if facts.get("count") else "how many images is not told"
            lines.append(f"{role:<10} {facts.get('name')}, {count}")
    lines.append(f"{'seconds':<10} {found.seconds:.1f} on {found.software['device']}")
    return "\n".join(lines)


@app.command(name="eval")
def evaluate(
    images: str,
    /,
    *,
    ref: str = "",
    metrics: str = "",
    inception: str = "",
    encoder: str = "",
    num: Annotated[Whole | None, Parameter(alias="-n")] = None,
    size: Whole = 0,
    resize: str = "auto",
    channels: Whole = 0,
    split: str = "",
    jackknife: Whole = 0,
    kid_size: Whole = 1000,
    batch: Whole = 250,
    precision: str = "fp32",
    device: str = "auto",
    json_file: Annotated[Path | None, Parameter(name="--json")] = None,
) -> int:
    """Compare images with a reference: FID, KID and others, with everything that made the figures.

    IMAGES and REF are each a run or shipped model (sampled now by its own sampler), a folder or zip of pictures,
    parquet, webdataset tars, an .npz or .npy of uint8 images, what `mvm data prepare` wrote, a file of moments
    (`mvm data stats`, ADM, EDM, pytorch-fid), or data:digits. IMAGES may also be an autoencoder (RUN/rae of stage 1):
    then it is REF's own images, restored, that are judged: rFID. Under torchrun the processes share the work.

    Parameters
    ----------
    images
        What is judged.
    ref
        What it is compared with; by default, for a run, the images it was trained on.
    metrics
        Separated by commas: fid, sfid, kid, precision, recall, density, coverage, is (FID's Inception network);
        fd-dino, kd-dino (DINO); fd-effnet, kd-effnet (EfficientNet-Lite0, never an FID); fd-pixels, kd-pixels.
        Default: fid for colour images, fd-pixels for grey ones.
    inception
        Weights of the FID network: a file (.safetensors, .pth) or a folder; default: the cache, or a download.
    encoder
        For fd-dino: a hub name or folder of DINOv2 or DINOv3; default facebook/dinov2-large.
    num
        How many images a run samples; default 50000.
    size
        Resize pictures to this side first; else all must have one size.
    resize
        How: box, centre-crop, none, or auto (box up to 64 pixels, centre-crop above).
    channels
        1 or 3; default: what the first picture has.
    split
        Which split, where files hold several.
    jackknife
        Blocks to estimate the error of Frechet distances with, e.g. 20; 0: no error.
    kid_size
        Images in each of the 100 subsets of KID.
    batch
        Images at a time.
    precision
        Of sampling from a run: fp32, tf32 or bf16; int8 on a CPU. Features are always float32.
    device
        cpu, cuda, or auto: cuda where there is one.
    json_file
        Also write everything there.
    """
    from mvm.distributed.processes import processes
    from mvm.evaluation.evaluate import evaluate as run_evaluation
    from mvm.evaluation.gather import Judge
    from mvm.files import write_text
    from mvm.latent import is_rae
    from mvm.metrics.measures import parse_metrics, usual_metric
    from mvm.model import choose_device, is_model
    from mvm.options import at_least, choose
    from mvm.precision import PRECISIONS

    names = parse_metrics(metrics) if metrics else ()
    blocks = jackknife_blocks(jackknife)
    at_least("batch", batch, 1)
    if num is not None:
        at_least("num", num, 2)  # a covariance needs two
    asked = Asked(num, batch, precision, size, resize, channels, split)
    if num is not None and not (is_model(images) or is_model(ref)):
        raise ValueError(f"--num {num} says how many images a run samples; '{images}' is no run")
    if size and is_model(images) and (not ref or is_model(ref)):
        raise ValueError(f"--size {size} is for pictures in files; runs sample at their own size")
    choose("precision", precision, PRECISIONS)
    if json_file is not None:
        json_file.resolve().parent.mkdir(parents=True, exist_ok=True)  # if that fails, before the work
    with processes(choose_device(device)) as place:
        judge = Judge(sources(inception, encoder), place, batch, blocks=blocks, kid_size=kid_size)
        restores = is_rae(Path(images))
        side = asked.restored(images, ref, place) if restores else asked.side(images, place)
        names = names or (usual_metric(side.images.shape[0] if side.images else 3),)
        found = run_evaluation(judge, side, _reference(side, ref, asked, place), names)
        for warning in found.warnings:
            say_from_first(f"mvm: {warning}", error=True)
        say_from_first(_told(found))
        if json_file is not None and place.main:
            write_text(json_file, json.dumps(found.as_dict(), indent=2) + "\n")
    return 0


def jackknife_blocks(asked: int) -> int:
    """Return the blocks of a jackknife; 0 stands for none."""
    if asked < 0 or asked == 1:
        raise ValueError(f"jackknife={asked}: give 0 for no error, or 2 blocks or more, e.g. 20")
    return asked or 1


def sources(inception: str, encoder: str) -> Any:
    from mvm.metrics.extractors import DINO, Sources

    return Sources(inception, encoder or DINO)


@data.command
def stats(
    source: str,
    /,
    *,
    out: Path,
    features: str = "inception",
    inception: str = "",
    encoder: str = "",
    size: Whole = 0,
    resize: str = "auto",
    channels: Whole = 0,
    split: str = "",
    batch: Whole = 250,
    device: str = "auto",
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
    inception
        Weights of the FID network: a file or a folder; default: the cache, or a download.
    encoder
        For dino: a hub name or folder; default facebook/dinov2-large.
    size
        Resize pictures to this side first.
    resize
        How: box, centre-crop, none, or auto.
    channels
        1 or 3; default: what the first picture has.
    split
        Which split, where files hold several.
    batch
        Images at a time.
    device
        cpu, cuda, or auto: cuda where there is one.
    """
    from mvm.distributed.processes import processes
    from mvm.evaluation.evaluate import open_side, write_statistics
    from mvm.evaluation.gather import Judge
    from mvm.model import choose_device, is_model

    if out.suffix != ".npz":
        raise ValueError(f"--out {out}: moments are kept in an .npz file; end the name with .npz")
    if is_model(source):
        raise ValueError(f"'{source}' is a run or a shipped model; moments are made of stored images, e.g. data:digits")
    if out.resolve() == Path(source).resolve():
        raise ValueError(f"--out {out} is the source; its images would be lost: give another name")
    with processes(choose_device(device)) as place:
        side = open_side(source, size=size, resize=resize, channels=channels, split=split)
        told = write_statistics(Judge(sources(inception, encoder), place, batch), side, features, out)
    if told["warning"]:
        say_from_first(f"mvm: {told['warning']}", error=True)
    count, seconds = told["images"]["count"], told["seconds"]
    say_from_first(f"{out}: moments of {count:,} images by {features}, in {seconds:.1f} s")
    return 0
