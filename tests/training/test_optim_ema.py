"""Learning rate, AdamW groups and the moving average, against loops written out by hand."""

import math

import pytest
import torch
from torch import nn

from mvm.training import ema
from mvm.training.optim import TrainConfig, adamw, learning_rate


def test_warmup_then_linear_fall():
    config = TrainConfig(steps=10, lr=1.0, warmup=4, decay="linear", final=0.1)
    rates = [learning_rate(config, step) for step in range(13)]
    assert rates[:4] == pytest.approx([0.25, 0.5, 0.75, 1.0])
    assert rates[4:10] == pytest.approx([1.0, 0.85, 0.7, 0.55, 0.4, 0.25])
    assert rates[10:] == pytest.approx([0.1, 0.1, 0.1])  # it stays there past the end


def test_constant_rate():
    config = TrainConfig(steps=5, lr=3e-4, warmup=2, decay="constant", final=0.0)
    assert [learning_rate(config, s) for s in range(6)] == pytest.approx([1.5e-4, 3e-4, 3e-4, 3e-4, 3e-4, 3e-4])


@pytest.mark.parametrize(("warmup", "steps"), [(0, 1), (5, 5), (9, 5)])
def test_rate_is_finite_when_warmup_fills_the_run(warmup, steps):
    config = TrainConfig(steps=steps, lr=1.0, warmup=warmup, decay="linear", final=0.0)
    rates = [learning_rate(config, s) for s in range(steps)]
    assert all(0 < rate <= 1 for rate in rates)


def test_weight_decay_falls_on_matrices_alone():
    network = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Embedding(5, 4))
    optimizer = adamw(TrainConfig(lr=0.1, weight_decay=0.5), network)
    before = {name: p.detach().clone() for name, p in network.named_parameters()}
    for p in network.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()  # with no gradient only the decay acts: w -> w (1 - lr wd)
    for name, p in network.named_parameters():
        factor = 1 - 0.1 * 0.5 if p.ndim >= 2 else 1.0
        assert torch.allclose(p, before[name] * factor, atol=1e-7), name
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(before)


def test_one_step_of_adamw():
    network = nn.Linear(2, 1, bias=False)
    w = network.weight.detach().clone()
    gradient = torch.tensor([[0.3, -2.0]])
    optimizer = adamw(TrainConfig(lr=0.01, beta1=0.8, beta2=0.9, weight_decay=0.1), network)
    network.weight.grad = gradient.clone()
    optimizer.step()
    # the first step is lr * sign(g) whatever the betas, after the decay
    assert torch.allclose(network.weight, w * (1 - 0.001) - 0.01 * gradient.sign(), atol=1e-6)
    network.weight.grad = 2 * gradient
    now = network.weight.detach().clone()
    optimizer.step()
    m = (0.8 * 0.2 * gradient + 0.2 * 2 * gradient) / (1 - 0.8**2)
    v = (0.9 * 0.1 * gradient**2 + 0.1 * 4 * gradient**2) / (1 - 0.9**2)
    assert torch.allclose(network.weight, now * (1 - 0.001) - 0.01 * m / (v.sqrt() + 1e-8), atol=1e-6)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"lr": 0.0}, r"train\.lr=0"),
        ({"lr": math.inf}, r"train\.lr=inf"),
        ({"lr": math.nan}, r"train\.lr=nan"),
        ({"steps": 0}, r"train\.steps=0"),
        ({"batch": 0}, r"train\.batch=0"),
        ({"keep": 0}, r"train\.keep=0"),
        ({"log_every": 0}, r"train\.log_every=0"),
        ({"save_every": -1}, r"train\.save_every=-1"),
        ({"warmup": -1}, r"train\.warmup=-1"),
        ({"clip": -0.1}, r"train\.clip=-0\.1"),
        ({"weight_decay": math.nan}, r"train\.weight_decay=nan"),
        ({"ema": 1.0}, r"train\.ema=1"),
        ({"beta2": 1.0}, r"train\.beta2=1"),
        ({"final": 1.1}, r"train\.final=1\.1"),
        ({"decay": "cosine"}, r"train\.decay='cosine'"),
    ],
)
def test_bad_values_are_named(changes, words):
    with pytest.raises(ValueError, match=words):
        TrainConfig(**changes)


@pytest.mark.parametrize(
    ("decay", "step", "want"),
    [(0.9999, 0, 0.1), (0.9999, 90, 0.91), (0.5, 0, 0.1), (0.5, 8, 0.5), (0.999, 10**6, 0.999)],
)
def test_decay_warms_up(decay, step, want):
    assert ema.decay_at(decay, step) == pytest.approx(want)


def test_average_equals_a_hand_loop():
    torch.manual_seed(0)
    network = nn.Linear(3, 2).double()
    average = ema.copy_weights(network)
    by_hand = {name: p.detach().clone() for name, p in network.named_parameters()}
    for step in range(30):
        with torch.no_grad():
            for p in network.parameters():
                p.add_(torch.randn_like(p))
        ema.update(average, network, 0.7, step)
        decay = min(0.7, (1 + step) / (10 + step))
        for name, p in network.named_parameters():
            by_hand[name] = decay * by_hand[name] + (1 - decay) * p.detach()
    for name, want in by_hand.items():
        assert torch.allclose(average[name], want, atol=1e-12)
    assert not torch.allclose(average["weight"], network.weight, atol=1e-3)


def test_average_starts_as_a_copy_and_shares_no_memory():
    network = nn.Linear(3, 2)
    average = ema.copy_weights(network)
    before = average["weight"].clone()
    with torch.no_grad():
        network.weight.add_(1)
    assert torch.equal(average["weight"], before)
    assert not average["weight"].requires_grad
