"""Signals, images that are no squares, volumes and float arrays, with each kind of condition: trained and sampled."""

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tiny_recipe import NETWORK, recipe_with

from mvm import noise
from mvm.bench import bench
from mvm.data import Images
from mvm.distributed.processes import Processes
from mvm.evaluation.images import of_model
from mvm.generate import Draw, Sampler
from mvm.integrations.onnx import export_network
from mvm.latent.codec import require_unit_scale
from mvm.likelihood import log_likelihood
from mvm.model import Model
from mvm.network import ConditionConfig
from mvm.recipes import DataConfig, Recipe, SampleConfig, parse_recipe, to_json
from mvm.solver import Auto, ClassifierFree, Internal
from mvm.solver import sample as draw_samples
from mvm.training.field_trainer import FieldTrainer, fit

OPTIONS = {
    **NETWORK,
    "network.inner_block": "1",
    "network.depth": "2",
    "train.batch": "8",
    "train.steps": "2",
    "preview.every": "2",
    "preview.grid": "4",
    "preview.count": "6",
    "sample.nfe": "3",
    "objective.label_drop": "0.5",
}
COUNT = 24
SPACES = {"signal": (16,), "wide": (8, 12), "volume": (4, 8, 4)}
KINDS = {
    "none": ConditionConfig("none"),
    "vector": ConditionConfig("vector", width=3),
    "image": ConditionConfig("image", width=1),
    "tokens": ConditionConfig("tokens", width=5, length=4),
}


def recipe_of(kind, space, values):
    data = DataConfig(name="folder", path="nowhere", channels=2, space=space, values=values, classes=1)
    return replace(recipe_with(OPTIONS), data=data, condition=KINDS[kind])


def condition_of(kind, space, count=COUNT, seed=1):
    torch.manual_seed(seed)
    match kind:
        case "none":
            return ()
        case "vector":
            return torch.randn(count, 3)
        case "image":
            return torch.rand(count, 1, *space) * 2 - 1
    return {"tokens": torch.randn(count, 4, 5), "mask": torch.rand(count, 4) < 0.7}


def images_of(kind, space, values):
    torch.manual_seed(0)
    samples = torch.randint(0, 256, (COUNT, 2, *space), dtype=torch.uint8)
    samples = samples if values == "uint8" else samples.float() / 50 - 1
    return Images(samples, torch.zeros(COUNT, dtype=torch.int64), ("0",), condition_of(kind, space))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("shape", "values"), [("signal", "float"), ("wide", "uint8"), ("volume", "float")])
def test_it_trains_shows_and_samples(kind, shape, values, tmp_path):
    space = SPACES[shape]
    recipe = recipe_of(kind, space, values)
    trainer = FieldTrainer(recipe, images_of(kind, space, values))
    for _ in range(2):
        trainer.advance()
    trainer.preview(tmp_path)(2)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000002.npy"]  # two channels are no picture
    model = trainer.result(tmp_path, False)
    given = None if kind == "none" else condition_of(kind, space, 5, seed=2)
    guided = {} if kind == "none" else {"cfg": 1.5}
    made = model.generate(5, condition=given, internal=1.5, progress=False, **guided)
    assert made.images.shape == (5, 2, *space)
    assert made.images.dtype == (torch.uint8 if values == "uint8" else torch.float32)
    again = model.generate(
        2, condition=None if given is None else _rows(given, 2), internal=1.5, progress=False, **guided
    )
    assert torch.allclose(made.images[:2].float(), again.images.float(), atol=1 if values == "uint8" else 1e-4)
    made.save(tmp_path / "x.npz")
    with np.load(tmp_path / "x.npz") as found:
        stored = torch.from_numpy(found["arr_0"])
    channels_first = stored.permute(0, 3, 1, 2) if (shape, values) == ("wide", "uint8") else stored
    assert torch.equal(channels_first, made.images)
    with pytest.raises(ValueError, match=r"x\.png is of grey or colour images, and the samples are (float32|uint8)"):
        made.save(tmp_path / "x.png")
    with pytest.raises(ValueError, match="pil"):
        made.pil()
    assert made._repr_png_() is None
    null = model.generate(2, progress=False)
    assert null.condition is None


def _rows(condition, count):
    return {n: v[:count] for n, v in condition.items()} if isinstance(condition, dict) else condition[:count]


@pytest.mark.parametrize("kind", ["vector", "image", "tokens"])
def test_guidance_and_likelihood_take_every_condition(kind):
    space = (4, 8)
    model = Model(recipe_of(kind, space, "float")).eval().requires_grad_(False)
    torch.manual_seed(3)
    for parameter in model.network.parameters():
        parameter.normal_(0, 0.05)
    condition, x = condition_of(kind, space, 3), noise.initial(torch.arange(3), model.sample_shape)
    how = {"nfe": 3, "condition": condition, "seeds": [0, 1, 2]}
    plain = draw_samples(model, x, **how)
    null = draw_samples(model, x, **{**how, "condition": None})
    assert not torch.allclose(plain, null, atol=1e-3)
    for rule in (ClassifierFree(1.7), Auto(1.7, weak=model), Internal(1.7)):
        guided = draw_samples(model, x, guidance=rule, **how)
        assert torch.allclose(guided, plain, atol=1e-4) == isinstance(rule, Auto)
    known, unknown = (log_likelihood(model, plain, steps=3, condition=c, seeds=[0, 1, 2]) for c in (condition, None))
    assert torch.isfinite(known).all()
    assert not torch.allclose(known, unknown)


@pytest.mark.parametrize("kind", ["vector", "image", "tokens"])
def test_a_share_of_training_has_the_null_condition(kind):
    """The gradient of what stands for a missing condition is zero without dropping, and is not with it."""
    space, found = (8, 12), {}
    for share in (0.0, 0.5):
        recipe = recipe_of(kind, space, "uint8")
        recipe = replace(recipe, objective=replace(recipe.objective, label_drop=share))
        data = images_of(kind, space, "uint8")
        if kind == "tokens":
            data.condition["mask"][:] = True
        trainer = FieldTrainer(recipe, data)
        before = trainer.model.network.label.missing.detach().clone()
        with torch.no_grad():
            for parameter in trainer.model.network.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
        trainer.learner(trainer.batch()).total.backward()
        found[share] = trainer.model.network.label.missing.grad
    assert not torch.count_nonzero(found[0.0])
    assert torch.count_nonzero(found[0.5]) == len(before)


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_is_one_graph(kind):
    """What engine.compile "full" and "graph" need: null, dropping and network without a break."""
    space = (8, 12)
    recipe = recipe_of(kind, space, "uint8")
    recipe = replace(recipe, network=replace(recipe.network, depth=1, inner_block=0))
    trainer = FieldTrainer(recipe, images_of(kind, space, "uint8"))
    batch = trainer.batch()
    compiled = torch.compile(trainer.learner, backend="eager", fullgraph=True)
    assert torch.equal(compiled(batch).total, trainer.learner(batch).total)


def test_recipes_of_conditions_and_spaces_go_to_text_and_back():
    for kind in KINDS:
        recipe = recipe_of(kind, (4, 8, 4), "float")
        assert parse_recipe(to_json(recipe), ".json", "x") == recipe


def test_a_recipe_of_an_older_version_has_class_labels():
    older = json.loads(to_json(Recipe()))
    del older["condition"], older["data"]["space"], older["data"]["values"]
    assert parse_recipe(json.dumps(older), ".json", "x") == Recipe()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"condition": ConditionConfig("none"), "sample": SampleConfig(cfg=2.0)}, r"sample\.cfg=2\.0.*'none'"),
        ({"condition": KINDS["image"], "mirror": True}, r"condition\.kind='image'.*data\.mirror"),
        ({"condition": KINDS["image"], "augment": 0.1}, r"condition\.kind='image'.*data\.augment"),
        ({"values": "float", "augment": 0.1}, r"data\.augment is for square images.*float"),
        ({"space": (8, 12), "augment": 0.1}, r"data\.augment is for square images, and the data are 3x8x12"),
        ({"space": (8, 12), "encoder": "dinov2"}, r"repa\.encoder is for square images"),
        ({"space": (8, 0)}, r"data\.space=8,0 must be positive"),
        ({"space": (8, 12), "size": 8}, r"data\.size=8 is the side of squares, and data\.space=8,12"),
        ({"values": "int"}, r"data\.values='int'"),
        (
            {"name": "cifar10", "path": "", "space": (8, 8), "channels": 0},
            r"data\.space belongs to data\.name='folder'",
        ),
        ({"name": "cifar10", "path": "", "values": "float", "channels": 0}, r"data\.values='float' belongs to"),
    ],
)
def test_what_does_not_go_together_is_refused(changes, words):
    recipe = recipe_with(NETWORK)

    def build(condition=recipe.condition, sample=recipe.sample, encoder="", **data):
        data = DataConfig(**{"name": "folder", "path": "nowhere", "channels": 3, **data})
        repa = replace(recipe.repa, encoder=encoder)
        replace(recipe, data=data, repa=repa, condition=condition, sample=sample)

    with pytest.raises(ValueError, match=words):
        build(**changes)


def test_another_condition_starts_anew_from_the_weights_of_a_run():
    """From class labels to text: all is taken but what takes the condition."""
    before = recipe_with(NETWORK)
    now = replace(before, condition=KINDS["tokens"])
    there, own = (dict(Model(replace(r, seed=seed)).network.state_dict()) for seed, r in ((1, before), (0, now)))
    origin = {"run": "x", "step": 1}
    opened = SimpleNamespace(weights=there, recipe=before, classes=before.data.class_names, origin=origin)
    fitted, (line, anew) = fit(own, now, opened)
    assert fitted.keys() == own.keys()
    takers = {name for name in own if name.startswith("label.")}
    assert all(torch.equal(fitted[name], own[name] if name in takers else there[name]) for name in own)
    assert anew == f"made anew: {', '.join(name for name in own if name in takers)}"
    assert line.startswith(f"took {len(own) - len(takers)} of {len(own)} tensors")


def test_a_condition_for_a_model_of_none_is_refused():
    model = Model(recipe_of("none", (16,), "float"))
    with pytest.raises(ValueError, match=r"this model knows none \(condition\.kind='none'\)"):
        model.generate(1, condition=torch.zeros(1, 3), progress=False)
    with pytest.raises(ValueError, match=r"cfg=2\.0: condition\.kind='none' leaves nothing to guide to"):
        model.generate(1, cfg=2.0, progress=False)


def test_a_model_that_saw_no_null_asks_for_a_condition():
    recipe = recipe_of("vector", (16,), "float")
    model = Model(replace(recipe, objective=replace(recipe.objective, label_drop=0.0)))
    with pytest.raises(ValueError, match=r"label_drop=0 trained none; give a condition \(vector\)"):
        model.generate(1, progress=False)
    assert len(model.generate(1, condition=torch.zeros(1, 3), progress=False)) == 1


@pytest.mark.parametrize(
    ("what", "words"),
    [
        (lambda model: of_model(Sampler(model), Draw(2)), "samples are judged as images, and this model makes float"),
        (lambda model: model.require_labels("mvm tune"), r"mvm tune is for models of class labels.*'vector'"),
        (export_network, r"an exported network is for models of class labels"),
        (
            lambda model: require_unit_scale(model.codec, "MVMPipeline"),
            r"data\.values='float': MVMPipeline makes images",
        ),
    ],
)
def test_what_is_for_images_of_classes_says_so(what, words):
    with pytest.raises(ValueError, match=words):
        what(Model(recipe_of("vector", (16,), "float")))


def test_a_model_without_condition_is_judged():
    found = of_model(Sampler(Model(recipe_of("none", (8, 12), "uint8")), None), Draw(3, batch=2))
    indices, images = zip(*found.read(2), strict=True)
    assert torch.cat(indices).tolist() == [0, 1, 2]
    assert torch.cat(images).shape == (3, 2, 8, 12)


def test_without_its_data_a_model_of_text_is_not_judged():
    with pytest.raises(ValueError, match=r"judged by conditions of the training set \(.*write them with mvm sample"):
        of_model(Sampler(Model(recipe_of("tokens", (8, 12), "uint8")), None), Draw(3))


@pytest.mark.parametrize("kind", KINDS)
def test_speed_is_measured_with_random_conditions(kind):
    found = bench(recipe_of(kind, (8, 12), "uint8"), Processes(), steps=5, num=2, progress=False)
    assert found["tokens"] == 6
    assert found["training"]["step_ms"] > 0
    assert found["sampling"]["images"] == 2
