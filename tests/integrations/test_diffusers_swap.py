"""MVMScheduler in other models' pipelines: tiny ones, with exact Gaussian networks in the place of theirs."""

from dataclasses import replace
from types import SimpleNamespace

import diffusers
import numpy as np
import pytest
import torch
from diffusers.utils.torch_utils import randn_tensor

from mvm import sample
from mvm.bridge import from_diffusers, from_flow
from mvm.integrations.diffusers import MVMScheduler

MEAN, STD = 0.2, 0.15  # of the data: images of it are never clipped
NFE = 26
# at 40 evaluations; sigma of step 0 is 0.029 in SD's table, and SD3's shift ends at 0.015: from there x0_hat of data of
# std 0.15 is extrapolated to 0
TO_IMAGE = {"SD": 4e-3, "SD3": 4e-3}
SD = {"beta_schedule": "scaled_linear", "beta_start": 0.00085, "beta_end": 0.012}


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


class Gaussian:
    """E[. | x] for x0 ~ N(MEAN, STD^2), on a table of betas or (table None) on the straight path; remembers its clock.

    Nothing here is of mvm: the table is that of diffusers, between two of its steps half the log-SNR is linear.
    """

    def __init__(self, table, prediction, end=1000.0, learned_variance=False, mean=MEAN, std=STD):
        self.table, self.prediction, self.end, self.learned_variance = table, prediction, end, learned_variance
        self.mean, self.std = mean, std
        self.told = []

    def coefficients(self, step):
        if self.table is None:
            return 1 - step / self.end, step / self.end
        bar = self.table.double().clamp_min(1e-20).numpy()
        lam = np.interp(step, np.arange(len(bar)), 0.5 * np.log(bar / (1 - bar)))
        return 1 / (1 + np.exp(-2 * lam)) ** 0.5, 1 / (1 + np.exp(2 * lam)) ** 0.5

    def __call__(self, x=None, timestep=None, hidden_states=None, return_dict=True, **others):
        x = hidden_states if x is None else x
        step = float(timestep.reshape(-1)[0])
        self.told.append(step)
        alpha, sigma = self.coefficients(step)
        wide = x.double()
        pull = alpha * self.std**2 / (alpha**2 * self.std**2 + sigma**2)
        x0 = self.mean + pull * (wide - alpha * self.mean)
        eps = (wide - alpha * x0) / sigma
        kinds = {"epsilon": eps, "sample": x0, "v_prediction": alpha * eps - sigma * x0, "flow": eps - x0}
        out = kinds[self.prediction].to(x.dtype)
        out = torch.cat([out, torch.full_like(out, 7.0)], 1) if self.learned_variance else out
        return SimpleNamespace(sample=out) if return_dict else (out,)

    def answer(self, x, step):
        """The ODE's image from x at a timestep, exact."""
        alpha, sigma = self.coefficients(step)
        return self.mean + self.std * (x.double() - alpha * self.mean) / (alpha**2 * self.std**2 + sigma**2) ** 0.5

    def denoised(self, x, step):
        """x0_hat at the cleanest level known, exact down to it: the image of a solver that extrapolates no further."""
        alpha, sigma = self.coefficients(0.0)
        share = alpha * self.std / (alpha**2 * self.std**2 + sigma**2) ** 0.5
        return self.mean + share * (self.answer(x, step) - self.mean)


def swapped(pipe, **options):
    pipe.scheduler = MVMScheduler.from_config(pipe.scheduler.config, **options)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def exact(pipe, **how):
    """The pipeline with the exact network of its scheduler in the place of its own."""
    config = pipe.scheduler.config
    table = getattr(pipe.scheduler, "alphas_cumprod", None)
    oracle = Gaussian(table, "flow" if table is None else config.prediction_type, **how)
    network = pipe.components.get("unet") or pipe.components["transformer"]
    network.forward = oracle
    return oracle


def vae():
    torch.manual_seed(0)
    made = diffusers.AutoencoderKL(block_out_channels=(4,), norm_num_groups=1, latent_channels=4, scaling_factor=1.0)
    made.decode = lambda latents, **options: SimpleNamespace(sample=latents)
    return made


def ddpm(scheduler=None, size=8):
    torch.manual_seed(0)
    kinds = {"down_block_types": ("DownBlock2D",) * 2, "up_block_types": ("UpBlock2D",) * 2}
    shape = {"sample_size": size, "in_channels": 1, "out_channels": 1, "block_out_channels": (8, 8)}
    unet = diffusers.UNet2DModel(**shape, **kinds, layers_per_block=1, norm_num_groups=4)
    return diffusers.DDPMPipeline(unet, scheduler or diffusers.DDPMScheduler())


def dit(scheduler=None):
    torch.manual_seed(0)
    size = {"num_attention_heads": 2, "attention_head_dim": 4, "num_layers": 1, "sample_size": 8, "patch_size": 2}
    network = diffusers.DiTTransformer2DModel(**size, in_channels=4, out_channels=8, norm_num_groups=1)
    return diffusers.DiTPipeline(network, vae(), scheduler or diffusers.DDIMScheduler())


def stable_diffusion(scheduler=None, kind=diffusers.StableDiffusionPipeline):
    torch.manual_seed(0)
    blocks = {"down_block_types": ("CrossAttnDownBlock2D",), "up_block_types": ("CrossAttnUpBlock2D",)}
    size = {"sample_size": 8, "block_out_channels": (8,), "cross_attention_dim": 4, "attention_head_dim": 4}
    unet = diffusers.UNet2DConditionModel(**size, **blocks, layers_per_block=1, norm_num_groups=4)
    parts = {"text_encoder": None, "tokenizer": None, "safety_checker": None, "feature_extractor": None}
    scheduler = scheduler or diffusers.PNDMScheduler(**SD, skip_prk_steps=True, steps_offset=1)
    return kind(vae(), unet=unet, scheduler=scheduler, requires_safety_checker=False, **parts)


def stable_diffusion_3(scheduler=None):
    torch.manual_seed(0)
    size = {"num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 1, "sample_size": 8, "patch_size": 2}
    text = {"joint_attention_dim": 4, "caption_projection_dim": 16, "pooled_projection_dim": 4}
    network = diffusers.SD3Transformer2DModel(**size, **text, in_channels=4, out_channels=4, pos_embed_max_size=8)
    parts = dict.fromkeys(
        ("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2", "text_encoder_3", "tokenizer_3")
    )
    scheduler = scheduler or diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0)
    return diffusers.StableDiffusion3Pipeline(network, scheduler, vae(), **parts)


def flux(scheduler=None):
    torch.manual_seed(0)
    size = {"num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 1, "num_single_layers": 1}
    text = {"joint_attention_dim": 4, "pooled_projection_dim": 4, "axes_dims_rope": (2, 2, 4)}
    network = diffusers.FluxTransformer2DModel(**size, **text, in_channels=16)
    parts = dict.fromkeys(("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2"))
    scheduler = scheduler or diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True)
    return diffusers.FluxPipeline(scheduler, vae(), transformer=network, **parts)


def pixart(scheduler=None):
    torch.manual_seed(0)
    size = {"num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 1, "sample_size": 8, "patch_size": 2}
    text = {"cross_attention_dim": 16, "caption_channels": 4, "norm_num_groups": 1}
    network = diffusers.PixArtTransformer2DModel(**size, **text, in_channels=4, out_channels=8)
    scheduler = scheduler or diffusers.DPMSolverMultistepScheduler()
    return diffusers.PixArtAlphaPipeline(None, None, vae(), network, scheduler)


def words(count, *names):
    """Embeddings of so many prompts."""
    return {name: torch.randn(count, 3, 4, generator=seeded(i)) for i, name in enumerate(names)}


def pooled(count, *names):
    return {name: torch.randn(count, 4, generator=seeded(i)) for i, name in enumerate(names)}


def call_ddpm(pipe, count, steps=NFE, generator=None):
    return 2 * torch.as_tensor(pipe(count, generator or seeded(), steps, "pt").images) - 1


def call_dit(pipe, count, steps=NFE, scale=1.0):
    images = pipe([1] * count, scale, seeded(), steps, "pt").images
    return 2 * torch.as_tensor(images) - 1


def call_sd(pipe, count, steps=NFE, scale=1.0, **others):
    text = words(count, "prompt_embeds", "negative_prompt_embeds")
    options = {"num_inference_steps": steps, "guidance_scale": scale, "generator": seeded(), "output_type": "latent"}
    return pipe(**text, **options, **({} if "image" in others else {"height": 8, "width": 8}), **others).images


def call_sd3(pipe, count, steps=NFE, scale=1.0, **others):
    text = words(count, "prompt_embeds", "negative_prompt_embeds")
    text |= pooled(count, "pooled_prompt_embeds", "negative_pooled_prompt_embeds")
    options = {"num_inference_steps": steps, "guidance_scale": scale, "generator": seeded(), "output_type": "latent"}
    return pipe(height=8, width=8, **text, **options, **others).images


def call_flux(pipe, count, steps=NFE, **others):
    text = words(count, "prompt_embeds") | pooled(count, "pooled_prompt_embeds")
    options = {"num_inference_steps": steps, "generator": seeded(), "output_type": "latent"}
    return pipe(height=16, width=16, **text, **options, **others).images


def call_pixart(pipe, count, steps=NFE, scale=1.0):
    text = words(count, "prompt_embeds", "negative_prompt_embeds")
    text |= {name: torch.ones(count, 3) for name in ("prompt_attention_mask", "negative_prompt_attention_mask")}
    options = {"num_inference_steps": steps, "guidance_scale": scale, "generator": seeded(), "output_type": "latent"}
    return pipe(height=8, width=8, negative_prompt=None, use_resolution_binning=False, **text, **options).images


PIPELINES = {
    "DDPM": (ddpm, call_ddpm),
    "DiT": (dit, call_dit),
    "SD": (stable_diffusion, call_sd),
    "SD3": (stable_diffusion_3, call_sd3),
    "Flux": (flux, call_flux),
    "PixArt": (pixart, call_pixart),
}
SHAPES = {"DDPM": (1, 8, 8), "DiT": (4, 8, 8), "SD": (4, 8, 8), "SD3": (4, 8, 8), "PixArt": (4, 8, 8)}
COUNT = 4


def started(name, count=COUNT):
    """The noise that a pipeline begins with."""
    if name == "Flux":
        return flux()._pack_latents(randn_tensor((count, 4, 16, 16), generator=seeded()), count, 4, 16, 16)
    return randn_tensor((count, *SHAPES[name]), generator=seeded())


def far(found, expected):
    return float((found.double() - expected.double()).abs().max())


@pytest.mark.parametrize("name", PIPELINES)
def test_images_are_those_of_the_exact_network(name):
    """By a scheduler for networks of mvm, told times in [0, 1], their stds are 0.03 to 6 in place of 0.15."""
    make, call = PIPELINES[name]
    pipe, end = make(), {"Flux": 1.0, "SD3": 1000.0}.get(name, 999.0)
    oracle = exact(pipe, learned_variance=name in ("DiT", "PixArt"), end=1.0 if name == "Flux" else 1000.0)
    found = call(swapped(pipe), COUNT, 40)
    assert len(oracle.told) == 40
    assert oracle.told[0] == end
    assert far(found, oracle.answer(started(name), end)) < TO_IMAGE.get(name, 1e-3)


@pytest.mark.parametrize("name", ["DiT", "SD", "SD3", "PixArt"])
def test_guided_by_equal_answers_is_unguided(name):
    make, call = PIPELINES[name]
    pipe = make()
    oracle = exact(pipe, learned_variance=name in ("DiT", "PixArt"))
    found = call(swapped(pipe), 2, 40, scale=4.0)
    assert far(found, oracle.answer(started(name, 2), oracle.told[0])) < TO_IMAGE.get(name, 1e-3)


@pytest.mark.parametrize("prediction", ["epsilon", "v_prediction", "sample"])
@pytest.mark.parametrize(
    ("options", "close"),
    [
        ({}, 1e-3),
        (SD, 4e-3),
        ({"beta_schedule": "squaredcos_cap_v2"}, 1e-3),
        ({"trained_betas": np.linspace(1e-3, 0.3, 50), "num_train_timesteps": 50}, 4e-3),
        ({"rescale_betas_zero_snr": True}, 1e-3),
    ],
    ids=["linear", "scaled_linear", "cosine", "trained", "zero_snr"],
)
def test_every_table_and_prediction(options, close, prediction):
    """The image, and with ending=1 x0_hat at training step 0."""
    pipe = ddpm(diffusers.DDIMScheduler(**options, prediction_type=prediction))
    oracle = exact(pipe)
    found = call_ddpm(swapped(pipe), COUNT, 40)
    assert len(pipe.scheduler) == len(oracle.table)
    assert far(found, oracle.answer(started("DDPM"), oracle.told[0])) < close
    found = call_ddpm(swapped(pipe, solver_options={"ending": 1}), COUNT, 40)
    assert far(found, oracle.denoised(started("DDPM"), oracle.told[0])) < 1e-4


@pytest.mark.parametrize("name", ["DDPM", "SD3"])
def test_sde_has_the_law_of_the_data(name):
    make, call = PIPELINES[name]
    pipe = make()
    mean, std = (MEAN, STD) if name == "DDPM" else (0.5, 1.0)  # pixels, latents
    exact(pipe, mean=mean, std=std)
    found = call(swapped(pipe, rho=1.0), 1500 if name == "DDPM" else 500, 52)
    assert float(found.mean()) == pytest.approx(mean, rel=0.01)
    assert float(found.std()) == pytest.approx(std, rel=0.01)


@pytest.mark.parametrize("name", ["SD", "SD3"])
@pytest.mark.parametrize("strength", [0.3, 0.75])
def test_image_to_image(name, strength):
    """The pipeline noises the image to the first timestep left, and begins there."""
    image = 0.3 * randn_tensor((2, 4, 8, 8), generator=seeded(9)) + 0.1
    if name == "SD":
        pipe, call = stable_diffusion(kind=diffusers.StableDiffusionImg2ImgPipeline), call_sd
    else:
        pipe, call = diffusers.StableDiffusion3Img2ImgPipeline(**stable_diffusion_3().components), call_sd3
    oracle = exact(pipe)
    found = call(swapped(pipe), 2, 60, image=image, strength=strength)
    assert len(oracle.told) == round(60 * strength)
    alpha, sigma = oracle.coefficients(oracle.told[0])
    begun = alpha * image + sigma * randn_tensor(image.shape, generator=seeded())
    assert far(found, oracle.answer(begun, oracle.told[0])) < (4e-3 if name == "SD" else 2e-3)


def by_scheduler(scheduler, oracle, x):
    for t in scheduler.timesteps:
        x = scheduler.step(oracle(x, t).sample, t, x).prev_sample
    return x


@pytest.mark.parametrize(
    ("options", "mu"),
    [
        ({}, None),
        ({"shift": 3.0}, None),
        ({"use_dynamic_shifting": True}, 1.15),
        ({"use_dynamic_shifting": True, "time_shift_type": "linear"}, 2.0),
        ({"use_dynamic_shifting": True, "shift_terminal": 0.1}, 0.9),
    ],
)
def test_euler_through_sigmas_is_the_flow_schedulers(options, mu):
    theirs = diffusers.FlowMatchEulerDiscreteScheduler(**options)
    ours = MVMScheduler.from_config(theirs.config, solver="euler")
    for scheduler in (theirs, ours):
        scheduler.set_timesteps(sigmas=np.linspace(1, 1 / 12, 12), mu=mu)
    assert torch.allclose(ours.timesteps, theirs.timesteps, rtol=1e-6)
    assert torch.allclose(ours.sigmas, theirs.sigmas, atol=1e-6)
    oracle, x = Gaussian(None, "flow"), started("SD3")
    assert far(by_scheduler(ours, oracle, x), by_scheduler(theirs, oracle, x)) < 1e-5
    image = torch.ones_like(x)
    t = ours.timesteps[3:4]
    assert far(ours.scale_noise(image, t, x), theirs.scale_noise(image, theirs.timesteps[3:4], x)) < 1e-5


@pytest.mark.parametrize("prediction", ["epsilon", "v_prediction", "sample"])
def test_first_order_through_its_timesteps_is_ddim(prediction):
    theirs = diffusers.DDIMScheduler(**SD, prediction_type=prediction, timestep_spacing="trailing", clip_sample=False)
    theirs.set_timesteps(20)
    ours = MVMScheduler.from_config(theirs.config, solver_options={"predictor": 1, "corrector": 0, "ending": 1})
    ours.set_timesteps(timesteps=theirs.timesteps.tolist())
    assert torch.equal(ours.timesteps, theirs.timesteps.float())
    oracle, x = Gaussian(theirs.alphas_cumprod, prediction), started("SD")
    assert far(by_scheduler(ours, oracle, x), by_scheduler(theirs, oracle, x)) < 1e-4


def test_noise_and_sigmas_are_the_tables():
    theirs, ddim = diffusers.EulerDiscreteScheduler(**SD), diffusers.DDIMScheduler(**SD)
    ours = MVMScheduler.from_config(theirs.config)
    x, steps = started("SD"), torch.tensor([0, 10, 500, 999])
    assert far(ours.add_noise(torch.ones_like(x), x, steps), ddim.add_noise(torch.ones_like(x), x, steps)) < 1e-6
    alpha, sigma = Gaussian(ddim.alphas_cumprod, "epsilon").coefficients(500.5)
    assert far(ours.add_noise(torch.ones_like(x), x, torch.tensor([500.5])), alpha + sigma * x) < 1e-5
    theirs.set_timesteps(15)
    ours.set_timesteps(sigmas=theirs.sigmas.tolist())  # with the 0 at the end, as they have it
    assert torch.allclose(ours.sigmas, theirs.sigmas, rtol=1e-4, atol=1e-6)
    assert torch.allclose(ours.timesteps, theirs.timesteps.float(), atol=0.01)
    with pytest.raises(ValueError, match=r"must be times in \[0, 999\.0\]"):
        ours.add_noise(x, x, torch.tensor([1000]))


def bridged(name, pipe, count, steps):
    """mvm.sample's answer for the pipeline's network."""
    if name == "Flux":
        text = words(count, "prompt_embeds") | pooled(count, "pooled_prompt_embeds")
        ids = {"txt_ids": torch.zeros(3, 3), "img_ids": pipe._prepare_latent_image_ids(1, 8, 8, "cpu", torch.float32)}
        said = {"encoder_hidden_states": text["prompt_embeds"], "pooled_projections": text["pooled_prompt_embeds"]}
        field = from_flow(lambda x, t: pipe.transformer(x, timestep=t.float(), **said, **ids).sample, path="own")
    else:
        text = {"encoder_hidden_states": words(count, "prompt_embeds")["prompt_embeds"]}
        more = {
            "DDPM": {},
            "DiT": {},
            "SD": text,
            "SD3": text | {"pooled_projections": pooled(count, "p")["p"]},
            "PixArt": text | {"added_cond_kwargs": {"resolution": None, "aspect_ratio": None}},
        }
        field = from_diffusers(pipe, arguments=more[name], path="own")
    labels = torch.ones(count, dtype=torch.int64) if name == "DiT" else None
    solver = replace(field.solver, spread=25.0)  # what a scheduler has, which does not know the size of a sample
    how = {"schedule": field.schedule, "solver": solver, "nfe": steps, "condition": labels}
    return sample(field, started(name, count), **how)


@pytest.mark.parametrize("name", PIPELINES)
def test_networks_of_any_weights_give_the_images_of_the_bridge(name):
    """Tiny networks, random weights: v and flow, as an eps network that knows nothing has no finite image."""
    make, call = PIPELINES[name]
    flow = name in ("SD3", "Flux")
    pipe = make(diffusers.FlowMatchEulerDiscreteScheduler() if flow else diffusers.DDIMScheduler(
        **SD, prediction_type="v_prediction"))  # fmt: skip
    expected = bridged(name, pipe, 2, 6)
    found = call(swapped(pipe), 2, 6)
    clipped = expected.clamp(-1, 1) if name in ("DDPM", "DiT") else expected
    assert found.dtype == torch.float32
    assert far(found, clipped) < 1e-4


def test_half_precision():
    pipe = stable_diffusion().to(torch.bfloat16)
    oracle = exact(pipe)
    text = {name: value.bfloat16() for name, value in words(2, "prompt_embeds").items()}
    found = swapped(pipe)(**text, guidance_scale=1.0, generator=seeded(), output_type="latent", height=8, width=8)
    assert found.images.dtype == torch.bfloat16
    assert pipe.scheduler.timesteps.dtype == torch.float32
    assert float(found.images.float().std()) == pytest.approx(STD, rel=0.1)
    assert oracle.told[0] == 999.0


@pytest.mark.parametrize("steps", [1, 2, 26, 50])
def test_whole_timesteps(steps):
    """For networks that look timesteps up in a table: the levels are moved to whole ones, not only what is told."""
    theirs = diffusers.DDPMScheduler(trained_betas=np.linspace(1e-3, 0.3, 50), num_train_timesteps=50)
    scheduler = MVMScheduler.from_config(theirs.config, round_timesteps=True, solver_options={"ending": 1})
    scheduler.set_timesteps(steps)
    told = scheduler.timesteps
    assert told.dtype == torch.int64
    assert (len(told), int(told[0])) == (steps, 49)
    assert steps == 1 or int(told[-1]) == 0
    oracle, x = Gaussian(theirs.alphas_cumprod, "epsilon"), started("DDPM")
    found = by_scheduler(scheduler, oracle, x)
    assert steps < 26 or far(found, oracle.denoised(x, 49.0)) < 8e-3
    scheduler.set_timesteps(timesteps=[40.4, 20.0])
    assert scheduler.timesteps.tolist() == [40, 20]
    with pytest.raises(ValueError, match=r"num_inference_steps=51.*\[1, 50\]"):
        scheduler.set_timesteps(51)


@pytest.mark.parametrize("steps", [26, 50])
def test_whole_timesteps_of_a_thousand(steps):
    theirs = diffusers.DDPMScheduler(**SD)
    oracle, x, options = Gaussian(theirs.alphas_cumprod, "epsilon"), started("DDPM"), {"ending": 1}
    scheduler = MVMScheduler.from_config(theirs.config, round_timesteps=True, solver_options=options)
    scheduler.set_timesteps(steps)
    assert far(by_scheduler(scheduler, oracle, x), oracle.denoised(x, 999.0)) < 1e-4
    scheduler = MVMScheduler.from_config(theirs.config, solver_options=options)
    scheduler.set_timesteps(steps)
    only_told = by_scheduler(scheduler, lambda x, t: oracle(x, t.round()), x)
    assert far(only_told, oracle.denoised(x, 999.0)) > 2e-4


def test_seeds_are_of_samples():
    def images(seeds, count, scale=1.0):
        pipe = dit()
        exact(pipe, learned_variance=True)
        return call_dit(swapped(pipe, rho=1.0, seeds=seeds), count, 9, scale)

    three, again = images([5, 6, 7], 3), images([5, 6, 8], 3)
    assert torch.equal(three[:2], again[:2])
    assert not torch.equal(three[2], again[2])
    # guided, DiTPipeline steps with every image twice
    assert far(images([5, 6, 7, 5, 6, 7], 3, scale=4.0), three) < 1e-5


def test_configs_survive_folders_and_changes(tmp_path):
    scheduler = MVMScheduler.from_config(diffusers.PNDMScheduler(**SD).config, rho=0.5, seeds=[3])
    scheduler.save_pretrained(tmp_path / "ours")
    again = MVMScheduler.from_pretrained(tmp_path / "ours", solver="sa", prediction_type="v_prediction")
    assert (again.config.rho, again.config.solver, again.config.seeds) == (0.5, "sa", [3])
    assert (again.training.kind, again.config.trained["prediction_type"]) == ("diffusion_v", "v_prediction")
    assert again.schedule == scheduler.schedule
    diffusers.HeunDiscreteScheduler().save_pretrained(tmp_path / "theirs")
    assert MVMScheduler.from_pretrained(tmp_path / "theirs").schedule == MVMScheduler.from_config(
        diffusers.DDIMScheduler(beta_start=0.00085, beta_end=0.012).config).schedule  # fmt: skip
    back = diffusers.DPMSolverMultistepScheduler.from_config(again.config.trained)
    assert (back.config.beta_schedule, back.config.prediction_type) == ("scaled_linear", "v_prediction")
    flow = MVMScheduler.from_config(diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0).config, shift=5.0)
    assert (flow.training.shift, flow.config.shift, flow.config.use_flow_sigmas) == (5.0, 5.0, True)
    between = diffusers.FlowMatchEulerDiscreteScheduler.from_config(flow.config, shift=2.0)
    assert between.shift == 2.0
    assert MVMScheduler.from_config(between.config).training.shift == 2.0


def test_a_pipeline_goes_round_through_a_folder(tmp_path):
    pipe = swapped(ddpm(diffusers.DDPMScheduler(prediction_type="v_prediction")), rho=0.0)
    expected = call_ddpm(pipe, 2, 5)
    pipe.save_pretrained(tmp_path)
    again = diffusers.DDPMPipeline.from_pretrained(tmp_path)
    again.set_progress_bar_config(disable=True)
    assert isinstance(again.scheduler, MVMScheduler)
    assert torch.equal(call_ddpm(again, 2, 5), expected)


def test_defaults_are_those_of_the_other_class():
    """from_config of diffusers drops what is a default of the other class; Heun's betas are not DDPM's."""
    heun = diffusers.HeunDiscreteScheduler()
    assert MVMScheduler.from_config(heun.config).schedule.alphas_cumprod == tuple(heun.alphas_cumprod.double().tolist())


@pytest.mark.parametrize("name", ["DPMSolverMultistepScheduler", "UniPCMultistepScheduler"])
def test_flows_of_solvers_of_betas(name):
    theirs = getattr(diffusers, name)(use_flow_sigmas=True, prediction_type="flow_prediction", flow_shift=3.0)
    ours = MVMScheduler.from_config(theirs.config)
    assert (ours.training.kind, ours.training.shift, len(ours)) == ("flow", 3.0, 1000)
    ours.set_timesteps(12)
    plain = MVMScheduler.from_config(theirs.config, flow_shift=1.0)
    plain.set_timesteps(12)
    sigma = plain.sigmas
    assert torch.allclose(ours.sigmas, 3 * sigma / (1 + 2 * sigma), atol=1e-6)


def test_learned_variances_are_left_out():
    ours = MVMScheduler.from_config(diffusers.DDPMScheduler(variance_type="learned_range").config)
    ours.set_timesteps(20)
    oracle = Gaussian(diffusers.DDPMScheduler().alphas_cumprod, "epsilon", learned_variance=True)
    assert far(by_scheduler(ours, oracle, started("DDPM")), oracle.answer(started("DDPM"), 999.0)) < 5e-3
    plain = MVMScheduler.from_config(diffusers.DDPMScheduler().config)
    plain.set_timesteps(20)
    with pytest.raises(ValueError, match="model_output of shape"):
        by_scheduler(plain, oracle, started("DDPM"))


def test_pipelines_that_would_take_another_scheduler_are_refused():
    network, scheduler = ddpm().unet, MVMScheduler.from_config(diffusers.DDPMScheduler().config)
    with pytest.raises(NotImplementedError, match=r"MVMScheduler \(.*config\['trained'\]\) is not implemented"):
        diffusers.DDIMPipeline(network, scheduler)
    with pytest.raises(NotImplementedError, match=r"MVMScheduler \("):
        diffusers.DDIMPipeline(network, MVMScheduler(prediction_type="u", schedule="mean-velocity"))
    pipe = swapped(diffusers.DDIMPipeline(network, diffusers.DDIMScheduler()))
    with pytest.raises(ValueError, match=r"eta, use_clipped_model_output .* use DDPMPipeline"):
        pipe(1, num_inference_steps=2)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("LCM", {}, "original_inference_steps=50' is no option"),
        ("EDMEuler", {}, r"sigma_data=0\.5' is no option"),
        ("CMStochasticIterative", {}, "is no option of the schedulers"),
        ("KarrasVe", {}, "is no option of the schedulers"),
        ("DDPMWuerstchen", {}, "is no option of the schedulers"),
        ("IPNDM", {}, "beta_start, beta_end, beta_schedule is missing"),
        ("DDPM", {"thresholding": True}, "thresholding=True: it changes x0_hat"),
        ("FlowMatchEulerDiscrete", {"invert_sigmas": True}, "invert_sigmas=True"),
        ("EulerDiscrete", {"timestep_type": "continuous"}, "timestep_type='continuous'"),
        ("HeunDiscrete", {"beta_schedule": "exp"}, "beta_schedule='exp' is not one of DDPMScheduler's"),
        ("DPMSolverMultistep", {"use_flow_sigmas": True}, "prediction_type='epsilon': .* straight path"),
        ("DPMSolverMultistep", {"prediction_type": "flow_prediction"}, "set use_flow_sigmas=True"),
    ],
)
def test_what_cannot_be_right_is_refused(name, options, message):
    theirs = getattr(diffusers, f"{name}Scheduler")(**options)
    with pytest.raises(ValueError, match=message):
        MVMScheduler.from_config(theirs.config)


def test_other_refusals():
    config, flow = (
        diffusers.DDPMScheduler().config,
        diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
    )
    for options, message in [
        ({"solver": "heun"}, "does not evaluate the network once a step"),
        ({"prediction_type": "velocity"}, "prediction_type='velocity' is unknown"),
        ({"roh": 1.0}, "'roh=1.0' is no option"),
    ]:
        with pytest.raises(ValueError, match=message):
            MVMScheduler.from_config(config, **options)
    with pytest.raises(ValueError, match="scheduler='LCMScheduler' is unknown"):
        MVMScheduler.from_config({**config, "_class_name": "LCMScheduler"})
    with pytest.raises(ValueError, match=r"use_dynamic_shifting=True; give set_timesteps its mu"):
        MVMScheduler.from_config(flow.config).set_timesteps(5)
    for solver, options in (("sa", {"t_min": 1e-6}), ("adams-power", {"r": 6.0})):
        scheduler = MVMScheduler.from_config({**config, "old": None}, solver=solver, solver_options=options)
        with pytest.raises(ValueError, match="use a larger t_min, or 'adams'"):
            scheduler.set_timesteps(20)
    for timesteps in ([1000], [5, 7], []):
        with pytest.raises(ValueError, match=r"must fall.*999\.0"):
            MVMScheduler.from_config(config).set_timesteps(timesteps=timesteps)
    terminal = MVMScheduler.from_config(diffusers.FlowMatchEulerDiscreteScheduler(shift_terminal=0.1).config)
    terminal.set_timesteps(1)
    assert terminal.timesteps.tolist() == [1000.0]


def test_seeds_stand_beside_the_generator_of_the_first_noise():
    pipe = stable_diffusion()
    exact(pipe)
    found = [call_sd(swapped(pipe, rho=1.0, seeds=seeds), 2, 5) for seeds in ([1, 2], [1, 3])]
    assert torch.equal(found[0][0], found[1][0])
    assert not torch.equal(found[0][1], found[1][1])
