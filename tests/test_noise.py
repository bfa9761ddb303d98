"""Counter noise: known answers, golden values, moments; a number depends on (seed, stream, element) alone."""

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


# --- golden values --------------------------------------------------------------------------------------------------

SEED = 2**40 + 5  # both halves of the key count
# stream: the first two words of SEED, then the first uniform and the first normal they make
GOLDEN = {
    "INITIAL": (0x5E5BE6AE, 0x22E16345, 0.36858979950193316, 0.9259703159332275),
    "LABEL": (0x94466BC2, 0xA084937A, 0.5791995382169262, -0.7295389175415039),
    "TIME": (0x6647B618, 0x25A8F006, 0.3995317277731374, 0.8159840106964111),
    "TRAIN": (0xBFA2A40D, 0x719B814D, 0.7485754521330819, -0.7140398025512695),
    "DEQUANTISE": (0x2DA2C21E, 0xC849BF32, 0.17826474423054606, 0.37517938017845154),
    "COMPONENT": (0xA654FF4D, 0x0059E53D, 0.6497344555100426, 0.9286113381385803),
    "DERIVE": (0x15D40F61, 0xE9098284, 0.08526703005190939, 1.8758066892623901),
    "MIRROR": (0xD8AF8E49, 0xF3156DFA, 0.8464287690585479, 0.5486842393875122),
    "BLOCK": (0xB216ED0A, 0xB4BDD3CC, 0.6956623221049085, -0.2324245721101761),
    "DROPOUT": (0x9E770BDC, 0x44456AAA, 0.619004002888687, -0.10248591750860214),
    "WARP": (0xE85D09BC, 0x16B1EFE1, 0.9076696477131918, 0.37363117933273315),
    "WARP_NORMAL": (0x467A103B, 0x9045B60C, 0.2753000397933647, -1.4797680377960205),
    "DATA": (0x9324F4AE, 0x1514506E, 0.5747826505685225, 0.9146596193313599),
    "AUGMENT": (0x7007E426, 0x7F408BDA, 0.43762041034642607, -1.2853987216949463),
    "STEP": (0x521092D7, 0x94FD96AA, 0.3205653930781409, -1.312630534172058),
    "HUTCHINSON": (0xC0BFDA20, 0x403E660F, 0.7529274300904945, -0.004506958182901144),
    "MAX_STREAM": (0x41848B7E, 0x9E9AB0E1, 0.2559287246549502, -1.2067131996154785),
}


def philox_in_numpy(counter, key):
    """Philox4x32-10 as published (Salmon et al. 2011, section 3.3), in whole 64-bit products: nothing of noise.py."""
    c, k = [np.asarray(word, np.uint64) for word in counter], [np.asarray(word, np.uint64) for word in key]
    for _ in range(10):
        first, second = c[0] * np.uint64(0xD2511F53), c[2] * np.uint64(0xCD9E8D57)
        high, low = (lambda p: p >> np.uint64(32)), (lambda p: p & np.uint64(0xFFFFFFFF))
        c = [high(second) ^ c[1] ^ k[0], low(second), high(first) ^ c[3] ^ k[1], low(first)]
        k = [low(k[0] + np.uint64(0x9E3779B9)), low(k[1] + np.uint64(0xBB67AE85))]
    return [int(word) for word in c]


def words_in_numpy(seed, stream, count):
    """The words of one seed's stream: block b is counter (b, stream, 0, 0), the seed is the key, low half first."""
    key = (seed % 2**32, seed // 2**32)
    blocks = [philox_in_numpy((b, stream, 0, 0), key) for b in range(-(-count // 4))]
    return np.array(blocks).flatten()[:count]


def normals_in_numpy(seed, stream, count):
    """Box-Muller on pairs of the cells' centres: radius by the first, angle by the second; cos, then sin."""
    u = (words_in_numpy(seed, stream, count + count % 2) + 0.5) / 2**32
    radius, angle = np.sqrt(-2 * np.log(u[::2])), 2 * np.pi * u[1::2]
    return np.stack([radius * np.cos(angle), radius * np.sin(angle)], 1).flatten()[:count]


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN)
def test_philox_in_numpy_has_the_known_answers(counter, key, answer):
    assert philox_in_numpy(words(counter), words(key)) == words(answer)


@pytest.mark.parametrize("name", GOLDEN)
def test_every_stream_keeps_its_golden_values(name):
    """A value that moves is other noise for every run, sample and seed there is: it is never to be set anew."""
    *integers, uniform, normal = GOLDEN[name]
    stream, seeds = getattr(noise, name), torch.tensor([SEED])
    assert words_in_numpy(SEED, stream, 2).tolist() == integers
    assert noise.uniform(seeds, stream, (2,))[0].tolist() == [(word + 0.5) * 2.0**-32 for word in integers]
    assert noise.uniform(seeds, stream, (1,)).item() == uniform
    assert noise.normal(seeds, stream, (1,)).item() == pytest.approx(normal, rel=2e-7)  # one digit of float32


@pytest.mark.parametrize("stream", [noise.INITIAL, noise.TIME, noise.STEP + 25, noise.HUTCHINSON + 1])
@pytest.mark.parametrize("seed", SEEDS.tolist())
def test_uniforms_and_normals_are_those_of_numpy(seed, stream):
    seeds = torch.tensor([seed])
    wanted = (words_in_numpy(seed, stream, 11) + 0.5) / 2**32
    assert noise.uniform(seeds, stream, (11,))[0].tolist() == wanted.tolist()  # exact: 33 bits fit in float64
    np.testing.assert_allclose(noise.normal(seeds, stream, (11,))[0], normals_in_numpy(seed, stream, 11), rtol=2e-7)
    np.testing.assert_allclose(noise.initial(seeds, (11,))[0], normals_in_numpy(seed, 0, 11), rtol=2e-7)


def test_uniforms_are_centres_of_cells():
    """Of the first and the last of 2^32 cells, too: log(0) would be an infinite normal."""
    assert noise._unit(torch.tensor([0, 1, 2**32 - 1])).tolist() == [2.0**-33, 3 * 2.0**-33, 1 - 2.0**-33]


def derived_in_numpy(seed, index):
    """Of counter (index low, index high, DERIVE, 0) the first two words, as an integer of 63 bits."""
    counter = (index % 2**32, index // 2**32, noise.DERIVE, 0)
    high, low, *_ = philox_in_numpy(counter, (seed % 2**32, seed // 2**32))
    return (high % 2**31) * 2**32 + low


def test_derived_seeds_keep_their_golden_values():
    indices = [0, 1, 2**32, 2**40 + 3]
    golden = [3233437217997023765, 3512611175891925259, 7344794759400205083, 1440183111842111059]
    assert noise.derive(7, torch.tensor(indices)).tolist() == golden
    assert noise.derive(SEED, torch.tensor([0, 1])).tolist() == [2219655996301481109, 7419978729212782183]
    for seed in SEEDS.tolist():
        assert noise.derive(seed, torch.tensor(indices)).tolist() == [derived_in_numpy(seed, i) for i in indices]


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
