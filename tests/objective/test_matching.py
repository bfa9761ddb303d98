"""The loss against values worked out by hand, and against the known floor of a perfect network."""

import math

import pytest
import torch
from scipy.integrate import quad

from mvm import noise
from mvm.network import Output
from mvm.objective import Batch, Matching, ObjectiveConfig, RepaConfig
from mvm.oracle import gaussian
from mvm.path import LinearFlow, MeanVelocity, TimeLaw

PATH = MeanVelocity()


class Stub:
    """A network that answers with a function of what it sees, and remembers it; tokens: what each block puts out."""

    null, time = 10, "level"

    def __init__(self, answer, inner=None, tokens=None):
        self.answer, self.inner, self.tokens = answer, inner, tokens

    def __call__(self, x, level, condition, taps=()):
        self.x, self.level, self.condition, self.taps = x, level, condition, tuple(taps)
        inner = None if self.inner is None else self.inner(x, level)
        return Output(self.answer(x, level), inner, {block: self.tokens[block] for block in taps})


def zero(x, level):
    return torch.zeros_like(x)


def batch(count=6, shape=(1, 4, 4), dtype=torch.float32, first=100):
    seeds = torch.arange(first, first + count)
    x0 = torch.rand(count, *shape, generator=torch.Generator().manual_seed(0)).to(dtype) * 2 - 1
    return Batch(x0, torch.arange(count) % 10, seeds)


def drawn(b):
    """t and eps of each sample, straight from the generator."""
    t = noise.uniform(b.seeds, noise.TIME, (1,))[:, 0]
    eps = noise.normal(b.seeds, noise.TRAIN, b.x0.shape[1:], b.x0.dtype)
    return t, eps


def matching(**config):
    return Matching(ObjectiveConfig(**config), PATH, TimeLaw())


def test_loss_of_a_zero_network_is_the_mean_square_of_u():
    b = batch(dtype=torch.float64)
    t, eps = drawn(b)
    network = Stub(zero)
    loss = matching()(network, b)
    total = 0.0
    for i in range(6):
        u = math.sqrt(t[i]) * b.x0[i] - eps[i]
        total += float((u**2).mean()) / 6
        x = (1 - t[i]) * b.x0[i] + math.sqrt(t[i]) * eps[i]
        assert torch.allclose(network.x[i], x, atol=1e-12)
        assert float(network.level[i]) == pytest.approx(math.sqrt(t[i]), abs=1e-12)
    assert float(loss.total) == pytest.approx(total, rel=1e-12)
    assert loss.parts.keys() == {"loss"}
    assert float(loss.parts["loss"]) == float(loss.total)
    assert network.taps == ()


@pytest.mark.parametrize(
    ("kind", "target"),
    [
        ("x0", lambda x0, eps, t: x0),
        ("eps", lambda x0, eps, t: eps),
        ("v", lambda x0, eps, t: x0 - eps / math.sqrt(t)),
        ("diffusion_v", lambda x0, eps, t: (1 - t) * eps - math.sqrt(t) * x0),
        ("flow", lambda x0, eps, t: -x0 + eps / (2 * math.sqrt(t))),
        ("score", lambda x0, eps, t: -eps / math.sqrt(t)),
    ],
)
def test_other_kinds(kind, target):
    b = batch(dtype=torch.float64)
    t, eps = drawn(b)
    want = sum(float(((0.5 - target(b.x0[i], eps[i], float(t[i]))) ** 2).mean()) for i in range(6)) / 6
    loss = matching(kind=kind)(Stub(lambda x, level: torch.full_like(x, 0.5)), b)
    assert float(loss.total) == pytest.approx(want, rel=1e-10)


def test_other_schedule():
    """On the linear flow the level is that of equal SNR, and flow = eps - x0."""
    b = batch(dtype=torch.float64)
    t, eps = drawn(b)
    network = Stub(zero)
    loss = Matching(ObjectiveConfig("flow"), LinearFlow(), TimeLaw())(network, b)
    assert float(loss.total) == pytest.approx(float(((eps - b.x0) ** 2).mean()), rel=1e-10)
    ratio = (1 - t) / t
    assert torch.allclose(network.level, (-ratio + torch.sqrt(ratio**2 + 4)) / 2, atol=1e-9)


def test_a_network_that_knows_the_target_has_no_loss():
    b = batch(dtype=torch.float64)
    t, eps = drawn(b)
    u = torch.sqrt(t).reshape(-1, 1, 1, 1) * b.x0 - eps
    loss = float(matching()(Stub(lambda x, level: u), b).total)
    assert loss == pytest.approx(0, abs=1e-14)  # a prediction is rounded to float32: (6e-8)^2 is left of it


@pytest.mark.parametrize("std", [0.25, 1.0, 2.0])
def test_floor_of_the_loss_on_a_gaussian(std):
    """Var(u | x_t) = Var(x0 | x_t)/t = s^2/((1-t)^2 s^2 + t): its mean over t is what a perfect network leaves."""
    law = gaussian(0.3, std, (1, 8, 8))
    count = 4000
    x0 = law.sample(torch.arange(10**6, 10**6 + count))
    b = Batch(x0, torch.zeros(count, dtype=torch.int64), torch.arange(count))

    def perfect(x, level):
        return law.predict("u", x, level**2, PATH)

    t = drawn(b)[0]
    loss = matching()(Stub(perfect), b)
    floor = quad(lambda r: std**2 / ((1 - r) ** 2 * std**2 + r), 0, 1)[0]
    # the sampled times shift the floor a little: compare at those times too, where only eps and x0 are random
    there = float((std**2 / ((1 - t) ** 2 * std**2 + t)).mean())
    assert there == pytest.approx(floor, rel=0.05)
    assert float(loss.total) == pytest.approx(there, rel=0.02)
    # and it is a floor: anything else is worse
    for other in (lambda x, level: 0.9 * perfect(x, level), lambda x, level: perfect(x, level) + 0.2):
        assert float(matching()(Stub(other), b).total) > float(loss.total)


def test_bias_of_a_network_adds_its_square():
    law = gaussian(0.0, 0.5, (1, 8, 8))
    count = 2000
    b = Batch(
        law.sample(torch.arange(10**6, 10**6 + count)), torch.zeros(count, dtype=torch.int64), torch.arange(count)
    )
    plain = matching()(Stub(lambda x, level: law.predict("u", x, level**2, PATH)), b).total
    off = matching()(Stub(lambda x, level: law.predict("u", x, level**2, PATH) + 0.3), b).total
    assert float(off - plain) == pytest.approx(0.09, abs=0.006)


@pytest.mark.parametrize("weight", [0.0, 0.5, 2.0])
def test_inner_weight(weight):
    b = batch(dtype=torch.float64)
    t, eps = drawn(b)
    u = torch.sqrt(t).reshape(-1, 1, 1, 1) * b.x0 - eps
    loss = matching(inner_weight=weight)(Stub(zero, inner=lambda x, level: torch.ones_like(x)), b)
    outer, inner = float((u**2).mean()), float(((u - 1) ** 2).mean())
    assert float(loss.parts["loss"]) == pytest.approx(outer, rel=1e-12)
    assert float(loss.parts["inner"]) == pytest.approx(inner, rel=1e-12)
    assert float(loss.total) == pytest.approx(outer + weight * inner, rel=1e-12)


def test_gradient_flows_through_total_only():
    b = batch()
    w = torch.ones((), requires_grad=True)
    loss = matching()(Stub(lambda x, level: w * x, inner=lambda x, level: w * x), b)
    assert loss.total.requires_grad
    assert not any(part.requires_grad for part in loss.parts.values())


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 1.0])
def test_share_of_dropped_labels(share):
    count = 20_000
    b = Batch(torch.zeros(count, 1), torch.arange(count) % 10, torch.arange(count))
    labels = matching(label_drop=share).drop(b, null=10)
    dropped = labels == 10
    assert float(dropped.double().mean()) == pytest.approx(share, abs=4 * math.sqrt(share * (1 - share) / count))
    assert torch.equal(labels[~dropped], b.condition[~dropped])
    for digit in range(10):  # and without regard to the label
        assert float(dropped[digit::10].double().mean()) == pytest.approx(share, abs=0.06)


def test_dropping_is_decided_by_the_seed_alone():
    objective = matching(label_drop=0.3)
    b = batch(count=50, shape=(1,))
    together = objective.drop(b, null=10)
    order = torch.randperm(50, generator=torch.Generator().manual_seed(1))
    shuffled = objective.drop(Batch(b.x0[order], b.condition[order], b.seeds[order]), null=10)
    assert torch.equal(shuffled, together[order])
    assert not torch.equal(objective.drop(b._replace(seeds=b.seeds + 1000), null=10), together)


def test_network_is_given_the_dropped_labels():
    b = batch(count=40)
    objective, network = matching(label_drop=0.4), Stub(zero)
    objective(network, b)
    assert torch.equal(network.condition, objective.drop(b, null=Stub.null))
    assert 0 < int((network.condition == Stub.null).sum()) < 40


class Listener(Stub):
    """A stub that may be told more than others, and remembers it."""

    def __call__(self, x, level, condition, taps=(), **told):
        self.told = told
        return super().__call__(x, level, condition, taps)


def test_a_network_that_drops_is_told_the_seeds_and_no_other():
    b, network = batch(), Listener(zero)
    matching()(network, b)
    assert network.told == {}
    Matching(ObjectiveConfig(), PATH, TimeLaw(), dropout=True)(network, b)
    assert network.told.keys() == {"seeds"}
    assert torch.equal(network.told["seeds"], b.seeds)


def test_a_network_is_told_what_was_done_to_its_images():
    b, network = batch()._replace(augment=torch.randn(6, 8)), Listener(zero)
    matching()(network, b)
    assert network.told.keys() == {"augment"}
    assert torch.equal(network.told["augment"], b.augment)


def test_loss_does_not_touch_the_global_generator():
    b = batch()
    state = torch.random.get_rng_state()
    first = matching()(Stub(zero), b).total
    torch.manual_seed(99)
    again = matching()(Stub(zero), b).total
    torch.random.set_rng_state(state)
    matching()(Stub(zero), b)
    assert torch.equal(first, again)
    assert torch.equal(torch.random.get_rng_state(), state)


# --- representation alignment (REPA) ------------------------------------------------------------------------------

# Four tokens of width 2 and a teacher's of width 2: cosines 1, 0, -1 and 3/5, whatever the lengths.
TOKENS = torch.tensor([[[1.0, 0.0], [0.0, 2.0], [3.0, 0.0], [3.0, 4.0]]])
TEACHER = torch.tensor([[[5.0, 0.0], [1.0, 0.0], [-1.0, 0.0], [1.0, 0.0]]])
ALIGNED = 1 - (1 + 0 - 1 + 0.6) / 4


def as_it_is(tokens):
    return tokens


def with_repa(block=2, **repa):
    return Matching(ObjectiveConfig(inner_weight=0.5), PATH, TimeLaw(), RepaConfig(encoder="x", **repa), block)


def taught(count=3, teacher=TEACHER):
    return batch(count=count)._replace(features=teacher.expand(count, -1, -1))


def student(count=3, **options):
    """A network whose block 2 puts out TOKENS; other blocks point the other way."""
    tokens = {block: (TOKENS if block == 2 else -TOKENS).expand(count, -1, -1) for block in (1, 2, 3)}
    return Stub(zero, tokens=tokens, **options)


@pytest.mark.parametrize("weight", [0.0, 0.5, 3.0])
def test_repa_is_added_by_its_weight(weight):
    network = student()
    loss = with_repa(weight=weight)(network, taught(), as_it_is)
    plain = matching()(Stub(zero), taught())
    assert loss.parts.keys() == {"loss", "repa"}
    assert torch.equal(loss.parts["loss"], plain.total)
    assert float(loss.parts["repa"]) == pytest.approx(ALIGNED, abs=1e-6)
    assert float(loss.total) == pytest.approx(float(plain.total) + weight * ALIGNED, rel=1e-6)


def test_repa_taps_its_block_and_no_other():
    network = student()
    with_repa(block=2)(network, taught(), as_it_is)
    assert network.taps == (2,)
    other = with_repa(block=3)(network, taught(), as_it_is)
    assert network.taps == (3,)
    assert float(other.parts["repa"]) == pytest.approx(2 - ALIGNED, abs=1e-6)  # every cosine changes its sign


def test_repa_stands_beside_the_inner_head():
    loss = with_repa(weight=2.0)(student(inner=zero), taught(), as_it_is)
    assert list(loss.parts) == ["loss", "inner", "repa"]
    assert float(loss.total) == pytest.approx(1.5 * float(loss.parts["loss"]) + 2 * ALIGNED, rel=1e-6)


@pytest.mark.parametrize(
    ("b", "projector"),
    [(batch(count=3), as_it_is), (taught(), None), (batch(count=3), None)],
    ids=("no features", "no projector", "neither"),
)
def test_no_repa_without_features_or_projector(b, projector):
    network = student()
    loss = with_repa()(network, b, projector)
    assert loss.parts.keys() == {"loss"}
    assert network.taps == ()
    assert torch.equal(loss.total, matching()(Stub(zero), b).total)


def test_repa_compares_what_the_projector_makes():
    """A projector that gives the teacher's own tokens leaves no loss; it is shown the tapped tokens."""
    seen = []

    def perfect(tokens):
        seen.append(tokens)
        return 7 * TEACHER.expand(3, -1, -1)

    loss = with_repa()(student(), taught(), perfect)
    assert torch.equal(seen[0], TOKENS.expand(3, -1, -1))
    assert float(loss.parts["repa"]) == pytest.approx(0, abs=1e-6)


def test_repa_averages_a_finer_teacher_over_the_networks_grid():
    """A 4x4 teacher whose 2x2 cells average to TEACHER gives the same loss."""
    grid = TEACHER.reshape(1, 2, 2, 2).repeat_interleave(2, dim=1).repeat_interleave(2, dim=2)
    ripple = torch.tensor([[3.0, -3.0], [-3.0, 3.0]]).repeat(2, 2)[None, :, :, None]
    loss = with_repa()(student(), taught(teacher=(grid + ripple).reshape(1, 16, 2)), as_it_is)
    assert float(loss.parts["repa"]) == pytest.approx(ALIGNED, abs=1e-6)


def test_repa_normalises_the_target():
    """normalise = 1: the mean over the tokens, (1.5, 0), is taken off; what is left of axis 1 is exactly 0."""
    loss = with_repa(normalise=1.0)(student(), taught(), as_it_is)
    cosines = (1, 0, -1, -3 / 5)  # x - 1.5 = 3.5, -0.5, -2.5, -0.5 against tokens 1, 0, 3 and (3, 4)
    assert float(loss.parts["repa"]) == pytest.approx(1 - sum(cosines) / 4, abs=1e-5)


def test_repa_teaches_network_and_projector_but_not_the_teacher():
    scale = torch.ones((), requires_grad=True)
    tokens = {2: TOKENS.expand(3, -1, -1).clone().requires_grad_()}
    teacher = TEACHER.clone().requires_grad_()
    loss = with_repa()(
        Stub(zero, tokens=tokens), taught(teacher=teacher), lambda t: t + scale * torch.tensor([0.0, 1.0])
    )
    loss.total.backward()
    assert float(tokens[2].grad.abs().sum()) > 0
    assert float(scale.grad.abs()) > 0
    assert teacher.grad is None
    assert not loss.parts["repa"].requires_grad


def test_a_batch_is_cut_with_its_features():
    b = taught(count=6)._replace(features=torch.arange(6.0).reshape(6, 1, 1))
    part = b.cut(slice(2, 5))
    assert part.features.flatten().tolist() == [2, 3, 4]
    assert part.seeds.tolist() == [102, 103, 104]
    assert part.condition.tolist() == [2, 3, 4]
    assert torch.equal(part.x0, b.x0[2:5])
    assert batch().cut(slice(2)).features is None
    assert batch().cut(slice(2)).augment is None
    told = b._replace(augment=torch.arange(6.0)[:, None]).cut(slice(2, 5))
    assert told.augment.flatten().tolist() == [2, 3, 4]


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"kind": "x1"}, r"objective\.kind='x1'.*'x0'"),
        ({"label_drop": 1.5}, r"objective\.label_drop=1\.5"),
        ({"label_drop": math.nan}, r"objective\.label_drop=nan"),
        ({"inner_weight": -1.0}, r"objective\.inner_weight=-1"),
    ],
)
def test_bad_configs(config, words):
    with pytest.raises(ValueError, match=words):
        ObjectiveConfig(**config)
