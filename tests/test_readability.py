"""Pages are readable: short sentences in README and tutorials, code that fits, no paragraphs inside tables."""

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
NOTEBOOK = ROOT / "docs/tutorials/quickstart.ipynb"
SENTENCE, CELL, WIDTH = 35, 25, 80
MADE = ("docs/reference/licences.md",)  # by tools/supply.py


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def text_of(path: Path) -> str:
    """Return a page as Markdown; of a notebook its texts."""
    if path.suffix != ".ipynb":
        return path.read_text(encoding="utf-8")
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")


def without_code(text: str) -> str:
    return re.sub(r"^ *(```|~~~).*?^ *\1", "", text, flags=re.DOTALL | re.MULTILINE)


def words(text: str) -> list[str]:
    """Return the words of a sentence or cell: of a link what is shown, a formula or a piece of code as one."""
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"`[^`]*`|\$[^$]*\$", "code", text)
    return [word for word in text.split() if re.search(r"\w", word)]


def sentences(text: str) -> list[str]:
    """Return the sentences of all paragraphs and list items; tables, headings and HTML are none."""
    blocks = re.split(r"\n\s*\n|\n(?=\s*(?:[-*+]|\d+\.) )", without_code(text))
    prose = [" ".join(block.split()) for block in blocks if not re.match(r"\s*[|#<!$]", block)]
    return [one for block in prose for one in re.split(r"(?<=[.!?:;])\s+(?=\S)", block)]


READ_FIRST = [ROOT / "README.md", *sorted((ROOT / "docs/tutorials").glob("*.md")), NOTEBOOK]


@pytest.mark.parametrize("path", READ_FIRST, ids=name)
def test_sentences_are_short(path):
    assert not [one for one in sentences(text_of(path)) if len(words(one)) > SENTENCE]


@pytest.mark.parametrize("path", PAGES, ids=name)
def test_code_fits(path):
    blocks = re.findall(r"^```(?:python|bash|sh|toml|console)\n(.*?)^```", text_of(path), re.DOTALL | re.MULTILINE)
    assert not [line for block in blocks for line in block.splitlines() if len(line) > WIDTH]


@pytest.mark.parametrize("path", [page for page in PAGES if name(page) not in MADE], ids=name)
def test_cells_of_tables_are_short(path):
    rows = [line for line in without_code(text_of(path)).splitlines() if line.startswith("|")]
    cells = [cell for row in rows for cell in re.split(r"(?<!\\)\|", row)]
    assert not [cell for cell in cells if len(words(cell)) > CELL]


def test_the_readme_is_short():
    assert len(text_of(ROOT / "README.md").splitlines()) <= 150


def test_long_sentences_and_cells_are_found():
    """The check itself: it sees what it should."""
    long = " ".join(["word"] * 36)
    found = [one for one in sentences(f"Short.\n\n- {long}. Short again.") if len(words(one)) > SENTENCE]
    assert found == [f"- {long}."]
    assert sentences("# Title\n\nOne. Two: three.\n\n| a | b |") == ["One.", "Two:", "three."]
    assert len(words("[one two](far.md#away) and `a b c` $x + y$")) == 5
