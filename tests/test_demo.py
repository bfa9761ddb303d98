"""The demo: what its report must show, at full size (slow), and what it must not destroy."""

import json
from pathlib import Path

import pytest

from mvm.demo import QUICK, demo, others_shipped, shipped_section
from mvm.evaluation.report import Page
from mvm.model import load


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
    assert report.read_text().count("<figure>") >= 6


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
    assert "A larger model that ships in the package: colour" in said
    assert "Columns: 0, 1, 2, 3, 4, 5, 6, 7, 8, 9." in said
    assert said.count("data:image/png;base64,") == 2
    assert "digits" not in others_shipped()
