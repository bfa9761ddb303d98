"""The measuring of speed: which steps are timed, what the figures mean, and the table they end in."""

import json
import time

import pytest
import torch

from mvm import bench
from mvm.bench import RandomBank, bench_sampling, bench_training, growth, random_images, table
from mvm.distributed.processes import Processes
from mvm.network import multiply_adds, parameters
from mvm.recipes import load_recipe, override
from mvm.recipes.memory import training_memory
from mvm.training.field_trainer import FieldTrainer

TINY = {
    "network.depth": "1",
    "network.heads": "2",
    "network.width": "16",
    "network.patch": "4",
    "train.batch": "4",
    "sample.nfe": "2",
}
SAMPLING = {"images", "nfe", "rho", "share", "batches", "seconds", "spread", "images_per_second"}
PLACE = Processes()


def tiny(**changes):
    return override(load_recipe("digits"), {**TINY, **{k.replace("_", ".", 1): v for k, v in changes.items()}})


@pytest.fixture
def seconds(monkeypatch):
    """A clock that only training steps move, by as much as they are told: the last entry again and again."""
    now, each = [0.0], [1.0]

    def step(self):
        now[0] += each.pop(0) if len(each) > 1 else each[0]
        self.step += 1

    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(FieldTrainer, "advance", step)
    monkeypatch.setattr(FieldTrainer, "read", lambda self: [])
    return each


def test_median_part_after_a_warm_up(seconds):
    """Five slow steps are the warm-up; then five parts of two at 2, 1, 4, 1.5 and 3 s a step: the middle one counts."""
    seconds[:] = [10.0] * 5 + [2.0] * 2 + [1.0] * 2 + [4.0] * 2 + [1.5] * 2 + [3.0] * 2
    found = bench_training(tiny(), PLACE, steps=10, progress=False)
    assert found == {"warm_up_s": 50.0, "step_ms": 2000.0, "spread": 3.0, "images_per_second": 2.0}


@pytest.mark.parametrize(("steps", "done"), [(1, 5), (5, 5), (12, 10), (30, 30)])
def test_steps_are_five_equal_parts(seconds, monkeypatch, steps, done):
    counted, advance = [], FieldTrainer.advance
    monkeypatch.setattr(FieldTrainer, "advance", lambda self: (counted.append(1), advance(self)))
    bench_training(tiny(), PLACE, steps=steps, progress=False)
    assert len(counted) == bench.WARM_UP + done


def test_mfu_of_a_known_ceiling(seconds, monkeypatch):
    monkeypatch.setattr(bench, "matrix_ceiling", lambda device: 2e6)
    seconds[:] = [0.5]
    found = bench_training(tiny(), PLACE, steps=3, progress=False)
    assert found["images_per_second"] == 8
    assert found["mfu"] == pytest.approx(8 * 6 * multiply_adds(tiny().network, (1, 8, 8), 10) / 2e6, rel=1e-12)
    assert found["ceiling_tflops"] == 2e-6


def test_all_figures_of_a_recipe():
    """For real: random images, true steps and samples."""
    recipe = tiny(engine_recompute="1")
    found = bench.bench(recipe, PLACE, steps=3, num=5, progress=False)
    json.dumps(found)
    facts = {name: value for name, value in found.items() if name not in ("machine", "training", "sampling")}
    assert facts == {
        "recipe": "digits",
        "repa": "none",
        "network": {"size": "tiny", "patch": 4, "input": [1, 8, 8]},
        "tokens": 4,
        "parameters": parameters(recipe.network, (1, 8, 8), 10),
        "multiply_adds": multiply_adds(recipe.network, (1, 8, 8), 10),
        "batch": 4,
        "memory_estimate_gb": training_memory(recipe, 4).total / 1e9,
        "precision": "float32",
        "compile": "off",
        "recompute": 1.0,
        "keep": "products",
    }
    assert found["machine"].keys() == {"device", "torch", "python"}
    assert found["machine"]["torch"] == torch.__version__
    assert found["training"].keys() == {"warm_up_s", "step_ms", "spread", "images_per_second"}
    assert found["training"]["images_per_second"] == pytest.approx(4000 / found["training"]["step_ms"])
    assert found["training"]["spread"] >= 0
    assert found["sampling"].keys() == SAMPLING
    assert (found["sampling"]["images"], found["sampling"]["nfe"]) == (5, 2)


def test_sampling_is_left_out_when_nothing_is_asked_for(seconds):
    assert "sampling" not in bench.bench(tiny(), PLACE, steps=3, progress=False)


def test_sampling_speed_is_that_of_the_second_batch(monkeypatch):
    now, made = [0.0], []

    def images(sampler, labels, seeds, settings, **options):
        made.append((len(labels), options["batch"]))
        now[0] += 9.0 if len(made) == 1 else 2.0

    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(bench.Sampler, "images", images)
    found = bench_sampling(tiny(), PLACE, num=6, progress=False)
    how = {"images": 6, "nfe": 2, "rho": 0.0, "share": 0.0, "batches": 1}
    assert found == {**how, "seconds": 2.0, "spread": 0.0, "images_per_second": 3.0}
    assert made == [(6, 6), (6, 6)]


def test_random_images_are_of_the_recipes_kind():
    recipe = tiny()
    one, other = random_images(recipe, 500), random_images(recipe, 500)
    assert one.images.shape == (500, 1, 8, 8)
    assert one.images.dtype == torch.uint8
    assert (int(one.images.min()), int(one.images.max())) == (0, 255)
    assert sorted(set(one.labels.tolist())) == list(range(10))
    assert torch.equal(one.images, other.images)
    assert not torch.equal(one.images, random_images(tiny(seed="1"), 500).images)


def test_random_bank_looks_up_as_a_real_one():
    bank = RandomBank(10, 4, 6, torch.device("cpu"))
    indices, mirrored = torch.tensor([3, 3, 9]), torch.tensor([False, True, True])
    found = bank.lookup(indices, mirrored)
    assert found.shape == (3, 4, 6)
    assert found.dtype == torch.float32
    assert torch.equal(found[0], bank.features[0, 3].float())
    assert torch.equal(found[1], bank.features[1, 3].float())
    assert torch.equal(found[2], bank.features[1, 9].float())


def test_a_teacher_takes_part():
    """With alignment on, its term is in every step that is measured."""
    seen = []

    class Counted(RandomBank):
        def lookup(self, indices, mirrored, shown=None):
            seen.append(len(indices))
            return super().lookup(indices, mirrored, shown)

    recipe = tiny(repa_encoder="any", repa_block="1")
    bench_training(recipe, PLACE, steps=5, teacher=Counted(16, 4, 6, torch.device("cpu")), progress=False)
    assert seen == [4] * (bench.WARM_UP + 5)


def test_growth_doubles_one_thing_at_a_time(monkeypatch):
    """A step that takes its multiply-adds in milliseconds: growth is their ratio, as doubling each alone gives."""
    measured = []

    def cost(recipe, place, **options):
        shape, classes = recipe.data.shape, len(recipe.data.class_names)
        measured.append((shape, recipe.network.dimensions, recipe.train.batch, classes))
        return {"step_ms": float(recipe.train.batch * multiply_adds(recipe.network, shape, classes))}

    monkeypatch.setattr(bench, "bench_training", cost)
    rows = growth(tiny(), PLACE, progress=False)
    assert [row["change"] for row in rows] == ["as it is", "resolution x 2", "depth x 2", "batch x 2"]
    assert measured == [
        ((1, 8, 8), (1, 16, 2), 4, 10),
        ((1, 16, 16), (1, 16, 2), 4, 10),
        ((1, 8, 8), (2, 16, 2), 4, 10),
        ((1, 8, 8), (1, 16, 2), 8, 10),
    ]
    assert [row["times_step"] for row in rows] == [row["step_ms"] / rows[0]["step_ms"] for row in rows]
    assert rows[0]["times_step"] == 1
    assert rows[3]["times_step"] == 2


def test_growth_for_real():
    rows = growth(tiny(), PLACE, steps=3, progress=False)
    assert all(row["step_ms"] > 0 for row in rows)


def test_table():
    rows = [
        {
            "change": "as it is",
            "times_step": 1.0,
            "step_ms": 12.3456789,
            "images_per_second": 81234.5,
            "warm_up_s": 9.0,
        },
        {"change": "batch x 2", "times_step": 1.75, "step_ms": 21.0, "mfu": 0.5},
    ]
    assert table(rows, "change").splitlines() == [
        "| change | times_step | step_ms | images_per_second | mfu |",
        "|---|---|---|---|---|",
        "| as it is | 1 | 12.35 | 81,234 |  |",
        "| batch x 2 | 1.75 | 21 |  | 0.5 |",
    ]
