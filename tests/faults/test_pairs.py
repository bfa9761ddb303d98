"""A sample of the interleaved pairs and of the soak (`make faults` has more of both)."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.faults.soak import MEMORY, Held, grown

ROOT = Path(__file__).parents[2]


def said(module, *words):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", f"tests.faults.{module}", *words]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("only", ["a new folder: export, export", "an empty file: sample, edit"])
def test_two_commands_at_every_rename(only):
    """Of two exports one was lost; the images of one command lay beside the OUT.json of another."""
    rows = said("pairs", "--only", only, "--drawn", "3", "--workers", "1")
    total = re.search(r"\| all \| \| (\d+) \| (\d+) \| 0 \|", rows)
    assert total is not None, rows
    assert int(total[1]) == int(total[2]) >= 8


def test_some_pairs_of_all():
    rows = said("pairs", "--most", "1", "--drawn", "1", "--share", "40", "--workers", "1")
    assert re.search(r"\| all \| \| (\d+) \| \1 \| 0 \|", rows), rows


def test_a_few_cycles_of_the_soak():
    assert "8 cycles, step-" in said("soak", "--cycles", "8")


def test_the_soak_sees_what_grows():
    flat = [Held(300 << 20, 8, 2, 14)] * 10
    assert grown(flat) == []
    assert grown([*flat, flat[0]._replace(memory=flat[0].memory + MEMORY)]) == []
    for name, more in (("memory", MEMORY + 1), ("handles", 1), ("threads", 1), ("files", 1)):
        (told,) = grown([*flat, flat[0]._replace(**{name: getattr(flat[0], name) + more})])
        assert told.startswith(f"{name} grew from ")
