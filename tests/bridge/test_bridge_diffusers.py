"""Tiny networks of diffusers as fields: x0_hat is what the scheduler itself makes of the same prediction."""

import pytest
import torch

from mvm import noise
from mvm.bridge import SCHEDULERS, as_eps, from_diffusers
from mvm.path import MEAN_VELOCITY, equal_snr_time
from mvm.solver import ClassifierFree, sample

diffusers = pytest.importorskip("diffusers")

SHAPE = (1, 8, 8)


def unet(**options):
    torch.manual_seed(0)
    kind = {"sample_size": 8, "in_channels": 1, "out_channels": 1, "layers_per_block": 1, "norm_num_groups": 4}
    blocks = {"block_out_channels": (8, 8), "down_block_types": ("DownBlock2D",) * 2}
    return diffusers.UNet2DModel(**{**kind, **blocks, "up_block_types": ("UpBlock2D",) * 2, **options})


def dit(**options):
    torch.manual_seed(0)
    size = {"num_attention_heads": 2, "attention_head_dim": 4, "num_layers": 1, "sample_size": 8, "patch_size": 2}
    rest = {"in_channels": 1, "out_channels": 2, "num_embeds_ada_norm": 10, "norm_num_groups": 1}
    return diffusers.DiTTransformer2DModel(**{**size, **rest, **options})


def state(count=3):
    return torch.randn(count, *SHAPE, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def at(field, x, own_time):
    """x0_hat at a level of the model's own path, for a state of that path."""
    t = equal_snr_time(torch.full((x.shape[0],), own_time, dtype=torch.float64), field.own, MEAN_VELOCITY)
    scale = MEAN_VELOCITY.norm(t) / field.own.norm(own_time)
    return field(x * scale[:, None, None, None], t)


@pytest.mark.parametrize("prediction", ["epsilon", "sample", "v_prediction"])
@pytest.mark.parametrize("betas", ["linear", "scaled_linear", "squaredcos_cap_v2", "trained", "zero_snr"])
@pytest.mark.parametrize("name", ["DDPMScheduler", "DDIMScheduler"])
def test_x0_hat_is_the_schedulers_own(name, betas, prediction):
    options = {"clip_sample": False, "prediction_type": prediction}
    if betas == "trained":
        options["trained_betas"] = torch.linspace(1e-3, 0.3, 20).tolist()
        options["num_train_timesteps"] = 20
    elif betas == "zero_snr":
        options["rescale_betas_zero_snr"] = True
    else:
        options["beta_schedule"] = betas
    scheduler = getattr(diffusers, name)(**options)
    steps = scheduler.config.num_train_timesteps
    scheduler.set_timesteps(steps)
    model = unet()
    field = from_diffusers(model, scheduler)
    x = state()
    for step in (0, 3, steps // 2, int(0.9 * steps)):
        with torch.no_grad():
            prediction = model(x.float(), step).sample.double()
            want = scheduler.step(prediction, step, x).pred_original_sample
            got = at(field, x, float(field.own.time(step)))
        scale = max(1.0, float(want.abs().max()))
        assert float((got - want).abs().max()) < 1e-5 * scale


@pytest.mark.parametrize("name", ["EulerDiscreteScheduler", "DPMSolverMultistepScheduler", "UniPCMultistepScheduler"])
def test_zero_snr_of_schedulers_that_divide_by_alpha(name):
    """They write 2^-24 for the last alpha^2, which the network never saw and which is above the one before."""
    options = {"rescale_betas_zero_snr": True, "prediction_type": "v_prediction"}
    mended, plain = getattr(diffusers, name)(**options), diffusers.DDIMScheduler(**options)
    assert float(mended.alphas_cumprod[-1]) > float(mended.alphas_cumprod[-2])
    model, x = unet(), noise.initial(torch.arange(2), SHAPE)
    found, want = (sample(from_diffusers(model, scheduler), x, nfe=4) for scheduler in (mended, plain))
    torch.testing.assert_close(found, want, rtol=0, atol=1e-5)


@pytest.mark.parametrize("prediction", ["epsilon", "v_prediction"])
def test_euler_has_the_same_model(prediction):
    """Its states are x0 + sigma eps; the network sees them scaled to the table's path."""
    scheduler = diffusers.EulerDiscreteScheduler(beta_schedule="scaled_linear", prediction_type=prediction)
    scheduler.set_timesteps(1000)
    model = unet()
    field = from_diffusers(model, scheduler)
    step, x = 400, state()
    time = scheduler.timesteps[999 - step]
    exploded = x / float(field.own.alpha(field.own.time(step)))
    seen = scheduler.scale_model_input(exploded, time)
    with torch.no_grad():
        answer = model(seen.float(), time).sample.double()
        want = scheduler.step(answer, time, exploded).pred_original_sample
        torch.testing.assert_close(at(field, x, float(field.own.time(step))), want.double(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["EDMEulerScheduler", "EDMDPMSolverMultistepScheduler"])
@pytest.mark.parametrize("prediction", ["epsilon", "v_prediction"])
def test_edm_preconditions_as_its_scheduler(name, prediction):
    scheduler = getattr(diffusers, name)(prediction_type=prediction, sigma_data=0.7)
    model, x, sigma = unet(), state(), 3.0
    with torch.no_grad():
        seen = scheduler.precondition_inputs(x, sigma)
        answer = model(seen.float(), scheduler.precondition_noise(sigma)).sample.double()
        want = scheduler.precondition_outputs(x, answer, sigma)
        got = at(from_diffusers(model, scheduler), x, sigma)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-5)


def test_euler_of_continuous_time():
    options = {"timestep_type": "continuous", "prediction_type": "v_prediction", "sigma_min": 0.002, "sigma_max": 700.0}
    scheduler = diffusers.EulerDiscreteScheduler(**options, use_karras_sigmas=True)
    scheduler.set_timesteps(25)
    model, x, index = unet(), state(), 12
    time, sigma = scheduler.timesteps[index], float(scheduler.sigmas[index])
    with torch.no_grad():
        answer = model(scheduler.scale_model_input(x, time).float(), time).sample.double()
        want = scheduler.step(answer, time, x).pred_original_sample
        torch.testing.assert_close(at(from_diffusers(model, scheduler), x, sigma), want, rtol=0, atol=1e-4)
    with pytest.raises(ValueError, match="continuous"):
        from_diffusers(model, diffusers.EulerDiscreteScheduler(timestep_type="continuous"))
    with pytest.raises(ValueError, match="round_timesteps=True"):
        from_diffusers(model, diffusers.EulerDiscreteScheduler(**options), round_timesteps=True)


@pytest.mark.parametrize("name", ["FlowMatchEulerDiscreteScheduler", "FlowMatchHeunDiscreteScheduler"])
def test_flow_match(name):
    model, x, sigma = unet(), state(), 0.25
    with torch.no_grad():
        want = x - sigma * model(x.float(), 1000 * sigma).sample.double()
        got = at(from_diffusers(model, getattr(diffusers, name)(shift=3.0)), x, sigma)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-5)


def test_flow_match_with_data_at_one():
    model, x, sigma = unet(), state(), 0.25
    with torch.no_grad():
        want = x + sigma * model(x.float(), 1000 * (1 - sigma)).sample.double()
        got = at(from_diffusers(model, diffusers.FlowMatchEulerDiscreteScheduler(invert_sigmas=True)), x, sigma)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-5)


def test_flow_by_a_solver_of_betas():
    scheduler = diffusers.DPMSolverMultistepScheduler(use_flow_sigmas=True, prediction_type="flow_prediction")
    model, x, sigma = unet(), state(), 0.25
    with torch.no_grad():
        want = x - sigma * model(x.float(), 1000 * sigma).sample.double()
        torch.testing.assert_close(at(from_diffusers(model, scheduler), x, sigma), want, rtol=0, atol=1e-5)
    with pytest.raises(ValueError, match="use as_flow"):
        as_eps(lambda x, t, condition: x, scheduler)


@pytest.mark.parametrize("name", [name for name in SCHEDULERS if hasattr(diffusers, name)])
def test_every_known_scheduler_samples(name):
    if name == "DPMSolverSDEScheduler":
        pytest.importorskip("torchsde")
    field = from_diffusers(unet(), getattr(diffusers, name)())
    x = sample(field, noise.initial(torch.arange(2), SHAPE), nfe=3, rho=1.0, seeds=[0, 1])
    assert x.shape == (2, *SHAPE)
    assert bool(torch.isfinite(x).all())


def test_of_twice_the_channels_the_first_half_is_the_prediction():
    scheduler = diffusers.DDPMScheduler(variance_type="learned_range", clip_sample=False)
    model, x, step = unet(out_channels=2), state(), 300
    with torch.no_grad():
        answer = model(x.float(), step).sample.double()
        want = scheduler.step(answer, step, x).pred_original_sample
        field = from_diffusers(model, scheduler)
        torch.testing.assert_close(at(field, x, float(field.own.time(step))), want, rtol=0, atol=1e-4)


def test_dit_without_labels_is_told_the_label_behind_its_classes():
    model, t = dit(), torch.full((3,), 0.4, dtype=torch.float64)
    field = from_diffusers(model, diffusers.DDPMScheduler())
    with torch.no_grad():
        assert torch.equal(field(state(), t), field(state(), t, torch.full((3,), 10)))
        assert not torch.equal(field(state(), t), field(state(), t, torch.full((3,), 9)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_networks_of_other_dtypes(dtype):
    x = noise.initial(torch.arange(2), SHAPE)
    options = {"prediction_type": "v_prediction"}
    found = sample(from_diffusers(unet().to(dtype), diffusers.DDPMScheduler(**options)), x, nfe=3)
    want = sample(from_diffusers(unet(), diffusers.DDPMScheduler(**options)), x, nfe=3)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, want, rtol=0, atol=0.05)


@pytest.mark.parametrize("path", ["mvm", "own"])
@pytest.mark.parametrize("rho", [0.0, 1.0])
def test_dit_with_labels_guided(rho, path):
    """2C channels out: the first half is the prediction; condition None is the label behind the classes."""
    field = from_diffusers(dit(), diffusers.DDPMScheduler(), path=path)
    assert field.num_classes == 10
    x = noise.initial(torch.arange(3), SHAPE)
    how = {"schedule": field.schedule, "nfe": 4, "rho": rho, "seeds": [0, 1, 2]}
    labels = torch.tensor([1, 5, 9])
    plain = sample(field, x, condition=labels, **how)
    guided = sample(field, x, condition=labels, guidance=ClassifierFree(2.0), **how)
    assert plain.shape == guided.shape == (3, *SHAPE)
    assert bool(torch.isfinite(guided).all())
    assert not torch.equal(plain, guided)


def test_a_unet_with_classes_needs_labels():
    field = from_diffusers(unet(num_class_embeds=4), diffusers.DDPMScheduler())
    x = noise.initial(torch.arange(2), SHAPE)
    assert sample(field, x, nfe=2, condition=torch.tensor([0, 3])).shape == x.shape
    with pytest.raises(ValueError, match="null_label"):
        sample(field, x, nfe=2)
    with pytest.raises(ValueError, match="0 to 3"):
        sample(field, x, nfe=2, condition=torch.tensor([0, 4]))
    from_null = from_diffusers(unet(num_class_embeds=4), diffusers.DDPMScheduler(), num_classes=3, null_label=3)
    assert sample(from_null, x, nfe=2).shape == x.shape


def test_other_inputs_reach_the_network():
    torch.manual_seed(0)
    blocks = {"down_block_types": ("CrossAttnDownBlock2D",), "up_block_types": ("CrossAttnUpBlock2D",)}
    size = {"sample_size": 8, "in_channels": 1, "out_channels": 1, "layers_per_block": 1, "norm_num_groups": 4}
    rest = {"block_out_channels": (8,), "cross_attention_dim": 4, "attention_head_dim": 4}
    model = diffusers.UNet2DConditionModel(**size, **rest, **blocks)
    words, t = torch.randn(2, 3, 2, 4), torch.full((3,), 0.4, dtype=torch.float64)
    fields = [from_diffusers(model, diffusers.DDPMScheduler(), arguments={"encoder_hidden_states": w.expand(3, -1, -1)})
              for w in words]  # fmt: skip
    with torch.no_grad():
        assert not torch.equal(fields[0](state(), t), fields[1](state(), t))


def test_pipelines_bring_their_scheduler():
    model, scheduler = unet(), diffusers.DDPMScheduler(beta_schedule="squaredcos_cap_v2")
    piped, plain = from_diffusers(diffusers.DDPMPipeline(model, scheduler)), from_diffusers(model, scheduler)
    x, t = state(), torch.full((3,), 0.4, dtype=torch.float64)
    assert torch.equal(piped(x, t), plain(x, t))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("DDPMScheduler", {}),
        ("FlowMatchEulerDiscreteScheduler", {}),
        ("DPMSolverMultistepScheduler", {"use_flow_sigmas": True, "prediction_type": "flow_prediction"}),
    ],
)
def test_whole_timesteps_are_told(name, options):
    told = []

    class Spy(diffusers.UNet2DModel):
        def forward(self, sample, timestep, **rest):
            told.append(timestep)
            return super().forward(sample, timestep, **rest)

    spied = Spy.from_config(unet().config)
    x, t = state(), torch.full((3,), 0.4, dtype=torch.float64)
    for rounded in (False, True):
        from_diffusers(spied, getattr(diffusers, name)(**options), round_timesteps=rounded)(x, t)
    assert float(told[0][0]) % 1 != 0
    assert float(told[1][0]) == round(float(told[0][0]))
    assert not spied.training


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: from_diffusers(unet(), diffusers.LCMScheduler()), "scheduler=LCMScheduler .*DDPMScheduler.*EDMEuler"),
        (lambda: from_diffusers(unet()), "scheduler=None"),
        (lambda: from_diffusers("a/name", diffusers.DDPMScheduler()), "str is neither a network nor a pipeline"),
        (lambda: from_diffusers(unet(), diffusers.DDPMScheduler(prediction_type="noise")), "prediction_type='noise'"),
        (lambda: from_diffusers(unet(), diffusers.EDMEulerScheduler(), round_timesteps=True), "round_timesteps"),
        (
            lambda: from_diffusers(unet(), diffusers.UniPCMultistepScheduler(prediction_type="flow_prediction")),
            "set use_flow_sigmas=True",
        ),
        (lambda: from_diffusers(torch.nn.Linear(1, 1), diffusers.DDPMScheduler()), "Linear is no network of diffusers"),
        (lambda: from_diffusers(unet(), diffusers.DDPMScheduler(), path="theirs"), "path='theirs'"),
    ],
)
def test_bad_arguments_are_named(make, named):
    with pytest.raises(ValueError, match=named):
        make()


def test_flux_is_told_times_up_to_one():
    """It multiplies them by 1000 itself, and FluxPipeline divides the scheduler's timesteps by that."""
    torch.manual_seed(0)
    size = {"num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 1, "num_single_layers": 1}
    text = {"joint_attention_dim": 4, "pooled_projection_dim": 4, "axes_dims_rope": (2, 2, 4)}
    model, told = diffusers.FluxTransformer2DModel(**size, **text, in_channels=4), []
    model.register_forward_pre_hook(lambda _, args, named: told.append(named["timestep"]), with_kwargs=True)
    arguments = {"img_ids": torch.zeros(6, 3), "txt_ids": torch.zeros(2, 3)}
    words = {"encoder_hidden_states": torch.randn(1, 2, 4), "pooled_projections": torch.randn(1, 4)}
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0)
    field = from_diffusers(model, scheduler, arguments=arguments, path="own")
    x = torch.randn(2, 6, 4)
    condition = {name: value.expand(2, *value.shape[1:]) for name, value in words.items()}
    for t in (1.0, 0.25):
        with torch.no_grad():
            found = field(x, torch.full((2,), t, dtype=torch.float64), condition)
            velocity = model(x, timestep=torch.full((2,), t), **arguments, **condition).sample
        assert torch.allclose(found, x - t * velocity, atol=1e-5)
        assert told[-2].tolist() == [t, t]
