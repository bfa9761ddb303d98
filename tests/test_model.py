"""The model users hold: what it loads, what it answers, what it says when it cannot."""

import json
import math
import shutil

import pytest
import torch

import mvm
from mvm import checkpoint, likelihood, noise
from mvm.checkpoint import DamagedCheckpoint
from mvm.data import digits
from mvm.model import Model, choose_device, load, shipped_models
from mvm.path import LinearFlow, MeanVelocity, VariancePreserving
from mvm.published import export
from mvm.recipes import load_recipe, override
from mvm.solver import ClassifierFree, Internal, sample
from mvm.training.data import training_data
from mvm.training.loop import train

TINY = {
    "network.depth": "2", "network.heads": "2", "network.width": "16", "network.patch": "4", "train.batch": "16",
    "train.steps": "3", "train.lr": "1e-2", "train.warmup": "0", "train.ema": "0.5",
}  # fmt: skip


def tiny(**changes):
    dotted = {name.replace("_", ".", 1): value for name, value in changes.items()}
    return override(load_recipe("digits"), {**TINY, **dotted})


def shaken(recipe):
    """A model whose every weight is random, so that it answers something."""
    model = Model(recipe).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(0)
    for parameter in model.network.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return model


def inputs(count=4):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(count, 1, 8, 8, generator=generator)
    return x, torch.linspace(0.1, 1, count, dtype=torch.float64), torch.arange(count)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "run"
    train(tiny(), folder, progress=False)
    return folder


def test_load_gives_the_averaged_weights_unless_told(run):
    for name in ("ema", "model"):
        weights = checkpoint.load(checkpoint.latest(run), name)
        model = load(run, name)
        assert not model.training
        found = dict(model.network.named_parameters())
        assert found.keys() == weights.keys()
        assert all(torch.equal(found[key], weights[key]) for key in weights)
        assert not any(p.requires_grad for p in found.values())
    assert torch.equal(load(run).network.embed.weight, load(run, "ema").network.embed.weight)
    assert not torch.equal(load(run, "model").network.head.linear.weight, load(run).network.head.linear.weight)


def test_loaded_model_is_the_one_trained(run, tmp_path):
    trained = train(tiny(), tmp_path / "again", progress=False)
    loaded = mvm.load(str(run))
    x, t, labels = inputs()
    assert torch.equal(loaded(x, t, labels), trained(x, t, labels))
    assert loaded.recipe == tiny()
    assert (loaded.sample_shape, loaded.num_classes) == ((1, 8, 8), 10)
    assert loaded.classes == digits().classes


def stored(run, step, name="ema"):
    return checkpoint.load(checkpoint.step_folder(run, step), name)["head.linear.weight"]


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    """A run with a checkpoint after each of its three steps, and several averages."""
    folder = tmp_path_factory.mktemp("model") / "three"
    train(tiny(train_save_every="1", train_keep="3", train_ema="0.5,0.1", train_power="0.1"), folder, progress=False)
    return folder


def test_newest_checkpoint_is_loaded(three, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(three, run)
    assert torch.equal(load(run).network.head.linear.weight, stored(three, 3))
    shutil.rmtree(checkpoint.latest(run))
    assert torch.equal(load(run).network.head.linear.weight, stored(three, 2))
    assert not torch.equal(stored(three, 3), stored(three, 2))


def test_which_checkpoint(three):
    for step in (1, 2, 3):
        assert torch.equal(load(three, which=str(step)).network.head.linear.weight, stored(three, step))
    assert torch.equal(load(three, which="latest").network.head.linear.weight, stored(three, 3))
    with pytest.raises(ValueError, match=r"three holds a recipe but no checkpoint '4' yet"):
        load(three, which="4")
    with pytest.raises(ValueError, match=r"no checkpoint 'best'"):  # nothing was judged
        load(three, which="best")
    with pytest.raises(ValueError, match=r"checkpoint='newest'.*latest, best, or a step number"):
        load(three, which="newest")


def test_best_checkpoint_is_the_one_of_least_quality_figure(three, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(three, run)
    for step, quality in ((1, 3.0), (2, 1.5)):  # the third was not judged
        path = checkpoint.step_folder(run, step) / "manifest.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "quality": quality}))
    assert torch.equal(load(run, which="best").network.head.linear.weight, stored(three, 2))


def test_other_averages_are_loaded_by_name(three):
    names = ("ema", "ema-0.1", "power-0.1", "model")
    found = {name: load(three, name).network.head.linear.weight for name in names}
    for name in names:
        assert torch.equal(found[name], stored(three, 3, name))
    assert len({tuple(weight.flatten().tolist()) for weight in found.values()}) == len(names)
    with pytest.raises(ValueError, match=r"weights='ema-0\.5': .* it has: ema-0\.1, ema, model, power-0\.1$"):
        load(three, "ema-0.5")  # the first decay is "ema"


def test_model_is_a_field():
    """x0_hat = x + sqrt(t) u."""
    model = shaken(tiny())
    x, t, labels = inputs()
    u = model.network(x, torch.sqrt(t), labels).prediction
    want = x + torch.sqrt(t).float().reshape(-1, 1, 1, 1) * u
    assert torch.allclose(model(x, t, labels), want, atol=1e-6)
    assert model(x.double(), t, labels).dtype == torch.float64


def test_no_condition_is_the_null_class():
    model = shaken(tiny())
    x, t, labels = inputs()
    assert torch.equal(model(x, t), model(x, t, torch.full((4,), 10)))
    assert not torch.allclose(model(x, t), model(x, t, labels), atol=1e-3)


@pytest.mark.parametrize(
    ("schedule", "kind", "path"),
    [("linear-flow", "flow", LinearFlow()), ("variance-preserving", "diffusion_v", VariancePreserving()),
     ("mean-velocity", "x0", MeanVelocity())],
)  # fmt: skip
def test_other_paths_and_kinds(schedule, kind, path):
    model = shaken(tiny(objective_kind=kind, path_schedule=schedule))
    assert model.schedule == path
    x, t, labels = inputs()
    answer = model.network(x, path.level(t), labels).prediction
    shape = (-1, 1, 1, 1)
    alpha, sigma = path.alpha(t).float().reshape(shape), path.sigma(t).float().reshape(shape)
    want = {
        "flow": x - t.float().reshape(shape) * answer,  # x = x0 + t (eps - x0)
        "diffusion_v": (alpha * x - sigma * answer) / (alpha**2 + sigma**2),
        "x0": answer,
    }[kind]
    assert torch.allclose(model(x, t, labels), want, atol=1e-5)


@pytest.mark.parametrize("solver", ["adams", "sa", "heun"])
@pytest.mark.parametrize("kind", ["x0", "diffusion_v", "u"])
def test_T_rescales_time_alone(kind, solver):
    """Equal networks answer alike at equal signal-to-noise ratio; u is 1/sqrt(T) of that at T = 1."""
    one, two = (shaken(tiny(objective_kind=kind, path_T=T)) for T in ("1", "2"))
    assert (one.schedule, two.schedule) == (MeanVelocity(), MeanVelocity(2.0))
    if kind == "u":
        for parameter in two.network.head.linear.parameters():
            parameter /= math.sqrt(2)
    x, t, labels = inputs()
    assert torch.allclose(two(x, 2 * t, labels), one(x, t, labels), atol=1e-5)
    images = [sample(m, x, schedule=m.schedule, condition=labels, solver=solver, nfe=6) for m in (one, two)]
    assert torch.allclose(images[1], images[0], atol=1e-4)


def test_T_in_training_export_and_load(tmp_path):
    """An x0 network is trained alike whatever T: the same loss at the same draws; what is kept knows its T."""
    few = {"objective_kind": "x0", "train_steps": "1", "train_log_every": "1"}
    for T in ("1", "2"):
        train(tiny(path_T=T, **few), tmp_path / T, progress=False)
    one, two = load(tmp_path / "1", "model"), load(tmp_path / "2", "model")
    assert two.schedule == MeanVelocity(2.0)
    pairs = zip(one.network.parameters(), two.network.parameters(), strict=True)
    assert all(torch.allclose(a, b, atol=1e-4) for a, b in pairs)
    losses = [json.loads((tmp_path / T / "metrics.jsonl").read_text().splitlines()[0])["loss"] for T in ("1", "2")]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    export(tmp_path / "2", tmp_path / "out")
    assert load(tmp_path / "out").schedule == MeanVelocity(2.0)
    assert "- Path: mean-velocity, T = 2; the network learns x0." in (tmp_path / "out" / "README.md").read_text()


def test_pair_is_both_heads_of_one_pass():
    model = shaken(tiny(network_inner_block="1"))
    x, t, labels = inputs()
    outer, inner = model.pair(x, t, labels)
    assert torch.equal(outer, model(x, t, labels))
    output = model.network(x, torch.sqrt(t), labels)
    assert torch.allclose(inner, x + torch.sqrt(t).float().reshape(-1, 1, 1, 1) * output.inner, atol=1e-6)
    assert not torch.allclose(inner, outer, atol=1e-3)
    guided = mvm.sample(model, x, nfe=4, condition=labels, seeds=range(4), guidance=Internal(1.5))
    plain = mvm.sample(model, x, nfe=4, condition=labels, seeds=range(4))
    assert not torch.allclose(guided, plain, atol=1e-3)


def test_pair_without_inner_head_says_how_to_get_one():
    model = shaken(tiny())
    x, t, labels = inputs()
    with pytest.raises(ValueError, match=r"--network\.inner_block"):
        model.pair(x, t, labels)
    with pytest.raises(ValueError, match=r"--network\.inner_block"):
        mvm.sample(model, x, nfe=3, condition=labels, guidance=Internal(1.5))


def test_an_untrained_model_says_the_image_is_the_state():
    """u = 0 at the start: x0_hat = x."""
    model = Model(tiny())
    x, t, labels = inputs()
    assert torch.equal(model(x, t, labels), x)


def test_building_leaves_the_global_generator_alone():
    state = torch.random.get_rng_state()
    a, b = Model(tiny()), Model(tiny())
    assert torch.equal(torch.random.get_rng_state(), state)
    assert torch.equal(a.network.embed.weight, b.network.embed.weight)
    assert not torch.equal(a.network.embed.weight, Model(tiny(seed="1")).network.embed.weight)


def test_training_data():
    assert torch.equal(training_data(tiny()).images, digits("train").images)
    assert torch.equal(training_data(tiny(), "held-out").images, digits("held-out").images)


# --- shipped models ---------------------------------------------------------------------------------------------


def test_shipped_models_load_and_draw_digits():
    assert "digits" in shipped_models()
    for name in shipped_models():
        model = load(name)
        labels = torch.arange(model.num_classes)
        x = mvm.noise.initial(torch.arange(model.num_classes), model.sample_shape)
        images = mvm.sample(model, x, nfe=13, condition=labels)
        assert bool(torch.isfinite(images).all())


def test_shipped_digits_are_what_was_asked_for():
    """Nearest training digit to each sample: nearly always of the class asked for."""
    model, data = load("digits"), digits("train")
    labels = torch.arange(100) % 10
    x = mvm.noise.initial(torch.arange(100), model.sample_shape)
    images = model.codec.decode(mvm.sample(model, x, nfe=13, condition=labels))
    distance = torch.cdist(images.flatten(1).float(), data.images.flatten(1).float())
    found = data.labels[distance.argmin(1)]
    assert float((found == labels).double().mean()) > 0.9


def test_a_run_directory_goes_before_a_shipped_name(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(run, tmp_path / "digits")
    assert load("digits").recipe == tiny()


def test_unknown_name_suggests_a_shipped_one():
    with pytest.raises(ValueError, match=r"'digts' is neither .* \(did you mean 'digits'\?\); shipped: .*digits"):
        load("digts")
    with pytest.raises(ValueError, match=r"'qqqqqqqq' is neither a run directory \(no recipe\.json in it\)"):
        load("qqqqqqqq")


def test_unknown_weights(run):
    with pytest.raises(ValueError, match=r"weights='emma': .*run has no such weights; it has: ema, model$"):
        load(run, "emma")
    with pytest.raises(ValueError, match=r"weights='optimizer'"):  # in the checkpoint, but no weights
        load(run, "optimizer")


def test_run_without_checkpoint(run, tmp_path):
    shutil.copy(run / "recipe.json", tmp_path / "recipe.json")
    with pytest.raises(ValueError, match="no checkpoint"):
        load(tmp_path)


def test_folder_that_is_no_run(tmp_path):
    with pytest.raises(ValueError, match=r"no recipe\.json"):
        load(tmp_path)


@pytest.mark.parametrize("weights", ["ema", "model"])
def test_damaged_weights_are_named(run, tmp_path, weights):
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    path = checkpoint.latest(copy) / f"{weights}.safetensors"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)
    with pytest.raises(DamagedCheckpoint, match=rf"{weights}\.safetensors is damaged"):
        load(copy, weights)
    load(copy, "model" if weights == "ema" else "ema")


def test_damaged_recipe_is_named(run, tmp_path):
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    stored = json.loads((copy / "recipe.json").read_text())
    stored["train"]["stepps"] = 3
    (copy / "recipe.json").write_text(json.dumps(stored))
    with pytest.raises(ValueError, match=r"recipe\.json.*'train\.stepps'.*'train\.steps'"):
        load(copy)


def test_weights_of_another_network_are_refused_by_name(run, tmp_path):
    """The recipe says one width, the checkpoint holds another: a ValueError that names the run, no torch internals."""
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    stored = json.loads((copy / "recipe.json").read_text())
    stored["network"]["width"] = 32
    (copy / "recipe.json").write_text(json.dumps(stored))
    with pytest.raises(ValueError, match="run"):
        load(copy)


def test_device():
    assert choose_device("cpu") == torch.device("cpu")
    assert choose_device("auto").type in ("cpu", "cuda")
    for wrong in ("gpu", "cuda:99", ""):
        with pytest.raises(ValueError, match=f"device='{wrong}'"):
            choose_device(wrong)
    assert Model(tiny()).device == torch.device("cpu")


def test_likelihood_of_an_untrained_model():
    """u = 0 makes the flow dx/dc = -c x: x_1 = x exp(-a), log p = log N(x_1) - d a, a = (1 - t_min)/2."""
    model = Model(tiny()).eval()
    x = torch.randn(3, 1, 8, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    a = (1 - likelihood.T_MIN) / 2
    want = -0.5 * (x**2).flatten(1).sum(1) * math.exp(-2 * a) - 32 * math.log(2 * math.pi) - 64 * a
    found = likelihood.log_likelihood(model, x, condition=torch.arange(3), seeds=range(3))
    assert found.tolist() == pytest.approx(want.tolist(), abs=1e-3)
    assert torch.allclose(likelihood.encode(model, x, nfe=200), x * math.exp(-a), atol=1e-3)


def test_a_null_class_that_was_never_trained_is_not_asked():
    """By whatever way: without labels, or as what classifier-free guidance goes from."""
    model = shaken(tiny(objective_label_drop="0"))
    x, labels = noise.initial(torch.arange(3), model.sample_shape), torch.tensor([1, 2, 3])
    words = r"condition=None is the null class, and objective\.label_drop=0 trained none; give class labels"
    assert sample(model, x, nfe=2, condition=labels).isfinite().all()
    with pytest.raises(ValueError, match=words):
        sample(model, x, nfe=2)
    with pytest.raises(ValueError, match=words):
        sample(model, x, nfe=2, condition=labels, guidance=ClassifierFree(2.0))
    with pytest.raises(ValueError, match=words):
        model.both(x, torch.full((3,), 0.5, dtype=torch.float64), labels)


def test_a_model_trained_without_labels_knows_none():
    model = shaken(tiny(objective_label_drop="1"))
    taught = shaken(tiny(objective_label_drop="0.1"))  # the same weights
    x, t = noise.initial(torch.arange(3), model.sample_shape), torch.full((3,), 0.5, dtype=torch.float64)
    labels = torch.tensor([1, 2, 3])
    assert torch.equal(model(x, t, labels), model(x, t))
    assert torch.equal(taught(x, t), model(x, t))
    assert not torch.equal(taught(x, t, labels), model(x, t, labels))
