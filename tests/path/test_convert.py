"""Prediction kinds: the formulas of the paper and docs/reference/notation.md, every round trip, and both ends."""

import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from mvm.path import KINDS, LinearFlow, MeanVelocity, Pair, VariancePreserving, convert, from_pair, to_pair, to_x0
from mvm.path.convert import Moment

FINITE = ("u", "x0", "eps", "diffusion_v")
DIVERGENT = ("v", "score", "flow")
EVERYWHERE = ("x0", "eps", "diffusion_v", "flow", "score")


def test_the_kinds_are_these():
    assert set(KINDS) == {*FINITE, *DIVERGENT}


def draw(seed: int = 0, batch: int = 4) -> Pair:
    generator = torch.Generator().manual_seed(seed)
    make = lambda: torch.randn(batch, 2, 3, generator=generator, dtype=torch.float64)  # noqa: E731
    return Pair(make(), make())


def state(pair, t, schedule):
    shape = (-1, 1, 1)
    return schedule.alpha(t).reshape(shape) * pair.x0 + schedule.sigma(t).reshape(shape) * pair.eps


def by_hand(kind, x0, eps, t, T):
    """Paper sections 3.2.2 and 3.3 (v, u, score, flow) and docs/reference/notation.md (Kinds), at one t."""
    x = (1 - t / T) * x0 + math.sqrt(t / T) * eps
    v = (x0 - x) / t
    return {
        "x0": x0,
        "eps": eps,
        "v": v,
        "u": math.sqrt(t) * v,
        "score": (T - t) * v - x,
        "diffusion_v": (1 - t / T) * eps - math.sqrt(t / T) * x0,
        # dx/dt = -dx/dtau of theorem 6's probability flow
        "flow": -((T + t) / (2 * T) * v + x / (2 * T)),
    }[kind]


@pytest.mark.parametrize("T", [1.0, 2.5])
@pytest.mark.parametrize("part", [1e-4, 0.1, 0.5, 0.95, 1.0])
@pytest.mark.parametrize("kind", list(KINDS))
def test_formulas_of_the_method(kind, part, T):
    pair, t, s = draw(), part * T, MeanVelocity(T)
    want = by_hand(kind, *pair, t, T)
    torch.testing.assert_close(from_pair(kind, pair, t, s), want, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("T", [1.0, 2.5])
def test_printed_forms_of_u_and_score(T):
    pair, s = draw(), MeanVelocity(T)
    for t in (0.01 * T, 0.4 * T, T):
        x = state(pair, torch.tensor(t, dtype=torch.float64), s)
        u = from_pair("u", pair, t, s)
        torch.testing.assert_close(u, math.sqrt(t) / T * pair.x0 - pair.eps / math.sqrt(T))
        torch.testing.assert_close(to_x0("u", u, x, t, s), x + math.sqrt(t) * u)
        eps = math.sqrt(t / T) * x - (1 - t / T) * math.sqrt(T) * u
        torch.testing.assert_close(to_pair("u", u, x, t, s).eps, eps)
        torch.testing.assert_close(eps, pair.eps)
        torch.testing.assert_close(from_pair("score", pair, t, s), -pair.eps / math.sqrt(t / T))


@pytest.mark.parametrize("s", [LinearFlow(), VariancePreserving()], ids=str)
def test_other_schedules_by_hand(s):
    pair, t = draw(), torch.tensor([0.1, 0.4, 0.7, 0.99], dtype=torch.float64)
    a, b = (c.reshape(-1, 1, 1) for c in (s.alpha(t), s.sigma(t)))
    torch.testing.assert_close(from_pair("diffusion_v", pair, t, s), a * pair.eps - b * pair.x0)
    torch.testing.assert_close(from_pair("score", pair, t, s), -pair.eps / b)
    if isinstance(s, LinearFlow):
        torch.testing.assert_close(from_pair("flow", pair, t, s), pair.eps - pair.x0)
    moved = state(pair, t + 1e-5, s) - state(pair, t - 1e-5, s)
    torch.testing.assert_close(from_pair("flow", pair, t, s), moved / 2e-5, rtol=1e-5, atol=1e-5)


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(list(KINDS)),
    st.sampled_from(list(KINDS)),
    st.sampled_from([MeanVelocity(), MeanVelocity(2.5), MeanVelocity(0.2), LinearFlow(), VariancePreserving()]),
    st.lists(st.floats(0.002, 0.998), min_size=3, max_size=3),
    st.integers(0, 10**6),
)
def test_every_kind_to_every_kind_and_back(source, target, schedule, parts, seed):
    assume(isinstance(schedule, MeanVelocity) or not {source, target} & {"u", "v"})
    pair, t = draw(seed, 3), torch.tensor(parts, dtype=torch.float64) * schedule.end
    x = state(pair, t, schedule)
    value = from_pair(source, pair, t, schedule)
    there = convert(value, source, target, x, t, schedule)
    assert there.shape == x.shape
    scale = 1e-9 * (1 + float(from_pair(target, pair, t, schedule).abs().max()))
    # VP's signal is small near its end: x0 = (x - sigma eps)/alpha loses digits
    scale /= float(schedule.alpha(t).min())
    torch.testing.assert_close(there, from_pair(target, pair, t, schedule), rtol=1e-8, atol=scale)
    back = convert(there, target, source, x, t, schedule)
    torch.testing.assert_close(back, value, rtol=1e-7, atol=10 * scale * (1 + float(value.abs().max())))


@pytest.mark.parametrize("kind", list(KINDS))
def test_same_kind_is_untouched_at_both_ends(kind):
    value = draw().x0
    for t in (0.0, 1.0):
        assert torch.equal(convert(value, kind, kind, value, t, MeanVelocity()), value)


@pytest.mark.parametrize("T", [1.0, 2.5])
@pytest.mark.parametrize("kind", FINITE)
@pytest.mark.parametrize("part", [0.0, 1.0])
def test_finite_kinds_are_finite_at_both_ends(kind, part, T):
    pair, t = draw(), part * T
    value = from_pair(kind, pair, t, MeanVelocity(T))
    want = {
        "u": -pair.eps / math.sqrt(T) if part == 0 else (pair.x0 - pair.eps) / math.sqrt(T),
        "x0": pair.x0,
        "eps": pair.eps,
        "diffusion_v": pair.eps if part == 0 else -pair.x0,
    }[kind]
    torch.testing.assert_close(value, want)


@pytest.mark.parametrize("kind", ["u", "diffusion_v"])
@pytest.mark.parametrize("t", [0.0, 1.0])
def test_u_and_diffusion_v_give_both_members_at_both_ends(kind, t):
    pair, s = draw(), MeanVelocity()
    x = pair.x0 if t == 0 else pair.eps
    got = to_pair(kind, from_pair(kind, pair, t, s), x, t, s)
    torch.testing.assert_close(got.x0, pair.x0)
    torch.testing.assert_close(got.eps, pair.eps)


@pytest.mark.parametrize("kind", DIVERGENT)
def test_divergent_kinds_are_infinite_at_zero(kind):
    value = from_pair(kind, draw(), 0.0, MeanVelocity())
    assert bool(torch.isinf(value).all())
    # the sign is that of the noise: v and score point against it, dx/dt along it
    sign = 1 if kind == "flow" else -1
    assert torch.equal(torch.sign(value), sign * torch.sign(draw().eps))
    assert bool(torch.isinf(convert(draw().x0, "u", kind, draw().x0, 0.0, MeanVelocity())).all())


def test_linear_flow_velocity_is_finite_at_zero():
    pair, s = draw(), LinearFlow()
    flow = from_pair("flow", pair, 0.0, s)
    torch.testing.assert_close(flow, pair.eps - pair.x0)
    got = to_pair("flow", flow, pair.x0, 0.0, s)
    torch.testing.assert_close(got.eps, pair.eps)


@pytest.mark.parametrize("source", ["x0", *DIVERGENT])
@pytest.mark.parametrize("target", ["eps", "u"])
def test_no_noise_from_a_clean_image_at_zero(source, target):
    x = draw().x0
    with pytest.raises(ValueError, match=r"t=0\.0"):
        convert(x, source, target, x, 0.0, MeanVelocity())


@pytest.mark.parametrize("source", ["eps", "score"])
@pytest.mark.parametrize("target", ["x0", "u"])
@pytest.mark.parametrize("T", [1.0, 2.5])
def test_no_image_from_noise_at_one(source, target, T):
    x = draw().x0
    with pytest.raises(ValueError, match=f"t={T}"):
        convert(x, source, target, x, T, MeanVelocity(T))


def test_the_offending_time_of_a_batch_is_named():
    x, t = draw().x0, torch.tensor([0.3, 0.5, 1.0, 0.2], dtype=torch.float64)
    with pytest.raises(ValueError, match=r"t=1\.0"):
        convert(x, "eps", "x0", x, t, MeanVelocity())
    with pytest.raises(ValueError, match=r"t=0\.0"):
        convert(x, "x0", "eps", x, torch.tensor([0.3, 0.0, 1.0, 0.2]), MeanVelocity())


@pytest.mark.parametrize(("source", "target"), [("eps", "score"), ("score", "eps")])
def test_score_and_noise_need_no_image_at_one(source, target):
    """score = -eps/sigma: nothing is indeterminate between these two at t = 1."""
    eps = draw().eps
    torch.testing.assert_close(convert(eps, source, target, eps, 1.0, MeanVelocity()), -eps)


def test_clean_image_from_v_at_one_and_x0_kinds_where_they_hold():
    pair, s = draw(), MeanVelocity()
    for kind in ("u", "v", "x0", "diffusion_v", "flow"):
        value = from_pair(kind, pair, 1.0, s)
        torch.testing.assert_close(to_x0(kind, value, pair.eps, 1.0, s), pair.x0)
    for kind in ("u", "x0", "eps", "diffusion_v"):
        value = from_pair(kind, pair, 0.0, s)
        torch.testing.assert_close(to_x0(kind, value, pair.x0, 0.0, s), pair.x0)


@pytest.mark.parametrize("kind", ["u", "v"])
@pytest.mark.parametrize("schedule", [LinearFlow(), VariancePreserving()], ids=str)
def test_u_belongs_to_mean_velocity(kind, schedule):
    x = draw().x0
    with pytest.raises(ValueError, match="MeanVelocity"):
        to_x0(kind, x, x, 0.5, schedule)
    with pytest.raises(ValueError, match="MeanVelocity"):
        to_pair(kind, x, x, 0.5, schedule)
    with pytest.raises(ValueError, match="MeanVelocity"):
        from_pair(kind, draw(), 0.5, schedule)


@pytest.mark.parametrize(("typo", "meant"), [("scores", "score"), ("epsilon", "eps"), ("diffusion-v", "diffusion_v")])
def test_unknown_kind_suggests_the_nearest(typo, meant):
    x = draw().x0
    for call in (
        lambda: to_x0(typo, x, x, 0.5, MeanVelocity()),
        lambda: convert(x, "x0", typo, x, 0.5, MeanVelocity()),
        lambda: from_pair(typo, draw(), 0.5, MeanVelocity()),
    ):
        with pytest.raises(ValueError, match=f"did you mean '{meant}'") as error:
            call()
        assert typo in str(error.value)


def test_dtype_is_kept_and_times_differ_by_row():
    pair = Pair(*(z.float() for z in draw()))
    t = torch.tensor([0.1, 0.4, 0.6, 0.9], dtype=torch.float64)
    for kind in KINDS:
        value = from_pair(kind, pair, t, MeanVelocity())
        assert value.dtype == torch.float32
        for i in range(4):
            row = from_pair(kind, Pair(pair.x0[i : i + 1], pair.eps[i : i + 1]), float(t[i]), MeanVelocity())
            torch.testing.assert_close(value[i : i + 1], row)


@pytest.mark.parametrize("recorded", [False, True])
def test_times_are_not_looked_at_while_a_gpu_s_work_is_recorded(monkeypatch, recorded):
    looks = []
    where = SimpleNamespace(is_cuda=True, any=lambda: bool(looks.append(1)))  # no answer can be had of a real one
    monkeypatch.setattr("torch.cuda.is_current_stream_capturing", lambda: recorded)
    Moment(MeanVelocity(), torch.tensor(0.5), torch.zeros(1)).refuse(where, "x")
    assert looks == ([] if recorded else [1])
