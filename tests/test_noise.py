"""Counter noise: Random123's known answers, moments, and that a number depends on (seed, stream, element) alone."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from mvm import noise

# Random123's kat_vectors, philox4x32 with 10 rounds: counter, key, answer
KNOWN = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]
SEEDS = torch.tensor([0, 1, 7, 2**32, 2**32 + 1, 2**63 - 1])


def words(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


def tensors(text: str) -> tuple[torch.Tensor, ...]:
    return tuple(torch.tensor([word]) for word in words(text))


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN)
def test_philox_known_answers(counter, key, answer):
    assert [int(w) for w in noise.philox(tensors(counter), tensors(key))] == words(answer)


def test_philox_known_answers_in_one_batch():
    counter = tuple(torch.tensor([words(k[0])[i] for k in KNOWN]) for i in range(4))
    key = tuple(torch.tensor([words(k[1])[i] for k in KNOWN]) for i in range(2))
    got = torch.stack(noise.philox(counter, key), dim=1).tolist()
    assert got == [words(k[2]) for k in KNOWN]


def test_normal_moments_and_law():
    z = noise.normal(torch.arange(200), 3, (1000,), torch.float64).flatten().numpy()
    n = z.size
    assert abs(z.mean()) < 5 / math.sqrt(n)
    assert abs(z.var() - 1) < 5 * math.sqrt(2 / n)
    assert abs(stats.skew(z)) < 5 * math.sqrt(6 / n)
    assert abs(stats.kurtosis(z)) < 5 * math.sqrt(24 / n)
    assert stats.kstest(z, "norm").pvalue > 1e-3


def test_uniform_moments_and_law():
    u = noise.uniform(torch.arange(100), noise.TIME, (999,)).flatten().numpy()
    assert u.dtype == np.float64
    assert 0 < u.min() < 1e-3
    assert 1 - 1e-3 < u.max() < 1
    assert stats.kstest(u, "uniform").pvalue > 1e-3


def test_seeds_streams_and_elements_are_uncorrelated():
    seeds, n = torch.arange(64), 2000
    rows = [noise.normal(seeds, stream, (n,), torch.float64) for stream in (noise.INITIAL, noise.TRAIN, noise.STEP)]
    table = torch.cat(rows).numpy()  # 192 rows, each n long: neighbouring seeds and streams
    off = np.corrcoef(table)[~np.eye(len(table), dtype=bool)]
    assert np.abs(off).max() < 6 / math.sqrt(n)
    lagged = (table[:, 1:] * table[:, :-1]).mean()  # the two numbers of a Box-Muller pair are neighbours
    assert abs(lagged) < 5 / math.sqrt(table.size)


def test_high_half_of_the_seed_counts():
    draws = noise.uniform(SEEDS, 0, (4,))
    for i in range(len(SEEDS)):
        for j in range(i):
            assert not torch.equal(draws[i], draws[j])


@settings(max_examples=30, deadline=None)
@given(
    st.permutations(list(range(6))),
    st.integers(1, 5),
    st.sampled_from([(), (1,), (3,), (5,), (2, 3), (3, 3, 3)]),
    st.sampled_from(["normal", "uniform"]),
)
def test_bit_equal_for_any_split_and_order(order, cut, shape, law):
    draw = getattr(noise, law)
    whole = draw(SEEDS, 5, shape)
    assert whole.shape == (6, *shape)
    shuffled = SEEDS[torch.tensor(order)]
    parts = torch.cat([draw(shuffled[:cut], 5, shape), draw(shuffled[cut:], 5, shape)])
    assert torch.equal(parts, whole[torch.tensor(order)])


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 7, 13])
def test_an_element_does_not_depend_on_how_many_follow(count):
    assert torch.equal(noise.normal(SEEDS, 2, (count,)), noise.normal(SEEDS, 2, (16,))[:, :count])
    assert torch.equal(noise.uniform(SEEDS, 2, (count,)), noise.uniform(SEEDS, 2, (16,))[:, :count])


def test_shape_only_folds_the_elements():
    assert torch.equal(noise.normal(SEEDS, 1, (3, 5)), noise.normal(SEEDS, 1, (15,)).reshape(6, 3, 5))


def test_normals_hold_float32_precision_in_every_dtype():
    z = noise.normal(SEEDS, 0, (9,))
    assert z.dtype == torch.float32
    assert torch.equal(noise.normal(SEEDS, 0, (9,), torch.float64), z.double())
    assert torch.equal(noise.normal(SEEDS, 0, (9,), torch.float16), z.half())
    assert torch.equal(noise.initial(SEEDS, (9,)), noise.normal(SEEDS, noise.INITIAL, (9,)))


def test_streams_are_distinct():
    names = (noise.INITIAL, noise.LABEL, noise.TIME, noise.TRAIN, noise.DEQUANTISE, noise.HUTCHINSON, noise.STEP)
    names += (noise.MIRROR, noise.BLOCK, noise.AUGMENT, noise.DROPOUT, noise.WARP, noise.WARP_NORMAL)
    names += (noise.COMPONENT, noise.DATA, noise.STEP + 1, noise.HUTCHINSON + 1)
    first = [float(noise.uniform(torch.tensor([3]), stream, (1,))) for stream in names]
    assert len(set(first)) == len(first)


def test_streams_keep_their_numbers():
    """Another number would be other noise for every run, sample and seed there is."""
    first = (noise.INITIAL, noise.LABEL, noise.TIME, noise.TRAIN, noise.DEQUANTISE, noise.COMPONENT, noise.DERIVE)
    assert first == tuple(range(7))
    later = (noise.MIRROR, noise.BLOCK, noise.DROPOUT, noise.WARP, noise.WARP_NORMAL, noise.DATA)
    assert later == tuple(range(7, 13))
    assert (noise.AUGMENT, noise.STEP, noise.HUTCHINSON) == (4096, 65536, 2**31)


def test_derive_is_independent_of_order_and_batch():
    whole = noise.derive(11, torch.arange(50))
    order = torch.randperm(50, generator=torch.Generator().manual_seed(0))
    assert torch.equal(noise.derive(11, order), whole[order])
    assert torch.equal(torch.cat([noise.derive(11, torch.tensor([i])) for i in range(50)]), whole)


def test_derived_seeds_are_valid_and_distinct():
    children = torch.cat([noise.derive(seed, torch.arange(2000)) for seed in (0, 1, 2**32, 2**63 - 1)])
    assert int(children.min()) >= 0
    assert len(set(children.tolist())) == len(children)
    assert stats.kstest(children.double().numpy() / 2**63, "uniform").pvalue > 1e-3
    big = noise.derive(0, torch.tensor([5, 5 + 2**32]))
    assert big[0] != big[1]


@pytest.mark.slow
def test_compiled_noise_is_bit_equal():
    """A step compiled whole draws its noise inside: the same integers, and normals to the last bit."""
    seeds = noise.derive(3, torch.arange(64))

    def draw(seeds):
        uniform = noise.uniform(seeds, noise.TIME, (5,))
        return uniform, noise.normal(seeds, noise.TRAIN, (3, 8, 8)), noise.derive(7, seeds)

    compiled = torch.compile(draw, fullgraph=True)
    for part in (seeds, SEEDS):
        assert all(torch.equal(a, b) for a, b in zip(compiled(part), draw(part), strict=True))


@pytest.mark.slow
def test_noise_drawn_by_one_program_for_all_streams_is_bit_equal():
    seeds = noise.derive(3, torch.arange(16))
    for stream in (noise.INITIAL, noise.STEP, noise.STEP + 25, noise.MAX_STREAM):
        drawn = noise.normal_compiled(seeds, stream, (3, 8, 8))
        assert torch.equal(drawn, noise.normal(seeds, stream, (3, 8, 8)))


def test_as_seeds_takes_lists_tensors_and_both_ends():
    assert noise.as_seeds([0, 2**63 - 1], 2).tolist() == [0, 2**63 - 1]
    assert noise.as_seeds(torch.tensor([3, 4], dtype=torch.int32), 2).dtype == torch.int64


def test_as_seeds_none_draws_from_torchs_generator():
    torch.manual_seed(5)
    first = noise.as_seeds(None, 8)
    torch.manual_seed(5)
    assert torch.equal(noise.as_seeds(None, 8), first)
    assert len(set(first.tolist())) == 8
    assert int(first.min()) >= 0


@pytest.mark.parametrize(
    ("seeds", "named"),
    [([1, 2], "2"), (torch.arange(4), "4"), ([], "0"), ([1, -1, 2], "-1"), ([1, 2, 2**63], str(2**63))],
)
def test_as_seeds_errors_name_the_value(seeds, named):
    with pytest.raises(ValueError, match=r"seeds") as error:
        noise.as_seeds(seeds, 3)
    assert named in str(error.value)
