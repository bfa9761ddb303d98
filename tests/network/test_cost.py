"""Costs against torch's own counter and against networks that were really built."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from mvm.network import DiT, DiTConfig
from mvm.network.cost import multiply_adds, multiply_adds_by_part, parameters

CASES = [
    ({"size": "tiny", "patch": 2}, (1, 8, 8), 10),
    ({"size": "tiny", "patch": 4, "width": 96, "heads": 6, "inner_block": 2}, (3, 16, 16), 1000),
    ({"size": "S", "patch": 2}, (3, 16, 16), 10),
    ({"size": "S", "patch": 4, "inner_block": 8}, (4, 32, 32), 1000),
]


@pytest.mark.parametrize(("options", "shape", "num_classes"), CASES)
def test_multiply_adds_are_half_the_flops_that_torch_counts(options, shape, num_classes):
    config = DiTConfig(**options)
    network = DiT(config, shape, num_classes)
    # torch's counter has no entry for the CPU's flash attention; the math backend is two products that it sees
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        network(torch.randn(1, *shape), torch.rand(1), torch.zeros(1, dtype=torch.long))
    assert 2 * multiply_adds(config, shape, num_classes) == counter.get_total_flops()


@pytest.mark.parametrize(("options", "shape", "num_classes"), CASES)
def test_parameters_equal_a_built_network(options, shape, num_classes):
    built = DiT(DiTConfig(**options), shape, num_classes)
    assert parameters(DiTConfig(**options), shape, num_classes) == sum(p.numel() for p in built.parameters())


@pytest.mark.parametrize(
    ("size", "count", "published_millions", "published_giga"),
    [
        ("S", 32_852_752, 33.0, 6.06),
        ("B", 130_289_680, 130.5, 23.01),
        ("L", 458_179_856, 458.1, 80.71),
        ("XL", 674_766_544, 675.1, 118.64),
    ],
)
def test_sizes_are_those_of_the_first_dit(size, count, published_millions, published_giga):
    """Peebles and Xie 2023, patch 2 on 4x32x32 latents; SwiGLU and RoPE leave the cost where it was, within 1%."""
    where = DiTConfig(size=size, patch=2), (4, 32, 32), 1000
    assert parameters(*where) == count
    assert count == pytest.approx(published_millions * 1e6, rel=0.01)
    assert multiply_adds(*where) == pytest.approx(published_giga * 1e9, rel=0.01)


def test_parts_by_hand():
    """4 tokens of width 16: every product written out."""
    config = DiTConfig(size="tiny", depth=3, width=16, heads=2, patch=2, inner_block=1)
    hidden = 48  # 2/3 of 4 * 16, rounded up to 16
    assert multiply_adds_by_part(config, (1, 4, 4), 5) == {
        "embed": 4 * 4 * 16,
        "level": 256 * 16 + 16 * 16,
        "modulation": 3 * 16 * 96,
        "qkv": 3 * 4 * 16 * 48,
        "attention": 3 * 2 * 4 * 4 * 16,
        "out": 3 * 4 * 16 * 16,
        "mlp": 3 * 4 * (16 * 2 * hidden + hidden * 16),
        "heads": 2 * (16 * 32 + 4 * 16 * 4),
    }


def test_counting_draws_no_random_numbers_and_takes_no_memory():
    torch.manual_seed(3)
    before = torch.get_rng_state()
    assert parameters(DiTConfig(size="XL", depth=400), (4, 32, 32), 1000) > 9e9  # 36 GB, were it built
    assert torch.equal(torch.get_rng_state(), before)


def test_a_patch_that_does_not_fit_is_named():
    with pytest.raises(ValueError, match=r"network\.patch=3"):
        multiply_adds(DiTConfig(size="tiny", patch=3), (1, 8, 8), 10)
