"""The figures of the method: what they show is true, and every file is a picture of the size a page can take."""

import math
import re

import pytest
import torch
from PIL import Image
from programs import RESULTS, ROOT, imported

from mvm.path import MEAN_VELOCITY
from mvm.solver import ClassifierFree, Interval, adams, sa
from mvm.solver.guidance import guided_evaluations
from mvm.verify.solvers import measured_order, nonlinear_order, worst_std_error


@pytest.fixture(scope="module")
def figures():
    return imported("method_figures")


def test_every_figure_is_drawn_and_small(figures, tmp_path, monkeypatch):
    monkeypatch.setattr(figures.draw_animation, "__defaults__", (4,))
    written = figures.draw_all(tmp_path, count=60, nfe=12)
    assert {path.name for path in written} == {
        "method-path.png", "method-trajectories.png", "method-animation.gif", "method-architecture.svg",
        "method-weights.svg",
    }  # fmt: skip
    for path in written:
        assert 2_000 < path.stat().st_size < 300_000, path
        if path.suffix == ".svg":
            assert path.read_text("utf-8").rstrip().endswith("</svg>")
        else:
            assert Image.open(path).width in (700, 1440)
    animation = Image.open(tmp_path / "method-animation.gif")
    assert animation.n_frames == 4
    assert animation.convert("RGB").getpixel((2, 2)) == (255, 255, 255)


@pytest.mark.parametrize("name", ["path", "weights"])
def test_a_figure_is_drawn_again_to_the_same_bytes(figures, tmp_path, name):
    first, again = (figures.draw_all(tmp_path / part, [name], 40, 8)[0].read_bytes() for part in ("a", "b"))
    assert first == again


@pytest.mark.parametrize("rho", [0.0, 1.0])
def test_clouds_begin_as_noise_and_end_as_the_data(figures, rho):
    """Mean and second moment at both ends, within five standard errors of 1,000 particles."""
    found, data = figures.cloud(rho, 1000, 60), figures.law()
    assert (found.times[0], found.times[-1]) == (1.0, 0.0)
    assert len(found.times) == len(found.states) == 61
    mean = data.weights @ data.means
    covariance = (data.means - mean).T @ torch.diag(data.weights) @ (data.means - mean) + figures.STD**2 * torch.eye(2)
    assert mean.abs().max() > 0.2  # off the centre of the noise, so that a cloud left there is seen
    for x, m, c in ((found.states[0], torch.zeros(2), torch.eye(2)), (found.states[-1], mean, covariance)):
        bound = 5 * torch.diag(c).sqrt() / math.sqrt(1000)
        assert ((x.mean(0) - m).abs() < bound).all()
        assert (torch.cov(x.T) - c).abs().max() < 0.25
    nearest = torch.cdist(found.states[-1], data.means).min(1).values
    assert nearest.median() < 1.5 * figures.STD  # on the components, not between them


def test_both_processes_start_from_the_same_noises_and_end_elsewhere(figures):
    ode, sde = (figures.cloud(rho, 50, 20).states for rho in (0.0, 1.0))
    assert torch.equal(ode[0], sde[0])
    assert (ode[-1] - sde[-1]).norm(dim=1).median() > figures.STD


def test_targets_have_the_printed_sizes_and_weights(figures):
    t, s = torch.tensor([1e-4, 0.04, 0.25, 0.81], dtype=torch.float64), 0.5
    targets = {target.kind: target for target in figures.TARGETS}
    one, root = torch.ones_like(t), t.sqrt()
    stds = {"u": (1 + t * s**2).sqrt(), "v": (s**2 + 1 / t).sqrt(), "x0": s * one, "flow": (1 + s**2) ** 0.5 * one}
    weights = {"u": 1 / t, "v": 1 / t**2, "x0": one, "flow": (1 - t + root) ** 2 / t}
    for kind, target in targets.items():
        torch.testing.assert_close(target.std(t, s), stds[kind])
        torch.testing.assert_close(target.weight(t), weights[kind])


def test_the_picture_of_one_step_is_the_digits_model_s(figures):
    x, u, clean = figures.pictures_of_one_step(t=0.35)
    torch.testing.assert_close(clean, x + math.sqrt(0.35) * u)
    assert clean.shape == (8, 8)
    assert clean.std() > 0.5  # a digit, not the mean of all


def test_an_unknown_figure_is_refused(figures, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["method_figures.py", "--out", "x", "--only", "none"])
    with pytest.raises(SystemExit, match="2"):
        figures.main()
    assert "invalid choice: 'none'" in capsys.readouterr().err


# ---- figures that the pages state


def page(name):
    return " ".join((ROOT / "docs/explanation" / f"{name}.md").read_text("utf-8").split())


def test_the_method_page_states_the_measured_fids():
    text, results = page("method"), (RESULTS / "equal-terms.md").read_text("utf-8")
    at_1e3, at_4e3 = results.split("## CIFAR-10: what was found")[1], results.split("## CIFAR-10: at four times")[1]

    def fids(part):
        """NFE 26 of flow, u with flow's weight, and u."""
        rows = ("flow matching, linear", "MVM, u, weighted as flow", "MVM, u")
        return [re.search(rf"^\| {row} \| \d \| [^|]+\| ([\d.]+)", part, re.MULTILINE)[1] for row in rows]

    flow, weighted, u = fids(at_1e3)
    assert f"flow matching {flow}, $u$ with flow matching's weight {weighted}, $u$ {u}." in text
    assert f"{', '.join(fids(at_4e3))}." in text
    assert "| MVM, u, weighted as flow | 3 | **+0.68 (+0.35 to +1.00)** | **+0.59 (+0.29 to +0.90)**" in results
    assert "| MVM, u | 3 | **+1.643 (+1.593 to +1.692)** | **+1.53 (+1.27 to +1.80)**" in results
    assert "are 0.59 (0.29 to 0.90) and 1.53 (1.27 to 1.80)" in text
    for norm in ("3,305.461", "19,276.920", "1.338", "0.133"):
        assert f"| {norm} |" in results
    for row in ("$u$ | 1.3 | 0.612", "$v$ | 19,277 | 7.390", "$u$ | 0.13 | FID 31.98", "$v$ | 3,305 | FID 93.86"):
        assert row in text


def test_the_solver_page_states_the_measured_orders_and_errors():
    text = page("solver")
    for predictor, corrector in ((2, 0), (1, 2), (2, 3), (3, 4), (4, 4)):
        solver = adams(predictor, corrector)
        orders = [measured_order(solver, 0.0), nonlinear_order(solver), measured_order(solver, 1.0)]
        assert f"| P{predictor}/C{corrector} | {' | '.join(f'{order:.2f}' for order in orders)} |" in text
    errors = [f"{100 * worst_std_error(adams(), nfe):.2g} %" for nfe in (13, 26, 52)]
    assert f"| largest error of the std | {' | '.join(errors)} |" in text


def test_the_solver_page_states_the_times_and_guided_evaluations():
    text, solver, rule = page("solver"), adams().for_size(3072), ClassifierFree(2.0, interval=Interval(0.6, 0.8))
    rows = {
        "`adams`, ODE, 3,072 values": (solver, 0.0),
        "`adams`, SDE, 3,072 values": (solver, 1.0),
        "`sa`": (sa(), 0.0),
    }
    for name, (made, rho) in rows.items():
        times = [made.plan(MEAN_VELOCITY, nfe, rho).times for nfe in (13, 26, 65)]
        counts = [guided_evaluations(rule, each, MEAN_VELOCITY) for each in times]
        assert f"| {name} | {' | '.join(map(str, counts))} |" in text
    first = solver.plan(MEAN_VELOCITY, 13, 0.0).times[1:3]
    assert f"the ODE begins with 1, {first[0]:.3f} and {first[1]:.3f}" in text
