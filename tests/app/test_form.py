"""Odd values are told field by field, with the range; what is right becomes settings."""

import pytest

from mvm.app.form import ODE, RANGES, SDE, SampleForm, step_solvers, takes_noise
from mvm.noise import MAX_SEED
from mvm.recipes import SampleConfig


def test_what_the_page_starts_with_is_right():
    assert SampleForm("digits").problems() == {}


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("nfe", 0, "NFE is 0; it must be a whole number from 1 to 100"),
        ("nfe", 2.5, "NFE is 2.5; it must be a whole number from 1 to 100"),
        ("nfe", None, "NFE is empty; it must be a whole number from 1 to 100"),
        ("rho", -0.1, "rho is -0.1; it must be a number from 0 to 2"),
        ("rho", float("nan"), "rho is nan; it must be a number from 0 to 2"),
        ("cfg", 1e9, "Guidance is 1e+09; it must be a number from 0 to 10"),
        ("images", 17, "Pictures is 17; it must be a whole number from 1 to 16"),
        ("low", 1.5, "Guide from is 1.5; it must be a number from 0 to 1"),
        ("seed", "1.5", f"Seed is 1.5; it must be a whole number from 0 to {MAX_SEED - 3}"),
        ("seed", "", f"Seed is empty; it must be a whole number from 0 to {MAX_SEED - 3}"),
        ("seed", "-1", f"Seed is -1; it must be a whole number from 0 to {MAX_SEED - 3}"),
        ("seed", "²", f"Seed is ²; it must be a whole number from 0 to {MAX_SEED - 3}"),
        ("seed", str(MAX_SEED - 2), f"Seed is {MAX_SEED - 2}; it must be a whole number from 0 to {MAX_SEED - 3}"),
    ],
)
def test_an_odd_value_is_told_beside_its_field(field, value, words):
    assert SampleForm("digits", **{field: value}).problems() == {field: words}


def test_an_interval_that_ends_before_it_begins_is_told():
    words = "Guide to is 0.2, below Guide from (0.8); it must be 0.8 to 1"
    assert SampleForm("digits", low=0.8, high=0.2).problems() == {"high": words}


def test_the_ends_of_all_ranges_are_right():
    for name, bounds in RANGES.items():
        assert bounds.problem(bounds.low) == bounds.problem(bounds.high) == "", name
        assert bounds.problem(bounds.low - bounds.step), name
        assert bounds.problem(bounds.high + bounds.step), name


def test_the_sides_differ_in_rho_alone():
    form = SampleForm("digits", nfe=7.0, rho=0.75, solver="sa")
    assert form.sides == (ODE, SDE)
    assert form.settings(ODE) == SampleConfig("sa", 7, 0.0)
    assert form.settings(SDE) == SampleConfig("sa", 7, 0.75)


def test_an_interval_counts_with_guidance_alone():
    assert SampleForm("digits", cfg=1.0, low=0.2, high=0.8).settings(ODE) == SampleConfig("adams", 13)
    assert SampleForm("digits", cfg=1.5, low=0.2, high=0.8).settings(ODE) == SampleConfig(
        "adams", 13, 0.0, 1.5, 0.2, 0.8
    )


def test_internal_guidance_is_guidance_on_the_interval():
    found = SampleForm("digits", internal=1.5, low=0.2, high=0.8).settings(ODE)
    assert found == SampleConfig("adams", 13, 0.0, 1.0, 0.2, 0.8, internal=1.5)


def test_autoguidance_needs_its_model():
    assert SampleForm("digits", auto_scale=1.5).settings(ODE) == SampleConfig("adams", 13)
    found = SampleForm("digits", auto="small", auto_scale=1.5, high=0.8).settings(ODE)
    assert found == SampleConfig("adams", 13, high=0.8, auto_scale=1.5)


def test_solvers_offered_have_steps_and_ode_solvers_one_side():
    assert step_solvers() == ["adams", "sa", "heun", "euler", "euler-maruyama"]
    assert [takes_noise(name) for name in step_solvers()] == [True, True, False, False, True]
    assert SampleForm("digits", solver="heun").sides == (ODE,)
