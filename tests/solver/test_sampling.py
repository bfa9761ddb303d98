"""The front door: what is refused, what is kept (dtype, seeds, batch), and what is reported."""

import math
import warnings

import pytest
import torch

import mvm
from mvm import noise
from mvm.oracle import gaussian, mixture
from mvm.path import LinearFlow, MeanVelocity, VariancePreserving
from mvm.solver import SOLVERS, Adaptive, adams, sample, solve, solver_named
from mvm.verify.solvers import sampled_stds

MV = MeanVelocity()
SDE = ("adams", "sa", "euler-maruyama")


def bent(x, t, condition):
    """An elementwise field: bit-equal in any batch, unlike a matrix product."""
    label = 0 if condition is None else condition.to(x.dtype)[:, None]
    return torch.tanh(x) * 0.8 + label * 0.1


def start(batch=4, dtype=torch.float64):
    return noise.initial(torch.arange(batch), (3,), dtype)


def test_the_package_offers_sample():
    assert torch.equal(mvm.sample(bent, start(), nfe=3), sample(bent, start(), nfe=3))
    assert torch.equal(solve(bent, start(), nfe=3).x, sample(bent, start(), nfe=3))


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"nfe": 0}, "nfe=0"),
        ({"nfe": -3}, "nfe=-3"),
        ({"nfe": 2.5}, "nfe=2.5"),
        ({"nfe": 4.0}, "nfe=4.0"),
        ({"nfe": True}, "nfe=True"),
        ({"nfe": "4"}, "nfe='4'"),
        ({"rho": -0.1}, "rho=-0.1"),
        ({"rho": math.nan}, "rho=nan"),
        ({"rho": math.inf}, "rho=inf"),
        ({"seeds": [1, 2]}, "2 entries"),
        ({"seeds": range(5)}, "5 entries"),
        ({"seeds": [1, 2, 3, -4]}, "-4"),
        ({"condition": torch.zeros(3, dtype=torch.int64)}, "condition"),
        ({"condition": {"text": torch.zeros(3, 2)}}, "condition['text']"),
        ({"condition": "cat"}, "condition"),
        ({"solver": "adam"}, "did you mean 'adams'"),
        ({"solver": "huen"}, "did you mean 'heun'"),
        ({"solver": "zzz"}, "allowed: adams"),
        ({"solver": "euler", "rho": 0.5}, "euler-maruyama"),
        ({"solver": "heun", "rho": 0.5}, "rho=0.5"),
        ({"solver": "adaptive", "rho": 0.5}, "rho=0.5"),
        ({"solver": "dopri5", "rho": 0.5}, "solver 'dopri5'"),
    ],
    ids=str,
)
def test_bad_options_are_refused_by_name_and_before_any_evaluation(options, named):
    def never(x, t, condition):
        raise AssertionError("evaluated")

    for call in (sample, solve):
        with pytest.raises(ValueError, match=r".") as error:
            call(never, start(), **options)
        assert named in str(error.value)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_noise_must_be_finite(value):
    x = start()
    x[2, 1] = value
    with pytest.raises(ValueError, match="noise"):
        sample(bent, x)


@pytest.mark.parametrize("bad", [torch.zeros(4, 3, dtype=torch.int64), torch.zeros(4), torch.tensor(1.0)], ids=str)
def test_noise_must_be_a_batch_of_floats(bad):
    with pytest.raises(ValueError, match="noise"):
        sample(bent, bad)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", list(SOLVERS))
def test_dtype_in_is_dtype_out(name, dtype):
    inner = []

    def field(x, t, condition):
        inner.append(x.dtype)
        return bent(x, t, condition)

    got = sample(field, start(dtype=dtype), solver=name, nfe=5, rho=0.5 * (name in SDE), seeds=range(4))
    assert got.dtype == dtype
    assert set(inner) == {torch.float64 if dtype == torch.float64 else torch.float32}
    want = sample(bent, start(dtype=dtype).double(), solver=name, nfe=5, rho=0.5 * (name in SDE), seeds=range(4))
    eps = torch.finfo(dtype).eps
    tolerance = max(4 * eps, 1e-4 if name in ("adaptive", "dopri5") else 1e-5 if eps > 1e-10 else 1e-12)
    torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=tolerance)


HALVES = (torch.float16, torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", ["adams", "sa", "heun", "euler-maruyama", "dpm++2m", "adaptive"])
def test_noise_is_integrated_in_float32_or_float64_and_returned_in_its_own_dtype(name, dtype):
    """Half-precision noise is only where the path begins: its image is the float32 image, rounded once at the end."""
    x, options = start(dtype=dtype), {"solver": name, "nfe": 6, "rho": 0.5 * (name in SDE), "seeds": range(4)}
    wide = sample(bent, x.float() if dtype in HALVES else x, **options)
    assert wide.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    got = sample(bent, x, **options)
    assert got.dtype == dtype
    assert torch.equal(got, wide.to(dtype))


@pytest.mark.parametrize("answer", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", ["adams", "heun"])
def test_an_answer_of_the_field_is_widened_to_the_state_and_never_narrowed(name, dtype, answer):
    """A network that answers in half precision is rounded there and nowhere else."""
    states = []
    field = lambda x, t, condition: bent(x, t, condition).to(answer)  # noqa: E731
    got = solve(field, start(dtype=dtype), solver=name, nfe=5, on_step=states.append).x
    inside = torch.promote_types(torch.float64 if dtype == torch.float64 else torch.float32, answer)
    assert {part.dtype for state in states for part in (state.x, *state.history)} == {inside}
    assert got.dtype == dtype
    told = lambda x, t, condition: field(x, t, condition).to(inside)  # noqa: E731
    assert torch.equal(got, sample(told, start(dtype=dtype), solver=name, nfe=5))


def test_the_noise_handed_in_is_not_changed():
    for dtype in (torch.float16, torch.float64):
        x = start(dtype=dtype)
        kept = x.clone()
        sample(bent, x, nfe=4, rho=1.0)
        assert torch.equal(x, kept)


@pytest.mark.parametrize(
    ("name", "rho"),
    [("heun", 0.0), ("euler", 0.0), *((name, rho) for name in SDE for rho in (0.0, 0.75, 1.0))],
)
def test_same_seed_same_image_in_any_batch(name, rho):
    seeds = torch.tensor([11, 5, 2**40, 7, 0, 3, 99])
    labels = torch.tensor([1, 2, 3, 4, 5, 6, 7])

    def draw(rows):
        rows = torch.tensor(rows)
        x = noise.initial(seeds[rows], (3, 5), torch.float32)
        field = lambda x, t, c: torch.tanh(x) * 0.8 + 0.1 * c.to(x.dtype)[:, None, None]  # noqa: E731
        return sample(field, x, solver=name, nfe=6, rho=rho, seeds=seeds[rows], condition=labels[rows])

    whole = draw(list(range(7)))
    assert torch.equal(draw([0, 1, 2, 3]), whole[:4])
    assert torch.equal(draw([6, 4, 2, 0]), whole[[6, 4, 2, 0]])
    for i in range(7):
        assert torch.equal(draw([i]), whole[i : i + 1])


def test_seeds_matter_for_the_sde_alone():
    ode = [sample(bent, start(), nfe=5, seeds=range(k, k + 4)) for k in (0, 10)]
    assert torch.equal(*ode)
    sde = [sample(bent, start(), nfe=5, rho=0.5, seeds=range(k, k + 4)) for k in (0, 10)]
    assert not torch.equal(*sde)


def test_step_noise_is_fresh_and_independent_of_the_initial_noise():
    """One seed for everything is the natural use: start and steps must not share numbers."""
    seeds = torch.arange(20_000)
    x = noise.initial(seeds, (1,), torch.float64)
    got = sample(gaussian(0.3, 0.5).field(MV), x, nfe=26, rho=1.0, seeds=seeds)
    assert float(got.mean()) == pytest.approx(0.3, abs=5 * 0.5 / math.sqrt(20_000))
    assert float(got.std()) == pytest.approx(0.5, rel=0.03)


def test_seeds_are_drawn_once_and_reproducible():
    torch.manual_seed(3)
    first = solve(bent, start(), nfe=4, rho=1.0)
    torch.manual_seed(3)
    again = solve(bent, start(), nfe=4, rho=1.0)
    assert torch.equal(first.x, again.x)
    assert torch.equal(first.seeds, again.seeds)
    assert first.seeds.shape == (4,)
    other = solve(bent, start(), nfe=4, rho=1.0)
    assert not torch.equal(other.x, first.x)
    # the reported seeds repeat the run
    assert torch.equal(solve(bent, start(), nfe=4, rho=1.0, seeds=first.seeds).x, first.x)
    assert torch.equal(solve(bent, start(), nfe=4, rho=1.0, seeds=first.seeds.tolist()).x, first.x)


@pytest.mark.parametrize("name", [n for n in SOLVERS if n not in ("adaptive", "dopri5")])
def test_the_cost_is_reported_and_steps_are_seen(name):
    states = []
    got = solve(bent, start(), solver=name, nfe=7, on_step=states.append)
    assert (got.nfe, got.passes) == (7, 7)
    assert [s.index for s in states] == list(range(1, len(states) + 1))
    assert torch.equal(states[-1].x, got.x)
    assert all(s.history for s in states)  # viewers show x0_hat


@pytest.mark.parametrize("schedule", [MV, LinearFlow()], ids=str)
def test_adaptive_reports_its_count(schedule):
    field = gaussian(0.3, 0.5, (3,)).field(schedule)
    calls = []

    def counted(x, t, condition):
        calls.append(float(t[0]))
        return field(x, t, condition)

    rough = solve(counted, start(), schedule=schedule, solver=Adaptive(1e-3, 1e-3), nfe=1)
    assert rough.nfe == rough.passes == -(-len(calls) // len(start())) > 6  # the mean over samples, rounded up
    fine = solve(field, start(), schedule=schedule, solver=Adaptive(1e-8, 1e-8, 1e-9), nfe=1)
    assert fine.nfe > rough.nfe
    torch.testing.assert_close(
        fine.x, 0.3 + 0.5 * start(), rtol=0, atol=1e-5
    )  # alpha = 0 at the end: x = mean + std eps
    assert float((rough.x - fine.x).abs().max()) < 0.05


@pytest.mark.parametrize("schedule", [MV, MeanVelocity(2.5), LinearFlow(), VariancePreserving()], ids=str)
@pytest.mark.parametrize("tolerance", [1e-3, 1e-5, 1e-8])
def test_adaptive_stays_between_the_end_and_t_min(schedule, tolerance):
    """A network knows no t below 0: the last step must not overshoot."""
    times = []

    def field(x, t, condition):
        times.append(float(t[0]))
        return gaussian(0.3, 0.5, (3,)).denoise(x, t, schedule)

    solve(field, start(), schedule=schedule, solver=Adaptive(tolerance, tolerance, t_min=1e-5))
    assert max(times) == pytest.approx(schedule.end)
    assert min(times) == pytest.approx(1e-5 * schedule.end)


@pytest.mark.parametrize("solver", [Adaptive(1e-4, 1e-4), Adaptive(1e-4, 1e-4, joint=True)], ids=["each", "joint"])
@pytest.mark.parametrize("T", [1e-3, 1000.0])
def test_adaptive_does_not_know_the_scale_of_time(solver, T):
    found = [
        solve(gaussian(0.3, 0.01, (3,)).field(MeanVelocity(T)), start(), schedule=MeanVelocity(T), solver=solver)
        for T in (1.0, T)
    ]
    assert found[0].nfe == found[1].nfe
    torch.testing.assert_close(found[1].x, found[0].x, rtol=0, atol=1e-9)


def test_the_last_time_of_adaptive_is_a_share():
    with pytest.raises(ValueError, match=r"t_min=1\.0.*below 1"):
        Adaptive(t_min=1.0)


def test_conditions_reach_the_field():
    oracle = mixture(torch.tensor([[-3.0], [3.0]]), 0.1, labels=torch.tensor([0, 1]))
    labels = torch.tensor([0, 1, 1, 0])
    x = noise.initial(torch.arange(4), (1,), torch.float64)
    got = sample(oracle.field(MV), x, condition=labels, rho=0.75, seeds=range(4))
    torch.testing.assert_close(got, 6.0 * labels.double()[:, None] - 3, rtol=0, atol=0.6)


def test_no_gradients_are_kept():
    weight = torch.tensor(0.5, requires_grad=True)
    got = sample(lambda x, t, c: weight * x, start(), nfe=3)
    assert not got.requires_grad


def test_a_solver_object_is_taken_as_it_is():
    assert torch.equal(sample(bent, start(), solver=adams(), nfe=5), sample(bent, start(), solver="adams", nfe=5))
    assert not torch.equal(sample(bent, start(), solver=adams(1, 0), nfe=5), sample(bent, start(), nfe=5))


def test_images_of_any_rank():
    for shape in ((2,), (1, 4, 4), (3, 2, 2, 2)):
        x = noise.initial(torch.arange(2), shape)
        got = sample(lambda x, t, c: 0.5 * torch.tanh(x), x, nfe=4, rho=1.0, seeds=[1, 2])
        assert got.shape == x.shape


def test_what_a_model_cannot_take_is_named():
    model = mvm.load("digits")
    good = torch.zeros(2, 1, 8, 8)
    with pytest.raises(ValueError, match="schedule='mean-velocity' is no schedule; leave it out"):
        mvm.sample(model, good, schedule="mean-velocity", nfe=1)
    with pytest.raises(ValueError, match=r"noise of shape \(2, 1, 16, 16\).*\(1, 8, 8\)"):
        mvm.sample(model, torch.zeros(2, 1, 16, 16), schedule=model.schedule, nfe=1)


# --- more noise than so few evaluations can carry -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "rho"), [("adams", 1.5), ("adams", 3.0), ("adams-power", 1.5), ("adams-power", 3.0), ("sa", 3.0)]
)
def test_noise_is_warned_of_where_it_inflates_the_std(name, rho):
    """Exact stds: within 5 % from 10 rho^2 evaluations on, beyond it at half of them, where there is a warning."""
    stds = torch.tensor([0.5, 2.0], dtype=torch.float64)
    for nfe, fine in ((math.ceil(10 * rho**2), True), (int(5 * rho**2), False)):
        error = float((sampled_stds(solver_named(name), stds, rho, nfe, 3072) / stds - 1).max())
        assert (error < 0.05) is fine
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            solve(bent, start(), solver=name, nfe=nfe, rho=rho, seeds=range(4))
        assert len(told) == (not fine)


def test_the_warning_names_rho_nfe_and_the_remedy():
    with pytest.warns(UserWarning, match=r"^rho=3 with nfe=26: .*; use nfe 90 or more, or rho up to 1\.6$"):
        sample(bent, start(), nfe=26, rho=3.0, seeds=range(4))


@pytest.mark.parametrize("rho", [0.0, 0.75, 1.0])
@pytest.mark.parametrize("name", SDE)
def test_up_to_rho_1_there_is_no_warning(name, rho):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        solve(bent, start(), solver=name, nfe=1, rho=rho, seeds=range(4))


class OnPath:
    """A field that names its path."""

    def __init__(self, schedule):
        self.schedule, self.exact = schedule, gaussian(0.5, 0.3).field(schedule)

    def __call__(self, x, t, condition=None):
        return self.exact(x, t, condition)


@pytest.mark.parametrize("schedule", [LinearFlow(), VariancePreserving(), MeanVelocity(2.0), MeanVelocity()])
@pytest.mark.parametrize("solver", ["adams", "heun"])
def test_without_a_schedule_it_is_the_fields_own(schedule, solver):
    field, x = OnPath(schedule), noise.initial(torch.arange(3), (1,))
    want = mvm.sample(field.exact, x, schedule=schedule, solver=solver, nfe=6)
    assert torch.equal(mvm.sample(field, x, solver=solver, nfe=6), want)
    assert torch.equal(mvm.sample(field, x, schedule=schedule, solver=solver, nfe=6), want)


def test_without_a_schedule_of_its_own_it_is_the_mean_velocity():
    x = noise.initial(torch.arange(3), (1,))
    plain = OnPath(MeanVelocity()).exact
    assert torch.equal(mvm.sample(plain, x, nfe=6), mvm.sample(plain, x, schedule=MeanVelocity(), nfe=6))
    odd = OnPath(MeanVelocity())
    odd.schedule = "cosine"  # someone else's word
    assert torch.equal(mvm.sample(odd, x, nfe=6), mvm.sample(plain, x, nfe=6))


@pytest.mark.parametrize("schedule", [MeanVelocity(), LinearFlow()])
def test_another_schedule_than_its_own_is_refused(schedule):
    x = noise.initial(torch.arange(3), (1,))
    with pytest.raises(
        ValueError, match=r"schedule=.*: this model was trained on VariancePreserving.*; leave schedule out"
    ):
        mvm.sample(OnPath(VariancePreserving()), x, schedule=schedule, nfe=2)
