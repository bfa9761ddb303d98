"""Editing against posteriors known exactly; what is refused; and the parts of a schedule that a start needs."""

import pytest
import torch

import mvm
from mvm import edit, noise, oracle
from mvm.bridge import VarianceExploding
from mvm.path import MEAN_VELOCITY, LinearFlow, MeanVelocity, VariancePreserving, full_time
from mvm.solver import SOLVERS, Auto, ClassifierFree, Internal, Interval, adams, guided_evaluations, sample
from mvm.verify.editing import dense, posterior

SCHEDULES = [MeanVelocity(), MeanVelocity(2.5), LinearFlow(), VariancePreserving(), VarianceExploding()]
STDS = torch.tensor([5.0, 2, 1, 0.5, 0.2, 0.1], dtype=torch.float64)
TURN = torch.linalg.qr(noise.normal(torch.arange(6), 0, (6,), torch.float64))[0]
MASK = torch.tensor([1, 0, 1, 0, 0, 1])
LAW = oracle.mixture(torch.tensor([[-1.0, 0.4], [0.8, -0.5], [0.2, 1.0]]), torch.tensor([0.3, 0.2, 0.4]))


def turned(schedule):
    """The exact field of N(0, TURN diag(STDS^2) TURN^T)."""
    field = oracle.spectrum(STDS).field(schedule)
    return lambda x, t, condition=None: field(x @ TURN, t) @ TURN.T


def images(count=3, side=8, channels=1):
    return noise.normal(torch.arange(count), noise.DATA, (channels, side, side)).tanh()


# --- the posterior as a field -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("std", [0.0, 0.3])
@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_the_field_of_a_gaussians_posterior_is_exact(schedule, std):
    operator = torch.tensor([[1.0, 1, 0, 0, 0, 0], [0, 0, 1, 0, 2, 0], [0, 1, 0, 0, 0, 1]], dtype=torch.float64)
    covariance, y = TURN @ torch.diag(STDS**2) @ TURN.T, torch.tensor([[1.0, -2.0, 0.5]], dtype=torch.float64)
    conditioned = edit.Conditioned(
        turned(schedule), y, lambda x: x @ operator.T, noise=std, iterations=6, schedule=schedule
    )
    for t in (0.1, 0.5, 0.9):
        t = t * schedule.end
        alpha, sigma = float(schedule.alpha(t)), float(schedule.sigma(t))
        x = noise.normal(torch.arange(5), 1, (6,), torch.float64) * sigma
        # x_t and y are measurements of x0 with independent errors
        both = torch.cat((alpha * torch.eye(6), operator)).double()
        error = torch.diag(torch.tensor([sigma**2] * 6 + [std**2] * 3, dtype=torch.float64))
        gain = covariance @ both.T @ torch.linalg.inv(both @ covariance @ both.T + error)
        wanted = torch.cat((x, y.expand(5, 3)), 1) @ gain.T
        torch.testing.assert_close(conditioned(x, full_time(x, t)), wanted, rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize("name", ["adams", "heun", "euler-maruyama", "dpm++2m"])
def test_any_solver_samples_a_gaussians_posterior(name):
    covariance, known = TURN @ torch.diag(STDS**2) @ TURN.T, torch.eye(6, dtype=torch.float64)[MASK == 0]
    y = torch.tensor([[0.0, 1.0, 0.0, -1.0, 0.5, 0.0]], dtype=torch.float64)
    gain = covariance @ known.T @ torch.linalg.inv(known @ covariance @ known.T)
    mean, wanted = gain @ y[0, MASK == 0], covariance - gain @ known @ covariance
    x = edit.inpaint(
        turned(MEAN_VELOCITY), y.expand(2000, 6), MASK, solver=name, nfe=60, rho=0.0, seeds=range(2000), iterations=6
    )
    assert torch.equal(x[:, MASK == 0], y[:, MASK == 0].expand(2000, 3))
    assert (x.mean(0) - mean).norm() < 0.1 * wanted.trace().sqrt()
    assert (torch.cov(x.T) - wanted).norm() < 0.12 * wanted.norm()


def test_particles_reach_a_mixtures_posterior_where_the_field_alone_does_not():
    operator, std = (lambda x: x[:, 1:]), 0.3
    y = torch.tensor([[-0.3]], dtype=torch.float64)
    mean, covariance, *_ = posterior(LAW, dense(operator, (2,)), y[0], std)
    options = {"shape": (2,), "noise": std, "nfe": 40}

    def errors(particles, count=1500):
        x = edit.restore(
            LAW.field(MEAN_VELOCITY), y.expand(count, 1), operator, particles=particles, seeds=range(count), **options
        )
        return float((x.mean(0) - mean).norm()), float((torch.cov(x.T) - covariance).norm() / covariance.norm())

    few, many = errors(1), errors(16)
    assert few[0] > 0.1
    assert many[0] < 0.05
    assert many[1] < 0.1


@pytest.mark.parametrize("particles", [1, 4])
def test_a_sample_depends_on_its_seed_alone(particles):
    y = torch.tensor([[0.3], [-0.5], [0.1]], dtype=torch.float64)
    field, options = LAW.field(MEAN_VELOCITY), {"shape": (2,), "particles": particles, "nfe": 8}
    together = edit.restore(field, y, lambda x: x[:, :1], seeds=[7, 8, 9], **options)
    alone = edit.restore(field, y[1:2], lambda x: x[:, :1], seeds=[8], **options)
    torch.testing.assert_close(together[1:2], alone, rtol=0, atol=1e-12)
    assert not torch.equal(together, edit.restore(field, y, lambda x: x[:, :1], seeds=[1, 2, 3], **options))


def test_particles_keep_masks_and_conditions_of_their_own_sample():
    labelled = oracle.mixture(LAW.means, LAW.stds, labels=torch.tensor([0, 1, 1]))
    x0, masks = torch.tensor([[-1.0, 0.4], [0.5, 0.0]], dtype=torch.float64), torch.tensor([[1, 0], [0, 1]])
    labels = torch.tensor([0, 1])
    options = {"particles": 3, "nfe": 10, "guidance": ClassifierFree(1.5)}
    x = edit.inpaint(labelled.field(MEAN_VELOCITY), x0, masks, condition=labels, seeds=[0, 1], **options)
    assert torch.equal(x[masks == 0], x0[masks == 0])
    alone = edit.inpaint(labelled.field(MEAN_VELOCITY), x0[1:], masks[1:], condition=labels[1:], seeds=[1], **options)
    torch.testing.assert_close(x[1:], alone, rtol=0, atol=1e-12)


def test_cost_counts_particles_and_products():
    y = torch.zeros(2, 1)
    labelled = oracle.mixture(LAW.means, LAW.stds, labels=torch.tensor([0, 1, 1]))
    for particles, guidance, passes in ((1, None, 1), (3, None, 3), (3, ClassifierFree(2.0), 6)):
        found = edit.solve(
            labelled.field(MEAN_VELOCITY),
            y,
            lambda x: x[:, :1],
            shape=(2,),
            nfe=5,
            iterations=2,
            particles=particles,
            guidance=guidance,
            condition=torch.tensor([0, 1]),
            seeds=[0, 1],
        )
        assert (found.nfe, found.passes, found.products) == (5, 5 * passes, 5 * passes * 2)
        assert found.x.dtype == torch.float32


def test_guidance_acts_between_posteriors():
    labelled = oracle.mixture(LAW.means, LAW.stds, labels=torch.tensor([0, 1, 1])).field(MEAN_VELOCITY)
    y, first, labels = torch.tensor([[0.3]], dtype=torch.float64), (lambda x: x[:, :1]), torch.tensor([0, 1])
    x = torch.tensor([[0.2, 0.1], [-0.4, 0.3]], dtype=torch.float64)
    t = full_time(x, 0.4)

    class Inner:
        def __call__(self, x, t, condition):
            return labelled(x, t, condition)

        def pair(self, x, t, condition):
            return labelled(x, t, condition), labelled(x, t)

    posteriors = edit.Conditioned(labelled, y, first)
    weak, strong = posteriors(x, t), posteriors(x, t, labels)
    wanted = weak + 3 * (strong - weak)
    rules = {"cfg": (labelled, ClassifierFree(3.0)), "internal": (Inner(), Internal(3.0))}
    rules["auto"] = labelled, Auto(3.0, weak=lambda x, t, condition: labelled(x, t))
    for name, (field, rule) in rules.items():
        guided = edit.Conditioned(field, y, first, guidance=rule)
        torch.testing.assert_close(guided(x, t, labels), wanted, msg=name)
        assert guided.passes == (1 if name == "internal" else 2)


def test_projection_needs_no_gradient_and_agrees_with_the_measurements():
    field = LAW.field(MEAN_VELOCITY)

    @torch.no_grad()
    def blind(x, t, condition=None):
        return field(x, t)

    y = torch.tensor([[0.3], [-0.5]], dtype=torch.float64)
    with pytest.raises(ValueError, match="method='projection'"):
        edit.restore(blind, y, lambda x: x[:, :1], shape=(2,), nfe=4)
    found = edit.solve(blind, y, lambda x: x[:, :1], shape=(2,), nfe=4, method="projection", seeds=[0, 1])
    torch.testing.assert_close(found.x[:, :1], y)
    assert (found.passes, found.products) == (4, 0)


# --- operators --------------------------------------------------------------------------------------------------------


def test_pooling_is_the_mean_over_blocks_of_any_number_of_axes():
    for shape in ((2, 3, 6), (2, 3, 6, 4), (2, 1, 4, 4, 2)):
        x = torch.arange(float(torch.tensor(shape).prod())).reshape(shape)
        pools = {
            3: torch.nn.functional.avg_pool1d,
            4: torch.nn.functional.avg_pool2d,
            5: torch.nn.functional.avg_pool3d,
        }
        torch.testing.assert_close(edit.pooled(2)(x), pools[x.ndim](x, 2))


def test_blur_keeps_a_flat_image_and_is_what_scipy_makes():
    ndimage = pytest.importorskip("scipy.ndimage")
    kernel = edit.gaussian_kernel(0.7)
    flat = torch.full((1, 3, 8, 8), 0.4)
    torch.testing.assert_close(edit.blurred(kernel)(flat), flat)
    x = images(2, 9, 3)
    found = edit.blurred(kernel)(x)
    wanted = ndimage.correlate(x[1, 2].numpy(), kernel.numpy(), mode="nearest")
    torch.testing.assert_close(found[1, 2], torch.from_numpy(wanted).float(), rtol=1e-5, atol=1e-6)


def test_upscaled_samples_have_the_given_means(digits):
    small = edit.pooled(2)(images())
    x = edit.upscale(digits, small, 2, nfe=4, condition=torch.arange(3), seeds=[0, 1, 2])
    assert x.shape == (3, 1, 8, 8)
    torch.testing.assert_close(edit.pooled(2)(x), small, rtol=0, atol=1e-5)


def test_outpainting_keeps_the_middle(digits):
    x = edit.outpaint(digits, images(2, 4), 2, nfe=4, condition=torch.tensor([1, 2]), seeds=[0, 1])
    torch.testing.assert_close(x[:, :, 2:6, 2:6], images(2, 4), rtol=0, atol=1e-6)
    assert (x[:, :, 0] != 0).any()


def test_deblurring_a_gaussian_is_the_wiener_filter():
    """Of smooth Gaussian signals: the mean of samples comes to the posterior's mean."""
    size = 16
    at = torch.arange(size, dtype=torch.float64)
    covariance = torch.exp(-0.5 * ((at[:, None] - at) / 2) ** 2) + 1e-4 * torch.eye(size)
    values, vectors = torch.linalg.eigh(covariance)
    exact = oracle.spectrum(values.sqrt()).field(MEAN_VELOCITY)

    def field(x, t, condition=None):
        return (exact(x.flatten(1) @ vectors, t) @ vectors.T).reshape(x.shape)

    kernel = edit.gaussian_kernel(1.0, 1)
    a = dense(edit.blurred(kernel), (1, size))
    y = (a @ (vectors @ (values.sqrt() * noise.normal(torch.tensor([5]), 0, (size,), torch.float64)[0]))).reshape(
        1, 1, -1
    )
    wanted = covariance @ a.T @ torch.linalg.inv(a @ covariance @ a.T + 0.1**2 * torch.eye(size)) @ y.flatten()
    x = edit.deblur(field, y.expand(400, 1, size), kernel, noise=0.1, nfe=30, iterations=12, seeds=range(400))
    assert (x.mean(0).flatten() - wanted).abs().max() < 0.05


# --- image to image ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_inversion_and_back_gives_the_image(schedule):
    x0 = LAW.sample(torch.arange(16))
    for strength in (0.2, 0.7):
        back = edit.image_to_image(
            LAW.field(schedule), x0, strength, inversion=True, schedule=schedule, nfe=60, seeds=range(16)
        )
        assert (back - x0).abs().max() < 2e-3


@pytest.mark.parametrize("rho", [0.0, 1.0])
@pytest.mark.parametrize("strength", [0.1, 0.6, 1.0])
def test_noise_and_back_keeps_the_law_of_the_data(strength, rho):
    x0 = LAW.sample(torch.arange(4000))
    x = edit.image_to_image(LAW.field(MEAN_VELOCITY), x0, strength, nfe=30, rho=rho, seeds=range(4000, 8000))
    assert (x.mean(0) - x0.mean(0)).abs().max() < 0.05
    assert (torch.cov(x.T) - torch.cov(x0.T)).norm() < 0.06 * torch.cov(x0.T).norm()


def test_strength_says_how_much_is_left(digits):
    x0, labels = images(4), torch.arange(4)
    moved = [
        float((edit.image_to_image(digits, x0, s, nfe=8, condition=labels, seeds=range(4)) - x0).abs().mean())
        for s in (1e-4, 0.1, 0.5, 1.0)
    ]
    assert moved == sorted(moved)
    assert moved[0] < 0.02
    whole = edit.image_to_image(digits, x0, 1.0, nfe=8, condition=labels, seeds=range(4))
    start = noise.initial(torch.arange(4), (1, 8, 8))
    torch.testing.assert_close(whole, sample(digits, start, nfe=8, condition=labels, solver=adams()))


# --- parts of a schedule ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in SOLVERS if name != "dopri5"])
def test_every_solver_starts_where_the_schedule_ends(name):
    law, seeds = oracle.gaussian(0.4, 0.6), torch.arange(32)
    for schedule in (MEAN_VELOCITY, LinearFlow()):
        t = 0.3
        x = law.sample_at(seeds, t, schedule)
        alpha, sigma = float(schedule.alpha(t)), float(schedule.sigma(t))
        wanted = 0.4 + 0.6 * (x - alpha * 0.4) / (alpha**2 * 0.36 + sigma**2) ** 0.5  # the flow keeps standard scores
        nfe = 400 if name.startswith("euler") else 60
        if name == "adaptive":
            pytest.importorskip("torchdiffeq")
        found = sample(law.field(schedule), x, schedule=schedule.until(t), solver=name, nfe=nfe, seeds=seeds)
        assert (found - wanted).abs().max() < 0.02, (name, schedule)


def test_a_model_takes_parts_of_its_own_schedule_alone(digits):
    part = digits.schedule.until(0.5)
    assert (part.whole, part.end, part.until(0.2).whole) == (digits.schedule, 0.5, digits.schedule)
    x = torch.zeros(1, 1, 8, 8)
    mvm.sample(digits, x, schedule=part, nfe=2, condition=torch.tensor([1]))
    with pytest.raises(ValueError, match="leave schedule out"):
        mvm.sample(digits, x, schedule=LinearFlow().until(0.5), nfe=2)
    for t in (0.0, 1.5, float("nan")):
        with pytest.raises(ValueError, match="out of range"):
            digits.schedule.until(t)


def test_intervals_mean_the_same_on_a_part():
    rule, times = ClassifierFree(2.0, interval=Interval(0.2, 0.4, "t")), (0.1, 0.3, 0.5)
    assert guided_evaluations(rule, times, MEAN_VELOCITY.until(0.6)) == guided_evaluations(rule, times, MEAN_VELOCITY)


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def digits():
    return mvm.load("digits")


Y, FIELD = torch.zeros(2, 1), LAW.field(MEAN_VELOCITY)


def no_gradient(x, t, condition=None):
    return FIELD(x.detach(), t, condition)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: edit.restore(FIELD, Y, lambda x: x[:, :1]), "shape is needed"),
        (lambda: edit.restore(FIELD, Y, lambda x: x, shape=(2,)), r"y has shape \(2, 1\).*\(B, 2\)"),
        (lambda: edit.restore(FIELD, Y, lambda x: x[:, :1] + 1, shape=(2,)), "must be linear"),
        (lambda: edit.restore(FIELD, Y / 0, lambda x: x[:, :1], shape=(2,)), "NaN or Inf"),
        (lambda: edit.restore(FIELD, Y, lambda x: x[:, :1], shape=(2,), noise=-1.0), "noise=-1.0"),
        (lambda: edit.restore(FIELD, Y, lambda x: x[:, :1], shape=(2,), method="dps"), "method='dps' is unknown"),
        (lambda: edit.restore(FIELD, Y, lambda x: x[:, :1], shape=(2,), particles=0), "particles=0"),
        (lambda: edit.restore(FIELD, Y, lambda x: x[:, :1], shape=(2,), particles=2, rho=0.0), "rho above"),
        (lambda: edit.restore(FIELD, Y, lambda x: x[:, :1], shape=(2,), particles=2, solver="sa"), "solver adams"),
        (lambda: edit.restore(FIELD, Y, lambda x: x[:, :1], shape=(2,), solver="adaptive"), "goes by tolerance"),
        (lambda: edit.restore(FIELD, Y, lambda x: x[:, :1], shape=(2,), iterations=0), "iterations=0"),
        (
            lambda: edit.restore(no_gradient, Y, lambda x: x[:, :1], shape=(2,)),
            "needs the field's gradient.*projection",
        ),
        (lambda: edit.inpaint(FIELD, torch.zeros(2, 2), torch.zeros(2)), "marks nothing"),
        (lambda: edit.inpaint(FIELD, torch.zeros(2, 2), torch.tensor([1.0, torch.nan])), "mask holds NaN; give 1"),
        (lambda: edit.inpaint(FIELD, torch.zeros(2, 2), torch.ones(3)), r"mask has shape \(3,\) and x0 \(2, 2\)"),
        (lambda: edit.inpaint(FIELD, torch.zeros(2, 2, dtype=torch.uint8), torch.ones(2)), "floating-point"),
        (lambda: edit.outpaint(FIELD, torch.zeros(2, 1, 4), (1, 1)), r"margin=\(1, 1\)"),
        (lambda: edit.upscale(FIELD, torch.zeros(2, 1, 4), 1), "factor=1"),
        (lambda: edit.pooled(3)(torch.zeros(1, 1, 8, 8)), "factor=3 must divide"),
        (lambda: edit.blurred(torch.ones(2, 2)), "odd lengths"),
        (lambda: edit.gaussian_kernel(0.0), "std=0.0"),
        (lambda: edit.image_to_image(FIELD, Y, 0.0), r"strength=0.0 is out of range"),
        (lambda: edit.image_to_image(FIELD, Y, 1.5), r"strength=1.5 is out of range"),
        (lambda: edit.image_to_image(FIELD, Y, 0.5, source=torch.zeros(2)), "inversion=True"),
    ],
)
def test_refusals_name_option_value_and_remedy(call, words):
    with pytest.raises(ValueError, match=words):
        call()
