"""The walk shown ends with the very pictures of `mvm sample`."""

import pytest
import torch

from mvm.app.form import ODE, SDE, SampleForm
from mvm.app.walk import REFERENCE_NFE, look, rms, sampler_states, side_by_steps
from mvm.generate import Draw, Sampler
from mvm.oracle import gaussian
from mvm.path import LinearFlow
from mvm.recipes import SampleConfig
from mvm.solver import solve


def made(model, draw, settings):
    return Sampler(model).batch(draw.chosen_labels(model.num_classes), draw.chosen_seeds(), settings)


@pytest.mark.parametrize(
    "settings",
    [
        SampleConfig("adams", 5, 0.0),
        SampleConfig("adams", 5, 1.0, 1.5, 0.2, 0.8),
        SampleConfig("sa", 4, 0.75),
        SampleConfig("heun", 6),
        SampleConfig("euler", 3),
        SampleConfig("euler-maruyama", 1, 0.5),
    ],
    ids=str,
)
def test_a_side_ends_with_the_pictures_and_the_cost_of_generate(digits, settings):
    draw = Draw(3, seed=5, classes=(2, 7))
    side = list(side_by_steps(digits, draw, settings))[-1]
    wanted = made(digits, draw, settings)
    assert side.done
    assert torch.equal(side.images, wanted.images)
    assert side.labels.tolist() == [2, 7, 2]
    assert (side.nfe, side.passes) == (wanted.nfe, wanted.passes)


@pytest.mark.parametrize("solver", ["adams", "euler-maruyama"])
def test_another_schedule_is_walked_as_it_is_solved(solver):
    schedule, seeds = LinearFlow(), torch.arange(4)
    base = gaussian(0.3, 0.5).field(schedule)
    x = torch.randn(4, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    settings = SampleConfig(solver, 6, 0.5)
    last = list(sampler_states(base, x, settings, seeds, schedule=schedule))[-1]
    assert torch.equal(last.state, solve(base, x, schedule=schedule, solver=solver, nfe=6, rho=0.5, seeds=seeds).x)


def test_both_sides_start_from_the_same_noise_and_go_by_turns(digits):
    form = SampleForm("digits", images=2, nfe=3)
    counts = []
    for found in look(digits, form):
        counts.append(tuple(side.index for side in found.sides.values()))
    assert counts == [(0,), (0, 0), (1, 0), (1, 1), (2, 1), (2, 2), (3, 2), (3, 3)]
    assert found.finished(form)
    ode, sde = found.sides[ODE], found.sides[SDE]
    assert torch.equal(ode.path[0].state, sde.path[0].state)
    assert not torch.equal(ode.images, sde.images)
    assert ode.path[0].t == 1.0
    assert torch.equal(ode.path[-1].guess, ode.images[0])


def test_the_long_run_comes_last_and_is_the_ode(digits):
    form = SampleForm("digits", images=1, nfe=1, solver="heun", reference=True)
    *_, found = look(digits, form)
    assert found.reference.settings == SampleConfig("adams", REFERENCE_NFE)
    assert found.reference.done
    assert rms(found.sides[ODE].images, found.reference.images) > 0


def test_rms_is_in_grey_levels():
    black, white = torch.zeros(2, 1, 4, 4, dtype=torch.uint8), torch.full((2, 1, 4, 4), 255, dtype=torch.uint8)
    assert rms(black, white) == 255.0
    assert rms(black, black) == 0.0
