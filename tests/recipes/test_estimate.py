"""The model of many GPUs, by hand."""

from dataclasses import replace

import pytest

from mvm.network import parameters
from mvm.recipes import Recipe, load_recipe
from mvm.recipes.estimate import (
    MEASURED,
    all_reduce_seconds,
    best_estimate,
    estimate,
    exposed_seconds,
    nested_all_reduce_seconds,
    speed_on_h200,
    where_sums_dominate,
    with_batch,
)
from mvm.recipes.page import hours_on_h200, muon_matrices


def recipe(name: str) -> Recipe:
    found = load_recipe(name)
    assert isinstance(found, Recipe)
    return found


def test_a_ring_by_hand():
    assert all_reduce_seconds(450e9, 1) == 0
    assert all_reduce_seconds(450e9, 8) == pytest.approx(2 * 7 / 8)
    assert all_reduce_seconds(50e9, 64) == pytest.approx(2 * 63 / 64)  # beyond a node: the network's pace


def test_rings_in_two_levels_by_hand():
    assert nested_all_reduce_seconds(450e9, 1) == 0
    assert nested_all_reduce_seconds(450e9, 8) == all_reduce_seconds(450e9, 8)
    inside, between = 2 * 7 / 8 * 80 / 450, 2 * 3 / 4 * 10 / 50  # four nodes; each of eight GPUs sends 10 GB on
    assert nested_all_reduce_seconds(80e9, 32) == pytest.approx(inside + between)
    with pytest.raises(ValueError, match="20 GPUs are not whole nodes of 8"):
        nested_all_reduce_seconds(1, 20)


@pytest.mark.parametrize(
    ("backward", "communication", "buckets"), [(8, 4, 4), (4, 8, 4), (3, 3, 1), (6, 6, 3), (5, 0, 7)]
)
def test_overlap_is_that_of_buckets_sent_one_by_one(backward, communication, buckets):
    sent = 0.0
    for number in range(1, buckets + 1):
        ready = number * backward / buckets
        sent = max(sent, ready) + communication / buckets
    assert exposed_seconds(backward, communication, buckets) == pytest.approx(sent - backward)


@pytest.mark.parametrize("how", [estimate, best_estimate])
@pytest.mark.parametrize("name", ["cifar10", "imagenet32-dit-b", "imagenet32-dit-l"])
def test_one_gpu_takes_the_hours_of_the_recipe_page(name, how):
    one = how(recipe(name), 1)
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


@pytest.mark.parametrize(("how", "ring"), [(estimate, all_reduce_seconds), (best_estimate, nested_all_reduce_seconds)])
def test_muons_updates_are_sent_in_half_a_sums_time(how, ring):
    """In two bytes a value: an H200's bf16."""
    muon = recipe("imagenet256-ddt-xl")
    adamw = replace(muon, train=replace(muon.train, optimizer="adamw"))
    more = how(muon, 64).communication - how(adamw, 64).communication
    assert more == pytest.approx(ring(2 * sum(rows * columns for (rows, columns), _ in muon_matrices(muon)), 64) / 2)


def test_the_best_case_of_64_gpus_by_hand():
    found = recipe("imagenet32-dit-b")
    size = 4 * parameters(found.network, (3, 32, 32), 1000)
    buckets = -(-size // (25 * 2**20))
    compute = 16 / speed_on_h200(found)
    backward = 2 / 3 * compute
    sums = 2 * 7 / 8 * size / 450e9 + 2 * 7 / 8 * size / 8 / 50e9
    after_forward = max(backward + sums / buckets, backward / buckets + sums)
    best = best_estimate(found, 64)
    assert best.compute == estimate(found, 64).compute
    assert best.seconds == pytest.approx(compute / 3 + after_forward)
    assert best.hours == pytest.approx(250228 * best.seconds / 3600)


def test_sums_hide_behind_the_last_part_of_a_batch_alone():
    """4,096 images a GPU in 16 parts: no more hides than behind 256."""
    found = recipe("imagenet32-dit-b")
    parts, once = best_estimate(with_batch(found, 32768), 8), best_estimate(with_batch(found, 2048), 8)
    assert (parts.images, once.images) == (4096, 256)
    assert parts.communication == pytest.approx(once.communication)


@pytest.mark.parametrize("name", ["imagenet32-dit-b", "imagenet32-dit-l", "imagenet256-ddt-xl"])
@pytest.mark.parametrize("gpus", [2, 8, 64, 256, 1024])
def test_the_best_case_is_better(name, gpus):
    worst, best = estimate(recipe(name), gpus), best_estimate(recipe(name), gpus)
    assert 0 < best.communication < worst.communication


@pytest.mark.parametrize("how", [estimate, best_estimate])
def test_less_than_an_image_is_refused(how):
    assert how(recipe("imagenet32-dit-b"), 1024).images == 1
    with pytest.raises(ValueError, match=r"train\.batch=1024 is less than an image for each of 1032 GPUs"):
        how(recipe("imagenet32-dit-b"), 1032)


@pytest.mark.parametrize("how", [estimate, best_estimate])
def test_where_sums_take_half_of_a_step(how):
    found = recipe("imagenet32-dit-b")
    gpus = where_sums_dominate(found, how)
    assert gpus is not None
    assert how(found, gpus - 8).efficiency > 0.5 >= how(found, gpus).efficiency


def test_sums_dominate_inside_a_node_or_never():
    """Eight images: 2.7 each on three GPUs take 1.0 ms, sums 1.5; on two GPUs, 1.4 and 1.2. One image has one GPU."""
    assert where_sums_dominate(with_batch(recipe("imagenet32-dit-b"), 8)) == 3
    assert where_sums_dominate(with_batch(recipe("imagenet32-dit-b"), 1)) is None


def test_another_batch_sees_as_many_images():
    train = with_batch(recipe("imagenet32-dit-b"), 16384).train
    assert (train.batch, train.steps) == (16384, 15640)  # 250,228 / 16, rounded up


def test_the_speed_of_b_is_the_measured_one():
    """2,778 images/s (benchmarks/results/training-speed.md, 4 channels); the page's share of the ceiling is rounded."""
    assert speed_on_h200(recipe("imagenet32-dit-b")) == pytest.approx(2778, rel=0.01)


def test_unknown_speed_is_refused():
    with pytest.raises(ValueError, match="mvm bench mine"):
        estimate(replace(recipe("imagenet256-ddt-xl"), name="mine"), 8)
