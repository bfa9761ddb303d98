"""Autoguidance end to end: which weights guide, what it costs, and that records and files tell them apart."""

import json
import re
from dataclasses import asdict, replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import mvm
from mvm import noise
from mvm.cli import run
from mvm.data import digits
from mvm.evaluation import sweep as sweep_module
from mvm.evaluation.cells import Result, combinations
from mvm.evaluation.evaluate import ComparedSet, Judge
from mvm.evaluation.images import of_model, of_tensor
from mvm.evaluation.sweep import Sweep
from mvm.evaluation.sweep_report import guidance_name
from mvm.generate import Draw, Replays, Sampler, require_same_data, solver_of
from mvm.model import Model, load
from mvm.precision import arithmetic
from mvm.published.write import sampler_words
from mvm.recipes import SampleConfig, load_recipe, override
from mvm.samples import sample_parts
from mvm.solver import Auto, ClassifierFree, Interval, adams
from mvm.tasks import Upscale, edited

SETTINGS = SampleConfig(nfe=4, rho=0.5, auto_scale=1.5)
SMALL = {"network.depth": "1", "network.heads": "2", "network.width": "16", "network.patch": "4"}


def untrained(seed, **options):
    """A model of the digits with random weights, which answers with more than zero."""
    model = Model(override(load_recipe("digits"), SMALL | options)).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    return model


@pytest.fixture(scope="module")
def model():
    return load("digits")


@pytest.fixture(scope="module")
def weak():
    """Smaller, on another path, with another kind of prediction."""
    return untrained(0, **{"path.schedule": "linear-flow", "objective.kind": "flow"})


@pytest.fixture(scope="module")
def weak_run(tmp_path_factory):
    """A run of the digits with checkpoints of steps 1 and 2."""
    out = tmp_path_factory.mktemp("weak") / "small"
    options = [token for name, value in SMALL.items() for token in (f"--{name}", value)]
    options += ["--train.steps", "2", "--train.save_every", "1", "--train.batch", "8", "--train.warmup", "0"]
    options += ["--train.keep", "2", "--train.ema", "0.5", "--train.lr", "1e-2", "--preview.every", "0"]
    assert run(["train", "digits", "--out", str(out), "--no-report", *options]) == 0
    return out


def images(sampler, settings, count=6):
    return sampler.images(torch.arange(count), torch.arange(count) + 3, settings, batch=4, progress=False)


def by_hand(model, weak, rules, nfe=4, rho=0.5, count=6):
    """The same images by mvm.sample, one batch of four and one of two."""
    seeds, made = torch.arange(count) + 3, []
    with arithmetic("fp32", model.device):
        for part in (slice(4), slice(4, count)):
            x = noise.initial(seeds[part], model.sample_shape)
            how = {"condition": torch.arange(count)[part], "seeds": seeds[part], "nfe": nfe, "rho": rho}
            made.append(model.codec.decode(mvm.sample(model, x, guidance=rules, solver="adams", **how)))
    return torch.cat(made)


def test_the_settings_are_the_rule_outermost(model, weak):
    inside = Interval(0.2, 0.9)
    rules = [ClassifierFree(2.0, interval=inside), Auto(1.5, weak=weak, interval=inside)]
    settings = SampleConfig("adams", 4, 0.5, 2.0, 0.2, 0.9, auto_scale=1.5)
    assert list(settings.guidance(weak)) == rules
    found = images(Sampler(model, auto=weak), settings)
    assert torch.equal(found.images, by_hand(model, weak, rules))
    assert not torch.equal(found.images, by_hand(model, weak, rules[:1]))
    assert not torch.equal(found.images, by_hand(model, weak, rules[::-1]))


@pytest.mark.parametrize(("cfg", "each"), [(1.0, 2), (2.0, 3)])
def test_every_pass_counts(model, weak, cfg, each):
    sampler = Sampler(model, auto=weak)
    found = images(sampler, replace(SETTINGS, cfg=cfg))
    assert (found.nfe, found.passes) == (4, 4 * each)
    inside = images(sampler, replace(SETTINGS, cfg=cfg, high=0.0))  # the first evaluation alone, at t = 1
    assert (inside.nfe, inside.passes) == (4, 3 + each)


def test_scale_one_is_the_model_alone(model, weak):
    alone = images(Sampler(model), replace(SETTINGS, auto_scale=1.0))
    found = images(Sampler(model, auto=weak), replace(SETTINGS, auto_scale=1.0))
    assert torch.equal(found.images, alone.images)
    assert found.passes == alone.passes == 4


def test_a_model_guides_itself_to_where_it_was(model):
    """weak + w (weak - weak) is weak, whatever w."""
    found = images(Sampler(model, auto=load("digits")), replace(SETTINGS, auto_scale=3.0))
    assert int((found.images.int() - images(Sampler(model), replace(SETTINGS, auto_scale=1.0)).images).abs().max()) <= 1


def test_generate_takes_a_model_or_its_name(model, weak_run):
    options = {"nfe": 3, "auto_scale": 1.5, "progress": False}
    found = model.generate(3, auto=str(weak_run), **options)
    assert torch.equal(found.images, model.generate(3, auto=load(weak_run), **options).images)
    assert found.passes == 6
    assert torch.equal(found.images, mvm.generate("digits", 3, auto=weak_run, **options).images)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"auto": "digits"}, "auto is a model that guides by a scale; give it too, e.g. auto_scale=1.42"),
        ({"auto_scale": 2.0}, "auto_scale=2.0 needs a weaker model of the same data; name it: --auto RUN, or auto= in"),
        ({"auto": "digits", "auto_scale": float("nan")}, "auto_scale=nan is out of range"),
    ],
)
def test_half_of_what_is_needed_is_refused(model, options, words):
    with pytest.raises(ValueError, match=words):
        model.generate(2, progress=False, **options)


def test_no_recipe_has_a_scale():
    with pytest.raises(ValueError, match=r"sample.auto_scale=1.4: a recipe names no weaker model; leave it at 1"):
        override(load_recipe("digits"), {"sample.auto_scale": "1.4"})


def test_times_that_were_tuned_are_of_the_model_alone():
    strong, own = load("digits"), adams(spread=7.0)
    strong.tuned = {(4, ()): SimpleNamespace(solver=own)}
    assert solver_of(strong, SampleConfig(nfe=4)) == own
    assert solver_of(strong, SampleConfig(nfe=4, auto_scale=1.5)) == adams().for_size(64)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"data.name": "cifar10"}, r"samples \(3, 32, 32\), and 'digits', which it is to guide, has \(1, 8, 8\)"),
        (
            {"codec.scale": "2"},
            "codec pixels of uint8, scale 2, and 'digits', which it is to guide, has pixels of uint",
        ),
    ],
)
def test_models_of_other_data_are_refused(model, change, words):
    other = load("cifar10") if "data.name" in change else untrained(0, **change)
    name = other.origin.get("run", "digits")
    with pytest.raises(ValueError, match=rf"auto: '{name}' has {words}.*; give a weaker model of the same data"):
        Sampler(model, auto=other)


def test_models_of_other_classes_or_latents_are_refused(model):
    other = load("digits")
    other.classes = ("0", "1", "two", *other.classes[3:])
    with pytest.raises(ValueError, match="auto: 'digits' has class 2 two, and 'digits', which it is to guide, has 2"):
        require_same_data(model, other)
    other.classes = other.classes[:9]
    with pytest.raises(ValueError, match="has classes 9, and 'digits', which it is to guide, has 10"):
        require_same_data(model, other)


# ---- how it is computed


def test_both_networks_are_compiled_and_each_recording_knows_both(model, monkeypatch):
    """Stand-ins, as in tests/test_replay.py: a recording is kept by the weights of both."""
    strong, first, seen = load("digits"), untrained(1), []
    monkeypatch.setattr("torch.nn.Module.compile", lambda module, **how: seen.append(module))
    sampler = Sampler(strong, compile=True, auto=first)
    assert seen == [strong.network, first.network]
    assert Sampler(untrained(2), auto=first).compiled  # for good
    sampler.replays = Replays(lambda function, examples: function)
    for _ in range(2):
        sampler.batch(torch.arange(3), torch.arange(3), SETTINGS)
    assert len(sampler.replays.seen) == 1
    first.network = untrained(3).network
    sampler.batch(torch.arange(3), torch.arange(3), SETTINGS)
    assert len(sampler.replays.seen) == 2


def test_a_cpu_computes_both_in_the_samplers_precision(model, weak):
    full, coarse = (images(Sampler(model, precision, auto=weak), SETTINGS).images for precision in ("fp32", "int8"))
    kinds = list(map(type, weak.network.modules()))
    with Sampler(model, "int8", auto=weak).computing():
        assert list(map(type, weak.network.modules())) != kinds
    assert list(map(type, weak.network.modules())) == kinds
    assert not torch.equal(full, coarse)


def test_another_device_is_refused(model):
    other = untrained(0).to("meta")
    with pytest.raises(ValueError, match="auto is on meta, the model on cpu; move one"):
        Sampler(model, auto=other)


def test_edits_are_guided_too(model, weak):
    """What is known stays; the weaker model's pass counts at every evaluation."""
    pictures = digits("held-out").images[:2, :, ::2, ::2].contiguous()
    how = {"condition": torch.tensor([3, 4]), "seeds": torch.arange(2), "settings": replace(SETTINGS, rho=1.0)}
    found = edited(Sampler(model, auto=weak), Upscale(2), pictures, **how, progress=False)
    assert found.made.passes == 8
    plain = edited(
        Sampler(model), Upscale(2), pictures, **{**how, "settings": SampleConfig(nfe=4, rho=1.0)}, progress=False
    )
    assert not torch.equal(found.made.images, plain.made.images)


# ---- records and files


def test_parts_say_which_weights_guide_and_are_not_mixed(model, weak_run, tmp_path):
    draw = Draw(6, batch=4)

    def made(which, settings=SETTINGS, auto=weak_run):
        sampler = Sampler(model, auto=load(auto, which=which))
        return sample_parts(sampler, draw, settings, tmp_path / "parts", progress=False)

    told = made("1").provenance()
    assert told["settings"]["auto_scale"] == 1.5
    assert (told["auto"]["run"], told["auto"]["step"], told["auto"]["weights"]) == ("small", 1, "ema")
    assert told["auto"]["sha256"] == load(weak_run, which="1").origin["sha256"]
    with pytest.raises(ValueError, match=r"other values of auto.step \(1, now 2\), auto.sha256 \(\w+, now \w+\);"):
        made("2")
    with pytest.raises(ValueError, match=r"settings.auto_scale \(1.5, now 2.0\)"):
        made("1", replace(SETTINGS, auto_scale=2.0))


def test_weights_that_were_never_stored_have_a_fingerprint(model):
    first, second = (Sampler(model, auto=untrained(seed)).auto_facts(SETTINGS) for seed in (1, 2))
    assert first == Sampler(model, auto=untrained(1)).auto_facts(SETTINGS) != second
    assert Sampler(model, auto=untrained(1)).auto_facts(replace(SETTINGS, auto_scale=1.0)) == {}


def test_parts_from_before_there_was_a_scale_go_on(model, tmp_path):
    plain, draw = replace(SETTINGS, auto_scale=1.0), Draw(6, batch=4)
    parts = sample_parts(Sampler(model), draw, plain, tmp_path / "parts", progress=False)
    path = parts.folder / "samples.json"
    told = json.loads(path.read_text())
    del told["settings"]["auto_scale"]
    path.write_text(json.dumps(told))
    assert sample_parts(Sampler(model), draw, plain, tmp_path / "parts", progress=False) == parts
    with pytest.raises(ValueError, match=r"auto_scale"):
        sample_parts(Sampler(model, auto=load("digits")), draw, SETTINGS, tmp_path / "parts", progress=False)


def test_sampled_sets_say_which_weights_guide(model, weak_run):
    sampler = Sampler(model, auto=load(weak_run))
    facts = of_model(sampler, Draw(4), SETTINGS).facts
    assert facts["auto"] == {name: value for name, value in load(weak_run).origin.items() if name != "tuned"}
    assert "auto" not in of_model(sampler, Draw(4), replace(SETTINGS, auto_scale=1.0)).facts


def test_a_card_names_the_weaker_model():
    words = sampler_words({**asdict(SETTINGS), "auto": "small"})
    assert words == "adams, 4 evaluations, rho 0.5, autoguidance 1.5 by small, guided in [0, 1]"


# ---- sweeps


@pytest.fixture
def swept(model, weak_run, tmp_path, monkeypatch):
    """swept(which, *scales): the results of a sweep guided by a checkpoint, and how many batches were made."""
    monkeypatch.setattr(sweep_module, "write_report", lambda *_: None)
    reference = ComparedSet("digits", of_tensor(digits("held-out").images[:80], "digits", count=80))
    batches, real = [], Sampler.launch
    monkeypatch.setattr(Sampler, "launch", lambda *arguments: batches.append(1) or real(*arguments))

    def check(which, *scales):
        sampler = Sampler(model, auto=None if which is None else load(weak_run, which=which))
        cells = combinations(solver=("adams",), nfe=(2,), rho=(0.0,), auto_scale=scales)
        work = Sweep(sampler, Draw(10, batch=4), Judge(progress=False), reference, ("fd-pixels",), tmp_path / "sweep")
        batches.clear()
        work.run(cells)
        results = [Result.read(json.loads(work._path(cell).read_text())["result"]) for cell in cells]
        return results, len(batches)

    return check


def test_the_scale_is_an_axis_of_an_older_sweep(swept, tmp_path):
    assert swept(None, 1.0)[1] == 3
    results, batches = swept("1", 1.0, 1.5, 2.0)
    assert batches == 2 * 3
    assert [result.settings.auto_scale for result in results] == [1.0, 1.5, 2.0]
    assert [result.passes for result in results] == [2, 4, 4]
    assert swept("1", 1.0, 1.5, 2.0) == (results, 0)
    stored = json.loads((tmp_path / "sweep" / "results.json").read_text())["results"]
    assert sorted(map(repr, map(Result.read, stored))) == sorted(map(repr, results))


def test_other_weights_are_other_cells(swept, weak_run, tmp_path):
    first, _ = swept("1", 1.5)
    second, batches = swept("2", 1.5)
    assert batches == 3
    assert first[0].metrics != second[0].metrics
    assert [found[0].auto.partition(" ")[0] for found in (first, second)] == ["small@1", "small@2"]
    assert guidance_name(first[0]) == f"guidance auto 1.5 by {first[0].auto} everywhere"
    assert swept("1", 1.5) == (first, 0)
    kept = json.loads((tmp_path / "sweep" / "results.json").read_text())
    assert len(kept["results"]) == 2
    digests = {load(weak_run, which=which).origin["sha256"] for which in "12"}
    assert {facts["sha256"] for name, facts in kept["facts"].items() if name.startswith("autoguidance")} == digests


def test_a_sweep_cut_short_goes_on_to_the_same_figures(swept, monkeypatch, tmp_path):
    whole, _ = swept("1", 1.5, 2.0)
    (tmp_path / "sweep").rename(tmp_path / "whole")
    real, count = Sampler.launch, []

    def stop(*arguments):
        count.append(1)
        if len(count) == 5:
            raise KeyboardInterrupt
        return real(*arguments)

    monkeypatch.setattr(Sampler, "launch", stop)
    with pytest.raises(KeyboardInterrupt):
        swept("1", 1.5, 2.0)
    found, _ = swept("1", 1.5, 2.0)
    assert len(count) == 2 * 3 + 1
    assert [result.metrics for result in found] == [result.metrics for result in whole]


def test_a_sweep_without_the_weaker_model_is_refused_before_it_begins(swept, tmp_path):
    with pytest.raises(ValueError, match=r"cell adams-nfe2-rho0-auto1.5-0-1 cannot be sampled: auto_scale=1.5 needs a"):
        swept(None, 1.0, 1.5)
    assert not (tmp_path / "sweep").exists()


# ---- the command


def test_the_command_samples_by_the_checkpoint_named(model, weak_run, tmp_path, capsys):
    out, base = tmp_path / "x.npy", ["sample", "digits", "--num", "6", "--nfe", "4", "--rho", "0.5", "--batch", "4"]
    auto = ["--auto", str(weak_run), "--auto-checkpoint", "1", "--auto-weights", "model", "--auto-scale", "1.5"]
    assert run([*base, *auto, "--out", str(out)]) == 0
    assert "4 evaluations, 8 network passes each" in capsys.readouterr().out
    told = json.loads((tmp_path / "x.npy.json").read_text())
    assert (told["auto"]["run"], told["auto"]["step"], told["auto"]["weights"]) == ("small", 1, "model")
    weak = load(weak_run, "model", "1")
    found = Sampler(model, auto=weak).generate(6, nfe=4, rho=0.5, auto_scale=1.5, batch=4, progress=False)
    assert np.array_equal(np.load(out)[:, :, :, 0], found.images[:, 0].numpy())


@pytest.mark.parametrize("command", ["sample", "sweep", "eval", "compare"])
def test_a_weaker_model_without_a_scale_has_no_effect(command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names = ["digits"] * (1 + (command == "compare"))
    assert run([command, *names, "--num", "4", "--auto", "digits"]) == 2
    told = capsys.readouterr().err.splitlines()[-1]
    assert told == "mvm: --auto digits guides by a scale; give it too, e.g. --auto-scale 1.42"


def test_an_evaluation_and_a_sweep_take_it(weak_run, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    auto = ["--auto", str(weak_run), "--num", "8", "--nfe", "2", "--metrics", "fd-pixels"]
    assert run(["eval", "digits", *auto, "--auto-scale", "1.5", "--json", "x.json"]) == 0
    told = json.loads((tmp_path / "x.json").read_text())["images"]
    assert (told["sampler"]["auto_scale"], told["auto"]["run"]) == (1.5, "small")
    assert run(["sweep", "digits", *auto, "--rho", "0", "--auto-scale", "1,1.5", "--out", "sweep"]) == 0
    page = (tmp_path / "sweep" / "report.html").read_text()
    assert re.search(r"auto 1\.5 by small@2 \[\w{8}\] everywhere", page)
    rows = (tmp_path / "sweep" / "results.csv").read_text().splitlines()
    assert len(rows) == 3
