"""MVM's exact field in the loops of others: the right law at the end, and the same field when it comes back."""

import itertools

import pytest
import torch

import mvm
from mvm import noise
from mvm.bridge import BetaTable, as_denoiser, as_eps, as_flow, as_v, from_edm, from_flow, from_model
from mvm.oracle import gaussian
from mvm.path import MEAN_VELOCITY, LinearFlow, MeanVelocity

diffusers = pytest.importorskip("diffusers")

MEAN, STD = 0.8, 0.5
LAW = gaussian(MEAN, STD, (8,))
FIELD = LAW.field(MEAN_VELOCITY)


def start():
    x = noise.initial(torch.arange(2000), (8,), torch.float64)
    return (x - x.mean()) / x.std()


def check(x, close=0.01):
    assert float(x.mean()) == pytest.approx(MEAN, rel=close)
    assert float(x.std()) == pytest.approx(STD, rel=close)


def stepped(scheduler, model, x, steps):
    """diffusers' own loop."""
    scheduler.set_timesteps(steps)
    x = x * scheduler.init_noise_sigma if scheduler.init_noise_sigma != 1 else x
    for t in scheduler.timesteps:
        x = scheduler.step(model(scheduler.scale_model_input(x, t), t), t, x).prev_sample
    return x


@pytest.mark.parametrize(("prediction", "outgoing"), [("epsilon", as_eps), ("v_prediction", as_v)])
@pytest.mark.parametrize(
    ("name", "steps"), [("DDIMScheduler", 500), ("DPMSolverMultistepScheduler", 50), ("EulerDiscreteScheduler", 500)]
)
def test_in_a_loop_of_diffusers(name, steps, prediction, outgoing):
    """DDIM and Euler are of first order and need many steps."""
    options = {"prediction_type": prediction}
    if name == "DDIMScheduler":
        options |= {"clip_sample": False, "timestep_spacing": "trailing"}
    scheduler = getattr(diffusers, name)(**options)
    check(stepped(scheduler, outgoing(FIELD, scheduler), start(), steps))


def test_in_the_flow_loop_of_diffusers():
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler()
    scheduler.set_timesteps(200)
    x, model = start(), as_flow(FIELD, time_scale=1000)
    for t in scheduler.timesteps:
        x = scheduler.step(model(x, t), t, x).prev_sample
    check(x)


def test_in_a_heun_loop_of_k_diffusion():
    ramp = torch.linspace(0, 1, 40, dtype=torch.float64)
    sigmas = torch.cat([(80 ** (1 / 7) + ramp * (0.002 ** (1 / 7) - 80 ** (1 / 7))) ** 7, torch.zeros(1).double()])
    denoise, x = as_denoiser(FIELD), start() * 80
    for sigma, following in itertools.pairwise(sigmas):
        slope = (x - denoise(x, sigma)) / sigma
        ahead = x + (following - sigma) * slope
        if following > 0:
            slope = (slope + (ahead - denoise(ahead, following)) / following) / 2
            ahead = x + (following - sigma) * slope
        x = ahead
    check(x)


TABLE = BetaTable.from_betas(torch.linspace(1e-4, 0.02, 1000, dtype=torch.float64))
ROUND_TRIPS = {
    "eps": lambda field: from_model(as_eps(field, TABLE), TABLE, "eps"),
    "v": lambda field: from_model(as_v(field, TABLE), TABLE, "diffusion_v"),
    "eps on a path in continuous time": lambda field: from_model(as_eps(field, LinearFlow()), LinearFlow(), "eps"),
    "flow": lambda field: from_flow(as_flow(field)),
    "flow, data at 1": lambda field: from_flow(as_flow(field, data_at=1, time_scale=9), data_at=1, time_scale=9),
    "flow, to data": lambda field: from_flow(as_flow(field, velocity_to="data"), velocity_to="data"),
    "denoiser": lambda field: from_edm(as_denoiser(field)),
}


@pytest.mark.parametrize("name", ROUND_TRIPS)
def test_out_and_in_again_is_the_same_field(name):
    t = torch.tensor([1e-3, 0.1, 0.5, 0.9, 0.98], dtype=torch.float64)
    x = start()[:5]
    torch.testing.assert_close(ROUND_TRIPS[name](FIELD)(x, t), FIELD(x, t), rtol=0, atol=1e-10)


def test_another_path_of_the_field_is_said_or_known():
    x, t = start()[:3], torch.tensor(300.0)
    want = as_eps(FIELD, TABLE)(x, t)
    other = MeanVelocity(2.5)
    torch.testing.assert_close(as_eps(LAW.field(other), TABLE, schedule=other)(x, t), want, rtol=0, atol=1e-10)
    bridged = from_edm(as_denoiser(FIELD), path="own")  # a field that knows its path
    torch.testing.assert_close(as_eps(bridged, TABLE)(x, t), want, rtol=0, atol=1e-10)


def test_a_trained_model_with_labels():
    model = mvm.load("digits")
    denoise = as_denoiser(model)
    x, labels = torch.randn(2, *model.sample_shape), torch.tensor([3, 7])
    first = denoise(x, torch.tensor([0.5, 2.0]), labels)
    assert first.shape == x.shape
    assert first.dtype == x.dtype
    assert not torch.equal(first, denoise(x, torch.tensor([0.5, 2.0])))


@pytest.mark.parametrize(
    ("outgoing", "time"),
    [
        (as_flow(FIELD), 1000.0),  # forgotten: time_scale=1000
        (as_flow(FIELD, data_at=1), -0.1),
        (as_eps(FIELD, TABLE), 1000),
        (as_v(FIELD, TABLE), -2),
        (as_denoiser(FIELD), -1.0),
        (as_denoiser(FIELD), float("nan")),
    ],
)
def test_times_beyond_the_path_are_refused(outgoing, time):
    with pytest.raises(ValueError, match=r"time=.* lies outside of the path"):
        outgoing(start()[:2], time)


def test_times_at_the_ends():
    x = start()[:2]
    assert bool(torch.isfinite(as_flow(FIELD)(x, torch.tensor(1 + 1e-7))).all())  # rounded in float32
    assert bool(torch.isfinite(as_denoiser(FIELD)(x * 1e4, 1e4)).all())  # any sigma
    torch.testing.assert_close(as_denoiser(FIELD)(x, 0.0), x, rtol=0, atol=1e-12)
    torch.testing.assert_close(as_eps(FIELD, TABLE)(x, torch.tensor([500])), as_eps(FIELD, TABLE)(x, 500.0))
    with pytest.raises(ValueError, match="time has 3 entries for a batch of 2"):
        as_flow(FIELD)(x, torch.tensor([0.1, 0.2, 0.3]))


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: as_eps(FIELD, diffusers.FlowMatchEulerDiscreteScheduler()), "scheduler=FlowMatchEulerDiscrete"),
        (lambda: as_v(FIELD, None), "scheduler=NoneType"),
        (lambda: as_flow(FIELD, data_at=3), "data_at=3"),
        (lambda: as_flow(FIELD, velocity_to="noisy"), "velocity_to='noisy'"),
        (lambda: as_flow(FIELD, time_scale=-1), "time_scale=-1"),
    ],
)
def test_bad_arguments_are_named(make, named):
    with pytest.raises(ValueError, match=named):
        make()


def test_a_field_of_text_goes_out_with_its_condition():
    """x0_hat is the mean of the tokens that are there, whatever x: so is the denoiser's answer."""
    text = {"tokens": torch.randn(3, 4, 2), "mask": torch.tensor([[True, True, False, False]])}

    def mean(x, t, condition):
        return (condition["tokens"] * condition["mask"][..., None]).sum(1) / condition["mask"].sum(1, keepdim=True)

    denoiser, x = as_denoiser(mvm.wrap(mean, kind="x0")), torch.randn(3, 2)
    assert torch.allclose(denoiser(x, 2.0, text), text["tokens"][:, :2].mean(1))
    with pytest.raises(ValueError, match=r"condition\['tokens'\] of shape \(2, 4, 2\) has 2 rows for a batch of 3"):
        denoiser(x, 2.0, {**text, "tokens": text["tokens"][:2]})
