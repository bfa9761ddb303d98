"""The one training loop."""

import json
import math
import signal
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from mvm.data import Images, Order
from mvm.files import write_text
from mvm.model import Model, training_data
from mvm.objective import Batch, Matching
from mvm.recipes import Recipe, options, parse_recipe, to_json
from mvm.training import checkpoint, ema
from mvm.training.optim import adamw, learning_rate

METRICS = "metrics.jsonl"


class Trainer:
    """A run in memory: model, optimizer, average, and the number of steps done."""

    def __init__(self, recipe: Recipe, data: Images) -> None:
        self.recipe, self.data, self.step = recipe, data, 0
        self.model = Model(recipe)
        self.optimizer = adamw(recipe.train, self.model.network)
        self.average = ema.copy_weights(self.model.network)
        self.objective = Matching(recipe.objective, self.model.schedule, recipe.path.law)
        self.order = Order(len(data), recipe.seed)

    def batch(self) -> Batch:
        """Return the batch of the current step: a pure function of (seed, step)."""
        positions = self.order.positions(self.step, self.recipe.train.batch)
        chosen = self.data[self.order.indices(positions)]
        return Batch(self.model.codec.encode(chosen.images), chosen.labels, self.order.seeds(positions))

    def advance(self) -> dict[str, float]:
        """Do one step: forward, backward, clip, AdamW, EMA; return what the log wants."""
        config = self.recipe.train
        rate = learning_rate(config, self.step)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        loss = self.objective(self.model.network, self.batch())
        self.optimizer.zero_grad(set_to_none=True)
        loss.total.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.network.parameters(), config.clip or math.inf)
        self.optimizer.step()
        ema.update(self.average, self.model.network, config.ema, self.step)
        self.step += 1
        return {**{name: float(part) for name, part in loss.parts.items()}, "lr": rate, "grad_norm": float(norm)}

    def _optimizer_tensors(self) -> dict[str, Tensor]:
        state = self.optimizer.state
        return {
            f"{name}/{key}": value
            for name, parameter in self.model.network.named_parameters()
            for key, value in state[parameter].items()
        }

    def save(self, run: Path) -> Path:
        """Write checkpoints/step-N, whole or not at all, and drop the oldest beyond `keep`."""
        folder = checkpoint.step_folder(run, self.step)
        parts = {
            "model": ema.copy_weights(self.model.network),
            "ema": self.average,
            "optimizer": self._optimizer_tensors(),
        }
        checkpoint.save(folder, parts, {"step": self.step, "recipe": self.recipe.name})
        checkpoint.prune(run, self.recipe.train.keep)
        return folder

    def restore(self, folder: Path) -> None:
        """Read a checkpoint; every file is checked before anything is changed."""
        weights, average, moments = (checkpoint.load(folder, part) for part in ("model", "ema", "optimizer"))
        self.model.network.load_state_dict(weights)
        self.average = average
        for name, parameter in self.model.network.named_parameters():
            keys = ("step", "exp_avg", "exp_avg_sq")
            self.optimizer.state[parameter] = {key: moments[f"{name}/{key}"] for key in keys}
        self.step = checkpoint.read_manifest(folder)["step"]


def _changed(old: Recipe, new: Recipe) -> list[str]:
    """Return the options that differ and may not: everything but the number of steps and the logging."""
    free = {"train.steps", "train.log_every", "train.save_every", "train.keep"}
    before, after = options(old), options(new)
    return [name for name in after if before[name] != after[name] and name not in free]


def _open_run(recipe: Recipe, run: Path, resume: bool) -> Path | None:
    """Prepare the run directory; return the checkpoint to resume from, if any."""
    stored = run / "recipe.json"
    if stored.is_file():
        if not resume:
            raise ValueError(f"{run} already holds a run; give --resume to continue it, or another --out")
        changed = _changed(parse_recipe(stored.read_text(), ".json", str(stored)), recipe)
        if changed:
            raise ValueError(f"{run} was started with other values of {', '.join(changed)}; use another --out")
    run.mkdir(parents=True, exist_ok=True)
    return checkpoint.latest(run)


def _keep_metrics(path: Path, step: int) -> None:
    """Drop log lines past `step`, left by steps that a restart does again; a cut-off last line goes too."""
    if not path.is_file():
        return
    lines = [line for line in path.read_text().splitlines() if line.endswith("}")]
    kept = [line for line in lines if json.loads(line)["step"] <= step]
    write_text(path, "".join(f"{line}\n" for line in kept))


@contextmanager
def _deferred_interrupt() -> Generator[Event]:
    """Hold the first Ctrl-C back: a step cut in half could not be resumed bit for bit. A second one stops at once."""
    asked = Event()
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return

    def note(number: int, frame: object) -> None:
        asked.set()
        signal.signal(signal.SIGINT, before)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield asked
    finally:
        signal.signal(signal.SIGINT, before)


def _steps(trainer: Trainer, progress: bool) -> Iterator[int]:
    """Yield before every step; Ctrl-C is raised between steps."""
    total = trainer.recipe.train.steps
    bar = tqdm(total=total, initial=trainer.step, desc="train", unit="step", disable=not progress)
    with bar, _deferred_interrupt() as asked:
        while trainer.step < total:
            if asked.is_set():
                raise KeyboardInterrupt
            yield trainer.step
            bar.update(1)


class Log:
    """metrics.jsonl: one line every `log_every` steps, with the mean loss since the line before."""

    def __init__(self, path: Path, recipe: Recipe, step: int, on_line: Callable[[dict[str, Any]], None] | None) -> None:
        self.path, self.config, self.on_line = path, recipe.train, on_line
        self._restart(step)

    def _restart(self, step: int) -> None:
        self.step, self.total, self.clock = step, 0.0, time.perf_counter()

    def add(self, step: int, values: dict[str, float]) -> None:
        """Take in one step's values; write a line when it is due."""
        self.total += values["loss"]
        if not _due(step, self.config.log_every, self.config.steps):
            return
        count = step - self.step
        line = {"step": step, **values, "loss": self.total / count}
        line["images_per_second"] = count * self.config.batch / (time.perf_counter() - self.clock)
        if not math.isfinite(line["loss"]):
            raise FloatingPointError(f"the loss is {line['loss']} at step {step}; try a lower --train.lr")
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")
        self._restart(step)
        if self.on_line is not None:
            self.on_line(line)


def _due(step: int, every: int, total: int) -> bool:
    return step % every == 0 or step == total


def train(
    recipe: Recipe,
    run: Path,
    *,
    resume: bool = False,
    progress: bool = True,
    on_log: Callable[[dict[str, Any]], None] | None = None,
) -> Model:
    """Train to recipe.train.steps in directory `run`; return the model with its averaged weights.

    Ctrl-C saves a checkpoint after the step in hand and is raised again: `resume` then continues bit for bit.
    """
    start = _open_run(recipe, run, resume)
    trainer = Trainer(recipe, training_data(recipe))
    if start is not None:
        trainer.restore(start)
    write_text(run / "recipe.json", to_json(recipe))
    _keep_metrics(run / METRICS, trainer.step)
    log = Log(run / METRICS, recipe, trainer.step, on_log)
    try:
        for _ in _steps(trainer, progress):
            values = trainer.advance()
            log.add(trainer.step, values)
            if _due(trainer.step, recipe.train.save_every, recipe.train.steps):
                trainer.save(run)
    except KeyboardInterrupt:
        trainer.save(run)
        raise
    trainer.model.network.load_state_dict(trainer.average)
    return trainer.model.eval().requires_grad_(False)
