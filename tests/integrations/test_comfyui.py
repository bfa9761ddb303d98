"""The nodes of ComfyUI, run through a stand-in for the part of ComfyUI that calls them."""

import importlib
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from mvm import noise
from mvm.bridge import VarianceExploding, mvm_sigmas, sample_mvm
from mvm.integrations.comfyui import NODE_CLASS_MAPPINGS, NODE_DISPLAY_NAME_MAPPINGS
from mvm.oracle import gaussian
from mvm.path import LinearFlow
from mvm.solver import sample

MEAN, STD, SHAPE = 0.7, 0.5, (4, 2, 2)
LAW = gaussian(MEAN, STD, SHAPE)
SEEDS = torch.arange(500)


class CONST:
    """What ComfyUI calls a rectified flow."""

    path, sigma_min, sigma_max = LinearFlow(), torch.tensor(0.003), torch.tensor(1.0)

    def noised(self, sigma, eps, latent):
        return sigma * eps + (1 - sigma) * latent

    def clean(self, sigma, x):
        return x / (1 - sigma)


class EPS:
    """What ComfyUI calls a model of x0 + sigma eps."""

    path, sigma_min, sigma_max = VarianceExploding(), torch.tensor(0.0292), torch.tensor(14.6146)

    def noised(self, sigma, eps, latent):
        return sigma * eps + latent

    def clean(self, sigma, x):
        return x


class KSAMPLER:
    """Calls a sampler function as ComfyUI does: (model, x, sigmas, extra_args=, callback=, disable=, **options)."""

    def __init__(self, sampler_function, extra_options=None):
        self.function, self.options = sampler_function, extra_options or {}

    def sample(self, sampling, sigmas, eps, seed, callback=None):
        def guider(x, sigma, denoise_mask, model_options, seed):
            return LAW.denoise(x, sigma, sampling.path)

        class Wrapped:
            inner_model = SimpleNamespace(inner_model=SimpleNamespace(model_sampling=sampling))
            __call__ = staticmethod(guider)

        extra = {"model_options": {}, "seed": seed, "denoise_mask": None}
        x = sampling.noised(sigmas[0], eps, torch.zeros_like(eps))
        x = self.function(Wrapped(), x, sigmas, extra_args=extra, callback=callback, disable=True, **self.options)
        return sampling.clean(sigmas[-1], x)


@pytest.fixture
def comfy(monkeypatch):
    parts = {"comfy": {}, "comfy.samplers": {"KSAMPLER": KSAMPLER}, "comfy.model_sampling": {"CONST": CONST}}
    for name, values in parts.items():
        module = ModuleType(name)
        module.__dict__.update(values)
        monkeypatch.setitem(sys.modules, name, module)


def run_node(name, **inputs):
    """Run a node as ComfyUI does: its FUNCTION, on inputs named in INPUT_TYPES; one output of each RETURN_TYPES."""
    node = NODE_CLASS_MAPPINGS[name]
    required, optional = (set(node.INPUT_TYPES().get(kind, {})) for kind in ("required", "optional"))
    assert required <= set(inputs) <= required | optional
    out = getattr(node(), node.FUNCTION)(**inputs)
    assert len(out) == len(node.RETURN_TYPES)
    return out[0]


def model(sampling):
    return SimpleNamespace(get_model_object={"model_sampling": sampling}.__getitem__)


def drawn(sampling, count=500, *, rho, seed=3, nfe=16, **options):
    latent = {"samples": torch.zeros(count, *SHAPE)}
    sigmas = run_node("MVMSigmas", model=model(sampling), nfe=nfe, rho=rho, solver="adams", latent_image=latent)
    sampler = run_node("MVMSampler", rho=rho, solver="adams")
    return sampler.sample(sampling, sigmas, noise.initial(SEEDS[:count], SHAPE), seed, **options)


@pytest.mark.usefixtures("comfy")
@pytest.mark.parametrize("rho", [0.0, 1.0])
@pytest.mark.parametrize("sampling", [EPS(), CONST()], ids=["eps", "const"])
def test_the_law_of_the_data(sampling, rho):
    """8,000 numbers: chance leaves 0.8 % in the std; noise without the signal of the first level shifts the mean."""
    x = drawn(sampling, rho=rho)
    assert float(x.mean()) == pytest.approx(MEAN, abs=0.03)
    assert float(x.std()) == pytest.approx(STD, rel=0.03)


@pytest.mark.usefixtures("comfy")
def test_a_flow_is_sampled_as_by_mvm():
    """Without the cleanest level of the model, the samples of mvm.sample."""
    sampling = CONST()
    sampling.sigma_min = torch.tensor(0.0)
    want = sample(LAW.field(LinearFlow()), noise.initial(SEEDS[:20], SHAPE), schedule=LinearFlow(), nfe=16)
    torch.testing.assert_close(drawn(sampling, 20, rho=0.0), want, rtol=0, atol=1e-5)


@pytest.mark.usefixtures("comfy")
@pytest.mark.parametrize("sampling", [EPS(), CONST()], ids=["eps", "const"])
def test_sigmas_end_at_the_levels_of_the_model(sampling):
    sigmas = run_node("MVMSigmas", model=model(sampling), nfe=7, rho=0.5, solver="adams")
    assert (sigmas.dtype, len(sigmas)) == (torch.float32, 8)
    assert sigmas[[0, -2, -1]].tolist() == pytest.approx([float(sampling.sigma_max), float(sampling.sigma_min), 0.0])
    assert bool((sigmas[1:] < sigmas[:-1]).all())


@pytest.mark.usefixtures("comfy")
def test_an_image_depends_on_the_seed_and_its_place_alone():
    one, two = drawn(EPS(), 1, rho=1.0), drawn(EPS(), 5, rho=1.0)
    torch.testing.assert_close(one[0], two[0], rtol=0, atol=1e-5)
    assert not torch.allclose(one, drawn(EPS(), 1, rho=1.0, seed=4), atol=1e-2)
    assert bool(torch.isfinite(drawn(EPS(), 1, rho=1.0, seed=2**64 - 1)).all())  # the largest that ComfyUI offers
    own = noise.derive(3, torch.arange(5))
    x = noise.initial(SEEDS[:5], SHAPE) * EPS.sigma_max
    sigmas = mvm_sigmas(16, float(EPS.sigma_min), float(EPS.sigma_max), rho=1.0, size=16).float()
    want = sample_mvm(lambda x, sigma: LAW.denoise(x, sigma, EPS.path), x, sigmas, rho=1.0, seeds=own)
    torch.testing.assert_close(two, want, rtol=0, atol=1e-5)


@pytest.mark.usefixtures("comfy")
def test_progress_is_reported_once_an_evaluation():
    seen = []
    drawn(CONST(), 2, rho=0.0, nfe=5, callback=lambda state: seen.append((state["i"], state["denoised"].shape)))
    assert seen == [(i, (2, *SHAPE)) for i in range(5)]


def test_inputs_are_what_comfyui_reads():
    assert set(NODE_CLASS_MAPPINGS) == set(NODE_DISPLAY_NAME_MAPPINGS)
    for node in NODE_CLASS_MAPPINGS.values():
        inputs = node.INPUT_TYPES()["required"]
        assert inputs["solver"][0] == ["adams", "adams-power", "sa"]  # the default first
        assert inputs["rho"][0] == "FLOAT"
        assert inputs["rho"][1]["min"] <= inputs["rho"][1]["default"] <= inputs["rho"][1]["max"]
        assert callable(getattr(node, node.FUNCTION))
    assert inputs["model"] == ("MODEL",)
    assert node.INPUT_TYPES()["optional"]["latent_image"][0] == "LATENT"


def test_the_line_that_installs_it():
    names: dict = {}
    exec("from mvm.integrations.comfyui import *", names)
    assert set(names["NODE_CLASS_MAPPINGS"]) == {"MVMSampler", "MVMSigmas"}


def test_without_comfyui_only_its_use_is_an_error(monkeypatch):
    for name in ("comfy", "comfy.samplers", "comfy.model_sampling"):
        monkeypatch.setitem(sys.modules, name, None)
    importlib.reload(sys.modules["mvm.integrations.comfyui"])
    for name, inputs in (("MVMSampler", {}), ("MVMSigmas", {"model": model(EPS()), "nfe": 4})):
        with pytest.raises(ImportError, match=r"comfy\.\w+ .*ComfyUI"):
            run_node(name, rho=0.0, solver="adams", **inputs)
