"""mvm eval, mvm data stats, mvm sweep, mvm compare."""

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cyclopts import Parameter

from mvm.cli.app import (
    INTERRUPTED,
    Device,
    Drawing,
    JsonFile,
    Num,
    SamplerOptions,
    SweepAxes,
    Whole,
    app,
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
        Weights of the FID network: a file or a folder; default: the cache, or a download.
    encoder
        For fd-dino: a hub name or folder of DINOv2 or DINOv3; default facebook/dinov2-large.
    clip
        For fd-clip: a hub name or folder of CLIP or SigLIP; default openai/clip-vit-large-patch14.
    lpips
        For lpips: weights of LPIPS with AlexNet, a file or a folder; default: the cache.
    lpips_vgg
        For lpips-vgg: those with VGG16.
    """

    inception: str = ""
    encoder: str = ""
    clip: str = ""
    lpips: str = ""
    lpips_vgg: str = ""

    def judge(self, processes: "Processes", batch: int, **how: Any) -> "Judge":
        """Return what gathers the features."""
        from mvm.evaluation.evaluate import Judge
        from mvm.metrics.extractors import CLIP, DINO, Sources

        sources = Sources(self.inception, self.encoder or DINO, self.clip or CLIP, 0, self.lpips, self.lpips_vgg)
        return Judge(sources, processes, batch, **how)


@Parameter(name="*")
@dataclass(frozen=True)
class Judging(FeatureOptions):
    """The figures, and what images are compared with.

    Parameters
    ----------
    ref
        What images are compared with (see: mvm eval); default, for a run: the images it was trained on.
    metrics
        Separated by commas: fid, sfid, kid, precision, recall, density, coverage, is (FID's Inception network);
        fd-dino, kd-dino (DINO); fd-clip, kd-clip (CLIP); fd-effnet, kd-effnet (EfficientNet-Lite0, never an FID);
        fd-pixels, kd-pixels. Of each image and its original, mvm eval alone: psnr, ssim, lpips, lpips-vgg.
        Default: fid for colour images, fd-pixels for grey ones; of restored ones also psnr, ssim and lpips.
    """

    ref: str = ""
    metrics: str = ""

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


@app.command(name="eval")
def evaluate(
    images: str = "",
    /,
    *,
    reconstruct: str = "",
    judging: Judging = Judging(),
    num: Num | None = None,
    sampler: SamplerOptions = SamplerOptions(),
    drawing: Drawing = Drawing(),
    pictures: PictureOptions = PictureOptions(),
    jackknife: Whole = 0,
    kid_size: Whole = 1000,
    batch: Whole = 250,
    device: Device = "auto",
    json_file: JsonFile = None,
) -> int:
    """Compare images with a reference: FID, KID and others, with everything that made the figures.

    IMAGES and REF are each a run or shipped model (sampled now, as its recipe and the options of the sampler say), a
    folder or zip of pictures, parquet, webdataset tars, an .npz or .npy of uint8 images, what `mvm data prepare` wrote,
    a file of moments (`mvm data stats`, ADM, EDM, pytorch-fid), or data:digits. With --reconstruct it is IMAGES (REF's
    own, if there are none) as an autoencoder restores them that are judged, against REF (IMAGES themselves, if there is
    none): rFID, PSNR, SSIM and LPIPS. Under torchrun the processes share the work. Features are always float32.

    Parameters
    ----------
    images
        What is judged. An autoencoder here stands for REF's images restored by it.
    reconstruct
        An autoencoder: RUN/rae of stage 1, or the folder of a VAE in diffusers' format.
    num
        How many images a run samples; default 50000.
    jackknife
        Blocks to estimate the error of Frechet distances with, e.g. 20; 0: no error.
    kid_size
        Images in each of the 100 subsets of KID.
    batch
        Images at a time.
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
            raise ValueError(f"{option} says how a run is sampled, and '{images}' is no run; leave it out")
    if pictures.size and is_model(images) and (not ref or is_model(ref)):
        raise ValueError(f"--size {pictures.size} is for pictures in files; runs sample at their own size")
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
                    f"'{name}' would sample {count:,} images on a CPU, for hours; say how many, e.g. --num 1000"
                )
            if num is None:
                warn_from_first(f"'{name}' samples {count:,} images; -n asks for fewer")
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
                raise ValueError(f"'{images}' holds moments alone; give images to restore")
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
        raise ValueError(f"jackknife={asked}: give 0 for no error, or 2 blocks or more, e.g. 20")
    return asked or 1


@data.command
def stats(
    source: str,
    /,
    *,
    out: Path,
    features: str = "inception",
    networks: FeatureOptions = FeatureOptions(),
    pictures: PictureOptions = PictureOptions(),
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
        inception (for FID and sFID), dino, clip, effnet or pixels.
    batch
        Images at a time.
    """
    from mvm.evaluation.evaluate import write_statistics
    from mvm.model import is_model

    if out.suffix != ".npz":
        raise ValueError(f"--out {out}: moments are kept in an .npz file; end the name with .npz")
    if is_model(source):
        raise ValueError(f"'{source}' is a run or a shipped model; moments are made of stored images, e.g. data:digits")
    if out.resolve() == Path(source).resolve():
        raise ValueError(f"--out {out} is the source; its images would be lost: give another name")
    with on_device(device) as processes:
        facts = write_statistics(networks.judge(processes, batch), pictures.side(source), features, out)
    if facts["warning"]:
        warn_from_first(facts["warning"])
    count, seconds = facts["images"]["count"], facts["seconds"]
    say_from_first(f"{out}: moments of {count:,} images by {features}, in {seconds:.1f} s")
    return 0


@app.command
def sweep(
    model: str,
    /,
    *,
    axes: SweepAxes = SweepAxes(),
    drawing: Drawing = Drawing(),
    judging: Judging = Judging(),
    num: Num = 1000,
    repeats: Whole = 1,
    jackknife: Whole = 0,
    batch: Whole = 250,
    keep_images: bool = False,
    device: Device = "auto",
    out: Path | None = None,
) -> int:
    """Sample a model by many samplers on common seeds and labels, judge every cell, write one report.

    Sampler options are lists of values, e.g. --nfe 13,26 --rho 0,0.75,1; --interval can be given several times. A cell
    is a combination; not given: adams at --nfe 8,13,26 --rho 0,1 without guidance, with the times of mvm tune where the
    model has some. Where --rho has 0, solvers of the ODE alone have cells of 0 alone.

    Made again after an interruption it goes on where it was; cells already computed are not computed again, so that
    axes and metrics can be added to an old sweep. Under torchrun the processes share the work.

    Parameters
    ----------
    model
        A run directory, or the name of a shipped model.
    num
        Images in each cell.
    repeats
        Sample every cell so many times on seeds of their own: the mean, and its error.
    jackknife
        Blocks to estimate the error of Frechet distances with, and of differences between cells, e.g. 20; 0: no error.
    batch
        Images at a time: what an interruption loses.
    keep_images
        Keep the images of every cell in OUT/work; else they go once they are judged.
    out
        Folder of the sweep; default runs/sweep-MODEL.
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
            say_from_first("\nmvm: stopped; the same command goes on where it was", error=True)
            return INTERRUPTED
    say_from_first(f"wrote {folder / 'report.html'}: {len(cells)} cells of {num:,} images")
    return 0


@app.command
def compare(
    model_a: str,
    model_b: str,
    /,
    *,
    sampler: SamplerOptions = SamplerOptions(),
    drawing: Drawing = Drawing(),
    judging: Judging = Judging(),
    num: Num = 1000,
    blocks: Whole = 20,
    batch: Whole = 250,
    device: Device = "auto",
    json_file: JsonFile = None,
) -> int:
    """Compare two models on the same seeds and labels: figures of both, differences with 95 % intervals.

    Sampler options are of both models; not given: each recipe's own.

    Parameters
    ----------
    model_a
        A run directory, or the name of a shipped model. By default both are compared with the images it was trained on.
    model_b
        Another, of the same image shape and classes.
    num
        Images of each.
    blocks
        Into which pairs are dealt for the intervals.
    batch
        Images at a time.
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
