"""Encoder sharing: the best steps against all choices, and runs of a small DDT with exact counts of its parts."""

from itertools import combinations

import pytest
import torch

from mvm.network import DDT, DDTConfig
from mvm.path import MeanVelocity, to_x0
from mvm.solver import ClassifierFree, Internal, Interval, sample, solve
from mvm.solver.sharing import SharedRun, SharingPlan, best_steps, shared, similarity

MV = MeanVelocity()
LABELS = torch.tensor([0, 2, 3])
CFG, IG = ClassifierFree(1.5), Internal(1.45)
NFE = 6
SOLVERS = [("adams", 0.0), ("adams", 0.75), ("sa", 0.75), ("euler-maruyama", 1.0), ("heun", 0.0)]


class Latents:
    """A small DDT with random weights as a field, whole and in parts; it counts how often each part runs."""

    schedule, num_classes = MV, 4

    def __init__(self, kind="u"):
        torch.manual_seed(0)
        config = DDTConfig(size="tiny", depth=2, width=16, heads=2, head_width=32, head_heads=4, inner_block=1)
        self.network, self.kind = DDT(config, (3, 4, 4), self.num_classes), kind
        with torch.no_grad():
            for parameter in self.network.parameters():
                parameter.normal_(0, 0.2)
        self.backbone, self.heads = [], 0
        self.network.embed.register_forward_hook(lambda *_: self.backbone.append(None))
        self.network.wide.register_forward_hook(self._count_head)

    def _count_head(self, *_):
        self.heads += 1

    def _labels(self, x, labels):
        return torch.full((len(x),), self.network.null) if labels is None else labels

    def _x0(self, prediction, x, t):
        return to_x0(self.kind, prediction, x, t, MV)

    def condition(self, x, t, labels):
        said = self.network.condition(x, MV.level(t), self._labels(x, labels))
        self.backbone[-1] = (float(t[0]), labels is None)
        return said

    def head(self, x, t, labels, condition):
        return self._x0(self.network.head(x, MV.level(t), condition), x, t)

    def inner(self, x, t, labels, condition):
        return self._x0(condition.inner, x, t)

    def __call__(self, x, t, labels=None):
        return self._x0(self.network(x, MV.level(t), self._labels(x, labels)).prediction, x, t)

    def pair(self, x, t, labels=None):
        out = self.network(x, MV.level(t), self._labels(x, labels))
        return self._x0(out.prediction, x, t), self._x0(out.inner, x, t)


def noise(batch=3):
    return torch.randn(batch, 3, 4, 4, generator=torch.Generator().manual_seed(1))


def options(**changes):
    return {"nfe": NFE, "condition": LABELS, "seeds": range(3), **changes}


def ran(field, steps, **changes):
    """Return the images, and how often backbone and head ran."""
    field.backbone, field.heads = [], 0
    with shared(field, SharingPlan(NFE, steps)) as run:
        x = sample(run, noise(), **options(**changes))
    return x, len(field.backbone), field.heads


def every(k):
    return [(0, *rest) for rest in combinations(range(1, NFE), k - 1)]


# which steps


def total(matrix, steps):
    """What a choice is worth, one step after another."""
    return sum(float(matrix[max(s for s in steps if s <= j), j]) for j in range(len(matrix)))


@pytest.mark.parametrize("n", range(1, 10))
def test_best_steps_are_the_best_of_all_choices(n):
    for k in range(1, n + 1):
        for seed in range(3):
            matrix = torch.rand(n, n, generator=torch.Generator().manual_seed(100 * n + 10 * k + seed))
            matrix = matrix.double() if seed else (matrix + matrix.T).fill_diagonal_(1)
            steps = best_steps(matrix, k)
            assert steps[0] == 0
            assert len(steps) == len(set(steps)) == k
            assert list(steps) == sorted(steps)
            best = max(total(matrix, (0, *rest)) for rest in combinations(range(1, n), k - 1))
            assert total(matrix, steps) == pytest.approx(best, rel=1e-12)


def test_best_steps_find_where_the_tokens_change():
    """Three plateaus of lengths 5, 1 and 4: their first steps are what must be computed."""
    plateau = torch.tensor([0] * 5 + [1] + [2] * 4)
    matrix = (plateau[:, None] == plateau[None]).double()
    assert best_steps(matrix, 3) == (0, 5, 6)
    assert total(matrix, (0, 5, 6)) == 10 > total(matrix, (0, 3, 6))


@pytest.mark.parametrize("count", [0, 7, -1])
def test_a_count_out_of_range_is_named(count):
    with pytest.raises(ValueError, match=rf"count={count}.*\[1, 6\]"):
        best_steps(torch.eye(6), count)


@pytest.mark.parametrize("bad", [torch.ones(3, 4), torch.ones(3), torch.full((2, 2), torch.nan)], ids=["4", "1", "nan"])
def test_a_bad_similarity_is_refused(bad):
    with pytest.raises(ValueError, match="similarity must be finite"):
        best_steps(bad, 1)


@pytest.mark.parametrize("steps", [(), (1, 2), (0, 2, 2), (0, 3, 1), (0, 6)])
def test_a_plan_must_rise_from_the_first_step(steps):
    with pytest.raises(ValueError, match=r"steps=.*rise from 0"):
        SharingPlan(6, steps)


def test_a_plan_knows_whose_answer_serves():
    plan = SharingPlan(6, (0, 2, 5))
    assert [plan.source(i) for i in range(6)] == [0, 0, 2, 2, 2, 5]


# similarity


def test_similarity_is_the_mean_cosine_between_evaluations():
    field, seen = Latents(), []
    network_condition = field.network.condition
    field.network.condition = lambda *a: seen.append(network_condition(*a)) or seen[-1]
    matrix = similarity(field, noise(), rho=0.75, **options())
    assert matrix.shape == (NFE, NFE)
    assert matrix.dtype == torch.float64
    assert len(seen) == NFE
    for i in range(NFE):
        for j in range(NFE):
            cosine = torch.nn.functional.cosine_similarity(seen[i].tokens, seen[j].tokens, dim=-1).mean()
            assert float(matrix[i, j]) == pytest.approx(float(cosine), abs=1e-5)
    assert matrix.diagonal().allclose(torch.ones(NFE, dtype=torch.float64), atol=1e-5)
    assert float(matrix.min()) < 0.9  # this field's tokens do change


def test_similarity_under_guidance_compares_the_branch_of_the_labels():
    field = Latents()
    plain = similarity(field, noise(), **options())
    guided = similarity(field, noise(), guidance=ClassifierFree(1.0 + 1e-7), **options())
    assert torch.allclose(plain, guided, atol=1e-4)
    alone = similarity(field, noise(), nfe=NFE)  # without labels the null branch is the only one
    assert not torch.allclose(plain, alone, atol=1e-4)


# runs


@pytest.mark.parametrize("guidance", [None, CFG, IG, (IG, CFG)], ids=["none", "cfg", "ig", "both"])
@pytest.mark.parametrize(("solver", "rho"), SOLVERS, ids=str)
def test_all_steps_computed_is_no_sharing_to_the_bit(solver, rho, guidance):
    field = Latents()
    bare = solve(field, noise(), **options(solver=solver, rho=rho, guidance=guidance))
    with shared(field, SharingPlan(NFE, tuple(range(NFE)))) as run:
        got = solve(run, noise(), **options(solver=solver, rho=rho, guidance=guidance))
    assert torch.equal(got.x, bare.x)
    assert (got.nfe, got.passes) == (bare.nfe, bare.passes)
    assert run.evaluations == NFE
    assert run.computed == bare.passes


@pytest.mark.parametrize("guidance", [None, CFG, IG, (IG, CFG)], ids=["none", "cfg", "ig", "both"])
@pytest.mark.parametrize(("solver", "rho"), SOLVERS, ids=str)
def test_counts_are_exact(solver, rho, guidance):
    """The backbone runs on the planned steps, once a branch; the head on all; Heun's evaluations count one by one."""
    field, branches = Latents(), 2 if guidance in (CFG, (IG, CFG)) else 1
    for steps in [(0,), (0, 2, 4), (0, 1, 5)]:
        x, backbones, heads = ran(field, steps, solver=solver, rho=rho, guidance=guidance)
        assert (backbones, heads) == (len(steps) * branches, NFE * branches)
        assert bool(x.isfinite().all())


def test_the_planned_evaluations_compute_and_no_others():
    field = Latents()
    _, *_ = ran(field, tuple(range(NFE)), guidance=CFG)
    times = [t for t, null in field.backbone if null]
    assert len(set(times)) == NFE
    ran(field, (0, 3, 4), guidance=CFG)
    for null in (True, False):
        assert [t for t, was in field.backbone if was == null] == [times[i] for i in (0, 3, 4)]


def test_a_shared_step_by_hand():
    """Two evaluations of Euler, the second with the first one's condition and its own x, t and level."""
    field, seen = Latents(), []
    plan = SharingPlan(2, (0,))
    with shared(field, plan) as run:
        got = sample(lambda x, t, c: seen.append((x, t)) or run(x, t, c), noise(), solver="euler", **options(nfe=2))
    (x, t), (later, after) = seen
    with torch.no_grad():  # as a sampler calls it: with a gradient a CPU computes in another order
        condition = field.condition(x, t, LABELS)
        assert torch.equal(got, field.head(later, after, LABELS, condition))  # the step into t = 0 is x0_hat
        assert not torch.allclose(got, field(later, after, LABELS), atol=1e-4)


def test_branches_keep_their_own_conditions():
    field = Latents()
    with shared(field, SharingPlan(2, (0,))) as run:
        x, t, y, s = noise(), torch.full((3,), 0.9).double(), noise() / 2, torch.full((3,), 0.5).double()
        first = run(x, t, None), run(x, t, LABELS)
        second = run(y, s, LABELS), run(y, s, None)
    assert torch.equal(first[0], field(x, t, None))
    assert torch.equal(first[1], field(x, t, LABELS))
    assert torch.equal(second[0], field.head(y, s, LABELS, field.condition(x, t, LABELS)))
    assert torch.equal(second[1], field.head(y, s, None, field.condition(x, t, None)))
    assert run.computed == 2


def test_an_old_pair_keeps_its_gap():
    """Internal guidance on a shared step pushes the fresh outer answer as far as where the condition was computed."""
    field = Latents()
    with shared(field, SharingPlan(2, (0,))) as run:
        x, t, y, s = noise(), torch.full((3,), 0.9).double(), noise() / 2, torch.full((3,), 0.5).double()
        outer, inner = run.pair(x, t, LABELS)
        later, within = run.pair(y, s, LABELS)
    assert [torch.equal(a, b) for a, b in zip((outer, inner), field.pair(x, t, LABELS), strict=True)] == [True, True]
    assert torch.equal(later, field.head(y, s, LABELS, field.condition(x, t, LABELS)))
    torch.testing.assert_close(later - within, outer - inner)
    assert (run.computed, run.evaluations) == (1, 2)


def test_a_pair_after_a_plain_call_knows_its_gap():
    """Guidance that sets in on a shared step finds what it needs."""
    field = Latents()
    with shared(field, SharingPlan(2, (0,))) as run:
        x, t, y, s = noise(), torch.full((3,), 0.9).double(), noise() / 2, torch.full((3,), 0.5).double()
        run(x, t, LABELS)
        later, within = run.pair(y, s, LABELS)
    outer, inner = field.pair(x, t, LABELS)
    torch.testing.assert_close(later - within, outer - inner)
    assert run.computed == 1


def test_a_branch_that_sets_in_late_computes_once_and_is_then_on_the_plan():
    """Guided on evaluations 2 to 5 by the plan 0, 4: null is computed at 2, where it begins, and at 4 with labels."""
    field, times = Latents(), []
    bare = sample(lambda x, t, c: times.append(float(t[0])) or field(x, t, c), noise(), **options())
    assert bool(bare.isfinite().all())
    rule = ClassifierFree(1.5, interval=Interval(0, (times[1] + times[2]) / 2, "t"))
    _, backbones, heads = ran(field, (0, 4), guidance=rule)
    assert field.backbone == [(times[0], False), (times[2], True), (times[4], True), (times[4], False)]
    assert (backbones, heads) == (4, 6 + 4)


def test_runs_do_not_remember_each_other():
    field = Latents()
    first = ran(field, (0, 2), rho=0.75)[0]
    ran(field, (0, 2), rho=0.75, condition=torch.tensor([3, 3, 3]))
    assert torch.equal(ran(field, (0, 2), rho=0.75)[0], first)


def test_more_steps_computed_is_nearer_to_no_sharing():
    field = Latents(kind="x0")
    bare = sample(field, noise(), **options())
    off = [min(float((ran(field, s)[0] - bare).norm()) for s in every(k)) for k in (1, 3, 6)]
    assert off[0] > off[1] > off[2] == 0


# errors


def test_another_nfe_is_an_error():
    field = Latents()
    with pytest.raises(ValueError, match=r"nfe=6.*more evaluations"), shared(field, SharingPlan(6, (0,))) as run:
        sample(run, noise(), **options(nfe=7))
    with pytest.raises(ValueError, match=r"nfe=6.*made 5"), shared(field, SharingPlan(6, (0,))) as run:
        sample(run, noise(), **options(nfe=5))
    used = SharedRun(field, SharingPlan(6, (0,)))
    sample(used, noise(), **options())
    with pytest.raises(ValueError, match="new run for every batch"):
        sample(used, noise(), **options())
    with pytest.raises(ValueError, match="fixed steps"), shared(field, SharingPlan(6, (0,))) as run:
        sample(run, noise(), solver="dopri5")


def test_an_error_inside_is_not_hidden_by_the_count():
    with pytest.raises(KeyError), shared(Latents(), SharingPlan(6, (0,))):
        raise KeyError


def test_another_batch_or_other_labels_in_a_run_are_errors():
    field, t = Latents(), torch.full((3,), 0.5).double()
    for x, labels in ((noise(), LABELS + 1), (noise(2), LABELS[:2])):
        run = SharedRun(field, SharingPlan(6, (0, 1)))
        run(noise(), t, LABELS)
        with pytest.raises(ValueError, match="changed inside a run"):
            run(x, t[: len(x)], labels)
    run(noise(), t, LABELS.clone())  # equal labels are the same labels


def test_the_checks_of_a_trained_field_still_hold():
    with pytest.raises(ValueError, match="labels outside 0 to 3"):
        sample(SharedRun(Latents(), SharingPlan(6, (0,))), noise(), **options(condition=LABELS + 1))
    with pytest.raises(ValueError, match="was trained on"):
        sample(SharedRun(Latents(), SharingPlan(6, (0,))), noise(), schedule=MeanVelocity(2.5), **options())
