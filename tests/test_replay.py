"""Recorded loops: what a replay computes, when there is one, and that nothing in a loop looks at the device."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from mvm import generate as module
from mvm import noise
from mvm.generate import Replays, Sampler, cycle_labels, recording_key, to_host
from mvm.model import Model, load
from mvm.network import ConditionConfig
from mvm.path.condition import map_tensors
from mvm.recipes import SampleConfig, load_recipe
from mvm.solver import ClassifierFree, Interval, integrate, solver_named


class Standin:
    """A recording as a GPU keeps it, on the CPU: own inputs, one output that every replay writes over."""

    made = 0

    def __init__(self, function, examples):
        type(self).made += 1
        self.function = function
        self.inputs = tuple(example.clone() for example in examples)
        self.output = function(*self.inputs)

    def __call__(self, *inputs):
        for mine, given in zip(self.inputs, inputs, strict=True):
            mine.copy_(given)
        map_tensors(lambda _, mine, made: mine.copy_(made), self.output, self.function(*self.inputs))
        return map_tensors(lambda _, each: each.clone(), self.output)


@pytest.fixture
def standin():
    Standin.made = 0
    return Standin


def double(x):
    return 2 * x


def test_first_call_is_plain_second_records_third_replays(standin):
    replays = Replays(standin)
    for number, made in ((1.0, 0), (2.0, 1), (3.0, 1)):
        assert replays("a", double, torch.full((3,), number)).tolist() == [2 * number] * 3
        assert standin.made == made


def test_another_shape_or_key_is_another_recording(standin):
    replays = Replays(standin)
    for _ in range(2):
        replays("a", double, torch.ones(3))
        replays("a", double, torch.ones(4))
        replays("b", double, torch.ones(3))
    assert standin.made == 3


def test_an_answer_is_not_written_over_by_the_next(standin):
    replays = Replays(standin)
    answers = [replays("a", double, torch.full((2,), float(n))) for n in range(4)]
    assert [a[0].item() for a in answers] == [0, 2, 4, 6]


def test_only_the_last_few_are_kept(standin):
    replays = Replays(standin)
    for key in range(module.MOST_RECORDINGS + 3):
        for _ in range(2):
            replays(key, double, torch.ones(1))
    assert len(replays.seen) == module.MOST_RECORDINGS


def test_what_cannot_be_recorded_runs_plainly_and_says_so():
    def refuse(function, examples):
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    replays = Replays(refuse)
    replays("a", double, torch.ones(1))
    with pytest.warns(UserWarning, match="could not be recorded .operation not permitted when stream is capturing"):
        assert replays("a", double, torch.ones(1)).item() == 2
    assert replays("a", double, torch.ones(1)).item() == 2


def test_without_a_gpu_nothing_is_recorded():
    replays = Replays()
    for _ in range(3):
        assert replays("a", double, torch.ones(1)).item() == 2
    assert not replays.seen


def test_other_weights_or_arithmetic_is_another_key():
    layer, cpu = nn.Linear(2, 2), torch.device("cpu")
    plain = recording_key(layer, cpu)
    assert plain == recording_key(layer, cpu)
    with torch.autocast("cpu", torch.bfloat16):
        assert recording_key(layer, cpu) != plain
    layer.weight = nn.Parameter(torch.zeros(2, 2))
    assert recording_key(layer, cpu) != plain


def test_what_is_on_the_host_has_arrived():
    x = torch.ones(2)
    assert to_host(x)() is x


def of_kind(kind):
    """The digits recipe, small, of another condition."""
    width, length = {"vector": 3, "image": 2, "tokens": 5}.get(kind, 0), 4 if kind == "tokens" else 0
    recipe = load_recipe("digits")
    network = replace(recipe.network, depth=1, width=16, heads=2, patch=4)
    return replace(recipe, network=network, condition=ConditionConfig(kind, width=width, length=length))


def conditions(kind, count):
    match kind:
        case "vector":
            return torch.randn(count, 3)
        case "image":
            return torch.rand(count, 2, 8, 8)
        case "tokens":
            return {"tokens": torch.randn(count, 4, 5), "mask": torch.rand(count, 4) < 0.5}
    return None


@pytest.mark.parametrize("settings", [SampleConfig(nfe=4), SampleConfig(nfe=4, rho=1.0, cfg=2.0, low=0.1, high=0.9)])
def test_replayed_batches_are_the_images_of_their_seeds(settings, standin):
    model = load("digits")
    labels, seeds = cycle_labels((), 12, 10), torch.arange(12)
    want = Sampler(model).images(labels, seeds, settings, batch=4, progress=False)
    sampler = Sampler(model)
    sampler.replays = Replays(standin)
    found = sampler.images(labels, seeds, settings, batch=4, progress=False)
    assert torch.equal(found.images, want.images)
    assert (found.nfe, found.passes) == (want.nfe, want.passes)
    assert standin.made == 1


@pytest.mark.parametrize("kind", ["none", "vector", "image", "tokens"])
def test_replays_take_every_condition(kind, standin):
    """Rows of a later batch reach the recording of an earlier one, in a structure too."""
    model, condition, guided = Model(of_kind(kind)).eval(), conditions(kind, 12), {} if kind == "none" else {"cfg": 2.0}
    for parameter in model.network.parameters():
        torch.nn.init.normal_(parameter, std=0.05)
    seeds, settings = torch.arange(12), SampleConfig(nfe=3, **guided)
    want = Sampler(model).images(condition, seeds, settings, batch=4, progress=False)
    sampler = Sampler(model)
    sampler.replays = Replays(standin)
    found = sampler.images(condition, seeds, settings, batch=4, progress=False)
    assert torch.equal(found.images, want.images)
    assert standin.made == 1
    if kind != "none":
        assert not torch.equal(sampler.images(None, seeds, SampleConfig(nfe=3), progress=False).images, want.images)
        assert len(sampler.replays.seen) == 2


@pytest.mark.parametrize("kind", ["none", "vector", "image", "tokens"])
def test_a_loop_of_any_condition_never_looks_at_the_device(kind):
    with torch.device("meta"):
        model = Model(of_kind(kind)).to("meta")
        condition = conditions(kind, 2)
        seeds = torch.zeros(2, dtype=torch.int64)
    x = noise.initial(seeds, model.sample_shape)
    rules = () if kind == "none" else ClassifierFree(2.0)
    how = {"schedule": model.schedule, "nfe": 3, "rho": 0.0, "condition": condition, "guidance": rules}
    found = integrate(model, x, solver_named("adams"), seeds, **how)
    assert model.codec.decode(found.x).shape == (2, 1, 8, 8)


def test_a_bad_label_is_refused_before_a_replay(standin):
    sampler = Sampler(load("digits"))
    sampler.replays = Replays(standin)
    with pytest.raises(ValueError, match="labels outside 0 to 9"):
        sampler.images(torch.tensor([10]), torch.arange(1), SampleConfig(nfe=2), progress=False)


@pytest.mark.parametrize("solver", ["adams", "sa", "heun", "euler", "euler-maruyama"])
@pytest.mark.parametrize("rho", [0.0, 1.0])
def test_a_loop_never_looks_at_the_device(solver, rho):
    """On the meta device there are no values: any look at one is an error, as it is while a GPU records."""
    if solver in ("heun", "euler") and rho:
        pytest.skip("an ODE solver")
    with torch.device("meta"):
        model = Model(load_recipe("digits")).to("meta")
    seeds, labels = torch.zeros(2, dtype=torch.int64, device="meta"), torch.zeros(2, dtype=torch.int64, device="meta")
    x = noise.initial(seeds, model.sample_shape)
    guidance = ClassifierFree(2.0, interval=Interval(0.1, 0.9))
    how = {"schedule": model.schedule, "nfe": 5, "rho": rho, "condition": labels, "guidance": guidance}
    found = integrate(model, x, solver_named(solver), seeds, **how)
    assert model.codec.decode(found.x).shape == (2, 1, 8, 8)
    assert found.nfe == 5
