"""The one training loop."""

import json
import math
import signal
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
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
from mvm.options import at_least
from mvm.recipes import Recipe, options, parse_recipe, to_json
from mvm.training import checkpoint, ema
from mvm.training.optim import adamw, learning_rate

METRICS = "metrics.jsonl"


@dataclass
class Window:
    """Steps since the last log line: where they began, and the sum of their losses. Saved, so that logs resume too."""

    start: int = 0
    total: float = 0.0


class Trainer:
    """A run in memory: model, optimizer, average, and the number of steps done."""

    def __init__(self, recipe: Recipe, data: Images, device: torch.device | str = "cpu") -> None:
        self.recipe, self.step = recipe, 0
        self.window = Window()
        self.between_steps = True  # False while a step is under way: such a state must not be saved
        self.data = data.to(device)
        self.model = Model(recipe).to(device)
        self.optimizer = adamw(recipe.train, self.model.network)
        self.average = ema.copy_weights(self.model.network)
        self.objective = Matching(recipe.objective, self.model.schedule, recipe.path.law)
        self.order = Order(len(data), recipe.seed)

    def batch(self) -> Batch:
        """Return the batch of the current step: a pure function of (seed, step)."""
        positions = self.order.positions(self.step, self.recipe.train.batch)
        chosen = self.data[self.order.indices(positions).to(self.model.device)]
        seeds = self.order.seeds(positions.to(self.model.device))
        return Batch(self.model.codec.encode(chosen.images), chosen.labels, seeds)

    def advance(self) -> dict[str, float]:
        """Do one step: forward, backward, clip, AdamW, EMA; return what the log wants."""
        self.between_steps = False
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
        self.between_steps = True
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
        info = {"step": self.step, "recipe": self.recipe.name, "window": asdict(self.window)}
        checkpoint.save(folder, parts, info)
        checkpoint.prune(run, self.recipe.train.keep)
        return folder

    def restore(self, folder: Path) -> None:
        """Read a checkpoint; every file is checked before anything is changed."""
        weights, average, moments = (checkpoint.load(folder, part) for part in ("model", "ema", "optimizer"))
        self.model.network.load_state_dict(weights)
        self.average = {name: value.to(self.model.device) for name, value in average.items()}
        for name, parameter in self.model.network.named_parameters():
            found = {key: moments[f"{name}/{key}"] for key in ("exp_avg", "exp_avg_sq")}
            state = {key: value.to(self.model.device) for key, value in found.items()}
            self.optimizer.state[parameter] = {"step": moments[f"{name}/step"], **state}
        manifest = checkpoint.read_manifest(folder)
        self.step, self.window = manifest["step"], Window(**manifest["window"])


def _changed(old: Recipe, new: Recipe) -> list[str]:
    """Return the options that differ and may not: everything but the logging and, at a constant rate, the length."""
    free = {"train.log_every", "train.save_every", "train.keep"}
    if new.train.decay == "constant":
        free.add("train.steps")
    before, after = options(old), options(new)
    return [name for name in after if before[name] != after[name] and name not in free]


def _open_run(recipe: Recipe, run: Path, resume: bool) -> Path | None:
    """Prepare the run directory; return the checkpoint to resume from, if any."""
    stored = run / "recipe.json"
    if stored.is_file():
        if not resume:
            raise ValueError(f"{run} already holds a run; give --resume to continue it, or another --out")
        changed = _changed(parse_recipe(stored.read_text(encoding="utf-8"), ".json", str(stored)), recipe)
        if changed:
            raise ValueError(f"{run} was started with other values of {', '.join(changed)}; use another --out")
    elif checkpoint.latest(run) is not None:
        raise ValueError(f"{run} holds checkpoints but no recipe.json; restore that file, or give another --out")
    run.mkdir(parents=True, exist_ok=True)
    return checkpoint.latest(run)


def _keep_metrics(path: Path, step: int) -> None:
    """Drop log lines past `step`, left by steps that a restart does again; a cut-off last line goes too."""
    if not path.is_file():
        return
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.endswith("}")]
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


def _steps(trainer: Trainer, until: int, progress: bool) -> Iterator[int]:
    """Yield before every step; Ctrl-C is raised between steps."""
    total = trainer.recipe.train.steps
    bar = tqdm(total=total, initial=trainer.step, desc="train", unit="step", disable=not progress)
    with bar, _deferred_interrupt() as asked:
        while trainer.step < until:
            if asked.is_set():
                raise KeyboardInterrupt
            yield trainer.step
            bar.update(1)


OnLog = Callable[[dict[str, Any]], None]


class Log:
    """metrics.jsonl: one line every `log_every` steps, with the mean loss since the line before."""

    def __init__(self, path: Path, trainer: Trainer, on_line: OnLog | None) -> None:
        self.path, self.trainer, self.on_line = path, trainer, on_line
        self.clock, self.clock_step = time.perf_counter(), trainer.step

    def add(self, values: dict[str, float]) -> None:
        """Take in the step just done; write a line when it is due."""
        step, window, config = self.trainer.step, self.trainer.window, self.trainer.recipe.train
        if not math.isfinite(values["loss"]):
            raise FloatingPointError(f"the loss is {values['loss']} at step {step}; try a lower --train.lr")
        window.total += values["loss"]
        if not _due(step, config.log_every, config.steps):
            return
        line = {"step": step, **values, "loss": window.total / (step - window.start)}
        now = time.perf_counter()
        line["images_per_second"] = (step - self.clock_step) * config.batch / (now - self.clock)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        self.trainer.window, self.clock, self.clock_step = Window(start=step), now, step
        if self.on_line is not None:
            self.on_line(line)


def _due(step: int, every: int, total: int) -> bool:
    return step % every == 0 or step == total


def _start(recipe: Recipe, run: Path, resume: bool, device: torch.device | str) -> Trainer:
    """Return the trainer at its first step: a new run, or the newest checkpoint of an old one."""
    newest = _open_run(recipe, run, resume)
    trainer = Trainer(recipe, training_data(recipe), device)
    if newest is not None:
        trainer.restore(newest)
    if trainer.step > recipe.train.steps:
        raise ValueError(f"train.steps={recipe.train.steps}: {run} is already at step {trainer.step}")
    write_text(run / "recipe.json", to_json(recipe))
    _keep_metrics(run / METRICS, trainer.step)
    return trainer


def train(
    recipe: Recipe,
    run: Path,
    *,
    resume: bool = False,
    until: int | None = None,
    device: torch.device | str = "cpu",
    progress: bool = True,
    on_log: OnLog | None = None,
) -> Model:
    """Train to recipe.train.steps, or pause at step `until`; return the model with its averaged weights.

    Ctrl-C saves a checkpoint after the step in hand and is raised again: `resume` then continues bit for bit.
    """
    if until is not None:
        at_least("until", until, 1)
    trainer = _start(recipe, run, resume, device)
    last = min(until or recipe.train.steps, recipe.train.steps)
    log = Log(run / METRICS, trainer, on_log)
    try:
        for _ in _steps(trainer, last, progress):
            log.add(trainer.advance())
            if _due(trainer.step, recipe.train.save_every, last):
                trainer.save(run)
    except KeyboardInterrupt:
        if trainer.between_steps and trainer.step > 0:
            trainer.save(run)
        raise
    trainer.model.network.load_state_dict(trainer.average)
    return trainer.model.eval().requires_grad_(False)
