"""Conditions of any structure through the bridge and the samplers: exact fields of text vectors, tiny text networks."""

import pytest
import torch

from mvm import noise
from mvm.bridge import from_diffusers, from_edm, from_flow, from_model
from mvm.oracle import gaussian
from mvm.path import MEAN_VELOCITY, LinearFlow, joined_for
from mvm.path.condition import cat, map_tensors
from mvm.solver import Adaptive, ClassifierFree, Interval, guided, sample, solve

STD, SHAPE = 0.4, (3,)
TEXT = torch.tensor([[0.5, -1.0, 2.0], [1.5, 0.0, -0.5], [-2.0, 1.0, 0.25]], dtype=torch.float64)
EMPTY = torch.full((1, 3), 0.3, dtype=torch.float64)
SEEDS = torch.arange(3)
NOISE = noise.initial(SEEDS, SHAPE, torch.float64)


class Denoiser:
    """E[x0 | x0 + sigma eps] of data N(mean, STD^2), the mean told as text; remembers what it was given."""

    def __init__(self):
        self.calls = []

    def __call__(self, x, sigma, text, mask=None, added=None):
        self.calls.append((len(x), text, mask, added))
        mean = text if mask is None else text * mask
        mean = mean if added is None else mean + added["pooled"] * added["scale"]
        pull = STD**2 / (STD**2 + sigma[:, None] ** 2)
        return mean + pull * (x - mean)


def field(network=None, **options):
    return from_edm(network or Denoiser(), sigma_min=0.0, sigma_max=1e6, **options)


def exact(mean, **how):
    """The samples of the oracle of each row's own mean."""
    alone = [slice(i, i + 1) for i in range(3)]
    fields = [gaussian(row, STD, SHAPE).field(MEAN_VELOCITY) for row in mean]
    return torch.cat([sample(f, NOISE[i], seeds=SEEDS[i], **how) for f, i in zip(fields, alone, strict=True)])


def close(found, want, atol=1e-5):
    torch.testing.assert_close(found, want, rtol=0, atol=atol)


@pytest.mark.parametrize("rho", [0.0, 1.0])
def test_a_text_vector_for_every_sample(rho):
    want = exact(TEXT, nfe=9, rho=rho)
    for condition in (TEXT, {"text": TEXT}):  # the third argument, or a keyword
        close(sample(field(), NOISE, condition=condition, nfe=9, rho=rho, seeds=SEEDS), want)


def test_nested_structures_reach_the_network_row_by_row():
    network = Denoiser()
    mask = torch.tensor([[1.0, 0.0, 1.0]], dtype=torch.float64)
    added = {"pooled": TEXT.flip(0), "scale": 0.5, "ids": [torch.arange(3), None], "tau": torch.tensor(2.0)}
    found = sample(field(network), NOISE, nfe=7, condition={"text": TEXT, "mask": mask, "added": added})
    close(found, exact(TEXT * mask + TEXT.flip(0) * 0.5, nfe=7))
    _, _, seen_mask, seen = network.calls[0]
    assert seen_mask.shape == (3, 3)  # one row for all
    assert seen["scale"] == 0.5
    assert seen["ids"][1] is None
    assert seen["tau"].shape == ()


@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize("as_tensor", [False, True])
def test_guidance_of_gaussians_is_the_gaussian_of_the_guided_mean(joined, as_tensor):
    """null + w (conditional - null) of equal stds: the oracle whose mean is guided."""
    network = Denoiser()
    null, condition = (EMPTY, TEXT) if as_tensor else ({"text": EMPTY}, {"text": TEXT})
    bridged = field(network, null_arguments=null, joined=joined)
    solution = solve(bridged, NOISE, nfe=9, rho=0.75, seeds=SEEDS, condition=condition, guidance=ClassifierFree(2.5))
    close(solution.x, exact(EMPTY + 2.5 * (TEXT - EMPTY), nfe=9, rho=0.75))
    assert (solution.nfe, solution.passes) == (9, 18)
    assert [rows for rows, *_ in network.calls] == ([6] * 9 if joined else [3] * 18)
    assert joined_for(bridged, NOISE) is joined


@pytest.mark.parametrize("joined", [False, True])
def test_guidance_acts_in_its_interval_alone(joined):
    network, rule = Denoiser(), ClassifierFree(3.0, interval=Interval(0.3, 0.7))
    bridged = field(network, null_arguments={"text": EMPTY}, joined=joined)
    solution = solve(bridged, NOISE, nfe=13, condition={"text": TEXT}, guidance=rule)

    def by_hand(x, t, condition=None):
        inside = bool(rule.interval.contains(float(t[0]), MEAN_VELOCITY))
        mean = EMPTY + 3.0 * (TEXT - EMPTY) if inside else TEXT
        rows = [gaussian(mean[i], STD, SHAPE).denoise(x[i : i + 1], t[i : i + 1], MEAN_VELOCITY) for i in range(3)]
        return torch.cat(rows)

    close(solution.x, sample(by_hand, NOISE, nfe=13))
    inside = solution.passes - 13
    assert 0 < inside < 13
    assert len(network.calls) == (13 if joined else 13 + inside)


def test_on_its_own_path_and_by_other_conventions():
    def velocity(x, t, text):
        return (x - (text + (1 - t[:, None]) * STD**2 / ((1 - t[:, None]) ** 2 * STD**2 + t[:, None] ** 2)
                     * (x - (1 - t[:, None]) * text))) / t[:, None]  # fmt: skip

    want = exact(TEXT, nfe=9)
    close(sample(from_flow(velocity), NOISE, nfe=9, condition={"text": TEXT}), want)
    own = from_model(velocity, LinearFlow(), "flow", path="own", null_arguments=EMPTY)
    how = {"nfe": 9, "schedule": own.schedule, "condition": TEXT, "guidance": ClassifierFree(2.0)}
    close(sample(own, NOISE, **how), exact(2 * TEXT - EMPTY, nfe=9))


def test_solvers_that_take_samples_apart_take_their_rows():
    pytest.importorskip("torchdiffeq")
    solver = Adaptive(1e-3, 1e-3)
    found = sample(field(), NOISE, solver=solver, condition={"text": TEXT, "added": {"pooled": EMPTY, "scale": 0.0}})
    close(found, exact(TEXT, solver=solver))


def test_a_guided_field_takes_rows_of_different_times():
    bridged, rule = field(null_arguments=EMPTY), ClassifierFree(2.0, interval=Interval(0.0, 0.5))
    t = torch.tensor([0.9, 0.01, 0.9], dtype=torch.float64)
    found = guided(bridged, rule, MEAN_VELOCITY)(NOISE, t, {"text": TEXT})
    mean = torch.where((t > 0.5)[:, None], 2 * TEXT - EMPTY, TEXT)
    each = [gaussian(mean[i], STD, SHAPE).denoise(NOISE[i : i + 1], t[i : i + 1], MEAN_VELOCITY) for i in range(3)]
    close(found, torch.cat(each))


def test_any_callable_takes_structures():
    """A field that is no bridge: what solve hands on has a row per sample."""

    def plain(x, t, condition):
        assert condition["text"].shape == x.shape
        return condition["text"]

    close(sample(plain, NOISE, nfe=3, condition={"text": EMPTY}), EMPTY.expand(3, -1))


TWO = TEXT[:2]


@pytest.mark.parametrize(
    ("options", "condition", "named"),
    [
        ({}, {"text": TWO}, r"condition\['text'\] of shape \(2, 3\) has 2 rows for a batch of 3; give one per sample"),
        ({}, {"text": TEXT, "added": {"pooled": TWO}}, r"condition\['added'\]\['pooled'\] .* 2 rows"),
        ({}, {"text": TEXT, "added": [TWO]}, r"condition\['added'\]\[0\] .* 2 rows"),
        ({}, TWO, r"condition of shape \(2, 3\)"),
        ({"null_arguments": {"text": TWO}}, {"text": TEXT}, r"null_arguments\['text'\] .* 2 rows"),
        ({}, {"text": TEXT}, "missing a required argument: 'text'; Denoiser takes x, sigma, text.*null_arguments="),
        ({"null_arguments": {"txt": EMPTY, "text": EMPTY}}, TEXT, "unexpected keyword argument 'txt'; Denoiser takes"),
        (
            {"null_arguments": EMPTY},
            {"txt": TEXT, "text": TEXT},
            "unexpected keyword argument 'txt'.*takes x, sigma, text, mask, added",
        ),
        ({"null_arguments": EMPTY}, {"text": TEXT, "x": TEXT}, "multiple values for argument 'x'"),
        ({"joined": True}, {"text": TEXT}, "null_arguments=None: joined=True"),
        ({"joined": True, "null_arguments": EMPTY}, {"text": TEXT}, "condition: the structures differ here"),
        ({"joined": True, "null_arguments": {"text": EMPTY[:, :2]}}, {"text": TEXT}, r"condition\['text'\] .*\(3, 2\)"),
        ({}, "a cat", "condition must be a tensor .*'a cat'"),
        ({}, [1, 2, 3], "condition must be a tensor"),
        ({}, None, "condition=None: classifier-free guidance needs"),
    ],
)
def test_errors_name_what_is_wrong(options, condition, named):
    with pytest.raises(ValueError, match=named):
        sample(field(**options), NOISE, nfe=2, condition=condition, guidance=ClassifierFree(2.0))


def test_two_nulls_are_one_too_many():
    with pytest.raises(ValueError, match="null_label=3 and null_arguments"):
        field(num_classes=3, null_label=3, null_arguments=EMPTY)


class Trained:
    """What a model of MVM is to the samplers."""

    schedule, num_classes = MEAN_VELOCITY, 4

    def __call__(self, x, t, condition):
        return x


def test_a_model_of_classes_takes_labels_alone():
    three = torch.zeros(3, dtype=torch.int64)
    assert sample(Trained(), NOISE, nfe=1, condition=three).shape == NOISE.shape
    for condition in ({"class_labels": three}, torch.zeros(3, 4), three[:1]):
        with pytest.raises(ValueError, match=r"condition must be an int64 tensor of shape \(3,\)"):
            sample(Trained(), NOISE, nfe=1, condition=condition)
    classes = from_edm(lambda x, sigma, labels: x, num_classes=4)
    for condition in (torch.zeros(3, 4), torch.zeros(2, dtype=torch.int64), torch.zeros(3)):
        with pytest.raises(ValueError, match=r"condition must be an int64 tensor of shape \(3,\)"):
            sample(classes, NOISE, nfe=1, condition=condition)


def test_labels_join_too():
    seen = []

    def network(x, sigma, labels):
        seen.append(labels.tolist())
        return x * 0 + labels[:, None]

    bridged = from_edm(network, num_classes=4, null_label=4, joined=True)
    found = sample(bridged, NOISE, nfe=1, condition=torch.tensor([0, 1, 3]), guidance=ClassifierFree(2.0))
    assert seen == [[4, 4, 4, 0, 1, 3]]
    close(found, (2 * torch.tensor([0.0, 1, 3]) - 4)[:, None].expand(-1, 3).double())


def test_joined_rows_keep_their_order():
    one, other = {"a": torch.zeros(2, 1), "n": 7}, {"a": torch.ones(2, 1), "n": 7}
    assert cat(one, other)["a"].flatten().tolist() == [0, 0, 1, 1]
    assert map_tensors(lambda name, tensor: tensor + 1, (one["a"], "kept"))[1] == "kept"


# networks of diffusers

BATCH, SIZE = 3, (1, 8, 8)


def words(count, length=5, width=4, seed=0):
    return torch.randn(count, length, width, generator=torch.Generator().manual_seed(seed))


def unet(**options):
    import diffusers

    torch.manual_seed(0)
    blocks = {"down_block_types": ("CrossAttnDownBlock2D",), "up_block_types": ("CrossAttnUpBlock2D",)}
    size = {"sample_size": 8, "in_channels": 1, "out_channels": 1, "layers_per_block": 1, "norm_num_groups": 4}
    rest = {"block_out_channels": (8,), "cross_attention_dim": 4, "attention_head_dim": 4}
    return diffusers.UNet2DConditionModel(**{**size, **rest, **blocks, **options})


def pixart():
    import diffusers

    torch.manual_seed(0)
    size = {"num_attention_heads": 2, "attention_head_dim": 4, "num_layers": 1, "sample_size": 8, "patch_size": 2}
    rest = {"in_channels": 1, "out_channels": 2, "cross_attention_dim": 8, "caption_channels": 4}
    return diffusers.PixArtTransformer2DModel(**size, **rest, norm_num_groups=1)


def sd3():
    import diffusers

    torch.manual_seed(0)
    size = {"num_attention_heads": 2, "attention_head_dim": 4, "num_layers": 1, "sample_size": 8, "patch_size": 2}
    rest = {"in_channels": 1, "out_channels": 1, "joint_attention_dim": 4, "caption_projection_dim": 8}
    return diffusers.SD3Transformer2DModel(**size, **rest, pooled_projection_dim=6, pos_embed_max_size=8)


def text_time_unet():
    """The conditions of SDXL."""
    more = {"addition_embed_type": "text_time", "addition_time_embed_dim": 2}
    return unet(**more, projection_class_embeddings_input_dim=6 * 2 + 6)


def cases():
    pooled = torch.randn(BATCH, 6, generator=torch.Generator().manual_seed(2))
    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1], [1, 1, 0, 0, 0]])
    added = {"text_embeds": pooled, "time_ids": torch.tensor([[8.0, 8, 0, 0, 8, 8]])}
    none = {"resolution": None, "aspect_ratio": None}
    return {
        "unet": (unet, "DDPMScheduler", {"encoder_hidden_states": words(BATCH)}),
        "text and time": (text_time_unet, "DDPMScheduler",
                          {"encoder_hidden_states": words(BATCH), "added_cond_kwargs": added}),
        "pixart": (pixart, "DPMSolverMultistepScheduler",
                   {"encoder_hidden_states": words(BATCH), "encoder_attention_mask": mask, "added_cond_kwargs": none}),
        "sd3": (sd3, "FlowMatchEulerDiscreteScheduler",
                {"encoder_hidden_states": words(BATCH), "pooled_projections": pooled}),
    }  # fmt: skip


def null_of(condition):
    return map_tensors(lambda name, tensor: torch.zeros_like(tensor[:1]) + (not tensor.is_floating_point()), condition)


@pytest.mark.parametrize("name", ["unet", "text and time", "pixart", "sd3"])
def test_guided_x0_is_what_the_network_says_by_hand(name):
    """Predictions are linear in x0_hat: guided before or after the conversion is the same."""
    diffusers = pytest.importorskip("diffusers")
    make, scheduler, condition = cases()[name]
    model = make().eval()
    null = null_of(condition)
    bridged = from_diffusers(model, getattr(diffusers, scheduler)(), null_arguments=null, path="own")
    t = torch.full((BATCH,), 0.4, dtype=torch.float64)
    x = noise.initial(torch.arange(BATCH), SIZE)
    found = guided(bridged, ClassifierFree(2.0), bridged.schedule)(x, t, condition)
    told = bridged.clock(t).float()
    expanded = map_tensors(lambda _, tensor: tensor.expand(BATCH, *tensor.shape[1:]), condition)
    empty = map_tensors(lambda _, tensor: tensor.expand(BATCH, *tensor.shape[1:]), null)
    with torch.no_grad():
        without, given = (model(x, timestep=told, **c).sample[:, :1] for c in (empty, expanded))
    prediction = without + 2 * (given - without)
    alpha, sigma = (float(f(0.4)) for f in (bridged.own.alpha, bridged.own.sigma))
    want = x - sigma * prediction if bridged.kind == "flow" else (x - sigma * prediction) / alpha
    torch.testing.assert_close(found.detach(), want, rtol=0, atol=1e-5)
    assert float((given - without).abs().max()) > 1e-4  # the text matters


@pytest.mark.parametrize("name", ["unet", "text and time", "pixart", "sd3"])
def test_text_networks_sample_guided_in_an_interval(name):
    diffusers = pytest.importorskip("diffusers")
    make, scheduler, condition = cases()[name]
    x = noise.initial(torch.arange(BATCH), SIZE)
    rule = ClassifierFree(2.0, interval=Interval(0.2, 0.8))
    how = {"nfe": 4, "rho": 1.0, "seeds": [0, 1, 2]}
    found = []
    for joined in (False, True):
        bridged = from_diffusers(
            make(), getattr(diffusers, scheduler)(), null_arguments=null_of(condition), joined=joined
        )
        found.append(sample(bridged, x, condition=condition, guidance=rule, **how))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)
    assert bool(torch.isfinite(found[0]).all())
    assert not torch.allclose(found[0], sample(bridged, x, condition=condition, **how), atol=1e-4)


def test_one_tensor_is_the_text_and_takes_the_networks_dtype():
    diffusers = pytest.importorskip("diffusers")
    bridged = from_diffusers(unet().to(torch.bfloat16), diffusers.DDPMScheduler(), null_arguments=words(1, seed=1))
    x = noise.initial(torch.arange(BATCH), SIZE)
    how = {"nfe": 2, "guidance": ClassifierFree(1.5)}
    found = sample(bridged, x, condition=words(BATCH), **how)
    assert torch.equal(found, sample(bridged, x, condition={"encoder_hidden_states": words(BATCH)}, **how))
    assert found.dtype == torch.float32


def test_a_condition_goes_before_arguments():
    diffusers = pytest.importorskip("diffusers")
    model, scheduler = unet(), diffusers.DDPMScheduler()
    x, t = noise.initial(torch.arange(BATCH), SIZE), torch.full((BATCH,), 0.4, dtype=torch.float64)
    fixed = from_diffusers(model, scheduler, arguments={"encoder_hidden_states": words(BATCH)})
    plain = from_diffusers(model, scheduler)
    with torch.no_grad():
        assert torch.equal(fixed(x, t), plain(x, t, words(BATCH)))
        assert torch.equal(fixed(x, t, words(BATCH, seed=1)), plain(x, t, words(BATCH, seed=1)))


@pytest.mark.parametrize(
    ("make", "condition", "null", "named"),
    [
        (unet, words(BATCH), None, "missing a required argument: 'encoder_hidden_states'.*in null_arguments"),
        (sd3, words(BATCH), None, "SD3Transformer2DModel needs encoder_hidden_states.*in null_arguments"),
        (
            unet,
            {"encoder_hidden_states": words(BATCH), "mask": words(1)},
            words(1),
            "unexpected .*'mask'.*takes sample",
        ),
        (unet, words(2), words(1), r"condition of shape \(2, 5, 4\) has 2 rows for a batch of 3"),
    ],
)
def test_errors_of_text_networks(make, condition, null, named):
    diffusers = pytest.importorskip("diffusers")
    bridged = from_diffusers(make(), diffusers.FlowMatchEulerDiscreteScheduler(), null_arguments=null)
    x = noise.initial(torch.arange(BATCH), SIZE)
    with pytest.raises(ValueError, match=named):
        sample(bridged, x, nfe=2, condition=condition, guidance=ClassifierFree(2.0))
