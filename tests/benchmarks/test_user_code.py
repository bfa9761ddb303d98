"""Lines of user code: the table of docs/tutorials/own-network.md is what the programs are, and ours run."""

import json
import runpy
import sys

import pytest
from programs import BENCHMARKS, RESULTS, ROOT, imported

PAGE = (ROOT / "docs" / "tutorials" / "own-network.md").read_text("utf-8")
FOUND = json.loads((RESULTS / "user-code.json").read_text("utf-8"))
COUNTS = FOUND["lines"]


@pytest.fixture(scope="module")
def user_code():
    return imported("user_code")


def test_the_page_has_the_lines_that_the_programs_have(user_code):
    folder = BENCHMARKS / "user_code"
    counted = {
        task: {name: user_code.lines(folder / f"{task}_{name}.py") for name in user_code.LIBRARIES} for task in COUNTS
    }
    assert counted == COUNTS
    assert user_code.table(COUNTS, user_code.LIBRARIES) in PAGE
    assert ", ".join(f"{name} {version}" for name, version in FOUND["versions"].items()) in PAGE
    ours, theirs = (sorted(lines[name] for lines in COUNTS.values()) for name in ("mvm", "flow_matching"))
    claim = (
        f"mvm takes {ours[0]} to {ours[-1]} lines of user code, where flow_matching takes {theirs[0]} to {theirs[-1]}."
    )
    assert claim in " ".join(PAGE.split())
    assert all(lines["mvm"] == min(lines.values()) for lines in COUNTS.values())


def test_blank_lines_and_comments_are_not_counted(user_code, tmp_path):
    (tmp_path / "x.py").write_text("# a comment\n\nimport this\n    # one more\n\nx = 1  # of a line\n")
    assert user_code.lines(tmp_path / "x.py") == 2


@pytest.mark.parametrize("task", COUNTS)
def test_ours_run(task, tmp_path, monkeypatch):
    pytest.importorskip("diffusers", reason="the networks of images are diffusers'")
    pytest.importorskip("sklearn", reason="the data are scikit-learn's")
    monkeypatch.syspath_prepend(str(BENCHMARKS / "user_code"))
    monkeypatch.chdir(tmp_path)
    made = runpy.run_path(str(BENCHMARKS / "user_code" / f"{task}_mvm.py"))
    assert (tmp_path / "grid.png").is_file() == (task == "images")
    found = next((made[name] for name in ("points", "signals", "images") if name in made), None)
    shapes = {"moons": (500, 2), "signal": (16, 1, 64), "text": (16, 1, 8, 8), "inpaint": (16, 1, 8, 8)}
    if task in shapes:
        assert tuple(found.shape) == shapes[task]
        assert bool(found.isfinite().all())
    sys.modules.pop("networks", None)
