"""What users and reviewers tripped over: each line here was once a silent wrong answer or a traceback."""

import pytest
import torch

import mvm
from mvm import noise, oracle
from mvm.path import LinearFlow, MeanVelocity
from mvm.solver import SOLVERS, Adaptive, ClassifierFree, Internal, adams_power, sample, solve, solver_named

FIELD = oracle.gaussian(0.3, 0.5, (2,)).field(MeanVelocity())
NOISE = noise.initial(torch.arange(4), (2,))


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"seeds": 5}, "seeds=5"),
        ({"seeds": torch.tensor(5)}, "seeds"),
        ({"seeds": [1.5, 2, 3, 4]}, "seeds must be whole"),
        ({"guidance": 1.5}, "guidance=1.5"),
        ({"guidance": [1.5]}, "not a rule"),
        ({"guidance": [ClassifierFree(2.0), Internal(1.4)]}, "Internal must stand first"),
        ({"solver": 3}, "solver=3"),
        ({"rho": "1"}, "rho='1'"),
        ({"rho": float("inf")}, "rho=inf"),
        ({"condition": [0, 1, 2, 3]}, "condition must be"),
        ({"solver": "adaptive", "rho": 0.5}, "rho=0.5"),
    ],
)
def test_bad_arguments_are_named(options: dict, named: str) -> None:
    with pytest.raises(ValueError, match=named.replace(".", r"\.")):
        sample(FIELD, NOISE, **options)


def test_a_variable_of_power_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="q=0"):
        adams_power(q=0)


@pytest.mark.parametrize("solver", [name for name in SOLVERS if name != "dopri5"])
def test_a_sample_does_not_depend_on_its_batch(solver: str) -> None:
    """Also `adaptive`: each sample has its own steps."""
    model = mvm.load("digits")
    seeds, labels = torch.arange(7), torch.arange(7)
    rule = Adaptive(1e-3, 1e-3) if solver == "adaptive" else solver_named(solver)
    rho = float(rule.weak_order > 0)

    def make(rows: slice) -> torch.Tensor:
        x = noise.initial(seeds[rows], model.sample_shape)
        return sample(model, x, solver=rule, nfe=9, rho=rho, condition=labels[rows], seeds=seeds[rows])

    together = make(slice(7))
    for size in (1, 4):
        apart = torch.cat([make(slice(i, i + size)) for i in range(0, 7, size)])
        torch.testing.assert_close(apart, together, rtol=0, atol=1e-4)


def test_with_dopri5_a_sample_depends_on_its_batch() -> None:
    """One ODE, one error norm, one sequence of steps for all: that is how the literature counts."""
    model = mvm.load("digits")

    def make(rows: slice) -> torch.Tensor:
        x = noise.initial(torch.arange(7)[rows], model.sample_shape)
        return sample(model, x, solver=Adaptive(1e-3, 1e-3, joint=True), condition=torch.arange(7)[rows])

    together, apart = make(slice(7)), make(slice(1))
    assert not torch.equal(apart, together[:1])
    torch.testing.assert_close(apart, together[:1], rtol=0, atol=0.05)


def test_a_model_refuses_another_schedule_and_unknown_labels() -> None:
    model = mvm.load("digits")
    x = noise.initial(torch.arange(2), model.sample_shape)
    with pytest.raises(ValueError, match=r"schedule=LinearFlow\(\).*leave schedule out"):
        sample(model, x, schedule=LinearFlow())
    with pytest.raises(ValueError, match="0 to 9"):
        sample(model, x, condition=torch.tensor([3, 10]))


def test_the_passes_of_a_guiding_model_count() -> None:
    from mvm.solver import Auto

    weak = oracle.gaussian(0.0, 1.0, (2,)).field(MeanVelocity())
    assert solve(FIELD, NOISE, nfe=5, guidance=Auto(1.5, weak=weak)).passes == 10


def test_internal_guidance_needs_an_inner_head() -> None:
    model = mvm.load("digits")
    x = noise.initial(torch.arange(2), model.sample_shape)
    with pytest.raises(ValueError, match="inner_block"):
        sample(model, x, nfe=3, guidance=Internal(1.4))


def test_likelihood_refuses_another_schedule() -> None:
    from mvm import likelihood

    model = mvm.load("digits")
    images = torch.zeros(1, 1, 8, 8, dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"schedule=LinearFlow\(\).*leave schedule out"):
        likelihood.bits_per_dim(model, images, schedule=LinearFlow(), steps=2)
    with pytest.raises(ValueError, match=r"schedule=LinearFlow\(\).*leave schedule out"):
        likelihood.encode(model, torch.zeros(1, 1, 8, 8), schedule=LinearFlow(), nfe=2)
