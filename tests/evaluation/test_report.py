"""The report: one file that needs nothing else, whatever text goes into it."""

import base64
import io
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from PIL import Image

from mvm import files
from mvm.evaluation import report
from mvm.evaluation.report import (
    Curve,
    Html,
    Page,
    PlotAxes,
    bullets,
    figure_of,
    legend_of,
    paragraph,
    picture,
    plot_svg,
    provenance,
    table,
)
from test_demo import without_conclusion

NASTY = "<script>alert('x')</script> & \"quoted\" {title} ² \\1"


def outside_requests(text):
    """Addresses a browser would fetch: attributes that load, and CSS; names of XML namespaces are not fetched."""
    loads = re.findall(r"""(?:\ssrc|\shref|xlink:href|\sposter|\sdata|\ssrcset)\s*=\s*["']?([^"'\s>]+)""", text)
    loads += re.findall(r"url\(([^)]*)\)", text) + re.findall(r"@import\s+(\S+)", text)
    return [address for address in loads if not address.strip("\"'").startswith(("#", "data:"))]


class Texts(HTMLParser):
    """What a reader sees, by the tag it stands in; every tag that is opened must be closed, in order."""

    VOID = frozenset(("meta", "link", "img", "br", "path", "use", "rect"))

    def __init__(self):
        super().__init__()
        self.open, self.pairs, self.seen = [], [], []

    def handle_starttag(self, tag, attrs):
        self.seen.append(tag)
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.seen.append(tag)

    def handle_endtag(self, tag):
        if tag not in self.VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        self.pairs.append((self.open[-1] if self.open else "", data))

    @property
    def texts(self):
        return [text for _, text in self.pairs]

    @property
    def text(self):
        return " ".join(" ".join(self.texts).split())

    def of(self, tag):
        return [text for kind, text in self.pairs if kind == tag]


def read(text):
    reader = Texts()
    reader.feed(text)
    assert reader.open == []
    return reader


def test_a_plot_or_table_without_conclusion_is_found():
    told, svg = report.finding("It falls."), "<svg></svg>"
    assert (
        without_conclusion(f"<h2>a</h2>{told}{svg}{table(['x'], [[1]])}{report.exhibit('b', 'It rises.', svg)}") == []
    )
    assert without_conclusion(f"<h2>a</h2>{told}<h3>b</h3>{svg}<h2>c</h2>{table(['x'], [[1]])}") == ["b", "c"]


def test_the_box_of_next_steps(tmp_path):
    page = Page("title", "lead")
    page.next_steps([])
    assert page.parts == []
    page.next_steps([("Do <this>.", report.command("sample", "a b", "--out", "x\x1b.png"))])
    box = read("".join(page.parts))
    assert box.of("h2") == ["Next steps"]
    assert box.of("p") == ["Do <this>."]
    assert box.of("pre") == [r"mvm sample 'a b' --out 'x\x1b.png'"]
    assert report.path_word(Path("-x")) == "./-x"


@pytest.fixture
def image():
    return Image.fromarray(torch.arange(48, dtype=torch.uint8).reshape(6, 8).numpy())


@pytest.fixture
def page(image):
    made = Page(NASTY, NASTY)
    axes = PlotAxes(
        NASTY.replace("\\1", ""), "y", log_x=True, log_y=True, markers=True, level=("level", 0.3), ticks=(1, 3)
    )
    curves = [Curve("a <b> & c", [1, 2, 3], [0.5, 0.4, 0.1]), Curve("other", [1, 2, 3], [0.6, 0.2, 0.3])]
    made.section(NASTY, paragraph(NASTY), plot_svg(curves, axes), picture(image, NASTY, width=80))
    made.section("plain", table(["name", NASTY], [[NASTY, 0.123456], ["n", 7]]))
    return made


def test_page_is_self_contained(page, tmp_path):
    page.write(tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert outside_requests(text) == []
    assert "<svg" in text
    assert "data:image/png;base64," in text
    assert "<script" not in text.lower()
    assert text.lower().startswith("<!doctype html>")
    assert 'charset="utf-8"' in text
    assert "<?xml" not in text
    assert text.count("<!DOCTYPE") == 0  # matplotlib's own prologue is cut off


def test_text_survives_escaping(page, tmp_path):
    page.write(tmp_path / "report.html")
    reader = read((tmp_path / "report.html").read_text(encoding="utf-8"))
    assert reader.texts.count(NASTY) == 8  # title, h1, lead, h2, paragraph, caption, table head, cell
    assert "script" not in reader.seen
    assert {"svg", "img", "table", "figure", "h1", "h2"} <= set(reader.seen)


def test_a_title_with_the_templates_own_words(tmp_path):
    Page("braces: {body}", "lead").write(tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert re.findall(r"<(title|h1)>(.*?)</\1>", text, re.DOTALL) == [
        (tag, "braces: {body}") for tag in ("title", "h1")
    ]


def test_picture_holds_the_very_pixels(image):
    text = picture(image, "cap<tion>", width=80)
    assert 'width="80"' in text
    assert "cap&lt;tion&gt;" in text
    data = re.search(r'src="data:image/png;base64,([^"]+)"', text).group(1)
    back = Image.open(io.BytesIO(base64.b64decode(data)))
    assert back.tobytes() == image.tobytes()
    assert "width" not in picture(image, "caption")


def test_table():
    text = table(["a", "b"], [["x", 0.123456], ["<y>", 12345.678], ["z", 3]])
    cells = re.findall(r"<td>(.*?)</td>", text)
    assert cells == ["x", "0.123", "&lt;y&gt;", "1.23e+04", "z", "3"]
    assert re.findall(r"<th>(.*?)</th>", text) == ["a", "b"]


def test_plot_shows_labels_and_points():
    svg = plot_svg([Curve("alpha", [1, 2], [3, 4]), Curve("beta", [1, 2], [4, 3])], PlotAxes("horizontal", "vertical"))
    assert svg.startswith("<svg")
    assert svg.rstrip().endswith("</svg>")
    assert outside_requests(svg) == []
    for colour in report.COLOURS[:2]:
        assert colour.lower() in svg.lower()


def test_plot_of_one_point_and_of_many_curves():
    assert "<svg" in plot_svg([Curve("one", [1], [2])], PlotAxes("x", "y", log_x=True, log_y=True, markers=True))
    assert "<svg" in plot_svg([Curve(str(i), [1, 2], [i, i]) for i in range(12)], PlotAxes("x", "y"))


def test_plots_side_by_side_are_equally_high_and_their_words_stay_inside():
    """Whatever their legends and titles: a long label is wrapped, and short ones stand in columns."""
    FigureCanvasAgg = pytest.importorskip("matplotlib.backends.backend_agg").FigureCanvasAgg
    few = [Curve("adams", [1, 2], [3, 4]), Curve("sa", [1, 2], [3, 4])]
    long = "adams, SDE (rho 0.75), guidance auto 1.42 by imagenette-ddt-s@4000 [1a2b3c4d] on [0.2, 0.8]"
    many = [Curve(f"{long} {i}", [1, 2], [i, 4]) for i in range(6)]
    assert legend_of(few, 4.6) == (["adams", "sa"], 2, 1)
    labels, columns, lines = legend_of(many, 4.6)
    assert (columns, lines) == (1, 12)
    assert [label.replace("\n", " ") for label in labels] == [curve.label for curve in many]
    figure = figure_of([(few, PlotAxes("x", "y")), (many, PlotAxes("x", "y", title=long))], 4.6, 3.0)
    assert figure.get_size_inches().tolist() == pytest.approx([9.2, 3.0 + 12 * 0.2])
    FigureCanvasAgg(figure).draw()
    left, right = (panel.get_window_extent() for panel in figure.axes)
    assert (left.y0, left.y1) == pytest.approx((right.y0, right.y1), abs=2)  # pixels, of 300
    words = [text for part in figure.subfigs for legend in part.legends for text in legend.get_texts()]
    words += [panel._left_title for panel in figure.axes]
    assert {text.get_text().replace("\n", " ").strip() for text in words} >= {curve.label for curve in few + many} | {
        long
    }
    for text in words:
        extent = text.get_window_extent()
        assert 0 <= extent.x0 <= extent.x1 <= figure.bbox.x1
        assert 0 <= extent.y0 <= extent.y1 <= figure.bbox.y1


def test_a_plot_with_errors_gaps_and_dollars_is_the_same_twice():
    curve = Curve("$\\bad{$", [1, 2, 3], [3, float("nan"), 4], errors=[0.1, float("nan"), 0.3])
    axes = PlotAxes("$x", "y$ and $", markers=True, ticks_y=(3, 4), range_y=(2, 5), title="$t$")
    assert plot_svg([curve], axes) == plot_svg([curve], axes)
    assert plot_svg([curve], axes) != plot_svg([Curve(curve.label, curve.x, curve.y)], axes)


def test_ready_html_is_left_alone_and_points_are_escaped():
    assert "<td><b>1</b></td><td>&lt;b&gt;</td>" in table(["a", "b"], [[Html("<b>1</b>"), "<b>"]], "cells")
    assert bullets(["<x>", "y"], "k") == '<ul class="k"><li>&lt;x&gt;</li><li>y</li></ul>'
    assert bullets([]) == ""


def test_missing_matplotlib_says_what_to_install(monkeypatch):
    def missing(name):
        raise ImportError(name)

    monkeypatch.setattr(report.importlib, "import_module", missing)
    with pytest.raises(ValueError, match=r"pip install 'mean-velocity-matching\[plots\]'"):
        plot_svg([Curve("a", [1], [1])], PlotAxes("x", "y"))


def test_a_crash_leaves_the_old_report(page, tmp_path, monkeypatch):
    path = tmp_path / "report.html"
    path.write_text("the old report")

    def crash(*args):
        raise OSError("No space left on device")

    monkeypatch.setattr(files, "flush", crash)
    with pytest.raises(OSError, match="No space"):
        page.write(path)
    assert path.read_text() == "the old report"
    monkeypatch.undo()
    page.write(path)
    assert path.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert [p.name for p in tmp_path.iterdir()] == ["report.html"]


def test_provenance_names_versions():
    found = dict(provenance())
    assert found["torch"] == torch.__version__
    assert found.keys() >= {"mvm", "python", "machine"}
