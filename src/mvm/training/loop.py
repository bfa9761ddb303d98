"""The one training loop: one process or many, CPU or GPUs, every recipe."""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, nullcontext
from pathlib import Path
from threading import Event
from typing import Any

import torch
from tqdm import tqdm

from mvm import checkpoint
from mvm.data import Store
from mvm.distributed.processes import Processes, autocast, determinism, precision, processes
from mvm.distributed.sharding import whole
from mvm.files import write_text
from mvm.latent import RAE
from mvm.model import Model
from mvm.network.pretrained import load_encoder
from mvm.optim.ema import MAIN
from mvm.options import at_least
from mvm.published import open_model
from mvm.recipes import RECIPE, AnyRecipe, DecoderRecipe, Recipe, require_field_recipe, to_json
from mvm.recipes.memory import Memory, fit_memory
from mvm.store import Share
from mvm.training.data import completed, training_store
from mvm.training.decoder_preview import DecoderPreview
from mvm.training.decoder_preview import quality as restoration_quality
from mvm.training.decoder_result import autoencoder
from mvm.training.decoder_trainer import DecoderTrainer
from mvm.training.features import FeatureBank, open_bank
from mvm.training.finetune import fit
from mvm.training.interrupt import Request, deferred_interrupt
from mvm.training.logs import METRICS, Log, Meter, OnLog, Record, due, keep_metrics, matrix_ceiling, warn
from mvm.training.preview import QUALITY, Preview
from mvm.training.rundir import INIT, held, note_changes, note_origin, open_run
from mvm.training.snapshots import averages_snapshot
from mvm.training.track import AUTO, parse_trackers, trackers
from mvm.training.trainer import Trainer
from mvm.untrusted import printable

AnyTrainer = Trainer | DecoderTrainer
START = "start.json"  # in a run: what was said at its start
AGREE_EVERY = 5  # steps after which processes ask each other whether to stop: asking costs a message


class Bar:
    """The progress bar: steps, time left, the loss smoothed over about 50 read steps, images a second."""

    def __init__(self, trainer: AnyTrainer, shown: bool) -> None:
        total, self.batch, self.loss = trainer.recipe.train.steps, trainer.recipe.train.batch, math.nan
        self.bar = tqdm(total=total, initial=trainer.step, desc="train", unit="step", disable=not shown)

    def part(self, done: int, parts: int) -> None:
        """Show how far a step of many parts is: on a CPU it may take minutes."""
        if parts > 1:
            self.bar.set_postfix_str(f"part {done} of {parts}{self._loss}")

    @property
    def _loss(self) -> str:
        return "" if math.isnan(self.loss) else f", loss {self.loss:.4f}"

    def step(self, records: Sequence[Record]) -> None:
        """Count a step; records: the figures of steps that were read."""
        for record in records:
            if not record.skipped:
                value = record.values["loss"]
                self.loss = value if math.isnan(self.loss) else self.loss + 0.02 * (value - self.loss)
        rate = self.bar.format_dict["rate"]  # steps a second
        speed = f", {rate * self.batch:,.0f} images/s" if rate else ""
        self.bar.set_postfix_str((self._loss + speed).removeprefix(", "), refresh=False)
        self.bar.update(1)


def _steps(trainer: AnyTrainer, until: int, asked: Event) -> Iterator[int]:
    """Yield before every step; a signal is raised between steps, in all processes after the same one."""
    place = trainer.place
    while trainer.step < until:
        if (place.world == 1 or trainer.step % AGREE_EVERY == 0) and place.any(asked.is_set()):
            raise KeyboardInterrupt
        yield trainer.step


class Saver:
    """Writes checkpoints and snapshots while training goes on; a write that fails is told, and the next one tried."""

    def __init__(self, trainer: AnyTrainer, run: Path) -> None:
        self.trainer, self.run, self.writer = trainer, run, checkpoint.Writer()
        self.judged: tuple[int, float | None] = (0, None)  # the step saved last, and its quality

    def save(self, quality: float | None = None) -> None:
        """Take a snapshot now and write it in the background; every process must call."""
        if quality is None and self.judged[0] == self.trainer.step:  # Ctrl-C right after a save: the same once more
            quality = self.judged[1]
        self.judged = self.trainer.step, quality
        self._begin(self.trainer.snapshot(quality))

    def save_averages(self) -> None:
        """Store the power-function averages of now, in the background too; every process must call."""
        self._begin(averages_snapshot(self.trainer))

    def _begin(self, write: Callable[[Path], None] | None) -> None:
        """Write in the background once the write before has ended; the main process alone has something to write."""
        if write is not None:
            self.tell_failure()
            self.writer.submit(lambda: write(self.run))

    def tell_failure(self) -> None:
        """Wait for the write under way; say on stderr if it failed."""
        if (error := self.writer.failure()) is not None:
            kept = checkpoint.latest(self.run)
            whole = f"{kept.name} is whole" if kept else "there is no checkpoint before it"
            warn(f"a checkpoint could not be saved ({error}); {whole}; training goes on")

    def finish(self) -> None:
        """Wait for the last write; every process leaves together, and an error there is everyone's."""
        with self.trainer.place.main_first():
            self.writer.wait()


def _teacher(recipe: Recipe, store: Store, run: Path, place: Processes, progress: bool) -> FeatureBank | None:
    """Return the frozen encoder's features of the data, cached as the recipe says; None without REPA."""
    if not recipe.repa.encoder:
        return None
    encoder = load_encoder(recipe.repa.encoder, recipe.repa.resolution).to(place.device)
    if precision(recipe.engine, place.device) != torch.float32:
        encoder = encoder.to(torch.bfloat16)
    side = min(encoder.side, recipe.sample_shape[-1] // recipe.network.patch)
    return open_bank(
        recipe.repa.cache,
        encoder,
        store,
        store.labels,
        folder=run / "features",
        side=side,
        device=place.device,
        share=Share(place.rank, place.world, lambda: place.any(False)),
        progress=progress,
    )


def _build(recipe: AnyRecipe, run: Path, place: Processes, progress: bool) -> AnyTrainer:
    """Return the trainer of a recipe at step 0."""
    store = training_store(recipe, place.device)
    if isinstance(recipe, DecoderRecipe):
        return DecoderTrainer(recipe, store, place)
    return Trainer(recipe, store, place, _teacher(recipe, store, run, place, progress))


def _start_from(trainer: AnyTrainer, source: Path | str, weights: str) -> dict[str, Any]:
    """Begin with the weights of another run or model, fitted to this network; return where they came from."""
    try:
        opened = open_model(source, weights)
    except ValueError as error:
        raise ValueError(f"--init-from {source}: {error}") from error
    if isinstance(trainer, DecoderTrainer):
        trainer.start_from(opened.weights)
    else:
        require_field_recipe(opened.recipe, str(source))
        own = {name: whole(value.detach()).cpu() for name, value in trainer.model.network.named_parameters()}
        fitted, told = fit(own, trainer.recipe, opened)
        trainer.start_from(fitted)
        for line in told if trainer.place.main else ():
            warn(f"--init-from {source}: {line}")
    return {name: opened.origin[name] for name in ("run", "step", "weights", "sha256")}


def _tell_start(trainer: AnyTrainer, need: Memory | None, run: Path, progress: bool) -> None:
    """Say what is trained on what, and keep it in RUN/start.json for the report."""
    recipe, place, device = trainer.recipe, trainer.place, trainer.place.device
    trained = trainer.model.network if isinstance(trainer, Trainer) else trainer.decoder
    images, names, train = len(trainer.store), recipe.data.class_names, recipe.train
    gpu = device.type == "cuda"
    facts = {
        "device": torch.cuda.get_device_name(device) if gpu else f"{device.type} ({torch.get_num_threads()} cores)",
        "processes": place.world,
        "precision": {torch.float32: "fp32", torch.bfloat16: "bf16"}[precision(recipe.engine, device)],
        "parameters": sum(parameter.numel() for parameter in trained.parameters()),
        "images": images,
        "classes": len(names),
        "steps": train.steps,
        "batch": train.batch,
        "epochs": round(train.steps * train.batch / images, 1),
        "accumulate": recipe.engine.accumulate,
        **({"memory_gb": round(need.total / 1e9, 1)} if need else {}),
    }
    write_text(run / START, json.dumps(facts, indent=2) + "\n")
    if progress:
        shown = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
        where = f"{facts['device']}{f' x {place.world}' if place.world > 1 else ''}, {facts['precision']}"
        parts = f", each in {facts['accumulate']} parts" if facts["accumulate"] > 1 else ""
        memory = f"about {facts['memory_gb']} GB of memory; " if need else ""
        lines = (
            f"{recipe.name} on {where}: {facts['parameters'] / 1e6:.3g} M parameters, {images:,} images, "
            f"{len(names)} classes ({printable(shown)})",
            f"steps {trainer.step} to {train.steps} of {train.batch} images{parts} ({facts['epochs']:g} epochs); "
            f"{memory}writes {run}",
        )
        for line in lines:
            warn(line)


def _start(
    recipe: AnyRecipe,
    run: Path,
    resume: bool,
    allow_change: bool,
    init: tuple[Path | str, str] | None,
    place: Processes,
    stack: ExitStack,
    progress: bool,
) -> AnyTrainer:
    """Return the trainer at its first step: a new run, another's weights, or the newest checkpoint of an old one.

    stack: holds the run directory against other processes until training ends.
    """
    newest, changed, old = None, [], run.is_dir()
    with place.main_first():
        if place.main:
            if old:
                stack.enter_context(held(run))
            newest, changed = open_run(recipe, run, resume, allow_change)
    newest = place.broadcast(newest)
    need, executed = None, recipe
    if isinstance(recipe, Recipe):  # a decoder's memory is mostly that of the frozen networks around it
        executed, need, warning = fit_memory(recipe, place.device, place.world)
        if warning and place.main:
            warn(warning)
    trainer = _build(executed, run, place, progress)
    origin = None
    if newest is not None:
        trainer.restore(newest)
        if place.main:  # what a crash has kept from being removed
            checkpoint.prune(run, recipe.train.keep, recipe.train.keep_best)
    elif init is not None:
        origin = _start_from(trainer, *init)
    if place.main:
        if not old:  # made only now that all that can be refused was accepted
            stack.enter_context(held(run))
            if open_run(recipe, run, resume)[0] is not None:
                raise ValueError(f"{run} was begun by another process meanwhile; give --resume to continue it")
        for change in changed:
            warn(f"from step {change.step} on: {change}")
        note_changes(run, changed)
        write_text(run / RECIPE, to_json(recipe))
        _tell_start(trainer, need, run, progress)
        keep_metrics(run / METRICS, trainer.step)
        if origin is not None:
            note_origin(run, origin)
    return trainer


def train(
    recipe: AnyRecipe,
    run: Path,
    *,
    resume: bool = False,
    until: int | None = None,
    device: torch.device | str = "cpu",
    progress: bool = True,
    on_log: OnLog | None = None,
    init: tuple[Path | str, str] | None = None,
    allow_change: bool = False,
    track: str = AUTO,
) -> Model | RAE:
    """Train to recipe.train.steps, or pause at step `until`; return the model with its averaged weights.

    Of a DecoderRecipe: the autoencoder, which is also written to RUN/rae once all steps are done.

    Under torchrun every process calls it. Ctrl-C and SIGTERM save a checkpoint after the step in hand and raise
    KeyboardInterrupt: `resume` then continues bit for bit, and may raise train.steps; allow_change: it may also change
    the learning rate and its schedule. init: (what `mvm.load` takes, weights) to start from, unless this run has a
    checkpoint of its own. on_log: called in the main process with every line of metrics.jsonl. track: trackers that
    get them too, "auto", "none", or of tensorboard, wandb, mlflow, separated by commas.
    """
    if track != AUTO:  # which refuses nothing
        parse_trackers(track)  # before anything is read or written
    if until is not None:
        at_least("until", until, 1)
    recipe = completed(recipe)
    with processes(device, recipe.engine.timeout) as place, determinism(recipe.engine), ExitStack() as stack:
        trainer = _start(recipe, run, resume, allow_change, init, place, stack, progress and place.main)
        last = min(until or recipe.train.steps, recipe.train.steps)
        try:
            with deferred_interrupt() as asked:
                _run(trainer, run, last, asked, progress and place.main, on_log, track)
            return _result(trainer, run, progress and place.main)
        finally:
            trainer.engine.release()


def _result(trainer: AnyTrainer, run: Path, progress: bool) -> Model | RAE:
    """Return a model or autoencoder of its own with the averaged weights, whole in every process."""
    if isinstance(trainer, DecoderTrainer):
        return autoencoder(trainer, run, progress)
    model = Model(trainer.recipe).to(trainer.place.device)
    model.network.load_state_dict(trainer.averages.whole(MAIN))
    return model.eval().requires_grad_(False)


def _preview(trainer: AnyTrainer, run: Path) -> Preview | DecoderPreview:
    """Return what looks at the averaged weights while they are trained."""
    folder = run / "samples"
    if isinstance(trainer, DecoderTrainer):
        return DecoderPreview(trainer, folder)
    return Preview(trainer.recipe.preview, trainer.model, trainer.store, folder, trainer.place)


def _look(trainer: AnyTrainer, preview: Preview | DecoderPreview, log: Log) -> float:
    """Look at the averaged weights and log the figures; return the one that checkpoints are chosen by, low is good."""
    with log.meter.paused(), trainer.averages.swapped_in(), autocast(trainer.recipe.engine, trainer.place.device):
        found = preview(trainer.step)
    figures, quality = (found, restoration_quality(found)) if isinstance(found, dict) else ({QUALITY: found}, found)
    log.write({"step": trainer.step, **figures})
    return quality


def _run(
    trainer: AnyTrainer, run: Path, last: int, asked: Request, progress: bool, on_log: OnLog | None, track: str
) -> None:
    """Do the steps up to `last`, with logs, looks and checkpoints; stop and save once `asked` is set."""
    recipe, place, config = trainer.recipe, trainer.place, trainer.recipe.train
    meter = Meter(recipe, place, matrix_ceiling(place.device), trainer.step)
    shown = trackers(track, run, recipe, trainer.step) if place.main else []
    log = Log(run, config.log_every, config.steps, trainer.window, meter, on_log, shown)
    preview = _preview(trainer, run)
    saver = Saver(trainer, run)
    read_every_step = place.device.type == "cpu"  # reading a step's figures is free there
    if place.broadcast(trainer.step == 0 and (run / INIT).is_file() and checkpoint.latest(run) is None):
        saver.save()  # a run that is stopped before its first checkpoint must not lose what it started from
    bar = Bar(trainer, progress)
    if isinstance(trainer, Trainer):  # a decoder's step changes its discriminator before its end
        trainer.on_part = bar.part
        trainer.at_once = asked.at_once if place.world == 1 else nullcontext
    try:
        for _ in _steps(trainer, last, asked):
            trainer.advance()
            records: list[Record] = []
            saves = due(trainer.step, config.save_every, last)
            looks = preview.due(trainer.step)
            if read_every_step or saves or looks or log.due(trainer.step):
                records = trainer.read()
                trainer.window = log.add(records)
            bar.step(records)
            quality = _look(trainer, preview, log) if looks else None
            if config.snapshot_every and trainer.step % config.snapshot_every == 0:
                saver.save_averages()  # before the checkpoint: a run that goes on from it has them all
            if saves:
                saver.save(quality)
        saver.finish()
    except KeyboardInterrupt:
        if trainer.between_steps and trainer.step > 0:
            trainer.window = log.add(trainer.read())
            saver.save()
            saver.finish()
        raise
    finally:
        bar.bar.close()
        saver.tell_failure()
        log.close()
