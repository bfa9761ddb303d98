"""The table of betas and the VE path: what a Schedule must be, against finite differences and the table itself."""

import pytest
import torch
from closed_form import betas

from mvm.bridge import BetaTable, VarianceExploding
from mvm.bridge.incoming import FlowConvention

TABLES = [BetaTable.from_betas(betas(name)) for name in ("linear", "scaled_linear", "squaredcos_cap_v2")]
ZERO = BetaTable((0.99, 0.6, 0.3, 0.0))
PATHS = [*TABLES, ZERO, BetaTable((0.9, 0.1)), VarianceExploding(), VarianceExploding(3.0)]


@pytest.mark.parametrize("table", [*TABLES, ZERO], ids=str)
def test_the_table_stands_at_its_steps(table):
    square = torch.tensor(table.alphas_cumprod, dtype=torch.float64)
    t = table.time(torch.arange(table.steps))
    torch.testing.assert_close(table.alpha(t) ** 2, square, rtol=1e-12, atol=1e-18)
    torch.testing.assert_close(table.sigma(t) ** 2, 1 - square, rtol=1e-10, atol=0)
    torch.testing.assert_close(table.timestep(t), torch.arange(table.steps).double(), rtol=0, atol=1e-9)


def test_lam_is_linear_between_steps():
    table = TABLES[0]
    low, middle, high = (float(table.lam(table.time(step))) for step in (41.0, 41.25, 42.0))
    assert middle == pytest.approx(0.75 * low + 0.25 * high, rel=1e-12)


@pytest.mark.parametrize("path", PATHS, ids=str)
def test_time_and_lam_are_inverse(path):
    t = torch.tensor([1e-6, 3e-4, 0.02, 0.3, 0.77, 1.0], dtype=torch.float64) * path.end
    torch.testing.assert_close(path.t_from_lam(path.lam(t)), t, rtol=1e-9, atol=1e-12)
    ends = path.t_from_lam(torch.tensor([float("inf"), float("-inf")], dtype=torch.float64))
    assert ends.tolist() == [0.0, path.end]


@pytest.mark.parametrize("path", PATHS, ids=str)
def test_rates_are_derivatives(path):
    t = torch.tensor([1e-4, 0.03333, 0.41234, 0.98765], dtype=torch.float64) * path.end
    h = 1e-7 * path.end
    alpha = (path.alpha(t + h) - path.alpha(t - h)) / (2 * h)
    variance = (path.sigma(t + h) ** 2 - path.sigma(t - h) ** 2) / (2 * h)
    torch.testing.assert_close(path.alpha_rate(t), alpha, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(path.variance_rate(t), variance, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("path", PATHS, ids=str)
def test_data_stands_at_zero(path):
    assert float(path.alpha(0.0)) == 1
    assert float(path.sigma(0.0)) == 0
    for rate in (path.alpha_rate(0.0), path.variance_rate(0.0), path.diffusion(1e-9), path.level(0.0)):
        assert torch.isfinite(rate)


def test_tables_are_compared_by_their_numbers_and_shown_short():
    assert BetaTable((0.9, 0.1)) == BetaTable((0.9, 0.1)) != BetaTable((0.9, 0.2))
    assert len(str(TABLES[0])) < 80


@pytest.mark.parametrize("bad", [(0.9,), (0.1, 0.9), (1.0, 0.5), (0.5, -0.1), (0.5, float("nan"))])
def test_bad_tables_are_refused(bad):
    with pytest.raises(ValueError, match="alphas_cumprod"):
        BetaTable(bad)


def test_bad_sigma_max():
    with pytest.raises(ValueError, match="sigma_max=0"):
        VarianceExploding(0)


@pytest.mark.parametrize("data_at", [0, 1])
def test_flow_time_there_and_back(data_at):
    told = FlowConvention(data_at, time_scale=1000)
    t = torch.tensor([0.0, 0.25, 1.0], dtype=torch.float64)
    assert told.timestep(t).tolist() == ([1000, 750, 0] if data_at else [0, 250, 1000])
    torch.testing.assert_close(told.time(told.timestep(t)), t)
    assert told.sign == (-1 if data_at else 1)
