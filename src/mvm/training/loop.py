"""The one training loop."""

import json
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
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


def _steps(trainer: Trainer, progress: bool) -> Iterator[int]:
    total = trainer.recipe.train.steps
    with tqdm(total=total, initial=trainer.step, desc="train", unit="step", disable=not progress) as bar:
        while trainer.step < total:
            yield trainer.step
            bar.update(1)


def _due(step: int, every: int, total: int) -> bool:
    return step % every == 0 or step == total


Log = Callable[[dict[str, Any]], None]


def train(
    recipe: Recipe, run: Path, *, resume: bool = False, progress: bool = True, on_log: Log | None = None
) -> Model:
    """Train to recipe.train.steps in directory `run`; return the model with its averaged weights.

    Ctrl-C saves a checkpoint and is raised again: `resume` then continues bit for bit.
    """
    start = _open_run(recipe, run, resume)
    trainer = Trainer(recipe, training_data(recipe))
    if start is not None:
        trainer.restore(start)
    write_text(run / "recipe.json", to_json(recipe))
    metrics = run / "metrics.jsonl"
    _keep_metrics(metrics, trainer.step)
    config = recipe.train
    clock, clock_step, total = time.perf_counter(), trainer.step, 0.0
    try:
        for _ in _steps(trainer, progress):
            values = trainer.advance()
            total += values["loss"]
            if _due(trainer.step, config.log_every, config.steps):
                count, now = trainer.step - clock_step, time.perf_counter()
                line = {"step": trainer.step, **values, "loss": total / count}
                line["images_per_second"] = count * config.batch / (now - clock)
                if not math.isfinite(line["loss"]):
                    raise FloatingPointError(
                        f"the loss is {line['loss']} at step {trainer.step}; try a lower --train.lr"
                    )
                with metrics.open("a") as file:
                    file.write(json.dumps(line) + "\n")
                if on_log is not None:
                    on_log(line)
                clock, clock_step, total = now, trainer.step, 0.0
            if _due(trainer.step, config.save_every, config.steps):
                trainer.save(run)
    except KeyboardInterrupt:
        trainer.save(run)
        raise
    trainer.model.network.load_state_dict(trainer.average)
    return trainer.model.eval().requires_grad_(False)
