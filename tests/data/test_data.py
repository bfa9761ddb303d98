"""The embedded digits against scikit-learn's, the order of the data, and the stores it is drawn from."""

import dataclasses
import threading
from math import prod

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.datasets import load_digits

from mvm import noise
from mvm.data import Images, OnHost, Order, Resident, digits, mirror, mirrored, send
from mvm.latent import Pixels
from mvm.recipes.schema import CodecConfig


def test_digits_are_scikit_learns():
    """As a multiset of (image, label): grey level g of 0..16 is round(g 255/16)."""
    theirs, ours = load_digits(), digits()
    assert ours.images.shape == (1797, 1, 8, 8)
    assert ours.images.dtype == torch.uint8
    assert ours.labels.dtype == torch.int64
    want = sorted(
        (int(label), tuple(round(g * 255 / 16) for g in row))
        for row, label in zip(theirs.data.astype(int).tolist(), theirs.target, strict=True)
    )
    got = sorted(
        (label, tuple(row)) for row, label in zip(ours.images.flatten(1).tolist(), ours.labels.tolist(), strict=True)
    )
    assert got == want


def test_shuffle_is_the_documented_one():
    order = np.random.default_rng(0).permutation(1797)
    assert digits().labels.tolist() == load_digits().target[order].tolist()


def test_upright():
    """Rows are rows: the first image is scikit-learn's, not its transpose."""
    first = np.random.default_rng(0).permutation(1797)[0]
    want = np.round(load_digits().images[first] * (255 / 16))
    assert digits().images[0, 0].tolist() == want.tolist()


def test_split_is_disjoint_and_complete():
    everything, train, held_out = digits(), digits("train"), digits("held-out")
    assert (len(train), len(held_out)) == (1400, 397)
    assert torch.equal(torch.cat((held_out.images, train.images)), everything.images)
    assert torch.equal(torch.cat((held_out.labels, train.labels)), everything.labels)
    rows = [{tuple(row) for row in part.images.flatten(1).tolist()} for part in (train, held_out)]
    assert not rows[0] & rows[1]


@pytest.mark.parametrize("split", ["train", "held-out"])
def test_classes_are_balanced(split):
    labels = digits(split).labels
    counts = torch.bincount(labels, minlength=10)
    assert len(counts) == 10
    expected = len(labels) / 10
    assert float(((counts - expected) ** 2 / expected).sum()) < 21.7  # chi-squared, 9 degrees, 1 %


def test_images_can_be_sliced():
    data = digits()
    some = data[torch.tensor([5, 3, 5])]
    assert len(some) == 3
    assert some.labels.tolist() == [data.labels[i] for i in (5, 3, 5)]
    assert torch.equal(data[2:4].images, data.images[2:4])
    assert some.classes == tuple("0123456789")


def test_unknown_split():
    with pytest.raises(ValueError, match=r"split='test'.*all, train, held-out"):
        digits("test")


def test_callers_cannot_spoil_the_data():
    before = digits().images.clone()
    digits().images.zero_()
    assert torch.equal(digits().images, before)


@pytest.mark.parametrize("scale", [1.0, 2.0, 0.37])
def test_pixels_codec_is_exact_on_every_grey_level(scale):
    codec = Pixels((1, 16, 16), scale)
    levels = torch.arange(256, dtype=torch.uint8).reshape(1, 1, 16, 16)
    x = codec.encode(levels)
    assert x.dtype == torch.float32
    assert (float(x.min()), float(x.max())) == pytest.approx((-scale, scale), rel=1e-7)
    assert torch.equal(codec.decode(x), levels)
    assert torch.equal(codec.decode(x + 0.49 * scale / 127.5), levels)  # the nearest level
    assert codec.decode(torch.tensor([-3.0, 3.0])).tolist() == [0, 255]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"scale": 0.0}, r"codec.scale=0.0 is out of range; it must lie in \[0.01, 100\]"),
        ({"scale": float("nan")}, r"codec.scale=nan is out of range"),
        ({"scale": 2.0, "kind": "rae", "channels": 1, "side": 1}, r"codec.scale=2.0 is for pixels"),
    ],
    ids=str,
)
def test_scales_that_cannot_be(options, words):
    with pytest.raises(ValueError, match=words):
        CodecConfig(**options)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 50), st.integers(0, 2**40), st.integers(1, 70))
def test_each_epoch_is_a_permutation(size, seed, batch):
    """Whatever the batch: batches cut the stream, they do not make it."""
    order = Order(size, seed)
    steps = -(-3 * size // batch)
    stream = torch.cat([order.indices(order.positions(step, batch)) for step in range(steps)])
    for epoch in range(3):
        assert sorted(stream[epoch * size : (epoch + 1) * size].tolist()) == list(range(size))
    assert torch.equal(stream, Order(size, seed).indices(torch.arange(steps * batch)))


def test_order_is_a_pure_function_of_seed_and_step():
    one, other = Order(100, 3), Order(100, 3)
    wanted = {step: one.indices(one.positions(step, 7)).tolist() for step in range(60)}
    for step in (59, 0, 31, 14, 15, 14):  # back and forth over epochs
        assert other.indices(other.positions(step, 7)).tolist() == wanted[step]
    fresh = Order(100, 4)
    assert fresh.indices(fresh.positions(0, 100)).tolist() != one.indices(one.positions(0, 100)).tolist()


def test_epochs_differ():
    order = Order(100, 0)
    first, second = (order.indices(torch.arange(100) + 100 * epoch) for epoch in (0, 1))
    assert int((first == second).sum()) < 10


def test_a_batch_that_crosses_an_epoch():
    order = Order(10, 5)
    positions = order.positions(1, 8)
    assert positions.tolist() == list(range(8, 16))
    indices = order.indices(positions)
    first, second = (Order(10, 5).indices(torch.arange(10) + 10 * epoch) for epoch in (0, 1))
    assert indices.tolist() == [*first[8:].tolist(), *second[:6].tolist()]
    # a batch of several epochs
    assert torch.bincount(order.indices(order.positions(0, 35)), minlength=10).tolist() == [
        3 + (i in order.indices(torch.arange(30, 35)).tolist()) for i in range(10)
    ]


def test_seeds_belong_to_positions():
    order = Order(10, 5)
    seeds = order.seeds(torch.arange(1000))
    assert torch.equal(seeds, noise.derive(5, torch.arange(1000)))
    assert len(set(seeds.tolist())) == 1000  # the same image in two epochs meets other noise
    assert not set(seeds.tolist()) & set(Order(10, 6).seeds(torch.arange(1000)).tolist())
    assert torch.equal(order.seeds(order.positions(3, 8)), seeds[24:32])


def test_an_order_cannot_be_changed():
    order = Order(10, 5)
    with pytest.raises(dataclasses.FrozenInstanceError):
        order.seed = 6
    assert order == Order(10, 5)
    assert order != Order(10, 6)


def test_orders_side_by_side_do_not_disturb_each_other():
    """Permutations are remembered between calls, under their seed, epoch and size."""
    orders = [Order(size, seed) for size in (10, 11) for seed in (0, 1)]
    want = [np.random.default_rng([order.seed, 2]).permutation(order.size).tolist() for order in orders]
    for _ in range(2):
        assert [order.indices(torch.arange(order.size) + 2 * order.size).tolist() for order in orders] == want


# --- mirrors ------------------------------------------------------------------------------------------------------


def test_mirror_flips_left_to_right_what_it_is_told_to():
    images = torch.arange(2 * 1 * 2 * 3, dtype=torch.uint8).reshape(2, 1, 2, 3)
    shown = mirror(images, torch.tensor([False, True]))
    assert shown.dtype == torch.uint8
    assert shown[0].tolist() == [[[0, 1, 2], [3, 4, 5]]]
    assert shown[1].tolist() == [[[8, 7, 6], [11, 10, 9]]]
    assert torch.equal(mirror(shown, torch.tensor([False, True])), images)


def test_half_are_mirrored_decided_by_the_seed_alone():
    seeds = Order(100, 3).seeds(torch.arange(20_000))
    which = mirrored(seeds)
    assert (which.dtype, which.shape) == (torch.bool, (20_000,))
    assert float(which.double().mean()) == pytest.approx(0.5, abs=4 * 0.5 / 20_000**0.5)
    shuffle = torch.randperm(20_000, generator=torch.Generator().manual_seed(0))
    assert torch.equal(mirrored(seeds[shuffle]), which[shuffle])
    assert torch.equal(torch.cat([mirrored(part) for part in seeds.split(7)]), which)


def test_mirrors_are_apart_from_other_draws():
    """An own stream: whether an image is mirrored says nothing of its time or its label's fate."""
    seeds = torch.arange(20_000)
    which = mirrored(seeds)
    for stream in (noise.TIME, noise.LABEL):
        low = noise.uniform(seeds, stream, (1,))[:, 0] < 0.5
        assert float((low == which).double().mean()) == pytest.approx(0.5, abs=0.015)


def test_an_image_is_mirrored_in_some_epochs():
    order = Order(50, 0)
    positions = torch.arange(50 * 40)
    which = mirrored(order.seeds(positions))
    times = torch.zeros(50).index_add_(0, order.indices(positions), which.float())
    assert 5 < float(times.min()) <= float(times.max()) < 35  # of 40 epochs, 20 expected


def test_send_gives_the_same_values():
    values = torch.arange(5)
    assert torch.equal(send(values, torch.device("cpu")), values)


# --- stores -------------------------------------------------------------------------------------------------------


class Reader:
    """Reads of a set in memory as from a disk, written down with the thread that did them."""

    def __init__(self, images):
        self.images, self.calls = images, []

    def __call__(self, indices):
        self.calls.append((indices.tolist(), threading.current_thread() is threading.main_thread()))
        return self.images.images[indices], self.images.labels[indices]


@pytest.fixture
def reader():
    images = torch.arange(20 * 3 * 2 * 2).reshape(20, 3, 2, 2) % 251
    return Reader(Images(images.to(torch.uint8), torch.arange(20) % 7, tuple("abcdefg")))


@pytest.fixture
def on_host(reader):
    return OnHost(reader, reader.images.labels, "cpu")


def same(one, other):
    return all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(one, other, strict=True))


def test_resident_gathers_by_index(reader):
    store = Resident(reader.images, "cpu")
    indices = torch.tensor([3, 19, 3, 0])
    images, labels = store.gather(indices)
    assert torch.equal(images, reader.images.images[indices])
    assert labels.tolist() == [3, 5, 3, 0]
    assert len(store) == 20
    assert torch.equal(store[indices], images)


def test_on_host_equals_resident(reader, on_host):
    """Over epochs, read ahead or not: where images live changes nothing."""
    resident, order = Resident(reader.images, "cpu"), Order(20, 1)
    assert len(on_host) == len(resident)
    assert torch.equal(on_host.labels, resident.labels)
    for step in range(12):
        now, following = (order.indices(order.positions(number, 6)) for number in (step, step + 1))
        assert same(on_host.gather(now), resident.gather(now))
        if step % 3:
            for store in (on_host, resident):
                store.expect(lambda following=following: following)


def test_what_was_expected_is_read_once_in_another_thread(reader, on_host):
    wanted = torch.tensor([4, 2, 4])
    on_host.expect(lambda: wanted)
    found = on_host.gather(wanted.clone())
    assert reader.calls == [([4, 2, 4], False)]
    assert same(found, (reader.images.images[wanted], reader.images.labels[wanted]))


@pytest.mark.parametrize("asked", [[4, 2, 5], [2, 4, 4], [4, 2], [4, 2, 4, 4]])
def test_what_was_not_expected_is_read_afresh(reader, on_host, asked):
    on_host.expect(lambda: torch.tensor([4, 2, 4]))
    asked = torch.tensor(asked)
    assert same(on_host.gather(asked), (reader.images.images[asked], reader.images.labels[asked]))
    assert reader.calls == [([4, 2, 4], False), (asked.tolist(), True)]


def test_an_expectation_is_used_once(reader, on_host):
    wanted = torch.tensor([1])
    on_host.expect(lambda: wanted)
    first, second = on_host.gather(wanted), on_host.gather(wanted)
    assert same(first, second)
    assert [in_main for _, in_main in reader.calls] == [False, True]


def test_a_read_ahead_that_fails_is_told_when_asked_for(reader, on_host):
    on_host.expect(lambda: torch.tensor([99]))
    with pytest.raises(IndexError):
        on_host.gather(torch.tensor([99]))


# --- conditions ---------------------------------------------------------------------------------------------------

ROWS = torch.arange(6)
CONDITIONS = {
    "vector": (torch.linspace(-1, 1, 18).reshape(6, 3), lambda rows: torch.linspace(-1, 1, 18).reshape(6, 3)[rows]),
    "image": (  # levels 0, 51, ... 255 are -1, -0.6, ... 1
        (ROWS * 51).to(torch.uint8)[:, None, None].expand(6, 2, 4),
        lambda rows: (rows * 0.4 - 1)[:, None, None].expand(-1, 2, 4),
    ),
    "tokens": (
        {"tokens": ROWS[:, None, None].half().expand(6, 2, 3), "mask": (ROWS % 2 == 0)[:, None].expand(6, 2)},
        lambda rows: {
            "tokens": rows[:, None, None].float().expand(-1, 2, 3),
            "mask": (rows % 2 == 0)[:, None].expand(-1, 2),
        },
    ),
    "labels": (None, lambda rows: rows % 3),
    "none": ((), lambda rows: None),
}


@pytest.mark.parametrize("shape", [(1,), (5,), (2, 3, 4), (1, 2, 3, 4)], ids=str)
@pytest.mark.parametrize("kind", CONDITIONS)
def test_stores_gather_conditions_with_samples_of_any_shape(kind, shape):
    stored, expected = CONDITIONS[kind]
    samples = torch.randn(6, 2, *shape, generator=torch.Generator().manual_seed(0))
    data = Images(samples, ROWS % 3, ("a", "b", "c"), stored)
    rows = torch.tensor([5, 0, 5, 2])
    for store in (
        Resident(data, "cpu"),
        OnHost(lambda some: (data.images[some], data[some].given), data.labels, "cpu"),
    ):
        got, condition = store.gather(rows)
        assert torch.equal(got, samples[rows])
        want = expected(rows)
        for one, other in zip(leaves(condition), leaves(want), strict=True):
            assert one.dtype == other.dtype
            torch.testing.assert_close(one, other, rtol=0, atol=1e-7)


def leaves(condition):
    return list(condition.values()) if isinstance(condition, dict) else [] if condition is None else [condition]


def test_a_condition_that_does_not_fit_is_named():
    images, labels = torch.zeros(6, 1, 2), torch.zeros(6, dtype=torch.int64)
    for condition, words in (
        (torch.zeros(5, 3), r"condition of shape \(5, 3\) does not fit images of shape \(6, 1, 2\); give one row"),
        ({"mask": torch.zeros(7)}, r"condition\['mask'\] of shape \(7,\) does not fit"),
    ):
        with pytest.raises(ValueError, match=words):
            Images(images, labels, ("a",), condition)
    lame = torch.zeros(6, 3)
    lame[4, 1] = torch.nan
    with pytest.raises(ValueError, match=r"condition of shape \(6, 3\) holds NaN or Inf"):
        Resident(Images(images, labels, ("a",), lame), "cpu")


@pytest.mark.parametrize("shape", [(4,), (2, 4), (2, 3, 4)], ids=str)
def test_mirror_flips_the_last_axis_of_any_sample(shape):
    x = torch.arange(2 * prod(shape)).reshape(2, 1, *shape)
    got = mirror(x, torch.tensor([True, False]))
    assert torch.equal(got[0], x[0].flip(-1))
    assert torch.equal(got[1], x[1])
