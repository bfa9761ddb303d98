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

# Okabe and Ito's colours: told apart by colour-blind readers, and in grey with the dashes below
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00")
DASHES = ("-", "--", "-.", ":", "-")
MARKERS = ("o", "s", "^", "D", "v")


@dataclass(frozen=True)
class Curve:
    """One line of a plot."""

    label: str
    x: Sequence[float]
    y: Sequence[float]


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


def require_plots() -> Any:
    """Return matplotlib.figure; without matplotlib, say so before the work, not after."""
    try:
        return importlib.import_module("matplotlib.figure")
    except ImportError as error:
        raise ValueError("reports need matplotlib; install it with: pip install 'mvm[plots]'") from error


def plot_svg(curves: Sequence[Curve], axes: Axes) -> str:
    """Return a plot as inline SVG."""
    figure = require_plots().Figure(figsize=(7.2, 3.6), layout="constrained")
    panel = figure.subplots()
    for i, curve in enumerate(curves):
        (line,) = panel.plot(curve.x, curve.y, label=curve.label, linewidth=1.8, markersize=5)
        line.set(color=COLOURS[i % 5], linestyle=DASHES[i % 5], marker=MARKERS[i % 5] if axes.markers else "")
    if axes.level is not None:
        panel.axhline(axes.level[1], color="#666666", linewidth=1, linestyle=(0, (1, 2)), label=axes.level[0])
    if axes.log_x:
        panel.set_xscale("log")
    if axes.log_y:
        panel.set_yscale("log")
        panel.yaxis.set_major_formatter("{x:g}")
        panel.yaxis.set_minor_formatter("{x:g}")  # a range within one decade has minor ticks alone
    if axes.ticks:
        panel.set_xticks(axes.ticks, [f"{tick:g}" for tick in axes.ticks], minor=False)
        panel.xaxis.minorticks_off()
    panel.set(xlabel=axes.x, ylabel=axes.y)
    panel.grid(alpha=0.25)
    panel.spines[["top", "right"]].set_visible(False)
    if len(curves) > 1 or axes.level is not None:
        panel.legend(frameon=False)
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    svg = buffer.getvalue()
    return svg[svg.index("<svg") :]  # the XML prologue has no place inside HTML


def picture(image: Image.Image, caption: str, width: int = 0) -> str:
    """Return a figure with an embedded PNG; width in CSS pixels, 0 for its own."""
    data = base64.b64encode(png_bytes(image)).decode()
    size = f' width="{width}"' if width else ""
    text = html.escape(caption)
    return (
        f'<figure><img src="data:image/png;base64,{data}" alt="{text}"{size}><figcaption>{text}</figcaption></figure>'
    )


def table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Return an HTML table; floats with three significant digits."""

    def cell(value: Any) -> str:
        return html.escape(f"{value:.3g}" if isinstance(value, float) else str(value))

    head = "".join(f"<th>{html.escape(name)}</th>" for name in header)
    body = "".join("<tr>" + "".join(f"<td>{cell(value)}</td>" for value in row) + "</tr>" for row in rows)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def paragraph(text: str) -> str:
    return f"<p>{html.escape(text)}</p>"


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
svg { max-width: 100%; height: auto }
.wide { overflow-x: auto } table { border-collapse: collapse; font-variant-numeric: tabular-nums }
th, td { text-align: right; padding: .3rem .9rem .3rem 0; border-bottom: 1px solid #e3e7ed }
th { font-weight: 600; color: #4a5565 }
th:first-child, td:first-child { text-align: left } code, pre { font: .92em/1.5 ui-monospace, monospace }
</style></head>
"""
