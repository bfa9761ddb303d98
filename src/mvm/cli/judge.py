"""mvm eval, mvm data stats, mvm sweep, mvm compare."""

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from mvm.cli.app import (
    FEATURES,
    INPUT,
    INTERRUPTED,
    JUDGE,
    MEASUREMENT,
    OUTPUT,
    Batch,
    Device,
    Drawing,
    JsonFile,
    Num,
    SamplerOptions,
    SweepAxes,
    Whole,
    command,
    examples,
    json_writer,
    on_device,
    say_from_first,
    warn_from_first,
)
from mvm.cli.data import data
from mvm.options import at_least, choose, nearest

if TYPE_CHECKING:
    from mvm.distributed.processes import Processes
    from mvm.evaluation.evaluate import ComparedSet, Evaluation, Judge
    from mvm.model import Model


@Parameter(name="*")
@dataclass(frozen=True)
class FeatureOptions:
    """The networks whose features are compared.

    Parameters
    ----------
    inception
        Weights of the Inception network of FID: a file or folder. Default: the cache, or a download.
    encoder
        Encoder of fd-dino: a Hub name or folder of DINOv2 or DINOv3. Default: facebook/dinov2-large.
    clip
        Encoder of fd-clip: a Hub name or folder of CLIP or SigLIP. Default: openai/clip-vit-large-patch14.
    lpips
        Weights of lpips (AlexNet): a file or folder. Default: the cache.
    lpips_vgg
        Weights of lpips-vgg (VGG16): a file or folder. Default: the cache.
    """

    inception: Annotated[str, FEATURES] = ""
    encoder: Annotated[str, FEATURES] = ""
    clip: Annotated[str, FEATURES] = ""
    lpips: Annotated[str, FEATURES] = ""
    lpips_vgg: Annotated[str, FEATURES] = ""

    def judge(self, processes: "Processes", batch: int, **how: Any) -> "Judge":
        """Return what gathers the features."""
        from mvm.evaluation.evaluate import Judge
        from mvm.metrics.extractors import CLIP, DINO, Sources

        sources = Sources(self.inception, self.encoder or DINO, self.clip or CLIP, 0, self.lpips, self.lpips_vgg)
        return Judge(sources, processes, batch, **how)


@Parameter(name="*")
@dataclass(frozen=True)
class Judging(FeatureOptions):
    """The metrics, and what images are compared with.

    Parameters
    ----------
    ref
        Reference that images are compared with (see `mvm eval --help`). Default for a run: its training images.
    metrics
        Metrics, separated by commas. Inception: fid, sfid, kid, precision, recall, density, coverage, is. DINO:
        fd-dino, kd-dino. CLIP: fd-clip, kd-clip. EfficientNet-Lite0: fd-effnet, kd-effnet. Pixels: fd-pixels,
        kd-pixels. Of images and their originals, in `mvm eval` alone: psnr, ssim, lpips, lpips-vgg.
        Default: fid for colour images, fd-pixels for grey ones; for restored images also psnr, ssim and lpips.
    """

    ref: Annotated[str, MEASUREMENT] = ""
    metrics: Annotated[str, MEASUREMENT] = ""

    def names(self, channels: int, paired: bool = False) -> tuple[str, ...]:
        """Return the figures, the usual one for images of so many channels where none is named.

        paired: whether images have originals.
        """
        from mvm.metrics.measures import MEASURES, parse_metrics, usual_metric

        names = parse_metrics(self.metrics or usual_metric(channels))
        if not paired and (of_pairs := [name for name in names if MEASURES[name].paired]):
            remedy = (
                "samples have none; give them to mvm eval IMAGES --ref ORIGINALS, or --reconstruct RAE --ref IMAGES"
            )
            raise ValueError(f"--metrics {','.join(of_pairs)} is of images and their originals; {remedy}")
        return names

    def reference(self, model: "Model") -> "ComparedSet":
        """Return the asked reference, or the images that a model was trained on."""
        from mvm.evaluation.evaluate import open_side

        return open_side(self.ref) if self.ref else training_side(model)


def training_side(model: "Model") -> "ComparedSet":
    """Return the images that a model was trained on."""
    from mvm.evaluation.evaluate import ComparedSet
    from mvm.evaluation.images import of_training

    return ComparedSet(model.recipe.data.name, of_training(model))


@Parameter(name="*")
@dataclass(frozen=True)
class PictureOptions:
    """How stored images are read.

    Parameters
    ----------
    size
        Resize images to this side. 0: all images must have one size.
    resize
        How images are resized: box, centre-crop, none, or auto (box up to 64 pixels, centre-crop above).
    channels
        Channels: 1 or 3. 0: those of the first image.
    split
        Which split to read, if the files hold several.
    """

    size: Annotated[Whole, INPUT] = 0
    resize: Annotated[str, INPUT] = "auto"
    channels: Annotated[Whole, INPUT] = 0
    split: Annotated[str, INPUT] = ""

    def side(self, name: str) -> "ComparedSet":
        """Return stored images or moments."""
        from mvm.evaluation.evaluate import open_side

        return open_side(name, **vars(self))


def _as_text(result: "Evaluation") -> str:
    """Return the figures as a table, and what they compare."""
    lines, restored = [], result.images.get("kind") == "restored"
    for name, figure in result.metrics.items():
        name = "rFID" if restored and name == "fid" else name
        error = "" if figure.error is None else f" ± {figure.error:.2g}"
        lines.append(f"{name:<10} {figure.value:.6g}{error}" + (f"   ({figure.note})" if figure.note else ""))
    for role, facts in (("images", result.images), ("reference", result.reference)):
        if facts:
            count = f"{facts['count']:,} images" if facts.get("count") else "the number of images is not recorded"
            lines.append(f"{role:<10} {facts.get('name')}, {count}")
    lines.append(f"{'seconds':<10} {result.seconds:.1f} on {result.software['device']}")
    return "\n".join(lines)


def _judged(images: str, reconstruct: str, ref: str) -> tuple[str, str]:
    """Return the images to judge, and the autoencoder that restores them first, "" for none."""
    from mvm.latent import is_rae
    from mvm.latent.vae import CONFIG

    if not reconstruct and is_rae(Path(images)):
        images, reconstruct = "", images
    if not (images := images or (ref if reconstruct else "")):
        if not reconstruct:
            raise ValueError("name the images to judge: mvm eval IMAGES --ref REF")
        raise ValueError(f"'{reconstruct}' is an autoencoder; give images for it to restore: --ref IMAGES")
    if reconstruct and not (is_rae(Path(reconstruct)) or (Path(reconstruct) / CONFIG).is_file()):
        raise ValueError(
            f"'{reconstruct}' holds no autoencoder; give RUN/rae of a finished stage 1, or the folder of a VAE in "
            "diffusers' format"
        )
    return images, reconstruct


@command(
    JUDGE,
    "mvm eval runs/a -n 10000  # to its training images",
    "mvm eval a.npz --ref ref.npz --metrics fid,kid  # stored images",
    "mvm eval digits --ref data:digits:held-out -n 1000  # to held-out images",
    name="eval",
)
def evaluate(
    images: str = "",
    /,
    *,
    reconstruct: Annotated[str, MEASUREMENT] = "",
    judging: Judging = Judging(),
    num: Num | None = None,
    sampler: SamplerOptions = SamplerOptions(),
    drawing: Drawing = Drawing(),
    pictures: PictureOptions = PictureOptions(),
    jackknife: Annotated[Whole, MEASUREMENT] = 0,
    kid_size: Annotated[Whole, MEASUREMENT] = 1000,
    batch: Batch = 250,
    device: Device = "auto",
    json_file: JsonFile = None,
) -> int:
    """Measure images against a reference: FID, KID and others, with a record of how they were computed.

    IMAGES and REF are each one of these:

    - a run or a shipped model, which is sampled by its recipe and the options below
    - a folder or zip of images, parquet, webdataset tars, or an .npz or .npy of uint8 images
    - a folder that `mvm data prepare` wrote, or data:digits
    - a file of moments: from `mvm data stats`, ADM, EDM or pytorch-fid

    With --reconstruct an autoencoder restores IMAGES (by default REF's), and they are compared with the originals or
    REF: rFID, PSNR, SSIM and LPIPS. Under torchrun the processes share the work. Features are always float32.

    Parameters
    ----------
    images
        What is measured. An autoencoder here restores the images of REF.
    reconstruct
        Autoencoder: RUN/rae of a stage 1 training, or the folder of a VAE in diffusers' format.
    num
        Number of images sampled from a run. Default: 50000.
    jackknife
        Number of blocks for the jackknife error of Frechet distances, e.g. 20. 0: no error.
    kid_size
        Number of images in each of the 100 subsets of KID.
    batch
        Batch size of each process.
    """
    from mvm.evaluation.evaluate import ComparedSet
    from mvm.evaluation.evaluate import evaluate as run_evaluation
    from mvm.evaluation.images import of_model, of_restored
    from mvm.latent import is_rae, load_rae, load_vae
    from mvm.metrics.moments import PUBLISHED
    from mvm.model import is_model, shipped_models
    from mvm.precision import PRECISIONS

    judging.names(channels=3, paired=True)  # refuses what is no figure before the work
    images, reconstruct = _judged(images, reconstruct, judging.ref)
    ref = judging.ref or (images if reconstruct else "")
    blocks, count = jackknife_blocks(jackknife), PUBLISHED if num is None else num
    at_least("batch", batch, 1)
    at_least("num", count, 2)  # a covariance needs two
    usual = {"num": None, **vars(SamplerOptions()), **vars(Drawing())}
    for name, value in {"num": num, **vars(sampler), **vars(drawing)}.items():
        if value != usual[name] and not (is_model(images) or is_model(ref)):
            option = f"--{name.replace('_', '-')} {value}"
            raise ValueError(f"{option} is for sampling a run, and '{images}' is not a run; leave it out")
    if pictures.size and is_model(images) and (not ref or is_model(ref)):
        raise ValueError(f"--size {pictures.size} is for stored images; a run is sampled at its own size: leave it out")
    choose("precision", drawing.precision, PRECISIONS)
    write = json_writer(json_file)
    with on_device(device) as processes:

        def side(name: str, skipped: int = 0) -> ComparedSet:
            """Return a run or a shipped model as images sampled now, after some seeds, or stored images or moments."""
            if name in shipped_models() and Path(name).exists():
                raise ValueError(f"'{name}' is a shipped model and a file here; write ./{name} for the file")
            if not is_model(name):
                if name.isidentifier() and not Path(name).exists() and (hint := nearest(name, shipped_models())):
                    raise ValueError(f"'{name}' is no run, no shipped model and no file{hint}")
                return pictures.side(name)
            if num is None and processes.device.type == "cpu":
                raise ValueError(
                    f"'{name}' would sample {count:,} images on a CPU, for hours; give a number, e.g. --num 1000"
                )
            if num is None:
                warn_from_first(f"'{name}' samples {count:,} images; -n sets another number")
            base, opened = Path(name).name, drawing.open(name, processes)
            draw, settings = drawing.draw(count, batch, opened.model.classes), opened.model.recipe.sample
            draw, settings = replace(draw, seed=draw.seed + skipped), sampler.settings(settings, drawing.auto)
            return ComparedSet(base, of_model(opened, draw, settings, name=base), model=opened.model)

        judge = judging.judge(processes, batch, blocks=blocks, kid_size=kid_size)
        judged, reference = side(images), None
        names = judging.names(judged.images.shape[0] if judged.images else 3, paired=True)
        if reconstruct:
            folder, reference = Path(reconstruct), judged if ref == images else side(ref, skipped=count)
            if (originals := judged.images) is None:
                raise ValueError(f"'{images}' holds moments, and only images can be restored; name images")
            codec = load_rae(folder) if is_rae(folder) else load_vae(folder, originals.shape[-1])
            judged = ComparedSet(folder.name, of_restored(codec.to(processes.device), originals, folder.name))
            if not judging.metrics:
                names, notes = judge.usual_of_restored(originals.shape)
                for note in notes:
                    warn_from_first(note)
        elif ref:  # a run as reference has seeds of its own: images of the same noise would be too near
            reference = side(ref, skipped=count)
        elif judged.model is not None:
            reference = training_side(judged.model)
        result = run_evaluation(judge, judged, reference, names)
        for warning in result.warnings:
            warn_from_first(warning)
        say_from_first(_as_text(result))
        if processes.main:
            write(result.as_dict())
    return 0


def jackknife_blocks(asked: int) -> int:
    """Return the blocks of a jackknife; 0 stands for none."""
    if asked < 0 or asked == 1:
        raise ValueError(f"--jackknife {asked}: give 0 for no error, or 2 blocks or more, e.g. 20")
    return asked or 1


@data.command(
    help_epilogue=examples(
        "mvm data stats data/cifar10 --out ref.npz  # for FID",
        "mvm data stats photos --features dino --out dino.npz  # for fd-dino",
    )
)
def stats(
    source: str,
    /,
    *,
    out: Annotated[Path, OUTPUT],
    features: Annotated[str, FEATURES] = "inception",
    networks: FeatureOptions = FeatureOptions(),
    pictures: PictureOptions = PictureOptions(),
    batch: Batch = 250,
    device: Device = "auto",
) -> int:
    """Write mean and covariance of a data set's features, as a reference for `mvm eval` with its provenance.

    Parameters
    ----------
    source
        Stored images, as `mvm eval` takes them.
    out
        The .npz file to write. The tools of EDM and pytorch-fid read it too.
    features
        Features: inception (for fid and sfid), dino, clip, effnet or pixels.
    batch
        Batch size of each process.
    """
    from mvm.evaluation.evaluate import write_statistics
    from mvm.model import is_model

    if out.suffix != ".npz":
        raise ValueError(f"--out {out}: moments are kept in an .npz file; end the name with .npz")
    if is_model(source):
        raise ValueError(f"'{source}' is a run or a shipped model; moments need stored images, e.g. data:digits")
    if out.resolve() == Path(source).resolve():
        raise ValueError(f"--out {out} is also the source, whose images would be lost; give another name")
    with on_device(device) as processes:
        facts = write_statistics(networks.judge(processes, batch), pictures.side(source), features, out)
    if facts["warning"]:
        warn_from_first(facts["warning"])
    count, seconds = facts["images"]["count"], facts["seconds"]
    say_from_first(f"{out}: moments of {count:,} images by {features}, in {seconds:.1f} s")
    return 0


@command(
    JUDGE,
    "mvm sweep runs/a  # ODE and SDE, 3 NFE",
    "mvm sweep runs/a --solvers adams,heun --nfe 10,20  # two solvers",
    "mvm sweep cifar10 --cfg 1,1.5,2 --interval 0.6,0.8  # guidance scales",
)
def sweep(
    model: str,
    /,
    *,
    axes: SweepAxes = SweepAxes(),
    drawing: Drawing = Drawing(),
    judging: Judging = Judging(),
    num: Num = 1000,
    repeats: Annotated[Whole, MEASUREMENT] = 1,
    jackknife: Annotated[Whole, MEASUREMENT] = 0,
    batch: Batch = 250,
    keep_images: Annotated[bool, OUTPUT] = False,
    device: Device = "auto",
    out: Annotated[Path | None, OUTPUT] = None,
) -> int:
    """Compare samplers of one model on the same seeds and labels, and write a report.

    Options of sampling and guidance take lists of values, e.g. --nfe 13,26 --rho 0,0.75,1; --interval can be repeated.
    The sweep has a cell for every combination that makes sense: ODE solvers have cells of rho 0 alone.

    After an interruption the same command continues. Finished cells are reused, so axes and metrics can be added to an
    old sweep. Under torchrun the processes share the work.

    Parameters
    ----------
    model
        A run directory or a shipped model.
    num
        Number of images in each cell.
    repeats
        Number of times each cell is sampled, with different seeds. The report has the mean and its error.
    jackknife
        Number of blocks for the jackknife error of Frechet distances and of differences between cells, e.g. 20.
        0: no error.
    batch
        Batch size of each process. An interruption loses at most one batch.
    keep_images
        Keep the images of every cell in OUT/work. By default they are deleted once they are measured.
    out
        Folder of the sweep. Default: runs/sweep-MODEL.
    """
    from mvm.evaluation.sweep import Sweep

    at_least("repeats", repeats, 1)
    at_least("num", num, 2)  # a covariance needs two
    cells = axes.cells(drawing.auto)
    drawing.draw(num, batch)  # refuses what it can before the model is read
    folder = out or Path("runs") / f"sweep-{Path(model).name}"
    with on_device(device) as processes:
        sampler = drawing.open(model, processes)
        loaded = sampler.model
        draw, names = drawing.draw(num, batch, loaded.classes), judging.names(loaded.recipe.data.shape[0])
        judge = judging.judge(processes, batch, blocks=jackknife_blocks(jackknife))
        command = " ".join(["mvm", *sys.argv[1:]])  # without where the program lies
        work = Sweep(sampler, draw, judge, judging.reference(loaded), names, folder, repeats, keep_images, command)
        try:
            work.run(cells)
        except KeyboardInterrupt:
            say_from_first("\nmvm: stopped; the same command continues", error=True)
            return INTERRUPTED
    say_from_first(f"wrote {folder / 'report.html'}: {len(cells)} cells of {num:,} images")
    return 0


@command(
    JUDGE,
    "mvm compare runs/a runs/b -n 10000  # FID of both",
    "mvm compare runs/a runs/b --nfe 13 --rho 1  # sampled as SDEs",
)
def compare(
    model_a: str,
    model_b: str,
    /,
    *,
    sampler: SamplerOptions = SamplerOptions(),
    drawing: Drawing = Drawing(),
    judging: Judging = Judging(),
    num: Num = 1000,
    blocks: Annotated[Whole, MEASUREMENT] = 20,
    batch: Batch = 250,
    device: Device = "auto",
    json_file: JsonFile = None,
) -> int:
    """Compare two models on the same seeds and labels: metrics of both, and differences with 95 % intervals.

    Options of sampling and guidance apply to both models.

    Parameters
    ----------
    model_a
        A run directory or a shipped model. Its training images are the default reference of both models.
    model_b
        Another one, with the same image shape and classes.
    num
        Number of images of each model.
    blocks
        Number of blocks of image pairs for the confidence intervals.
    batch
        Batch size of each process.
    """
    from mvm.evaluation.evaluate import compare, comparison_table, write_comparison
    from mvm.evaluation.images import of_model

    at_least("blocks", blocks, 2)
    if json_file is not None:
        json_file.resolve().parent.mkdir(parents=True, exist_ok=True)  # if that fails, before the work
    with on_device(device) as processes:
        opened = {name: drawing.open(name, processes) for name in dict.fromkeys((model_a, model_b))}
        sets = []
        for name in (model_a, model_b):
            model = opened[name].model
            draw = drawing.draw(num, batch, model.classes)
            settings = sampler.settings(model.recipe.sample, drawing.auto)
            sets.append(of_model(opened[name], draw, settings, name=Path(name).name))
        judge, names = judging.judge(processes, batch, blocks=blocks), judging.names(sets[0].shape[0])
        result = compare(judge, *sets, judging.reference(opened[model_a].model), names)
        for warning in result.facts["warnings"]:
            warn_from_first(warning)
        say_from_first(comparison_table(result.differences))
        if json_file is not None and processes.main:
            write_comparison(json_file, result)
    return 0
