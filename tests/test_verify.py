"""`mvm verify` must pass, and must be able to fail."""

import importlib
import math
from dataclasses import replace

import pytest
import torch

from mvm import noise, oracle, verify
from mvm.path import MeanVelocity
from mvm.solver import Euler, EulerMaruyama, Heun, adams, sa, sample
from mvm.solver.table import TO_DATA
from mvm.verify import Check, as_json, solvers, theorems
from mvm.verify.solvers import Law, marginal, measured_order, sampled_law

adams_module = importlib.import_module("mvm.solver.adams")  # mvm.solver.adams itself is the solver


@pytest.fixture(scope="module")
def results():
    return verify.verify(progress=False)


def test_every_check_passes(results):
    assert [check.name for check in results if not check.passed] == []
    assert len(results) >= 50
    assert len({check.name for check in results}) == len(results)
    assert all(math.isfinite(check.value) for check in results)


def test_every_theorem_is_there(results):
    for number in range(1, 7):
        assert any(check.name.startswith(f"theorem {number}:") for check in results), number


def test_json_shape(results):
    summary = as_json(results)
    assert summary.keys() == {"passed", "checks"}
    assert summary["passed"] is True
    for entry, check in zip(summary["checks"], results, strict=True):
        assert entry == {
            "name": check.name,
            "value": check.value,
            "limit": check.limit,
            "passed": True,
            "comparison": ">=" if check.at_least else "<=",
        }
    assert {entry["comparison"] for entry in summary["checks"]} == {">=", "<="}


@pytest.mark.parametrize(
    ("value", "at_least", "passed"),
    [(1.0, False, True), (1.1, False, False), (math.nan, False, False), (0.9, True, False), (math.nan, True, False)],
)
def test_check(value, at_least, passed):
    assert Check("x", value, 1.0, at_least).passed is passed
    assert as_json([Check("x", value, 1.0, at_least)])["passed"] is passed


def test_the_digits_are_judged_by_quantiles_over_many_noises(monkeypatch):
    """No draw is chosen: half and nine in ten of 256 noises, of which a few that are far off move nothing."""
    errors = {8: torch.full((256,), 0.01), 13: torch.full((256,), 0.01), 26: torch.full((256,), 0.0001)}
    errors[8][:20] = 0.5  # fewer than one in ten
    errors[26][:30] = 0.5  # more
    monkeypatch.setattr(solvers, "digits_oracle", lambda: oracle.gaussian(0.0, 0.5, (64,)))
    drawn = []

    def sample(field, x, nfe):
        drawn.append(x)
        return torch.zeros_like(x) if nfe == 300 else errors[nfe].double()[:, None].expand_as(x)

    monkeypatch.setattr(solvers, "sample", sample)
    found = list(solvers.check_digits())
    assert [check.passed for check in found] == [True, True, False, True, True, False]
    assert [check.value for check in found] == pytest.approx([0.01, 0.01, 0.01, 0.01, 0.0001, 0.5])
    assert all(torch.equal(x, noise.initial(torch.arange(256), (64,), torch.float64)) for x in drawn)


def spoiled(monkeypatch, **changes):
    """Give the table of `adams` and `sa` wrong coefficients."""
    right = adams_module.build_row

    def wrong(*args):
        row = right(*args)
        if row == TO_DATA:
            return row
        return replace(row, **{name: change(getattr(row, name)) for name, change in changes.items()})

    monkeypatch.setattr(adams_module, "build_row", wrong)


def scaled(factor):
    return lambda value: tuple(factor * v for v in value) if isinstance(value, tuple) else factor * value


@pytest.mark.parametrize(
    "changes",
    [
        {"decay": scaled(1.001)},
        {"std": scaled(1.01)},
        {"correct": scaled(1.001), "predict": scaled(1.001)},
        {"correct": lambda c: c[::-1]},
    ],
    ids=["decay", "std", "weights", "order of the corrector"],
)
def test_a_broken_table_fails(monkeypatch, changes):
    spoiled(monkeypatch, **changes)
    monkeypatch.setattr(verify, "ALL", (solvers.check_shared_marginals, solvers.check_defaults, some_orders))
    found = verify.verify(progress=False)
    assert [check.name for check in found if not check.passed]
    assert as_json(found)["passed"] is False


def some_orders():
    """The orders of the default solver alone."""
    for rho, order in ((0.0, 3), (1.0, 2)):
        yield Check(f"order at rho = {rho}", measured_order(adams(), rho), order - 0.15, at_least=True)


def test_the_right_table_passes_these(monkeypatch):
    monkeypatch.setattr(verify, "ALL", (solvers.check_shared_marginals, solvers.check_defaults, some_orders))
    assert all(check.passed for check in verify.verify(progress=False))


def test_a_broken_schedule_fails(monkeypatch):
    monkeypatch.setattr(MeanVelocity, "sigma", lambda self, t: torch.sqrt(torch.as_tensor(t).double() / self.T) * 1.001)
    groups = (
        theorems.check_characteristic_functions,
        theorems.check_reverse_dynamics,
        theorems.check_score,
    )
    failed = [check.name for group in groups for check in group() if not check.passed]
    assert any("forward process" in name for name in failed)
    assert any("theorem 4" in name for name in failed)
    assert any("theorem 6" in name for name in failed)


@pytest.mark.parametrize(
    ("solver", "rho", "nfe"), [(adams(), 1.0, 5), (sa(), 0.75, 6), (EulerMaruyama(), 1.0, 4)], ids=["adams", "sa", "em"]
)
def test_sampled_law_agrees_with_monte_carlo(solver, rho, nfe):
    """400,000 draws: mean to std/sqrt(n), std to std/sqrt(2n)."""
    count, data = 400_000, Law(0.3, 0.5)
    seeds = torch.arange(count)
    field = oracle.gaussian(data.mean, data.std).field(MeanVelocity())
    x = noise.initial(seeds, (1,), torch.float64)
    drawn = sample(field, x, solver=solver, rho=rho, nfe=nfe, seeds=seeds)
    law = sampled_law(solver, data, rho, nfe=nfe)
    assert float(drawn.mean()) == pytest.approx(law.mean, abs=3 * law.std / math.sqrt(count))
    assert float(drawn.std()) == pytest.approx(law.std, abs=3 * law.std / math.sqrt(2 * count))
    assert abs(law.std / data.std - 1) > 3 / math.sqrt(2 * count)  # the solver's own error is seen, not drowned


@pytest.mark.parametrize("solver", [adams(), sa(), Heun(), Euler()], ids=lambda s: s.name)
def test_sampled_law_of_the_ode_is_the_image_of_one_sigma(solver):
    """Without noise the map is linear: the law follows from two runs."""
    data = Law(-0.4, 0.7)
    law = sampled_law(solver, data, 0.0, nfe=9)
    field = oracle.gaussian(data.mean, data.std).field(MeanVelocity())
    ends = sample(field, torch.tensor([[0.0], [1.0]], dtype=torch.float64), solver=solver, nfe=9)[:, 0]
    assert law.mean == pytest.approx(float(ends[0]), abs=1e-12)
    assert law.std == pytest.approx(abs(float(ends[1] - ends[0])), abs=1e-12)


def test_marginal():
    assert marginal(Law(0.3, 0.5), 0.0) == Law(0.3, 0.5)
    assert marginal(Law(0.3, 0.5), 1.0) == Law(0.0, 1.0)
    found = marginal(Law(2.0, 0.5), 0.36)
    assert (found.mean, found.std) == pytest.approx((1.28, math.sqrt(0.64**2 * 0.25 + 0.36)))


def test_measured_order_tells_orders_apart():
    assert measured_order(Euler(), 0.0) == pytest.approx(1, abs=0.1)
    assert measured_order(Heun(), 0.0) == pytest.approx(2, abs=0.1)
    assert measured_order(adams(1, 0), 0.0) == pytest.approx(1, abs=0.1)
    assert measured_order(adams(2, 0), 0.0) == pytest.approx(2, abs=0.15)
