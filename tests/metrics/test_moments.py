"""Streaming moments against numpy: any split, any order, far from zero; their files; what is refused."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mvm.metrics import distances as metrics
from mvm.metrics.moments import (
    Accumulator,
    Moments,
    load_moments,
    moments,
    random_blocks,
    save_moments,
    too_few,
)


def draw(count, d, seed=0, shift=0.0):
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(d, d, generator=generator, dtype=torch.float64)
    return torch.randn(count, d, generator=generator, dtype=torch.float64) @ mix + shift


def fill(batches, d):
    found = Accumulator(d)
    for batch in batches:
        found.add(batch)
    return found


def close(found, want, rel=1e-9):
    """Whether two moments agree to `rel` of the covariance's own scale: a shift must not loosen it."""
    scale = float(want.covariance.diagonal().max())
    assert found.count == want.count
    assert (found.mean - want.mean).abs().max() <= rel * (scale**0.5 + float(want.mean.abs().max()))
    assert (found.covariance - want.covariance).abs().max() <= rel * scale


def by_numpy(x):
    x = x.double().numpy()
    return Moments(torch.from_numpy(x.mean(0)), torch.from_numpy(np.atleast_2d(np.cov(x, rowvar=False))), len(x))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_batches_equal_numpy(dtype):
    x = draw(101, 5, 1, 3.0).to(dtype)
    found = fill(x.split(13), 5)
    close(found.result(), by_numpy(x), 1e-13)
    assert found.mean.dtype == found.scatter.dtype == found.result().covariance.dtype == torch.float64


def test_by_hand():
    """(0, 0), (2, 0), (2, 6), (4, 2): mean (2, 2), scatter [[8, 4], [4, 24]]."""
    found = Accumulator(2)
    found.add(torch.tensor([[0.0, 0.0]]))
    found.add(torch.tensor([[2.0, 0.0], [2.0, 6.0], [4.0, 2.0]]))
    assert found.mean.tolist() == [2, 2]
    assert found.scatter == pytest.approx(torch.tensor([[8.0, 4.0], [4.0, 24.0]]).double(), abs=1e-14)
    assert found.result().covariance.numpy() == pytest.approx(np.array([[8, 4], [4, 24]]) / 3, abs=1e-14)


def test_far_from_zero():
    """At 1e6 standard deviations from zero a sum of x x^T would keep 4 digits."""
    x = draw(400, 4, 2)
    exact, shifted = by_numpy(x), fill((x + 1e6).split(7), 4).result()
    assert (shifted.covariance - exact.covariance).abs().max() < 1e-9 * float(exact.covariance.diagonal().max())


@settings(max_examples=60, deadline=None)
@given(data=st.data(), count=st.integers(2, 40), d=st.integers(1, 5), shift=st.sampled_from([0.0, -30.0, 1e4]))
def test_any_split_over_accumulators_agrees(data, count, d, shift):
    """Rows dealt at random to 1, 2 or 4 accumulators, in batches, merged in any order."""
    x = draw(count, d, data.draw(st.integers(0, 9)), shift)
    holders = data.draw(st.sampled_from([1, 2, 4]))
    dealt = torch.tensor(data.draw(st.lists(st.integers(0, holders - 1), min_size=count, max_size=count)))
    size = data.draw(st.integers(1, count))
    parts = [fill(x[dealt == i].split(size), d) for i in range(holders)]  # some may be empty
    total = Accumulator(d)
    for i in data.draw(st.permutations(range(holders))):
        total.merge(parts[i])
    close(total.result(), by_numpy(x))


@settings(max_examples=30, deadline=None)
@given(first=st.integers(2, 30), second=st.integers(0, 30), shift=st.sampled_from([0.0, 100.0]))
def test_without_undoes_merge(first, second, shift):
    a, b = fill([draw(first, 3, 1)], 3), fill([draw(second, 3, 2, shift)], 3)
    total = fill([draw(first, 3, 1)], 3)
    total.merge(b)
    before = total.state()
    left = total.without(b)
    assert left.count == first
    assert left.mean.numpy() == pytest.approx(a.mean.numpy(), rel=1e-10, abs=1e-10)
    assert left.scatter.numpy() == pytest.approx(a.scatter.numpy(), rel=1e-9, abs=1e-8 * (1 + shift))
    assert all(torch.equal(before[name], value) for name, value in total.state().items())  # a new one is returned


def test_state_travels_and_joins_in_rank_order():
    """As processes do: every tensor of the state joined along the first axis."""
    x = draw(60, 4, 3, 5.0)
    ranks = [fill([part], 4) for part in x.tensor_split(4)]
    states = [rank.state() for rank in ranks]
    assert {name: tuple(value.shape) for name, value in states[0].items()} == {
        "count": (1,),
        "mean": (1, 4),
        "scatter": (1, 4, 4),
    }
    joined = {name: torch.cat([state[name] for state in states]) for name in states[0]}
    by_merge = ranks[0]
    for rank in ranks[1:]:
        by_merge.merge(rank)
    found = Accumulator.from_state(joined)
    assert torch.equal(found.scatter, by_merge.scatter)
    assert torch.equal(found.mean, by_merge.mean)
    close(found.result(), by_numpy(x), 1e-12)


def test_state_is_a_copy_both_ways():
    source = fill([draw(5, 2, 1)], 2)
    state = source.state()
    mean, scatter = state["mean"].clone(), state["scatter"].clone()
    restored = Accumulator.from_state(state)
    source.add(draw(5, 2, 2))
    restored.add(draw(5, 2, 3))
    assert torch.equal(state["mean"], mean)
    assert torch.equal(state["scatter"], scatter)
    assert restored.count == source.count == 10


def test_result_is_a_copy():
    found = fill([draw(5, 2, 1)], 2)
    result = found.result()
    mean = result.mean.clone()
    found.add(draw(5, 2, 2))
    assert torch.equal(result.mean, mean)


def test_gradients_are_left_behind():
    x = draw(4, 2).requires_grad_()
    assert not moments(x).covariance.requires_grad


def test_memory_is_one_matrix():
    """add and merge write into the one (d, d) matrix there is; no other of that size is kept."""
    found = fill([draw(8, 6)], 6)
    at = found.scatter.data_ptr()
    found.add(draw(8, 6))
    found.merge(fill([draw(8, 6)], 6))
    assert found.scatter.data_ptr() == at
    assert [name for name, value in vars(found).items() if isinstance(value, torch.Tensor) and value.ndim == 2] == [
        "scatter"
    ]


def test_metrics_hands_on_the_same_names():
    assert metrics.moments is moments
    assert metrics.Moments is Moments


@pytest.mark.parametrize("shape", [(3,), (3, 4), (3, 5, 1)])
def test_add_names_the_shape(shape):
    with pytest.raises(ValueError, match=r"\(B, 5\) is needed"):
        Accumulator(5).add(torch.zeros(shape))


def test_empty_batches_and_accumulators_change_nothing():
    empty = Accumulator(2)
    empty.merge(Accumulator(2))
    assert (empty.count, empty.mean.tolist()) == (0, [0, 0])
    found = fill([draw(3, 2), torch.zeros(0, 2)], 2)
    found.merge(Accumulator(2))
    close(found.result(), by_numpy(draw(3, 2)), 1e-14)


@pytest.mark.parametrize("verb", ["merge", "without"])
def test_dimensions_do_not_mix(verb):
    with pytest.raises(ValueError, match="2 and 3 dimensions"):
        getattr(fill([draw(4, 2)], 2), verb)(Accumulator(3))


def test_too_little_for_a_covariance():
    with pytest.raises(ValueError, match="there are 1"):
        fill([draw(1, 2)], 2).result()
    with pytest.raises(ValueError, match="4 of 4 features cannot be taken out"):
        fill([draw(4, 2)], 2).without(fill([draw(4, 2)], 2))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_non_finite_features_are_refused(bad):
    x = draw(4, 2)
    x[2, 1] = bad
    with pytest.raises(ValueError, match="NaN or infinity"):
        moments(x)


def test_random_blocks():
    parts = random_blocks(11, 4, seed=3)
    assert [len(part) for part in parts] == [3, 3, 3, 2]
    assert sorted(torch.cat(parts).tolist()) == list(range(11))
    assert torch.cat(parts).tolist() == torch.cat(random_blocks(11, 4, seed=3)).tolist() != list(range(11))
    assert torch.cat(parts).tolist() != torch.cat(random_blocks(11, 4, seed=4)).tolist()
    for blocks in (1, 12):
        with pytest.raises(ValueError, match=f"blocks={blocks}.*11"):
            random_blocks(11, blocks)


@pytest.mark.parametrize(
    ("count", "d", "words"),
    [
        (2, 2048, "rank 1 at most"),
        (2048, 2048, "rank 2,047 at most"),
        (2049, 2048, "of 2,049 samples comes out too high"),
        (9_999, 64, "of 9,999 samples comes out too high"),
        (20_000, 20_000, "rank 19,999"),
    ],
)
def test_too_few_warns(count, d, words):
    text = too_few(count, d)
    assert words in text
    assert ("rank" in text) == (count <= d)
    assert "50,000" in text
    assert f"{count:,} samples" in text


def test_too_few_is_silent_or_refuses():
    assert too_few(10_000, 2048) == ""
    assert too_few(50_000, 2048) == ""
    for count in (0, 1):
        with pytest.raises(ValueError, match=f"there are {count}"):
            too_few(count, 8)


def test_file_round_trip(tmp_path):
    found, provenance = moments(draw(9, 4)), {"network": "inception", "images": 9, "größe": [1, None]}
    save_moments(tmp_path / "m.npz", found, provenance)
    stored = load_moments(tmp_path / "m.npz")
    assert torch.equal(stored.moments.mean, found.mean)
    assert torch.equal(stored.moments.covariance, found.covariance)
    assert stored.moments.count == 9
    assert stored.provenance == provenance
    assert [path.name for path in tmp_path.iterdir()] == ["m.npz"]
    with np.load(tmp_path / "m.npz", allow_pickle=False) as archive:  # as EDM and pytorch-fid read
        assert archive["mu"].tolist() == found.mean.tolist()
        assert archive["sigma"].dtype == np.float64
        assert json.loads(str(archive["provenance"])) == provenance


def test_files_of_others(tmp_path):
    """ADM has a second, spatial pair and images; EDM and pytorch-fid mu and sigma alone; some in float32."""
    want, spatial = by_numpy(draw(9, 4)), by_numpy(draw(9, 3, 1))
    pair = {"mu": want.mean.numpy(), "sigma": want.covariance.numpy()}
    images = np.zeros((2, 4, 4, 3), np.uint8)
    np.savez(tmp_path / "edm.npz", **pair)
    np.savez_compressed(
        tmp_path / "adm.npz", arr_0=images, mu_s=spatial.mean.numpy(), sigma_s=spatial.covariance.numpy(), **pair
    )
    np.savez(tmp_path / "small.npz", **{name: np.asfortranarray(value.astype("f4")) for name, value in pair.items()})
    for name in ("edm", "adm", "small"):
        found, provenance = load_moments(tmp_path / f"{name}.npz")
        assert found.mean.dtype == found.covariance.dtype == torch.float64
        assert found.covariance.numpy() == pytest.approx(want.covariance.numpy(), rel=1e-6, abs=1e-6)
        assert found.count == 0
        assert provenance == {}
    assert load_moments(tmp_path / "adm.npz", "_s").moments.mean.tolist() == spatial.mean.tolist()


SPD = np.eye(2)


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({"mu": np.zeros(2)}, "holds mu, but not sigma"),
        ({"arr_0": np.zeros(2)}, "holds arr_0, but not mu, sigma"),
        ({"mu": np.zeros(3), "sigma": SPD}, r"mu \(3,\) and sigma \(2, 2\)"),
        ({"mu": np.zeros((1, 2)), "sigma": SPD}, r"mu \(1, 2\)"),
        ({"mu": np.zeros((2, 2)), "sigma": SPD}, r"mu \(2, 2\)"),
        ({"mu": np.array([0, np.nan]), "sigma": SPD}, "NaN"),
        ({"mu": np.zeros(2), "sigma": np.full((2, 2), np.inf)}, "NaN or infinity"),
        ({"mu": np.zeros(2), "sigma": np.array([[1, 0.5], [0.4, 1]])}, "not symmetric"),
    ],
)
def test_files_that_are_no_moments(tmp_path, arrays, words):
    np.savez(tmp_path / "bad.npz", **arrays)
    with pytest.raises(ValueError, match=words):
        load_moments(tmp_path / "bad.npz")


def test_cut_and_foreign_files(tmp_path):
    save_moments(tmp_path / "m.npz", moments(draw(9, 4)), {})
    (tmp_path / "cut.npz").write_bytes((tmp_path / "m.npz").read_bytes()[:-40])
    np.save(tmp_path / "array.npy", SPD)
    for name in ("cut.npz", "array.npy"):
        with pytest.raises(ValueError, match=r"no whole \.npz"):
            load_moments(tmp_path / name)
    with pytest.raises(FileNotFoundError):
        load_moments(tmp_path / "none.npz")
    with pytest.raises(ValueError, match=r"kept in \.npz"):
        save_moments(tmp_path / "m.pt", moments(draw(9, 4)), {})


def test_a_failed_write_leaves_the_old_file(tmp_path):
    save_moments(tmp_path / "m.npz", moments(draw(9, 4)), {"of": "old"})
    with pytest.raises(TypeError):
        save_moments(tmp_path / "m.npz", moments(draw(9, 4)), {"of": object()})
    assert load_moments(tmp_path / "m.npz").provenance == {"of": "old"}
    assert [path.name for path in tmp_path.iterdir()] == ["m.npz"]
