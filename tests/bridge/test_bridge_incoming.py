"""Exact models of other paths through the bridge: the native oracle's field, its samples, the law of the data."""

import itertools

import pytest
import torch
from closed_form import MEANS, SHAPE, STD, STDS, WEIGHTS, Ddpm, betas, denoise, denoiser, errors, start, velocity

from mvm.bridge import BetaTable, from_edm, from_flow, from_model
from mvm.oracle import mixture
from mvm.path import MEAN_VELOCITY, LinearFlow, VariancePreserving
from mvm.solver import adams, sample

NFE = 52


def table(name="linear"):
    return BetaTable.from_betas(betas(name))


def from_ddpm(name="linear", kind="eps", **options):
    return from_model(Ddpm(name, kind), table(name), kind, **options)


MODELS = {
    "flow": lambda **o: from_flow(velocity, **o),
    "flow, data at 1": lambda **o: from_flow(lambda x, t: -velocity(x, 1 - t), data_at=1, **o),
    "flow, data at 1, to noise": lambda **o: from_flow(
        lambda x, t: velocity(x, 1 - t), data_at=1, velocity_to="noise", **o
    ),
    "flow, of 1000": lambda **o: from_flow(lambda x, t: velocity(x, t / 1000), time_scale=1000, **o),
    "edm": lambda **o: from_edm(denoiser, **o),
    "ddpm eps": lambda **o: from_ddpm(**o),
    "ddpm x0": lambda **o: from_ddpm(kind="x0", **o),
    "ddpm v": lambda **o: from_ddpm(kind="diffusion_v", **o),
    "cosine eps": lambda **o: from_ddpm("squaredcos_cap_v2", **o),
}


def native(x, t, condition=None):
    """The MVM oracle of one element, on all of them."""
    means, stds, weights = (torch.tensor(values, dtype=torch.float64) for values in (MEANS, STDS, WEIGHTS))
    law = mixture(means[:, None], stds, weights)
    return law.denoise(x.reshape(-1, 1), t.repeat_interleave(x[0].numel()), MEAN_VELOCITY).reshape(x.shape)


@pytest.mark.parametrize("name", MODELS)
def test_the_field_is_the_native_oracle(name):
    """Wherever each model knows the level: sigma/alpha in 0.01 to 157 of DDPM's, 0.002 to 80 of EDM's."""
    t = torch.tensor([2e-4, 1e-3, 0.03, 0.2, 0.5, 0.8, 0.95, 0.985], dtype=torch.float64)
    x = torch.randn(len(t), *SHAPE, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    torch.testing.assert_close(MODELS[name]()(x, t), native(x, t), rtol=0, atol=1e-10)


@pytest.mark.parametrize("rho", [0.0, 1.0])
@pytest.mark.parametrize("name", ["flow", "flow, data at 1", "edm", "ddpm eps", "ddpm v"])
def test_moments_within_a_percent(name, rho):
    seeds, x = start()
    mean, std = errors(sample(MODELS[name](), x, nfe=NFE, rho=rho, seeds=seeds))
    assert mean < 0.01
    assert std < 0.01


@pytest.mark.parametrize("rho", [0.0, 1.0])
@pytest.mark.parametrize("name", ["flow", "edm", "ddpm eps"])
def test_samples_are_those_of_the_native_oracle(name, rho):
    """The same noise gives the same samples; EDM and DDPM but for the levels that they do not know."""
    seeds, x = start()
    how = {"nfe": 13, "rho": rho, "seeds": seeds[:200]}
    got, want = (sample(field, x[:200], **how) for field in (MODELS[name](), native))
    close = {"flow": 1e-6, "edm": 5e-3, "ddpm eps": 2e-2}[name]
    torch.testing.assert_close(got, want, rtol=0, atol=close)


def test_samples_are_those_of_its_own_sampler():
    """The flow of the straight path by its own Heun steps, from the same noise."""
    _, noise = start()
    x, times = noise[:500], torch.linspace(1, 1e-3, 800, dtype=torch.float64)
    for s, t in itertools.pairwise(times):
        slope = velocity(x, s.expand(500))
        x = x + (t - s) / 2 * (slope + velocity(x + (t - s) * slope, t.expand(500)))
    x = x - times[-1] * velocity(x, times[-1].expand(500))
    torch.testing.assert_close(sample(MODELS["flow"](), noise[:500], nfe=NFE), x, rtol=0, atol=5e-3)


@pytest.mark.parametrize("name", ["edm", "ddpm eps"])
@pytest.mark.parametrize("rho", [0.0, 1.0])
def test_on_its_own_path(name, rho):
    """A VE path starts at sigma_max eps."""
    field = MODELS[name](path="own")
    seeds, x = start()
    x = x * float(field.schedule.sigma(field.schedule.end))
    mean, std = errors(sample(field, x, schedule=field.schedule, nfe=NFE, rho=rho, seeds=seeds))
    assert mean < 0.015
    assert std < 0.01


def test_own_path_is_taken_and_no_other():
    field, (_, x) = MODELS["ddpm eps"](path="own"), start()
    assert torch.equal(sample(field, x[:4], nfe=3), sample(field, x[:4], schedule=field.schedule, nfe=3))
    with pytest.raises(ValueError, match=r"trained on BetaTable\(1000 steps"):
        sample(field, x, schedule=MEAN_VELOCITY)


def test_a_coarse_table_ends_at_its_own_end_with_sa():
    """Below its first level (sigma 0.029) a model smooths what is smooth already; sa stops above. From t = 1 on
    MVM's path the mean has no bias, though the table ends with a signal that noise lacks."""
    _, x = start()
    field = from_ddpm("scaled_linear")
    adams, sa = (errors(sample(field, x, nfe=NFE, solver=solver)) for solver in ("adams", "sa"))
    assert sa[1] < adams[1] / 2
    own = from_ddpm("scaled_linear", path="own")
    assert errors(sample(own, x, schedule=own.schedule, nfe=NFE))[0] > 5 * adams[0]


@pytest.mark.parametrize("rho", [0.0, 1.0])
@pytest.mark.parametrize("name", ["scaled_linear", "linear", "squaredcos_cap_v2"])
def test_its_solver_asks_nothing_cleaner_than_it_knows(name, rho):
    """The law is right for a coarse table, too; the last evaluation, and no other, is of training step 0."""
    network = Ddpm(name)
    field = from_model(network, table(name), "eps")
    seeds, x = start()
    assert max(errors(sample(field, x, nfe=NFE, rho=rho, seeds=seeds, solver=field.solver))) < 0.004
    assert len(network.told) == NFE
    assert network.told[-1] == pytest.approx(0, abs=1e-6)
    assert all(step > 1e-3 for step in network.told[:-1])


def test_its_solver_leaves_no_noise_in_sharp_data():
    """Where the data are points, x0_hat of the cleanest level is one of them."""

    told = []

    def points(x, sigma):
        told.append(float(sigma[0]))
        return torch.where(x > 0.5, 1.0, 0.0).to(x)

    _, x = start()
    field = from_edm(points, sigma_min=0.03)
    found = sample(field, x, nfe=8, rho=1.0, solver=field.solver)
    assert float((found - found.round()).abs().max()) < 1e-6
    assert told[0] == 80
    assert told[-1] == pytest.approx(0.03, abs=1e-9)


def test_its_solver_without_a_cleanest_level_is_the_default():
    field = MODELS["flow"]()
    assert field.solver == adams()
    assert from_ddpm().solver.times(1) == (1.0, 0.0)
    assert from_ddpm(path="own").solver == from_ddpm().solver


def test_beyond_the_known_levels():
    network = Ddpm("linear")
    field = from_model(network, table(), "eps")
    x = torch.randn(1, *SHAPE, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    bar = torch.cumprod(1 - betas("linear"), 0)
    for t, step in ((0.0, 0), (1e-6, 0), (1.0, 999), (0.9999, 999)):
        time = torch.tensor([t], dtype=torch.float64)
        got = field(x, time)
        alpha, sigma = bar[step].sqrt().reshape(1, 1), (1 - bar[step]).sqrt().reshape(1, 1)
        seen = x / float(MEAN_VELOCITY.norm(t))  # this path's norm is 1
        torch.testing.assert_close(got, denoise(seen, alpha, sigma), rtol=0, atol=1e-9)
        assert network.told[-1] == pytest.approx(step, abs=1e-9)
    edge = float(MEAN_VELOCITY.t_from_lam(table().lam(1.0)))
    below, above = (field(x, torch.tensor([edge + d], dtype=torch.float64)) for d in (-1e-9, 1e-9))
    torch.testing.assert_close(below, above, rtol=0, atol=1e-6)  # no jump where it begins


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_eps_of_almost_no_signal_is_not_asked(dtype):
    """The cosine table ends at alpha = 5e-5, where float32 noise would become an x0 of 1e-3 and a network's of 1e2."""
    network = Ddpm("squaredcos_cap_v2")
    _, x = start(dtype)
    found = sample(from_model(network, table("squaredcos_cap_v2"), "eps"), x, nfe=NFE)
    assert max(errors(found)) < 0.01
    assert max(network.told) < 997.5


def test_whole_timesteps():
    network = Ddpm("linear")
    rounded = from_model(network, table(), "eps", timestep=lambda t: table().timestep(t).round())
    _, x = start()
    assert max(errors(sample(rounded, x, nfe=NFE))) < 0.01
    assert all(step == round(step) for step in network.told)


def test_labels_reach_the_network():
    seen = []

    def network(x, t, labels):
        seen.append(labels)
        return x

    x, t = torch.zeros(2, 3), torch.full((2,), 0.5, dtype=torch.float64)
    labels = torch.tensor([4, 1])
    from_edm(network, num_classes=5)(x, t, labels)
    from_edm(network, num_classes=5)(x, t)
    from_edm(network, num_classes=5, null_label=5)(x, t)
    assert seen[0] is labels
    assert seen[1] is None
    assert seen[2].tolist() == [5, 5]
    with pytest.raises(ValueError, match="0 to 4"):
        sample(from_edm(network, num_classes=5), x, condition=torch.tensor([0, 5]))


def test_half_precision_networks_keep_the_state():
    field = from_flow(lambda x, t: velocity(x.double(), t).half())
    _, x = start(torch.float32)
    found = sample(field, x, nfe=NFE)
    assert found.dtype == torch.float32
    assert abs(float(found.std()) / STD - 1) < 0.01


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: from_flow(velocity, data_at=2), "data_at=2"),
        (lambda: from_flow(velocity, velocity_to="dta"), "did you mean 'data'"),
        (lambda: from_flow(velocity, time_scale=0), "time_scale=0"),
        (lambda: from_flow(velocity, path="mine"), "path='mine'"),
        (lambda: from_edm(denoiser, sigma_min=2, sigma_max=1), "sigma_min=2"),
        (lambda: from_edm(denoiser, null_label=3), "null_label=3"),
        (lambda: from_edm(denoiser, num_classes=-1), "num_classes=-1"),
        (lambda: from_model(velocity, LinearFlow(), "v"), "kind='v'"),
        (lambda: from_model(velocity, LinearFlow(), "epsilon"), "did you mean 'eps'"),
        (lambda: from_model(velocity, "linear", "eps"), "schedule='linear'"),
        (lambda: from_model(velocity, VariancePreserving(), "eps", first=1.0), "first=1.0"),
        (lambda: from_flow(lambda x, t: x[:, :1])(torch.zeros(2, 3), torch.ones(2).double()), r"shape \(2, 1\)"),
    ],
)
def test_bad_arguments_are_named(make, named):
    with pytest.raises(ValueError, match=named):
        make()
