"""What the page shows, as HTML: pictures with their classes, the way there, figures, downloads. Nothing is fetched."""

import base64
import html
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor

from mvm.app.form import ODE, SDE, SampleForm
from mvm.app.lines import file_name
from mvm.app.plane import LogDensity
from mvm.app.walk import REFERENCE_NFE, Look, SideRun, Still, rms
from mvm.pictures import png_bytes, to_pillow, write_images

MOST_STILLS = 12  # on the way of one side; more are thinned out
TITLES = {ODE: "ODE, no noise on the way", SDE: "SDE, noise on the way"}
SIDE = (
    '<section class="mvm-side {kind}"><h3>{title} <small>rho = {rho:g}</small></h3>'
    '<div class="mvm-pictures">{pictures}</div><p class="mvm-state">{state}</p>'
    "<h4>The first picture on its way, from noise</h4>"
    '<div class="mvm-path"><table><tr><th>state</th>{states}</tr><tr><th>guess</th>{guesses}</tr>'
    "<tr><th>t</th>{times}</tr></table></div></section>"
)
TURN = "this.closest('.mvm-film').querySelectorAll('.mvm-frame').forEach((e, i) => { e.hidden = i != this.value })"
SLIDER = (
    '<label>Step <input type="range" min="0" max="{last}" value="{last}" aria-label="Step" oninput="{turn}"></label>'
)


def data_url(content: bytes, kind: str) -> str:
    """Return content as an address that holds it whole."""
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def image_tag(picture: Image.Image, words: str) -> str:
    """Return a picture for the page, with words for those who do not see it."""
    return f'<img src="{data_url(png_bytes(picture), "image/png")}" alt="{html.escape(words, quote=True)}">'


def download(content: bytes, kind: str, name: str, words: str) -> str:
    """Return a link that saves content under a name."""
    address = data_url(content, kind)
    return f'<a class="mvm-save" download="{html.escape(name, quote=True)}" href="{address}">{words}</a>'


def picture_file(images: Tensor, labels: Tensor, names: Sequence[str]) -> bytes:
    """Return the PNG that `mvm sample --out X.png` writes of these images."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "picture.png"
        write_images(path, images, labels, names)
        return path.read_bytes()


def chosen(stills: Sequence[Still], most: int = MOST_STILLS) -> list[Still]:
    """Return at most so many stills, evenly spread, the first and the last among them."""
    if len(stills) <= most:
        return list(stills)
    return [stills[int(i)] for i in torch.linspace(0, len(stills) - 1, most).round()]


def side_html(name: str, form: SampleForm, side: SideRun, names: Sequence[str]) -> str:
    """Return one side: its pictures above class and seed, how far it is or a link to save, the first one's way."""
    pictures = []
    for i, (image, label) in enumerate(zip(side.images, side.labels.tolist(), strict=True)):
        words = f"class {names[label]}, seed {int(form.seed) + i}"
        tag = image_tag(to_pillow(image), words)
        pictures.append(f"<figure>{tag}<figcaption>{html.escape(words)}</figcaption></figure>")
    state = f"step {side.index} of {side.steps}"
    if side.done:
        picture = picture_file(side.images, side.labels, names)
        state = f"done, {side.nfe} evaluations " + download(picture, "image/png", file_name(form, name), "Save picture")
    stills = chosen(side.path)
    cells = {
        row: "".join(
            f"<td>{image_tag(to_pillow(getattr(still, row)), f'{row} at t = {still.t:.3g}')}</td>" for still in stills
        )
        for row in ("state", "guess")
    }
    return SIDE.format(
        kind=name.lower(),
        title=TITLES[name],
        rho=side.settings.rho,
        pictures="".join(pictures),
        state=state,
        states=cells["state"],
        guesses=cells["guess"],
        times="".join(f"<td>{still.t:.3f}</td>" for still in stills),
    )


def no_side(form: SampleForm) -> str:
    """Return what is shown instead of the SDE where the solver has none."""
    words = f"The solver {form.solver} solves the ODE alone. For the SDE take adams, sa or euler-maruyama."
    return f'<section class="mvm-side sde"><h3>{TITLES[SDE]}</h3><p class="mvm-state">{words}</p></section>'


def table(names: Sequence[str], rows: Mapping[str, Sequence[str]], note: str = "") -> str:
    """Return a table with a column for each name, and a note below."""
    head = "".join(f"<th>{name}</th>" for name in names)
    body = (f"<tr><th>{row}</th>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>" for row, cells in rows.items())
    return f'<div class="mvm-figures"><table><tr><th></th>{head}</tr>{"".join(body)}</table>{note}</div>'


def figures_html(look: Look) -> str:
    """Return cost and distances of what is there: seconds, passes, grey levels."""
    sides, reference = list(look.sides.values()), look.reference
    rows = {
        "evaluations (NFE)": [str(side.nfe) for side in sides],
        "network passes": [str(side.passes) for side in sides],
        "seconds": [f"{side.seconds:.2f}" for side in sides],
    }
    if reference is not None:
        rows[f"RMS distance to the ODE of {REFERENCE_NFE} evaluations"] = [
            f"{rms(side.images, reference.images):.1f} of 255"
            if reference.done
            else f"step {reference.index} of {reference.steps}"
            for side in sides
        ]
    note = ""
    if len(sides) == 2 and all(side.done for side in sides):
        distance = rms(*(side.images for side in sides))
        note = f"<p>RMS distance between ODE and SDE pictures: <b>{distance:.1f}</b> grey levels of 255.</p>"
    return table(list(look.sides), rows, note)


def plane_figures(reached: Mapping[str, LogDensity], exact: LogDensity) -> str:
    """Return the mean log density of the particles at the end, next to that of exact draws."""
    scores = {**reached, "exact draws": exact}
    cells = [f"{score.mean:.2f} ± {score.error:.2f}" for score in scores.values()]
    return table(list(scores), {"mean log density under the exact law, nats": cells})


def problem_html(words: str) -> str:
    """Return what went wrong, in words; nothing for nothing."""
    return f'<p class="mvm-problem" role="alert">{html.escape(words)}</p>' if words else ""


def film_html(frames: Sequence[Sequence[bytes]], done: bool) -> str:
    """Return the newest frame while it runs, then all of them with a slider; a frame is a picture of each side."""
    last = len(frames) - 1
    shown = []
    for step in range(0 if done else last, last + 1):
        images = (
            f'<img src="{data_url(one, "image/webp")}" alt="particles after step {step}">' for one in frames[step]
        )
        shown.append(f'<div class="mvm-frame" {"" if step == last else "hidden"}>{"".join(images)}</div>')
    slider = SLIDER.format(last=last, turn=TURN) if done else ""
    return f'<div class="mvm-film">{"".join(shown)}{slider}</div>'
