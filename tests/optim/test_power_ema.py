"""Power-function averages against profiles written out step by step on a random walk of 2,000 steps."""

import gc
import math
import weakref

import numpy as np
import pytest
import torch

from mvm.optim.power_ema import (
    WIDEST,
    Snapshot,
    combine,
    decay_at,
    exponent,
    fit,
)

STEPS, EVERY = 2000, 100
STORED = [Snapshot(step, exponent(width)) for step in range(EVERY, STEPS + 1, EVERY) for width in (0.05, 0.10)]


def relative_width(gamma):
    return math.sqrt((gamma + 1) / ((gamma + 2) ** 2 * (gamma + 3)))


def profile(snapshot, steps=STEPS):
    """The weight of every step in an average, by its definition."""
    edges = np.minimum(np.arange(steps + 1), snapshot.step) / snapshot.step
    return np.diff(edges ** (snapshot.gamma + 1))


def walk(seed=0):
    """Weights far from 0, as those of a norm are: coefficients that do not add up to 1 would show."""
    return 5 + np.random.default_rng(seed).normal(0, 0.1, STEPS).cumsum()


def tracked(weights, gamma):
    """The average after every step, by its update."""
    averages, average = [], math.nan  # what stands there before the first step must not matter
    for step, value in enumerate(weights):
        beta = decay_at(gamma, step)
        average = (beta * average if beta else 0.0) + (1 - beta) * value
        averages.append(average)
    return np.array(averages)


@pytest.mark.parametrize("width", [1e-4, 0.01, 0.03, 0.05, 0.1, 0.2, 0.2799])
def test_width_round_trip(width):
    assert relative_width(exponent(width)) == pytest.approx(width, rel=1e-9)
    assert exponent(width) > 0


def test_exponents_of_the_paper():
    assert exponent(0.05) == pytest.approx(16.97, abs=5e-3)
    assert exponent(0.10) == pytest.approx(6.94, abs=5e-3)


def test_width_is_the_deviation_of_the_profile():
    weights, times = profile(Snapshot(STEPS, exponent(0.1))), (np.arange(STEPS) + 0.5) / STEPS
    mean = weights @ times
    assert math.sqrt(weights @ (times - mean) ** 2) == pytest.approx(0.1, rel=1e-4)


@pytest.mark.parametrize("width", [0.03, 0.05, 0.10, 0.2])
def test_the_update_gives_exactly_the_profile(width):
    gamma, weights = exponent(width), walk()
    averages = tracked(weights, gamma)
    assert averages[0] == weights[0]
    for step in (1, 2, 37, STEPS):
        assert averages[step - 1] == pytest.approx(profile(Snapshot(step, gamma)) @ weights, rel=1e-12)


@pytest.mark.parametrize(
    ("width", "error"),
    [(0.03, 0.03), (0.04, 0.007), (0.06, 0.003), (0.08, 0.002), (0.12, 0.003), (0.15, 0.006), (0.20, 0.016)],
)
def test_rebuilt_average_equals_the_tracked_one(width, error):
    """From 0.05 and 0.10 stored every 100 steps: off by 0.2% of the walk's range, and never past the L2 bound."""
    target = Snapshot(STEPS, exponent(width))
    weights = walk()
    averages = {gamma: tracked(weights, gamma) for gamma in {entry.gamma for entry in STORED}}
    stored = np.array([averages[entry.gamma][entry.step - 1] for entry in STORED])
    rebuilt, wanted = fit(STORED, target)[0] @ stored, tracked(weights, target.gamma)[-1]
    assert rebuilt == pytest.approx(wanted, abs=0.002 * np.ptp(weights))
    assert fit(STORED, target)[1] < error
    length = (target.gamma + 1) / math.sqrt((2 * target.gamma + 1) * STEPS)  # |target| in L2
    bound = fit(STORED, target)[1] * length * np.linalg.norm(weights - weights.mean())
    assert abs(rebuilt - wanted) <= bound


@pytest.mark.parametrize("width", [0.03, 0.07, 0.15, 0.25])
def test_error_is_the_distance_of_the_profiles(width):
    target = Snapshot(STEPS, exponent(width))
    fitted = fit(STORED, target)[0] @ np.stack([profile(entry) for entry in STORED])
    wanted = profile(target)
    relative = np.linalg.norm(fitted - wanted) / np.linalg.norm(wanted)
    assert fit(STORED, target)[1] == pytest.approx(relative, rel=0.01)  # steps of 1 against an integral


def test_no_other_coefficients_are_nearer():
    target = Snapshot(STEPS, exponent(0.07))
    best, rng = fit(STORED, target)[0], np.random.default_rng(1)
    rows, wanted = np.stack([profile(entry) for entry in STORED]), profile(target)
    nearest = np.linalg.norm(best @ rows - wanted)
    for _ in range(50):
        other = rng.normal(0, 0.01, len(best))
        assert np.linalg.norm((best + other - other.mean()) @ rows - wanted) > nearest


@pytest.mark.parametrize("place", [0, 7, 20, 39])
def test_a_stored_average_is_given_back(place):
    found = fit(STORED, STORED[place])[0]
    assert found == pytest.approx(np.eye(len(STORED))[place], abs=1e-9)
    assert fit(STORED, STORED[place])[1] < 1e-7


@pytest.mark.parametrize("target", [Snapshot(1950, exponent(0.1)), Snapshot(STEPS, exponent(0.2)), Snapshot(40, 30.0)])
def test_coefficients_add_up_to_one(target):
    assert fit(STORED, target)[0].sum() == pytest.approx(1, abs=1e-12)


def test_long_runs_and_many_snapshots_stay_stable():
    """Scaled to 50 million steps nothing changes; ten times as many snapshots only help."""
    long = [Snapshot(entry.step * 25_000, entry.gamma) for entry in STORED]
    target = Snapshot(STEPS, exponent(0.07))
    scaled = fit(long, Snapshot(STEPS * 25_000, target.gamma))[0]
    assert scaled == pytest.approx(fit(STORED, target)[0], abs=1e-8)
    dense = [Snapshot(step, entry.gamma) for step in range(2000, 10**6 + 1, 2000) for entry in STORED[:2]]
    assert fit(dense, Snapshot(10**6, exponent(0.07)))[1] < 1e-5
    assert abs(fit(dense, Snapshot(10**6, exponent(0.07)))[0]).sum() < 3  # no cancelling of large numbers


def test_error_says_when_an_average_cannot_be_had():
    assert fit(STORED, Snapshot(STEPS, exponent(0.005)))[1] > 0.3  # ten times narrower than any stored
    assert fit(STORED[:4], Snapshot(STEPS, exponent(0.05)))[1] > 0.9  # long after the last stored
    assert fit(STORED[-2:-1], Snapshot(STEPS, exponent(0.05)))[1] < 1e-7


def test_one_snapshot_and_one_given_twice():
    assert fit(STORED[:1], Snapshot(500, 3.0))[0].tolist() == [1.0]
    target = Snapshot(STEPS, exponent(0.07))
    assert fit(STORED + STORED[-1:], target)[1] == pytest.approx(fit(STORED, target)[1], rel=1e-6)
    assert fit(STORED + STORED[-1:], target)[0].sum() == pytest.approx(1)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_combine_is_the_weighted_sum(dtype):
    torch.manual_seed(0)
    parts = [
        (c, {"a": torch.randn(3, 2).to(dtype), "b": torch.randn(4).to(dtype)}) for c in (2.5, np.float64(-1), -0.5)
    ]
    kept = [{name: value.clone() for name, value in weights.items()} for _, weights in parts]
    total = combine(iter(parts))
    for name in ("a", "b"):
        want = sum(float(c) * weights[name].double() for c, weights in parts)
        assert total[name].dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        assert torch.allclose(total[name].double(), want, atol=1e-6)
        assert all(torch.equal(weights[name], before[name]) for (_, weights), before in zip(parts, kept, strict=True))


def test_combine_of_one_shares_no_memory_with_it():
    weights = {"a": torch.ones(2, requires_grad=True)}
    total = combine([(1.0, weights)])
    assert total["a"].data_ptr() != weights["a"].data_ptr()
    assert not total["a"].requires_grad


def test_combine_holds_one_snapshot_at_a_time():
    alive: list[weakref.ref] = []

    def load():
        value = torch.ones(5)
        alive.append(weakref.ref(value))
        return {"a": value, "b": torch.ones(2)}

    def snapshots():
        for _ in range(4):
            gc.collect()
            assert all(reference() is None for reference in alive)
            yield 0.25, load()

    assert torch.equal(combine(snapshots())["a"], torch.ones(5))
    assert len(alive) == 4


def test_tracked_snapshots_of_a_network_rebuild_another_average():
    """The whole way, with tensors: update by lerp, store, solve, combine."""
    weights = torch.tensor(walk(3))[:, None] * torch.tensor([1.0, -2.0])  # (steps, 2)
    stored, target = {}, Snapshot(STEPS, exponent(0.08))
    for gamma in {entry.gamma for entry in STORED}:
        average = torch.zeros(2, dtype=torch.float64)
        for step, value in enumerate(weights):
            average.lerp_(value, 1 - decay_at(gamma, step))
            stored[Snapshot(step + 1, gamma)] = average.clone()
    solved = zip(fit(STORED, target)[0], STORED, strict=True)
    rebuilt = combine((c, {"w": stored[entry]}) for c, entry in solved)["w"]
    wanted = torch.tensor(profile(target)) @ weights
    assert torch.allclose(rebuilt, wanted, rtol=0, atol=0.005)


@pytest.mark.parametrize("width", [0.0, -0.1, 0.28, math.nan, math.inf])
def test_bad_widths_are_named(width):
    with pytest.raises(ValueError, match=rf"relative width {width} is out of range"):
        exponent(width)


def test_bad_snapshots_are_named():
    with pytest.raises(ValueError, match="snapshots is empty"):
        fit([], Snapshot(1, 1.0))[0]
    with pytest.raises(ValueError, match="tensors is empty"):
        combine([])
    with pytest.raises(ValueError, match=r"\['b', 'c'\] are not in all"):
        combine([(0.5, {"a": torch.ones(1), "b": torch.ones(1)}), (0.5, {"a": torch.ones(1), "c": torch.ones(1)})])


def test_widest_is_below_the_flat_average():
    assert relative_width(0) == pytest.approx(1 / math.sqrt(12))
    assert relative_width(0) > WIDEST
