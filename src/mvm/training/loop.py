"""The one training loop: one process or many, CPU or GPUs, every recipe; and `train`, the front of it."""

import json
import math
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, nullcontext
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, overload

import torch
from torch import nn
from tqdm import tqdm

from mvm import checkpoint
from mvm.distributed.processes import Processes, autocast, determinism, precision, processes
from mvm.files import Held, claimed, require_utf8, write_text
from mvm.latent import RAE
from mvm.model import Model, own_network
from mvm.network import OwnConfig
from mvm.network.own import OWN
from mvm.options import at_least
from mvm.published import check_recipe, open_model
from mvm.recipes import RECIPE, AnyRecipe, DecoderRecipe, Recipe, changed, load_recipe, to_json
from mvm.recipes.memory import Memory, fit_memory
from mvm.store import Share
from mvm.training import logs
from mvm.training.data import completed, training_store
from mvm.training.decoder_trainer import DecoderTrainer
from mvm.training.field_trainer import FieldTrainer
from mvm.training.interrupt import Request, deferred_interrupt
from mvm.training.logs import AUTO, NONE, OnLog, StepRecord, due, parse_trackers, warn
from mvm.training.own import dotted, own_training
from mvm.training.rundir import INIT, START, clear, note_changes, open_run, require_in_place
from mvm.training.trainer import Trainer, Write
from mvm.untrusted import printable

TRAINERS: dict[str, type[Trainer[Any]]] = {Recipe.task: FieldTrainer, DecoderRecipe.task: DecoderTrainer}
AGREE_EVERY = 5  # steps after which processes ask each other whether to stop: asking costs a message


class Bar:
    """The progress bar: steps, time left, the loss smoothed over about 50 read steps, images a second."""

    def __init__(self, trainer: Trainer, visible: bool) -> None:
        total, self.batch, self.loss = trainer.recipe.train.steps, trainer.recipe.train.batch, math.nan
        self.bar = tqdm(total=total, initial=trainer.step, desc="train", unit="step", disable=not visible)

    def part(self, done: int, parts: int) -> None:
        """Show how far a step of many parts is: on a CPU it may take minutes."""
        if parts > 1:
            self.bar.set_postfix_str(f"part {done} of {parts}{self._loss}")

    @property
    def _loss(self) -> str:
        return "" if math.isnan(self.loss) else f", loss {self.loss:.4f}"

    def step(self, records: Sequence[StepRecord]) -> None:
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
    """Writes checkpoints and snapshots in a thread, one at a time, while training goes on.

    A write that fails (a full disk) leaves what was there before; it is reported, and the next one tried. wanted: False
    writes nothing, of a run whose folder is temporary. held: that folder, in the main process.
    """

    def __init__(self, trainer: Trainer, run: Path, wanted: bool, held: Held | None = None) -> None:
        self.trainer, self.run, self.wanted, self.held = trainer, run, wanted, held
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self.writing: Future[None] | None = None
        self.last: tuple[int, float | None] = (0, None)  # the step saved last, and its quality

    def save(self, quality: float | None = None) -> None:
        """Take a snapshot now and write it in the background; every process must call."""
        if not self.wanted:
            return
        if quality is None and self.last[0] == self.trainer.step:  # Ctrl-C right after a save: the same once more
            quality = self.last[1]
        self.last = self.trainer.step, quality
        self.submit(self.trainer.snapshot(quality))

    def submit(self, write: Write | None) -> None:
        """Write in the background once the write before has ended; the main process alone has something to write."""
        if write is not None and self.wanted:
            self.report_failure()
            self.writing = self.thread.submit(self._write, write)

    def _write(self, write: Write) -> None:
        require_in_place(self.held)
        try:
            write(self.run)
        except Exception:
            require_in_place(self.held)  # which tells more than a path that is not there
            raise

    def failure(self) -> BaseException | None:
        """Wait for the write under way; return why it failed, once, or None."""
        writing, self.writing = self.writing, None
        return None if writing is None else writing.exception()

    def report_failure(self) -> None:
        """Wait for the write under way; say on stderr if it failed."""
        if (error := self.failure()) is not None:
            before = checkpoint.latest(self.run)
            whole = f"{before.name} is whole" if before else "there is no checkpoint before it"
            warn(f"a checkpoint could not be saved ({error}); {whole}; training goes on")

    def finish(self) -> None:
        """Wait for the last write; every process leaves together, and an error there is everyone's."""
        with self.trainer.processes.main_first():
            if (error := self.failure()) is not None:
                raise error


class RunOptions(NamedTuple):
    """How a run is begun and watched, see `train`; temporary: its folder goes with it."""

    resume: bool
    allow_change: bool
    until: int | None
    init: tuple[Path | str, str] | None
    on_log: OnLog | None
    track: str
    progress: bool
    temporary: bool


def _describe(trainer: Trainer, need: Memory | None, run: Path, how: RunOptions) -> None:
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
    if how.progress:
        listed = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
        where = f"{facts['device']}{f' x {processes.world}' if processes.world > 1 else ''}, {facts['precision']}"
        parts = f", each in {facts['accumulate']} parts" if facts["accumulate"] > 1 else ""
        memory = f"about {facts['memory_gb']} GB of memory; " if need else ""
        what = "images" if recipe.data.values == "uint8" else "samples"
        classes = f", {len(names)} classes ({printable(listed)})" if names else ""
        count = f"{images:,} {what}" if images else f"a stream of {what}"
        warn(f"{recipe.name} on {where}: {facts['parameters'] / 1e6:.3g} M parameters, {count}{classes}")
        epochs = f" ({facts['epochs']:g} epochs)" if images else ""
        folder = "no run is kept" if how.temporary else f"writes {run}"
        warn(f"steps {trainer.step} to {train.steps} of {train.batch} {what}{parts}{epochs}; {memory}{folder}")


def _start(
    recipe: AnyRecipe, run: Path, how: RunOptions, group: Processes, stack: ExitStack, network: Any, samples: Any
) -> tuple[Trainer, Held | None]:
    """Return the trainer at its first step: a new run, another's weights, or the newest checkpoint of an old one.

    And, in the main process, the run directory, which is locked until the stack ends.
    """
    newest, changes, old, held = None, [], run.is_dir(), None
    if isinstance(recipe, Recipe):
        check_recipe(recipe)  # what a run may not say is refused before it is trained, not when it is read
    with group.main_first():
        if group.main:
            if old:
                held = stack.enter_context(claimed(run))
            newest, changes = open_run(recipe, run, how.resume, how.allow_change)
            if how.resume and not (run / RECIPE).is_file():
                warn(f"{run} was stopped before its first step; starting it anew")
    newest = group.broadcast(newest)
    executed, need, warning = fit_memory(recipe, group.device, group.world)
    if warning and group.main:
        warn(warning)
    if samples is None:
        store = training_store(executed, group.device, Share(group.rank, group.world, lambda: group.any(False)))
    else:
        store = samples.store(group.device, executed.engine.resident)
    trainer = TRAINERS[recipe.task].open(executed, store, run, group, how.progress, network)
    stack.callback(trainer.engine.release)  # before the group ends, also after an error below
    origin = None
    if newest is not None:
        trainer.restore(newest)
        if group.main:  # what a crash has kept from being removed
            checkpoint.prune(run, recipe.train.keep, recipe.train.keep_best)
    elif how.init is not None:
        source, weights = how.init
        try:
            opened = open_model(source, weights)
        except ValueError as error:
            raise ValueError(f"--init-from {source}: {error}") from error
        for line in trainer.init_from(opened, str(source)):
            if group.main:
                warn(f"--init-from {source}: {line}")
        origin = {name: opened.origin[name] for name in ("run", "step", "weights", "sha256")}
    if group.main:
        if not old:  # made only now that all that can be refused was accepted
            held = stack.enter_context(claimed(run))
            if open_run(recipe, run, how.resume)[0] is not None:
                raise ValueError(f"{run} was begun by another process meanwhile; give --resume to continue it")
        for change in changes:
            warn(f"from step {change.step} on: {change}")
        note_changes(run, changes)
        write_text(run / RECIPE, to_json(recipe))
        trainer.keep_codec(run)
        _describe(trainer, need, run, how)
        logs.keep_metrics(run / logs.METRICS, trainer.step)
        if origin is not None:
            write_text(run / INIT, json.dumps(origin, indent=2) + "\n")
    return trainer, held


def _run(trainer: Trainer, run: Path, how: RunOptions, stop: Request, held: Held | None) -> None:
    """Do the steps, with logs, previews and checkpoints; stop and save once `stop` is set."""
    recipe, processes, config = trainer.recipe, trainer.processes, trainer.recipe.train
    last = min(how.until or config.steps, config.steps)
    meter = logs.ThroughputMeter(recipe, processes, logs.matrix_ceiling(processes.device), trainer.step)
    log = logs.Log(run, config.log_every, config.steps, trainer.window, meter, how.on_log)
    if processes.main:
        log.trackers = [tracker(run, recipe, trainer.step) for tracker in parse_trackers(how.track)]
    preview = trainer.preview(run / "samples")
    preview.before_write = partial(require_in_place, held)
    saver = Saver(trainer, run, not how.temporary, held)
    read_every_step = processes.device.type == "cpu"  # reading a step's figures is free there
    if processes.broadcast(trainer.step == 0 and (run / INIT).is_file() and checkpoint.latest(run) is None):
        saver.save()  # a run that is stopped before its first checkpoint must not lose what it started from
    bar = Bar(trainer, how.progress)
    trainer.on_part = bar.part
    trainer.at_once = stop.at_once if processes.world == 1 else nullcontext
    try:
        while trainer.step < last:
            # a signal is raised between steps, in all processes after the same one
            if (processes.world == 1 or trainer.step % AGREE_EVERY == 0) and processes.any(stop.is_set()):
                raise KeyboardInterrupt
            trainer.advance()
            require_in_place(held)
            records: list[StepRecord] = []
            saves = due(trainer.step, config.save_every, last)
            previews = preview.due(trainer.step)
            if read_every_step or saves or previews or log.due(trainer.step):
                records = trainer.read()
                trainer.window = log.add(records)
            bar.step(records)
            quality = None
            if previews:
                with meter.paused(), trainer.averages.swapped_in(), autocast(recipe.engine, processes.device):
                    figures = preview(trainer.step)
                require_in_place(held)
                log.write({"step": trainer.step, **figures})
                quality = preview.quality(figures)
            if config.snapshot_every and trainer.step % config.snapshot_every == 0:
                saver.submit(trainer.averages_snapshot())  # before the checkpoint: a run that goes on has them all
            if saves:
                saver.save(quality)
        saver.finish()
        require_in_place(held)
    except KeyboardInterrupt:
        require_in_place(held)
        if trainer.between_steps and trainer.step > 0:
            trainer.window = log.add(trainer.read())
            saver.save()
            saver.finish()
        raise
    finally:
        bar.bar.close()
        if held is None or held.in_place:
            saver.report_failure()
            log.close()
        else:  # trackers would write to a place that is no more
            saver.failure()


def _named_recipe(recipe: AnyRecipe | str | Path, given: dict[str, Any]) -> tuple[AnyRecipe, Any]:
    """Return a recipe with the options of a call, completed by its data, and the network whose class it names, if any.

    A class is imported only for a recipe that a person wrote: in Python, or in a .toml file.
    """
    source = str(recipe) if isinstance(recipe, str | Path) else "this recipe"
    recipe = load_recipe(source) if isinstance(recipe, str | Path) else recipe
    recipe = completed(changed(recipe, dotted(given, recipe)) if given else recipe)
    if not (isinstance(recipe, Recipe) and isinstance(recipe.network, OwnConfig)):
        return recipe, None
    named = None if source.endswith(".json") or recipe.network.kind == OWN else recipe.network.kind
    return recipe, own_network(recipe, named, source)


@overload
def train(network: AnyRecipe | str | Path, dataset: str | Path | None = None, **options: Any) -> Model | RAE: ...
@overload
def train(network: nn.Module, dataset: Any, run: str | Path | None = None, **options: Any) -> Model: ...
def train(
    network: nn.Module | AnyRecipe | str | Path,
    dataset: Any = None,
    run: str | Path | None = None,
    *,
    recipe: Recipe | str | Path | None = None,
    batches: bool | None = None,
    resume: bool = False,
    until: int | None = None,
    device: torch.device | str | None = None,
    progress: bool = True,
    on_log: OnLog | None = None,
    init: tuple[Path | str, str] | None = None,
    allow_change: bool = False,
    track: str = AUTO,
    **options: Any,
) -> Model | RAE:
    """Train a network on a dataset, or a recipe; return the model with its averaged weights.

        field = mvm.train(network, dataset, steps=1000, batch=256)         # nothing is kept
        field = mvm.train(network, dataset, "runs/mine", lr=3e-4, ema=0.999, preview_every=500)
        model = mvm.train("digits", "runs/digits")                         # as `mvm train digits`

    network: a torch module (x, t, condition) or (x, t), trained in place; or what mvm.wrap returns, with its kind,
    path, null and time. Or a recipe, by name, .toml file or as an object; then `dataset` is the run. Of a DecoderRecipe
    the autoencoder is returned, and written to RUN/rae once all steps are done.
    dataset: a torch Dataset, a tensor, a tuple or mapping of tensors, or a stream (IterableDataset, DataLoader,
    function that returns a generator). A sample is x0, (x0, condition), or a mapping with "x0" and "condition", or with
    "x0" and arguments of the network by name. Float samples are taken as they are, uint8 images are scaled to [-1, 1];
    data_values="uint8" says that floats are images in [-1, 1]. batches: whether a stream yields batches (a DataLoader
    does). Samples by index come in an order of (seed, step); a stream in its own, begins anew at its end, and is read
    as a whole by every process, which keeps its part of each batch.
    run: the folder of the run, for checkpoints, log and resume; mvm.load(run, network=network) reads it. None: nothing
    is kept.

    options: those of recipes (see `mvm options`), with "_" for "."; the tables train, engine and objective may be left
    out: steps, batch, lr, ema, optimizer, compile, precision, accumulate, save_every, seed, preview_every, sample_nfe,
    path_law_mean, ...; drop is objective.label_drop, timesteps path.law.name, as in mvm.loss. recipe: of a network, the
    recipe whose options are the defaults.

    Under torchrun every process calls it. Ctrl-C and SIGTERM save a checkpoint after the step in hand and raise
    KeyboardInterrupt: `resume` then continues bit for bit (a stream: weights, optimizer and step; its place in the data
    where it has state_dict and load_state_dict), and may raise steps; allow_change: it may also change the learning
    rate and its schedule. Without a run there, resume=True is an error; os.path.isdir(run) starts or continues one.
    until: pause at this step. device: by default a network's own; of a recipe the CPU. init: (what `mvm.load` takes,
    weights) to start from. on_log: called in the main process with every line of metrics.jsonl. track: trackers that
    get them too, "auto", "none", or of tensorboard, wandb, mlflow, separated by commas.
    """
    if track != AUTO:  # which refuses nothing
        parse_trackers(track)  # before anything is read or written
    if until is not None:
        at_least("until", until, 1)
    samples = None
    if isinstance(network, Recipe | DecoderRecipe | str | Path):
        if recipe is not None or batches is not None:
            raise ValueError("recipe and batches belong to a network and its dataset; here a recipe is trained")
        if dataset is not None and (run is not None or not isinstance(dataset, str | Path)):
            raise ValueError("a recipe names its data: mvm.train(recipe, run); to train on a dataset give a network")
        run = dataset if run is None else run
        chosen, own = _named_recipe(network, options)
    else:
        chosen, own, samples = own_training(network, dataset, recipe, batches, options)
        device = device or next(own.parameters()).device
    if resume:
        if run is None:
            raise ValueError("resume=True continues a run, and run=None: give its folder")
        if not Path(run).is_dir():
            remedy = "leave resume out to start one, or give resume=os.path.isdir(run) to start or continue"
            raise ValueError(f"resume=True: there is no run in {run}; check the path, {remedy}")
    with processes(device or "cpu", chosen.engine.timeout) as group, determinism(chosen.engine), ExitStack() as stack:
        how = RunOptions(
            resume, allow_change, until, init, on_log, track, progress and group.main, temporary=run is None
        )
        if run is None:
            run = Path(stack.enter_context(TemporaryDirectory(prefix="mvm-"))) / chosen.name
            how = how._replace(track=NONE if track == AUTO else track)
        run = Path(run)
        require_utf8(run)
        begun = (run / RECIPE).is_file()
        trainer, held = _start(chosen, run, how, group, stack, own, samples)
        try:
            with deferred_interrupt() as stop:
                _run(trainer, run, how, stop, held)
            return trainer.result(run, how.progress)
        except Exception:
            if held is not None and held.in_place and trainer.step == 0 and not begun:  # e.g. the first batch has NaN
                clear(run)
            raise
