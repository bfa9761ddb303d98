"""Cells of a sweep: their names say their settings, and files of older sweeps are read as they were written."""

import json
from pathlib import Path

import pytest

from mvm.evaluation.cells import Result, combinations, file_name, solver_name
from mvm.settings import OPTIONS, SampleConfig

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
SWEPT = ["sde-ode/tmin", "sde-ode/best", "larger/guidance", "solvers/fid-cifar10-sde", "solvers/digits"]
OTHER = {
    "solver": "sa", "nfe": 7, "rho": 0.5, "cfg": 1.5, "interval": (0.25, 0.75), "internal": 1.25,
    "auto_scale": 1.42, "tolerance": 1e-3, "share": 0.5, "t_min": 3e-5, "shift": 8.0,
}  # fmt: skip


@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_is_an_axis(name):
    """A setting that commands gain is an axis at once, and its cells have names of their own."""
    needed = {"interval": {"cfg": (2.0,)}, "t_min": {"solver": ("sa",)}, "tolerance": {"solver": ("dopri5",)}}
    usual = {"nfe": 26, "interval": (0.0, 1.0)}.get(name, getattr(SampleConfig, name, None))
    axes = {"nfe": (26,), "rho": (0.0,), **needed.get(name, {}), name: (usual, OTHER[name])}
    cells = combinations(**axes)
    assert len(cells) == len({file_name(cell) for cell in cells}) == 2
    given = OTHER[name] if name == "interval" else (OTHER[name],)
    assert tuple(getattr(cells[1], field) for field in OPTIONS[name]) == given


def test_a_default_axis_has_the_sweeps_own_values_and_tuned_times():
    cells = combinations()
    assert [(cell.nfe, cell.rho) for cell in cells] == [(nfe, rho) for rho in (0.0, 1.0) for nfe in (8, 13, 26)]
    assert all(cell.tuned for cell in cells)
    assert not any(cell.tuned for cell in combinations(solver=("adams",)))


def result(settings, tuned=False):
    return Result(settings, 3.0, 4.0, 5.5, {"fid": {"value": 1.0, "error": None, "note": ""}}, "x.png", tuned)


@pytest.mark.parametrize(
    "settings",
    [
        SampleConfig(tuned=False),
        SampleConfig("sa", 8, 0.75, 1.5, 0.6, 0.8, internal=1.25, t_min=1e-4, tuned=False),
        SampleConfig("adams", share=0.25, tuned=False),
        SampleConfig("sa", shift=6.5, t_min=1e-4, tuned=False),
        SampleConfig("adams", auto_scale=1.42, tuned=False),
        SampleConfig("dopri5", tolerance=1e-3, tuned=False),
        *(SampleConfig("sa", t_min=t_min, tuned=False) for t_min in (1e-2, 3e-4, 1e-5)),
    ],
)
def test_a_result_comes_back_from_its_file(settings):
    assert Result.read(json.loads(json.dumps(result(settings).as_dict()))) == result(settings)


def test_tuned_times_are_in_the_name():
    found = result(SampleConfig(), tuned=True)
    assert found.solver == "adams, tuned"
    assert Result.read(found.as_dict()) == found


def test_names_of_solvers():
    assert solver_name(SampleConfig("sa", share=0.5, t_min=1e-4)) == "sa, t_min 0.0001, 50% shared"
    assert solver_name(SampleConfig("dopri5", tolerance=1e-3)) == "dopri5, tolerance 0.001"
    assert solver_name(SampleConfig("adams", shift=8.0)) == "adams, shift 8"


def test_a_solver_by_tolerance_has_no_cells_of_a_shift():
    cells = combinations(solver=("heun", "adaptive"), nfe=(4,), rho=(0.0,), shift=(0.0, 1.0))
    assert [file_name(cell) for cell in cells] == [
        "heun-nfe4-rho0",
        "heun-shift1-nfe4-rho0",
        "adaptive-tolerance1e-05-rho0",
    ]


@pytest.mark.parametrize("name", SWEPT)
def test_results_of_older_sweeps_are_read_and_written_alike(name):
    stored = json.loads((RESULTS / f"{name}.json").read_text("utf-8"))["results"]
    assert stored
    for flat in stored:
        assert Result.read(flat).as_dict() == {"internal": 1.0, "auto_scale": 1.0, "auto": "", **flat}


@pytest.mark.parametrize("solver", ["sa, later", "sa, end 3", "sad", "sa, t_min x", "50% shared"])
def test_a_solver_in_other_words_is_refused(solver):
    with pytest.raises((ValueError, TypeError), match=r"solver=|end|could not convert"):
        Result.read({**result(SampleConfig()).as_dict(), "solver": solver})


def test_what_has_no_effect_goes_back_to_its_default():
    """Settings that give the same samples are one cell."""
    same = SampleConfig("heun", cfg=1.0, low=0.25, high=0.75, tolerance=1e-3, t_min=1e-4).canonical()
    assert same == SampleConfig("heun")
    for other in (SampleConfig(cfg=2.0, low=0.25), SampleConfig("sa", t_min=1e-4), SampleConfig("dopri5", tolerance=1)):
        assert other.canonical() == other
    assert SampleConfig("dopri5", nfe=8).canonical().nfe == SampleConfig.nfe
