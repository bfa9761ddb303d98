"""How a step is executed changes nothing of what it computes; a gradient that is not finite changes nothing at all."""

import json
import math
import os
from dataclasses import replace

import pytest
import torch
from tiny_recipe import recipe_with
from torch.utils.flop_counter import FlopCounterMode

from mvm import checkpoint
from mvm.distributed.processes import EngineConfig, Processes, determinism, parts_of, precision
from mvm.recipes import load_recipe, override
from mvm.training.data import training_data
from mvm.training.engine import compile_mode
from mvm.training.field_trainer import FieldTrainer
from mvm.training.loop import train

TINY = {
    "network.depth": "2",
    "network.heads": "2",
    "network.width": "16",
    "network.patch": "4",
    "network.inner_block": "1",
    "train.batch": "8",
    "train.steps": "8",
    "train.warmup": "2",
    "train.decay": "linear",
    "train.lr": "5e-3",
    "train.weight_decay": "0.1",
    "train.ema": "0.8",
    "train.log_every": "1",
    "train.save_every": "2",
}


def tiny(**changes):
    return recipe_with(TINY, **changes)


def start(**changes):
    """A trainer with every weight random, so that no gradient is hidden behind a zero gate."""
    recipe = tiny(**changes)
    trainer = FieldTrainer(recipe, training_data(recipe))
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in trainer.learner.parameters():
            parameter.copy_(0.2 * torch.randn(parameter.shape, generator=draw))
    return trainer


def exact(**changes):
    """The same in float64, where an order of sums hardly shows: float32's rounding depends on the machine."""
    trainer = start(**changes)
    forward = trainer.learner.double().forward
    trainer.learner.forward = lambda batch: forward(batch._replace(x0=batch.x0.double()))
    for average in trainer.averages.tensors.values():
        average.update({name: value.double() for name, value in average.items()})
    return trainer


def weights(trainer):
    return {name: value.detach().clone() for name, value in trainer.learner.named()}


def gradients(trainer):
    """Of the current step's batch."""
    trainer.accumulate(trainer.optimizers, trainer.batch(), trainer.engine)
    return {name: value.grad.clone() for name, value in trainer.learner.named()}


def after(trainer, steps):
    """Log values and weights after some steps."""
    for _ in range(steps):
        trainer.advance()
    return [record.values for record in trainer.read()], weights(trainer)


def assert_same(a, b, atol=0.0):
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]) if atol == 0 else torch.allclose(a[name], b[name], rtol=0, atol=atol), name


def assert_same_run(one, other, atol):
    (values, weights), (other_values, other_weights) = one, other
    assert values[0].keys() == {"loss", "inner", "grad_norm", "lr"}
    for mine, theirs in zip(values, other_values, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-5, abs=atol)
    assert_same(weights, other_weights, atol)


# Accumulation


@pytest.mark.parametrize("parts", [2, 3, 8, 20])
def test_accumulation_changes_no_gradient(parts):
    """8 images in 2 + 3 + 3 count as 8 in one go; more parts than images are as many parts as images."""
    found, want = gradients(exact(engine_accumulate=str(parts))), gradients(exact())
    assert max(float(value.abs().max()) for value in want.values()) > 1
    assert_same(found, want, atol=1e-13)


@pytest.mark.parametrize("parts", [2, 3])
def test_accumulation_changes_no_step(parts):
    options = {"train_lr": "5e-4", "train_warmup": "0"}
    assert_same_run(after(exact(**options), 3), after(exact(engine_accumulate=str(parts), **options), 3), atol=1e-9)


def test_accumulation_changes_neither_augmentation_nor_dropout():
    options = {"network_dropout": "0.3", "data_augment": "0.5"}
    found, want = gradients(exact(engine_accumulate="2", **options)), gradients(exact(**options))
    assert float(want["augment.weight"].abs().min()) > 0
    assert_same(found, want, atol=1e-13)
    plain = gradients(exact())
    assert all(not torch.allclose(value, want[name], rtol=0.01) for name, value in plain.items())


def test_a_part_counts_by_its_size(monkeypatch):
    """Were every part to count the same, the mean over 2 + 3 + 3 images would lean to the first two."""
    sizes, trainer = [], start(engine_accumulate="3")
    forward = trainer.learner.forward
    monkeypatch.setattr(trainer.learner, "forward", lambda batch: sizes.append(len(batch.seeds)) or forward(batch))
    gradients(trainer)
    assert sizes == [2, 3, 3]


@pytest.mark.parametrize(("size", "parts"), [(8, 1), (8, 3), (7, 7), (3, 5), (1, 1)])
def test_parts_cover_all_once(size, parts):
    found = [list(range(size))[part] for part in parts_of(size, parts)]
    assert [item for part in found for item in part] == list(range(size))
    assert len(found) == min(size, parts)
    assert max(map(len, found)) - min(map(len, found)) <= 1


# Activations computed again


@pytest.mark.parametrize("keep", ["products", "nothing"])
@pytest.mark.parametrize("share", ["0.5", "1"])
def test_recompute_gives_the_same_bits(share, keep):
    assert_same(gradients(start()), gradients(start(engine_recompute=share, engine_keep=keep)))
    values, found = after(start(engine_recompute=share, engine_keep=keep), 3)
    want, expected = after(start(), 3)
    assert values == want
    assert_same(found, expected)


@pytest.mark.parametrize(("share", "calls"), [("0", [1, 1]), ("0.5", [2, 1]), ("1", [2, 2])])
def test_recompute_runs_that_share_of_the_blocks_twice(share, calls):
    trainer, seen = start(engine_recompute=share, engine_keep="nothing"), [0, 0]
    for number, block in enumerate(trainer.model.network.blocks):
        block.register_forward_pre_hook(lambda *_, number=number: seen.__setitem__(number, seen[number] + 1))
    gradients(trainer)
    assert seen == calls


def test_products_are_kept_or_not():
    def flops(**changes):
        trainer = start(**changes)
        with FlopCounterMode(display=False) as counter:
            trainer.accumulate(trainer.optimizers, trainer.batch(), trainer.engine)
        return counter.get_total_flops()

    plain = flops()
    assert flops(engine_recompute="1", engine_keep="products") == plain
    assert flops(engine_recompute="1", engine_keep="nothing") > 1.1 * plain


@pytest.mark.slow
@pytest.mark.parametrize(("keep", "again"), [("products", 0), ("nothing", 9)])
def test_products_are_kept_or_not_when_blocks_are_compiled(keep, again):
    """A block calls nine: modulation, q, k, v, attention, output, gate, up and down; twice with nothing kept.

    Blocks of a kind share the compiled code: the second is not compiled again.
    """
    options = {"engine_compile": "blocks", "network_inner_block": "0"}
    torch._dynamo.reset()
    eager = exact(network_inner_block="0")
    plain = exact(**options)
    assert_same(gradients(plain), gradients(eager), atol=1e-13)
    trainer = exact(**options, engine_recompute="1", engine_keep=keep)
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert_same(gradients(trainer), gradients(eager), atol=1e-13)
    assert products(trainer) == products(plain) + 2 * again


def products(trainer):
    """How many matrix products and attentions a step calls, forward and backward."""
    called = ("aten::mm", "aten::addmm", "aten::bmm", "aten::_scaled_dot_product_flash_attention_for_cpu")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        gradients(trainer)
    return sum(event.count for event in profile.key_averages() if event.key in called)


# Precision


def test_bf16_trains_close_by_while_weights_stay_float32():
    full, half = start(), start(engine_precision="bf16")
    (a, _), (b, _) = after(full, 4), after(half, 4)
    assert [x["loss"] for x in b] == pytest.approx([x["loss"] for x in a], rel=0.02)
    assert [x["loss"] for x in b] != [x["loss"] for x in a]  # it did happen
    held = [*weights(half).values(), *dict(half.optimizer_state()).values(), *half.averages.tensors["ema"].values()]
    assert {tensor.dtype for tensor in held} == {torch.float32}
    assert {p.grad.dtype for p in half.learner.parameters()} == {torch.float32}


def test_bf16_reaches_the_matrix_products():
    trainer, seen = start(engine_precision="bf16"), []
    trainer.model.network.blocks[0].mlp.register_forward_hook(lambda module, args, out: seen.append(out.dtype))
    gradients(trainer)
    assert seen == [torch.bfloat16]


CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize(
    ("asked", "device", "found"),
    [
        ("auto", CPU, torch.float32),
        ("auto", GPU, torch.bfloat16),
        ("fp32", GPU, torch.float32),
        ("bf16", CPU, torch.bfloat16),
    ],
)
def test_precision(asked, device, found):
    assert precision(EngineConfig(precision=asked), device) is found


# Compilation


@pytest.mark.parametrize(
    ("device", "world", "accumulate", "mode"),
    [
        (CPU, 1, 1, "off"),
        (CPU, 1, 4, "off"),
        (CPU, 4, 1, "off"),
        (GPU, 1, 1, "graph"),
        (GPU, 1, 2, "full"),
        (GPU, 8, 1, "blocks"),
        (GPU, 8, 2, "blocks"),
    ],
)
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_what_auto_compiles(device, world, accumulate, mode, parallel):
    config = EngineConfig(accumulate=accumulate, parallel=parallel)
    assert compile_mode(config, Processes(0, world, device)) == mode


@pytest.mark.parametrize("asked", ["off", "blocks", "full"])
def test_what_is_asked_for_is_compiled(asked):
    for place in (Processes(), Processes(1, 2, CPU), Processes(0, 1, GPU)):
        assert compile_mode(EngineConfig(compile=asked), place) == asked
    assert compile_mode(EngineConfig(compile="graph"), Processes(0, 1, GPU)) == "graph"
    # one process shards nothing, whatever the recipe says
    assert compile_mode(EngineConfig(compile="full", parallel="fsdp"), Processes(0, 1, GPU)) == "full"


@pytest.mark.parametrize(
    ("options", "world", "device", "words"),
    [
        ({"compile": "graph"}, 1, CPU, r"engine\.compile='graph' needs one GPU"),
        ({"compile": "graph"}, 2, GPU, r"engine\.compile='graph' needs one GPU"),
        ({"compile": "graph", "accumulate": 2}, 1, GPU, r"engine\.accumulate=1; use full"),
        ({"compile": "full", "parallel": "fsdp"}, 2, GPU, r"engine\.compile='full' .*'fsdp'; use blocks"),
        ({"compile": "graph", "parallel": "fsdp"}, 2, GPU, r"engine\.compile='graph' .*'fsdp'; use blocks"),
    ],
)
def test_what_cannot_be_compiled_is_refused(options, world, device, words):
    with pytest.raises(ValueError, match=words):
        compile_mode(EngineConfig(**options), Processes(0, world, device))


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["blocks", "full"])
def test_compiled_steps_equal_eager_ones(mode):
    """Gradients up to 2, and weights that moved by 1e-4."""
    options = {"train_lr": "5e-5", "train_warmup": "0"}
    trainer, eager = exact(engine_compile=mode, **options), exact(**options)
    assert trainer.engine.mode == mode
    assert_same(gradients(trainer), gradients(eager), atol=1e-13)
    before = weights(eager)
    assert_same_run(after(eager, 3), after(trainer, 3), atol=1e-9)
    assert all((weights(trainer)[name] - value).abs().max() > 5e-5 for name, value in before.items())
    assert set(weights(trainer)) == set(weights(start()))  # names without a wrapper's prefix


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("compile", "blokcs", r"engine\.compile='blokcs' is unknown \(did you mean 'blocks'\?\)"),
        ("parallel", "dp", r"engine\.parallel='dp'.*ddp, fsdp"),
        ("precision", "fp16", r"engine\.precision='fp16'.*auto, fp32, bf16"),
        ("resident", "gpu", r"engine\.resident='gpu'.*auto, device, host"),
        ("keep", "all", r"engine\.keep='all'.*products, nothing"),
        ("recompute", 1.5, r"engine\.recompute=1\.5"),
        ("recompute", math.nan, r"engine\.recompute=nan"),
        ("accumulate", 0, r"engine\.accumulate=0"),
        ("shard", -1, r"engine\.shard=-1"),
    ],
)
def test_bad_options_are_named(option, value, words):
    with pytest.raises(ValueError, match=words):
        EngineConfig(**{option: value})


def test_shares_of_a_batch():
    shares = [Processes(rank, 3).share(8) for rank in range(3)]
    assert [list(range(8))[share] for share in shares] == [[0, 1], [2, 3, 4], [5, 6, 7]]
    with pytest.raises(ValueError, match=r"train\.batch=2 is smaller than the 3 processes"):
        Processes(0, 3).share(2)


# A gradient that is not finite

OPTIMIZERS = ["adamw", "muon"]


def poison(monkeypatch, *steps, value=math.nan):
    """Make the images of those steps (0-based) not finite."""
    batch = FieldTrainer.batch

    def poisoned(self):
        found = batch(self)
        return found._replace(x0=found.x0 * value) if self.step in steps else found

    monkeypatch.setattr(FieldTrainer, "batch", poisoned)


def copied(tensors):
    return {name: value.clone() for name, value in tensors.items()}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("value", [math.nan, math.inf, 1e30])
@pytest.mark.parametrize("bad", [0, 3])
def test_a_bad_gradient_moves_neither_weights_nor_moments(monkeypatch, optimizer, value, bad):
    """The averages take the step: they come nearer to weights that stayed. 1e30 is finite, the loss is not."""
    poison(monkeypatch, bad, value=value)
    trainer = start(train_optimizer=optimizer)
    after(trainer, bad)
    before, moments = weights(trainer), copied(dict(trainer.optimizer_state()))
    average = copied(trainer.averages.tensors["ema"])
    trainer.advance()
    (record,) = trainer.read()
    assert record.skipped
    assert_same(weights(trainer), before)
    found = dict(trainer.optimizer_state())
    assert_same({name: found[name] for name in moments}, moments)
    if bad == 0:  # no moments were there before
        assert all(not value.any() for value in found.values())
    decay = (1 + bad) / (10 + bad)
    for name, value in trainer.averages.tensors["ema"].items():
        assert torch.allclose(value, decay * average[name] + (1 - decay) * before[name], atol=1e-6), name


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_later_steps_are_those_of_a_run_that_waited_out_the_bad_one(monkeypatch, optimizer):
    """Data order, rate and averages count the step; weights and moments, AdamW's step counter too, do not."""
    waited = start(train_optimizer=optimizer)
    after(waited, 3)
    waited.averages.update(waited.step)
    waited.step += 1
    want = after(waited, 3)
    poison(monkeypatch, 3)
    trainer = start(train_optimizer=optimizer)
    values, found = after(trainer, 7)
    assert [not math.isfinite(value["grad_norm"]) for value in values] == [i == 3 for i in range(7)]
    assert values[4:] == want[0]
    assert_same(found, want[1])
    assert_same(dict(trainer.optimizer_state()), dict(waited.optimizer_state()))
    assert_same(trainer.averages.tensors["ema"], waited.averages.tensors["ema"])
    assert {float(v) for k, v in dict(trainer.optimizer_state()).items() if k.endswith("/step")} == {6}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("value", [math.inf, 1e25])
def test_a_norm_that_overflows_is_a_bad_step(optimizer, value):
    """1e25 is finite, its square is not: clipping by such a norm would make all gradients 0, and moments decay."""
    trainer = start(train_optimizer=optimizer)
    after(trainer, 2)
    before, moments = weights(trainer), copied(dict(trainer.optimizer_state()))
    trainer.model.network.embed.bias.register_hook(lambda gradient: torch.full_like(gradient, value))
    trainer.advance()
    (record,) = trainer.read()
    assert record.values["grad_norm"] == math.inf
    assert_same(weights(trainer), before)
    assert_same(dict(trainer.optimizer_state()), moments)


def test_one_bad_part_of_a_batch_is_a_bad_step(monkeypatch):
    batch = FieldTrainer.batch

    def one_bad_image(self):
        found = batch(self)
        found.x0[-1] = math.nan
        return found

    monkeypatch.setattr(FieldTrainer, "batch", one_bad_image)
    trainer = start(engine_accumulate="4")
    before = weights(trainer)
    trainer.advance()
    assert trainer.read()[0].skipped
    assert_same(weights(trainer), before)


def go(run, steps=8, **options):
    resume = options.pop("resume", False)
    recipe = tiny(train_decay="constant", **options)
    return train(replace(recipe, train=replace(recipe.train, steps=steps)), run, progress=False, resume=resume)


def lines(run):
    found = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key != "images_per_second"} for line in found]


def stored(run):
    folder = checkpoint.latest(run)
    return {part: checkpoint.load(folder, part) for part in ("model", "ema", "optimizer")}


def assert_same_files(one, other):
    assert checkpoint.latest(one).name == checkpoint.latest(other).name
    for part, tensors in stored(one).items():
        assert_same(tensors, stored(other)[part])
    assert lines(one) == lines(other)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_two_in_a_row_are_counted_and_the_run_goes_on(tmp_path, monkeypatch, optimizer):
    poison(monkeypatch, 1, 2, 4)
    go(tmp_path / "run", train_optimizer=optimizer)
    found = lines(tmp_path / "run")
    assert [line["skipped"] for line in found] == [0, 1, 2, 2, 3, 3, 3, 3]
    assert [line["loss"] is None for line in found] == [False, True, True, False, True, False, False, False]
    assert [line["grad_norm"] is None for line in found] == [line["loss"] is None for line in found]
    assert checkpoint.read_manifest(checkpoint.latest(tmp_path / "run"))["window"]["in_a_row"] == 0


def test_a_window_leaves_out_its_bad_steps(tmp_path, monkeypatch):
    poison(monkeypatch, 1, 2)
    go(tmp_path / "each")
    go(tmp_path / "four", train_log_every="4")
    each = [line["loss"] for line in lines(tmp_path / "each")]
    found = lines(tmp_path / "four")
    assert [line["loss"] for line in found] == pytest.approx([(each[0] + each[3]) / 2, sum(each[4:]) / 4], rel=1e-12)
    assert [line["skipped"] for line in found] == [2, 2]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_three_in_a_row_stop_the_run_and_spare_its_checkpoint(tmp_path, monkeypatch, optimizer):
    """Steps 4, 5, 6 (0-based) are bad: the checkpoint after step 6 is whole, and counts two in a row."""
    with monkeypatch.context() as patch:
        poison(patch, 4, 5)
        go(tmp_path / "two bad", train_optimizer=optimizer)
    run = tmp_path / "run"
    with monkeypatch.context() as patch:
        poison(patch, 4, 5, 6)
        with pytest.raises(FloatingPointError, match=r"3 steps in a row, up to step 7 \(loss nan\)") as error:
            go(run, train_optimizer=optimizer)
        for remedy in ("--train.lr", "--train.clip", "--engine.precision fp32", "--resume"):
            assert remedy in str(error.value)
        assert checkpoint.latest(run).name == "step-00000006"
        assert checkpoint.read_manifest(checkpoint.latest(run))["window"]["in_a_row"] == 2
        assert all(bool(torch.isfinite(w).all()) for part in stored(run).values() for w in part.values())
        with pytest.raises(FloatingPointError, match="up to step 7"):  # two before the resume and one after it
            go(run, train_optimizer=optimizer, resume=True)
    go(run, train_optimizer=optimizer, resume=True)
    assert_same_files(run, tmp_path / "two bad")


def test_the_remedies_named_are_accepted(tmp_path, monkeypatch):
    """What the message tells to do on --resume, resume allows."""
    with monkeypatch.context() as patch:
        poison(patch, 4, 5, 6)
        with pytest.raises(FloatingPointError) as error:
            go(tmp_path / "run")
    _, _, resumed = str(error.value).partition("--resume")
    assert "--engine.precision fp32" in resumed
    assert "--train" not in resumed  # other rates are another run, which starts from this one's weights
    assert "--init-from" in str(error.value)
    go(tmp_path / "run", resume=True, engine_precision="fp32")


def test_determinism_is_switched_on_inside_alone(monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    with determinism(EngineConfig()):
        assert not torch.are_deterministic_algorithms_enabled()
        assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ
    with determinism(EngineConfig(deterministic=True)):
        assert torch.are_deterministic_algorithms_enabled()
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert not torch.are_deterministic_algorithms_enabled()


def test_a_run_may_be_deterministic(tmp_path):
    recipe = override(load_recipe("digits"), {**TINY, "train.steps": "2", "engine.deterministic": "true"})
    plain = override(recipe, {"engine.deterministic": "false"})
    weights = [train(r, tmp_path / str(i), progress=False).state_dict() for i, r in enumerate((recipe, plain))]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_kernels_need_a_gpu_and_16_bits(monkeypatch):
    recipe = tiny(engine_kernels="true", engine_precision="fp32")
    images = training_data(recipe)
    with pytest.raises(ValueError, match=r"engine\.kernels=True needs a GPU and Triton"):
        FieldTrainer(recipe, images, Processes())
    monkeypatch.setattr("mvm.network.fast.gpu.gpu_kernels", lambda: object())
    with pytest.raises(ValueError, match=r"does not go with engine\.precision='fp32'; use bf16"):
        FieldTrainer(recipe, images, Processes())
