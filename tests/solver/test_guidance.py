"""Guidance: what it computes, where it acts, and what it costs."""

import math
from functools import partial

import pytest
import torch
from scipy.optimize import brentq

from mvm.path import LinearFlow, MeanVelocity, VariancePreserving, equal_snr_time, like
from mvm.solver import (
    Auto,
    ClassifierFree,
    Internal,
    Interval,
    adams,
    adams_power,
    guided,
    guided_evaluations,
    progress,
    sa,
    sample,
    solve,
)

PAPER = Interval(0.60, 0.80)
SCHEDULES = [MeanVelocity(), MeanVelocity(2.5), LinearFlow(), VariancePreserving()]


def lam(t):
    return math.log((1 - t) / math.sqrt(t))


def by_hand(t):
    return (lam(t) - lam(0.999)) / (lam(0.001) - lam(0.999))


def bounds():
    return [brentq(lambda t, p=p: by_hand(t) - p, 1e-3, 0.999, xtol=1e-15) for p in (0.8, 0.6)]


class Labelled:
    """x0_hat = label + x (0 for no label), with an inner head that is half of it; counts its passes."""

    def __init__(self):
        self.calls = []

    def __call__(self, x, t, condition):
        self.calls.append((t.clone(), condition))
        return x + (0 if condition is None else condition.to(x.dtype)[:, None])

    def pair(self, x, t, condition):
        outer = self(x, t, condition)
        return outer, outer / 2


def plain(x, t, condition=None):
    """No inner head."""
    return x + (0 if condition is None else condition.to(x.dtype)[:, None])


def noise(batch=3):
    return torch.randn(batch, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


LABELS = torch.tensor([1, 2, 5])


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_progress_is_that_of_equal_snr_on_every_schedule(schedule):
    for t in (0.002, 0.0563, 0.3, 0.609, 0.98):
        own = equal_snr_time(t, MeanVelocity(), schedule)
        assert float(progress(own, schedule)) == pytest.approx(by_hand(t), abs=1e-9)


def test_progress_is_clipped():
    assert progress(torch.tensor([0.0, 1e-5, 0.9999, 1.0]), MeanVelocity()).tolist() == [1, 1, 0, 0]


def test_the_papers_interval_in_t_with_its_ends():
    low, high = bounds()
    assert low == pytest.approx(0.0563, abs=5e-5)
    assert high == pytest.approx(0.6090, abs=5e-5)
    s = MeanVelocity()
    for t, inside in ((low, 1), (high, 1), (0.0562, 0), (0.6092, 0), (0.3, 1), (low - 1e-6, 0), (high + 1e-6, 0)):
        assert bool(PAPER.contains(t, s)) == bool(inside), t
    assert PAPER.contains(torch.tensor([0.01, low, 0.3, high, 0.9], dtype=torch.float64), s).tolist() == [
        False,
        True,
        True,
        True,
        False,
    ]
    assert bool(PAPER.contains(2.5 * low, MeanVelocity(2.5)))
    assert not bool(PAPER.contains(2.5 * 0.65, MeanVelocity(2.5)))


def test_interval_in_t():
    interval = Interval(0.2, 0.4, "t")
    assert interval.contains(
        torch.tensor([0.19, 0.2, 0.3, 0.4, 0.41], dtype=torch.float64), MeanVelocity()
    ).tolist() == [0, 1, 1, 1, 0]
    assert interval.contains(torch.tensor([0.49, 0.5, 1.0, 1.01], dtype=torch.float64), MeanVelocity(2.5)).tolist() == [
        0,
        1,
        1,
        0,
    ]
    everywhere = Interval()
    assert bool(everywhere.contains(torch.tensor([0.0, 0.5, 1.0]), MeanVelocity()).all())


@pytest.mark.parametrize(
    ("solver", "counts"),
    # (1 - (i/N)^1.4)^4 in [0.0563, 0.6090]: i/N in [0.2155, 0.6206]
    [(adams().for_size(3072), (3, 6, 14)), (adams_power(), (6, 11, 26)), (sa(), (2, 6, 13))],
    ids=["adams", "adams-power", "sa"],
)
def test_how_many_evaluations_the_papers_interval_guides(solver, counts):
    rule = ClassifierFree(1.5, interval=PAPER)
    for nfe, count in zip((13, 26, 65), counts, strict=True):
        times = solver.plan(MeanVelocity(), nfe, 0.0).times[:-1]
        assert guided_evaluations(rule, times, MeanVelocity()) == count
        low, high = bounds()
        assert sum(low - 1e-9 <= t <= high + 1e-9 for t in times) == count
        got = solve(Labelled(), noise(), solver=solver, nfe=nfe, condition=LABELS, guidance=rule)
        assert (got.nfe, got.passes) == (nfe, nfe + count)


@pytest.mark.parametrize("schedule", [MeanVelocity(2.5), LinearFlow()], ids=str)
def test_the_interval_guides_as_many_on_other_schedules(schedule):
    rule = ClassifierFree(1.5, interval=PAPER)
    got = solve(
        Labelled(), noise(), schedule=schedule, solver=adams(), nfe=26, condition=LABELS, guidance=rule, rho=0.75
    )
    assert (got.nfe, got.passes) == (26, 26 + 8)


@pytest.mark.parametrize("rule", [ClassifierFree(1.0), Internal(1.0), Auto(1.0, weak=plain)], ids=lambda r: str(r)[:9])
@pytest.mark.parametrize("solver", ["adams", "sa", "heun", "euler"])
def test_scale_one_costs_nothing_and_changes_nothing(rule, solver):
    bare = solve(Labelled(), noise(), nfe=7, solver=solver, condition=LABELS)
    got = solve(Labelled(), noise(), nfe=7, solver=solver, condition=LABELS, guidance=rule)
    assert (got.nfe, got.passes) == (7, 7)
    assert torch.equal(got.x, bare.x)
    assert guided_evaluations(rule, (0.9, 0.5, 0.1), MeanVelocity()) == 0


def test_the_end_of_a_plan_is_no_evaluation():
    """Its times end at 0, which lies inside every interval up to 1, and nothing is evaluated there."""
    times = adams().plan(MeanVelocity(), 5, 0.0).times
    assert times[-1] == 0
    assert guided_evaluations(ClassifierFree(1.5), times, MeanVelocity()) == 5


def test_outside_the_interval_costs_nothing():
    never = Interval(0.9991, 0.9999)  # between two times of this grid
    bare = solve(Labelled(), noise(), nfe=5, condition=LABELS)
    got = solve(Labelled(), noise(), nfe=5, condition=LABELS, guidance=ClassifierFree(4.0, interval=never))
    assert (got.nfe, got.passes) == (5, 5)
    assert torch.equal(got.x, bare.x)


def test_classifier_free_formula_and_cost():
    x, t = noise(), torch.full((3,), 0.3, dtype=torch.float64)
    for scale in (0.0, 1.5, 4.0, -1.0):
        got = guided(plain, ClassifierFree(scale), MeanVelocity())(x, t, LABELS)
        torch.testing.assert_close(got, x + scale * LABELS.double()[:, None])
    solution = solve(Labelled(), noise(), nfe=6, condition=LABELS, guidance=ClassifierFree(2.0))
    assert (solution.nfe, solution.passes) == (6, 12)


def test_guidance_is_judged_at_the_time_evaluated():
    """Two passes at a time exactly when that very time lies inside."""
    field = Labelled()
    solve(field, noise(), nfe=13, condition=LABELS, guidance=ClassifierFree(2.0, interval=PAPER), rho=0.5)
    low, high = bounds()
    for value in {float(t[0]) for t, _ in field.calls}:
        passes = [c for t, c in field.calls if float(t[0]) == value]
        assert len(passes) == (2 if low <= value <= high else 1)
        assert any(c is not None for c in passes)


@pytest.mark.parametrize("solver", ["heun", "euler-maruyama", "adaptive"])
def test_guidance_does_not_know_solvers(solver):
    """Constant guided answer: every solver must end at null + scale (label - null)."""

    def constant(x, t, condition):
        return torch.zeros_like(x) + (0 if condition is None else condition.to(x.dtype)[:, None])

    got = solve(constant, noise(), nfe=9, solver=solver, condition=LABELS, guidance=ClassifierFree(3.0))
    torch.testing.assert_close(got.x, (3.0 * LABELS.double())[:, None].expand(3, 2))
    assert got.passes == 2 * got.nfe


def test_internal_guidance_is_one_pass():
    got = solve(Labelled(), noise(), nfe=6, condition=LABELS, guidance=Internal(1.7))
    assert (got.nfe, got.passes) == (6, 6)
    x, t = noise(), torch.full((3,), 0.3, dtype=torch.float64)
    outer = plain(x, t, LABELS)
    torch.testing.assert_close(
        guided(Labelled(), Internal(1.7), MeanVelocity())(x, t, LABELS), outer / 2 + 1.7 * outer / 2
    )


def test_autoguidance():
    weak_calls = []

    def weak(x, t, condition):
        weak_calls.append(condition)
        return 0.25 * x

    x, t = noise(), torch.full((3,), 0.3, dtype=torch.float64)
    got = guided(plain, Auto(2.0, weak=weak), MeanVelocity())(x, t, LABELS)
    torch.testing.assert_close(got, 0.25 * x + 2 * (plain(x, t, LABELS) - 0.25 * x))
    assert torch.equal(weak_calls[0], LABELS)
    weak_calls.clear()
    inside = Auto(2.0, weak=weak, interval=PAPER)
    solve(Labelled(), noise(), nfe=13, condition=LABELS, guidance=inside)
    assert len(weak_calls) == 4


class Gaussian:
    """E[x0 | x] of data N(0, std^2) on a path of its own."""

    def __init__(self, std, schedule):
        self.std, self.schedule = std, schedule

    def __call__(self, x, t, condition=None):
        alpha, sigma = like(self.schedule.alpha(t), x), like(self.schedule.sigma(t), x)
        return alpha * self.std**2 * x / (alpha**2 * self.std**2 + sigma**2)


@pytest.mark.parametrize("weak_schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_a_weaker_field_of_another_path_is_asked_at_equal_snr(schedule, weak_schedule):
    """Given the same ratio of signal to noise the posterior mean is the same number, on whatever path."""
    strong, same, other = Gaussian(0.5, schedule), Gaussian(1.5, schedule), Gaussian(1.5, weak_schedule)
    t = schedule.t_from_lam(torch.linspace(-5, 4, 7, dtype=torch.float64))
    x = torch.linspace(-2, 2, 7, dtype=torch.float64)[:, None]
    want = same(x, t) + 1.42 * (strong(x, t) - same(x, t))
    torch.testing.assert_close(guided(strong, Auto(1.42, weak=other), schedule)(x, t), want, rtol=1e-9, atol=1e-12)
    part = schedule.until(0.7 * schedule.end)
    torch.testing.assert_close(guided(strong, Auto(1.42, weak=other), part)(x, t), want, rtol=1e-9, atol=1e-12)
    rule = {"guidance": Auto(1.42, weak=other), "nfe": 12}
    got = solve(strong, noise(), **rule)
    assert (got.nfe, got.passes) == (12, 24)


@pytest.mark.parametrize("weak_schedule", [MeanVelocity(), LinearFlow()], ids=str)
@pytest.mark.parametrize(("weight", "std", "weak_std"), [(1.42, 0.5, 1.5), (2.0, 0.25, 0.3), (0.5, 2.0, 1.0)])
def test_the_ode_of_two_gaussians_ends_where_their_stds_say(weight, std, weak_std, weak_schedule):
    """With z = x/sigma and q = alpha/sigma, dz/dq = w q s^2 z/(1 + q^2 s^2) + (1 - w) (the same with the weaker std).

    So x grows by s^w s_weak^(1 - w) from noise to data.
    """
    strong, weak = Gaussian(std, MeanVelocity()), Gaussian(weak_std, weak_schedule)
    start = torch.tensor([[0.7], [-1.3], [2.0]], dtype=torch.float64)
    got = sample(strong, start, nfe=60, guidance=Auto(weight, weak=weak))
    torch.testing.assert_close(got, start * std**weight * weak_std ** (1 - weight), rtol=2e-3, atol=0)
    alone = sample(strong, start, nfe=60)
    assert torch.equal(sample(strong, start, nfe=60, guidance=Auto(1.0, weak=weak)), alone)


def test_composition_applies_the_first_rule_innermost():
    def weak(x, t, condition):
        return 0.25 * x

    x, t = noise(), torch.full((3,), 0.3, dtype=torch.float64)
    label = LABELS.double()[:, None]
    free, auto = ClassifierFree(2.0), Auto(3.0, weak=weak)
    # cfg = x + 2 label; auto of it = weak + 3 (cfg - weak)
    got = guided(plain, [free, auto], MeanVelocity())(x, t, LABELS)
    torch.testing.assert_close(got, 0.25 * x + 3 * (x + 2 * label - 0.25 * x))
    # auto first: null 0.25x + 3 (.75x) = 2.5x; with label 2.5x + 3 label; cfg: 2.5x + 6 label
    got = guided(plain, (auto, free), MeanVelocity())(x, t, LABELS)
    torch.testing.assert_close(got, 2.5 * x + 6 * label)
    # internal innermost (x + l)/2 (1 + s), then cfg over it: two passes
    got = guided(Labelled(), (Internal(3.0), free), MeanVelocity())(x, t, LABELS)
    torch.testing.assert_close(got, 2 * (x + 2 * label))
    solution = solve(Labelled(), noise(), nfe=6, condition=LABELS, guidance=(Internal(3.0), free))
    assert (solution.nfe, solution.passes) == (6, 12)


def test_each_rule_of_a_composition_has_its_own_interval():
    early, late = Interval(0.0, 0.3), Interval(0.7, 1.0)
    rules = (Internal(3.0, interval=early), ClassifierFree(2.0, interval=late))
    x, label = noise(), LABELS.double()[:, None]
    field = guided(Labelled(), rules, MeanVelocity())
    at = lambda t: field(x, torch.full((3,), t, dtype=torch.float64), LABELS)  # noqa: E731
    torch.testing.assert_close(at(0.98), 2 * (x + label))
    torch.testing.assert_close(at(0.6), x + label)
    torch.testing.assert_close(at(0.01), x + 2 * label)
    assert guided_evaluations(rules, (0.98, 0.6, 0.01), MeanVelocity()) == 2


def test_mixed_times_in_a_batch():
    x = noise(6)
    labels = torch.tensor([1, 2, 3, 4, 5, 6])
    t = torch.tensor([0.01, 0.3, 0.9, 0.3, 0.06, 0.62], dtype=torch.float64)
    got = guided(plain, ClassifierFree(2.0, interval=PAPER), MeanVelocity())(x, t, labels)
    factor = torch.tensor([1.0, 2, 1, 2, 2, 1], dtype=torch.float64)
    torch.testing.assert_close(got, x + (factor * labels)[:, None])


def test_guided_field_samples_as_guidance_does():
    rule = ClassifierFree(2.0, interval=PAPER)
    inside = sample(plain, noise(), nfe=13, condition=LABELS, guidance=rule)
    outside = sample(guided(plain, rule, MeanVelocity()), noise(), nfe=13, condition=LABELS)
    assert torch.equal(inside, outside)


def test_no_rules():
    bare = solve(plain, noise(), nfe=4)
    for none in (None, (), []):
        assert torch.equal(solve(plain, noise(), nfe=4, guidance=none).x, bare.x)


def test_errors():
    x, t = noise(), torch.full((3,), 0.3, dtype=torch.float64)
    with pytest.raises(ValueError, match="condition"):
        guided(plain, ClassifierFree(2.0), MeanVelocity())(x, t, None)
    with pytest.raises(ValueError, match="condition"):
        solve(plain, noise(), guidance=ClassifierFree(2.0))
    with pytest.raises(ValueError, match="inner head"):
        solve(plain, noise(), guidance=Internal(2.0))
    with pytest.raises(ValueError, match="first"):
        solve(Labelled(), noise(), condition=LABELS, guidance=(ClassifierFree(2.0), Internal(2.0)))
    for scale in (math.nan, math.inf):
        with pytest.raises(ValueError, match="scale"):
            ClassifierFree(scale)
    for low, high in ((0.8, 0.6), (-0.1, 0.5), (0.5, 1.1), (math.nan, 1.0)):
        with pytest.raises(ValueError, match="interval"):
            Interval(low, high)
    for rule in (ClassifierFree, Internal, partial(Auto, weak=plain)):
        with pytest.raises(ValueError, match=r"interval=\(0\.6, 0\.8\) must be an Interval .*Interval\(0\.6, 0\.8\)"):
            rule(2.0, interval=(0.6, 0.8))
    with pytest.raises(ValueError, match="'progress'"):
        Interval(measure="progres")
