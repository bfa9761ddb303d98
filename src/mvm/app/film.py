"""Pictures of particles on the plane, over the exact density of their time; drawn with Pillow alone."""

import io
from collections.abc import Sequence

import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from mvm.app.form import ODE, SDE
from mvm.app.plane import Scene
from mvm.oracle import Mixture
from mvm.path import MEAN_VELOCITY

COLOURS = {ODE: (0, 114, 178), SDE: (213, 94, 0)}  # blue and vermilion, told apart by the colour-blind too
MARKS = {ODE: "circles", SDE: "diamonds"}
DARKEST = 140  # grey of the highest density
REACH = 2.8  # the plane shown: [-REACH, REACH]^2
SIDE, SHARP = 400, 2  # pixels of a panel; drawn larger, then shrunk
CELLS, ARROWS, TRAILS = 100, 13, 12
GAP, HEAD = 12, 30


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


def _draw_field(draw: ImageDraw.ImageDraw, law: Mixture, t: float) -> None:
    """Draw where the field points: from x towards x0_hat, at most a cell long."""
    start = lattice(ARROWS)
    ahead = law.denoise(start, torch.full((len(start),), max(t, 1e-4)), MEAN_VELOCITY) - start
    length = ahead.norm(dim=1, keepdim=True).clamp_min(1e-9)
    end = start + ahead / length * length.clamp_max(1.5 * REACH / ARROWS)
    seen = length[:, 0] > 0.05  # near t = 0 the field is x itself: nothing to point at
    for (x, y), (u, v) in zip(_pixels(start[seen]), _pixels(end[seen]), strict=True):
        draw.line((x, y, u, v), fill=(120, 130, 140), width=SHARP)
        draw.ellipse((x - 3, y - 3, x + 3, y + 3), fill=(120, 130, 140))


def _draw_particles(draw: ImageDraw.ImageDraw, path: Sequence[Tensor], side: str) -> None:
    """Draw the way of a few particles, and all of them where they are: circles for the ODE, diamonds for the SDE."""
    for number in range(TRAILS):
        draw.line(_pixels(torch.stack([points[number] for points in path])), fill=COLOURS[side], width=SHARP + 1)
    for x, y in _pixels(path[-1]):
        if side == ODE:
            draw.ellipse((x - 5, y - 5, x + 5, y + 5), fill=COLOURS[side], outline=(255, 255, 255))
        else:
            draw.polygon(((x, y - 6), (x + 6, y), (x, y + 6), (x - 6, y)), fill=COLOURS[side], outline=(255, 255, 255))


def panel(law: Mixture, t: float, path: Sequence[Tensor], side: str, arrows: bool) -> Image.Image:
    """Return one side: density, field, particles."""
    picture = density(law, t)
    draw = ImageDraw.Draw(picture)
    if arrows:
        _draw_field(draw, law, t)
    _draw_particles(draw, path, side)
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


def beside(frames: Sequence[Image.Image]) -> Image.Image:
    """Return the sides of one step as one picture."""
    canvas = Image.new("RGB", (len(frames) * (SIDE + GAP) - GAP, HEAD + SIDE), "white")
    for place, one in enumerate(frames):
        canvas.paste(one, (place * (SIDE + GAP), 0))
    return canvas


def webp(frames: Sequence[Image.Image]) -> bytes:
    """Return one picture, or an animation that rests at its end, as WebP."""
    buffer = io.BytesIO()
    each = max(60, min(400, 4000 // len(frames)))  # milliseconds: about four seconds in all
    times = [each] * (len(frames) - 1) + [2000]
    frames[0].save(
        buffer, "WEBP", quality=70, method=0, save_all=True, append_images=frames[1:], duration=times, loop=0
    )
    return buffer.getvalue()
