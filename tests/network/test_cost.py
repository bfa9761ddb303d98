"""Costs against torch's own counter and against networks that were really built."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from mvm.network import DDTConfig, DiTConfig, build_network
from mvm.network.cost import multiply_adds, multiply_adds_by_kind, parameters

CASES = [
    (DiTConfig("tiny", patch=2), (1, 8, 8), 10),
    (DiTConfig("tiny", patch=4, width=96, heads=6, inner_block=2), (3, 16, 16), 1000),
    (DiTConfig("S", patch=2), (3, 16, 16), 10),
    (DiTConfig("S", patch=4, inner_block=8), (4, 32, 32), 1000),
    (DiTConfig("tiny", patch=2, depth=5, skip=True, local=True, modulation="shared"), (1, 8, 8), 10),
    (DDTConfig("tiny"), (8, 4, 4), 10),
    (DDTConfig("tiny", conditioning="in-context", inner_block=2), (8, 4, 4), 10),
    (DDTConfig("tiny", patch=2, inner_block=1, head_depth=3, head_width=64), (3, 8, 8), 1000),
    (DDTConfig("S", inner_block=8), (384, 4, 4), 10),
    (DDTConfig("S", conditioning="in-context", time_tokens=2, class_tokens=5), (384, 4, 4), 10),
]


@pytest.mark.parametrize(("config", "shape", "num_classes"), CASES)
def test_multiply_adds_are_half_the_flops_of_a_built_network(config, shape, num_classes):
    network = build_network(config, shape, num_classes)
    # torch's counter has no entry for the CPU's flash attention; the math backend is two products that it sees
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        network(torch.randn(1, *shape), torch.rand(1), torch.zeros(1, dtype=torch.long))
    assert 2 * multiply_adds(config, shape, num_classes) == counter.get_total_flops()
    assert parameters(config, shape, num_classes) == sum(p.numel() for p in network.parameters())


@pytest.mark.parametrize(
    ("size", "count", "published_millions", "published_giga"),
    [
        ("S", 32_852_752, 33.0, 6.06),
        ("B", 130_289_680, 130.5, 23.01),
        ("L", 458_179_856, 458.1, 80.71),
        ("XL", 674_766_096, 675.1, 118.64),
    ],
)
def test_sizes_are_those_of_the_first_dit(size, count, published_millions, published_giga):
    """Peebles and Xie 2023, patch 2 on 4x32x32 latents; SwiGLU and RoPE leave the cost where it was, within 1%."""
    where = DiTConfig(size=size, patch=2), (4, 32, 32), 1000
    assert parameters(*where) == count
    assert count == pytest.approx(published_millions * 1e6, rel=0.01)
    assert multiply_adds(*where) == pytest.approx(published_giga * 1e9, rel=0.01)


def test_products_by_hand():
    """4 tokens of width 16: every product written out."""
    config = DiTConfig(size="tiny", depth=3, width=16, heads=2, patch=2, inner_block=1)
    hidden = 48  # 2/3 of 4 * 16, rounded up to 16
    products = [
        4 * 4 * 16,  # patches to tokens
        256 * 16 + 16 * 16,  # level
        3 * 16 * 96,  # modulation
        3 * 4 * 16 * 48,  # queries, keys and values
        3 * 4 * 16 * 16,  # attention's last layer
        3 * 4 * (16 * 2 * hidden + hidden * 16),  # MLP
        2 * (16 * 32 + 4 * 16 * 4),  # heads
    ]
    assert multiply_adds_by_kind(config, (1, 4, 4), 5) == (sum(products), 3 * 2 * 4 * 4 * 16)


def test_counting_draws_no_random_numbers_and_takes_no_memory():
    torch.manual_seed(3)
    before = torch.get_rng_state()
    assert parameters(DiTConfig(size="XL", depth=400), (4, 32, 32), 1000) > 9e9  # 36 GB, were it built
    assert torch.equal(torch.get_rng_state(), before)


def test_a_patch_that_does_not_fit_is_named():
    with pytest.raises(ValueError, match=r"network\.patch=3"):
        multiply_adds(DiTConfig(size="tiny", patch=3), (1, 8, 8), 10)


@pytest.mark.parametrize(
    ("size", "count", "published_millions"),
    [("S", 196_350_592, 196), ("B", 293_971_072, 294), ("L", 621_655_936, 622), ("XL", 838_041_216, 839)],
)
def test_sizes_are_those_of_the_representation_autoencoders_ddt(size, count, published_millions):
    """Zheng et al. 2025, DiT^DH on 768x16x16 latents."""
    assert parameters(DDTConfig(size=size), (768, 16, 16), 1000) == count
    assert count == pytest.approx(published_millions * 1e6, rel=0.002)


def test_what_the_published_xl_has_more_and_less():
    """839M: biases of q, k, v, weights of norms, twice the level's waves; but no query and key norm, no rounding."""
    biases = 3 * (28 * 1152 + 2 * 2048)
    norms = 2 * (28 * 1152 + 2 * 2048) + 2048
    waves = 256 * 1152
    query_key = 2 * (28 * 64 + 2 * 128)
    rounding = 2 * 3 * 2048 * (5472 - 5461) + 2 * 2 * (5472 - 5461)  # of the head's SwiGLU to a multiple of 16
    positions = 256 * 1152  # sines and cosines that are not learned, yet counted
    ours = parameters(DDTConfig(size="XL"), (768, 16, 16), 1000)
    assert round((ours + biases + norms + waves + positions - query_key - rounding) / 1e6) == 839


def test_the_in_context_xl_of_width_1440_is_the_released_one():
    """RAEv2: 28 blocks of width 1440 without modulation, 1024x16x16 latents, inner head after block 8: 875M."""
    config = DDTConfig(size="XL", width=1440, heads=20, conditioning="in-context", inner_block=8)
    assert parameters(config, (1024, 16, 16), 1000) == 874_757_248


def test_xl_is_built_of_shapes_alone():
    with torch.device("meta"):
        network = build_network(DDTConfig(size="XL", inner_block=8), (768, 16, 16), 1000)
    assert all(p.is_meta for p in network.parameters())
    out = network(*(torch.empty(shape, device="meta", dtype=dtype) for shape, dtype in META), taps=(8,))
    assert out.prediction.shape == out.inner.shape == (2, 768, 16, 16)
    assert out.features[8].shape == (2, 256, 1152)


META = [((2, 768, 16, 16), torch.float32), ((2,), torch.float64), ((2,), torch.int64)]
