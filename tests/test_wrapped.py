"""mvm.wrap and mvm.loss: any network, tensor and condition, against fields and losses worked out by hand."""

import copy
import math

import pytest
import torch
from torch import nn

import mvm
from mvm import noise
from mvm.likelihood import decode, encode
from mvm.path import MEAN_VELOCITY, LinearFlow, MeanVelocity, from_pair
from mvm.path.condition import dropped, null_of
from mvm.path.convert import Pair
from mvm.solver import Auto, ClassifierFree, Internal, Interval

NOISE = noise.initial(torch.arange(4), (3,), torch.float64)
VECTOR = torch.tensor([[0.5, 1.0], [0.0, -1.0], [2.0, 0.3], [-1.0, 0.1]], dtype=torch.float64)


def towards(kind, schedule, mean_of):
    """A network of `kind` that knows x0: the mean that the condition says, whatever x and t."""

    def network(x, t, condition):
        t = t.double()
        x0 = mean_of(x, condition)
        eps = (x - schedule.alpha(t)[:, None] * x0) / schedule.sigma(t)[:, None]
        return from_pair(kind, Pair(x0, eps), t, schedule).to(x.dtype)

    return network


def first_of(x, condition):
    return (condition[:, :1] if condition is not None else torch.zeros_like(x[:, :1])).expand_as(x)


@pytest.mark.parametrize(
    ("kind", "path"),
    [("u", "mean-velocity"), ("v", MeanVelocity(2.0)), ("flow", "linear-flow"), ("eps", "variance-preserving")],
)
def test_a_wrapped_network_is_sampled_on_its_own_path(kind, path):
    schedule = mvm.path.schedule_named(path) if isinstance(path, str) else path
    field = mvm.wrap(towards(kind, schedule, first_of), kind=kind, path=path)
    assert field.schedule == schedule
    for rho in (0.0, 1.0):
        found = mvm.sample(field, NOISE, nfe=6, rho=rho, condition=VECTOR, seeds=torch.arange(4))
        assert torch.allclose(found, VECTOR[:, :1].expand(4, 3), atol=1e-9)


def test_network_takes_time_in_the_dtype_of_x_and_as_asked():
    seen = []

    def network(x, t):
        seen.append(t)
        return x

    t = torch.tensor([0.25, 0.64], dtype=torch.float64)
    for time in ("t", "level", lambda t: 1000 * t):
        mvm.wrap(network, time=time)(torch.zeros(2, 5), t)
    assert [each.dtype for each in seen] == [torch.float32] * 3
    assert torch.equal(torch.stack(seen), torch.tensor([[0.25, 0.64], [0.5, 0.8], [250.0, 640.0]]))
    mvm.wrap(network)(torch.zeros(2, 5, dtype=torch.bfloat16), t)
    mvm.wrap(network)(torch.zeros(2, 5, dtype=torch.float64), t)
    assert [each.dtype for each in seen[3:]] == [torch.float32, torch.float64]


TEXT = {"text": VECTOR[:, None, :].repeat(1, 3, 1), "mask": torch.ones(4, 3, dtype=torch.bool)}
NESTED = {"a": [VECTOR, (VECTOR * 2,)], "label": torch.tensor([1, 2, 0, 1])}
CONDITIONS = {
    "vector": (VECTOR, torch.zeros(1, 2, dtype=torch.float64), lambda c: c[:, :1]),
    "labels": (torch.tensor([1, 2, 0, 1]), 3, lambda c: c[:, None].double()),
    "text": (
        TEXT,
        {"text": torch.zeros(1, 3, 2, dtype=torch.float64), "mask": torch.tensor([[True, False, False]])},
        lambda c: (c["text"][..., 0] * c["mask"]).sum(1, keepdim=True),
    ),
    "nested": (
        NESTED,
        {"a": [torch.zeros(1, 2), (torch.ones(1, 2),)], "label": torch.tensor([7])},
        lambda c: c["a"][0][:, :1] + c["a"][1][0][:, 1:] + c["label"][:, None],
    ),
    "callable": (VECTOR, torch.zeros_like, lambda c: c[:, :1]),
}


@pytest.mark.parametrize("name", CONDITIONS)
def test_guidance_of_every_condition_is_the_extrapolation(name):
    """x0_hat depends on the condition alone, so the guided sample is null + scale (conditional - null) exactly."""
    condition, null, value = CONDITIONS[name]
    network = towards("u", MEAN_VELOCITY, lambda x, c: value(c).to(x.dtype).expand_as(x))
    field = mvm.wrap(network, null=null)
    given = value(condition).double().expand(4, 3)
    instead = value(null_of(null, condition, NOISE)).double().expand(4, 3)
    found = mvm.sample(field, NOISE, nfe=5, condition=condition, guidance=ClassifierFree(3.0))
    assert torch.allclose(found, instead + 3 * (given - instead), atol=1e-8)
    early = ClassifierFree(3.0, interval=Interval(0.0, 0.3))  # the last step, which decides, lies outside
    assert torch.allclose(mvm.sample(field, NOISE, nfe=5, condition=condition, guidance=early), given, atol=1e-8)
    cost = mvm.solver.solve(field, NOISE, nfe=5, condition=condition, guidance=ClassifierFree(3.0))
    assert (cost.nfe, cost.passes) == (5, 10)
    weak = mvm.wrap(towards("u", MEAN_VELOCITY, lambda x, c: value(c).to(x.dtype).expand_as(x) - 1), null=null)
    auto = mvm.sample(field, NOISE, nfe=5, condition=condition, guidance=Auto(2.0, weak=weak))
    assert torch.allclose(auto, given + 1, atol=1e-8)
    if not callable(null):
        assert torch.allclose(mvm.sample(field, NOISE, nfe=5), instead, atol=1e-8)
    one = mvm.path.condition.rows(condition, slice(1))  # one row serves all
    assert torch.allclose(mvm.sample(field, NOISE, nfe=5, condition=one), given[:1].expand(4, 3), atol=1e-8)


def test_a_network_with_an_inner_head_is_guided_internally():
    outer = towards("u", MEAN_VELOCITY, first_of)
    inner = towards("u", MEAN_VELOCITY, lambda x, c: first_of(x, c) - 1)
    field = mvm.wrap(lambda x, t, c: (outer(x, t, c), inner(x, t, c)))
    found = mvm.solver.solve(field, NOISE, nfe=5, condition=VECTOR, guidance=Internal(2.5))
    assert torch.allclose(found.x, first_of(NOISE, VECTOR) + 1.5, atol=1e-8)
    assert found.passes == 5
    with pytest.raises(ValueError, match="the network returns no inner prediction"):
        mvm.sample(mvm.wrap(outer), NOISE, nfe=2, condition=VECTOR, guidance=Internal(2.0))


def test_conditions_go_through_likelihood_and_encoding():
    """x0 ~ N(c, 1): a field of each row's own mean has that Gaussian's density, and encode is undone by decode."""

    def network(x, t, c):
        t = t[:, None].double()
        mean, alpha, var = c["mean"], 1 - t, (1 - t) ** 2 + t
        x0 = mean + alpha / var * (x - alpha * mean)
        return (x0 - x) / t.sqrt()

    field, condition = mvm.wrap(network), {"mean": VECTOR[:, :1]}
    found = mvm.likelihood(field, NOISE, condition=condition, steps=60, method="exact")
    exact = -0.5 * ((NOISE - VECTOR[:, :1]) ** 2).sum(1) - 1.5 * math.log(2 * math.pi)
    assert torch.allclose(found, exact, atol=1e-4)
    there = encode(field, NOISE, nfe=60, condition=condition)
    assert torch.allclose(decode(field, there, nfe=60, condition=condition), NOISE, atol=1e-4)
    with pytest.raises(ValueError, match=r"condition\['mean'\] of shape \(3, 1\) has 3 rows for a batch of 4"):
        mvm.likelihood(field, NOISE, condition={"mean": VECTOR[:3, :1]})


@pytest.mark.parametrize("hidden", [False, True])
def test_the_density_is_float64_whatever_the_weights_are(hidden):
    """A float32 network of one layer, as a module and in a function: the flow of float64 weights, to rounding."""
    torch.manual_seed(0)
    layer = torch.nn.Linear(4, 3)

    class Network(torch.nn.Module):
        def __init__(self, layer):
            super().__init__()
            self.layer = layer

        def forward(self, x, t):
            return self.layer(torch.cat((x, t[:, None]), 1))

    network = Network(layer)
    field = mvm.wrap((lambda x, t: network(x, t)) if hidden else network)
    found = mvm.likelihood(field, NOISE.float(), steps=20, method="exact")
    assert found.dtype == torch.float64
    wide = mvm.wrap(Network(copy.deepcopy(layer).double()))
    assert torch.allclose(found, mvm.likelihood(wide, NOISE.float(), steps=20, method="exact"), atol=1e-3)


@pytest.mark.parametrize("shape", [(2,), (3, 16), (1, 4, 6), (2, 3, 4, 5)])
def test_loss_by_seeds_is_the_formula_of_u(shape):
    """At equal (seeds, step): the mean over samples of |prediction - (sqrt(t) x0 - eps)|^2, on any tensor."""
    x0, seeds = torch.randn(5, *shape, generator=torch.Generator().manual_seed(1)).double(), torch.arange(5)
    own = noise.derive(9, seeds)
    t = noise.uniform(own, noise.TIME).reshape(5, *(1,) * len(shape))
    eps = noise.normal(own, noise.TRAIN, shape, torch.float64)
    x = (1 - t) * x0 + t.sqrt() * eps
    want = ((0.3 * x - (t.sqrt() * x0 - eps)) ** 2).mean()
    assert torch.allclose(mvm.loss(lambda x, t: 0.3 * x, x0, seeds=seeds, step=9), want, rtol=1e-12)
    assert mvm.loss(lambda x, t: x, x0, seeds=seeds, step=8) != mvm.loss(lambda x, t: x, x0, seeds=seeds, step=9)


def test_loss_drops_a_share_of_conditions_for_the_null():
    seen = []

    def network(x, t, condition):
        seen.append(condition)
        return x

    rows = {"v": torch.arange(1.0, 4001.0)[:, None], "label": torch.arange(4000)}
    field = mvm.wrap(network, null={"v": torch.zeros(1, 1), "label": torch.tensor([-1])})
    torch.manual_seed(0)
    mvm.loss(field, torch.zeros(4000, 2), rows, drop=0.25)
    gone = seen[0]["v"][:, 0] == 0
    assert torch.equal(gone, seen[0]["label"] == -1)
    assert torch.equal(seen[0]["v"][~gone], rows["v"][~gone])
    assert abs(float(gone.float().mean()) - 0.25) < 4 * math.sqrt(0.25 * 0.75 / 4000)
    mvm.loss(field, torch.zeros(4000, 2), rows)
    assert torch.equal(seen[1]["v"], rows["v"])


def test_ten_lines_learn_two_points():
    """The loss falls to its floor: two points at -1 and 1 are sampled where they are."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(2, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 1))
    field = mvm.wrap(lambda x, level: layers(torch.cat((x, level[:, None]), 1)), time="level")
    optimizer = torch.optim.Adam(layers.parameters(), 1e-2)
    for _ in range(400):
        optimizer.zero_grad()
        mvm.loss(field, torch.randint(2, (256, 1)) * 2.0 - 1).backward()
        optimizer.step()
    with torch.no_grad():
        found = mvm.sample(field, torch.randn(500, 1))
    assert float((found.abs() - 1).abs().mean()) < 0.15
    assert 0.4 < float((found > 0).float().mean()) < 0.6


class Diffusers(nn.Module):
    """Called as diffusers' networks are: names of its own, an object with `sample`."""

    def forward(self, sample, timestep, encoder_hidden_states=None, attention_mask=None):
        text = encoder_hidden_states * attention_mask[..., None]
        return type("Out", (), {"sample": sample * 0 + text.sum((1, 2))[:, None]})


def test_a_mapping_of_the_networks_own_arguments_is_given_by_name():
    condition = {"encoder_hidden_states": torch.ones(4, 2, 1), "attention_mask": torch.tensor([[1.0, 0.0]])}
    field = mvm.wrap(Diffusers(), kind="x0", time=lambda t: 1000 * t)
    assert torch.allclose(mvm.sample(field, NOISE, nfe=2, condition=condition), torch.ones_like(NOISE), atol=1e-12)


def refused(words, call):
    with pytest.raises(ValueError, match=words):
        call()


@pytest.mark.parametrize("kind", ["eps", "score"])
def test_a_kind_that_cannot_be_sampled_on_its_path_is_refused_at_once(kind):
    for path in ("mean-velocity", "linear-flow"):
        with pytest.raises(ValueError, match=f"kind='{kind}' gives no x0 where .* alpha = 0 there; use another kind"):
            mvm.wrap(first_of, kind=kind, path=path)
    assert mvm.wrap(first_of, kind=kind, path="variance-preserving").kind == kind
    assert mvm.wrap(first_of, kind=kind, path=MEAN_VELOCITY.until(0.9)).kind == kind


def test_what_is_refused():
    x0, same = torch.zeros(4, 3), lambda x, t, condition: x
    refused("network=3 cannot be called", lambda: mvm.wrap(3))
    refused("path='cosine' is unknown", lambda: mvm.wrap(same, path="cosine"))
    refused("kind='velocity' is unknown", lambda: mvm.wrap(same, kind="velocity"))
    refused("time='log' is unknown", lambda: mvm.wrap(same, time="log"))
    refused("time='3' is unknown", lambda: mvm.wrap(same, time=3))
    refused(
        r"kind='u' belongs to MeanVelocity; on path=LinearFlow\(\) use kind='flow'",
        lambda: mvm.wrap(same, path="linear-flow"),
    )
    refused(r"x0 of shape \(4, 3\) holds NaN or Inf", lambda: mvm.loss(same, x0 / 0))
    refused(r"x0 is torch.float32 of shape \(0, 3\)", lambda: mvm.loss(same, x0[:0]))
    refused("drop=2 is out of range", lambda: mvm.loss(mvm.wrap(same, null=0), x0, torch.zeros(4).long(), drop=2))
    refused("wrapped already", lambda: mvm.wrap(mvm.wrap(same)))
    refused("path, kind and null are those of mvm.wrap", lambda: mvm.loss(mvm.wrap(same), x0, kind="x0"))
    refused("seeds and step go together", lambda: mvm.loss(same, x0, seeds=range(4)))
    refused("condition is given, and the network takes", lambda: mvm.loss(lambda x, t: x, x0, torch.zeros(4, 1)))
    refused(r"condition of shape \(3, 1\) has 3 rows for a batch of 4", lambda: mvm.loss(same, x0, torch.zeros(3, 1)))
    refused(r"condition\['a'\] of shape \(4, 1\) holds NaN", lambda: mvm.loss(same, x0, {"a": x0[:, :1] / 0}))
    refused("drop=0.1: null is None", lambda: mvm.loss(same, x0, torch.zeros(4, 1), drop=0.1))
    refused("drop=0.1: condition is None", lambda: mvm.loss(mvm.wrap(same, null=0), x0, drop=0.1))
    field = mvm.wrap(same, null=torch.zeros(1, 2))
    refused(r"null has shape \(4, 2\) where condition has \(4, 1\)", lambda: mvm.loss(field, x0, x0[:, :1], drop=0.1))
    for null in (torch.zeros(1, 2), lambda c: torch.zeros(1, 2)):  # also where guidance alone would meet it
        field = mvm.wrap(same, null=null)
        words = r"null has shape \(4, 2\) where condition has \(4, 1\); give one row of the same shape"
        refused(words, lambda field=field: mvm.sample(field, x0 + 1, condition=x0[:, :1]))
    refused(r"null has shape \(4,\) where", lambda: mvm.loss(mvm.wrap(same, null=3), x0, x0[:, :1]))
    refused("the structures differ here", lambda: mvm.loss(mvm.wrap(same, null={"a": x0[:1]}), x0, x0))
    field = mvm.wrap(same, null=torch.full((1, 1), torch.nan))
    refused(r"null of shape \(4, 1\) holds NaN", lambda: mvm.sample(field, x0 + 1, condition=x0[:, :1]))
    field = mvm.wrap(lambda x, t: x[:, :1])
    refused(r"answers x of shape \(4, 3\) with \(4, 1\)", lambda: mvm.sample(field, x0))
    refused(
        "null is a function of the condition", lambda: mvm.sample(mvm.wrap(same, null=torch.zeros_like), x0[:, :1] + 1)
    )
    refused(r"holds NaN or Inf", lambda: mvm.sample(mvm.wrap(same), x0 + 1, condition=x0[:, :1] / 0))


def test_structures_of_two_kinds_do_not_mix():
    mask = torch.tensor([True, False])
    refused("the structures differ", lambda: dropped({"a": torch.zeros(2, 1)}, {"b": torch.zeros(2, 1)}, mask))
    assert LinearFlow() == mvm.wrap(lambda x, t: x, kind="flow", path="linear-flow").schedule
