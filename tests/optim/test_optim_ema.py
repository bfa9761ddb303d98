"""Learning rate, optimizers and the moving average, against loops written out by hand."""

import math
from contextlib import contextmanager

import pytest
import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from mvm.network import DiT, DiTConfig
from mvm.optim import ema, power_ema
from mvm.optim import optimizers as optimizers_module
from mvm.optim.optimizers import DECAYS, TrainConfig, learning_rate, optimizers, set_rate, step_unless


def test_warmup_then_linear_fall():
    config = TrainConfig(steps=10, lr=1.0, warmup=4, decay="linear", final=0.1)
    rates = [learning_rate(config, step) for step in range(13)]
    assert rates[:4] == pytest.approx([0.25, 0.5, 0.75, 1.0])
    assert rates[4:10] == pytest.approx([1.0, 0.85, 0.7, 0.55, 0.4, 0.25])
    assert rates[10:] == pytest.approx([0.1, 0.1, 0.1])  # it stays there past the end


def test_constant_rate():
    config = TrainConfig(steps=5, lr=3e-4, warmup=2, decay="constant", final=0.0)
    assert [learning_rate(config, s) for s in range(6)] == pytest.approx([1.5e-4, 3e-4, 3e-4, 3e-4, 3e-4, 3e-4])


def test_cosine():
    config = TrainConfig(steps=8, lr=2.0, warmup=2, decay="cosine", final=0.5)
    want = [1.0, 2.0, *(1.5 + 0.5 * math.cos(math.pi * k / 6) for k in range(6)), 1.0, 1.0]
    assert [learning_rate(config, step) for step in range(10)] == pytest.approx(want)


def test_trapezoid():
    config = TrainConfig(steps=20, lr=1.0, warmup=4, decay="trapezoid", final=0.2, cooldown=0.2)
    want = [0.25, 0.5, 0.75, *(13 * [1.0]), 1.0, 0.8, 0.6, 0.4, 0.2, 0.2]
    assert [learning_rate(config, step) for step in range(22)] == pytest.approx(want)


@pytest.mark.parametrize("cooldown", [0.7, 1.0])
def test_trapezoid_without_room_to_stay_is_linear(cooldown):
    """A cooldown that would begin within the warm-up begins after it: the rate never jumps."""
    options = {"steps": 10, "lr": 1.0, "warmup": 4}
    both = [TrainConfig(decay=decay, cooldown=cooldown, **options) for decay in ("trapezoid", "linear")]
    assert [learning_rate(both[0], step) for step in range(12)] == [learning_rate(both[1], step) for step in range(12)]


def test_piecewise():
    """1 up to step 5, an eighth less at each step to 0.5 at step 9, which does not depend on the number of steps."""
    options = {"lr": 1.0, "warmup": 2, "decay": "piecewise", "decay_start": 5, "decay_end": 9, "final": 0.5}
    want = [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 0.875, 0.75, 0.625, 0.5, 0.5, 0.5, 0.5, 0.5]
    for steps in (7, 12, 100):
        config = TrainConfig(steps=steps, **options)
        assert [learning_rate(config, step) for step in range(14)] == want


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize(("warmup", "steps"), [(0, 1), (5, 5), (9, 5)])
def test_rate_is_finite_when_warmup_fills_the_run(warmup, steps, decay):
    between = {"decay_start": warmup, "decay_end": warmup + 1} if decay == "piecewise" else {}
    config = TrainConfig(steps=steps, lr=1.0, warmup=warmup, decay=decay, final=0.0, **between)
    rates = [learning_rate(config, s) for s in range(steps)]
    assert all(0 < rate <= 1 for rate in rates)


def the_one(config, network):
    """The only optimizer of a network."""
    (optimizer,) = optimizers(config, network.named_parameters())
    return optimizer


def test_weight_decay_falls_on_matrices_alone():
    network = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Embedding(5, 4))
    optimizer = the_one(TrainConfig(lr=0.1, weight_decay=0.5), network)
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
    optimizer = the_one(TrainConfig(lr=0.01, beta1=0.8, beta2=0.9, weight_decay=0.1), network)
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


CONFIG = TrainConfig(lr=0.01, weight_decay=0.1)


def small(device="cpu"):
    """A network with matrices and vectors, and its fused AdamW."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 3)).to(device)
    return network, the_one(CONFIG, network)


def give_gradients(network, seed, factor=1.0):
    generator = torch.Generator().manual_seed(seed)
    for p in network.parameters():
        p.grad = factor * torch.randn(p.shape, generator=generator).to(p.device)


def whole(value):
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()


def state_of(network, optimizer):
    """Weights, moments and step counters, copied."""
    kept = {name: whole(p) for name, p in network.named_parameters()}
    for name, p in network.named_parameters():
        kept |= {f"{name}/{key}": whole(value) for key, value in optimizer.state[p].items()}
    return kept


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def skip_or_not(optimizer, network, skip):
    step_unless(optimizer, torch.tensor(skip, device=next(network.parameters()).device))


@pytest.fixture(params=["cpu", "cuda"])
def device(request):
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU here")
    return request.param


@pytest.mark.parametrize("skipped_at", [0, 2])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_fused_step_is_skipped_where_found_inf_is_one(device, skipped_at, bad):
    """Weights, moments and counters stay bit for bit, and later steps are those of a run without the skipped one."""
    (network, optimizer), (clean, plain) = small(device=device), small(device=device)
    for step in range(4):
        if step == skipped_at:
            before = state_of(network, optimizer)
            give_gradients(network, 99, factor=bad)
            skip_or_not(optimizer, network, skip=True)
            after = state_of(network, optimizer)
            assert same({name: after[name] for name in before}, before)  # at step 0 there were no moments yet
            assert all(float(optimizer.state[p]["step"]) == step for p in network.parameters())
        give_gradients(network, step)
        give_gradients(clean, step)
        skip_or_not(optimizer, network, skip=False)
        plain.step()  # no found_inf at all
    assert same(state_of(network, optimizer), state_of(clean, plain))


@contextmanager
def one_process_group():
    distributed.init_process_group("gloo", rank=0, world_size=1, store=distributed.HashStore())
    try:
        yield init_device_mesh("cpu", (1,))
    finally:
        distributed.destroy_process_group()


@pytest.mark.skipif(not distributed.is_gloo_available(), reason="torch was built without gloo")
def test_fused_step_is_skipped_under_fsdp_too():
    with one_process_group() as mesh:
        network, _ = small()
        fully_shard(network, mesh=mesh)
        optimizer = the_one(CONFIG, network)
        assert all(isinstance(p, DTensor) for p in network.parameters())
        x = torch.randn(4, 5)
        for step, skip in enumerate([False, True, False]):
            optimizer.zero_grad()
            network(math.nan * x if skip else x).square().sum().backward()
            before = state_of(network, optimizer)
            skip_or_not(optimizer, network, skip)
            after = state_of(network, optimizer)
            assert same(before, after) == skip, step
        assert all(float(value) == 2 for name, value in after.items() if name.endswith("/step"))


def test_fused_adamw_is_adamw():
    (network, one), copy = small(), small()[0]
    matrices, vectors = ([p for p in copy.parameters() if (p.ndim >= 2) == many] for many in (True, False))
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    other = torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.95), fused=False)
    assert one.param_groups[0]["fused"]
    for step in range(100):
        for net, opt in ((network, one), (copy, other)):
            give_gradients(net, step)
            opt.step()
    for (name, p), q in zip(network.named_parameters(), copy.parameters(), strict=True):
        assert torch.allclose(p, q, rtol=0, atol=1e-6), name


def tiny_dit():
    torch.manual_seed(0)
    return DiT(DiTConfig(size="tiny", depth=2, width=32, heads=2, inner_block=1), (1, 8, 8), 10)


@pytest.mark.parametrize("prefix", ["", "_orig_mod.", "module."])
def test_muon_has_the_matrices_of_the_blocks_and_adamw_the_rest(prefix):
    network = tiny_dit()
    names = {p: name for name, p in network.named_parameters()}
    named = [(prefix + name, p) for name, p in network.named_parameters()]
    muon, others = optimizers(TrainConfig(optimizer="muon", weight_decay=0.1, lr=3e-3), named)
    hidden = {names[p] for group in muon.param_groups for p in group["params"]}
    parts = ("attention.qkv", "attention.out", "mlp.gate_up", "mlp.down", "modulation")
    assert hidden == {f"blocks.{block}.{part}.weight" for block in (0, 1) for part in parts}
    rest = {names[p] for group in others.param_groups for p in group["params"]}
    assert hidden | rest == set(names.values())
    assert not hidden & rest
    assert {"embed.weight", "label.weight", "head.linear.weight", "inner_head.modulation.weight"} < rest
    assert isinstance(muon, torch.optim.Muon)
    assert isinstance(others, torch.optim.AdamW)
    for optimizer in (muon, others):
        assert {group["lr"] for group in optimizer.param_groups} == {3e-3}
        for group in optimizer.param_groups:
            assert all(group["weight_decay"] == (0.1 if p.ndim >= 2 else 0) for p in group["params"])


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_frozen_parameters_are_left_out(kind):
    network = tiny_dit()
    network.blocks[0].requires_grad_(False)
    found = optimizers(TrainConfig(optimizer=kind), network.named_parameters())
    held = {p for optimizer in found for group in optimizer.param_groups for p in group["params"]}
    assert held == {p for p in network.parameters() if p.requires_grad}


def test_muon_needs_blocks():
    with pytest.raises(ValueError, match=r"train\.optimizer='muon'"):
        optimizers(TrainConfig(optimizer="muon"), nn.Linear(2, 2).named_parameters())


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_loss_of_a_fixed_batch_falls(kind):
    network, generator = tiny_dit(), torch.Generator().manual_seed(1)
    x, target = torch.randn(2, 16, 1, 8, 8, generator=generator)
    level, labels = torch.rand(16, generator=generator), torch.arange(16) % 10
    found = optimizers(TrainConfig(optimizer=kind, lr=1e-2), network.named_parameters())
    losses = []
    for _ in range(40):
        network.zero_grad()
        loss = (network(x, level, labels).prediction - target).square().mean()
        loss.backward()
        for optimizer in found:
            optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0], losses[::10]


def test_muon_moves_a_matrix_as_far_as_its_rate_says():
    """Orthogonal steps of root mean square 0.2 lr a value (Muon's singular values are within 0.7 and 1.2)."""
    network = tiny_dit()
    muon, _ = optimizers(TrainConfig(optimizer="muon", lr=0.1), network.named_parameters())
    weight = network.blocks[0].attention.out.weight
    before = weight.detach().clone()
    weight.grad = torch.randn(weight.shape, generator=torch.Generator().manual_seed(4))
    muon.step()
    assert float((weight.detach() - before).square().mean().sqrt()) == pytest.approx(0.02, rel=0.2)


def moved(network, optimizer, flags):
    """Step with fresh gradients, or NaN and skipped where flagged; yield weights and momentum after each."""
    for number, skip in enumerate(flags):
        give_gradients(network, number, factor=math.nan if skip else 1.0)
        skip_or_not(optimizer, network, skip)
        yield state_of(network, optimizer)


def test_muon_skips_a_step_as_adamw_does():
    """Weights and momentum stay, and what follows is as if it had never been."""
    network, clean = tiny_dit(), tiny_dit()
    (muon, _), (plain, _) = (
        optimizers(TrainConfig(optimizer="muon", lr=0.01), net.named_parameters()) for net in (network, clean)
    )
    before = {name: p.detach().clone() for name, p in network.named_parameters()}
    at_once, first, skipped, second = moved(network, muon, [True, False, True, False])
    assert same({name: at_once[name] for name in before}, before)
    assert not same({name: first[name] for name in before}, before)
    assert same(first, skipped)
    for seed in (1, 3):
        give_gradients(clean, seed)
        plain.step()
    assert same(second, state_of(clean, plain))


@pytest.mark.parametrize(("device", "dtype"), [("cpu", torch.float32), ("cuda", torch.bfloat16)])
def test_muon_has_bf16_where_that_is_fast(device, dtype):
    assert optimizers_module.product_dtype(torch.device(device)) is dtype


@pytest.mark.parametrize(("dtype", "within"), [(torch.float32, 1e-5), (torch.bfloat16, 5e-2)])
@pytest.mark.parametrize("shape", [(2, 12, 12), (2, 8, 20), (2, 20, 8)])
def test_newton_schulz_steps_are_polynomials_of_singular_values(dtype, within, shape):
    """x -> a x + b x^3 + c x^5, five times, of each singular value over the norm of all, in float64."""
    stack = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    a, b, c = 3.4445, -4.7750, 2.0315
    left, values, right = torch.linalg.svd(stack.double(), full_matrices=False)
    values = values / values.norm(dim=-1, keepdim=True)
    for _ in range(5):
        values = a * values + b * values**3 + c * values**5
    found = optimizers_module.orthogonal(stack.to(dtype), (a, b, c), 5, 1e-7)
    assert (found.double() - left @ (values[..., None] * right)).abs().max() < within


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_muon_by_stacks_is_torchs_muon(weight_decay, monkeypatch):
    """Up to bf16's rounding in its products: 1e-2 of a step."""
    monkeypatch.setattr(optimizers_module, "product_dtype", lambda device: torch.bfloat16)
    ours, theirs = tiny_dit(), tiny_dit()
    muon, _ = optimizers(TrainConfig(optimizer="muon", lr=0.01, weight_decay=weight_decay), ours.named_parameters())
    hidden = {name: p for name, p in theirs.named_parameters() if name.startswith("blocks") and p.ndim == 2}
    options = {"lr": 0.01, "weight_decay": weight_decay, "adjust_lr_fn": "match_rms_adamw"}
    published = torch.optim.Muon(list(hidden.values()), **options)
    for seed in range(3):
        for network, optimizer in ((ours, muon), (theirs, published)):
            give_gradients(network, seed)
            optimizer.step()
    for name, p in hidden.items():
        mine = ours.get_parameter(name)
        assert torch.allclose(mine, p, atol=1e-2 * 0.01), name
        kept, other = muon.state[mine]["momentum_buffer"], published.state[p]["momentum_buffer"]
        assert torch.equal(kept, other), name


def test_rate_is_set_everywhere():
    for optimizer in optimizers(TrainConfig(optimizer="muon", lr=1.0), tiny_dit().named_parameters()):
        set_rate(optimizer, 0.25)
        assert {group["lr"] for group in optimizer.param_groups} == {0.25}


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
        ({"ema": (1.0,)}, r"train\.ema=1"),
        ({"ema": (0.5, math.nan)}, r"train\.ema=nan"),
        ({"ema": ()}, r"train\.ema is empty"),
        ({"ema": (0.999, 0.9990000001)}, r"train\.ema=.* holds one value twice"),  # one file name for both
        ({"power": (0.1, 0.1)}, r"train\.power=.* holds one value twice"),
        ({"power": (0.05, 0.3)}, r"0\.3 is out of range"),
        ({"snapshot_every": 5}, r"train\.snapshot_every=5 stores train\.power averages"),
        ({"snapshot_every": -1, "power": (0.1,)}, r"train\.snapshot_every=-1"),
        ({"beta2": 1.0}, r"train\.beta2=1"),
        ({"final": 1.1}, r"train\.final=1\.1"),
        ({"decay": "cosin"}, r"train\.decay='cosin' is unknown \(did you mean 'cosine'"),
        ({"cooldown": 0.0}, r"train\.cooldown=0\.0"),
        ({"cooldown": 1.1}, r"train\.cooldown=1\.1"),
        ({"cooldown": math.nan}, r"train\.cooldown=nan"),
        ({"decay_start": -1}, r"train\.decay_start=-1"),
        ({"decay_end": -1}, r"train\.decay_end=-1"),
        ({"decay": "piecewise"}, r"train\.decay='piecewise' needs .* < train\.decay_end=0; give the steps"),
        ({"decay": "piecewise", "decay_start": 3, "decay_end": 3}, r"train\.decay_start=3 < train\.decay_end=3"),
        (
            {"decay": "piecewise", "warmup": 4, "decay_start": 3, "decay_end": 9},
            r"train\.warmup=4 <= train\.decay_start=3",
        ),
        ({"optimizer": "moun"}, r"train\.optimizer='moun' is unknown \(did you mean 'muon'"),
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


def test_averages_equal_hand_loops():
    torch.manual_seed(0)
    network = nn.Linear(3, 2).double()
    averages = ema.Averages(network, (0.7, 0.25), (0.1,))
    gamma = power_ema.exponent(0.1)
    rules = {
        "ema": lambda step: min(0.7, (1 + step) / (10 + step)),
        "ema-0.25": lambda step: min(0.25, (1 + step) / (10 + step)),
        "power-0.1": lambda s: (s / (s + 1)) ** (gamma + 1),
    }
    by_hand = {rule: {name: p.detach().clone() for name, p in network.named_parameters()} for rule in rules}
    for step in range(30):
        with torch.no_grad():
            for p in network.parameters():
                p.add_(torch.randn_like(p))
        averages.update(step)
        for rule, decay in rules.items():
            for name, p in network.named_parameters():
                by_hand[rule][name] = decay(step) * by_hand[rule][name] + (1 - decay(step)) * p.detach()
    assert averages.tensors.keys() == rules.keys()
    for rule, weights in by_hand.items():
        assert all(torch.allclose(averages.tensors[rule][name], want, atol=1e-12) for name, want in weights.items())
        assert not torch.allclose(averages.tensors[rule]["weight"], network.weight, atol=1e-3)


def test_average_starts_as_a_copy_and_shares_no_memory():
    network = nn.Linear(3, 2)
    average = ema.copy_weights(network)
    before = average["weight"].clone()
    with torch.no_grad():
        network.weight.add_(1)
    assert torch.equal(average["weight"], before)
    assert not average["weight"].requires_grad


def test_averages_are_swapped_in_and_out():
    """Also when something fails meanwhile."""
    network = nn.Linear(3, 2)
    averages = ema.Averages(network, (0.5,), (0.1,))
    with torch.no_grad():
        network.weight.add_(1)
    own = network.weight.detach().clone()
    averages.update(0)  # "ema" is 0.1 of the start, "power" nothing of it
    for name, want in (("ema", own - 0.1), ("power-0.1", own)):
        with averages.swapped_in(name):
            assert torch.allclose(network.weight, want, atol=1e-6)
        assert torch.equal(network.weight, own)
    with pytest.raises(ZeroDivisionError), averages.swapped_in():
        1 / 0  # noqa: B018
    assert torch.equal(network.weight, own)


def test_averages_are_restored_apart():
    network = nn.Linear(3, 2)
    averages = ema.Averages(network, (0.5,), (0.1,))
    given = {name: torch.full_like(p, 7) for name, p in network.named_parameters()}
    averages.restore("power-0.1", given)
    given["weight"].zero_()
    assert averages.whole("power-0.1")["weight"].unique().tolist() == [7]
    assert torch.equal(averages.whole("ema")["weight"], network.weight.detach())
