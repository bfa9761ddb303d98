"""One self-contained HTML page: plots as inline SVG, pictures as embedded PNG, no outside request."""

import base64
import html
import importlib
import io
import platform
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from string import Template
from textwrap import fill
from typing import Any

import torch
from PIL import Image

import mvm
from mvm.files import write_text
from mvm.options import needs
from mvm.untrusted import printable

TEMPLATE = Path(__file__).with_name("page.html")  # fields: $title, $lead, $body
# Okabe and Ito's colours but yellow, which colour-blind readers can distinguish; dashes and markers are for grey print
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


@dataclass(frozen=True)
class Curve:
    """One line of a plot; errors as long as y or empty, NaN where there is none."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    errors: Sequence[float] = ()
    style: Style | None = None


@dataclass(frozen=True)
class PlotAxes:
    """Labels, scales, ticks and ranges of a plot."""

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
    """Return matplotlib.figure; a ValueError where it is missing, so that this is known before the work."""
    try:
        return importlib.import_module("matplotlib.figure")
    except ImportError as error:
        raise ValueError(needs("a report", "matplotlib", "plots")) from error


def _literal(text: str) -> str:
    """Return text with dollar signs escaped, which matplotlib would read as mathematics."""
    return text.replace("$", r"\$")


def draw(panel: Any, curves: Sequence[Curve], axes: PlotAxes) -> None:
    """Draw curves and axes, but no legend, on a matplotlib panel."""
    for i, curve in enumerate(curves):
        style = curve.style or Style(COLOURS[i % len(COLOURS)], DASHES[i % len(DASHES)], MARKERS[i % len(MARKERS)])
        (line,) = panel.plot(curve.x, curve.y, label=_literal(curve.label), linewidth=1.8, markersize=5)
        line.set(color=style.colour, linestyle=style.dash, marker=style.marker if axes.markers else "")
        if not style.filled:
            line.set(markerfacecolor="white")
        if len(curve.errors):
            bars = {"ecolor": style.colour, "elinewidth": 1, "capsize": 2.5, "zorder": 1}
            panel.errorbar(curve.x, curve.y, curve.errors, fmt="none", **bars)
    if axes.level is not None:
        panel.axhline(axes.level[1], color="#666666", linewidth=1, linestyle=(0, (1, 2)), label=_literal(axes.level[0]))
    panel.set(xscale="log" if axes.log_x else "linear", yscale="log" if axes.log_y else "linear")
    if axes.log_y:
        panel.yaxis.set_major_formatter("{x:g}")
        panel.yaxis.set_minor_formatter("{x:g}")  # a range within one decade has minor ticks alone
    for axis, ticks in ((panel.xaxis, axes.ticks), (panel.yaxis, axes.ticks_y)):
        if len(ticks):
            axis.set_ticks(ticks, [f"{tick:g}" for tick in ticks], minor=False)
            axis.minorticks_off()
    panel.set(xlim=axes.range_x, ylim=axes.range_y, xlabel=_literal(axes.x), ylabel=_literal(axes.y))
    panel.set_title(_literal(axes.title), fontsize="medium", loc="left")
    panel.grid(alpha=0.25)
    panel.spines[["top", "right"]].set_visible(False)


def save_figure(figure: Any, target: Any, kind: str) -> None:
    """Write a matplotlib figure to a path or a buffer; the same figure gives the same bytes."""
    # the ids inside an SVG are hashes: salted with its words, those of two plots on one page do not collide
    words = [f"{panel.get_title(loc='left')}|{panel.get_xlabel()}|{panel.get_ylabel()}" for panel in figure.axes]
    with importlib.import_module("matplotlib").rc_context({"svg.hashsalt": " ".join(words)}):
        figure.savefig(target, format=kind, metadata={"Date": None} if kind == "svg" else None, dpi=150)


def legend_of(curves: Sequence[Curve], width: float) -> tuple[list[str], int, int]:
    """Return the labels, wrapped, of a legend below a panel of so many inches, its columns, and its lines."""
    room, mark = int(width * 13.5), 7  # letters in a line at this size; a curve's mark and a gap take seven
    labels = [fill(curve.label, room - mark) for curve in curves]
    letters = max((len(line) for label in labels for line in label.splitlines()), default=0) + mark
    columns = max(1, min(len(labels), room // letters))
    lines = sum(label.count("\n") + 1 for label in labels) if columns == 1 else -(-len(labels) // columns)
    return labels, columns, lines


def figure_of(
    panels: Sequence[tuple[Sequence[Curve], PlotAxes]], width: float, height: float, lines: int | None = None
) -> Any:
    """Return a figure with panels side by side, the legend of each below it.

    width, height: of one plot in inches. lines: room for legends, so that plots of several figures are equally high;
    default: what these need.
    """
    levels = [[Curve(axes.level[0], (), ())] if axes.level else [] for _, axes in panels]
    legends = [legend_of([*curves, *level], width) for (curves, _), level in zip(panels, levels, strict=True)]
    below = 0.2 * (max(needed for _, _, needed in legends) if lines is None else lines)
    figure = require_plots().Figure(figsize=(width * len(panels), height + below), layout="constrained")
    titles = [fill(axes.title, int(width * 10)) for _, axes in panels]
    most = max(title.count("\n") for title in titles)  # a title takes the same room in all
    parts = figure.subfigures(2, len(panels), squeeze=False, height_ratios=(height, max(below, 0.01)))
    for part, strip, (curves, axes), title, (labels, columns, _) in zip(*parts, panels, titles, legends, strict=True):
        panel = part.subplots()
        draw(panel, curves, replace(axes, title=(title or " ") + "\n" * (most - title.count("\n"))))
        handles, _ = panel.get_legend_handles_labels()
        how: dict[str, Any] = {"frameon": False, "fontsize": "small", "borderaxespad": 0}
        strip.legend(handles, [*map(_literal, labels)], loc="upper center", ncols=columns, **how)
    return figure


def plot_svg(curves: Sequence[Curve], axes: PlotAxes, size: tuple[float, float] = (5.4, 2.9)) -> str:
    """Return a plot as inline SVG, with a legend below where there are several names; size: in inches."""
    if len([curve for curve in curves if curve.label]) > 1 or axes.level is not None:
        return inline_svg(figure_of([(curves, axes)], *size))
    figure = require_plots().Figure(figsize=size, layout="constrained")
    draw(figure.subplots(), curves, axes)
    return inline_svg(figure)


def inline_svg(figure: Any) -> str:
    """Return a matplotlib figure as SVG to stand inside HTML, on the page's own background."""
    buffer = io.StringIO()
    figure.patch.set_alpha(0)
    for part in figure.subfigs:
        part.patch.set_alpha(0)
    for panel in figure.axes:
        panel.patch.set_alpha(0)
    save_figure(figure, buffer, "svg")
    svg = buffer.getvalue()
    return svg[svg.index("<svg") :]  # without the XML prologue, which HTML does not allow


class Html(str):
    """Text that is HTML already: tables and lists do not escape it."""


def picture(image: Image.Image, caption: str, width: int = 0, kind: str = "png") -> str:
    """Return a figure with an embedded picture, PNG or JPEG; width in CSS pixels, 0 for its own."""
    buffer, text, size = io.BytesIO(), html.escape(caption), f' width="{width}"' if width else ""
    image.save(buffer, kind, quality=90)  # of which PNG knows nothing
    source = f"data:image/{kind};base64,{base64.b64encode(buffer.getvalue()).decode()}"
    return f'<figure><img src="{source}" alt="{text}"{size}><figcaption>{text}</figcaption></figure>'


def thumbnail(path: Path, caption: str, width: int) -> str:
    """Return a figure with the picture in a file; a large one is reduced, as a page may hold many."""
    stored = 2 * width  # pixels, for screens of double density
    with Image.open(path) as image:
        if image.width <= stored:
            return picture(image, caption, min(image.width, width))
        size = stored, round(image.height * stored / image.width)
        return picture(image.convert("RGB").resize(size, Image.Resampling.LANCZOS), caption, width, "jpeg")


def table(header: Sequence[str], rows: Sequence[Sequence[Any]], kind: str = "") -> str:
    """Return an HTML table; floats with three significant digits. kind: its CSS class in page.html."""

    def cell(value: Any) -> str:
        if isinstance(value, Html):
            return value
        return html.escape(f"{value:.3g}" if isinstance(value, float) else str(value))

    head = "".join(f"<th>{html.escape(name)}</th>" for name in header)
    body = "".join("<tr>" + "".join(f"<td>{cell(value)}</td>" for value in row) + "</tr>" for row in rows)
    of_class = f' class="{kind}"' if kind else ""
    return f'<div class="wide"><table{of_class}><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def subheading(text: str) -> str:
    return f"<h3>{html.escape(text)}</h3>"


def bullets(texts: Sequence[str], kind: str = "") -> str:
    """Return a list with a point for each text; "" where there is none."""
    points = "".join(f"<li>{text if isinstance(text, Html) else html.escape(text)}</li>" for text in texts)
    return f'<ul class="{kind}">{points}</ul>' if texts else ""


def paragraph(text: str, kind: str = "") -> str:
    """Return a paragraph; kind: its CSS class in page.html."""
    of_class = f' class="{kind}"' if kind else ""
    return f"<p{of_class}>{html.escape(text)}</p>"


def finding(text: str) -> str:
    """Return what to conclude from the plot or table below, as it stands under a heading."""
    return paragraph(text, "finding")


def prose(text: str) -> Html:
    """Return a sentence in which text between backticks is set as code."""
    parts = html.escape(text).split("`")
    return Html("".join(f"<code>{part}</code>" if i % 2 else part for i, part in enumerate(parts)))


def block(text: str) -> str:
    """Return lines to be copied as they are."""
    return f"<pre>{html.escape(text)}</pre>"


def command(*words: object) -> str:
    """Return an mvm command as it is typed; what is pasted must not steer a terminal."""
    return printable(shlex.join(["mvm", *map(str, words)]))


def path_word(path: Path) -> str:
    """Return a path as a command takes it: one that begins with a dash would be an option."""
    return f"./{path}" if str(path).startswith("-") else str(path)


def folded(summary: str, *blocks: str) -> str:
    """Return HTML blocks that open with a click on the summary."""
    return f"<details><summary>{html.escape(summary)}</summary>{''.join(blocks)}</details>"


def exhibit(title: str, conclusion: str, block: str) -> str:
    """Return a small plot under its title and what to conclude from it."""
    return f"<figure>{subheading(title)}{finding(conclusion)}{block}</figure>"


def panels(figures: Sequence[str], kind: str = "panels") -> str:
    """Return figures side by side, as many as the window is wide for; "" where there is none."""
    return f'<div class="{kind}">{"".join(figures)}</div>' if figures else ""


@dataclass
class Page:
    """A report under construction."""

    title: str
    lead: str
    parts: list[str] = field(default_factory=list)

    def section(self, heading: str, *blocks: str) -> None:
        """Add a section of HTML blocks."""
        self.parts.append(f"<section><h2>{html.escape(heading)}</h2>{''.join(blocks)}</section>")

    def next_steps(self, steps: Sequence[tuple[str, str]]) -> None:
        """Add the box of commands to copy, each below a sentence; nothing where there is none."""
        lines = "".join(paragraph(sentence) + block(command) for sentence, command in steps)
        self.parts += [f'<section class="next"><h2>Next steps</h2>{lines}</section>'] if lines else []

    def write(self, path: Path) -> None:
        """Write the page, whole or not at all."""
        fields = {"title": html.escape(self.title), "lead": html.escape(self.lead), "body": "".join(self.parts)}
        write_text(path, Template(TEMPLATE.read_text(encoding="utf-8")).substitute(fields))


def provenance() -> list[tuple[str, str]]:
    """Return what the numbers were made with."""
    return [
        ("mvm", mvm.__version__),
        ("torch", torch.__version__),
        ("python", platform.python_version()),
        ("machine", f"{platform.machine()}, {torch.get_num_threads()} threads"),
    ]
