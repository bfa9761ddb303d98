"""What the page shows, as HTML: pictures with their classes, the way there, figures, downloads. Nothing is fetched."""

import base64
import html
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor

from mvm.app.form import ODE, SDE, Form
from mvm.app.lines import file_name
from mvm.app.plane import Score
from mvm.app.walk import REFERENCE_NFE, Look, Side, Still, rms
from mvm.pictures import png_bytes, to_pillow, write_images

MOST_STILLS = 12  # on the way of one side; more are thinned out
TITLES = {ODE: "ODE, no noise on the way", SDE: "SDE, noise on the way"}


def data_url(content: bytes, kind: str) -> str:
    """Return content as an address that holds it whole."""
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def image_tag(picture: Image.Image, words: str) -> str:
    """Return a picture for the page, with words for those who do not see it."""
    return f'<img src="{data_url(png_bytes(picture), "image/png")}" alt="{html.escape(words, quote=True)}">'


def download(content: bytes, kind: str, name: str, words: str) -> str:
    """Return a link that saves content under a name."""
    return (
        f'<a class="mvm-save" download="{html.escape(name, quote=True)}" href="{data_url(content, kind)}">{words}</a>'
    )


def picture_file(images: Tensor, labels: Tensor, names: Sequence[str]) -> bytes:
    """Return the PNG that `mvm sample --out X.png` writes of these images."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "picture.png"
        write_images(path, images, labels, names)
        return path.read_bytes()


def figures_of(side: Side, names: Sequence[str], seed: int) -> str:
    """Return the pictures, each above its class and seed."""
    told = []
    for place, (image, label) in enumerate(zip(side.images, side.labels.tolist(), strict=True)):
        words = f"class {names[label]}, seed {seed + place}"
        told.append(
            f"<figure>{image_tag(to_pillow(image), words)}<figcaption>{html.escape(words)}</figcaption></figure>"
        )
    return f'<div class="mvm-pictures">{"".join(told)}</div>'


def chosen(stills: Sequence[Still], most: int = MOST_STILLS) -> list[Still]:
    """Return at most so many stills, evenly spread, the first and the last among them."""
    if len(stills) <= most:
        return list(stills)
    return [stills[int(place)] for place in torch.linspace(0, len(stills) - 1, most).round()]


def path_of(side: Side) -> str:
    """Return the way of the first picture: states above, below what each was taken for."""
    stills = chosen(side.path)
    rows = {"state": [still.state for still in stills], "guess": [still.guess for still in stills]}
    cells = {
        name: "".join(
            f"<td>{image_tag(to_pillow(image), f'{name} at t = {still.t:.3g}')}</td>"
            for image, still in zip(images, stills, strict=True)
        )
        for name, images in rows.items()
    }
    times = "".join(f"<td>{still.t:.3f}</td>" for still in stills)
    body = "".join(f"<tr><th>{name}</th>{row}</tr>" for name, row in {**cells, "t": times}.items())
    return f'<div class="mvm-path"><table>{body}</table></div>'


def side_html(name: str, form: Form, side: Side, names: Sequence[str]) -> str:
    """Return one side: how far it is, its pictures, a link to save them, the way of the first."""
    rho = f"rho = {side.settings.rho:g}"
    told = f"step {side.index} of {side.steps}"
    if side.done:
        picture = picture_file(side.images, side.labels, names)
        told = f"done, {side.nfe} evaluations " + download(picture, "image/png", file_name(form, name), "Save picture")
    return (
        f'<section class="mvm-side {name.lower()}"><h3>{TITLES[name]} <small>{rho}</small></h3>'
        f'{figures_of(side, names, int(form.seed))}<p class="mvm-state">{told}</p>'
        f"<h4>The first picture on its way, from noise</h4>{path_of(side)}</section>"
    )


def no_side(form: Form) -> str:
    """Return what stands in the place of the SDE where the solver has none."""
    words = f"The solver {form.solver} solves the ODE alone. For the SDE take adams, sa or euler-maruyama."
    return f'<section class="mvm-side sde"><h3>{TITLES[SDE]}</h3><p class="mvm-state">{words}</p></section>'


def _row(words: str, *values: str) -> str:
    return f"<tr><th>{words}</th>{''.join(f'<td>{value}</td>' for value in values)}</tr>"


def figures_html(look: Look) -> str:
    """Return cost and distances of what is there: seconds, passes, grey levels."""
    sides = list(look.sides.values())
    head = "".join(f"<th>{name}</th>" for name in look.sides)
    rows = [
        _row("evaluations (NFE)", *(str(side.nfe) for side in sides)),
        _row("network passes", *(str(side.passes) for side in sides)),
        _row("seconds", *(f"{side.seconds:.2f}" for side in sides)),
    ]
    if look.reference is not None:
        rows.append(_row(f"RMS distance to the ODE of {REFERENCE_NFE} evaluations", *_to_reference(look)))
    told = ""
    if len(sides) == 2 and all(side.done for side in sides):
        distance = rms(*(side.images for side in sides))
        told = f"<p>RMS distance between ODE and SDE pictures: <b>{distance:.1f}</b> grey levels of 255.</p>"
    return f'<div class="mvm-figures"><table><tr><th></th>{head}</tr>{"".join(rows)}</table>{told}</div>'


def _to_reference(look: Look) -> list[str]:
    """Return the distances in words, or how far the long run is."""
    reference = look.reference
    assert reference is not None
    if not reference.done:
        return [f"step {reference.index} of {reference.steps}"] * len(look.sides)
    return [f"{rms(side.images, reference.images):.1f} of 255" for side in look.sides.values()]


def problem_html(words: str) -> str:
    """Return what went wrong, in words; nothing for nothing."""
    return f'<p class="mvm-problem" role="alert">{html.escape(words)}</p>' if words else ""


def _frame(sides: Sequence[bytes], step: int, hidden: str = "") -> str:
    """Return the pictures of one step, side by side where there is room."""
    images = [f'<img src="{data_url(one, "image/webp")}" alt="particles after step {step}">' for one in sides]
    return f'<div class="mvm-frame" {hidden}>{"".join(images)}</div>'


def film_html(frames: Sequence[Sequence[bytes]], done: bool) -> str:
    """Return the newest frame while it runs, then all of them with a slider; a frame is a picture of each side."""
    last = len(frames) - 1
    if not done:
        return f'<div class="mvm-film">{_frame(frames[-1], last)}</div>'
    told = "".join(_frame(sides, step, "" if step == last else "hidden") for step, sides in enumerate(frames))
    turn = "this.closest('.mvm-film').querySelectorAll('.mvm-frame').forEach((e, i) => { e.hidden = i != this.value })"
    slider = f'<input type="range" min="0" max="{last}" value="{last}" aria-label="Step" oninput="{turn}">'
    return f'<div class="mvm-film">{told}<label>Step {slider}</label></div>'


def plane_figures(reached: Mapping[str, Score], exact: Score) -> str:
    """Return the mean log density of the particles at the end, beside that of exact draws."""
    told = {**reached, "exact draws": exact}
    head = "".join(f"<th>{name}</th>" for name in told)
    row = _row("mean log density under the exact law, nats", *(f"{s.mean:.2f} ± {s.error:.2f}" for s in told.values()))
    return f'<div class="mvm-figures"><table><tr><th></th>{head}</tr>{row}</table></div>'
