"""The demo: what its report must show, at full size (slow), and what it must not destroy."""

import json
import re
import shlex
from pathlib import Path

import pytest
import torch

from mvm.cli import app, split_overrides
from mvm.demo import QUICK, DemoSize, demo, distance_section, likeness, next_steps, others_shipped, shipped_section
from mvm.evaluation.cells import Result
from mvm.evaluation.report import Page
from mvm.model import load
from mvm.recipes import load_recipe, override
from mvm.settings import SampleConfig


def without_conclusion(text: str) -> list[str]:
    """The headings of plots and tables that have no sentence below them of what to conclude.

    A heading may have several; a sentence may stand under the heading before, too.
    """
    bare, heading, told = list[str](), "", False
    for match in re.finditer(r'<h[23]>(.*?)</h[23]>|<p class="finding">(.+?)</p>|<(?:svg|table)\b', text, re.DOTALL):
        if match[1] is not None:
            heading, told = match[1], False
        elif match[2] is not None:
            told = True
        elif not told:
            bare.append(heading)
    return bare


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_trained_digits_come_near_real_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Frechet distance in pixel space, 1,000 samples: at most 2.5 times that of 1,000 real training digits."""
    monkeypatch.setattr("mvm.demo.SHIPPED_NFE", 2)  # pictures of a model that is not trained here
    report = demo(tmp_path / "demo")
    results = json.loads((tmp_path / "demo" / "results.json").read_text())
    at_26 = {(m["solver"], m["rho"]): m["distance"] for m in results["measured"] if m["nfe"] == 26}
    assert at_26["adams", 0.0] <= 2.5 * results["reference"]
    assert at_26["adams", 1.0] <= 2.5 * results["reference"]
    assert_ordered(report.read_text())


def assert_ordered(text: str) -> None:
    """Pictures of CIFAR-10 and then of digits come before curves, and these before figures and details."""
    headings = re.findall(r"<h2>(.*?)</h2>", text)
    kinds = ["CIFAR-10", "Digits", "From noise", "Distance", "Training loss", "Inversion", "Next steps", "How this"]
    assert [heading[: len(kind)] for heading, kind in zip(headings, kinds, strict=True)] == kinds
    assert text.index("<img") < text.index("Digits: trained here") < text.index("<svg")
    assert without_conclusion(text) == []


def test_pictures_come_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mvm.demo.QUICK", DemoSize(1, 100, (2, 3), 1, 2))
    monkeypatch.setattr("mvm.demo.SHIPPED_NFE", 2)
    monkeypatch.setattr("mvm.demo.others_shipped", lambda: {"cifar10": load("digits")})
    assert_ordered(demo(tmp_path / "demo", quick=True).read_text(encoding="utf-8"))


def test_a_folder_that_is_no_demo_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "recipe.json").write_text("{}")
    with pytest.raises(ValueError, match="holds no earlier demo"):
        demo(tmp_path, quick=True)
    assert [path.name for path in tmp_path.iterdir()] == ["recipe.json"]


def test_other_shipped_models_are_shown(tmp_path: Path) -> None:
    """Any model that comes with the package has its section: the digits' stands for one."""
    page = Page("title", "summary")
    page.section(*shipped_section("colour", load("digits"), QUICK))
    page.write(tmp_path / "page.html")
    said = (tmp_path / "page.html").read_text()
    assert "colour: ODE on the left, SDE on the right" in said
    assert re.findall(r"<figcaption>(.*?)</figcaption>", said) == [str(i) for i in range(10)]
    assert said.count("data:image/png;base64,") == 10
    assert "digits" not in others_shipped()


def cells(distances: dict[tuple[str, float], tuple[float, float]]) -> list[Result]:
    """Results at 3 and 8 evaluations."""
    return [
        Result(SampleConfig(solver, nfe, rho, tuned=False), nfe, nfe, 1.0, {"fd-pixels": {"value": value}})
        for (solver, rho), values in distances.items()
        for nfe, value in zip((3, 8), values, strict=True)
    ]


@pytest.mark.parametrize(
    ("distances", "first", "sides"),
    [
        (
            {("adams", 0.0): (8.0, 3.0), ("adams", 1.0): (9.0, 2.5)},
            "Nearest to held-out digits is adams, SDE (rho 1), at 8 evaluations: 1.25 times the distance of real",
            "With adams, the SDE (rho 1) is below the ODE at NFE 8 and above it at NFE 3.",
        ),
        (
            {("adams", 0.0): (1.0, 3.0), ("adams", 1.0): (9.0, 3.5)},
            "Nearest to held-out digits is adams, ODE (rho 0), at 3 evaluations: 0.50 times the distance of real",
            "With adams, the SDE (rho 1) is above the ODE at every NFE tried (3 to 8).",
        ),
    ],
)
def test_conclusions_follow_the_distances(
    distances: dict[tuple[str, float], tuple[float, float]], first: str, sides: str
) -> None:
    text = "".join(distance_section(cells(distances), 2.0, 100, 397))
    assert first in text
    assert sides in text


def test_conclusions_follow_the_images() -> None:
    images = torch.randint(0, 256, (20, 3, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    near = (images.float() * 0.9).to(torch.uint8)
    assert "give nearly the same image: on average" in likeness(images, near)
    assert "give different images: on average" in likeness(images, images.flip(0))


def test_next_steps_are_understood() -> None:
    steps = next_steps(Path("runs/de mo"))
    lines = [line for _, text in steps for line in text.splitlines()]
    assert 4 <= len(steps) <= 6
    assert {line.split()[1] for line in lines} == {"sample", "data", "train", "sweep", "app", "docs"}
    for line in lines:
        words = shlex.split(line)
        if words == ["make", "docs"]:
            assert "\ndocs:" in (Path(__file__).parent.parent / "Makefile").read_text()
            continue
        rest, overrides = split_overrides(words[1:])
        app.parse_args(rest, exit_on_error=False, print_error=False)
        if rest[0] == "train":
            assert override(load_recipe(rest[1]), overrides).data.path == "data/photos"
    assert "'runs/de mo'" in lines[0]
