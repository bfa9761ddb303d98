"""The notebook of docs/tutorials: it runs, prints what is kept in it, and links to files that exist.

To keep new outputs: jupyter execute --inplace docs/tutorials/quickstart.ipynb
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest

NOTEBOOK = Path(__file__).parent.parent / "docs" / "tutorials" / "quickstart.ipynb"
KEPT = json.loads(NOTEBOOK.read_text("utf-8"))
CODE = [cell for cell in KEPT["cells"] if cell["cell_type"] == "code"]
MOST_BYTES = 1_000_000


def joined(text: str | list[str]) -> str:
    return "".join(text)


def printed(cell: dict[str, Any], stream: str = "stdout") -> str:
    """Return what a cell has written to a stream."""
    return "".join(joined(each["text"]) for each in cell["outputs"] if each.get("name") == stream)


def pictures(cell: dict[str, Any]) -> int:
    """Return how many pictures a cell has shown."""
    return sum("image/png" in each.get("data", {}) for each in cell["outputs"])


@pytest.fixture(scope="module")
def executed() -> list[dict[str, Any]]:
    """The code cells after a run; a cell that raises is an error here."""
    for package in ("ipykernel", "matplotlib"):
        pytest.importorskip(package, reason="the notebook's kernel and its plots")
    nbclient = pytest.importorskip("nbclient", reason="it executes notebooks")
    nbformat = pytest.importorskip("nbformat", reason="it reads notebooks")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3").execute()
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def test_outputs_are_kept_of_every_cell_that_prints_or_shows() -> None:
    for cell in CODE:
        source = joined(cell["source"])
        assert bool(printed(cell)) == bool(re.search(r"^ *print\(", source, re.MULTILINE)), source
        shows = re.search(r"^(show\(|plt\.show\(|\w+$)", source, re.MULTILINE)
        assert pictures(cell) == bool(shows), source
        assert not printed(cell, "stderr")
    assert sum(map(pictures, CODE)) >= 4
    assert NOTEBOOK.stat().st_size < MOST_BYTES


@pytest.mark.timeout(600)
def test_it_prints_and_shows_what_is_kept(executed: list[dict[str, Any]]) -> None:
    for cell, kept in zip(executed, CODE, strict=True):
        assert not [each for each in cell["outputs"] if each["output_type"] == "error"]
        assert (printed(cell), pictures(cell)) == (printed(kept), pictures(kept)), joined(kept["source"])


def test_links_lead_somewhere() -> None:
    texts = "\n".join(joined(cell["source"]) for cell in KEPT["cells"] if cell["cell_type"] == "markdown")
    links = re.findall(r"\]\(([^)#\s]+)", texts)
    assert len(links) >= 5
    for link in links:
        assert (NOTEBOOK.parent / link).is_file(), link


def test_code_fits() -> None:
    assert not [line for cell in CODE for line in joined(cell["source"]).splitlines() if len(line) > 80]
