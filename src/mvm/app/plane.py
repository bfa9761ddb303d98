"""The field on the plane: exact laws of two numbers, particles that ODE and SDE carry from noise to them, pictures."""

import io
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from mvm import noise
from mvm.app.form import ODE, RANGES, SDE, NumberRange, choice_problem, seed_problem, step_solvers, takes_noise
from mvm.app.walk import Compute, sampler_states
from mvm.options import choose
from mvm.oracle import Mixture, mixture
from mvm.path import MEAN_VELOCITY
from mvm.recipes import SampleConfig

PARTICLES = 400
PLANE_RANGES = {
    "nfe": NumberRange("NFE", 1, 100, 13, 1, "evaluations of the exact field, each side", whole=True),
    "rho": RANGES["rho"],
}

COLOURS = {ODE: (0, 114, 178), SDE: (213, 94, 0)}  # blue and vermilion, which the colour-blind can distinguish too
MARKS = {ODE: "circles", SDE: "diamonds"}
DARKEST = 140  # grey of the highest density
REACH = 2.8  # the plane shown: [-REACH, REACH]^2
SIDE, SHARP = 400, 2  # pixels of a panel; drawn larger, then shrunk
CELLS, ARROWS, TRAILS = 100, 13, 12
GAP, HEAD = 12, 30


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
        problems = {name: bounds.problem(getattr(self, name)) for name, bounds in PLANE_RANGES.items()}
        problems["law"] = choice_problem("Law", self.law, LAWS)
        problems["solver"] = choice_problem("Solver", self.solver, step_solvers())
        problems["seed"] = seed_problem(self.seed, PARTICLES)
        return {name: words for name, words in problems.items() if words}

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
    walks = [sampler_states(base, x, how, seeds, compute=compute) for how in settings.values()]
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


class LogDensity(NamedTuple):
    """A mean, and its standard error."""

    mean: float
    error: float


def log_density_score(law: Mixture, points: Tensor) -> LogDensity:
    """Return the mean log density of points under the exact law of the data, in nats."""
    densities = law.log_density(points, torch.zeros(1), MEAN_VELOCITY)
    return LogDensity(float(densities.mean()), float(densities.std() / math.sqrt(len(densities))))


def exact_score(law: Mixture, count: int = 20_000) -> LogDensity:
    """Return the score of exact draws: what perfect particles would reach on average."""
    return log_density_score(law, law.sample(torch.arange(count)))


# Pictures, drawn with Pillow alone


def lattice(count: int) -> Tensor:
    """Return count x count points of the plane shown, row by row from above: (count^2, 2)."""
    across = (torch.arange(count, dtype=torch.float64) + 0.5) / count * 2 * REACH - REACH
    y, x = torch.meshgrid(-across, across, indexing="ij")
    return torch.stack((x, y), -1).reshape(-1, 2)


def density(law: Mixture, t: float) -> Image.Image:
    """Return the exact density at time t in grey, darkest where it is highest."""
    log = law.log_density(lattice(CELLS), torch.tensor([max(t, 1e-4)]), MEAN_VELOCITY)
    share = (log - log.max()).exp().sqrt()  # the root: low densities are seen, too
    grey = (255 - (255 - DARKEST) * share).round().to(torch.uint8).reshape(CELLS, CELLS)
    return Image.fromarray(grey.numpy()).resize((SIDE * SHARP, SIDE * SHARP), Image.Resampling.BICUBIC).convert("RGB")


def _pixels(points: Tensor) -> list[tuple[float, float]]:
    """Return points of the plane in pixels of a panel."""
    scaled = (points * torch.tensor([1.0, -1.0]) / REACH + 1) * (SIDE * SHARP / 2)
    return [(x, y) for x, y in scaled.tolist()]


def panel(law: Mixture, t: float, path: Sequence[Tensor], side: str, arrows: bool) -> Image.Image:
    """Return one side: density, field, particles."""
    picture, colour = density(law, t), COLOURS[side]
    draw = ImageDraw.Draw(picture)
    if arrows:  # from x towards x0_hat, at most a cell long
        start = lattice(ARROWS)
        ahead = law.denoise(start, torch.full((len(start),), max(t, 1e-4)), MEAN_VELOCITY) - start
        length = ahead.norm(dim=1, keepdim=True).clamp_min(1e-9)
        end = start + ahead / length * length.clamp_max(1.5 * REACH / ARROWS)
        seen = length[:, 0] > 0.05  # near t = 0 the field is x itself: nothing to point at
        for (x, y), (u, v) in zip(_pixels(start[seen]), _pixels(end[seen]), strict=True):
            draw.line((x, y, u, v), fill=(120, 130, 140), width=SHARP)
            draw.ellipse((x - 3, y - 3, x + 3, y + 3), fill=(120, 130, 140))
    for number in range(TRAILS):
        draw.line(_pixels(torch.stack([points[number] for points in path])), fill=colour, width=SHARP + 1)
    for x, y in _pixels(path[-1]):
        if side == ODE:
            draw.ellipse((x - 5, y - 5, x + 5, y + 5), fill=colour, outline=(255, 255, 255))
        else:
            draw.polygon(((x, y - 6), (x + 6, y), (x, y + 6), (x - 6, y)), fill=colour, outline=(255, 255, 255))
    draw.rectangle((0, 0, SIDE * SHARP - 1, SIDE * SHARP - 1), outline=(160, 165, 170), width=SHARP)
    return picture.resize((SIDE, SIDE), Image.Resampling.BOX)


def frame(law: Mixture, scene: Scene, step: int, side: str, arrows: bool = True) -> Image.Image:
    """Return one side after a step, under its name."""
    t = scene.times[step]
    canvas = Image.new("RGB", (SIDE, HEAD + SIDE), "white")
    draw, font = ImageDraw.Draw(canvas), ImageFont.load_default(16)
    canvas.paste(panel(law, t, scene.paths[side][: step + 1], side, arrows), (0, HEAD))
    draw.text((0, 6), f"{side} ({MARKS[side]})", fill=COLOURS[side], font=font)
    draw.text((SIDE, 6), f"step {step} of {scene.steps}, t = {t:.3g}", "black", font, anchor="ra")
    return canvas


def side_by_side(frames: Sequence[Image.Image]) -> Image.Image:
    """Return the sides of one step as one picture."""
    canvas = Image.new("RGB", (len(frames) * (SIDE + GAP) - GAP, HEAD + SIDE), "white")
    for i, one in enumerate(frames):
        canvas.paste(one, (i * (SIDE + GAP), 0))
    return canvas


def webp(frames: Sequence[Image.Image]) -> bytes:
    """Return one picture, or an animation that rests at its end, as WebP."""
    buffer = io.BytesIO()
    each = max(60, min(400, 4000 // len(frames)))  # milliseconds: about four seconds in all
    times = [each] * (len(frames) - 1) + [2000]
    options = {"quality": 70, "method": 0, "save_all": True, "append_images": frames[1:]}
    frames[0].save(buffer, "WEBP", duration=times, loop=0, **options)
    return buffer.getvalue()
