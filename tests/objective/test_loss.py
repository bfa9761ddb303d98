"""mvm.loss: the training loss of any callable, by the formulas that training uses."""

import pytest
import torch
from torch import nn

import mvm
from mvm import noise
from mvm.network import Output
from mvm.objective import Batch, Matching, ObjectiveConfig
from mvm.path import MEAN_VELOCITY, LinearFlow, MeanVelocity, TimeLaw, VariancePreserving, to_x0

PATHS = {"mv": MEAN_VELOCITY, "mv2": MeanVelocity(2.0), "flow": LinearFlow(), "vp": VariancePreserving()}
LAWS = {
    "uniform": TimeLaw(),
    "logit-normal": TimeLaw("logit-normal", mean=-0.4, std=1.2),
    "lam-normal": TimeLaw("lam-normal", mean=0.5),
    "lam-uniform": TimeLaw("lam-uniform", t_min=1e-4),
    "shifted": TimeLaw(shift_dimension=12),
}
CASES = [
    ("mv", "u", "uniform", "none"),
    ("mv", "v", "logit-normal", "flow"),
    ("mv2", "u", "shifted", "noise"),
    ("flow", "flow", "lam-normal", "none"),
    ("flow", "x0", "logit-normal", "flow"),
    ("vp", "eps", "lam-uniform", "likelihood"),
    ("vp", "diffusion_v", "uniform", "noise"),
]


def bent(x, t, condition):
    """A network of x, t and labels."""
    return torch.tanh(x * (1 + t.to(x.dtype))[:, None, None, None]) + 0.1 * condition[:, None, None, None]


class AsTrained:
    """The same network as `Matching` calls one: by noise level, for an Output."""

    null, time = -1, "level"

    def __init__(self, times):
        self.times = times

    def __call__(self, x, level, labels, taps=()):
        return Output(bent(x, self.times[0], labels), None, {})


@pytest.mark.parametrize(("path", "kind", "law", "weight"), CASES)
def test_it_is_the_loss_of_training_at_equal_times_and_noise(monkeypatch, path, kind, law, weight):
    schedule, law, seeds = PATHS[path], LAWS[law], torch.arange(5) + 11
    x0, labels = noise.normal(seeds, 77, (3, 4, 4), torch.float64), torch.arange(5) % 3
    times = []

    def seen(x, t, condition):
        times.append(t)
        return bent(x, t, condition)

    share, eps = noise.uniform(seeds, noise.TIME, (1,))[:, 0], noise.normal(seeds, noise.TRAIN, (3, 4, 4), x0.dtype)
    monkeypatch.setattr(torch, "rand", lambda *_, **__: torch.stack((share, share)))
    monkeypatch.setattr(torch, "randn", lambda *_, **__: eps)
    found = mvm.loss(seen, x0, labels, path=schedule, kind=kind, timesteps=law, weight=weight)
    objective = Matching(ObjectiveConfig(kind, label_drop=0.0, weight=weight), schedule, law)
    want = objective(AsTrained(times), Batch(x0, labels, seeds)).total
    assert torch.isfinite(want)
    assert float(abs(found - want)) <= 1e-6 * float(want)


def test_times_and_noise_are_new_at_every_call_and_repeat_with_a_generator():
    seen, x0 = [], torch.zeros(4, 2)

    def network(x, t, condition):
        seen.append((x, t))
        return x

    first, second = mvm.loss(network, x0), mvm.loss(network, x0)
    assert first != second
    assert not torch.equal(seen[0][0], seen[1][0])
    assert not torch.equal(seen[0][1], seen[1][1])
    values = []
    for _ in range(2):
        generator = torch.Generator().manual_seed(3)
        values.append([float(mvm.loss(network, x0, generator=generator)) for _ in range(2)])
    assert values[0] == values[1]
    assert values[0][0] != values[0][1]
    torch.manual_seed(5)
    plain = mvm.loss(network, x0)
    torch.manual_seed(5)
    assert plain == mvm.loss(network, x0)
    assert seen[0][1].dtype == torch.float32
    assert seen[0][0].dtype == x0.dtype


def test_a_network_of_ones_own_learns_a_gaussian():
    """u of N(0, 1): a line in x for each t; a network that has it is at the floor of the loss."""
    torch.manual_seed(0)

    class Line(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(1, 32), nn.SiLU(), nn.Linear(32, 1))

        def forward(self, x, t, condition):
            return self.layers(t.to(x.dtype).sqrt()[:, None]) * x

    network = Line()
    optimizer = torch.optim.Adam(network.parameters(), 3e-3)
    for _ in range(500):
        optimizer.zero_grad()
        mvm.loss(network, torch.randn(256, 1)).backward()
        optimizer.step()
    times = torch.tensor([0.1, 0.4, 0.8], dtype=torch.float64)
    x, exact = torch.ones(3, 1), mvm.oracle.gaussian(0.0, 1.0)
    with torch.no_grad():
        found = to_x0("u", network(x, times, None), x, times, MEAN_VELOCITY)
    assert torch.allclose(found, exact.denoise(x, times, MEAN_VELOCITY), atol=0.1)


def test_gradients_reach_the_network_alone():
    scale = torch.ones((), requires_grad=True)
    mvm.loss(lambda x, t, condition: scale * x, torch.randn(3, 2)).backward()
    assert scale.grad is not None


@pytest.mark.parametrize(
    ("x0", "options", "words"),
    [
        (torch.zeros(2, 3, dtype=torch.uint8), {}, r"x0 is torch.uint8 of shape \(2, 3\); give floating-point samples"),
        (torch.zeros(2), {}, r"x0 is torch.float32 of shape \(2,\)"),
        (torch.zeros(2, 3), {"kind": "w"}, "kind='w' is unknown"),
        (torch.zeros(2, 3), {"weight": "heavy"}, "objective.weight='heavy' is unknown"),
        (torch.zeros(2, 3), {"weight": "likelihood"}, "mean is infinite"),
        (torch.zeros(2, 3), {"timesteps": TimeLaw("lam-uniform", t_min=1e-3)}, "lam has no lower end"),
    ],
    ids=str,
)
def test_what_is_refused(x0, options, words):
    with pytest.raises(ValueError, match=words):
        mvm.loss(lambda x, t, condition: x, x0, **options)


def test_an_answer_of_another_shape_is_refused():
    with pytest.raises(
        ValueError, match=r"the network answers x of shape \(2, 3\) with \(2, 1\); it must be x's shape"
    ):
        mvm.loss(lambda x, t, condition: x[:, :1], torch.zeros(2, 3))


@pytest.mark.parametrize("null", [2, torch.tensor([2])], ids=["number", "row"])
def test_no_condition_is_the_null_condition(null):
    x0, how = torch.randn(3, 3, 4, 4), {"seeds": torch.arange(3), "step": 1}
    field = mvm.wrap(bent, null=null)
    assert torch.equal(mvm.loss(field, x0, **how), mvm.loss(field, x0, torch.full((3,), 2), **how))
    with pytest.raises(ValueError, match="null is a function of the condition, and condition=None; give one"):
        mvm.loss(mvm.wrap(bent, null=torch.zeros_like), x0)
