"""MVMPipeline: the native sampler's images in diffusers' manner, saved and loaded without remote code."""

import importlib
import json
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from threading import Thread

import numpy as np
import pytest
import torch
from diffusers import DDIMScheduler
from safetensors import safe_open

import mvm
from mvm import noise
from mvm.generate import Sampler
from mvm.integrations.diffusers import MVMPipeline, MVMScheduler, MVMTransformer2DModel
from mvm.model import Model
from mvm.network import DDTConfig
from mvm.path import TimeLaw
from mvm.pictures import to_pillow
from mvm.pixels import to_uint8
from mvm.published import export
from mvm.published.format import FILES
from mvm.published.tuned import read_entry, write_tuned
from mvm.solver import ClassifierFree, Interval, solve

DOCUMENT = (Path(__file__).parents[2] / "docs" / "how-to/diffusers.md").read_text()
OURS = {"prediction_type": "u", "schedule": "mean-velocity"}
LABELS, SEEDS, NFE = [3, 8, 0], [11, 12, 13], 8


def quiet(pipe):
    pipe.set_progress_bar_config(disable=True)
    return pipe


@pytest.fixture(scope="module")
def model():
    return mvm.load("digits")


@pytest.fixture(scope="module")
def pipe(model):
    """Not to be changed."""
    return quiet(MVMPipeline.from_mvm(model))


@pytest.mark.parametrize("solver", ["adams", "sa"])
@pytest.mark.parametrize("rho", [0.0, 1.0])
def test_trajectory_is_the_native_solvers(model, solver, rho):
    interval, states, seen = (0.2, 0.8), [], []
    native = solve(model, noise.initial(torch.tensor(SEEDS), model.sample_shape), solver=solver, rho=rho, nfe=NFE,
                   condition=torch.tensor(LABELS), seeds=SEEDS, on_step=states.append,
                   guidance=ClassifierFree(1.5, interval=Interval(*interval)))  # fmt: skip
    assert NFE < native.passes < 2 * NFE  # the interval is inside

    def look(pipe, index, t, tensors):
        seen.append(tensors["latents"])
        return tensors

    images = quiet(MVMPipeline.from_mvm(model, solver=solver, rho=rho))(
        LABELS, NFE, 1.5, interval, seeds=SEEDS, output_type="latent", callback_on_step_end=look
    ).images
    assert len(seen) == NFE
    assert max(float((a - b.x).abs().max()) for a, b in zip(seen, states, strict=True)) < 1e-5
    assert float((images - native.x).abs().max()) < 1e-5


@pytest.mark.parametrize("name", ["ddt-with-inner-head", "flow-on-linear-path", "augmented", "T"])
def test_other_models_are_the_native_ones_too(model, name):
    recipe = model.recipe
    if name == "ddt-with-inner-head":
        network = DDTConfig(size="tiny", patch=2, depth=2, inner_block=1)
        recipe = replace(recipe, network=network, sample=replace(recipe.sample, internal=1.4, nfe=NFE, cfg=1.3))
    elif name == "T":
        recipe = replace(recipe, path=replace(recipe.path, T=2.5), sample=replace(recipe.sample, nfe=NFE))
    elif name == "augmented":
        data, network = replace(recipe.data, augment=0.1), replace(recipe.network, dropout=0.1)
        recipe = replace(recipe, data=data, network=network, sample=replace(recipe.sample, nfe=NFE))
    else:
        path, objective = replace(recipe.path, schedule="linear-flow"), replace(recipe.objective, kind="flow")
        recipe = replace(recipe, path=path, objective=objective, sample=replace(recipe.sample, solver="sa", nfe=NFE))
    other = Model(recipe).eval().requires_grad_(False)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        for parameter in other.network.parameters():
            parameter.copy_(0.1 * torch.randn_like(parameter))
    native = Sampler(other).images(torch.tensor(LABELS), torch.tensor(SEEDS), recipe.sample, progress=False)
    images = quiet(MVMPipeline.from_mvm(other))(LABELS, seeds=SEEDS).images
    for image, expected in zip(images, native.images, strict=True):
        assert np.abs(np.asarray(image, dtype=int) - np.asarray(to_pillow(expected), dtype=int)).max() <= 1


def test_folder_round_trip(pipe, tmp_path):
    pipe.save_pretrained(tmp_path)
    files = sorted(path.suffix for path in tmp_path.rglob("*") if path.is_file())
    assert files == [".json", ".json", ".json", ".safetensors"]  # nothing that could be executed
    with safe_open(tmp_path / "transformer" / "diffusion_pytorch_model.safetensors", "pt") as weights:
        assert len(weights.keys()) == len(pipe.transformer.state_dict())
    loaded = quiet(MVMPipeline.from_pretrained(tmp_path))
    assert loaded.config.settings == pipe.config.settings
    assert loaded.labels == {str(digit): digit for digit in range(10)}
    options = {"num_inference_steps": NFE, "seeds": SEEDS, "output_type": "pt"}
    assert torch.equal(loaded(LABELS, **options).images, pipe(LABELS, **options).images)
    index = json.loads((tmp_path / "model_index.json").read_text())
    assert index["scheduler"] == ["mvm.integrations.diffusers.scheduler", "MVMScheduler"]


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """The shipped digits as `mvm export` writes them; not to be changed."""
    folder = tmp_path_factory.mktemp("exported") / "digits"
    export("digits", folder)
    return folder


OPTIONS = {"num_inference_steps": 3, "seeds": SEEDS, "output_type": "pt"}


def test_an_exported_folder_is_read_as_mvm_load_reads_it(pipe, exported):
    expected = pipe(LABELS, **OPTIONS).images
    for place in (exported, str(exported), "digits"):
        loaded = quiet(MVMPipeline.from_pretrained(place))
        assert torch.equal(loaded(LABELS, **OPTIONS).images, expected)
        assert loaded.config.settings == pipe.config.settings
        assert loaded.labels == pipe.labels
    native = mvm.load(exported)
    settings = replace(native.recipe.sample, nfe=3)
    images = Sampler(native).images(torch.tensor(LABELS), torch.tensor(SEEDS), settings, progress=False).images
    latents = loaded(LABELS, 3, seeds=SEEDS, output_type="latent").images
    assert int((images.int() - to_uint8(latents).int()).abs().max()) <= 1


def test_what_an_export_tells_diffusers_is_what_save_pretrained_writes(pipe, exported, tmp_path):
    pipe.save_pretrained(tmp_path)
    for name in ("model_index.json", "scheduler/scheduler_config.json", "transformer/config.json"):
        ours, theirs = (json.loads((folder / name).read_text()) for folder in (exported, tmp_path))
        theirs.pop("_diffusers_version")
        for option in ("seeds", "trained", "tuned", "round_timesteps", "beta_schedule", "_name_or_path"):
            theirs.pop(option, None)  # of a scheduler, not of a model
        assert ours == theirs


def test_parts_of_an_exported_folder(pipe, exported):
    scheduler = MVMScheduler.from_pretrained(exported, subfolder="scheduler")
    for name in ("solver", "rho", "prediction_type", "schedule", "solver_options", "seeds"):
        assert scheduler.config[name] == pipe.scheduler.config[name]
    transformer = MVMTransformer2DModel.from_pretrained(exported, subfolder="transformer", torch_dtype=torch.bfloat16)
    for name, value in pipe.transformer.state_dict().items():
        assert torch.equal(transformer.state_dict()[name], value.bfloat16()), name
    other = MVMScheduler.from_config(scheduler.config, solver="sa", rho=1.0)
    loaded = MVMPipeline.from_pretrained(exported, scheduler=other, dtype=torch.float16)
    assert (loaded.scheduler.config.solver, loaded.scheduler.config.solver_options) == ("sa", None)
    assert loaded.transformer.dtype == torch.float16


def test_from_the_hub_in_either_layout(pipe, exported, tmp_path, monkeypatch):
    asked = []

    def fetch(name, **options):
        asked.append((name, options))
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", fetch)
    monkeypatch.setattr("diffusers.pipelines.pipeline_utils.snapshot_download", fetch)
    monkeypatch.chdir(tmp_path)
    folder, expected = exported, pipe(LABELS, **OPTIONS).images
    for loaded in (
        MVMPipeline.from_pretrained("owner/name", revision="v1", token="t"),
        MVMPipeline.from_pretrained("owner/name@v1", token="t"),
    ):
        assert torch.equal(quiet(loaded)(LABELS, **OPTIONS).images, expected)
    assert asked == [("owner/name", {"revision": "v1", "token": "t", "allow_patterns": list(FILES)})] * 2
    folder = tmp_path / "own"
    pipe.save_pretrained(folder)
    loaded = quiet(MVMPipeline.from_pretrained("owner/name", revision="v1"))
    assert torch.equal(loaded(LABELS, **OPTIONS).images, expected)
    assert asked[-1] == ("owner/name", {"revision": "v1", "allow_patterns": ["*.json", "*.safetensors"]})


def test_hostile_folders_are_refused(pipe, exported, tmp_path):
    shutil.copytree(exported, tmp_path / "mvm")
    (tmp_path / "mvm" / "model_index.json").write_text(json.dumps({"transformer": ["os", "system"]}))
    with pytest.raises(ValueError, match=r"'transformer' is not what config\.json says"):
        MVMPipeline.from_pretrained(tmp_path / "mvm")
    (tmp_path / "mvm" / "pipeline.py").write_text("raise SystemExit")
    with pytest.raises(ValueError, match=r"'pipeline\.py' is code"):
        MVMPipeline.from_pretrained(tmp_path / "mvm")
    pipe.save_pretrained(tmp_path / "own")
    index = tmp_path / "own" / "model_index.json"
    whole = json.loads(index.read_text())
    index.write_text(json.dumps({**whole, "scheduler": ["subprocess", "Popen"]}))
    with pytest.raises(ValueError, match=r"model_index\.json names \['subprocess', 'Popen'\] as scheduler"):
        MVMPipeline.from_pretrained(tmp_path / "own")
    index.write_text(json.dumps(whole))
    weights = tmp_path / "own" / "transformer" / "diffusion_pytorch_model.safetensors"
    weights.unlink()
    torch.save(pipe.transformer.state_dict(), weights.with_suffix(".bin"))
    with pytest.raises(OSError, match="safetensors"):
        MVMPipeline.from_pretrained(tmp_path / "own")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device_map": "balanced"}, "device_map='balanced': .* has the layout of mvm export"),
        ({"torch_dtype": "auto"}, r"dtype='auto' must be a torch\.dtype"),
    ],
)
def test_options_that_an_exported_folder_does_not_take(exported, options, message):
    with pytest.raises(ValueError, match=message):
        MVMPipeline.from_pretrained(exported, **options)


def test_the_last_time_of_sa_is_the_recipes(model):
    late = Model(replace(model.recipe, sample=replace(model.recipe.sample, solver="sa", t_min=0.01, nfe=NFE)))
    timesteps = MVMPipeline.from_mvm(late).scheduler
    timesteps.set_timesteps(NFE)
    assert float(timesteps.timesteps[-1]) == pytest.approx(0.01)
    assert MVMPipeline.from_mvm(late, solver="adams").scheduler.config.solver_options == {"spread": 5.0}  # 64 values
    later = MVMPipeline.from_mvm(late, solver_options={"tau": "start"}).scheduler
    assert later.config.solver_options == {"t_min": 0.01, "tau": "start"}


@pytest.mark.parametrize("solver", ["adams", "sa", "dpm++2m"])
def test_times_are_shifted_as_the_models_law(model, solver):
    """A scheduler knows no timestep distribution: its config holds the shift."""
    recipe = replace(model.recipe, path=replace(model.recipe.path, law=TimeLaw(shift_dimension=64 * 4096)))
    latent = Model(recipe, model.codec, model.network).eval()
    latent.classes = model.classes
    pipe = quiet(MVMPipeline.from_mvm(latent, solver=solver))
    assert pipe.scheduler.config.solver_options["shift"] == 8
    wanted = solve(latent, noise.initial(torch.tensor(SEEDS), (1, 8, 8)), solver=solver, nfe=NFE,
                   condition=torch.tensor(LABELS)).x  # fmt: skip
    assert float((pipe(LABELS, NFE, seeds=SEEDS, output_type="latent").images - wanted).abs().max()) < 1e-5
    plain = quiet(MVMPipeline.from_mvm(latent, solver=solver, solver_options={"shift": 1.0}))
    assert float((plain(LABELS, NFE, seeds=SEEDS, output_type="latent").images - wanted).abs().max()) > 1e-3


def test_download_asks_for_numbers_and_text_only(monkeypatch):
    asked = {}

    def fetch(name, **rest):
        asked.update(rest, name=name)
        return "folder"

    monkeypatch.setattr("diffusers.pipelines.pipeline_utils.snapshot_download", fetch)
    assert MVMPipeline.download("owner/name", revision="abc", token=None, custom_pipeline=None) == "folder"
    assert asked == {"name": "owner/name", "revision": "abc", "allow_patterns": ["*.json", "*.safetensors"]}


def test_output_types_agree(pipe):
    options = {"num_inference_steps": NFE, "seeds": SEEDS}
    found = {kind: pipe(LABELS, output_type=kind, **options).images for kind in ("pil", "np", "pt", "latent")}
    assert found["np"].shape == (3, 8, 8, 1)
    assert np.array_equal(found["np"], found["pt"].permute(0, 2, 3, 1).numpy())
    assert float(found["pt"].min()) >= 0
    assert float(found["pt"].max()) <= 1
    assert torch.allclose(found["pt"], (found["latent"] / 2 + 0.5).clamp(0, 1), atol=1e-6)
    assert np.abs(np.stack([np.asarray(image) for image in found["pil"]]) - 255 * found["np"][..., 0]).max() < 0.51
    assert np.array_equal(pipe(LABELS, output_type="np", return_dict=False, **options)[0], found["np"])


@pytest.mark.parametrize("rho", [0.0, 1.0])
def test_images_belong_to_their_generators(model, rho):
    pipe = quiet(MVMPipeline.from_mvm(model, rho=rho))

    def images(labels, seeds):
        generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        return pipe(labels, NFE, generator=generators, output_type="pt").images

    assert torch.allclose(images(LABELS, SEEDS)[1:2], images(LABELS[1:2], SEEDS[1:2]), atol=1e-5)


def test_classes_by_name_and_number(pipe):
    options = {"num_inference_steps": 2, "output_type": "pt"}
    by_name = pipe(["3", "8"], seeds=[1, 2], **options).images
    assert torch.equal(by_name, pipe([3, 8], seeds=[1, 2], **options).images)
    assert torch.allclose(by_name[:1], pipe("3", seeds=[1], **options).images, atol=1e-6)  # a batch rounds otherwise


def test_latents_are_the_noise_to_start_from(pipe):
    given = noise.initial(torch.tensor(SEEDS), (1, 8, 8))
    options = {"num_inference_steps": NFE, "output_type": "pt"}
    found = pipe(LABELS, latents=given, **options).images
    assert torch.equal(found, pipe(LABELS, seeds=SEEDS, **options).images)


def test_callback_may_change_latents(pipe):
    def blank(pipe, index, t, tensors):
        return {"latents": torch.zeros_like(tensors["latents"])} if index == NFE - 1 else None

    images = pipe(LABELS, NFE, seeds=SEEDS, output_type="pt", callback_on_step_end=blank).images
    assert torch.equal(images, torch.full_like(images, 0.5))


def test_calls_do_not_disturb_each_other(pipe):
    options = {"num_inference_steps": NFE, "seeds": SEEDS, "output_type": "pt"}
    expected = pipe(LABELS, **options).images

    def nested(pipe, index, t, tensors):
        pipe([1], 3, seeds=[0])
        return tensors

    assert torch.equal(pipe(LABELS, callback_on_step_end=nested, **options).images, expected)
    found = {}

    def work(number):
        found[number] = pipe(LABELS, **options).images

    threads = [Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(found[number], expected) for number in range(3))


def test_half_precision_weights_run(model):
    half = quiet(MVMPipeline.from_mvm(model)).to(torch.bfloat16)
    options = {"num_inference_steps": NFE, "seeds": SEEDS, "output_type": "pt"}
    exact = quiet(MVMPipeline.from_mvm(model))(LABELS, **options).images
    assert float((half(LABELS, **options).images - exact).abs().mean()) < 0.05


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"class_labels": [10]}, "classes=10 out of range"),
        ({"class_labels": ["ten"]}, "class_labels='ten' is no class of this model"),
        ({"class_labels": []}, "class_labels is empty"),
        ({"class_labels": [1.5]}, r"class_labels: 1\.5 is neither a number nor a name"),
        ({"num_inference_steps": 2.5}, r"num_inference_steps=2\.5"),
        ({"num_inference_steps": 0}, "nfe=0"),
        ({"guidance_interval": (0.8, 0.2)}, r"interval=\[0.8, 0.2\]"),
        ({"output_type": "pill"}, "did you mean 'pil'"),
        ({"seeds": [1, 2]}, "seeds has 2 entries for a batch of 1"),
        ({"seeds": [1], "generator": torch.Generator()}, "generator and seeds are both given"),
        ({"generator": [torch.Generator()] * 2}, "generator has 2 entries for a batch of 1"),
        ({"latents": torch.zeros(1, 1, 4, 4)}, r"latents of shape \(1, 1, 4, 4\) must be of shape \(1, 1, 8, 8\)"),
        ({"callback_on_step_end_tensor_inputs": ["prompt"]}, "only latents can be had"),
    ],
)
def test_bad_arguments_are_refused(pipe, arguments, message):
    with pytest.raises(ValueError, match=message):
        pipe(**{"class_labels": [1], **arguments})


@pytest.mark.parametrize(
    ("scheduler", "message"),
    [
        (DDIMScheduler(), "scheduler=DDIMScheduler: this network needs an MVMScheduler"),
        (
            MVMScheduler(**{**OURS, "prediction_type": "x0"}),
            "prediction_type='x0': this network was trained with prediction_type='u'",
        ),
        (MVMScheduler(**{**OURS, "schedule": "linear-flow"}), "trained with schedule='mean-velocity'"),
        (MVMScheduler(**OURS, T=2.0), "trained with T='1.0'"),
    ],
)
def test_wrong_scheduler_is_refused(model, scheduler, message):
    with pytest.raises(ValueError, match=message):
        MVMPipeline(MVMTransformer2DModel.from_mvm(model), scheduler)
    pipe = quiet(MVMPipeline.from_mvm(model))
    pipe.scheduler = scheduler
    with pytest.raises(ValueError, match=message):
        pipe([1])


def test_models_that_do_not_fit_are_refused(model):
    latent = Model(model.recipe)
    latent.codec = object()
    with pytest.raises(ValueError, match="MVMPipeline makes pixels, not latents"):
        MVMPipeline.from_mvm(latent)
    bright = Model(replace(model.recipe, codec=replace(model.recipe.codec, scale=2.0)))
    with pytest.raises(ValueError, match=r"codec.scale=2.0: MVMPipeline takes pixels in \[-1, 1\]"):
        MVMPipeline.from_mvm(bright)
    slow = Model(replace(model.recipe, sample=replace(model.recipe.sample, solver="heun")))
    with pytest.raises(ValueError, match="solver='heun'"):
        MVMPipeline.from_mvm(slow)
    assert MVMPipeline.from_mvm(slow, solver="adams").scheduler.config.solver == "adams"
    blind = MVMPipeline.from_mvm(
        Model(replace(model.recipe, objective=replace(model.recipe.objective, label_drop=1.0)))
    )
    with pytest.raises(ValueError, match=r"guidance_scale=2.0: this network knows no classes"):
        blind([1], guidance_scale=2.0)
    always = MVMPipeline.from_mvm(
        Model(replace(model.recipe, objective=replace(model.recipe.objective, label_drop=0.0)))
    )
    with pytest.raises(ValueError, match=r"guidance_scale=2.0.*null class"):
        always([1], guidance_scale=2.0)
    with pytest.raises(ValueError, match=r"class_labels=None.*null class"):
        always.transformer(torch.zeros(1, 1, 8, 8), 0.5)
    with pytest.raises(ValueError, match="no inner head"):
        MVMPipeline(blind.transformer, blind.scheduler, settings={"internal": 1.5})([1])


def test_missing_library_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "diffusers", None)
    monkeypatch.delitem(sys.modules, "mvm.integrations.diffusers")
    with pytest.raises(ImportError, match=r"pip install 'mean-velocity-matching\[diffusers\]'"):
        importlib.import_module("mvm.integrations.diffusers")


@pytest.mark.parametrize("code", re.findall(r"```python\n(.*?)```", DOCUMENT, re.DOTALL))
def test_document_runs(code, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "diffusers.md", "exec"), {})


def test_tuned_times_are_used_as_by_the_native_sampler(model, tmp_path):
    """From an exported folder, a pipeline of the model, and what diffusers stores of it."""
    folder = tmp_path / "tuned"
    export("digits", folder)
    guided = ClassifierFree(1.5, interval=Interval(0.2, 0.8))
    times = (1.0, 0.8, 0.45, 0.1, 0.0)
    told = {"b": 0.4, "end_b": 0.1, "spread": 4.0, "times": list(times), "nfe": 4, "default": 0.2, "tuned": 0.1}
    entry = read_entry({**told, "cfg": 1.5, "low": 0.2, "high": 0.8, "internal": 1.0})
    write_tuned(folder, model.origin["sha256"], {entry.key: entry})
    pipe = quiet(MVMPipeline.from_pretrained(folder))
    pipe.save_pretrained(tmp_path / "pipeline")
    again = quiet(MVMPipeline.from_pretrained(tmp_path / "pipeline"))
    native, noises = mvm.load(folder), noise.initial(torch.tensor(SEEDS), model.sample_shape)

    def expected(model, **options):
        return solve(model, noises, condition=torch.tensor(LABELS), seeds=SEEDS, **options).x

    def found(pipe, steps=4, **options):
        given = {"guidance_scale": 1.5, "guidance_interval": (0.2, 0.8), **options}
        return pipe(LABELS, num_inference_steps=steps, seeds=SEEDS, output_type="latent", **given).images

    tuned, plain = (expected(of, nfe=4, guidance=guided) for of in (native, model))
    assert not torch.allclose(tuned, plain, atol=1e-2)
    for one in (pipe, again, quiet(MVMPipeline.from_mvm(native))):
        assert torch.allclose(found(one), tuned, atol=1e-5)
        assert torch.allclose(found(one, 5), expected(model, nfe=5, guidance=guided), atol=1e-5)
        assert torch.allclose(found(one, guidance_scale=1.0), expected(model, nfe=4), atol=1e-5)
    by_name = quiet(MVMPipeline.from_mvm(native, solver="adams"))
    assert torch.allclose(found(by_name), plain, atol=1e-5)
    for change, same in (({"solver": "adams"}, plain), ({"seeds": SEEDS}, tuned)):
        pipe.scheduler = MVMScheduler.from_config(again.scheduler.config, **change)
        assert torch.allclose(found(pipe), same, atol=1e-5)
    pipe.scheduler = MVMScheduler.from_config(again.scheduler.config, rho=0.5)
    assert torch.allclose(found(pipe), expected(model, nfe=4, rho=0.5, guidance=guided), atol=1e-5)
    with pytest.raises(ValueError, match="tuned holds no times of mvm tune"):
        MVMScheduler(**OURS, tuned=[{"nfe": 4}])
