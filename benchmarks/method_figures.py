"""Figures of docs/explanation/method.md and solver.md, on exact fields: under a minute on one core, no GPU.

    python benchmarks/method_figures.py --out docs/assets                     all of them
    python benchmarks/method_figures.py --out docs/assets --only path weights

path: densities, samples and x0_hat at four times. trajectories: the same noises by the ODE and by the SDE. animation:
the same as a GIF. architecture: the pixel DiT, with pictures by the shipped digits model. weights: what a network
learns, against t. The data of the first three are a mixture of six Gaussians in the plane, whose field is known.
Everything is a function of the seeds in this file.
"""

import argparse
import io
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image, ImageColor
from torch import Tensor

import mvm
from mvm import noise, oracle
from mvm.data import digits
from mvm.evaluation.report import COLOURS, require_plots
from mvm.files import atomic
from mvm.path import MEAN_VELOCITY, LinearFlow, Pair, Schedule, convert, equal_snr_time, from_pair, full_time
from mvm.path.perturb import noised
from mvm.pixels import to_unit
from mvm.solver import adams, solve

# ---- style: every figure takes it from here

BLUE, ORANGE, GREEN, PINK = COLOURS[:4]
INK, GREY, PALE = "#222222", "#8a8f98", "#d9dde3"
WIDTH, DPI = 7.2, 200  # inches, the width of a page's text; a PNG has 1,440 pixels
STYLE: dict[str, Any] = {
    "font.family": "DejaVu Sans", "font.size": 8.5, "axes.titlesize": 9, "axes.labelsize": 8.5,
    "xtick.labelsize": 7.5, "ytick.labelsize": 7.5, "legend.fontsize": 8, "text.color": INK, "axes.labelcolor": INK,
    "axes.edgecolor": GREY, "xtick.color": GREY, "ytick.color": GREY, "xtick.labelcolor": INK, "ytick.labelcolor": INK,
    "axes.linewidth": 0.7, "axes.spines.top": False, "axes.spines.right": False, "lines.linewidth": 1.6,
    "figure.facecolor": "white", "savefig.facecolor": "white", "mathtext.fontset": "dejavusans",
    "svg.fonttype": "path", "svg.hashsalt": "mvm",
}  # fmt: skip
PROCESSES = {"ODE (rho 0)": (0.0, BLUE), "SDE (rho 1)": (1.0, ORANGE)}


def new_figure(width: float, height: float) -> Any:
    """Return an empty figure in inches that no window knows of."""
    return require_plots().Figure(figsize=(width, height), layout="constrained")


def save(figure: Any, out: Path) -> None:
    """Write a figure, .png or .svg, with no date in it; a PNG has a palette."""
    with atomic(out) as temporary:
        if out.suffix == ".svg":
            figure.savefig(temporary, format="svg", metadata={"Date": None})
            return
        drawn = io.BytesIO()
        figure.savefig(drawn, format="png", dpi=DPI)
        Image.open(drawn).convert("RGB").quantize(160, dither=Image.Dither.NONE).save(
            temporary, format="PNG", optimize=True
        )


# ---- the data, the field and the trajectories

MEANS = ((1.7, 0.6), (0.4, 1.7), (-1.3, 1.3), (-1.7, -0.6), (-0.2, -1.5), (1.5, -1.2))
WEIGHTS = (2.0, 1.0, 1.0, 2.0, 1.0, 3.0)
STD = 0.17
REACH = 3.3  # of the axes
FEW = 16  # particles whose way is drawn
TIMES = (0.02, 0.15, 0.45, 1.0)  # of the figure of the path
DATA_STD = 0.5  # of one value, for the targets: photographs in [-1, 1] have about that


def law() -> oracle.Mixture:
    """Return the mixture."""
    return oracle.mixture(torch.tensor(MEANS, dtype=torch.float64), STD, torch.tensor(WEIGHTS))


@dataclass(frozen=True)
class Cloud:
    """States of particles over time: times (S,), from 1 to 0, and states (S, N, 2)."""

    times: list[float]
    states: Tensor

    def at(self, t: float) -> int:
        """Return the number of the time that is nearest to t in sqrt(t)."""
        return min(range(len(self.times)), key=lambda i: abs(math.sqrt(self.times[i]) - math.sqrt(t)))


def cloud(rho: float, count: int, nfe: int) -> Cloud:
    """Return the trajectories of the noises of seeds 0 to count - 1 under the exact field."""
    solver, seeds = adams(c=0.03), torch.arange(count)  # a larger c than the default: steps that can be seen
    x, states = noise.initial(seeds, (2,), torch.float64), []
    states.append(x)
    solve(
        law().field(MEAN_VELOCITY), x, solver=solver, nfe=nfe, rho=rho, seeds=seeds,
        on_step=lambda state: states.append(state.x.clone()),
    )  # fmt: skip
    return Cloud(list(solver.for_size(2).plan(MEAN_VELOCITY, nfe, rho).times), torch.stack(states))


def _density(axes: Any, t: float) -> None:
    """Shade the density of x_t, each panel by its own highest value."""
    from matplotlib.colors import LinearSegmentedColormap

    side = torch.linspace(-REACH, REACH, 181, dtype=torch.float64)
    points = torch.cartesian_prod(side, side)
    p = torch.exp(law().log_density(points, full_time(points, t), MEAN_VELOCITY)).reshape(181, 181).T
    shades = LinearSegmentedColormap.from_list("pale", ["#ffffff", "#8fb8de"])
    height = torch.sqrt(p / p.max()).numpy()
    axes.contourf(side.numpy(), side.numpy(), height, levels=[0.1, 0.25, 0.4, 0.55, 0.7, 0.85, 1.01], cmap=shades)


def _plane(axes: Any, title: str) -> None:
    axes.set(xlim=(-REACH, REACH), ylim=(-REACH, REACH), aspect="equal", xticks=(), yticks=(), title=title)
    for side in ("left", "bottom", "top", "right"):
        axes.spines[side].set(visible=True, color=PALE)


# ---- figures


def draw_path(out: Path, count: int, nfe: int) -> None:
    """The path at four times: density, samples, and an arrow from each to its x0_hat."""
    figure = new_figure(WIDTH, 2.1)
    centre = law().weights @ law().means
    for axes, t in zip(figure.subplots(1, len(TIMES)), TIMES, strict=True):
        _density(axes, t)
        x = law().sample_at(torch.arange(count), t, MEAN_VELOCITY)
        axes.scatter(*x[: count // 2].T.numpy(), s=1.5, color=GREY, alpha=0.7, linewidths=0)
        few = x[:32]
        aim = law().denoise(few, full_time(few, t), MEAN_VELOCITY) - few
        axes.quiver(
            *few.T.numpy(), *aim.T.numpy(), angles="xy", scale_units="xy", scale=1, width=0.006, headwidth=4.5,
            headlength=5, headaxislength=4.5, minlength=0, color=ORANGE, alpha=0.9,
        )  # fmt: skip
        if t == 1:
            axes.plot(*centre.tolist(), marker="P", markersize=6, color=INK, markeredgecolor="white", linestyle="none")
        _plane(axes, f"t = {t:g}" + (", noise" if t == 1 else ", near data" if t == TIMES[0] else ""))
    save(figure, out)


def draw_trajectories(out: Path, count: int, nfe: int) -> None:
    """The same noises by the ODE and by the SDE: both ends of the cloud, and some of its trajectories."""
    figure = new_figure(WIDTH, 4.4)
    for axes, (title, (rho, colour)) in zip(figure.subplots(1, 2), PROCESSES.items(), strict=True):
        found = cloud(rho, count, nfe)
        first = axes.scatter(*found.states[0].T.numpy(), s=3, color=GREY, alpha=0.4, linewidths=0)
        last = axes.scatter(*found.states[-1].T.numpy(), s=3, color=colour, alpha=0.5, linewidths=0)
        lines = found.states[:, :FEW]
        for i in range(lines.shape[1]):
            axes.plot(*lines[:, i].T.numpy(), color=colour, linewidth=0.65, alpha=0.8)
        begins = axes.scatter(*lines[0].T.numpy(), s=18, facecolor="white", edgecolor=INK, linewidths=0.8, zorder=3)
        ends = axes.scatter(*lines[-1].T.numpy(), s=18, color=INK, linewidths=0, zorder=3)
        _plane(axes, title)
        legend = axes.legend(
            (first, last, begins, ends), ("all at t = 1", "all at t = 0", f"{FEW} of them, t = 1", "the same, t = 0"),
            loc="upper center", bbox_to_anchor=(0.5, 0.005), ncols=2, frameon=False, handletextpad=0.2,
            columnspacing=1.5,
        )  # fmt: skip
        for handle in legend.legend_handles[:2]:
            handle.set(sizes=[14], alpha=1)
    save(figure, out)


def _frame(clouds: Iterable[Cloud], t: float) -> Image.Image:
    """Return one picture of the animation: all particles, and a few with the last part of their way."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    figure = new_figure(7.0, 3.75)
    for axes, found, (title, (_, colour)) in zip(figure.subplots(1, 2), clouds, PROCESSES.items(), strict=True):
        now, before = found.at(t), found.at(min(1.0, (math.sqrt(t) + 0.12) ** 2))
        axes.scatter(*found.states[now].T.numpy(), s=6, color=colour, linewidths=0)
        for way in found.states[before : now + 1, :FEW].unbind(1):
            axes.plot(*way.T.numpy(), color=INK, linewidth=0.9)
        axes.scatter(*found.states[now, :FEW].T.numpy(), s=16, color=INK, linewidths=0, zorder=3)
        _plane(axes, title)
    figure.supxlabel(f"t = {t:.2f}", fontsize=9)
    figure.set_dpi(100)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return Image.frombuffer("RGBA", canvas.get_width_height(), bytes(canvas.buffer_rgba())).convert("RGB")


def _flat(picture: Image.Image, levels: int = 7) -> Image.Image:
    """Return a picture of the animation in one palette for all: white, and its mixtures with the colours drawn."""
    steps = torch.linspace(0, 1, levels + 1)[1:, None]
    drawn = torch.tensor([ImageColor.getrgb(name) for name in (BLUE, ORANGE, INK, PALE)])
    palette = torch.cat([torch.full((1, 3), 255.0), *(255 + (colour - 255) * steps for colour in drawn)]).round()
    pixels = torch.frombuffer(bytearray(picture.tobytes()), dtype=torch.uint8).reshape(-1, 3)
    found, where = torch.unique(pixels, dim=0, return_inverse=True)
    nearest = torch.cdist(found.float(), palette).argmin(1).byte()
    flat = Image.frombytes("P", picture.size, nearest[where].numpy().tobytes())
    flat.putpalette(palette.byte().flatten().tolist())
    return flat


def draw_animation(out: Path, count: int, nfe: int, frames: int = 44) -> None:
    """The trajectories as an animation, at times uniform in sqrt(t)."""
    clouds = [cloud(rho, min(count, 450), nfe) for rho, _ in PROCESSES.values()]
    first, *others = [_flat(_frame(clouds, (1 - i / (frames - 1)) ** 2)) for i in range(frames)]
    durations = [700, *[80] * (frames - 2), 2500]
    with atomic(out) as temporary:
        first.save(
            temporary, format="GIF", save_all=True, append_images=others, duration=durations, loop=0, optimize=True
        )


@dataclass(frozen=True)
class Target:
    """What may be learned: a kind on a schedule, met at equal signal-to-noise with the mean-velocity path."""

    label: str
    kind: str
    schedule: Schedule
    colour: str
    dash: str
    where: float  # the t at which its label stands
    above: bool

    def _time(self, t: Tensor) -> Tensor:
        return equal_snr_time(t, MEAN_VELOCITY, self.schedule)

    def std(self, t: Tensor, data_std: float) -> Tensor:
        """Return the std of one value of the target: it is a x0 + b eps."""
        one, none, time = torch.ones_like(t), torch.zeros_like(t), self._time(t)
        of_x0 = from_pair(self.kind, Pair(one, none), time, self.schedule)
        return torch.hypot(data_std * of_x0, from_pair(self.kind, Pair(none, one), time, self.schedule))

    def weight(self, t: Tensor) -> Tensor:
        """Return the target's squared error for a squared error of 1 of x0_hat, at the same state."""
        x, time = torch.zeros_like(t), self._time(t)
        return convert(torch.ones_like(t), "x0", self.kind, x, time, self.schedule) ** 2


TARGETS = (
    Target("v", "v", MEAN_VELOCITY, ORANGE, "--", 2e-3, True),
    Target("u = √t v", "u", MEAN_VELOCITY, BLUE, "-", 2e-4, False),
    Target("flow matching, linear path", "flow", LinearFlow(), GREEN, "-.", 2e-4, True),
    Target("x0", "x0", MEAN_VELOCITY, PINK, ":", 4e-3, False),
)


def draw_weights(out: Path, count: int, nfe: int) -> None:
    """What the network learns, and what an error of x0_hat weighs in its loss, against t."""
    figure = new_figure(WIDTH, 2.9)
    t = torch.logspace(-4, -1e-4, 200, dtype=torch.float64)
    left, right = figure.subplots(1, 2)
    for target in TARGETS:
        look = {"color": target.colour, "linestyle": target.dash}
        left.plot(t.numpy(), target.std(t, DATA_STD).numpy(), **look)
        right.plot(t.numpy(), (target.weight(t) * t).numpy(), **look)  # u's weight is 1/t
        for axes, curve in ((left, target.std(t, DATA_STD)), (right, target.weight(t) * t)):
            near = int((t - target.where).abs().argmin())
            axes.annotate(
                target.label, (target.where, curve[near]), (0, 5 if target.above else -5), color=target.colour,
                textcoords="offset points", ha="left", va="bottom" if target.above else "top",
            )  # fmt: skip
    left.set(title="size of the target", ylabel="std of one value")
    right.set(title="weight of an error of x̂0", ylabel="relative to the loss of u")
    for axes in (left, right):
        axes.set(xscale="log", yscale="log", xlabel="t  (0: data, 1: noise)", xlim=(1e-4, 1))
        axes.grid(color=PALE, linewidth=0.5)
        axes.minorticks_off()
    left.set_ylim(0.3, 200)
    right.set_ylim(1e-4, 2e4)
    save(figure, out)


# ---- the architecture


class Diagram:
    """Boxes and arrows on a canvas of 100 x `height` units."""

    def __init__(self, height: float) -> None:
        self.figure = require_plots().Figure(figsize=(WIDTH, WIDTH * height / 100))
        self.axes = self.figure.add_axes((0, 0, 1, 1))
        self.axes.set(xlim=(0, 100), ylim=(0, height))
        self.axes.axis("off")

    def box(self, x: float, y: float, w: float, h: float, text: str, colour: str = GREY, dashed: bool = False) -> None:
        """Draw a rounded box with its lower left corner at (x, y); the first line of the text is bold."""
        from matplotlib.patches import FancyBboxPatch

        fill = "white" if dashed else colour + "1c"
        look = {"edgecolor": colour, "linewidth": 1.1, "linestyle": (0, (4, 2.5)) if dashed else "-"}
        shape = "round,pad=0,rounding_size=1.2"
        self.axes.add_patch(FancyBboxPatch((x, y), w, h, boxstyle=shape, facecolor=fill, **look))
        lines = text.split("\n")
        for number, line in enumerate(lines):
            place = y + h / 2 + 2.6 * ((len(lines) - 1) / 2 - number)
            weight = "bold" if number == 0 else "normal"
            self.words(x + w / 2, place, line, fontweight=weight, fontsize=8 if number == 0 else 7.5)

    def words(self, x: float, y: float, text: str, **how: Any) -> None:
        """Write centred words."""
        self.axes.text(x, y, text, **{"ha": "center", "va": "center", "fontsize": 7.5, **how})

    def picture(self, x: float, y: float, side: float, image: Tensor, text: str) -> None:
        """Draw a grey picture (H, W) in [-1, 1] with a name below it."""
        self.axes.imshow(
            image.numpy(),
            extent=(x, x + side, y, y + side),
            cmap="gray_r",
            vmin=-1,
            vmax=1,
            interpolation="nearest",
            zorder=2,
        )
        self.axes.plot([x, x + side, x + side, x, x], [y, y, y + side, y + side, y], color=INK, linewidth=0.8, zorder=3)
        self.words(x + side / 2, y + side + 2, text, fontweight="bold", fontsize=8.5)
        self.axes.set(xlim=(0, 100), ylim=self.axes.get_ylim(), aspect="auto")

    def arrow(self, *points: tuple[float, float], colour: str = INK, dashed: bool = False) -> None:
        """Draw a line through points with a head at the last."""
        look = {"color": colour, "linewidth": 1.1, "linestyle": (0, (4, 2.5)) if dashed else "-"}
        self.axes.plot(*zip(*points, strict=True), solid_capstyle="butt", **look)
        head = {"arrowstyle": "-|>", "color": colour, "linewidth": 0, "shrinkA": 0, "shrinkB": 0, "mutation_scale": 9}
        (x0, y0), (x1, y1) = points[-2:]
        far = math.hypot(x1 - x0, y1 - y0)
        start = (x1 - (x1 - x0) / far * 1.0, y1 - (y1 - y0) / far * 1.0)
        self.axes.annotate("", (x1, y1), start, arrowprops=head)


def pictures_of_one_step(t: float = 0.35, seed: int = 18) -> tuple[Tensor, Tensor, Tensor]:
    """Return x_t, u and x0_hat of a held-out digit by the shipped digits model."""
    model, held = mvm.load("digits"), digits("held-out")
    x0, label, seeds = to_unit(held.images[seed : seed + 1]), held.labels[seed : seed + 1], torch.tensor([seed])
    time = full_time(x0, t)
    state = noised(x0, noise.normal(seeds, noise.TRAIN, x0.shape[1:]), time, MEAN_VELOCITY, "u")
    with torch.no_grad():
        clean = model(state.x, time, label)
    u = convert(clean, "x0", "u", state.x, time, MEAN_VELOCITY)
    return state.x[0, 0], u[0, 0], clean[0, 0]


def draw_architecture(out: Path, count: int, nfe: int) -> None:
    """The pixel DiT from image to solver, with what conditions it and what is optional."""
    noisy, u, clean = pictures_of_one_step()
    plan = Diagram(62)
    middle = 34.0
    # the main row
    plan.picture(2, middle - 5.5, 11, noisy, "$x_t$")
    plan.box(17, middle - 5.5, 11.5, 11, "patches\nlinear\nmap", GREY)
    for shift in (1.6, 0.8, 0.0):
        plan.box(32.5 + shift, middle - 7.5 + shift, 18, 15, "" if shift else "L blocks\nattention\nSwiGLU MLP", BLUE)
    plan.box(56, middle - 5.5, 11.5, 11, "head\nlinear,\nunpatch", GREY)
    plan.picture(71.5, middle - 5.5, 11, u, "$u$")
    plan.picture(87, middle - 5.5, 11, clean, r"$\hat{x}_0 = x_t + \sqrt{t}\,u$")
    for start, end in ((13, 17), (28.5, 32.5), (52.1, 56), (67.5, 71.5), (82.5, 87)):
        plan.arrow((start, middle), (end, middle))
    # what conditions it
    plan.box(14, 52, 17, 8, "noise level √t\nsinusoids, MLP", GREEN)
    plan.box(36, 52, 13, 8, "condition c\nSiLU of the sum", GREEN)
    plan.box(54, 52, 15, 8, "class or text\nembedding", GREEN)
    plan.arrow((31, 56), (36, 56), colour=GREEN)
    plan.arrow((54, 56), (49, 56), colour=GREEN)
    plan.arrow((42.5, 52), (42.5, middle + 9.1), colour=GREEN)
    plan.arrow((42.5, 47.2), (61.75, 47.2), (61.75, middle + 5.5), colour=GREEN)
    plan.words(63, 47.2, "adaLN-Zero: shift, scale, in blocks a gate", ha="left", color=GREEN)
    # what is optional
    plan.box(17, 9, 20, 9.5, "REPA (training)\nprojector, cosine to a\nfrozen encoder's tokens", PINK, dashed=True)
    plan.arrow((36.5, middle - 7.5), (36.5, 23), (27, 23), (27, 18.5), colour=PINK, dashed=True)
    plan.box(41, 9, 18, 9.5, "inner head\na weaker u, for\ninternal guidance", PINK, dashed=True)
    plan.arrow((46.5, middle - 7.5), (46.5, 18.5), colour=PINK, dashed=True)
    plan.words(48, 23, "tokens of one block", ha="left", color=PINK)
    # the loop
    plan.box(76, 9, 22, 9.5, "solver step\nt to s: decay, past $\\hat{x}_0$,\nnoise where rho > 0", ORANGE)
    plan.arrow((92.5, middle - 5.5), (92.5, 18.5), colour=ORANGE)
    plan.arrow((59, 13.75), (76, 13.75), colour=PINK, dashed=True)
    plan.arrow((87, 9), (87, 4), (7.5, 4), (7.5, middle - 5.5), colour=ORANGE)
    plan.words(47, 5.9, "$x_s$, the next state: NFE evaluations from t = 1 to 0", color=ORANGE)
    save(plan.figure, out)


FIGURES: dict[str, tuple[Callable[[Path, int, int], None], str]] = {
    "path": (draw_path, ".png"),
    "trajectories": (draw_trajectories, ".png"),
    "animation": (draw_animation, ".gif"),
    "architecture": (draw_architecture, ".svg"),
    "weights": (draw_weights, ".svg"),
}


def draw_all(folder: Path, names: Sequence[str] = tuple(FIGURES), count: int = 1000, nfe: int = 140) -> list[Path]:
    """Write the figures into the folder and return their files; count: particles, nfe: steps of a trajectory."""
    from matplotlib import rc_context

    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name in names:
        draw, suffix = FIGURES[name]
        written.append(folder / f"method-{name}{suffix}")
        with rc_context(STYLE):
            draw(written[-1], count, nfe)
    return written


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="a folder")
    parser.add_argument("--only", nargs="+", choices=list(FIGURES), default=list(FIGURES), help="default: all")
    arguments = parser.parse_args()
    for path in draw_all(arguments.out, arguments.only):
        print(f"{path}: {path.stat().st_size / 1024:.0f} KiB")


if __name__ == "__main__":
    main()
