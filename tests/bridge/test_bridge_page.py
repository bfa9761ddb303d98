"""docs/how-to/other-libraries.md: its snippets run, its errors are computed anew, it lists the code's schedulers."""

import re
from pathlib import Path

import pytest
import torch
from closed_form import MEAN, STD, start
from test_bridge_incoming import MODELS, from_ddpm, native

from mvm.bridge import SCHEDULERS
from mvm.solver import sample

PAGE = (Path(__file__).parents[2] / "docs" / "how-to/other-libraries.md").read_text(encoding="utf-8")
SNIPPETS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
FIELDS = {**MODELS, "scaled_linear eps": lambda **options: from_ddpm("scaled_linear", **options)}


def executed(code: str) -> dict:
    names: dict = {}
    exec(compile(code, "docs/how-to/other-libraries.md", "exec"), names)
    return names


def test_snippet_from_diffusers():
    pytest.importorskip("diffusers")
    images = executed(SNIPPETS[0])["images"]
    assert images.shape == (4, 1, 8, 8)
    assert bool(torch.isfinite(images).all())


def test_snippet_with_text():
    pytest.importorskip("diffusers")
    images = executed(SNIPPETS[1])["images"]
    assert images.shape == (4, 1, 8, 8)
    assert bool(torch.isfinite(images).all())


def test_snippet_from_functions():
    for x in executed(SNIPPETS[2])["samples"]:
        assert float(x.std()) == pytest.approx(1, abs=0.03)
        assert float(x.mean()) == pytest.approx(0, abs=0.05)


def test_snippet_outgoing():
    """Three samplers, one start, one model: about the same digits."""
    pytest.importorskip("diffusers")
    names = executed(SNIPPETS[3])
    x = [names[name] for name in ("by_ddim", "by_flow", "by_euler")]
    assert all(images.shape == (4, 1, 8, 8) for images in x)
    for other in x[1:]:
        assert float((x[0] - other).abs().mean()) < 0.2


def test_snippet_as_k_diffusion_calls():
    names = executed(SNIPPETS[4])
    for name in ("ode", "sde", "images"):
        assert float(names[name].std()) == pytest.approx(1, abs=0.06)
        assert float(names[name].mean()) == pytest.approx(0, abs=0.07)


def test_the_line_for_comfyui_names_the_nodes():
    (line,) = re.findall(r'echo "(.*)" \\\n +> ComfyUI/custom_nodes/\w+\.py', PAGE)
    assert set(executed(line)["NODE_DISPLAY_NAME_MAPPINGS"].values()) == {"MVM Sampler", "MVM Sigmas"}


def test_every_snippet_is_tested():
    assert len(SNIPPETS) == 5


def rows() -> dict[str, list[str]]:
    table = PAGE.split("## Measured")[1]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if "/ " in line[:60]]
    return {name: values for name, *values in cells if len(values) == 4}


def numbers(cell: str) -> list[float]:
    return [float(part) for part in cell.split("/")]


def measured(field, x, rho: float, seeds, **options) -> list[float]:
    found = sample(field, x, nfe=52, rho=rho, seeds=seeds, **options)
    return [100 * (float(found.mean()) / MEAN - 1), 100 * (float(found.std()) / STD - 1)]


def test_the_table_names_its_models():
    assert set(rows()) == {"mvm's own oracle", "flow", "edm", "ddpm eps", "cosine eps", "scaled_linear eps"}


@pytest.mark.parametrize("name", rows())
def test_the_table_is_measured(name):
    seeds, x = start()
    mvm_ode, mvm_sde, own_ode, own_sde = rows()[name]
    field = FIELDS[name]() if name in FIELDS else native
    assert measured(field, x, 0.0, seeds) == pytest.approx(numbers(mvm_ode), abs=0.03)
    assert measured(field, x, 1.0, seeds) == pytest.approx(numbers(mvm_sde), abs=0.03)
    if name in FIELDS:
        own = FIELDS[name](path="own")
        x = x * float(own.schedule.sigma(own.schedule.end))
        assert measured(own, x, 0.0, seeds, schedule=own.schedule) == pytest.approx(numbers(own_ode), abs=0.03)
        assert measured(own, x, 1.0, seeds, schedule=own.schedule) == pytest.approx(numbers(own_sde), abs=0.03)


def test_the_text_quotes_the_table():
    mvm_ode, _, own_ode, _ = (
        cell.split(" / ")[0].replace("-", "\N{MINUS SIGN}") for cell in rows()["scaled_linear eps"]
    )
    assert f"{mvm_ode} % against {own_ode} %" in PAGE


@pytest.mark.parametrize("name", ["field.solver", '"sa"'])
def test_the_lines_on_other_solvers_are_measured(name):
    seeds, x = start()
    ode, sde = re.findall(r"[-+]0\.\d\d / [-+]0\.\d\d", PAGE.split(f"With `solver={name}`")[1].split("\n")[0])
    field = FIELDS["scaled_linear eps"]()
    solver = field.solver if name == "field.solver" else "sa"
    assert measured(field, x, 0.0, seeds, solver=solver) == pytest.approx(numbers(ode), abs=0.03)
    assert measured(field, x, 1.0, seeds, solver=solver) == pytest.approx(numbers(sde), abs=0.03)


def test_the_page_lists_the_known_schedulers():
    listed = PAGE.split("| scheduler | path |")[1].split("Another scheduler")[0]
    words = set(re.findall(r"\w+", listed))
    assert {name.removesuffix("Scheduler") for name in SCHEDULERS} <= words


def test_links_lead_somewhere():
    for target in re.findall(r"\]\(([^)#]+)\)", PAGE):
        assert (Path(__file__).parents[2] / "docs" / "how-to" / target).exists(), target
