"""Latents end to end: prepared images -> autoencoder -> cached latents -> DDT -> samples -> pictures -> a figure."""

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from mvm import noise
from mvm.app.edit import EditForm, drawn_picture
from mvm.app.service import FILM, PROBLEM, Service, Shelf, Turn
from mvm.cli import run
from mvm.data import open_prepared
from mvm.data.prepare import prepare
from mvm.distributed.processes import EngineConfig
from mvm.generate import Sampler
from mvm.latent import RAE, Decoder, EncoderConfig, load_decoder_only, load_latent_encoder, load_rae, measure
from mvm.model import Model, load
from mvm.network import DDTConfig
from mvm.network.layers import rotary_table
from mvm.objective import ObjectiveConfig
from mvm.optim.optimizers import TrainConfig
from mvm.recipes import (
    CodecConfig,
    DataConfig,
    Recipe,
    SampleConfig,
    load_recipe,
    override,
    parse_recipe,
    to_json,
)
from mvm.solver.sampling import solve
from mvm.solver.sharing import SharingPlan, best_steps, shared, similarity
from mvm.training.data import training_store
from mvm.training.field_trainer import FieldTrainer
from mvm.training.loop import train

COUNT = 40


@pytest.fixture
def data(tmp_path):
    """Random colour pictures of two classes, prepared."""
    draw = np.random.default_rng(0)
    np.savez(
        tmp_path / "raw.npz", images=draw.integers(0, 256, (COUNT, 16, 16, 3), np.uint8), labels=np.arange(COUNT) % 2
    )
    prepare(tmp_path / "raw.npz", tmp_path / "data", size=16, workers=1, progress=False)
    return tmp_path / "data"


@pytest.fixture
def autoencoder(make_rae, encoders, data, tmp_path):
    """A folder with an untrained decoder and true statistics."""
    make_rae(encoders(layers="last-2"), open_prepared(data).load().images).save(tmp_path / "rae")
    return tmp_path / "rae"


@pytest.fixture
def recipe(data, autoencoder):
    return Recipe(
        name="latent",
        data=DataConfig("folder", str(data), mirror=True, channels=3, size=16, classes=2),
        codec=CodecConfig("rae", str(autoencoder), channels=16, side=4),
        network=DDTConfig("tiny", depth=2, width=16, heads=2, inner_block=1, head_width=32, head_heads=2),
        objective=ObjectiveConfig("u"),
        train=TrainConfig(steps=4, batch=8, lr=1e-2, warmup=0, ema=(0.5,), save_every=2),
        sample=SampleConfig(nfe=5),
    )


def weights(model):
    return model.network.state_dict()


def test_512_pixels_from_encoder_to_picture(tmp_path):
    """The two recipes with tiny widths: 448 pixels of the encoder are 32 x 32 tokens, all of them told apart."""
    transformers = pytest.importorskip("transformers", reason="needs mean-velocity-matching[encoders]")
    small = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "num_register_tokens": 3}
    config = transformers.Dinov2WithRegistersConfig(**small, image_size=518, patch_size=14)  # positions of 37 x 37
    transformers.Dinov2WithRegistersModel(config).save_pretrained(tmp_path / "encoder")
    first = override(
        load_recipe("imagenet512-rae-stage1"), {"encoder.name": str(tmp_path / "encoder"), "decoder.size": "tiny"}
    )
    encoder = load_latent_encoder(first.encoder)
    pictures = torch.randint(
        0, 256, (2, *first.data.shape), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )
    statistics = measure(encoder, pictures, batch=1, progress=False).result(encoder.origin)
    rae = RAE(encoder, Decoder(first.decoder, encoder.latent_shape, encoder.origin), statistics).eval()
    assert rae.latent_shape == (16, first.side, first.side) == (16, 32, 32)

    tiny = {"depth": "2", "width": "16", "heads": "2", "head_depth": "1", "head_width": "16", "head_heads": "2"}
    published = load_recipe("imagenet512-ddt-xl")
    assert published.path.law.shift_dimension == math.prod(published.sample_shape) == 768 * 32 * 32
    recipe = override(published, {f"network.{name}": value for name, value in tiny.items()} | {"codec.channels": "16"})
    model = Model(recipe, codec=rae).eval()
    found = Sampler(model).images(torch.tensor([7]), torch.tensor([0]), SampleConfig(nfe=2), progress=False)
    assert found.images.shape == (1, 3, 512, 512)
    angles = rotary_table((32, 32), 8)
    assert len(angles.unique(dim=0)) == 1024


def test_a_weaker_model_in_other_latents_is_refused(recipe, make_rae, encoders, data, tmp_path):
    """Of one shape: the fingerprints of encoder and statistics tell them apart, another decoder does not matter."""
    pictures = open_prepared(data).load().images
    model = Model(recipe)
    for name, encoder, seed in (("decoder", {}, 5), ("statistics", {"seed": 1}, 0)):
        make_rae(encoders(layers="last-2", **encoder), pictures, seed).save(tmp_path / name)
    decoder, statistics = (
        Model(replace(recipe, name=name, codec=replace(recipe.codec, path=str(tmp_path / name))))
        for name in ("decoder", "statistics")
    )
    Sampler(model, auto=decoder)
    ours, theirs = (each.codec.identity["codec"][:12] for each in (model, statistics))
    said = f"auto: 'statistics' has latents of fingerprint {theirs}, and 'latent', which it is to guide, has {ours};"
    with pytest.raises(ValueError, match=said):
        Sampler(model, auto=statistics)


def test_autoguidance_over_internal_guidance_with_a_shared_backbone(recipe):
    """Two passes an evaluation: of the model with its inner head, and of the weaker model, which shares nothing."""
    model, weak = (Model(replace(recipe, seed=seed)).eval() for seed in (0, 1))
    settings = SampleConfig(nfe=6, internal=1.5, auto_scale=1.5, share=0.5)
    calls = []
    weak.network.register_forward_hook(lambda *_: calls.append(1))
    found = Sampler(model, auto=weak).images(torch.tensor([0, 1]), torch.arange(2), settings, progress=False)
    assert (found.nfe, found.passes, len(calls)) == (6, 12, 6)


def test_four_steps_are_two_and_two(recipe, tmp_path):
    whole = train(recipe, tmp_path / "whole", progress=False)
    train(recipe, tmp_path / "parts", until=2, progress=False)
    parts = train(recipe, tmp_path / "parts", resume=True, progress=False)
    assert all(torch.equal(weights(whole)[name], value) for name, value in weights(parts).items())
    fresh = weights(Model(recipe))
    assert any(not torch.equal(fresh[name], value) for name, value in weights(whole).items())


def test_from_the_command_line_to_a_figure(recipe, tmp_path, capsys):
    (tmp_path / "recipe.json").write_text(to_json(recipe))
    out = str(tmp_path / "run")
    assert run(["train", str(tmp_path / "recipe.json"), "--out", out, "--device", "cpu"]) == 0
    picture = ["sample", out, "--num", "4", "--internal", "1.45", "--rho", "1", "--out", str(tmp_path / "x.npy")]
    assert run([*picture, "--device", "cpu"]) == 0
    assert np.load(tmp_path / "x.npy").shape == (4, 16, 16, 3)
    assert run(["eval", out, "--num", "12", "--metrics", "fd-pixels", "--device", "cpu"]) == 0
    assert "fd-pixels" in capsys.readouterr().out
    sweep = ["sweep", out, "--num", "8", "--nfe", "2", "--rho", "0", "--metrics", "fd-pixels"]
    assert run([*sweep, "--internal", "1,1.45", "--out", str(tmp_path / "sweep"), "--device", "cpu"]) == 0
    assert (tmp_path / "sweep" / "cells" / "adams-nfe2-rho0-internal1.45-0-1.json").is_file()
    assert run([*sweep, "--share", "0,0.5", "--out", str(tmp_path / "sharing"), "--device", "cpu"]) == 0
    assert "adams, 50% shared" in (tmp_path / "sharing" / "results.csv").read_text()


def test_batches_are_latents_of_mirrored_images(recipe):
    for cache in ("device", "disk", "none"):
        chosen = replace(recipe, codec=replace(recipe.codec, cache=cache))
        trainer = FieldTrainer(chosen, training_store(chosen, torch.device("cpu")))
        batch = trainer.batch()
        if cache == "none":
            live = batch
        assert batch.x0.shape == (8, 16, 4, 4)
    for cache in ("device", "disk"):
        chosen = replace(recipe, codec=replace(recipe.codec, cache=cache))
        batch = FieldTrainer(chosen, training_store(chosen, torch.device("cpu"))).batch()
        assert torch.equal(batch.condition, live.condition)
        assert torch.equal(batch.seeds, live.seeds)
        assert torch.allclose(batch.x0, live.x0, rtol=2e-3, atol=2e-3)  # float16


@pytest.mark.parametrize(("precision", "dtype"), [("auto", torch.float32), ("bf16", torch.bfloat16)])
def test_images_are_encoded_in_the_precision_of_the_engine(recipe, precision, dtype):
    """Matrix products alone: norms and statistics stay float32, as does what comes of them."""
    chosen = replace(recipe, codec=replace(recipe.codec, cache="none"), engine=EngineConfig(precision=precision))
    trainer, products = FieldTrainer(chosen, training_store(chosen, torch.device("cpu"))), set()
    for module in trainer.model.codec.modules():
        if isinstance(module, torch.nn.Linear | torch.nn.Conv2d):
            module.register_forward_hook(lambda module, given, out: products.add(out.dtype))
    images = trainer.store[torch.arange(COUNT)]
    found, exact = trainer.encode(images), trainer.model.codec.encode(images)
    assert found.dtype == trainer.batch().x0.dtype == torch.float32
    assert torch.equal(found, exact) == (dtype == torch.float32)
    assert (found - exact).std() < 0.1  # of latents of variance 1
    products.clear()
    trainer.batch()
    assert products == {dtype}


def shaken(recipe):
    model = Model(recipe).eval().requires_grad_(False)
    draw = torch.Generator().manual_seed(0)
    for parameter in model.network.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=draw) * 0.2)
    return model


@pytest.mark.parametrize("settings", [{}, {"rho": 1.0}, {"cfg": 2.0}, {"internal": 1.45}], ids=str)
def test_encoder_sharing(recipe, settings):
    model, config = shaken(recipe), SampleConfig(nfe=6, **settings)
    seeds, labels = torch.arange(3), torch.tensor([0, 1, 0])
    x = noise.initial(seeds, model.sample_shape)
    options = {"schedule": model.schedule, "nfe": 6, "rho": config.rho, "guidance": config.guidance(), "seeds": seeds}
    plain = solve(model, x, condition=labels, **options).x
    with shared(model, SharingPlan(6, tuple(range(6)))) as every:
        assert torch.equal(solve(every, x, condition=labels, **options).x, plain)
    steps = best_steps(similarity(model, x, condition=labels, nfe=6), 3)
    with shared(model, SharingPlan(6, steps)) as some:
        other = solve(some, x, condition=labels, **options).x
    assert some.evaluations == 6
    assert not torch.equal(other, plain)
    assert torch.isfinite(other).all()


def test_half_of_the_backbone_is_spared_on_request(recipe):
    model, labels, seeds = shaken(recipe), torch.tensor([0, 1]), torch.arange(2)
    calls = []
    model.network.blocks[0].register_forward_hook(lambda *_: calls.append(1))
    half, sampler = SampleConfig(nfe=6, share=0.5), Sampler(model)
    for _ in range(2):  # the steps are chosen once, by a run that computes all
        sampler.images(labels, seeds, half, progress=False)
    assert len(calls) == 6 + 3 + 3
    with pytest.raises(ValueError, match=r"share=1\.0"):
        SampleConfig(share=1.0)
    with pytest.raises(ValueError, match=r"share=0\.5 .* adaptive"):
        SampleConfig("adaptive", share=0.5)


def test_images_depend_on_their_seed_alone(recipe):
    model = shaken(recipe)
    labels, seeds = torch.tensor([0, 1, 0, 1]), torch.arange(4)
    together = Sampler(model).images(labels, seeds, recipe.sample, progress=False).images
    alone = Sampler(model).images(labels, seeds, recipe.sample, batch=1, progress=False).images
    assert (together.int() - alone.int()).abs().max() <= 1


def test_a_recipe_comes_back(recipe, tmp_path):
    assert parse_recipe(to_json(recipe), ".json", "x") == recipe


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"channels": 8}, r"makes latents \(16, 4, 4\), the recipe has \(8, 4, 4\)"),
        ({"path": ""}, r"needs codec\.path"),
        ({"path": "nowhere"}, "holds no autoencoder"),
    ],
)
def test_codecs_that_do_not_fit(recipe, change, words):
    with pytest.raises(ValueError, match=words):
        Model(replace(recipe, codec=replace(recipe.codec, **change)))


def test_a_run_is_loaded_with_its_codec(recipe, tmp_path):
    train(recipe, tmp_path / "run", progress=False)
    model = load(tmp_path / "run")
    assert model.sample_shape == (16, 4, 4)
    assert model.codec.decode(torch.zeros(2, 16, 4, 4)).shape == (2, 3, 16, 16)


def test_a_run_holds_what_decodes_its_samples(recipe, autoencoder, tmp_path):
    """Moved to where the autoencoder is not, it draws the same."""
    trained = train(recipe, tmp_path / "runs" / "run", until=2, progress=False)
    train(recipe, tmp_path / "runs" / "run", resume=True, progress=False)
    images = load(tmp_path / "runs" / "run").generate(2, progress=False).images
    shutil.move(tmp_path / "runs" / "run", tmp_path / "elsewhere" / "run")
    shutil.rmtree(autoencoder)
    found = load(tmp_path / "elsewhere" / "run")
    assert found.codec.identity == trained.codec.identity
    assert torch.equal(found.generate(2, progress=False).images, images)


def test_both_halves_are_compiled(recipe, monkeypatch):
    """The compiler takes half a minute here; a stand-in counts what it is given."""
    called = []

    def compiled(call, **options):
        def counted(*arguments):
            called.append(call.__name__)
            return call(*arguments)

        return counted

    model, labels, seeds = shaken(recipe), torch.tensor([0, 1]), torch.arange(2)
    plain = Sampler(model).images(labels, seeds, SampleConfig(nfe=4), progress=False).images
    monkeypatch.setattr(torch, "compile", compiled)
    compiled_one = Sampler(model, compile=True)
    assert torch.equal(compiled_one.images(labels, seeds, SampleConfig(nfe=4), progress=False).images, plain)
    assert called == ["condition", "head"] * 4


def test_only_what_encodes_pictures_needs_the_encoder(recipe, folders, make_rae, data, tmp_path, monkeypatch, capsys):
    """The encoder's folder is gone, as where a run was copied from another machine: samples and their figures are the
    same, and an edit says what is missing."""
    monkeypatch.chdir(tmp_path)
    own = tmp_path / "encoder"
    shutil.copytree(folders(), own)
    encoder = load_latent_encoder(EncoderConfig(str(own), resolution=16))
    make_rae(encoder, open_prepared(data).load().images).save(tmp_path / "rae")
    train(recipe, "run", progress=False)
    options = ["--device", "cpu", "--nfe", "2"]
    work = {
        "x.npy": ["sample", "run", "--num", "4", *options],
        "eval.json": ["eval", "run", "--num", "8", "--metrics", "fd-pixels", *options],
        "sweep": ["sweep", "run", "--num", "8", "--metrics", "fd-pixels", "--rho", "0", *options],
        "model": ["export", "run", "--license", "other", "--no-grid"],
    }

    def outputs(folder):
        for name, words in work.items():
            option = "--json" if name.endswith(".json") else "--out"
            assert run([*words, option, f"{folder}/{name}"]) == 0
        figures = json.loads(Path(folder, "eval.json").read_text())["metrics"]
        cells = [json.loads(path.read_text())["result"] for path in Path(folder, "sweep", "cells").glob("*.json")]
        weights = Path(folder, "model", "model.safetensors").read_bytes()
        return np.load(f"{folder}/x.npy"), figures, [cell["metrics"] for cell in cells], weights

    there = outputs("before")
    own.rename(tmp_path / "gone")
    image, *rest = outputs("after")
    assert np.array_equal(image, there[0])
    assert rest == list(there[1:])
    assert run(["sample", "after/model", "--num", "1", "--out", "y.npy", *options]) == 0
    capsys.readouterr()
    edit = ["edit", "image-to-image", "run", str(data.parent / "raw.npz"), "--index", "0", "--classes", "0", *options]
    assert run([*edit, "--out", "e.npy"]) == 2
    assert f"codec.encoder='{own}'" in capsys.readouterr().err
    # a page goes on with what can be done, and encodes once the encoder is back
    service = Service(Shelf(["run"], torch.device("cpu")), seats=1)
    form = EditForm("run", "image-to-image", drawn=1, images=1, nfe=2)

    def last():
        *_, parts = service.serve(Turn(), 1, form, service.edits)
        return parts

    assert drawn_picture(service.shelf.get("run"), 0).shape == (3, 16, 16)
    assert f"codec.encoder='{own}'" in last()[PROBLEM].replace("&#x27;", "'")
    (tmp_path / "gone").rename(own)
    assert "done" in last()[FILM]


def test_another_encoder_than_the_decoders_is_refused_when_it_is_opened(recipe, folders, autoencoder):
    codec, images = load_decoder_only(autoencoder, folders(seed=1)), torch.zeros(1, 3, 16, 16, dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"autoencoder of the encoder .* cannot be used with"):
        codec.encode(images)
    codec = load_decoder_only(autoencoder, "")
    assert torch.equal(codec.encode(images), load_rae(autoencoder).encode(images))
    assert not any("encoder" in name for name in codec.state_dict())
