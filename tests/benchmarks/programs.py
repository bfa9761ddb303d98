"""The programs of benchmarks/, imported, and where their results lie."""

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "benchmarks"
RESULTS = BENCHMARKS / "results"
SOLVERS = RESULTS / "solvers"


def imported(name):
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        return __import__(name)
