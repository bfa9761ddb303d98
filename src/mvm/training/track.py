"""Trackers: the lines of metrics.jsonl, also sent to TensorBoard, Weights & Biases or MLflow."""

import importlib
import json
import secrets
from pathlib import Path
from typing import Any

from mvm.files import write_text
from mvm.options import choose, needs
from mvm.recipes import AnyRecipe, options
from mvm.untrusted import read_json

AUTO, NONE = "auto", "none"
PROJECT = "mvm"  # wandb's project, MLflow's experiment
SESSIONS = "trackers.json"  # in a run directory: the ids under which a resumed run goes on


class Tracker:
    """Takes every line of metrics.jsonl, with its "step"; numbers that are not finite come as they are.

    It opens with its first line: a run that logs nothing leaves nothing behind.
    """

    package: str  # what is imported
    extra = ""  # ours that installs it, if there is one

    def __init__(self, run: Path, recipe: AnyRecipe, step: int) -> None:
        self.run, self.recipe, self.step = run, recipe, step
        self.name = run.resolve().name
        self.opened: Any = None

    @classmethod
    def module(cls) -> Any:
        """Return the package."""
        return importlib.import_module(cls.package)

    def __call__(self, line: dict[str, Any]) -> None:
        if self.opened is None:
            self.opened = self._open()
        self._log(line["step"], {name: value for name, value in line.items() if name != "step"})

    def close(self) -> None:
        """End the session, if there is one."""
        if self.opened is not None:
            self._end()

    def known_id(self) -> str | None:
        """Return the session's id at an earlier start of this run; None where there was none."""
        known = self._ids().get(self.package)
        return known if isinstance(known, str) else None

    def keep_id(self, name: str) -> None:
        """Keep the session's id in the run directory."""
        write_text(self.run / SESSIONS, json.dumps({**self._ids(), self.package: name}, indent=2) + "\n")

    def _ids(self) -> dict[str, Any]:
        try:
            return read_json(self.run / SESSIONS)
        except (OSError, ValueError):
            return {}

    def _open(self) -> Any:
        raise NotImplementedError

    def _log(self, step: int, values: dict[str, Any]) -> None:
        raise NotImplementedError

    def _end(self) -> None:
        raise NotImplementedError


class TensorBoard(Tracker):
    """Event files in RUN/tensorboard; lines of steps that a restart does again are forgotten."""

    package, extra = "torch.utils.tensorboard", "track"

    def _open(self) -> Any:
        return self.module().SummaryWriter(self.run / "tensorboard", purge_step=self.step + 1)

    def _log(self, step: int, values: dict[str, Any]) -> None:
        for name, value in values.items():
            self.opened.add_scalar(name, value, step)

    def _end(self) -> None:
        self.opened.close()


class WandB(Tracker):
    """A run of Weights & Biases in project mvm; of lines that a restart sends again, it keeps the first."""

    package = "wandb"

    def _open(self) -> Any:
        name = self.known_id() or secrets.token_hex(8)
        self.keep_id(name)
        return self.module().init(
            project=PROJECT, name=self.name, id=name, resume="allow", dir=str(self.run), config=options(self.recipe)
        )

    def _log(self, step: int, values: dict[str, Any]) -> None:
        self.opened.log(values, step=step)

    def _end(self) -> None:
        self.opened.finish()


class MLflow(Tracker):
    """A run of MLflow in experiment mvm, at MLflow's own tracking address."""

    package = "mlflow"

    def _open(self) -> Any:
        mlflow, known = self.module(), self.known_id()
        mlflow.set_experiment(PROJECT)
        if known:
            mlflow.start_run(run_id=known)
            return mlflow
        self.keep_id(mlflow.start_run(run_name=self.name).info.run_id)
        mlflow.log_params(options(self.recipe))  # once: MLflow refuses a value that changed on resume
        return mlflow

    def _log(self, step: int, values: dict[str, Any]) -> None:
        self.opened.log_metrics(values, step=step)

    def _end(self) -> None:
        self.opened.end_run()


TRACKERS: dict[str, type[Tracker]] = {"tensorboard": TensorBoard, "wandb": WandB, "mlflow": MLflow}


def parse_trackers(names: str) -> tuple[type[Tracker], ...]:
    """Return the trackers in "auto", "none" or "wandb,tensorboard"; ValueError where one is unknown or not installed.

    auto: TensorBoard where it is installed. Asked before training, so that a missing package costs nothing.
    """
    if names == NONE:
        return ()
    asked = ["tensorboard"] if names == AUTO else dict.fromkeys(part.strip() for part in names.split(","))
    chosen = []
    for name in asked:
        tracker = choose("track", name, TRACKERS)
        try:
            tracker.module()
            chosen.append(tracker)
        except ImportError as error:
            if names != AUTO:
                raise ValueError(needs(f"track='{name}'", name, tracker.extra)) from error
    return tuple(chosen)


def trackers(names: str, run: Path, recipe: AnyRecipe, step: int) -> list[Tracker]:
    """Return the trackers of a run that starts after step `step`; names as in `parse_trackers`."""
    return [tracker(run, recipe, step) for tracker in parse_trackers(names)]
