"""Classifier-free guidance in one call of the network: the same images and costs, and only where it was meant."""

import types

import pytest
import torch

from mvm import model as module
from mvm import noise
from mvm.generate import Replays, Sampler
from mvm.model import ONE_PASS, Model, one_pass_pays
from mvm.path import JoinedField, MeanVelocity, joined_for
from mvm.recipes import SampleConfig, load_recipe, override
from mvm.solver import Auto, ClassifierFree, Internal, Interval, guided, integrate, solve, solver_named
from mvm.solver.meter import metered

TINY = {"network.depth": "2", "network.heads": "2", "network.width": "16", "network.patch": "4"}
DDT = {
    "network.kind": "ddt", "network.inner_block": "1", "network.head_width": "32", "network.head_heads": "4",
}  # fmt: skip
LABELS = torch.tensor([1, 4, 9])
PART = ClassifierFree(2.0, interval=Interval(0.3, 0.7))
NFE = 6
SOLVERS = [("adams", 0.0), ("adams", 0.75), ("sa", 1.0), ("heun", 0.0), ("euler-maruyama", 1.0)]


def made(**changes):
    """Return a small model whose every weight is random, and the list of (rows, labels) its network is called with.

    In float64: in float32 the size of a batch shows, by an order of sums that is each machine's own.
    """
    model = Model(override(load_recipe("digits"), {**TINY, **changes})).eval().requires_grad_(False).double()
    generator = torch.Generator().manual_seed(0)
    for parameter in model.network.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    calls = []
    model.network.register_forward_pre_hook(lambda _, args: calls.append((len(args[0]), args[2].tolist())))
    return model, calls


@pytest.fixture(autouse=True)
def plainly():
    with torch.no_grad():
        yield


@pytest.fixture
def joining(monkeypatch):
    """Let the model join on a CPU too."""
    monkeypatch.setattr(module, "one_pass_pays", lambda device, images: images <= ONE_PASS)


def start(model, count=3):
    return noise.initial(torch.arange(count), model.sample_shape).double()


def solved(field, x, guidance, labels=LABELS, **changes):
    how = {"schedule": MeanVelocity(), "nfe": NFE, "seeds": range(len(x)), "condition": labels, **changes}
    return solve(field, x, guidance=guidance, **how)


def apart(model):
    """Return the model as a plain function, which is called twice."""
    return lambda x, t, condition: model(x, t, condition)


@pytest.mark.parametrize(
    ("device", "images", "pays"),
    [
        ("cuda", 1, True),
        ("cuda", ONE_PASS, True),
        ("cuda", ONE_PASS + 1, False),
        ("cuda:1", 2, True),
        ("cpu", 1, False),
    ],
)
def test_it_pays_for_few_images_on_a_gpu(device, images, pays):
    assert one_pass_pays(torch.device(device), images) is pays
    model, _ = made()
    x = types.SimpleNamespace(device=torch.device(device), shape=(images, 1, 8, 8))
    assert [model.joins(x), metered(model).joins(x), joined_for(model, x)] == [pays] * 3


def test_both_are_the_two_answers_in_one_call():
    model, calls = made()
    x, t = start(model), torch.tensor([0.2, 0.5, 1.0], dtype=torch.float64)
    null, conditional = model.both(x, t, LABELS)
    assert calls == [(6, [10, 10, 10, 1, 4, 9])]
    torch.testing.assert_close(null, model(x, t, None), rtol=0, atol=1e-11)
    torch.testing.assert_close(conditional, model(x, t, LABELS), rtol=0, atol=1e-11)
    assert not torch.allclose(null, conditional, atol=1e-2)


def test_a_model_that_knows_no_labels_answers_null_twice():
    model, calls = made(**{"objective.label_drop": "1"})
    x, t = start(model), torch.full((3,), 0.5, dtype=torch.float64)
    null, conditional = model.both(x, t, LABELS)
    assert calls == [(6, [10] * 6)]
    torch.testing.assert_close(null, conditional, rtol=0, atol=1e-6)


@pytest.mark.parametrize(("solver", "rho"), SOLVERS)
@pytest.mark.usefixtures("joining")
def test_joined_images_and_costs_are_those_of_two_calls(solver, rho):
    model, calls = made()
    x, how = start(model), {"solver": solver, "rho": rho}
    want = solved(apart(model), x, PART, **how)
    rows = [count for count, _ in calls]
    assert rows == [3] * want.passes
    guided_ones = want.passes - want.nfe
    assert 0 < guided_ones < want.nfe
    calls.clear()
    found = solved(model, x, PART, **how)
    torch.testing.assert_close(found.x, want.x, rtol=0, atol=1e-11)
    assert (found.nfe, found.passes) == (want.nfe, want.passes)
    assert sorted(count for count, _ in calls) == [3] * (want.nfe - guided_ones) + [6] * guided_ones


@pytest.mark.usefixtures("joining")
def test_of_a_ddt_too():
    model, calls = made(**DDT)
    x = start(model)
    want = solved(apart(model), x, ClassifierFree(2.0))
    calls.clear()
    found = solved(model, x, ClassifierFree(2.0))
    torch.testing.assert_close(found.x, want.x, rtol=0, atol=1e-11)
    assert ([count for count, _ in calls], found.passes) == ([6] * NFE, 2 * NFE)


def test_on_a_cpu_there_are_two_calls_and_the_very_same_images():
    model, calls = made()
    x = start(model)
    found = solved(model, x, ClassifierFree(2.0))
    assert calls == [(3, [10] * 3), (3, LABELS.tolist())] * NFE
    assert torch.equal(found.x, solved(apart(model), x, ClassifierFree(2.0)).x)
    assert found.passes == 2 * NFE


@pytest.mark.usefixtures("joining")
def test_a_batch_above_the_limit_is_not_joined():
    model, calls = made()
    for count, want in ((ONE_PASS, [2 * ONE_PASS] * 2), (ONE_PASS + 1, [ONE_PASS + 1] * 4)):
        calls.clear()
        labels = torch.arange(count) % 10
        assert solved(model, start(model, count), ClassifierFree(2.0), labels, nfe=2).passes == 4
        assert [rows for rows, _ in calls] == want


@pytest.mark.usefixtures("joining")
@pytest.mark.parametrize(("rule", "t"), [(PART, 0.999), (PART, 0.001), (ClassifierFree(1.0), 0.3)])
def test_where_no_rule_acts_it_is_one_call_of_the_batch(rule, t):
    model, calls = made()
    x, times = start(model), torch.full((3,), t, dtype=torch.float64)
    found = guided(model, rule, MeanVelocity())(x, times, LABELS)
    assert calls == [(3, LABELS.tolist())]
    assert torch.equal(found, model(x, times, LABELS))


@pytest.mark.usefixtures("joining")
def test_rows_of_one_batch_at_other_times_are_guided_apart():
    model, calls = made()
    x, times = start(model), torch.tensor([0.999, 0.3, 0.3], dtype=torch.float64)
    found = guided(model, PART, MeanVelocity())(x, times, LABELS)
    assert sorted(calls) == [(1, [1]), (4, [10, 10, 4, 9])]
    want = guided(apart(model), PART, MeanVelocity())(x, times, LABELS)
    torch.testing.assert_close(found, want, rtol=0, atol=1e-5)


@pytest.mark.usefixtures("joining")
@pytest.mark.parametrize("name", ["internal", "auto"])
def test_on_top_of_another_rule_there_are_two_calls(name, monkeypatch):
    model, calls = made(**DDT)
    inner = Internal(1.5) if name == "internal" else Auto(1.5, weak=made()[0])
    found = solved(model, start(model), [inner, ClassifierFree(2.0)])
    assert [rows for rows, _ in calls] == [3] * (2 * NFE)
    monkeypatch.setattr(module, "one_pass_pays", lambda device, images: False)
    want = solved(model, start(model), [inner, ClassifierFree(2.0)])
    assert torch.equal(found.x, want.x)
    assert found.passes == want.passes == (2 * NFE if name == "internal" else 4 * NFE)


@pytest.mark.usefixtures("joining")
def test_where_the_rule_below_is_off_it_joins_and_below_another_too():
    model, calls = made(**DDT)
    solved(model, start(model), [Internal(1.0), ClassifierFree(2.0)])
    assert [rows for rows, _ in calls] == [6] * NFE
    weak, of_weak = made()
    calls.clear()
    found = solved(model, start(model), [ClassifierFree(2.0), Auto(1.5, weak=weak)])
    assert ([rows for rows, _ in calls], len(of_weak), found.passes) == ([6] * NFE, NFE, 3 * NFE)


@pytest.mark.usefixtures("joining")
def test_a_shared_backbone_is_called_for_each_branch():
    model, _ = made(**DDT)
    settings = SampleConfig(nfe=NFE, cfg=2.0, share=0.5)
    sampler = Sampler(model)
    plan = sampler.sharing_plan(settings)
    rows = {"backbone": [], "head": []}
    model.network.embed.register_forward_hook(lambda _, args, __: rows["backbone"].append(len(args[0])))
    model.network.wide.register_forward_hook(lambda _, args, __: rows["head"].append(len(args[0])))
    found = sampler.images(LABELS, torch.arange(3), settings, progress=False)
    assert rows == {"backbone": [3] * (2 * len(plan.steps)), "head": [3] * (2 * NFE)}
    assert found.passes == 2 * NFE


@pytest.mark.usefixtures("joining")
def test_recorded_batches_join_and_cost_the_same():
    model, calls = made()
    settings = SampleConfig(nfe=NFE, cfg=2.0)
    labels, seeds = torch.arange(6), torch.arange(6)
    want = Sampler(model).images(labels, seeds, settings, batch=3, progress=False)
    assert [rows for rows, _ in calls] == [6] * (2 * NFE)
    sampler = Sampler(model)
    sampler.replays = Replays(lambda function, examples: function)
    found = sampler.images(labels, seeds, settings, batch=3, progress=False)
    assert torch.equal(found.images, want.images)
    assert (found.nfe, found.passes) == (want.nfe, want.passes) == (NFE, 2 * NFE)


@pytest.mark.usefixtures("joining")
def test_a_joined_loop_never_looks_at_the_device():
    """As in test_replay: on the meta device any look at a value is an error, as it is while a GPU records."""
    with torch.device("meta"):
        model = Model(load_recipe("digits")).to("meta")
    rows = []
    model.network.register_forward_pre_hook(lambda _, args: rows.append(len(args[0])))
    seeds = labels = torch.zeros(2, dtype=torch.int64, device="meta")
    x = noise.initial(seeds, model.sample_shape)
    how = {"schedule": model.schedule, "nfe": NFE, "rho": 1.0, "condition": labels, "guidance": PART}
    found = integrate(model, x, solver_named("adams"), seeds, **how)
    assert sorted(set(rows)) == [2, 4]
    assert (len(rows), sum(rows)) == (NFE, 2 * found.passes)


def plain(x, t, condition=None):
    return x + (0 if condition is None else condition.to(x.dtype)[:, None])


def test_a_function_is_a_field_as_before():
    x = torch.randn(3, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found = solved(plain, x, ClassifierFree(1.5))
    scaled = solved(lambda x, t, condition: x + 1.5 * LABELS[:, None], x, None)
    assert (found.nfe, found.passes, scaled.passes) == (NFE, 2 * NFE, NFE)
    torch.testing.assert_close(found.x, scaled.x)
    assert not joined_for(plain, x)


class Joined:
    """A field of one's own that joins always."""

    def __init__(self):
        self.joined = 0

    def __call__(self, x, t, condition):
        return plain(x, t, condition)

    def joins(self, x):
        return True

    def both(self, x, t, condition):
        self.joined += 1
        return plain(x, t), plain(x, t, condition)


class Wrapped:
    """A field around another that hands on every name, as torch.compile's does."""

    def __init__(self, field):
        self.field = field

    def __getattr__(self, name):
        return getattr(self.field, name)

    def __call__(self, x, t, condition):
        return self.field(x, t, condition).clamp(-1, 1)


def test_a_field_of_ones_own_may_join_and_a_wrapper_is_not_passed_by():
    field, x = Joined(), torch.ones(3, 2)
    assert isinstance(field, JoinedField)
    found = solved(field, x, ClassifierFree(1.5))
    assert torch.equal(found.x, solved(plain, x, ClassifierFree(1.5)).x)
    assert (field.joined, found.passes) == (NFE, 2 * NFE)
    around = solved(Wrapped(field), x, ClassifierFree(1.5))
    assert (field.joined, around.passes) == (NFE, 2 * NFE)
    assert float(around.x.abs().max()) <= 1.5


def test_labels_are_needed_all_the_same():
    with pytest.raises(ValueError, match="needs class labels"):
        solved(Joined(), torch.ones(3, 2), ClassifierFree(1.5), None)
