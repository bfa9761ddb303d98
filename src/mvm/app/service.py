"""What a visitor gets: models and seats shared by all, and named parts of the page as the work goes on; no gradio."""

import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from mvm.app import plane, show
from mvm.app.edit import (
    EditForm,
    EditRun,
    check_upload,
    drawn_picture,
    edit_by_steps,
    edit_command,
    edit_html,
    given_picture,
)
from mvm.app.form import ODE, SDE, SampleForm
from mvm.app.gate import Audience
from mvm.app.lines import command, python
from mvm.app.plane import PlaneForm
from mvm.app.walk import Look, look
from mvm.generate import require_same_data
from mvm.model import Model, is_model, load
from mvm.published import shipped_folder, shipped_models
from mvm.untrusted import cut

PAUSE = 0.1  # seconds between two updates of a page: more would not be seen
LONGEST_WAIT = 2.0  # seconds that a request waits at most for an older one of its visitor to be sent
POLL = 0.02  # seconds between two looks, while it waits, whether a newer one has come
KEPT = 64  # pictures that models drew to be edited
FAILURES = (ValueError, FloatingPointError, OSError)  # shown as messages, as the command line does
PROBLEM, FIGURES, FILM = "problem", "figures", "film"
COMMAND, PYTHON = "command", "python"

Parts = dict[str, str]
AnyForm = SampleForm | PlaneForm | EditForm


def code_part(side: str, kind: str) -> str:
    """Return the name of the part with a side's command or Python lines."""
    return f"{side.lower()}-{kind}"


class Shot(NamedTuple):
    """The page at a moment: what to show, made only if it is shown; last: it must be."""

    parts: Callable[[], Parts]
    last: bool


Make = Callable[[Any], Iterator[Shot]]


def offered(given: Sequence[str]) -> list[str]:
    """Return the names of models: those given, those in a given folder, then the shipped, smallest first.

    The first is what a visitor sees first, so a shipped one that is quick stands before the others.
    """
    names: list[str] = []
    for name in given:
        inside = sorted(str(path) for path in Path(name).glob("*") if path.is_dir() and is_model(str(path)))
        if not is_model(name) and not inside:
            raise ValueError(f"'{name}' is neither a run or an exported model, nor a folder that holds any")
        names += [name] if is_model(name) else inside

    def size(name: str) -> int:
        return sum(path.stat().st_size for path in shipped_folder(name).rglob("*") if path.is_file())

    return list(dict.fromkeys([*names, *sorted(shipped_models(), key=size)]))


class Shelf:
    """Models by name, on one device: loaded when first asked for, then shared by all visitors, who only read them."""

    def __init__(self, names: Sequence[str], device: torch.device, allow_download: bool = False) -> None:
        if not names:
            raise ValueError("there is no model to show; give a run directory: mvm app RUN")
        self.names, self.device, self.allow_download = list(names), device, allow_download
        self._loaded: dict[str, Model] = {}
        self._lock = threading.Lock()

    def get(self, name: str) -> Model:
        """Return a model; a name that is not offered is refused, as a visitor must not open any other folder."""
        if name not in self.names:
            raise ValueError(f"model '{cut(name)}' is not on this page; it has: {', '.join(self.names)}")
        with self._lock:
            if name not in self._loaded:
                model = load(name, allow_download=self.allow_download).to(self.device)
                model.require_labels("this page")
                self._loaded[name] = model
            return self._loaded[name]


class Turn:
    """One visitor's requests, numbered by the browser, as they may arrive out of order: only the newest goes on.

    Of equal numbers, which no browser sends, the one that came last is the newest.
    """

    def __init__(self) -> None:
        self._newest = (0, 0)
        self._arrivals = itertools.count(1)
        self._sending = threading.Lock()

    def __deepcopy__(self, memo: object) -> "Turn":
        """Return one for another visitor, which is what a page copies it for."""
        return Turn()

    def take(self, number: int) -> Callable[[], bool]:
        """Begin a request; return a function that says whether it is still the newest."""
        mine = (number, next(self._arrivals))
        self._newest = max(self._newest, mine)
        return lambda: self._newest == mine

    @contextmanager
    def sending(self, newest: Callable[[], bool]) -> Generator[bool]:
        """Lock the visitor's page, so that parts of a newer request are sent later; yields whether to send any.

        An older request does not wait for the lock, and none waits for long: its owner needs a thread to go on, and
        those that wait could have taken all threads of the page.
        """
        end = time.monotonic() + LONGEST_WAIT
        while not (locked := self._sending.acquire(timeout=POLL)) and newest() and time.monotonic() < end:
            pass
        try:
            yield newest()
        finally:
            if locked:
                self._sending.release()


class Desk:
    """Seats for visitors; requests of one visitor share a seat, for all but the newest are about to leave."""

    def __init__(self, seats: int) -> None:
        self.seats = seats
        self._taken: Counter[Turn] = Counter()
        self._lock = threading.Lock()

    @contextmanager
    def seat(self, turn: Turn) -> Generator[None]:
        """Take a seat for the time inside; a ValueError where all are taken."""
        with self._lock:
            if turn not in self._taken and len(self._taken) >= self.seats:
                raise ValueError(f"all {self.seats} places of this page are taken; try again in a few seconds")
            self._taken[turn] += 1
        try:
            yield
        finally:
            with self._lock:
                self._taken[turn] -= 1
                if not self._taken[turn]:
                    del self._taken[turn]


class Service:
    """What all visitors share: models, seats, and the processor, which takes one step of one visitor at a time."""

    def __init__(self, shelf: Shelf, seats: int) -> None:
        self.shelf, self.desk, self.compute = shelf, Desk(seats), threading.Lock()
        self.audience = Audience()
        self.uploads: dict[str, bytes] = {}  # pictures by their secret names; bounded where they come in
        self.drawn = lru_cache(KEPT)(lambda name, label: drawn_picture(shelf.get(name), label))  # to be edited

    def serve(self, turn: Turn, number: int, form: AnyForm, make: Make) -> Iterator[Parts]:
        """Yield problems (or that there are none), then parts, until a request of this visitor with a higher number."""
        newest = turn.take(number)
        try:
            for parts in self._parts(turn, form, make):
                with turn.sending(newest) as current:  # until the page asks for more, and so has shown this
                    if not current:
                        return
                    yield parts()
        except FAILURES as error:
            with turn.sending(newest) as current:
                if current:
                    yield {PROBLEM: show.problem_html(str(error))}

    def _parts(self, turn: Turn, form: AnyForm, make: Make) -> Iterator[Callable[[], Parts]]:
        """Yield what is to be shown next: the problems, then as much of the work as can be seen."""
        wrong = form.problems()
        yield lambda: {PROBLEM: show.problem_html(" · ".join(wrong.values()))}
        if wrong:
            return
        with self.desk.seat(turn):
            shown = 0.0
            for shot in make(form):
                if shot.last or time.perf_counter() - shown > PAUSE:
                    yield shot.parts
                    shown = time.perf_counter()

    def pictures(self, form: SampleForm) -> Iterator[Shot]:
        """Yield both sides of a form as they go, their figures, and the lines that make them again."""
        model, auto = self.shelf.get(form.model), self.shelf.get(form.auto) if form.auto else None
        if auto is not None:
            require_same_data(model, auto)
        lines = _lines(form, model)

        def seen(view: Look) -> Parts:
            sides = {name: show.side_html(name, form, side, model.classes) for name, side in view.sides.items()}
            return {**lines, **sides, FIGURES: show.figures_html(view)}

        for view in look(model, form, self.compute, auto):
            yield Shot(partial(seen, view), view.finished(form))

    def uploaded(self, name: str) -> bytes | None:
        """Return the picture that was sent and got this name; "": none was."""
        if name and name not in self.uploads:
            raise ValueError("your picture is no longer kept; choose it again")
        return self.uploads.get(name)

    def edits(self, form: EditForm) -> Iterator[Shot]:
        """Yield the results of an edit as they go, their cost, and the command that makes them again."""
        model = self.shelf.get(form.model)
        if isinstance(form.upload, str):
            form = replace(form, upload=self.uploaded(form.upload))
        task, drawn = form.task_for(model), None
        with self.compute:  # decoding too: of all visitors' uploads one at a time is unpacked
            if form.upload is not None:
                check_upload(form.upload)
            else:
                drawn = self.drawn(form.model, form.drawn)
            given = given_picture(form, model, task, drawn)

        def seen(run: EditRun) -> Parts:
            figures = {"evaluations (NFE)": run.nfe, "network passes": run.passes, "backward passes": run.products}
            cost = {name: [str(value)] for name, value in figures.items()} | {"seconds": [f"{run.seconds:.2f}"]}
            parts = {FILM: edit_html(form, run, given), FIGURES: show.table(["each result"], cost)}
            return {**parts, COMMAND: edit_command(form, model, task)}

        for run in edit_by_steps(model, task, given, form, self.compute):
            yield Shot(partial(seen, run), run.done)

    def plane(self, form: PlaneForm) -> Iterator[Shot]:
        """Yield the particles as they go; at the end the whole film, to save too, and how well they fit the law."""
        law, frames, pictures, scene = plane.law_named(form.law), [], [], None
        for scene in plane.scenes(law, form, self.compute):
            step = len(scene.times) - 1
            frames.append([plane.frame(law, scene, step, side) for side in form.sides])
            pictures.append([plane.webp([one]) for one in frames[-1]])
            yield Shot(lambda: {FILM: show.film_html(pictures, False)}, last=False)
        assert scene is not None
        whole = plane.webp([plane.side_by_side(sides) for sides in frames])
        saved = show.download(whole, "image/webp", "particles.webp", "Save animation")
        reached = {side: plane.log_density_score(law, path[-1]) for side, path in scene.paths.items()}
        figures = show.plane_figures(reached, plane.exact_score(law))
        yield Shot(lambda: {FILM: show.film_html(pictures, True) + saved, FIGURES: figures}, last=True)


def _lines(form: SampleForm, model: Model) -> Parts:
    """Return command and Python lines of both sides; for a side that the solver does not have, a note."""
    none = f"# {form.solver} solves the ODE alone"
    parts = {SDE: show.no_side(form)} if SDE not in form.sides else {}
    for side in (ODE, SDE):
        there = side in form.sides
        parts[code_part(side, COMMAND)] = command(form, side, model) if there else none
        parts[code_part(side, PYTHON)] = python(form, side, model) if there else none
    return parts
