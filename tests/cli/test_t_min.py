"""The last time that sa evaluates: from an option to the grid, a cell of its own in a sweep, refused elsewhere."""

import json

import numpy as np
import pytest

from mvm.evaluation.cells import combinations, file_name, solver_name
from mvm.recipes import SampleConfig
from mvm.solver import DEFAULT_T_MIN, SOLVERS, sa


def test_it_reaches_the_grid():
    assert SampleConfig("sa").build_solver() == sa()
    assert SampleConfig("sa", t_min=1e-4).build_solver() == sa(t_min=1e-4)
    assert sa().grid.t_min == DEFAULT_T_MIN
    assert [name for name in SOLVERS if SampleConfig(name).takes_t_min] == ["sa"]


@pytest.mark.parametrize("value", [0.0, -1.0, 0.999, float("nan")])
def test_a_time_that_is_none_is_refused(value):
    with pytest.raises(ValueError, match="t_min="):
        SampleConfig("sa", t_min=value)


def test_only_sa_has_cells_of_it():
    cells = combinations(solver=("sa", "adams"), nfe=(4,), rho=(0.0,), t_min=(1e-3, 1e-5))
    assert [file_name(cell) for cell in cells] == ["sa-nfe4-rho0", "sa-end1e-05-nfe4-rho0", "adams-nfe4-rho0"]
    assert [solver_name(cell) for cell in cells] == ["sa", "sa, t_min 1e-05", "adams"]
    assert solver_name(SampleConfig("sa", share=0.5, t_min=1e-4)) == "sa, t_min 0.0001, 50% shared"


def test_a_sweep_over_it(tmp_path, done):
    pytest.importorskip("matplotlib", reason="reports are drawn with matplotlib")
    size = ["--num", "12", "--nfe", "4", "--rho", "0", "--out", tmp_path / "s"]
    done("sweep", "digits", "--solvers", "sa,adams", "--t-min", "1e-3,1e-1", *size)
    results = json.loads((tmp_path / "s" / "results.json").read_text())["results"]
    found = {result["solver"]: result["metrics"]["fd-pixels"]["value"] for result in results}
    assert set(found) == {"adams", "sa", "sa, t_min 0.1"}
    assert found["sa"] != found["sa, t_min 0.1"]


def test_a_sample_with_it(tmp_path, done):
    def sampled(name, *tokens):
        out = tmp_path / f"{name}.npy"
        done("sample", "digits", "--num", "2", "--nfe", "4", "--solver", "sa", *tokens, "--out", out)
        return np.load(out)

    plain = sampled("plain")
    assert (sampled("same", "--t-min", "1e-3") == plain).all()
    assert (sampled("other", "--t-min", "1e-1") != plain).any()


@pytest.mark.parametrize(
    ("tokens", "words"),
    [
        (["sample", "digits", "--t-min", "1e-4"], "--t-min 0.0001 belongs to --solver sa"),
        (["sample", "digits", "--solver", "sa", "--t-min", "2"], "t_min=2.0, t_max=0.999"),
        (["sweep", "digits", "--t-min", "1e-4"], "--t-min 1e-4 belongs to --solver sa"),
        (
            ["sample", "digits", "--solver", "adaptive", "--shift", "8"],
            "--shift 8.0 has no effect with --solver adaptive, which is adaptive; leave it out",
        ),
        (["sample", "digits", "--shift", "-2"], "shift=-2.0 is out of range"),
        (["sweep", "digits", "--solvers", "sa", "--t-min", "1e-4,x"], "--t-min 1e-4,x: values separated by commas"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_misuse(tmp_path, monkeypatch, refused, tokens, words):
    monkeypatch.chdir(tmp_path)
    assert words in refused(*tokens)
    assert list(tmp_path.iterdir()) == []
