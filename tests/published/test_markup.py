"""Names from data and models stand in cards and reports as text: no element, link or picture comes of them."""

import html
import json
import re
from dataclasses import asdict
from html.parser import HTMLParser

import pytest

from mvm import checkpoint
from mvm.evaluation import report
from mvm.evaluation.run_report import write_run_report
from mvm.model import Model
from mvm.published import export
from mvm.published.write import SEAL, read_figures
from mvm.recipes import load_recipe, override, to_json
from mvm.recipes.reading import changed
from mvm.untrusted import markdown

EVIL = "<img src=x onerror=alert(1)>"
NAMES = (
    *(EVIL, "<script>alert(1)</script>", "a|b", "`</code><b>`", "<!-- ", "**bold** _it_ ~~no~~", "&lt;img&gt;"),
    *("![x](https://evil.example/x.png)", "[x]: https://evil.example", "[x](javascript:alert(1))"),
    "https://evil.example",
)
TINY = {"network.depth": "1", "network.heads": "1", "network.width": "8", "network.patch": "4"}


class Elements(HTMLParser):
    """The elements of a page, and its text."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.attributes, self.words = [], [], ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data):
        self.words += data


def rendered(text):
    """Return Markdown as HTML."""
    module = pytest.importorskip("markdown_it", reason="gradio brings it")
    return module.MarkdownIt("commonmark", {"linkify": False}).enable("table").enable("strikethrough").render(text)


@pytest.mark.parametrize("name", [*NAMES, "# heading", "- point", "n0144_tench", "jack-o'-lantern", "a\nb", "5 * 3"])
@pytest.mark.parametrize("code", [False, True])
def test_text_stays_text(name, code):
    page = Elements(rendered(f"Of {markdown(name, code)}, a name.\n\n{markdown(name, code)}\n"))
    assert set(page.tags) <= {"p", "code"}
    assert page.words.count(" ".join(name.split())) == 2
    for plain in ("n0144_tench", "jack-o'-lantern", "power-0.1", "ship, sailing"):
        assert markdown(plain) == plain
        assert markdown(plain, code=True) == f"`{plain}`"


@pytest.fixture
def evil_run(tmp_path):
    """A run all names of which are markup."""
    recipe = changed(override(load_recipe("digits"), TINY), {
        "name": EVIL, "description": f"{EVIL}\n\n## Figures\n\n{NAMES[7]}", "data.name": "folder", "data.path": EVIL,
        "data.channels": 1, "data.size": 8, "data.classes": len(NAMES), "data.names": NAMES,
    })  # fmt: skip
    run = tmp_path / EVIL.replace("/", "")
    weights = Model(recipe).network.state_dict()
    run.mkdir()
    checkpoint.save(run / "checkpoints" / "step-00000002", {"ema": weights}, {"step": 2, "data": EVIL})
    (run / "recipe.json").write_text(to_json(recipe))
    (run / "metrics.jsonl").write_text(
        json.dumps({"step": 1, "loss": 1.0, EVIL: 2.0}) + "\n" + json.dumps({"step": 2, "loss": 1.5}) + "\n"
    )
    return run


def figures(run, tmp_path):
    digest = checkpoint.read_manifest(run / "checkpoints" / "step-00000002")["sha256"]["ema.safetensors"]
    sampler = asdict(load_recipe("digits").sample) | {"evaluations": 8}
    told = {
        "images": {"sampler": sampler, "count": 10, "origin": {"sha256": digest}, "draw": {"seed": 0, "labels": EVIL}},
        "metrics": {EVIL: {"value": 1.5, "error": None}},
        "reference": {"name": EVIL, "split": NAMES[7], "count": 100},
        "software": {"mvm": EVIL, "device": "cpu"},
        "warnings": [EVIL, NAMES[8]],
    }
    (tmp_path / "figures.json").write_text(json.dumps(told))
    assert read_figures(tmp_path / "figures.json", [digest]).rows
    return tmp_path / "figures.json"


def test_a_card(evil_run, tmp_path):
    export(evil_run, tmp_path / "model", license="mit", figures=figures(evil_run, tmp_path))
    text = (tmp_path / "model" / "README.md").read_text()
    body, seal = text.split("---\n", 2)[2].split(SEAL)
    assert re.fullmatch(r"[0-9a-f]{16} -->\n", seal)
    assert not re.search(r"<(?!/?code>)|\]\(|://evil", re.sub(r"```.*?```", "", body, flags=re.DOTALL))
    page = Elements(rendered(body))
    assert set(page.tags) <= {"h1", "h2", "p", "ul", "li", "code", "pre", "table", "thead", "tbody", "tr", "th", "td"}
    assert not [name for name, _ in page.attributes if name not in ("class", "style")]
    assert EVIL in page.words
    assert body.count("\n## Figures\n") == 1


def test_a_report_of_a_run(evil_run):
    pytest.importorskip("matplotlib", reason="needs mean-velocity-matching[plots]")
    page = Elements(write_run_report(evil_run).read_text())
    assert not {"script", "img", "a", "iframe"} & set(page.tags)
    assert not [name for name, _ in page.attributes if name.startswith("on")]
    assert EVIL in page.words


@pytest.mark.parametrize("name", NAMES)
def test_every_part_of_a_page(name):
    made = report.Page(name, name)
    made.section(name, report.paragraph(name), report.subheading(name), report.block(name), report.prose(name))
    made.section(
        "x", report.bullets([name]), report.table([name], [[name]]), report.folded(name, report.paragraph(name))
    )
    page = Elements("".join(made.parts))
    assert not {"script", "img", "a", "b"} & set(page.tags)
    assert html.unescape(page.words).count(html.unescape(name)) >= 7
