"""The examples: `mvm_on_a_page.py` equals the library part by part, and the short ones find exact answers."""

import ast
import importlib.util
import math
import re
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.stats import multivariate_normal, norm

import mvm
from mvm import noise, oracle
from mvm.data import digits
from mvm.network import DiT, DiTConfig
from mvm.objective import Batch, Matching, ObjectiveConfig
from mvm.path import MEAN_VELOCITY, TimeLaw, perturb
from mvm.solver import adams

EXAMPLES = Path(__file__).parents[1] / "examples"
PAGE = EXAMPLES / "mvm_on_a_page.py"
SHAPE = (1, 8, 8)
SEEDS = torch.arange(16)


def load(name):
    """The example as a module."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def page():
    return load("mvm_on_a_page")


def close(ours, theirs, tolerance=1e-6):
    torch.testing.assert_close(torch.as_tensor(ours), torch.as_tensor(theirs), rtol=tolerance, atol=tolerance)


def drawn(dtype):
    """Images, labels, and the t and eps that the library draws for them."""
    data = digits("train")
    x0 = (data.images[: len(SEEDS)].double() / 127.5 - 1).to(dtype)
    t = TimeLaw().draw(SEEDS, MEAN_VELOCITY)
    return x0, data.labels[: len(SEEDS)], t, noise.normal(SEEDS, noise.TRAIN, SHAPE, dtype)


def networks(page, size="tiny", width=0, dtype=torch.float64):
    """The library's DiT and the page's with its weights, away from the zeros at which training begins."""
    theirs = DiT(DiTConfig(size=size, width=width), SHAPE, 10).to(dtype)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator, dtype=dtype)
    depth, wide, heads = DiTConfig(size=size, width=width).dimensions
    ours = page.DiT(SHAPE, 10, depth, wide, heads).to(dtype)
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs


def test_the_page_is_a_page_and_stands_alone():
    source = PAGE.read_text()
    assert len(source.splitlines()) <= 250
    imported = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            imported |= {alias.name.split(".")[0] for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0
            imported.add(node.module.split(".")[0])
    assert imported - set(sys.stdlib_module_names) == {"PIL", "numpy", "torch", "tqdm"}
    assert "import_module" not in source
    assert "__import__" not in source


def test_the_page_trains_and_draws(tmp_path):
    """Where mvm cannot be imported: it needs the digits of the package, none of its code."""
    out = tmp_path / "page.png"
    alone = "import runpy, sys; sys.modules['mvm'] = None; del sys.argv[0]; runpy.run_path(sys.argv[0], {}, '__main__')"
    options = ["--steps", "3", "--seed", "1", "--out", str(out)]
    command = [sys.executable, "-c", alone, str(PAGE), *options]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "3/3" in done.stderr  # the progress bar
    assert [line.split(":")[0] for line in done.stdout.splitlines()] == ["ODE", "SDE"]
    picture = np.array(Image.open(out))
    assert picture.shape == (432, 864)
    ode, sde = np.split(picture, 2, axis=1)
    assert ode.std() > 30
    assert (ode != sde).any()


def test_digits(page):
    images, labels = page.digits()
    data = digits("train")
    close(images, data.images.float() / 127.5 - 1)
    assert torch.equal(labels, data.labels)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_path_and_target(page, dtype):
    x0, _, t, eps = drawn(dtype)
    noised = perturb(x0, SEEDS, MEAN_VELOCITY, TimeLaw(), "u")
    assert torch.equal(noised.t, t)
    x, u = page.perturb(x0, t, eps)
    close(x, noised.x)
    close(u, noised.target)
    # the field that the page makes of u is the image itself where u is exact
    close(page.denoiser(lambda *_: u, None)(x, t), x0)


def test_time_is_uniform_in_both(page):
    """The page draws torch.rand; the library's default timestep distribution is the same."""
    p = torch.linspace(0.01, 0.99, 9, dtype=torch.float64)
    close(TimeLaw().quantile(p, MEAN_VELOCITY), p)


@pytest.mark.parametrize(("size", "width"), [("tiny", 0), ("tiny", 96)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_network(page, size, width, dtype):
    ours, theirs = networks(page, size, width, dtype)
    x0, labels, t, eps = drawn(dtype)
    labels = torch.where(labels == 3, 10, labels)  # the null class too
    x, _ = page.perturb(x0, t, eps)
    found, expected = (network(x, t.sqrt(), labels) for network in (ours, theirs))
    assert expected.prediction.std() > 0.1
    close(found, expected.prediction)


def test_initial_weights(page):
    """Zero where the library's are, and as wide elsewhere."""
    torch.manual_seed(0)
    ours, theirs = page.DiT(), DiT(DiTConfig(size="tiny"), SHAPE, 10)
    expected = theirs.state_dict()
    assert ours.state_dict().keys() == expected.keys()
    for name, weight in ours.state_dict().items():
        assert weight.shape == expected[name].shape
        close(weight.mean(), expected[name].mean(), 0.02)
        std = weight.std().item() if weight.numel() > 1 else 0.0
        assert std == pytest.approx(expected[name].std().item(), rel=0.12), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_loss_and_gradient(page, dtype):
    ours, theirs = networks(page, dtype=dtype)
    x0, labels, t, eps = drawn(dtype)
    objective = Matching(ObjectiveConfig(), MEAN_VELOCITY, TimeLaw())
    batch = Batch(x0, labels, SEEDS)
    kept = objective.drop(batch, theirs.null)
    assert (kept != labels).any()
    assert (kept == labels).any()
    expected = objective(theirs, batch).total
    found = page.matching_loss(ours, x0, kept, t, eps)
    close(found, expected)
    expected.backward()
    found.backward()
    gradients = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    for name, parameter in ours.named_parameters():
        assert gradients[name].abs().max() > 0, name
        close(parameter.grad, gradients[name])


@pytest.mark.parametrize("rho", [0.0, 0.5, 0.75, 1.0, 1.5])
@pytest.mark.parametrize("size", [2, 64, 3072])
def test_times_and_coefficients(page, rho, size):
    for nfe in range(1, 31):
        plan = adams().for_size(size).plan(MEAN_VELOCITY, nfe, rho)
        times, rows, ending = page.table(nfe, rho, size)
        assert (times[0], times[-1]) == (1, 0)
        close(times, np.array(plan.times))
        assert len(rows) == nfe - 1
        *steps, last = plan.rows
        for found, row in zip(rows, steps, strict=True):
            decay, std, predict, correct = found
            close(np.array((decay, std)), np.array((row.decay, row.std)))
            close(predict, np.array(row.predict))
            close(correct, np.array(row.correct))
        assert (last.decay, last.std, last.correct) == (0, 0, ())
        close(ending, np.array(last.predict))


@pytest.mark.parametrize("rho", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("nfe", [1, 2, 3, 5, 8, 13, 26])
def test_samples(page, rho, nfe):
    """Through an exact field, of the digits, with the library's noise."""
    data = digits("train")
    exact = oracle.finite_data(data.images[:200].double() / 127.5 - 1, std=0.1).field(MEAN_VELOCITY)
    start = noise.initial(SEEDS, SHAPE, torch.float64)
    expected = mvm.sample(exact, start, nfe=nfe, rho=rho, seeds=SEEDS)
    calls = []

    def field(x, t):
        calls.append(t)
        return exact(x, t, None)

    xi = lambda index: noise.normal(SEEDS, noise.STEP + index, SHAPE, torch.float64)  # noqa: E731
    close(page.sample(field, start, nfe, rho, xi), expected)
    assert len(calls) == nfe


@pytest.mark.parametrize("rho", [0.0, 1.0])
def test_samples_by_a_network(page, rho):
    """In float64: path, network, solver and sampler together, with the library's model of the digits."""
    model = mvm.load("digits").double()
    depth, width, heads = model.recipe.network.dimensions
    network = page.DiT(SHAPE, 10, depth, width, heads).double()
    network.load_state_dict(model.network.state_dict())
    start, labels = noise.initial(SEEDS, SHAPE, torch.float64), SEEDS % 10
    # times tuned to this model would be the library's, where it has any: the plain solver is the page's
    expected = mvm.sample(model, start, solver=adams(spread=5.0), nfe=8, rho=rho, condition=labels, seeds=SEEDS)
    xi = lambda index: noise.normal(SEEDS, noise.STEP + index, SHAPE, torch.float64)  # noqa: E731
    close(page.sample(page.denoiser(network, labels), start, 8, rho, xi), expected)


def test_own_noise(page):
    """Without given noise: the SDE draws torch's, and the law is that of the data."""
    exact = oracle.gaussian(0.3, 0.5, (4,)).field(MEAN_VELOCITY)
    torch.manual_seed(0)
    start = torch.randn(20_000, 4)
    for rho in (0.0, 1.0):
        x = page.sample(lambda x, t: exact(x, t, None), start, 26, rho)
        assert x.dtype == torch.float32
        assert x.mean().item() == pytest.approx(0.3, abs=0.01)
        assert x.std().item() == pytest.approx(0.5, rel=0.01)
    assert math.isfinite(x.sum().item())


# ---- The short examples: what they print is the exact answer ----


def printed(name, capsys):
    """What the example's names stand for after it has run, and the numbers it prints."""
    found = runpy.run_path(str(EXAMPLES / f"{name}.py"))
    return found, [float(number) for number in re.findall(r"-?\d+\.\d+(?:e[-+]\d+)?", capsys.readouterr().out)]


def distance(x, weights, means, stds):
    """The largest distance of the samples' distribution function from that of a mixture of Gaussians."""
    x = np.sort(x.flatten().numpy())
    exact = sum(w * norm.cdf(x, m, s) for w, m, s in zip(weights, means, stds, strict=True))
    rank = np.arange(len(x) + 1) / len(x)
    return max(np.abs(exact - rank[1:]).max(), np.abs(exact - rank[:-1]).max())


def test_own_field(capsys):
    found, numbers = printed("own_field", capsys)
    mean, std = 0.4, math.sqrt(0.3 * 1.04 + 0.7 * 1.25 - 0.16)
    assert numbers[:2] == pytest.approx([mean, std], abs=5e-4)
    assert numbers[2:] == pytest.approx([mean, std] * 2, abs=0.02)
    for x in found["samples"].values():
        assert (
            distance(x, (0.3, 0.7), (-1, 1), (0.2, 0.5)) < 0.0096
        )  # 5 % of sets of 20,000 exact draws lie further away


def test_own_solver(capsys):
    found, numbers = printed("own_solver", capsys)
    assert numbers == pytest.approx([found["error"][128], found["error"][256], 2], rel=0.05)
    assert found["order"] == pytest.approx(2, abs=0.05)
    assert numbers[1] < 1e-4
    with pytest.raises(ValueError, match="rho=1"):
        mvm.sample(found["field"], found["noise"], solver=found["TwoStep"](), rho=1.0)


def test_own_guidance(capsys):
    found, numbers = printed("own_guidance", capsys)
    exact = torch.tensor([1.5, -1.25], dtype=torch.float64)
    assert numbers[:2] == pytest.approx(exact.tolist(), abs=0.02)
    assert numbers[2:4] == exact.tolist()
    error = (found["samples"] - exact - 0.3 * found["noise"]).abs().max().item()
    assert error < 1e-3
    assert numbers[4] == pytest.approx(error, rel=0.05)


def test_likelihood(capsys):
    found, numbers = printed("likelihood", capsys)
    covariance = np.array([[1.0, 0.6, 0.2], [0.6, 0.5, 0.1], [0.2, 0.1, 0.3]])
    exact = torch.from_numpy(multivariate_normal([0.5, -0.2, 0.0], covariance).logpdf(found["x"].numpy()))
    close(found["traced"], exact, 1e-3)
    close(found["estimated"], exact, 0.1)  # by chance: four probes
    mean, error = float(exact.mean()), float((found["traced"] - exact).abs().max())
    assert numbers[:2] == pytest.approx([mean, mean], abs=1e-3)
    assert numbers[2] == pytest.approx(error, rel=0.05)


def test_bridge(capsys):
    found, numbers = printed("bridge", capsys)
    velocity, eps = numbers[:5], numbers[5:]
    for name, (error, mean, exact_mean, std, exact_std) in (("velocity", velocity), ("eps", eps)):
        assert (exact_mean, exact_std) == (0.3, 0.5)
        assert found["errors"][name] < 1e-3
        assert error == pytest.approx(found["errors"][name], rel=0.05)
        assert mean == pytest.approx(0.3, abs=0.01)
        assert std == pytest.approx(0.5, rel=0.02)
    torch.testing.assert_close(found["exact"], 0.3 + 0.5 * found["noise"])


SHORT = ("own_field", "own_solver", "own_guidance", "likelihood", "bridge")


def test_short_examples_are_short_and_listed():
    listed = (EXAMPLES / "README.md").read_text()
    for example in EXAMPLES.glob("*.py"):
        assert f"[{example.name}]({example.name})" in listed
    for name in SHORT:
        assert 15 <= len((EXAMPLES / f"{name}.py").read_text().splitlines()) <= 50
