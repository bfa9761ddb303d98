"""Time grids by their formulas: how times are spaced, and that both ends are exact."""

import numpy as np
import pytest

from mvm.path import MEAN_VELOCITY, LinearFlow, MeanVelocity, VariancePreserving
from mvm.solver.adams import FixedGrid, SoftLamGrid
from mvm.solver.onestep import smooth_times
from mvm.solver.variants import LamGrid, PowerGrid, power_times


@pytest.mark.parametrize("end", [0.0, 1e-5])
@pytest.mark.parametrize("start", [0.1, 0.3, 0.7, 0.95, 1.0])
def test_power_times_by_hand(start, end):
    """t^(1/r) goes linearly in (i/N)^p, and the ends are not a rounding away from what was asked."""
    for r, p in ((1.0, 1.0), (3.5, 1.0), (4.0, 1.4), (7.0, 2.0)):
        times = power_times(7, start, end, r, p)
        done = (np.arange(8) / 7) ** p
        assert (times[0], times[-1], len(times)) == (start, end, 8)
        assert times == pytest.approx((start ** (1 / r) * (1 - done) + end ** (1 / r) * done) ** r, rel=1e-12)
    assert PowerGrid(3.0, t_max=0.9).times(4) == pytest.approx([0.9 * (1 - i / 4) ** 3 for i in range(5)], rel=1e-12)


def test_lam_times_are_uniform_in_lam_from_t_max_to_t_min():
    *times, last = LamGrid(0.999, 1e-3).times(5)
    assert last == 0
    assert [times[0], times[-1]] == pytest.approx([0.999, 1e-3], rel=1e-12)
    lam = MEAN_VELOCITY.lam(np.array(times)).numpy()
    assert np.diff(lam) == pytest.approx(np.full(4, (lam[-1] - lam[0]) / 4), rel=1e-9)
    assert LamGrid(0.999, 1e-3).times(3, start=0.5)[0] == pytest.approx(0.5, rel=1e-12)  # a field that begins below


def test_soft_times_of_a_last_time_evaluated():
    times = SoftLamGrid(0.02, 0.05, t_min=1e-3).times(6)
    assert (times[0], times[-2], times[-1], len(times)) == (1.0, 1e-3, 0.0, 7)
    t = np.array(times[1:-1])
    r = np.sqrt(t) / (1 - t)
    steps = np.diff(np.log((r + 0.02) / (1 + 0.05 * r)))
    assert steps == pytest.approx(np.full(4, steps[0]), rel=1e-9)


@pytest.mark.parametrize(
    ("schedule", "power"),
    [(MeanVelocity(), 2), (MeanVelocity(2.5), 2), (LinearFlow(), 1), (VariancePreserving(), 2)],
    ids=str,
)
def test_smooth_times_are_uniform_where_sigma_is_smooth(schedule, power):
    """In sqrt(t) where sigma leaves 0 as sqrt(t), in t where it leaves 0 as t."""
    wanted = [schedule.end * (1 - i / 5) ** power for i in range(6)]
    assert smooth_times(schedule, 5) == pytest.approx(wanted, rel=1e-12)


def test_fixed_times_are_given_back():
    assert FixedGrid((1.0, 0.4, 0.0)).times(2) == (1.0, 0.4, 0.0)
