"""What a run reports while it trains: metrics.jsonl, TensorBoard, Weights & Biases, MLflow; and when to stop it."""

import importlib
import json
import math
import secrets
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tqdm import tqdm

from mvm.checkpoint import METRICS, parsed_line
from mvm.distributed.processes import Processes
from mvm.files import write_text
from mvm.options import choose, needs
from mvm.recipes import AnyRecipe, options
from mvm.recipes.page import training_flops
from mvm.untrusted import cut, read_json

PATIENCE = 3  # steps in a row that may be skipped

AUTO, NONE = "auto", "none"  # of --track
PROJECT = "mvm"  # wandb's project, MLflow's experiment
SESSIONS = "trackers.json"  # in a run directory: the ids under which a resumed run goes on

OnLog = Callable[[dict[str, Any]], None]
Session = tuple[Callable[[int, dict[str, Any]], None], Callable[[], None]]  # log(step, values), end()


class StepRecord(NamedTuple):
    """One step as read from the device: the number of steps done, and its loss parts, grad_norm and lr."""

    step: int
    values: dict[str, float]

    @property
    def skipped(self) -> bool:
        """Whether the step was left out because its gradient was not finite."""
        return not math.isfinite(self.values["grad_norm"])


@dataclass
class Window:
    """Steps since the last log line: where they began, the sum of their losses. Saved, so that logs resume too."""

    start: int = 0
    total: float = 0.0
    left_out: int = 0  # skipped steps in this window
    skipped: int = 0  # skipped steps of the whole run
    in_a_row: int = 0

    def add(self, record: StepRecord) -> None:
        """Take in one step; three skipped in a row stop the run."""
        if not record.skipped:
            self.total, self.in_a_row = self.total + record.values["loss"], 0
            return
        self.left_out, self.skipped, self.in_a_row = self.left_out + 1, self.skipped + 1, self.in_a_row + 1
        if self.in_a_row >= PATIENCE:
            raise FloatingPointError(
                f"loss or gradient was not finite in {PATIENCE} steps in a row, up to step {record.step} "
                f"(loss {record.values['loss']}); checkpoints saved before are good. Try a lower --train.lr, or "
                "--train.clip 1 where it is off or larger, in a new run (--init-from this one, if it has a "
                "checkpoint), or --resume with --engine.precision fp32"
            )

    def mean(self, step: int) -> float:
        """Return the mean loss of the steps that counted."""
        counted = step - self.start - self.left_out
        return self.total / counted if counted else math.nan

    def next(self, step: int) -> "Window":
        """Return the window that begins after step `step`."""
        return Window(start=step, skipped=self.skipped, in_a_row=self.in_a_row)


class ThroughputMeter:
    """Images per second since the last reading and, where the matrix ceiling is known, MFU and memory."""

    def __init__(self, recipe: AnyRecipe, processes: Processes, ceiling: float | None, step: int) -> None:
        self.batch, self.processes, self.ceiling = recipe.train.batch, processes, ceiling
        self.flops = training_flops(recipe)
        self.clock, self.step = time.perf_counter(), step

    def read(self, step: int) -> dict[str, float]:
        """Return the figures of the steps since the last reading."""
        now = time.perf_counter()
        rate = (step - self.step) * self.batch / max(now - self.clock, 1e-9)
        self.clock, self.step = now, step
        figures = {"images_per_second": rate}
        if self.ceiling is not None:
            figures["mfu"] = rate * self.flops / (self.ceiling * self.processes.world)
        if self.processes.device.type == "cuda":
            figures["memory_gb"] = torch.cuda.max_memory_allocated(self.processes.device) / 1e9
        return figures

    @contextmanager
    def paused(self) -> Generator[None]:
        """Time spent inside is not counted: it goes to something else than steps."""
        start = time.perf_counter()
        yield
        self.clock += time.perf_counter() - start


def matrix_ceiling(device: torch.device, dtype: torch.dtype = torch.bfloat16, size: int = 8192) -> float | None:
    """Return the FLOP/s of a large matrix product on random data, measured in a moment; None on a CPU."""
    if device.type != "cuda":
        return None
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    for _ in range(3):
        a @ b
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(20):
        a @ b
    end.record()
    torch.cuda.synchronize(device)
    return 20 * 2 * size**3 / (start.elapsed_time(end) / 1000)


def warn(text: str) -> None:
    """Say something on stderr without breaking the progress bar."""
    tqdm.write(f"mvm: {text}", file=sys.stderr)


def keep_metrics(path: Path, step: int) -> None:
    """Drop log lines past `step`, left by steps that a restart does again; those that a crash cut off go too."""
    if path.is_file():
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        wanted = [line for line in lines if (entry := parsed_line(line)) is not None and entry["step"] <= step]
        write_text(path, "".join(f"{line}\n" for line in wanted))


def due(step: int, every: int, last: int) -> bool:
    """Return whether what happens every `every` steps, and after the last, happens after step `step`."""
    return step % every == 0 or step == last


class Tracker(ABC):
    """Takes every line of metrics.jsonl, with its "step"; numbers that are not finite come as they are.

    It opens with its first line: a run that logs nothing leaves nothing behind.
    """

    package: str  # what is imported
    extra = ""  # ours that installs it, if there is one

    def __init__(self, run: Path, recipe: AnyRecipe, step: int) -> None:
        self.run, self.recipe, self.step = run, recipe, step
        self.name = run.resolve().name
        self.session: Session | None = None

    @abstractmethod
    def open(self, module: Any) -> Session:
        """Begin or continue a session of the package; return what logs the values of a step, and what ends it."""

    def __call__(self, line: dict[str, Any]) -> None:
        if self.session is None:
            self.session = self.open(importlib.import_module(self.package))
        self.session[0](line["step"], {name: value for name, value in line.items() if name != "step"})

    def close(self) -> None:
        """End the session, if there is one."""
        if self.session is not None:
            self.session[1]()

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


class TensorBoard(Tracker):
    """Event files in RUN/tensorboard; lines of steps that a restart does again are forgotten."""

    package, extra = "torch.utils.tensorboard", "track"

    def open(self, module: Any) -> Session:
        writer = module.SummaryWriter(self.run / "tensorboard", purge_step=self.step + 1)

        def log(step: int, values: dict[str, Any]) -> None:
            for name, value in values.items():
                writer.add_scalar(name, value, step)

        return log, writer.close


class WandB(Tracker):
    """A run of Weights & Biases in project mvm; of lines that a restart sends again, it keeps the first."""

    package = "wandb"

    def open(self, module: Any) -> Session:
        name = self.known_id() or secrets.token_hex(8)
        self.keep_id(name)
        session = module.init(
            project=PROJECT, name=self.name, id=name, resume="allow", dir=str(self.run), config=options(self.recipe)
        )
        return lambda step, values: session.log(values, step=step), session.finish


class MLflow(Tracker):
    """A run of MLflow in experiment mvm, at MLflow's own tracking address."""

    package = "mlflow"

    def open(self, module: Any) -> Session:
        module.set_experiment(PROJECT)
        if known := self.known_id():
            module.start_run(run_id=known)
        else:
            self.keep_id(module.start_run(run_name=self.name).info.run_id)
            module.log_params(options(self.recipe))  # once: MLflow refuses a value that changed on resume
        return lambda step, values: module.log_metrics(values, step=step), module.end_run


TRACKERS: dict[str, type[Tracker]] = {"tensorboard": TensorBoard, "wandb": WandB, "mlflow": MLflow}


def parse_trackers(names: str) -> tuple[type[Tracker], ...]:
    """Return the trackers in "auto", "none" or "wandb,tensorboard"; ValueError where one is unknown or not installed.

    auto: TensorBoard where it is installed. Asked before training, so that a missing package costs nothing.
    """
    if names == NONE:
        return ()
    chosen = []
    for name in ["tensorboard"] if names == AUTO else dict.fromkeys(part.strip() for part in names.split(",")):
        tracker = choose("track", name, TRACKERS)
        try:
            importlib.import_module(tracker.package)
            chosen.append(tracker)
        except ImportError as error:
            if names != AUTO:
                raise ValueError(needs(f"track='{name}'", name, tracker.extra)) from error
    return tuple(chosen)


class Log:
    """One line every `log_every` steps, with the mean loss since the line before; written by the main process alone."""

    def __init__(
        self, run: Path, every: int, last: int, window: Window, meter: ThroughputMeter, on_line: OnLog | None = None
    ) -> None:
        self.path, self.every, self.last = run / METRICS, every, last
        self.window, self.meter, self.on_line = window, meter, on_line
        self.trackers: list[Tracker] = []

    def due(self, step: int) -> bool:
        """Whether a line is due after step `step`."""
        return due(step, self.every, self.last)

    def add(self, records: Sequence[StepRecord]) -> Window:
        """Take in steps, oldest first; write the lines that are due; return the window that is open now."""
        for record in records:
            self.window.add(record)
            if self.due(record.step):
                values = {**record.values, "loss": self.window.mean(record.step), "skipped": self.window.skipped}
                self.window = self.window.next(record.step)
                self.write({"step": record.step, **values, **self.meter.read(record.step)})
        return self.window

    def write(self, line: dict[str, Any]) -> None:
        """Append a line to metrics.jsonl, and hand it to the trackers and to on_line."""
        if not self.meter.processes.main:
            return
        known = {name: value if math.isfinite(value) else None for name, value in line.items()}  # what JSON has
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(known) + "\n")
        except OSError as error:
            warn(f"a log line could not be written ({error}); training goes on")
        self._each_tracker(lambda tracker: tracker(line), "training goes on without it")
        if self.on_line is not None:
            self.on_line(line)

    def close(self) -> None:
        """End the trackers."""
        self._each_tracker(lambda tracker: tracker.close(), "its last lines may be missing")

    def _each_tracker(self, call: Callable[[Tracker], None], then: str) -> None:
        """Call the trackers; one that fails is dropped, and `then` says what that means."""
        for tracker in list(self.trackers):
            try:
                call(tracker)
            except Exception as error:  # a full disk, a server that is away: no reason to stop training
                warn(f"{type(tracker).__name__} failed ({cut(error) or type(error).__name__}); {then}")
                self.trackers.remove(tracker)
