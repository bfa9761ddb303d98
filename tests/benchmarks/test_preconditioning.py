"""benchmarks/preconditioning.py: coefficients, one loss for all methods, comparison by pairs."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from mvm.path import LinearFlow, MeanVelocity

pytest.importorskip("matplotlib", reason="figures are drawn with matplotlib")


LEVELS = torch.exp(torch.linspace(-5, 5, 21, dtype=torch.float64))


@pytest.mark.parametrize("scale", [1, 2])
@pytest.mark.parametrize("kind", ["u", "flow"])
def test_the_exact_prediction_gives_the_image(preconditioning, kind, scale):
    x0, n = torch.full_like(LEVELS, 0.7), torch.full_like(LEVELS, -1.3)
    inner, skip, out = preconditioning.METHODS[f"{kind}{scale}"](LEVELS)
    z = x0 + LEVELS * n
    path = MeanVelocity() if kind == "u" else LinearFlow()
    t = path.t_from_lam(-torch.log(scale * LEVELS))
    x = path.alpha(t) * scale * x0 + path.sigma(t) * n
    target = (torch.sqrt(t) if kind == "u" else 1) * scale * x0 - n  # u = sqrt(t) x0 - eps, and flow's velocity, turned
    assert torch.allclose(inner * z, x, rtol=1e-12)
    assert torch.allclose(skip * z + out * target, x0, rtol=1e-10)


def test_the_coefficients_of_edm_have_unit_variance(preconditioning):
    inner, skip, out = preconditioning.METHODS["edm"](LEVELS)
    variance = 0.25 + LEVELS**2
    assert torch.allclose(inner**2 * variance, torch.ones_like(LEVELS))
    assert torch.allclose(((1 - skip) ** 2 * 0.25 + skip**2 * LEVELS**2) / out**2, torch.ones_like(LEVELS))


def test_all_methods_have_one_loss(preconditioning):
    """A network that restores the same image loses the same, whatever it put out: here the one that gives nothing."""
    network = lambda x, level, labels: SimpleNamespace(prediction=torch.zeros_like(x))  # noqa: E731
    x0, n, r = torch.full((4, 3, 2, 2), 0.4), torch.ones(4, 3, 2, 2), torch.tensor([0.1, 0.5, 1.0, 3.0]).double()
    for method, coefficients in preconditioning.METHODS.items():
        found = preconditioning.losses(network, method, x0, None, r, n)
        want = ((coefficients(r).skip * (0.4 + r) - 0.4) * (1 + r) / r) ** 2
        assert found.double().tolist() == pytest.approx(want.tolist(), rel=1e-5)


def test_preconditioning_is_compared_by_pairs(preconditioning):
    def run(method, seed, factor):
        held = {str(lam): factor * (seed + 1) for lam in preconditioning.LAMS}
        return {"method": method, "seed": seed, "train": factor * (seed + 1), "held": held}

    runs = [run("flow1", 0, 1.0), run("flow1", 1, 1.0), run("u2", 0, 0.99), run("u2", 1, 0.97), run("edm", 0, 1.02)]
    first, _, second, third = preconditioning.table(runs).splitlines()
    assert first.startswith("| % above flow1 | seeds | training | lam -2.5 |")
    assert second == "| u2 | 2 | " + " | ".join(["-2.00 ± 12.71"] * 8) + " |"  # Student's 12.706 x 0.01414 / 2^0.5
    assert third == "| edm | 1 | " + " | ".join(["+2.00"] * 8) + " |"


def test_preconditioning_runs_and_repeats(preconditioning, monkeypatch):
    monkeypatch.setattr(preconditioning, "HELD_OUT", 4)
    monkeypatch.setattr(preconditioning, "BATCH", 4)
    images = np.random.default_rng(0).integers(0, 256, (12, 16, 16, 3), dtype=np.uint8)
    small, labels = preconditioning.halved(images), torch.arange(12) % 10
    assert small.shape == (12, 3, 8, 8)
    assert small[0, 1, 0, 0] == pytest.approx(round(float(images[0, :2, :2, 1].mean())) / 127.5 - 1, abs=0.008)
    first, again = (preconditioning.train(small, labels, "u2", 3, steps=2) for _ in range(2))
    assert first == again
    assert first["held"].keys() == {str(lam) for lam in preconditioning.LAMS}
