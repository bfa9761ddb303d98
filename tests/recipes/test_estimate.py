"""The model of many GPUs, by hand, and the table that docs/scale-out.md shows."""

from dataclasses import replace
from pathlib import Path

import pytest

from mvm.network import parameters
from mvm.recipes import Recipe, load_recipe
from mvm.recipes.estimate import MEASURED, all_reduce_seconds, estimate, scaling_table, speed_on_h200
from mvm.recipes.page import hours_on_h200

PAGE = Path(__file__).parents[2] / "docs" / "scale-out.md"


def recipe(name: str) -> Recipe:
    found = load_recipe(name)
    assert isinstance(found, Recipe)
    return found


def test_a_ring_by_hand():
    assert all_reduce_seconds(450e9, 1) == 0
    assert all_reduce_seconds(450e9, 8) == pytest.approx(2 * 7 / 8)
    assert all_reduce_seconds(50e9, 64) == pytest.approx(2 * 63 / 64)  # beyond a node: the network's pace


@pytest.mark.parametrize("name", ["cifar10", "imagenet32-dit-b", "imagenet32-dit-l"])
def test_one_gpu_takes_the_hours_of_the_recipe_page(name):
    one = estimate(recipe(name), 1)
    assert one.hours == pytest.approx(hours_on_h200(recipe(name)))
    assert one.efficiency == 1
    assert one.communication == 0


def test_a_measured_recipe_has_its_measured_speed():
    found = recipe("imagenet256-ddt-xl")
    one = estimate(found, 1)
    assert one.images_per_second == pytest.approx(MEASURED[found.name])
    assert one.hours == pytest.approx(100080 * 1024 / 317 / 3600)


def test_eight_gpus_by_hand():
    found = recipe("imagenet32-dit-b")
    eight = estimate(found, 8)
    size = 4 * parameters(found.network, (3, 32, 32), 1000)
    assert eight.images == 128
    assert eight.compute == pytest.approx(128 / speed_on_h200(found))
    assert eight.communication == pytest.approx(2 * 7 / 8 * size / 450e9)
    assert eight.images_per_second == pytest.approx(1024 / (eight.compute + eight.communication))
    assert eight.hours == pytest.approx(250228 * 1024 / eight.images_per_second / 3600)
    assert 0.9 < eight.efficiency < 1


def test_the_speed_of_b_is_the_measured_one():
    """2,778 images/s (benchmarks/results/training-speed.md, 4 channels); the page's share of the ceiling is rounded."""
    assert speed_on_h200(recipe("imagenet32-dit-b")) == pytest.approx(2778, rel=0.01)


def test_unknown_speed_is_refused():
    with pytest.raises(ValueError, match="mvm bench mine"):
        estimate(replace(recipe("imagenet256-ddt-xl"), name="mine"), 8)


def test_the_page_shows_the_table():
    assert scaling_table() in PAGE.read_text(encoding="utf-8")
