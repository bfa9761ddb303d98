"""What a step does, by hand and by what it grows with."""

from dataclasses import replace

import pytest
from programs import imported

from mvm.distributed.processes import EngineConfig
from mvm.network import DiTConfig, multiply_adds
from mvm.recipes import DataConfig, Recipe, load_recipe
from mvm.recipes.memory import training_memory

PROGRAM = imported("step_work")
GPU_TERMS, TERMS, UNITS, step_work = PROGRAM.GPU_TERMS, PROGRAM.TERMS, PROGRAM.UNITS, PROGRAM.step_work


def dit(depth: int = 2, width: int = 64, side: int = 16, **engine) -> Recipe:
    data = DataConfig(name="folder", path="random", channels=4, size=side, classes=10)
    return Recipe(data=data, network=DiTConfig(depth=depth, width=width, heads=4), engine=EngineConfig(**engine))


def test_by_hand():
    work = step_work(dit(), 8)  # 64 tokens
    assert work.attention == 6 * 8 * 2 * (2 * 64 * 64 * 64)
    assert work.products + work.attention == 6 * 8 * multiply_adds(dit().network, (4, 16, 16), 10)
    assert work.elementwise == 2 * 8 * 64 * 2 * 64
    assert work.states == training_memory(dit(), 8).states
    assert work.blocks == 2


@pytest.mark.parametrize(("changed", "images", "times"), [
    (dit(), 16, {"products": 2, "attention": 2, "elementwise": 2, "states": 1, "blocks": 1}),
    (dit(accumulate=4), 8, {"products": 1, "attention": 1, "elementwise": 1, "states": 1, "blocks": 4}),
    (dit(side=32), 8, {"attention": 16, "elementwise": 4, "states": 1, "blocks": 1}),
    (dit(width=128), 8, {"attention": 2, "elementwise": 2, "blocks": 1}),
    (dit(depth=4), 8, {"attention": 2, "elementwise": 2, "blocks": 2}),
    (dit(recompute=0.5), 8, {"products": 1, "attention": 1, "elementwise": 7 / 6, "states": 1, "blocks": 1}),
    (dit(recompute=1.0, keep="nothing"), 8, {"products": 4 / 3, "attention": 4 / 3, "elementwise": 4 / 3, "states": 1}),
])  # fmt: skip
def test_what_grows_with_what(changed, images, times):
    base, work = step_work(dit(), 8), step_work(changed, images)
    assert {term: getattr(work, term) / getattr(base, term) for term in times} == pytest.approx(times)


def test_every_term_has_a_unit():
    assert tuple(UNITS) == TERMS == (*GPU_TERMS, "blocks")


def test_other_networks_and_optimizers_are_refused():
    with pytest.raises(ValueError, match="not for 'ddt' and 'muon'; measure it with: mvm bench imagenet256-ddt-xl"):
        step_work(load_recipe("imagenet256-ddt-xl"), 8)
    muon = replace(dit(), train=replace(dit().train, optimizer="muon"))
    with pytest.raises(ValueError, match="not for 'dit' and 'muon'"):
        step_work(muon, 8)
