"""The default solver: its times, its ending, and what it makes of data of every scale."""

import math

import numpy as np
import pytest
import torch

from mvm import oracle
from mvm.path import MEAN_VELOCITY, LinearFlow, VariancePreserving
from mvm.solver import Adams, adams, adams_power, sample
from mvm.solver.adams import soft_lam_times
from mvm.solver.table import TO_DATA, SoftLamVariable, ending_row
from mvm.verify.solvers import image_stds, sampled_stds, spectrum_error

ONE = torch.ones(1, 1, dtype=torch.float64)


@pytest.mark.parametrize("steps", [1, 2, 3, 8, 100, 1000])
def test_times_are_uniform_in_the_soft_log_snr_and_end_exactly(steps):
    c, d = 0.025, 0.05
    times = np.array(soft_lam_times(steps, 1.0, 0.0, c, d))
    assert (times[0], times[-1], len(times)) == (1.0, 0.0, steps + 1)
    spaced = SoftLamVariable(c, d)(times)
    assert np.allclose(np.diff(spaced), math.log(c * d) / steps, rtol=1e-9, atol=1e-12)


def test_between_the_ends_the_variable_is_minus_lam():
    t = np.array([0.2, 0.5])
    apart = SoftLamVariable(1e-9, 1e-9)(t) + MEAN_VELOCITY.lam(t).numpy()
    assert np.abs(apart).max() < 1e-7


@pytest.mark.parametrize("degree", [0, 1, 2])
def test_the_ending_is_exact_for_polynomials_in_its_variable(degree):
    variable, past = SoftLamVariable(0.1, 0.05), (0.001, 0.02, 0.1)
    row = ending_row(past, variable)
    assert (row.decay, row.std, row.correct) == (0.0, 0.0, ())
    value = np.array(row.predict) @ variable(np.array(past)) ** degree
    assert value == pytest.approx(float(variable(np.zeros(1))[0] ** degree), rel=1e-12)


def test_an_ending_of_one_evaluation_is_the_last_x0_hat():
    seen = []

    def field(x, t, condition):
        seen.append(oracle.gaussian(0.3, 0.5).denoise(x, t, MEAN_VELOCITY))
        return seen[-1]

    assert torch.equal(sample(field, ONE, solver=adams(ending=1), nfe=6), seen[-1])


@pytest.mark.parametrize(
    ("std", "nfe", "limit"), [(10.0, 13, 0.012), (10.0, 8, 0.05), (15.0, 13, 0.03), (0.5, 8, 0.03)]
)
def test_data_of_any_scale_keep_their_std(std, nfe, limit):
    """The brightness of CIFAR-10 has std 15; the former default made 8.4 of 10 at 13 evaluations, 5.7 at 8."""
    stds = torch.tensor([std], dtype=torch.float64)
    found = sampled_stds(adams(), stds, 0.0, nfe, size=3072)
    assert float(found / stds - 1) == pytest.approx(0, abs=limit)
    if std >= 10:
        assert float(sampled_stds(adams_power(), stds, 0.0, nfe) / stds) < 0.9


@pytest.mark.parametrize("rho", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("side", [32, 64])
def test_image_spectra_are_nearer_than_by_a_power_of_t(rho, side):
    stds = image_stds(side, 1.3)[::5]
    for nfe in (8, 13, 26):
        assert spectrum_error(adams(), stds, rho, nfe) < 0.5 * spectrum_error(adams_power(), stds, rho, nfe)


@pytest.mark.parametrize("order", [1, 2])
def test_an_ending_may_reach_back_further_than_the_steps_before_it(order):
    """What it needs was dropped: the image was off by 0.2 with a predictor of order 1 or 2 and an ending of 4."""
    law = oracle.gaussian(0.3, 0.5)
    found = [
        float(sample(law.field(MEAN_VELOCITY), ONE, solver=adams(order, 0, ending=ending), nfe=26))
        for ending in (1, 4, 6)
    ]
    assert found[1:] == pytest.approx([found[0]] * 2, abs=2e-3)


def test_spread_follows_the_size_of_a_sample_unless_given():
    assert adams().for_size(3072).spread == pytest.approx(0.18 * 3072**0.5)
    assert adams().for_size(2).spread == adams().for_size(64).spread == 5
    assert adams(spread=14.0).for_size(3072).spread == 14
    assert adams().times(8) == adams(spread=25.0).times(8)  # nothing is known: safe up to std 25


def test_times_are_uniform_in_a_log_snr_that_saturates_at_both_ends():
    """An SDE has another c and d than the ODE: 0.3/nfe and 0.5/spread, 0.16/max(nfe, 8) and 0.36/spread."""
    cases = [(13, 0.0, 0.16 / 13, 0.036), (13, 1.0, 0.3 / 13, 0.05), (5, 0.0, 0.16 / 8, 0.036), (5, 1.0, 0.3 / 5, 0.05)]
    for nfe, rho, c, d in cases:
        t = np.array(adams(spread=10.0).times(nfe, rho=rho)[1:-1])
        r = np.sqrt(t) / (1 - t)
        steps = np.diff(np.log((r + c) / (1 + d * r)))
        assert steps == pytest.approx(np.full(nfe - 2, steps[0]), rel=1e-9)


def test_an_sde_extrapolates_at_the_end_with_few_evaluations_alone():
    """Through 3 up to 12 evaluations; beyond, the noise in x0_hat would cost more than extrapolation gains."""
    for nfe, ending in ((3, 3), (12, 3), (13, 1), (26, 1)):
        stated = adams(spread=10.0, ending=ending).plan(MEAN_VELOCITY, nfe, 0.75)
        assert adams(spread=10.0).plan(MEAN_VELOCITY, nfe, 0.75) == stated
        assert (stated.rows[-1] == TO_DATA) is (ending == 1)


def test_the_ending_bends_where_the_last_evaluation_is():
    """end_b is 1.4 r at the last evaluation, at least 0.025; below 8 evaluations the ending goes through 3."""
    for nfe, ending in ((5, 3), (8, 4), (26, 4)):
        t = adams(spread=10.0).times(nfe)[-2]
        end_b = max(1.4 * (t**0.5 / (1 - t)), 0.025)
        stated = adams(spread=10.0, ending=ending, end_b=end_b).plan(MEAN_VELOCITY, nfe, 0.0)
        assert adams(spread=10.0).plan(MEAN_VELOCITY, nfe, 0.0) == stated
        assert end_b > 0.025 or nfe == 26


def test_sample_takes_the_size_from_the_noise():
    field, x = oracle.spectrum(image_stds(8)).field(MEAN_VELOCITY), torch.randn(2, 64, dtype=torch.float64)
    fitted = adams().for_size(64)
    assert torch.equal(sample(field, x, nfe=7), sample(field, x, nfe=7, solver=fitted))


@pytest.mark.parametrize("schedule", [MEAN_VELOCITY, LinearFlow(), VariancePreserving()])
def test_t_min_is_the_last_time_evaluated(schedule):
    asked = []

    def field(x, t, condition):
        asked.append(float(t[0]))
        return torch.zeros_like(x)

    for nfe in (1, 2, 5):
        asked.clear()
        sample(field, ONE, schedule=schedule, solver=adams(t_min=1e-3), nfe=nfe)
        assert len(asked) == nfe
        if nfe > 1:
            level = float(schedule.level(asked[-1]))
            assert level == pytest.approx(float(MEAN_VELOCITY.level(1e-3)), rel=1e-9)


@pytest.mark.parametrize("nfe", [1, 2, 3, 4])
@pytest.mark.parametrize("rho", [0.0, 1.0])
def test_one_value_of_x0_is_reached_in_any_number_of_evaluations(nfe, rho):
    """Where x0_hat is constant every weight adds up to one, also of the extrapolation."""
    found = sample(lambda x, t, c: torch.full_like(x, 0.7), ONE, nfe=nfe, rho=rho, seeds=[0])
    assert float(found) == pytest.approx(0.7, abs=1e-12)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"spread": 0.0}, "spread=0.0"),
        ({"spread": math.inf}, "spread=inf"),
        ({"c": -1.0}, "c=-1.0"),
        ({"b": 0.0}, "b=0.0"),
        ({"ending": 0}, "ending=0"),
        ({"predictor": 0}, "predictor=0"),
    ],
)
def test_options_out_of_range_are_named(options, words):
    with pytest.raises(ValueError, match=words):
        adams(**options)


def test_given_times_are_for_their_number_of_evaluations_alone():
    solver = Adams(given=(1.0, 0.5, 0.1, 0.0))
    assert solver.plan(MEAN_VELOCITY, 3, 0.0).times == (1.0, 0.5, 0.1, 0.0)
    with pytest.raises(ValueError, match="nfe=4: these times were made for 3 evaluations"):
        solver.plan(MEAN_VELOCITY, 4, 0.0)


def test_a_long_run_converges_to_the_other_grids_answer():
    field = oracle.mixture(torch.tensor([[-0.9], [0.3], [1.1]]), torch.tensor([0.3, 0.15, 0.5])).field(MEAN_VELOCITY)
    x = torch.linspace(-2, 2, 21, dtype=torch.float64)[:, None]
    apart = sample(field, x, nfe=300) - sample(field, x, nfe=300, solver=adams_power())
    assert float(apart.abs().max()) < 1e-5
