"""One self-contained HTML page: plots as inline SVG, pictures as embedded PNG, no outside request."""

import base64
import html
import importlib
import io
import platform
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from PIL import Image

import mvm
from mvm.files import write_text
from mvm.generate import png_bytes
from mvm.options import needs

# Okabe and Ito's colours but yellow: told apart by colour-blind readers, and in grey by the dashes and markers below
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
DASHES = ("-", "--", "-.", ":", "-")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")


@dataclass(frozen=True)
class Style:
    """How a curve is drawn."""

    colour: str
    dash: str
    marker: str
    filled: bool = True


def style(i: int) -> Style:
    """Return the i-th curve's style where nothing else tells."""
    return Style(COLOURS[i % len(COLOURS)], DASHES[i % len(DASHES)], MARKERS[i % len(MARKERS)])


@dataclass(frozen=True)
class Curve:
    """One line of a plot; errors as long as y or empty, NaN where there is none."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    errors: Sequence[float] = ()
    style: Style | None = None


@dataclass(frozen=True)
class Axes:
    """What a plot says around its curves."""

    x: str
    y: str
    log_x: bool = False
    log_y: bool = False
    markers: bool = False
    level: tuple[str, float] | None = None  # a horizontal reference line
    ticks: Sequence[float] = ()
    ticks_y: Sequence[float] = ()
    range_x: tuple[float, float] | None = None
    range_y: tuple[float, float] | None = None
    title: str = ""


def require_plots() -> Any:
    """Return matplotlib.figure; without matplotlib, say so before the work, not after."""
    try:
        return importlib.import_module("matplotlib.figure")
    except ImportError as error:
        raise ValueError(needs("a report", "matplotlib", "plots")) from error


def _literal(text: str) -> str:
    """Return text that matplotlib does not take for mathematics."""
    return text.replace("$", r"\$")


def _draw_curve(panel: Any, curve: Curve, look: Style, markers: bool) -> None:
    (line,) = panel.plot(curve.x, curve.y, label=_literal(curve.label), linewidth=1.8, markersize=5)
    line.set(color=look.colour, linestyle=look.dash, marker=look.marker if markers else "")
    if not look.filled:
        line.set(markerfacecolor="white")
    if len(curve.errors):
        panel.errorbar(
            curve.x, curve.y, curve.errors, fmt="none", ecolor=look.colour, elinewidth=1, capsize=2.5, zorder=1
        )


def draw(panel: Any, curves: Sequence[Curve], axes: Axes) -> None:
    """Draw curves and what stands around them, but no legend, on a matplotlib panel."""
    for i, curve in enumerate(curves):
        _draw_curve(panel, curve, curve.style or style(i), axes.markers)
    if axes.level is not None:
        panel.axhline(axes.level[1], color="#666666", linewidth=1, linestyle=(0, (1, 2)), label=_literal(axes.level[0]))
    if axes.log_x:
        panel.set_xscale("log")
    if axes.log_y:
        panel.set_yscale("log")
        panel.yaxis.set_major_formatter("{x:g}")
        panel.yaxis.set_minor_formatter("{x:g}")  # a range within one decade has minor ticks alone
    for axis, ticks in ((panel.xaxis, axes.ticks), (panel.yaxis, axes.ticks_y)):
        if len(ticks):
            axis.set_ticks(ticks, [f"{tick:g}" for tick in ticks], minor=False)
            axis.minorticks_off()
    if axes.range_x:
        panel.set_xlim(*axes.range_x)
    if axes.range_y:
        panel.set_ylim(*axes.range_y)
    panel.set(xlabel=_literal(axes.x), ylabel=_literal(axes.y))
    panel.set_title(_literal(axes.title), fontsize="medium", loc="left")
    panel.grid(alpha=0.25)
    panel.spines[["top", "right"]].set_visible(False)


def save_figure(figure: Any, target: Any, kind: str) -> None:
    """Write a matplotlib figure to a path or a buffer; the same figure gives the same bytes."""
    # the ids inside an SVG are hashes: salted with its words, those of two plots on one page do not meet
    words = [f"{panel.get_title(loc='left')}|{panel.get_xlabel()}|{panel.get_ylabel()}" for panel in figure.axes]
    with importlib.import_module("matplotlib").rc_context({"svg.hashsalt": " ".join(words)}):
        figure.savefig(target, format=kind, metadata={"Date": None} if kind == "svg" else None, dpi=150)


def legend_rows(curves: Sequence[Curve], width: float) -> int:
    """Return the lines of a legend below a panel of so many inches."""
    letters = max((len(curve.label) for curve in curves), default=0) + 7  # a line and a gap take the room of seven
    columns = max(1, int(width * 13.5 / letters))  # letters to the inch at this size
    return -(-len(curves) // columns)


def figure_of(panels: Sequence[tuple[Sequence[Curve], Axes]], width: float, height: float) -> Any:
    """Return a figure with panels side by side, the legend of each below it; width and height of one in inches."""
    figure = require_plots().Figure(figsize=(width * len(panels), height), layout="constrained")
    for part, (curves, axes) in zip(figure.subfigures(1, len(panels), squeeze=False)[0], panels, strict=True):
        panel = part.subplots()
        draw(panel, curves, axes)
        columns = -(-len(curves) // max(1, legend_rows(curves, width)))
        part.legend(loc="outside lower center", ncols=max(1, columns), frameon=False, fontsize="small")
    return figure


def plot_svg(curves: Sequence[Curve], axes: Axes, size: tuple[float, float] = (7.2, 3.6)) -> str:
    """Return a plot as inline SVG; size: width and height in inches."""
    figure = require_plots().Figure(figsize=size, layout="constrained")
    panel = figure.subplots()
    draw(panel, curves, axes)
    if len([curve for curve in curves if curve.label]) > 1 or axes.level is not None:
        panel.legend(frameon=False)
    return inline_svg(figure)


def inline_svg(figure: Any) -> str:
    """Return a matplotlib figure as SVG to stand inside HTML."""
    buffer = io.StringIO()
    save_figure(figure, buffer, "svg")
    svg = buffer.getvalue()
    return svg[svg.index("<svg") :]  # the XML prologue has no place inside HTML


class Html(str):
    """Text that is HTML already: a table's cell or a list's point of it is not escaped."""


def embedded(data: bytes, kind: str, caption: str, width: int = 0) -> str:
    """Return a figure with an embedded picture of MIME type image/KIND; width in CSS pixels, 0 for its own."""
    size = f' width="{width}"' if width else ""
    text = html.escape(caption)
    source = f"data:image/{kind};base64,{base64.b64encode(data).decode()}"
    return f'<figure><img src="{source}" alt="{text}"{size}><figcaption>{text}</figcaption></figure>'


def picture(image: Image.Image, caption: str, width: int = 0) -> str:
    """Return a figure with an embedded PNG; width in CSS pixels, 0 for its own."""
    return embedded(png_bytes(image), "png", caption, width)


def thumbnail(path: Path, caption: str, width: int) -> str:
    """Return a figure with the picture in a file; a large one reduced, for a page of many must stay small."""
    stored = 2 * width  # pixels kept of it, for screens of double density
    with Image.open(path) as image:
        if image.width <= stored:
            return picture(image, caption, min(image.width, width))
        size = stored, round(image.height * stored / image.width)
        small = image.convert("RGB").resize(size, Image.Resampling.LANCZOS)
    buffer = io.BytesIO()
    small.save(buffer, format="JPEG", quality=90)
    return embedded(buffer.getvalue(), "jpeg", caption, width)


def table(header: Sequence[str], rows: Sequence[Sequence[Any]], kind: str = "") -> str:
    """Return an HTML table; floats with three significant digits. kind: its class, as the style below has them."""

    def cell(value: Any) -> str:
        if isinstance(value, Html):
            return value
        return html.escape(f"{value:.3g}" if isinstance(value, float) else str(value))

    head = "".join(f"<th>{html.escape(name)}</th>" for name in header)
    body = "".join("<tr>" + "".join(f"<td>{cell(value)}</td>" for value in row) + "</tr>" for row in rows)
    named = f' class="{kind}"' if kind else ""
    return f'<div class="wide"><table{named}><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def subheading(text: str) -> str:
    return f"<h3>{html.escape(text)}</h3>"


def bullets(texts: Sequence[str], kind: str = "") -> str:
    """Return a list, one text to a point; "" where there is none."""
    points = "".join(f"<li>{text if isinstance(text, Html) else html.escape(text)}</li>" for text in texts)
    return f'<ul class="{kind}">{points}</ul>' if texts else ""


def paragraph(text: str) -> str:
    return f"<p>{html.escape(text)}</p>"


def prose(text: str) -> Html:
    """Return a sentence in which `this` is what is typed."""
    parts = html.escape(text).split("`")
    return Html("".join(f"<code>{part}</code>" if i % 2 else part for i, part in enumerate(parts)))


def block(text: str) -> str:
    """Return lines to be copied as they are."""
    return f"<pre>{html.escape(text)}</pre>"


def folded(summary: str, *blocks: str) -> str:
    """Return ready HTML blocks that open with a click."""
    return f"<details><summary>{html.escape(summary)}</summary>{''.join(blocks)}</details>"


def panels(blocks: Sequence[str]) -> str:
    """Return small plots or pictures side by side, as many as the window is wide for; "" where there is none."""
    found = (one if one.startswith("<figure") else f"<figure>{one}</figure>" for one in blocks)
    return f'<div class="panels">{"".join(found)}</div>' if blocks else ""


@dataclass
class Page:
    """A report under construction."""

    title: str
    lead: str
    parts: list[str] = field(default_factory=list)

    def section(self, heading: str, *blocks: str) -> None:
        """Add a section of ready HTML blocks."""
        self.parts.append(f"<section><h2>{html.escape(heading)}</h2>{''.join(blocks)}</section>")

    def write(self, path: Path) -> None:
        """Write the page, whole or not at all."""
        body = f"<h1>{html.escape(self.title)}</h1><p class=lead>{html.escape(self.lead)}</p>{''.join(self.parts)}"
        write_text(path, f"{_HEAD}<title>{html.escape(self.title)}</title>{_STYLE}<body>{body}</body></html>\n")


def provenance() -> list[tuple[str, str]]:
    """Return what the numbers were made with."""
    return [
        ("mvm", mvm.__version__),
        ("torch", torch.__version__),
        ("python", platform.python_version()),
        ("machine", f"{platform.machine()}, {torch.get_num_threads()} threads"),
    ]


_HEAD = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
"""
_STYLE = """<style>
body { font: 16px/1.55 system-ui, sans-serif; color: #1c2430; background: #fff;
       margin: 0 auto; max-width: 60rem; padding: 2rem 1.25rem 4rem }
h1 { font-size: 1.9rem; line-height: 1.2; margin: 0 0 .4rem } h2 { font-size: 1.25rem; margin: 2.6rem 0 .6rem }
.lead { color: #4a5565; font-size: 1.08rem; margin-top: 0 } p { max-width: 46rem }
.row { display: flex; flex-wrap: wrap; gap: 1.5rem } figure { margin: .6rem 0; max-width: 100% }
figcaption { color: #4a5565; font-size: .9rem; margin-top: .35rem; max-width: 30rem }
img { image-rendering: pixelated; max-width: 100%; height: auto; border: 1px solid #e3e7ed }
svg { max-width: 100%; height: auto } .row > figure { flex: 0 1 auto }
h3 { font-size: 1.02rem; margin: 1.6rem 0 .3rem } ul { padding-left: 1.2rem; max-width: 46rem } li { margin: .2rem 0 }
.warnings { list-style: none; margin: 1rem 0; padding: .6rem 1rem; background: #fdf1e7; border-left: 4px solid #D55E00 }
.wide { overflow-x: auto } table { border-collapse: collapse; font-variant-numeric: tabular-nums }
th, td { text-align: right; padding: .3rem .9rem .3rem 0; border-bottom: 1px solid #e3e7ed }
th { font-weight: 600; color: #4a5565 }
th:first-child, td:first-child { text-align: left } code, pre { font: .92em/1.5 ui-monospace, monospace }
.text td, .text th, .plain td, .plain th, .cells :is(td, th):nth-child(2) { text-align: left }
.text td { overflow-wrap: anywhere } .text td:first-child { min-width: 7rem }
.cells, .plain, .grids { white-space: nowrap; font-size: .92rem }
.grids :is(td, th) { text-align: left; vertical-align: top } .grids figure { margin: 0 }
.grids img { image-rendering: auto; max-width: none }
.panels { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(17rem, 100%), 1fr)); gap: .4rem 1.2rem }
.panels svg, .panels img { width: 100% } .panels img { image-rendering: auto }
.curve svg { width: 100%; min-width: 36rem }
pre { background: #f4f6f9; border-radius: 4px; padding: .6rem .8rem; margin: .3rem 0 1rem;
      white-space: pre-wrap; overflow-wrap: anywhere }
li code { background: #f4f6f9; padding: .1em .3em; border-radius: 3px; white-space: nowrap }
.warnings li { margin: .5rem 0 } .warnings :is(code, pre) { background: #fff } .warnings pre { margin: .3rem 0 }
summary { cursor: pointer; margin: 1rem 0 .4rem }
@media print { figure, tr { break-inside: avoid } .wide { overflow: visible } }
</style></head>
"""
