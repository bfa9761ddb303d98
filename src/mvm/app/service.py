"""What a request gets: named parts of the page as HTML or text, newer ones as the work goes on. Knows no gradio."""

import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

from mvm.app import film, show
from mvm.app.form import ODE, SDE, Form
from mvm.app.lines import command, python
from mvm.app.plane import PlaneForm, exact_score, law_named, log_density_score, scenes
from mvm.app.shelf import Shelf
from mvm.app.turns import Desk, Turn
from mvm.app.walk import Look, look
from mvm.model import Model

PAUSE = 0.1  # seconds between two updates of a page: more would not be seen
FAILURES = (ValueError, FloatingPointError, OSError)  # as the command line: told in words
PROBLEM, FIGURES, FILM = "problem", "figures", "film"
COMMAND, PYTHON = "command", "python"

Parts = dict[str, str]


def code_part(side: str, kind: str) -> str:
    """Return the name of the part with a side's command or Python lines."""
    return f"{side.lower()}-{kind}"


class Shot(NamedTuple):
    """The page at a moment: what to show, made only if it is shown; last: it must be."""

    parts: Callable[[], Parts]
    last: bool


Make = Callable[[Any], Iterator[Shot]]


class Service:
    """What all visitors share: models, seats, and the processor, which takes one step of one visitor at a time."""

    def __init__(self, shelf: Shelf, seats: int) -> None:
        self.shelf, self.desk, self.compute = shelf, Desk(seats), threading.Lock()

    def serve(self, turn: Turn, number: int, form: Form | PlaneForm, make: Make) -> Iterator[Parts]:
        """Yield problems (or that there are none), then parts, until a request of this visitor with a higher number."""
        newest = turn.take(number)
        try:
            for parts in self._parts(turn, form, make):
                with turn.telling(newest) as heard:  # until the page asks for more, and so has shown this
                    if not heard:
                        return
                    yield parts()
        except FAILURES as error:
            with turn.telling(newest) as heard:
                if heard:
                    yield {PROBLEM: show.problem_html(str(error))}

    def _parts(self, turn: Turn, form: Form | PlaneForm, make: Make) -> Iterator[Callable[[], Parts]]:
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

    def pictures(self, form: Form) -> Iterator[Shot]:
        """Yield both sides of a form as they go, their figures, and the lines that make them again."""
        model = self.shelf.get(form.model)
        lines = _lines(form, model)
        for found in look(model, form, self.compute):
            yield Shot(partial(_seen, found, form, model, lines), found.finished(form))

    def plane(self, form: PlaneForm) -> Iterator[Shot]:
        """Yield the particles as they go; at the end the whole film, to save too, and how well they fit the law."""
        law, frames, pictures, scene = law_named(form.law), [], [], None
        for scene in scenes(law, form, self.compute):
            step = len(scene.times) - 1
            frames.append([film.frame(law, scene, step, side) for side in form.sides])
            pictures.append([film.webp([one]) for one in frames[-1]])
            yield Shot(lambda: {FILM: show.film_html(pictures, False)}, last=False)
        assert scene is not None
        saved = show.download(
            film.webp([film.beside(sides) for sides in frames]), "image/webp", "particles.webp", "Save animation"
        )
        reached = {side: log_density_score(law, path[-1]) for side, path in scene.paths.items()}
        told = show.plane_figures(reached, exact_score(law))
        yield Shot(lambda: {FILM: show.film_html(pictures, True) + saved, FIGURES: told}, last=True)


def _seen(found: Look, form: Form, model: Model, lines: Parts) -> Parts:
    sides = {name: show.side_html(name, form, side, model.classes) for name, side in found.sides.items()}
    return {**lines, **sides, FIGURES: show.figures_html(found)}


def _lines(form: Form, model: Model) -> Parts:
    """Return command and Python lines of both sides, and what stands in the place of a side that there is not."""
    none = f"# {form.solver} solves the ODE alone"
    found = {SDE: show.no_side(form)} if SDE not in form.sides else {}
    for side in (ODE, SDE):
        there = side in form.sides
        found[code_part(side, COMMAND)] = command(form, side, model) if there else none
        found[code_part(side, PYTHON)] = python(form, side, model) if there else none
    return found
