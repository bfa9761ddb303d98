"""The field on the plane: exact laws of two numbers, and particles that ODE and SDE carry from noise to them."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mvm import noise
from mvm.app.form import ODE, RANGES, SDE, Range, seed_problem, takes_noise
from mvm.app.walk import Compute, moments
from mvm.options import choose
from mvm.oracle import Mixture, mixture
from mvm.path import MEAN_VELOCITY
from mvm.recipes import SampleConfig

PARTICLES = 400
PLANE_RANGES = {
    "nfe": Range("NFE", 1, 100, 13, 1, "evaluations of the exact field, each side", whole=True),
    "rho": RANGES["rho"],
}


def ring() -> Mixture:
    """Return eight equal Gaussians on a circle."""
    angle = torch.arange(8) * (math.pi / 4)
    return mixture(1.5 * torch.stack((angle.cos(), angle.sin()), 1), 0.12)


def moons() -> Mixture:
    """Return two half circles that reach into each other, each a chain of Gaussians."""
    angle = torch.linspace(0, math.pi, 24)
    upper = torch.stack((angle.cos() - 0.5, angle.sin() - 0.25), 1)
    return mixture(1.3 * torch.cat((upper, -upper)), 0.1)


def spiral() -> Mixture:
    """Return a spiral of one and a half turns, a chain of Gaussians."""
    angle = torch.linspace(0.15, 1, 60) * 3 * math.pi
    return mixture(angle[:, None] / (3 * math.pi) * 1.9 * torch.stack((angle.cos(), angle.sin()), 1), 0.08)


def uneven() -> Mixture:
    """Return a wide Gaussian that has most of the mass, and a narrow one."""
    return mixture(torch.tensor([[-0.8, -0.4], [1.4, 1.0]]), torch.tensor([0.6, 0.08]), torch.tensor([0.8, 0.2]))


LAWS: dict[str, Callable[[], Mixture]] = {
    "eight on a ring": ring,
    "two moons": moons,
    "spiral": spiral,
    "wide and narrow": uneven,
}


@dataclass(frozen=True)
class PlaneForm:
    """The fields of the plane as they are; `problems` must be empty before it is used."""

    law: str = "eight on a ring"
    solver: str = "adams"
    nfe: Any = PLANE_RANGES["nfe"].start
    rho: Any = PLANE_RANGES["rho"].start
    seed: Any = "0"

    def problems(self) -> dict[str, str]:
        """Return what is wrong, by field."""
        found = {name: bounds.problem(getattr(self, name)) for name, bounds in PLANE_RANGES.items()}
        found["seed"] = seed_problem(self.seed, PARTICLES)
        return {name: words for name, words in found.items() if words}

    @property
    def sides(self) -> tuple[str, ...]:
        return (ODE, SDE) if takes_noise(self.solver) else (ODE,)


class Scene(NamedTuple):
    """Particles (PARTICLES, 2) of each side at the times they have come to, from the start on: one entry a step."""

    steps: int
    times: list[float]
    paths: dict[str, list[Tensor]]


def scenes(law: Mixture, form: PlaneForm, compute: Compute | None = None) -> Iterator[Scene]:
    """Yield the particles after every step of both sides, which start from the same noise."""
    seeds = torch.arange(int(form.seed), int(form.seed) + PARTICLES)
    x = noise.initial(seeds, (2,), torch.float64)
    settings = {side: SampleConfig(form.solver, int(form.nfe), 0.0 if side == ODE else form.rho) for side in form.sides}
    base = law.field(MEAN_VELOCITY)
    walks = [moments(base, x, how, seeds, compute=compute) for how in settings.values()]
    scene: Scene | None = None
    for now in zip(*walks, strict=True):
        scene = scene or Scene(now[0].steps, [], {side: [] for side in form.sides})
        scene.times.append(now[0].t)
        for side, moment in zip(form.sides, now, strict=True):
            scene.paths[side].append(moment.state)
        yield scene


def law_named(name: str) -> Mixture:
    """Return one of the exact laws."""
    return choose("law", name, LAWS)()


class Score(NamedTuple):
    """A mean, and its standard error."""

    mean: float
    error: float


def log_density_score(law: Mixture, points: Tensor) -> Score:
    """Return the mean log density of points under the exact law of the data, in nats."""
    found = law.log_density(points, torch.zeros(1), MEAN_VELOCITY)
    return Score(float(found.mean()), float(found.std() / math.sqrt(len(found))))


def exact_score(law: Mixture, count: int = 20_000) -> Score:
    """Return the score of exact draws: what perfect particles would reach on average."""
    return log_density_score(law, law.sample(torch.arange(count)))
