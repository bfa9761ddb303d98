"""Images against a reference: one figure from any storage, batch and number of processes; and refusals."""

import json
import subprocess
import sys
import weakref
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
import torch
from test_images import KINDS, as_tensor, pictures, save

from mvm import noise
from mvm.distributed.processes import Processes
from mvm.evaluation import evaluate as module
from mvm.evaluation.evaluate import (
    ComparedSet,
    Judge,
    Reference,
    block_of,
    evaluate,
    gather_features,
    open_side,
    write_statistics,
)
from mvm.evaluation.images import of_tensor
from mvm.files import sha256
from mvm.metrics import extractors
from mvm.metrics.distances import frechet_distance, kernel_distance, moments, sampling_bias, shrunken_features
from mvm.metrics.extractors import EXTRACTORS, Extractor
from mvm.metrics.measures import Key, feature_keys
from mvm.metrics.moments import Accumulator, load_moments, save_moments
from threads import in_threads

BOTH = ("fd-pixels", "kd-pixels")
PIXELS = Key("pixels", "pool")
A, B = pictures(40, seed=1), pictures(50, seed=2) // 2
# more images than the 192 dimensions: of a singular covariance, roots of rounding are worth 1e-7
MANY_A, MANY_B = pictures(300, seed=3), pictures(320, seed=4) // 2


def judged(a, b, names=BOTH, **options):
    return evaluate(Judge(progress=False, **options), a, b, names)


def side(arrays, name="x"):
    return ComparedSet(name, of_tensor(as_tensor(arrays), name))


def values(found):
    return {name: figure.value for name, figure in found.metrics.items()}


@pytest.fixture(scope="module")
def plain():
    """The figures straight from features."""
    a, b = (shrunken_features(as_tensor(arrays)) for arrays in (A, B))
    kernel = kernel_distance(a.float(), b.float(), 100, 40).mean
    return {"fd-pixels": frechet_distance(moments(a), moments(b)), "kd-pixels": kernel}


@pytest.fixture
def inception(monkeypatch):
    """A stand-in for the FID network: three parts of the shrunken pixels."""

    def compute(images):
        features = shrunken_features(images).float()
        named = {"pool": features[:, :12], "spatial": features[:, 12:22]}
        return {**named, "probabilities": features[:, 22:28].softmax(1)}

    facts = {"fingerprint": "stand-in", "resize": "none"}
    monkeypatch.setitem(EXTRACTORS, "inception", lambda _, device: Extractor("inception", compute, device, facts))
    return compute


# ---- one figure


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """Both sets in every kind of storage, by kind."""
    root = tmp_path_factory.mktemp("stored")
    found = {}
    for kind in KINDS:
        folders = [root / kind / name for name in "ab"]
        for folder in folders:
            folder.mkdir(parents=True)
        found[kind] = [str(save(kind, arrays, folder)) for arrays, folder in zip((A, B), folders, strict=True)]
    return found


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")  # see test_images.py
@pytest.mark.parametrize("kind", KINDS)
def test_every_storage_on_either_side_gives_the_same_figures(stored, kind, plain):
    want = values(judged(side(A), side(B)))
    assert want == pytest.approx(plain, rel=1e-9)
    assert values(judged(open_side(stored[kind][0]), side(B))) == want
    assert values(judged(side(A), open_side(stored[kind][1]))) == want


def test_a_file_of_moments_gives_the_same_figure_on_either_side(tmp_path):
    want = values(judged(side(A), side(B), ["fd-pixels"]))
    for name, arrays in (("a", A), ("b", B)):
        write_statistics(Judge(progress=False), side(arrays), "pixels", tmp_path / f"{name}.npz")
    a, b = (open_side(str(tmp_path / f"{name}.npz")) for name in "ab")
    for left, right in ((a, side(B)), (side(A), b), (a, b)):
        assert values(judged(left, right, ["fd-pixels"])) == want


@pytest.mark.parametrize("batch", [1, 7, 1000])
def test_any_batch(batch):
    want = values(judged(side(MANY_A), side(MANY_B), batch=13))
    assert values(judged(side(MANY_A), side(MANY_B), batch=batch)) == pytest.approx(want, abs=1e-9)


def test_order_of_the_images_matters_to_no_frechet_distance():
    want, found = (values(judged(side(a), side(MANY_B), ["fd-pixels"])) for a in (MANY_A, MANY_A[::-1]))
    assert found == pytest.approx(want, abs=1e-9)


# ---- processes


@pytest.fixture
def calm(monkeypatch):
    """Switches of the arithmetic belong to the process, not to a thread."""
    monkeypatch.setattr(extractors, "full_float32", lambda device: nullcontext())


@pytest.mark.usefixtures("calm")
@pytest.mark.parametrize("blocks", [1, 4])
@pytest.mark.parametrize(("world", "batch"), [(2, 7), (4, 7), (4, 160), (4, 1000)])
def test_any_number_of_processes(world, batch, blocks):
    """300 and 320 images: with batches of 160 two of four processes get none, with 1000 three of them."""
    images, reference = side(MANY_A), side(MANY_B)
    alone = judged(images, reference, blocks=blocks)
    for found in in_threads(world, lambda each: judged(images, reference, processes=each, batch=batch, blocks=blocks)):
        assert values(found) == pytest.approx(values(alone), abs=1e-9)
        assert found.images["count"] == 300
        if blocks > 1:
            assert found.metrics["fd-pixels"].error == pytest.approx(alone.metrics["fd-pixels"].error, abs=1e-9)


@pytest.mark.usefixtures("calm")
def test_processes_write_one_file(tmp_path):
    def work(place):
        return write_statistics(Judge(processes=place, batch=9, progress=False), side(A), "pixels", tmp_path / "x.npz")

    told = in_threads(3, work)
    assert [found["images"]["count"] for found in told] == [40] * 3
    want = moments(shrunken_features(as_tensor(A)))
    found = load_moments(tmp_path / "x.npz").moments
    assert torch.allclose(found.covariance, want.covariance, rtol=0, atol=1e-12)
    assert [path.name for path in tmp_path.iterdir()] == ["x.npz"]


def test_real_processes(tmp_path):
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "mvm"]
    a, b = str(save("folder", MANY_A, tmp_path)), str(save("npz", MANY_B, tmp_path))
    tokens = ["eval", a, "--ref", b, "--metrics", ",".join(BOTH), "--batch", "7", "--device", "cpu"]
    done = subprocess.run(
        [*start, *tokens, "--json", str(tmp_path / "x.json")], capture_output=True, text=True, timeout=1200, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads((tmp_path / "x.json").read_text())["metrics"]
    want = values(judged(side(MANY_A), side(MANY_B)))
    assert {name: figure["value"] for name, figure in found.items()} == pytest.approx(want, abs=1e-9)
    assert done.stdout.count("fd-pixels") == 1


# ---- blocks


def test_blocks_are_dealt_by_index_alone():
    whole = block_of(torch.arange(1000), 7)
    assert torch.equal(block_of(torch.arange(300, 400), 7), whole[300:400])
    assert torch.equal(block_of(torch.tensor([999, 3]), 7), whole[[999, 3]])
    assert set(whole.tolist()) == set(range(7))
    assert min(whole.bincount()) > 100
    assert noise.BLOCK not in (noise.INITIAL, noise.LABEL, noise.TIME)


def test_blocks_hold_what_was_dealt_to_them_and_merge_to_the_whole():
    features = shrunken_features(as_tensor(A))
    found = Judge(batch=9, progress=False).gather(of_tensor(as_tensor(A)), {PIXELS: False}, 3)
    dealt, total = block_of(torch.arange(40), 3), Accumulator(features.shape[1])
    for number, block in enumerate(found.blocks[PIXELS]):
        want = moments(features[dealt == number])
        assert block.count == want.count
        assert torch.allclose(block.mean, want.mean, rtol=0, atol=1e-12)
        assert torch.allclose(block.result().covariance, want.covariance, rtol=0, atol=1e-12)
        total.merge(block)
    assert torch.allclose(total.result().covariance, moments(features).covariance, rtol=0, atol=1e-12)


def test_a_frechet_distance_keeps_no_features():
    judge = Judge(progress=False)
    assert judge.gather(of_tensor(as_tensor(A)), feature_keys(["fd-pixels"])).features == {}
    kept = judge.gather(of_tensor(as_tensor(A)), feature_keys(BOTH)).features[PIXELS]
    assert torch.equal(kept, shrunken_features(as_tensor(A)).float())


def test_no_more_than_a_batch_of_pictures_is_alive():
    """A stream of pictures, each batch of which must be gone before the next but one comes."""
    alive = []

    class Watched(torch.Tensor):
        pass

    def chunks(batch, wanted):
        for start in range(0, 40, batch):
            images = as_tensor(A[start : start + batch]).as_subclass(Watched)
            alive.append(weakref.ref(images))
            yield start, images
            del images
            assert sum(ref() is not None for ref in alive) <= 1

    found = of_tensor(as_tensor(A))
    streamed = type(found)(found.shape, found.facts, chunks)
    Judge(batch=5, progress=False).gather(streamed, {PIXELS: False})
    assert len(alive) == 8


def test_a_large_batch_goes_through_a_network_in_parts(monkeypatch):
    """Memory of a network of many layers; images are dealt into blocks by their own index all the same."""
    seen, judge = [], Judge(batch=40, progress=False)
    inner = judge.extractor("pixels")
    judge.opened["pixels"] = replace(inner, compute=lambda images: seen.append(len(images)) or inner.compute(images))
    monkeypatch.setattr(module, "MOST", 15)
    found = judge.gather(of_tensor(as_tensor(A)), {PIXELS: True}, 3)
    assert seen == [15, 15, 10]
    monkeypatch.undo()
    want = Judge(batch=40, progress=False).gather(of_tensor(as_tensor(A)), {PIXELS: True}, 3)
    assert torch.equal(found.features[PIXELS], want.features[PIXELS])
    assert [block.count for block in found.blocks[PIXELS]] == [block.count for block in want.blocks[PIXELS]]


def test_one_network_is_opened_once_and_run_once_for_several_figures(monkeypatch):
    opened, seen = [], []

    def compute(images):
        seen.append(len(images))
        return {"pool": shrunken_features(images)}

    def opener(_, device):
        opened.append(1)
        return Extractor("pixels", compute, device)

    monkeypatch.setitem(EXTRACTORS, "pixels", opener)
    judged(side(A), side(B), batch=1000)
    assert (len(opened), seen) == (1, [50, 40])


# ---- a reference kept


def test_a_reference_is_gathered_once(inception):
    judge = Judge(progress=False)
    names = ("fid", "kid")
    kept = Reference(judge, side(B), names)
    want = values(judged(side(A), side(B), names))
    for name in names:
        assert evaluate(judge, side(A), kept, (name,)).metrics[name].value == want[name]


def test_the_reference_gathers_nothing_for_figures_of_images_alone(inception):
    found, _ = gather_features(Judge(progress=False), side(B), ("is", "fid"), reference=True)
    assert set(found.blocks) == {Key("inception", "pool")}
    found = evaluate(Judge(progress=False), side(A), None, ("is",))
    assert found.metrics["is"].value > 1
    assert found.reference == {}


# ---- ADM's files


def save_adm(path, arrays, compute, **more):
    """arr_0 and both pairs of moments, shifted so that it shows which were used."""
    named = compute(as_tensor(arrays))
    pool, spatial = (moments(named[part]) for part in ("pool", "spatial"))
    pairs = {"mu": pool.mean + 1, "sigma": pool.covariance, "mu_s": spatial.mean + 2, "sigma_s": spatial.covariance}
    np.savez(path, arr_0=arrays, **{name: value.numpy() for name, value in pairs.items()}, **more)
    return str(path)


def test_adm_moments_serve_frechet_distances_and_its_images_the_rest(inception, tmp_path):
    adm = open_side(save_adm(tmp_path / "adm.npz", B, inception))
    names = ("fid", "sfid", "kid", "precision")
    found, want = judged(side(A), adm, names), judged(side(A), side(B), names)
    a, b = (inception(as_tensor(arrays)) for arrays in (A, B))
    for name, part, shift in (("fid", "pool", 1), ("sfid", "spatial", 2)):
        assert found.metrics[name].value == pytest.approx(
            frechet_distance(moments(a[part]), moments(b[part] + shift)), rel=1e-5
        )
    for name in ("kid", "precision"):
        assert found.metrics[name].value == want.metrics[name].value
    assert any("does not say how it was made" in warning for warning in found.warnings)
    on_the_left = judged(adm, side(A), ("fid", "kid"))
    assert on_the_left.metrics["fid"].value == pytest.approx(found.metrics["fid"].value, rel=1e-6)


def test_the_images_of_an_adm_file_are_counted(inception, tmp_path):
    found = judged(side(A), open_side(save_adm(tmp_path / "adm.npz", B, inception)), ("fid", "kid"))
    assert found.reference["count"] == 50


def test_adm_moments_are_those_of_inception_alone(inception, tmp_path):
    adm = open_side(save_adm(tmp_path / "adm.npz", B, inception))
    assert values(judged(side(A), adm)) == values(judged(side(A), side(B)))


def test_moments_alone_refuse_what_needs_images(inception, tmp_path):
    write_statistics(Judge(progress=False), side(B), "inception", tmp_path / "b.npz")
    reference = open_side(str(tmp_path / "b.npz"))
    assert set(values(judged(side(A), reference, ("fid", "sfid")))) == {"fid", "sfid"}
    with pytest.raises(ValueError, match=r"'b\.npz'.*kid.*images"):
        judged(side(A), reference, ("kid", "sfid"))
    with pytest.raises(ValueError, match="holds moments alone, and kid needs the images"):
        judged(side(A), reference, ("fid", "kid"))
    with pytest.raises(ValueError, match=r"'b\.npz' holds moments already; name images"):
        write_statistics(Judge(progress=False), reference, "inception", tmp_path / "c.npz")


def test_moments_of_another_network_are_refused(inception, tmp_path, monkeypatch):
    write_statistics(Judge(progress=False), side(B), "inception", tmp_path / "b.npz")
    reference = open_side(str(tmp_path / "b.npz"))
    facts = {"fingerprint": "another", "resize": "none"}
    monkeypatch.setitem(EXTRACTORS, "inception", lambda _, device: Extractor("inception", inception, device, facts))
    message = r"'b\.npz' was made with another feature network \(fingerprint: stand-in there, another here\)"
    with pytest.raises(ValueError, match=message):
        judged(side(A), reference, ("fid",))
    with pytest.raises(ValueError, match=r"another feature network .*name: inception there, pixels here"):
        judged(side(A), reference, ("fd-pixels",))


def test_moments_of_other_dimensions_are_refused(inception, tmp_path):
    save_moments(tmp_path / "b.npz", moments(torch.randn(20, 5)), {})
    with pytest.raises(ValueError, match=r"12 and 5 dimensions|5 and 12 dimensions|has 5 dimensions"):
        judged(side(A), open_side(str(tmp_path / "b.npz")), ("fid",))


def test_a_torn_file_is_named(tmp_path):
    (tmp_path / "b.npz").write_bytes(b"PK nothing")
    with pytest.raises(ValueError, match=r"b\.npz' is no whole \.npz"):
        open_side(str(tmp_path / "b.npz"))


# ---- refusals and warnings


@pytest.mark.parametrize("other", [pictures(50, 8), pictures(50, 16, 1)])
def test_other_shapes_are_refused_before_the_images_are_read(other, tmp_path):
    def chunks(batch, wanted):
        raise AssertionError("read")

    found = of_tensor(as_tensor(A))
    unread = ComparedSet("x", type(found)(found.shape, found.facts, chunks))
    shape = "x".join(map(str, as_tensor(other).shape[1:]))
    with pytest.raises(ValueError, match=rf"3x16x16.*{shape}"):
        judged(unread, side(other))
    write_statistics(Judge(progress=False), side(other), "pixels", tmp_path / "b.npz")
    with pytest.raises(ValueError, match=f"3x16x16 and {shape}"):
        judged(unread, open_side(str(tmp_path / "b.npz")), ("fd-pixels",))


def test_no_reference_is_refused_by_the_figures_that_need_one(inception):
    with pytest.raises(ValueError, match="fid, kid compares with a reference; name it with --ref"):
        judged(side(A), None, ("fid", "is", "kid"))


def test_no_classifier_no_inception_score(inception, monkeypatch):
    def compute(images):
        return {name: value for name, value in inception(images).items() if name != "probabilities"}

    monkeypatch.setitem(EXTRACTORS, "inception", lambda _, device: Extractor("inception", compute, device))
    with pytest.raises(ValueError, match=r"'inception' have no classifier.*leave 'is' out of --metrics"):
        judged(side(A), None, ("is",))


@pytest.mark.parametrize("count", [0, 1])
@pytest.mark.parametrize("name", BOTH)
def test_fewer_than_two_images_are_refused(count, name):
    words = "no images to look at" if count == 0 else "at least 2|size >= 2"
    with pytest.raises(ValueError, match=words):
        judged(side(A[:count]), side(B), (name,))
    with pytest.raises(ValueError, match=words):
        judged(side(A), side(B[:count]), (name,))


def test_more_blocks_than_the_images_fill_are_refused_with_a_remedy():
    with pytest.raises(ValueError, match="41 blocks of 40 images leave some empty; ask for fewer"):
        judged(side(A), side(B), ("fd-pixels",), blocks=len(A) + 1)


def test_few_images_are_told_with_the_size_of_the_bias():
    found = judged(side(A), side(B), ("fd-pixels",))
    covariance = moments(shrunken_features(as_tensor(B))).covariance
    assert len(found.warnings) == 2
    for warning, role, count in zip(found.warnings, ("images", "reference"), (40, 50), strict=True):
        assert warning.startswith(f"{role}, pixels pool: a covariance in 192 dimensions of {count} samples has rank")
        assert warning.endswith(f"about {sampling_bias(covariance, count):.3g}")
    assert judged(side(A), side(B), ("kd-pixels",)).warnings == []


def test_the_size_of_the_bias_is_computed_once_for_a_reference(monkeypatch):
    calls = []
    monkeypatch.setattr("mvm.metrics.distances.sampling_bias", lambda *given: calls.append(given) or 80.0)
    target = Reference(Judge(progress=False), side(B), ("fd-pixels",))
    for arrays in (A, A[:20]):
        told = judged(side(arrays), target, ("fd-pixels",)).warnings
        assert [warning.rsplit(" ", 1)[1] for warning in told] == [f"{80 / len(arrays):.3g}", "1.6"]
    assert [count for _, count in calls] == [1]


def test_moments_of_a_file_are_kept_where_features_are_computed(tmp_path):
    write_statistics(Judge(progress=False), side(B), "pixels", tmp_path / "b.npz")
    judge = Judge(processes=Processes(device=torch.device("meta")), progress=False)  # stands for a GPU
    found, _ = gather_features(judge, open_side(str(tmp_path / "b.npz")), ("fd-pixels",), reference=True)
    known = found.moments(PIXELS)
    assert (known.mean.device.type, known.covariance.device.type) == ("meta", "meta")


def test_many_images_are_not_warned_of(monkeypatch):
    monkeypatch.setattr("mvm.metrics.moments.ENOUGH", 300)
    found = judged(side(pictures(300)[..., :1]), side(pictures(310)[..., :1]), ("fd-pixels",))
    assert found.warnings == []


# ---- what is told


def test_an_evaluation_tells_itself(tmp_path):
    folder = tmp_path / "secret" / "place"
    folder.mkdir(parents=True)
    a, b = (save(kind, arrays, folder) for kind, arrays in (("folder", A), ("npz", B)))
    found = json.loads(json.dumps(judged(open_side(str(a)), open_side(str(b)), blocks=2).as_dict()))
    assert set(found) == {"metrics", "images", "reference", "networks", "warnings", "software", "seconds"}
    assert found["metrics"]["fd-pixels"].keys() == {"value", "error", "note", "parts"}
    assert len(found["metrics"]["fd-pixels"]["parts"]) == 2
    assert (found["images"]["kind"], found["images"]["name"], found["images"]["count"]) == ("folder", "folder", 40)
    assert (found["reference"]["name"], found["reference"]["shape"]) == ("npz.npz", [3, 16, 16])
    assert found["networks"]["pixels"] == {
        "name": "pixels", "fingerprint": "none", "resize": "means of at most 8x8 boxes",
    }  # fmt: skip
    assert {"mvm", "torch", "device"} <= found["software"].keys()
    assert "secret" not in json.dumps(found)


def test_statistics_tell_how_they_were_made(inception, tmp_path):
    folder = tmp_path / "secret"
    folder.mkdir()
    path = save("npy", B, folder)
    told = write_statistics(Judge(progress=False), open_side(str(path)), "inception", tmp_path / "b.npz")
    stored = load_moments(tmp_path / "b.npz")
    assert stored.provenance == json.loads(json.dumps(told))
    known = {"kind": "numpy", "name": "npy.npy", "shape": [3, 16, 16], "count": 50, "stamp": sha256(path)[:16]}
    assert stored.provenance["images"] == known
    assert stored.provenance["network"]["fingerprint"] == "stand-in"
    assert "secret" not in json.dumps(told)
    spatial = load_moments(tmp_path / "b.npz", suffix="_s").moments
    assert torch.allclose(spatial.mean, inception(as_tensor(B))["spatial"].double().mean(0), atol=1e-6)
