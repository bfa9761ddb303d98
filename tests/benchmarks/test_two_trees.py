"""The comparison of two source trees: what its figures are, and that both trees are really run, in turn."""

import json
from pathlib import Path

from programs import imported

two_trees = imported("two_trees")


def test_the_ratio_is_new_over_old_of_the_medians_with_its_range():
    row = two_trees.compared("a", [10.0, 20.0, 40.0], [11.0, 18.0, 44.0])
    assert row == {"case": "a", "old": 20, "new": 18, "ratio": 0.9, "least": 0.9, "most": 1.1}


BENCH = """
from dataclasses import dataclass
from types import SimpleNamespace

@dataclass
class Train:
    batch: int

@dataclass
class Recipe:
    train: Train

def random_images(recipe, count):
    return count

class FieldTrainer:
    def __init__(self, recipe, images, place, teacher):
        assert images == 4 * recipe.train.batch

    def advance(self):
        import time

        time.sleep(PAUSE)
"""
SPEED = """
from mvm.bench import Recipe, Train
from types import SimpleNamespace

CASES = {"slow": (Recipe(Train(10)), None)}
Processes = SimpleNamespace
"""


def test_gpu_cases_are_timed_in_turns_and_a_case_that_fails_is_left_out(tmp_path, monkeypatch, capsys):
    """The new tree sleeps half as long a step: twice the images a second. Batches are those asked for."""
    trees = [tmp_path / name for name in ("old", "new")]
    for tree, pause in zip(trees, (0.04, 0.02), strict=True):
        (tree / "src/mvm").mkdir(parents=True)
        (tree / "src/mvm/__init__.py").touch()
        (tree / "src/mvm/bench.py").write_text(BENCH.replace("PAUSE", str(pause)))
        (tree / "benchmarks").mkdir()
        (tree / "benchmarks/training_speed.py").write_text(SPEED)
    monkeypatch.setattr(two_trees, "TURN", 0.2)
    out = tmp_path / "speeds.json"
    cases = ["--gpu", "slow:20", "unknown", "--stagger", "0.1", "--seconds", "120", "--json", str(out)]
    monkeypatch.setattr("sys.argv", ["two_trees", *map(str, trees), *cases])
    two_trees.main()
    (row,) = json.loads(out.read_text())["rows"]
    assert row["case"] == "slow:20, images/s"
    assert row["old"] <= 500  # 20 images a step of at least 0.04 s
    assert row["new"] <= 1000
    assert row["ratio"] > 1.1  # 2 on a quiet machine
    assert "unknown, old: ended before it was ready" in capsys.readouterr().err


def test_each_tree_runs_its_own_package_in_turn(tmp_path, monkeypatch, capsys):
    trees = [tmp_path / name for name in ("old", "new")]
    for tree in trees:
        (tree / "src/mvm").mkdir(parents=True)
        (tree / "src/mvm/__init__.py").touch()
        (tree / "src/mvm/__main__.py").write_text(
            "import os, pathlib, sys\n"
            f"pathlib.Path(sys.argv[-1]).write_bytes({tree.name.encode()!r} if 'own' in sys.argv else b'same')\n"
            f"open(r'{tmp_path}/order', 'a').write('{tree.name} ')\n"
        )
    for text, equal in (("sample", "yes"), ("sample own", "no")):
        monkeypatch.setattr("sys.argv", ["two_trees", *map(str, trees), "--command", text, "--rounds", "1"])
        two_trees.main()
        assert f"written files equal: {equal}" in capsys.readouterr().out
    assert Path(tmp_path / "order").read_text().split() == ["old", "new", "new", "old"] * 2
