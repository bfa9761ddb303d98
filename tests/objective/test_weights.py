"""Weights of the loss against closed forms, and that no kind, path or weight moves the optimum."""

import math

import pytest
import torch
from scipy.integrate import quad

from mvm import noise
from mvm.network import Output
from mvm.objective import WEIGHTS, Batch, Matching, ObjectiveConfig
from mvm.objective.weights import flow_weight, likelihood_weight, noise_weight, per_noise
from mvm.oracle import gaussian
from mvm.path import (
    KINDS,
    MEAN_VELOCITY_KINDS,
    LinearFlow,
    MeanVelocity,
    Pair,
    TimeLaw,
    VariancePreserving,
    convert,
    from_pair,
)

MV, FLOW, VP = MeanVelocity(), LinearFlow(), VariancePreserving()
PATHS = (MV, MeanVelocity(2.5), FLOW, VP)
T = torch.tensor([1e-5, 1e-3, 0.1, 0.4, 0.8, 0.99], dtype=torch.float64)
CASES = [(s, k) for s in PATHS for k in KINDS if k not in MEAN_VELOCITY_KINDS or isinstance(s, MeanVelocity)]


def equal(found, want):
    torch.testing.assert_close(found, want, rtol=1e-9, atol=0)


@pytest.mark.parametrize(
    ("schedule", "kind", "want"),
    [
        (MV, "u", (1 - T) ** 2),
        (MV, "x0", (1 - T) ** 2 / T),
        (MV, "v", T * (1 - T) ** 2),
        (FLOW, "flow", (1 - T) ** 2),  # d flow = d eps - d x0 = d eps (1 + t/(1-t))
        (FLOW, "x0", ((1 - T) / T) ** 2),
        (VP, "eps", torch.ones_like(T)),
        (VP, "score", VP.sigma(T) ** 2),
        (VP, "x0", (VP.alpha(T) / VP.sigma(T)) ** 2),
        (VP, "diffusion_v", VP.alpha(T) ** 2),
    ],
)
def test_noise_weight_in_closed_form(schedule, kind, want):
    equal(noise_weight(kind, T, schedule), want)


def test_eps_has_weight_one_exactly():
    assert torch.equal(noise_weight("eps", T, VP), torch.ones_like(T))


def test_likelihood_weight_of_the_score_is_beta():
    """ScoreFlow: lambda(t) = beta(t) on the score, so beta/sigma^2 on eps."""
    beta = 0.1 + 19.9 * T
    equal(likelihood_weight("score", T, VP), beta)
    equal(likelihood_weight("eps", T, VP), beta / VP.sigma(T) ** 2)


@pytest.mark.parametrize("schedule", PATHS, ids=str)
def test_likelihood_weight_of_eps_is_g2_over_sigma2(schedule):
    """g^2/sigma^2 = -2 dlam/dt, by central differences of the schedule's own lam."""
    t = T[1:] * schedule.end
    h = t * 1e-6
    slope = (schedule.lam(t + h) - schedule.lam(t - h)) / (2 * h)
    torch.testing.assert_close(likelihood_weight("eps", t, schedule), -2 * slope, rtol=1e-5, atol=0)


@pytest.mark.parametrize("f", [lambda lam: 1.0, lambda lam: 1 / (1 + math.exp(lam)), lambda lam: math.exp(-(lam**2))])
def test_weighting_by_likelihood_is_drawing_lam_uniformly(f):
    """E over t ~ U(t_min, 1) of g^2/sigma^2 f = 2 (lam(t_min) - lam(1))/(1 - t_min) E over uniform lam of f."""
    t_min = 1e-5
    first, last = float(VP.lam(t_min)), float(VP.lam(1.0))

    def weighted(log_t):
        t = torch.tensor(math.exp(log_t), dtype=torch.float64)
        return float(likelihood_weight("eps", t, VP)) * f(float(VP.lam(t))) * float(t)

    by_weight = quad(weighted, math.log(t_min), 0, limit=200)[0] / (1 - t_min)
    p = (torch.arange(4000, dtype=torch.float64) + 0.5) / 4000
    drawn = TimeLaw("lam-uniform", t_min=t_min).quantile(p, VP)
    by_law = sum(f(float(lam)) for lam in VP.lam(drawn)) / len(p)
    assert by_weight == pytest.approx(2 * (first - last) / (1 - t_min) * by_law, rel=1e-5)


@pytest.mark.parametrize(
    ("schedule", "kind", "want"),
    [
        (MV, "u", torch.ones_like(T)),
        (MV, "v", 1 / T),
        (MV, "x0", T),
        (FLOW, "flow", (1 - T + T.sqrt()) ** 2),
        (VP, "eps", (1 - T) ** 2),
        (VP, "diffusion_v", (1 - T) ** 2 + T),
    ],
)
def test_what_an_error_of_x0_weighs_at_equal_log_snr_less_than_u_or_more(schedule, kind, want):
    """The table of docs/results/equal-terms.md: T is the mean-velocity path's time, whatever path the kind is on."""
    t = schedule.t_from_lam(MV.lam(T))
    alpha, sigma = schedule.alpha(t), schedule.sigma(t)
    per_x0 = from_pair(kind, Pair(-sigma, alpha), t, schedule) / -sigma
    torch.testing.assert_close(per_x0**2 * T, want, rtol=1e-8, atol=0)


ENDS = torch.tensor([0.0, 1.0], dtype=torch.float64)


def test_flow_weight_in_closed_form():
    equal(flow_weight("u", T, MV), (1 - T + T.sqrt()) ** 2)
    equal(flow_weight("x0", T, MV), ((1 - T + T.sqrt()) / T.sqrt()) ** 2)
    equal(flow_weight("diffusion_v", T, VP), (VP.alpha(T) + VP.sigma(T)) ** 2)
    assert torch.equal(flow_weight("u", ENDS, MV), torch.ones(2, dtype=torch.float64))  # finite at both ends
    assert torch.equal(flow_weight("flow", torch.cat((T, ENDS)), FLOW), torch.ones(8, dtype=torch.float64))


@pytest.mark.parametrize(("schedule", "kind"), CASES, ids=str)
def test_flow_weight_makes_the_error_one_of_the_linear_path_s_velocity(schedule, kind):
    """Sample by sample: an error of x0 shows in eps - x0 as it does on the linear path at the same log-SNR."""
    batch = BATCH.cut(slice(200))
    t = LAW.draw(batch.seeds, schedule)
    s = FLOW.t_from_lam(schedule.lam(t))
    wrong = lambda x, t: torch.tanh(x)  # noqa: E731
    eps = noise.normal(batch.seeds, noise.TRAIN, (4,), torch.float64)
    x = schedule.alpha(t)[:, None] * batch.x0 + schedule.sigma(t)[:, None] * eps
    found = wrong(x, t)
    there = (1 - s)[:, None] * batch.x0 + s[:, None] * eps
    error = ((convert(found, "x0", "flow", there, s, FLOW) - (eps - batch.x0)) ** 2).mean(1)
    assert float(loss(schedule, kind, "flow", wrong, batch).total) == pytest.approx(float(error.mean()), rel=1e-9)


class Stub:
    """A network that answers with a function of (x, t)."""

    null, time = 10, "level"

    def __init__(self, answer, t, inner=None):
        self.answer, self.t, self.inner = answer, t, inner

    def __call__(self, x, level, condition, taps=()):
        return Output(self.answer(x, self.t), None if self.inner is None else self.inner(x, self.t), {})


LAW = TimeLaw("lam-normal", 0.3, 1.2)
DATA = gaussian(0.3, 0.5, (4,))
COUNT = 4000
BATCH = Batch(
    DATA.sample(torch.arange(10**6, 10**6 + COUNT)), torch.zeros(COUNT, dtype=torch.int64), torch.arange(COUNT)
)


def loss(schedule, kind, weight, field, batch=BATCH, inner=None):
    """The loss of a field of x0_hat, told as a prediction of that kind."""
    t = LAW.draw(batch.seeds, schedule)

    def told(answer):
        return None if answer is None else lambda x, t: convert(answer(x, t), "x0", kind, x, t, schedule)

    objective = Matching(ObjectiveConfig(kind, weight=weight), schedule, LAW)
    return objective(Stub(told(field), t, told(inner)), batch)


@pytest.mark.parametrize(("schedule", "kind"), CASES, ids=str)
def test_the_same_weight_makes_every_kind_the_same_loss(schedule, kind):
    """Sample by sample: so all kinds have one optimum, and the weight alone says what counts."""

    def wrong(x, t):
        return torch.tanh(x) + t[:, None]

    batch = BATCH.cut(slice(200))
    t = LAW.draw(batch.seeds, schedule)
    eps = noise.normal(batch.seeds, noise.TRAIN, (4,), torch.float64)
    x = schedule.alpha(t)[:, None] * batch.x0 + schedule.sigma(t)[:, None] * eps
    error = ((convert(wrong(x, t), "x0", "eps", x, t, schedule) - eps) ** 2).mean(1)
    assert float(loss(schedule, kind, "noise", wrong, batch).total) == pytest.approx(float(error.mean()), rel=1e-9)
    weighted = (likelihood_weight("eps", t, schedule) * error).mean()
    assert float(loss(schedule, kind, "likelihood", wrong, batch).total) == pytest.approx(float(weighted), rel=1e-9)


@pytest.mark.parametrize("weight", WEIGHTS)
@pytest.mark.parametrize(("schedule", "kind"), CASES, ids=str)
def test_the_posterior_mean_is_the_optimum(schedule, kind, weight):
    """The loss along perfect + step * direction is a parabola with its lowest point at step 0, but for chance."""
    perfect, t = DATA.field(schedule), LAW.draw(BATCH.seeds, schedule)
    weigh = WEIGHTS[weight] or (lambda kind, t, schedule: torch.ones_like(t))
    per_x0 = per_noise(kind, t, schedule) / per_noise("x0", t, schedule)
    scale = 1 / (per_x0 * weigh(kind, t, schedule).sqrt())[:, None]  # a step counts the same at every t
    for direction in (torch.ones_like, lambda x: x):

        def moved(step, direction=direction):
            return float(loss(schedule, kind, weight, lambda x, t: perfect(x, t) + step * scale * direction(x)).total)

        low, middle, high = moved(-1.0), moved(0.0), moved(1.0)
        lowest = (low - high) / (2 * (low + high - 2 * middle))
        assert middle < min(low, high)
        assert lowest == pytest.approx(0, abs=0.05)


def test_the_inner_head_is_weighted_too():
    field = lambda x, t: 0.5 * x  # noqa: E731
    other = lambda x, t: 0.1 * x  # noqa: E731
    found = loss(VP, "score", "noise", field, inner=other).parts
    assert float(found["inner"]) == float(loss(VP, "score", "noise", other).total)
    assert float(found["loss"]) == float(loss(VP, "score", "noise", field).total)


def test_no_weight_is_the_plain_mean_square_bit_for_bit():
    batch = BATCH.cut(slice(50))
    t = LAW.draw(batch.seeds, MV)
    eps = noise.normal(batch.seeds, noise.TRAIN, (4,), torch.float64)
    objective = Matching(ObjectiveConfig("eps"), MV, LAW)
    assert torch.equal(objective(Stub(lambda x, t: x, t), batch).total, torch.mean((_state(batch, t, eps) - eps) ** 2))


def _state(batch, t, eps):
    return MV.alpha(t)[:, None] * batch.x0 + MV.sigma(t)[:, None] * eps


def test_a_law_without_draws_on_the_path_is_refused():
    with pytest.raises(ValueError, match="lam has no lower end on LinearFlow"):
        Matching(ObjectiveConfig("flow"), FLOW, TimeLaw("lam-uniform", t_min=1e-5))


def test_a_weight_of_infinite_mean_is_refused():
    """g^2/sigma^2 = 1/t and more near 0: its mean over t in [h, 1] grows by log 10 with every tenth of h."""
    means = []
    for h in (1e-3, 1e-4, 1e-5):
        t = torch.logspace(math.log10(h), -0.01, 4001, dtype=torch.float64)
        means.append(float(torch.trapezoid(likelihood_weight("eps", t, MV), t)))
    assert means[1] - means[0] == pytest.approx(math.log(10), rel=1e-2)
    assert means[2] - means[1] == pytest.approx(math.log(10), rel=1e-2)
    with pytest.raises(ValueError, match=r"weight='likelihood'.*infinite.*path\.law\.t_min=0\.0; use .*e\.g\. 1e-5"):
        Matching(ObjectiveConfig(weight="likelihood"), MV, TimeLaw())
    Matching(ObjectiveConfig(weight="likelihood"), MV, TimeLaw(t_min=1e-5))


def test_unknown_weight():
    with pytest.raises(ValueError, match=r"objective\.weight='likelyhood'.*'likelihood'"):
        ObjectiveConfig(weight="likelyhood")


@pytest.mark.parametrize(("drop", "conditional"), [(0.0, True), (0.1, True), (0.999, True), (1.0, False)])
def test_a_model_without_labels_is_unconditional(drop, conditional):
    assert ObjectiveConfig(label_drop=drop).conditional == conditional
