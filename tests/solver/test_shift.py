"""Times shifted as those of training: by which factor, what stays, what it does to a model's evaluations and error."""

import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch

import mvm
from mvm import noise, oracle
from mvm.generate import solver_record
from mvm.model import Model
from mvm.path import MEAN_VELOCITY, LinearFlow, MeanVelocity, TimeLaw, VariancePreserving
from mvm.recipes import load_recipe, shipped
from mvm.settings import SampleConfig
from mvm.solver import SOLVERS, Euler, adams, sa, sample, solver_named
from mvm.solver.adams import SoftLamGrid, soft_lam_times
from mvm.solver.base import shifted_times
from mvm.solver.tune import tune
from mvm.verify.solvers import Law, marginal, sampled_law

STEPPED = [name for name in SOLVERS if not solver_named(name).by_tolerance]
SIZE = 1024 * 16 * 16


def planned(name, shift, nfe=90, rho=0.0, schedule=MEAN_VELOCITY):
    return replace(solver_named(name).for_size(SIZE), shift=shift).plan(schedule, nfe, rho)


def test_on_the_linear_flow_it_is_the_shift_of_sd3_and_rae():
    """Euler's times are then those of RAE's sampler: t -> a t/(1 + (a - 1) t), uniform before."""
    t = np.linspace(1, 0, 101)
    plan = planned("euler", 8.0, 100, schedule=LinearFlow())
    assert plan.times == pytest.approx(8 * t / (1 + 7 * t), rel=1e-12)


@pytest.mark.parametrize("schedule", [MeanVelocity(), MeanVelocity(2.5), LinearFlow(), VariancePreserving()], ids=str)
def test_shifts_multiply(schedule):
    times = tuple(schedule.end * (1 - i / 9) ** 2 for i in range(10))
    once = shifted_times(shifted_times(times, 3.0, schedule), 0.5, schedule)
    assert once == pytest.approx(shifted_times(times, 1.5, schedule), rel=1e-9)
    assert shifted_times(times, 1.0, schedule) == shifted_times(times, 0.0, schedule) == times


def test_adams_and_sa_move_their_clean_end():
    """The noisy end of adams is that of the data's dimension already, and sa's is nearly pure noise."""
    assert replace(adams(spread=10), shift=4.0).times(26) == pytest.approx(adams(spread=10, c=4 * 0.16 / 26).times(26))
    least = math.exp(-float(MEAN_VELOCITY.lam(1e-3)))
    *times, last = replace(sa(), shift=4.0).times(12)
    assert (*times, last) == (*soft_lam_times(11, sa().times(12)[0], 1e-3, 3 * least, 0.0), 0.0)
    r = np.exp(-MEAN_VELOCITY.lam(np.array(times)).numpy())
    assert np.diff(np.log(r + 3 * least)) == pytest.approx(
        np.full(11, np.log((r[-1] + 3 * least) / (r[0] + 3 * least)) / 11)
    )


@pytest.mark.parametrize("schedule", [MeanVelocity(), LinearFlow(), VariancePreserving()], ids=str)
@pytest.mark.parametrize("name", STEPPED)
def test_every_solver_keeps_its_ends_and_moves_the_rest_to_noise(name, schedule):
    for nfe in (1, 2, 8, 25):
        plain, moved = (planned(name, shift, nfe, schedule=schedule) for shift in (1.0, 8.0))
        assert moved.nfe == nfe
        assert (moved.times[0], moved.times[-1]) == (plain.times[0], 0.0)
        assert all(s > t for s, t in pairwise(moved.times))
        assert all(a >= b * (1 - 1e-12) for a, b in zip(moved.times, plain.times, strict=True))
        assert nfe < 8 or moved.times[nfe // 4] > plain.times[nfe // 4]
    assert planned(name, 8.0, 9).times[-2] >= (1e-3 if name == "sa" else 0)


def test_last_times_that_are_named_stay():
    for name in ("sa", "dpm++2m", "unipc", "er-sde"):
        assert planned(name, 8.0).times[-2] == pytest.approx(planned(name, 1.0).times[-2], rel=1e-12)
    grid = replace(adams(spread=10).ending_at(1e-3), shift=8.0)
    assert grid.times(9)[-2:] == (1e-3, 0.0)
    assert grid.times(9) == SoftLamGrid(8 * 0.16 / 9, 0.036, 1e-3).times(9)


@pytest.mark.parametrize("name", STEPPED)
def test_a_shift_of_one_is_the_solver_as_it_was(name):
    plans = [planned(name, shift, 9) for shift in (0.0, 1.0)]
    assert plans[0] == plans[1] == solver_named(name).for_size(SIZE).plan(MEAN_VELOCITY, 9, 0.0)


@pytest.mark.parametrize("name", [name for name in STEPPED if name != "seeds3"])
def test_the_order_stays(name):
    """Between t = 0.9 and 0.1, as `mvm verify` measures it (that of seeds3 is above what the error's sign tells)."""
    solver, data, errors = solver_named(name), Law(0.4, 0.6), []
    for steps in (512, 1024):
        times = shifted_times((*(0.9 - 0.8 * i / steps for i in range(steps)), 0.1), 8.0, last=0.1)
        errors.append(abs(sampled_law(solver, data, 0.0, times=times).std - marginal(data, 0.1).std))
    assert math.log2(errors[0] / errors[1]) > solver.order - 0.25


# share of 90 evaluations cleaner than +3 sigma of what imagenet256-ddt-xl is trained on: without a shift, and with it
SHARES = {"adams": (41, 30), "adams-power": (42, 14), "sa": (22, 10), "euler": (31, 4), "dpm++2m": (29, 15)}


@pytest.mark.parametrize("name", SHARES)
def test_evaluations_where_the_xl_was_never_trained(name):
    law = load_recipe("imagenet256-ddt-xl").path.law
    assert law.shift == 8
    cleanest = law.mean - math.log(law.shift) + 3 * law.std

    def beyond(plan):
        return int((MEAN_VELOCITY.lam(np.array(plan.times[:-1])).numpy() > cleanest).sum())

    assert tuple(beyond(planned(name, shift)) for shift in (1.0, law.shift)) == SHARES[name]


def test_raes_own_sampler_has_4_percent_of_its_evaluations_there():
    t = np.array(planned("euler", 8.0, 100, schedule=LinearFlow()).times[:-1])
    assert (LinearFlow().lam(t).numpy() > 3 - math.log(8)).mean() == 0.04


def test_the_law_of_a_recipe_says_the_shift():
    assert TimeLaw(shift_dimension=4096 * 9).shift == 3
    shifted = {name for name in shipped() if name.find("rae") < 0 and load_recipe(name).path.law.shift != 1}
    latents = {"imagenet256-ddt-xl", "imagenet512-ddt-xl", "imagenette-ddt-clip", "imagenette-ddt-s"}
    assert shifted == latents  # all others sample as without


class Shifted:
    """An exact field that asks for shifted times, and keeps those it is evaluated at."""

    def __init__(self, shift: float) -> None:
        self.shift, self.seen = shift, []
        self.field = oracle.gaussian(0.3, 0.5, (2,)).field(MEAN_VELOCITY)

    def __call__(self, x, t, condition=None):
        self.seen.append(float(t[0]))
        return self.field(x, t, condition)


@pytest.mark.parametrize("solver", [None, "adams", "sa", adams(), Euler()])
def test_a_field_names_its_shift_and_a_solver_goes_before_it(solver):
    x = noise.initial(torch.arange(3), (2,))
    named = adams() if solver is None else solver_named(solver)

    def seen(field, solver):
        sample(field, x, solver=solver, nfe=7)
        return field.seen

    wanted = list(replace(named.for_size(2), shift=8.0).plan(MEAN_VELOCITY, 7, 0.0).times[:-1])
    plain = list(named.for_size(2).plan(MEAN_VELOCITY, 7, 0.0).times[:-1])
    assert seen(Shifted(8.0), solver) == wanted != plain
    assert seen(Shifted(8.0), replace(named, shift=1.0)) == seen(Shifted(1.0), solver) == plain
    assert seen(Shifted(1.0), replace(named, shift=8.0)) == wanted


def test_fitted_times_are_not_shifted():
    fitted = adams(given=adams(spread=5).times(7))
    assert replace(fitted, shift=8.0).plan(MEAN_VELOCITY, 7, 0.0) == fitted.plan(MEAN_VELOCITY, 7, 0.0)


@pytest.fixture(scope="module")
def digits():
    return mvm.load("digits")


def of_law(model, **law):
    """The same network, as if trained on another law."""
    recipe = replace(model.recipe, path=replace(model.recipe.path, law=TimeLaw(**law)))
    other = Model(recipe, model.codec, model.network).eval()
    other.classes = model.classes
    return other


def test_a_model_samples_by_its_law(digits):
    """A law without a shift, of any mean and width, leaves images as they are bit for bit."""
    plain = digits.generate(4, nfe=6, progress=False).images
    assert torch.equal(
        of_law(digits, name="lam-normal", mean=0.5, std=1.5).generate(4, nfe=6, progress=False).images, plain
    )
    shifted = of_law(digits, shift_dimension=64 * 4096)
    moved = shifted.generate(4, nfe=6, progress=False).images
    assert not torch.equal(moved, plain)
    assert torch.equal(moved, digits.generate(4, nfe=6, shift=8.0, progress=False).images)
    assert torch.equal(shifted.generate(4, nfe=6, shift=1.0, progress=False).images, plain)
    # named or not, it is one solver, and one cell of a sweep
    records = [solver_record(shifted, SampleConfig(nfe=6, **each)) for each in ({}, {"tuned": False}, {"shift": 8.0})]
    assert len(set(records)) == 1
    assert "shift 8" in records[0]


def test_tuning_begins_with_the_fields_shift():
    x = noise.initial(torch.arange(3), (2,), torch.float64)
    plain, moved = (tune(Shifted(shift), x, 4, rounds=0).solver for shift in (1.0, 8.0))
    assert moved.given == pytest.approx(replace(adams().for_size(2), shift=8.0).times(4), rel=1e-9)
    assert moved.given[1:-1] > plain.given[1:-1]


def test_restorations_follow_the_field(digits):
    """By the solvers of all fields, and by particles, which take steps of their own."""
    operator, y = lambda x: x[..., :4], torch.zeros(1, 1, 8, 4)
    models = [of_law(digits, shift_dimension=dimension) for dimension in (0, 64 * 4096)]
    for particles in (1, 3):
        options = {"particles": particles, "nfe": 4, "seeds": [1]}
        plain, moved = (
            mvm.edit.restore(model, y, operator, condition=torch.tensor([3]), **options) for model in models
        )
        asked = {**options, "solver": replace(adams(), shift=8.0)}
        assert not torch.equal(plain, moved)
        assert torch.equal(moved, mvm.edit.restore(models[0], y, operator, condition=torch.tensor([3]), **asked))


@pytest.mark.parametrize("shift", [-1.0, float("inf"), float("nan")])
def test_a_shift_that_is_none_is_refused(shift):
    for name in ("adams", "sa", "heun", "unipc"):
        with pytest.raises(ValueError, match="shift="):
            planned(name, shift)
