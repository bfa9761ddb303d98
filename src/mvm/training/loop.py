"""The one training loop: one process or many, CPU or GPUs, every recipe."""

import json
import math
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from torch import nn
from tqdm import tqdm

from mvm import checkpoint
from mvm.distributed.processes import Processes, autocast, determinism, precision, processes
from mvm.files import write_text
from mvm.latent import RAE
from mvm.model import Model, own_network
from mvm.network import OwnConfig
from mvm.network.own import OWN
from mvm.options import at_least
from mvm.published import open_model
from mvm.recipes import RECIPE, AnyRecipe, DecoderRecipe, Recipe, load_recipe, located, to_json
from mvm.recipes.memory import Memory
from mvm.store import Share
from mvm.training.data import completed, training_store
from mvm.training.dataset import Samples
from mvm.training.decoder_trainer import DecoderTrainer
from mvm.training.field_trainer import FieldTrainer
from mvm.training.interrupt import Request, deferred_interrupt
from mvm.training.logs import METRICS, Log, Meter, OnLog, Record, due, keep_metrics, matrix_ceiling, warn
from mvm.training.rundir import INIT, lock_run, note_changes, open_run
from mvm.training.track import AUTO, NONE, parse_trackers, trackers
from mvm.training.trainer import Trainer, Write
from mvm.untrusted import printable

TRAINERS: dict[str, type[Trainer[Any]]] = {Recipe.task: FieldTrainer, DecoderRecipe.task: DecoderTrainer}
START = "start.json"  # in a run: what was said at its start
AGREE_EVERY = 5  # steps after which processes ask each other whether to stop: asking costs a message


class Bar:
    """The progress bar: steps, time left, the loss smoothed over about 50 read steps, images a second."""

    def __init__(self, trainer: Trainer, shown: bool) -> None:
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


class Saver:
    """Writes checkpoints and snapshots while training goes on; a failed write is reported, and the next one tried.

    kept: False writes nothing, of a run whose folder is not kept.
    """

    def __init__(self, trainer: Trainer, run: Path, kept: bool) -> None:
        self.trainer, self.run, self.writer, self.kept = trainer, run, checkpoint.Writer(), kept
        self.judged: tuple[int, float | None] = (0, None)  # the step saved last, and its quality

    def save(self, quality: float | None = None) -> None:
        """Take a snapshot now and write it in the background; every process must call."""
        if not self.kept:
            return
        if quality is None and self.judged[0] == self.trainer.step:  # Ctrl-C right after a save: the same once more
            quality = self.judged[1]
        self.judged = self.trainer.step, quality
        self.submit(self.trainer.snapshot(quality))

    def submit(self, write: Write | None) -> None:
        """Write in the background once the write before has ended; the main process alone has something to write."""
        if write is not None and self.kept:
            self.report_failure()
            self.writer.submit(lambda: write(self.run))

    def report_failure(self) -> None:
        """Wait for the write under way; say on stderr if it failed."""
        if (error := self.writer.failure()) is not None:
            kept = checkpoint.latest(self.run)
            whole = f"{kept.name} is whole" if kept else "there is no checkpoint before it"
            warn(f"a checkpoint could not be saved ({error}); {whole}; training goes on")

    def finish(self) -> None:
        """Wait for the last write; every process leaves together, and an error there is everyone's."""
        with self.trainer.processes.main_first():
            self.writer.wait()


class Given(NamedTuple):
    """What a caller gives a recipe in Python: a network of its own, the samples, and whether the run is kept."""

    network: nn.Module | None = None
    samples: Samples | None = None
    kept: bool = True


def _build(recipe: AnyRecipe, run: Path, processes: Processes, progress: bool, given: Given) -> Trainer:
    """Return the trainer of a recipe at step 0."""
    device, samples = processes.device, given.samples
    if samples is None:
        store = training_store(recipe, device, Share(processes.rank, processes.world, lambda: processes.any(False)))
    else:
        store = samples.store(device, recipe.engine.resident)
    return TRAINERS[recipe.task].open(recipe, store, run, processes, progress, given.network)


def _describe(trainer: Trainer, need: Memory | None, run: Path, progress: bool, kept: bool) -> None:
    """Say what is trained on what, and keep it in RUN/start.json for the report."""
    recipe, processes, device = trainer.recipe, trainer.processes, trainer.processes.device
    images, names, train = len(trainer.store), recipe.data.class_names, recipe.train
    gpu = device.type == "cuda"
    facts = {
        "device": torch.cuda.get_device_name(device) if gpu else f"{device.type} ({torch.get_num_threads()} cores)",
        "processes": processes.world,
        "precision": {torch.float32: "fp32", torch.bfloat16: "bf16"}[precision(recipe.engine, device)],
        "parameters": sum(parameter.numel() for parameter in trainer.averages.network.parameters()),
        "images": images or None,  # of a stream nobody knows
        "classes": len(names),
        "steps": train.steps,
        "batch": train.batch,
        "epochs": round(train.steps * train.batch / images, 1) if images else None,
        "accumulate": recipe.engine.accumulate,
        **({"memory_gb": round(need.total / 1e9, 1)} if need else {}),
    }
    write_text(run / START, json.dumps(facts, indent=2) + "\n")
    if progress:
        shown = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
        where = f"{facts['device']}{f' x {processes.world}' if processes.world > 1 else ''}, {facts['precision']}"
        parts = f", each in {facts['accumulate']} parts" if facts["accumulate"] > 1 else ""
        memory = f"about {facts['memory_gb']} GB of memory; " if need else ""
        what = "images" if recipe.data.values == "uint8" else "samples"
        classes = f", {len(names)} classes ({printable(shown)})" if names else ""
        count = f"{images:,} {what}" if images else f"a stream of {what}"
        warn(f"{recipe.name} on {where}: {facts['parameters'] / 1e6:.3g} M parameters, {count}{classes}")
        epochs = f" ({facts['epochs']:g} epochs)" if images else ""
        warn(
            f"steps {trainer.step} to {train.steps} of {train.batch} {what}{parts}{epochs}; "
            f"{memory}{f'writes {run}' if kept else 'no run is kept'}"
        )


def _start(
    recipe: AnyRecipe,
    run: Path,
    resume: bool,
    allow_change: bool,
    init: tuple[Path | str, str] | None,
    processes: Processes,
    stack: ExitStack,
    progress: bool,
    given: Given,
) -> Trainer:
    """Return the trainer at its first step: a new run, another's weights, or the newest checkpoint of an old one.

    stack: locks the run directory against other processes until training ends.
    """
    newest, changed, old = None, [], run.is_dir()
    with processes.main_first():
        if processes.main:
            if old:
                stack.enter_context(lock_run(run))
            newest, changed = open_run(recipe, run, resume, allow_change)
    newest = processes.broadcast(newest)
    executed, need, warning = TRAINERS[recipe.task].fit_memory(recipe, processes)
    if warning and processes.main:
        warn(warning)
    trainer = _build(executed, run, processes, progress, given)
    origin = None
    if newest is not None:
        trainer.restore(newest)
        if processes.main:  # what a crash has kept from being removed
            checkpoint.prune(run, recipe.train.keep, recipe.train.keep_best)
    elif init is not None:
        source, weights = init
        try:
            opened = open_model(source, weights)
        except ValueError as error:
            raise ValueError(f"--init-from {source}: {error}") from error
        for line in trainer.init_from(opened, str(source)):
            if processes.main:
                warn(f"--init-from {source}: {line}")
        origin = {name: opened.origin[name] for name in ("run", "step", "weights", "sha256")}
    if processes.main:
        if not old:  # made only now that all that can be refused was accepted
            stack.enter_context(lock_run(run))
            if open_run(recipe, run, resume)[0] is not None:
                raise ValueError(f"{run} was begun by another process meanwhile; give --resume to continue it")
        for change in changed:
            warn(f"from step {change.step} on: {change}")
        note_changes(run, changed)
        write_text(run / RECIPE, to_json(recipe))
        _describe(trainer, need, run, progress, given.kept)
        keep_metrics(run / METRICS, trainer.step)
        if origin is not None:
            write_text(run / INIT, json.dumps(origin, indent=2) + "\n")
    return trainer


def train(
    recipe: AnyRecipe | str | Path,
    run: str | Path | None = None,
    *,
    resume: bool = False,
    until: int | None = None,
    device: torch.device | str = "cpu",
    progress: bool = True,
    on_log: OnLog | None = None,
    init: tuple[Path | str, str] | None = None,
    allow_change: bool = False,
    track: str = AUTO,
    given: Given | None = None,
) -> Model | RAE:
    """Train to recipe.train.steps, or pause at step `until`; return the model with its averaged weights.

    recipe: also the name of a shipped one, or a .toml file; run: the folder of the run, made where there is none. None:
    nothing is kept, and nothing can be resumed.
    Of a DecoderRecipe: the autoencoder, which is also written to RUN/rae once all steps are done.

    Under torchrun every process calls it. Ctrl-C and SIGTERM save a checkpoint after the step in hand and raise
    KeyboardInterrupt: `resume` then continues bit for bit, and may raise train.steps; allow_change: it may also change
    the learning rate and its schedule. init: (what `mvm.load` takes, weights) to start from, unless this run has a
    checkpoint of its own. on_log: called in the main process with every line of metrics.jsonl. track: trackers that
    get them too, "auto", "none", or of tensorboard, wandb, mlflow, separated by commas. given: see mvm.train, which is
    the front of this.
    """
    if track != AUTO:  # which refuses nothing
        parse_trackers(track)  # before anything is read or written
    if until is not None:
        at_least("until", until, 1)
    if run is None and resume:
        raise ValueError("resume=True continues a run, and run=None: give its folder")
    recipe, given = _resolved(recipe, (given or Given())._replace(kept=run is not None))
    with processes(device, recipe.engine.timeout) as group, determinism(recipe.engine), ExitStack() as stack:
        progress = progress and group.main
        if run is None:
            run, track = stack.enter_context(TemporaryDirectory(prefix="mvm-")), NONE if track == AUTO else track
            run = Path(run) / recipe.name
        run = Path(run)
        trainer = _start(recipe, run, resume, allow_change, init, group, stack, progress, given)
        last = min(until or recipe.train.steps, recipe.train.steps)
        try:
            with deferred_interrupt() as asked:
                _run(trainer, run, last, asked, progress, on_log, track, given.kept)
            return trainer.result(run, progress)
        finally:
            trainer.engine.release()


def _resolved(recipe: AnyRecipe | str | Path, given: Given) -> tuple[AnyRecipe, Given]:
    """Return the recipe, completed by its data, and what is given with it: the class that a recipe names, if it does.

    A class is imported only for a recipe that a person wrote: in Python, or in a .toml file.
    """
    source = "this recipe"
    if isinstance(recipe, str | Path):
        source, recipe = str(recipe), load_recipe(str(recipe))
    recipe = located(recipe) if given.samples is not None else completed(recipe)
    if isinstance(recipe, Recipe) and isinstance(recipe.network, OwnConfig) and given.network is None:
        named = None if source.endswith(".json") or recipe.network.kind == OWN else recipe.network.kind
        given = given._replace(network=own_network(recipe, named, source))
    return recipe, given


def _run(
    trainer: Trainer,
    run: Path,
    last: int,
    asked: Request,
    progress: bool,
    on_log: OnLog | None,
    track: str,
    kept: bool,
) -> None:
    """Do the steps up to `last`, with logs, looks and checkpoints; stop and save once `asked` is set."""
    recipe, processes, config = trainer.recipe, trainer.processes, trainer.recipe.train
    meter = Meter(recipe, processes, matrix_ceiling(processes.device), trainer.step)
    shown = trackers(track, run, recipe, trainer.step) if processes.main else []
    log = Log(run, config.log_every, config.steps, trainer.window, meter, on_log, shown)
    preview = trainer.preview(run / "samples")
    saver = Saver(trainer, run, kept)
    read_every_step = processes.device.type == "cpu"  # reading a step's figures is free there
    if processes.broadcast(trainer.step == 0 and (run / INIT).is_file() and checkpoint.latest(run) is None):
        saver.save()  # a run that is stopped before its first checkpoint must not lose what it started from
    bar = Bar(trainer, progress)
    trainer.on_part = bar.part
    trainer.at_once = asked.at_once if processes.world == 1 else nullcontext
    try:
        while trainer.step < last:
            # a signal is raised between steps, in all processes after the same one
            if (processes.world == 1 or trainer.step % AGREE_EVERY == 0) and processes.any(asked.is_set()):
                raise KeyboardInterrupt
            trainer.advance()
            records: list[Record] = []
            saves = due(trainer.step, config.save_every, last)
            looks = preview.due(trainer.step)
            if read_every_step or saves or looks or log.due(trainer.step):
                records = trainer.read()
                trainer.window = log.add(records)
            bar.step(records)
            quality = None
            if looks:
                with meter.paused(), trainer.averages.swapped_in(), autocast(recipe.engine, processes.device):
                    figures = preview(trainer.step)
                log.write({"step": trainer.step, **figures})
                quality = preview.quality(figures)
            if config.snapshot_every and trainer.step % config.snapshot_every == 0:
                saver.submit(trainer.averages_snapshot())  # before the checkpoint: a run that goes on has them all
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
        saver.report_failure()
        log.close()
