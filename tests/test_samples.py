"""Large sets of samples: the same bytes however they were made, and files as promised."""

import importlib
import io
import json
import subprocess
import sys
import threading
import tracemalloc
import zipfile
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from mvm import samples as module
from mvm.data.sources.arrays import open_parquet
from mvm.files import locked
from mvm.generate import Draw, Sampler, cycle_labels, solver_record
from mvm.model import load
from mvm.recipes import SampleConfig
from mvm.samples import Parts, sample_parts, write_set
from mvm.solver import SOLVERS
from mvm.store import ArrayStore
from threads import in_threads

SETTINGS = SampleConfig(nfe=3, rho=0.5)
DRAW = Draw(22, seed=5, batch=4)  # six parts, the last of two
LAST = 5


@pytest.fixture(scope="module")
def model():
    return load("digits")


def make(model, folder, draw=DRAW, settings=SETTINGS, precision="fp32", **how):
    return sample_parts(Sampler(model, precision), draw, settings, folder, progress=False, **how)


@pytest.fixture(scope="module")
def finished(model, tmp_path_factory):
    """Parts made in one go; not to be changed."""
    return make(model, tmp_path_factory.mktemp("samples") / "parts")


def contents(folder):
    """Every file that is not hidden, by name."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if not path.name.startswith(".")}


def together(parts):
    images, labels = zip(*parts.batches(), strict=True)
    return torch.cat(images), torch.cat(labels)


# ---------------------------------------------------------------- which images


def test_balanced_labels_go_round_and_are_exactly_balanced():
    assert torch.equal(Draw(12).chosen_labels(10), cycle_labels((), 12, 10))
    assert Draw(5, classes=(3, 5)).chosen_labels(10).tolist() == [3, 5, 3, 5, 3]
    assert Draw(50_000).chosen_labels(1000).bincount(minlength=1000).tolist() == [50] * 1000


def test_random_labels_belong_to_the_seed():
    all_labels = Draw(1000, labels="random").chosen_labels(10)
    assert all_labels.dtype == torch.int64
    assert torch.equal(Draw(300, labels="random", batch=7).chosen_labels(10), all_labels[:300])
    assert torch.equal(Draw(300, seed=500, labels="random").chosen_labels(10), all_labels[500:800])
    counts = all_labels.bincount(minlength=10)
    assert 60 < int(counts.min()) < int(counts.max()) < 140  # 100 and four standard deviations
    assert set(Draw(50, labels="random", classes=(3, 5)).chosen_labels(10).tolist()) == {3, 5}


def test_seeds():
    assert Draw(3, seed=7).chosen_seeds().tolist() == [7, 8, 9]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"num": 0}, "num=0 is out of range"),
        ({"seed": -1}, "seed=-1 is out of range"),
        ({"batch": 0}, "batch=0 is out of range"),
        ({"labels": "randm"}, r"labels='randm' is unknown \(did you mean 'random'\?\)"),
    ],
)
def test_wrong_draws(wrong, message):
    with pytest.raises(ValueError, match=message):
        replace(DRAW, **wrong)


@pytest.mark.parametrize("labels", ["balanced", "random"])
def test_class_out_of_range(model, tmp_path, labels):
    with pytest.raises(ValueError, match="classes=11 out of range; this model has classes 0 to 9"):
        make(model, tmp_path / "x", Draw(2, labels=labels, classes=(1, 11)))
    assert not (tmp_path / "x").exists()


# ---------------------------------------------------------------- parts


def test_parts_are_the_images_of_their_seeds(model, finished):
    images, labels = together(finished)
    want = Sampler(model).images(DRAW.chosen_labels(10), DRAW.chosen_seeds(), SETTINGS, batch=256, progress=False)
    assert (finished.count, finished.shape, finished.nfe, finished.passes) == (22, (1, 8, 8), 3, 3)
    assert images.dtype == torch.uint8
    assert images.shape == (22, 1, 8, 8)
    assert int((images.int() - want.images.int()).abs().max()) <= 1
    assert torch.equal(labels, want.labels)
    assert sorted(contents(finished.folder)) == sorted(
        [f"part-{n:06d}.{kind}" for n in range(6) for kind in ("json", "npy")] + ["samples.json"]
    )


def test_every_batch_has_one_shape(model, tmp_path, monkeypatch):
    """A network that was compiled would be compiled again for the last."""
    sizes, real = [], Sampler.launch

    def note(sampler, labels, *rest):
        sizes.append(len(labels))
        return real(sampler, labels, *rest)

    monkeypatch.setattr(Sampler, "launch", note)
    make(model, tmp_path / "x")
    make(model, tmp_path / "few", Draw(3))
    make(model, tmp_path / "adaptive", Draw(3, batch=2), SampleConfig("adaptive", tolerance=1e-2))  # one by one anyway
    assert sizes == [4] * 6 + [3] + [2, 1]


def test_the_first_images_do_not_depend_on_how_many_there_are(model, finished, tmp_path):
    """Not in a bit, as the batch is the same."""
    fewer = make(model, tmp_path / "x", replace(DRAW, num=18))
    assert torch.equal(together(fewer)[0], together(finished)[0][:18])


def test_cost_is_the_mean(tmp_path):
    for number, (labels, nfe) in enumerate([([1, 2, 3], 10), ([4], 20)]):
        (tmp_path / f"part-{number:06d}.json").write_text(json.dumps({"labels": labels, "nfe": nfe, "passes": 2 * nfe}))
    assert Parts(tmp_path, 4, (1, 8, 8)).with_cost(2) == Parts(tmp_path, 4, (1, 8, 8), 12, 25)  # 12.5 and 25


def test_provenance(model, finished):
    told = json.loads((finished.folder / "samples.json").read_text())
    config = json.loads((_digits() / "config.json").read_text())
    assert told["origin"]["sha256"] == config["sha256"]
    assert told["origin"].items() >= {"run": "digits", "step": config["source"]["step"], "weights": "ema"}.items()
    assert told["draw"] == {"num": 22, "seed": 5, "labels": "balanced", "classes": [], "batch": 4}
    assert told["settings"]["rho"] == 0.5
    assert (told["precision"], told["compiled"], told["device"], told["shape"]) == ("fp32", False, "cpu", [1, 8, 8])


def _digits():
    from importlib.resources import files

    return files("mvm") / "models" / "digits"


# ---------------------------------------------------------------- going on


def delete(folder):
    (folder / "part-000001.npy").unlink()
    (folder / "part-000004.json").unlink()


def truncate(folder):
    for number, size in ((0, 0), (2, 60), (LAST, 200)):
        path = folder / f"part-{number:06d}.npy"
        path.write_bytes(path.read_bytes()[:size])
    (folder / "part-000003.json").write_text("{")


def foreign(folder):
    np.save(folder / "part-000001.npy", np.zeros((4, 8, 8, 3), np.uint8))
    np.save(folder / "part-000002.npy", np.zeros((4, 8, 8, 1), np.float32))
    (folder / "part-000003.json").write_text('{"labels": [1, 2, 3, 4], "nfe": 3, "passes": 3}')


@pytest.mark.parametrize("damage", [delete, truncate, foreign])
def test_damaged_parts_are_made_again_bit_for_bit(model, finished, tmp_path, damage):
    made = make(model, tmp_path / "x")
    damage(made.folder)
    kept = (made.folder / "part-000004.npy").stat().st_mtime_ns
    assert replace(make(model, made.folder), folder=finished.folder) == finished
    assert contents(made.folder) == contents(finished.folder)
    assert ((made.folder / "part-000004.npy").stat().st_mtime_ns == kept) == (damage is not delete)


@pytest.mark.parametrize(
    ("ahead", "where", "kept"),
    [
        (0, (Sampler, "launch"), 3),
        (0, (ArrayStore, "write"), 3),
        (1, (Sampler, "launch"), 2),
        (1, (ArrayStore, "write"), 3),
    ],
)
def test_a_crash_loses_only_the_batches_in_flight(model, finished, tmp_path, monkeypatch, capsys, ahead, where, kept):
    """One on a host, two on a GPU: that which is launched, and the one before it, not yet written."""
    calls, real = [], getattr(*where)
    sampler = Sampler(model)
    sampler.ahead = ahead

    def crash(*arguments):
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return real(*arguments)

    monkeypatch.setattr(*where, crash)
    with pytest.raises(KeyboardInterrupt):
        sample_parts(sampler, DRAW, SETTINGS, tmp_path / "x", progress=False)
    assert len(list((tmp_path / "x").glob("part-*.npy"))) == kept
    sample_parts(sampler, DRAW, SETTINGS, tmp_path / "x")
    assert f"mvm: {4 * kept} of 22 images are there already" in capsys.readouterr().err
    assert len(calls) == 4 + 6 - kept
    assert contents(tmp_path / "x") == contents(finished.folder)


def test_parts_by_other_times_are_refused(model, tmp_path, monkeypatch):
    """Of one name and one version: a default may change, and images of both would be mixed."""
    made = make(model, tmp_path / "x")
    (made.folder / "part-000002.npy").unlink()
    constants = importlib.import_module("mvm.solver.adams")
    monkeypatch.setattr(constants, "ODE_C", 1.1 * constants.ODE_C)
    monkeypatch.setattr(constants, "SDE_C", 1.1 * constants.SDE_C)
    with pytest.raises(ValueError, match=r"other values of solver \(Adams.*, plan \w{12}, now Adams.*, plan \w{12}\);"):
        make(model, made.folder)
    monkeypatch.undo()
    make(model, made.folder)


def test_solvers_of_all_names_have_the_same_record_again(model):
    for name in SOLVERS:
        settings = SampleConfig(name, nfe=6)
        found = solver_record(model, settings)
        assert found == solver_record(model, settings)
        assert "object at" not in found
        assert "plan" in found
        if not settings.takes_tolerance:
            other = solver_record(model, replace(settings, nfe=8))
            assert found.partition(", plan ")[2] != other.partition(", plan ")[2]


def test_finished_parts_are_left_alone(model, finished, monkeypatch):
    monkeypatch.setattr(Sampler, "launch", None)
    before = {path: path.stat().st_mtime_ns for path in finished.folder.iterdir()}
    assert make(model, finished.folder) == finished
    assert {path: path.stat().st_mtime_ns for path in finished.folder.iterdir()} == before


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"draw": replace(DRAW, batch=5)}, r"draw.batch \(4, now 5\);"),
        ({"draw": replace(DRAW, num=23, seed=6)}, r"draw.num \(22, now 23\), draw.seed \(5, now 6\);"),
        ({"settings": replace(SETTINGS, nfe=4)}, r"settings.nfe \(3, now 4\);"),
        ({"precision": "bf16"}, r"precision \(fp32, now bf16\);"),
        (
            {"origin": "of other weights"},
            r"origin.sha256 \(\w+, now no\), origin.note \(None, now x\);",
        ),
    ],
)
def test_parts_of_other_images_are_refused(model, finished, change, told):
    before = contents(finished.folder)
    if "origin" in change:
        model, change = load("digits"), {}
        model.origin = {**model.origin, "sha256": "no", "note": "x"}
    with pytest.raises(ValueError, match=f"parts' holds samples with other values of {told} .*remove that folder"):
        make(model, finished.folder, **change)
    assert contents(finished.folder) == before


def test_a_folder_without_parts_may_change_its_mind(model, finished, tmp_path):
    (tmp_path / "samples.json").write_text("{}")
    make(model, tmp_path)
    assert contents(tmp_path) == contents(finished.folder)


def test_damaged_provenance_is_refused(model, tmp_path):
    made = make(model, tmp_path / "x", Draw(2))
    (made.folder / "samples.json").write_text("[")
    with pytest.raises(ValueError, match=r"samples\.json is missing or damaged; remove .*x"):
        make(model, made.folder, Draw(2))


def test_a_folder_of_other_files_is_refused(model, tmp_path):
    (tmp_path / "thesis.tex").write_text("mine")
    with pytest.raises(ValueError, match=r"other files in it \(thesis\.tex\)"):
        make(model, tmp_path)
    assert list(contents(tmp_path)) == ["thesis.tex"]


def test_a_folder_in_use_is_refused(model, finished, tmp_path):
    with locked(finished.folder), pytest.raises(ValueError, match="in use by another process"):
        make(model, finished.folder)
    with locked(finished.folder), pytest.raises(ValueError, match="in use by another process"):
        write_set(finished, tmp_path / "x.npy", progress=False)


def test_what_cannot_be_made_leaves_nothing(model, tmp_path):
    with pytest.raises(ValueError, match="ODE solver"):
        make(model, tmp_path / "x", settings=SampleConfig("heun", rho=1.0))
    assert list(tmp_path.iterdir()) == []


def test_unknown_precision(model, tmp_path):
    with pytest.raises(ValueError, match=r"precision='fp23' is unknown \(did you mean 'fp32'"):
        make(model, tmp_path / "x", precision="fp23")
    assert not (tmp_path / "x").exists()


# ---------------------------------------------------------------- any number of processes


@pytest.fixture
def calm(monkeypatch):
    """Switches of the arithmetic belong to the process, not to a thread."""
    monkeypatch.setattr("mvm.generate.arithmetic", lambda name, device: torch.no_grad())


def make_in_threads(world, model, folder):
    """Return what every process makes, or why it refuses."""

    def work(place):
        try:
            return make(model, folder, processes=place)
        except ValueError as error:
            return str(error)

    return in_threads(world, work)


@pytest.mark.parametrize("world", [2, 4])
def test_any_number_of_processes_makes_the_same_bytes(model, finished, tmp_path, calm, world):
    folder = tmp_path / "x"
    assert make_in_threads(world, model, folder) == [replace(finished, folder=folder)] * world
    assert contents(folder) == contents(finished.folder)


def test_processes_go_on_where_another_number_of_them_stopped(model, finished, tmp_path, calm):
    folder = make(model, tmp_path / "x").folder
    for number in (1, 3, 5):  # all of them one process's, were they not dealt anew
        (folder / f"part-{number:06d}.npy").unlink()
    make_in_threads(2, model, folder)
    assert contents(folder) == contents(finished.folder)


def test_missing_parts_are_dealt_in_turn(model, tmp_path, calm, monkeypatch):
    dealt = {}
    real = ArrayStore.write

    def note(store, name, array):
        dealt.setdefault(threading.get_ident(), []).append(int(name[5:11]))
        real(store, name, array)

    monkeypatch.setattr(ArrayStore, "write", note)
    make_in_threads(4, model, tmp_path / "x")
    assert sorted(dealt.values()) == [[0, 4], [1, 5], [2], [3]]


def test_a_refusal_is_everyones(model, tmp_path, calm):
    (tmp_path / "thesis.tex").write_text("mine")
    first, second = make_in_threads(2, model, tmp_path)
    assert first.startswith(f"'{tmp_path}' is a folder with other files")
    assert second == f"the first process failed: ValueError: {first}"


def test_real_processes_write_the_same_file(finished, tmp_path):
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "mvm"]
    draw = ["sample", "digits", "-n", "22", "--seed", "5", "--batch", "4", "--nfe", "3", "--rho", "0.5"]
    out = tmp_path / "x.npz"
    done = subprocess.run(
        [*start, *draw, "--device", "cpu", "--out", str(out)], capture_output=True, text=True, timeout=1200
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.count(f"wrote 22 images to {out}; adams, 3 evaluations, 3 network passes each") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.npz", "x.npz.json"]
    write_set(finished, tmp_path / "y.npz", progress=False)
    assert out.read_bytes() == (tmp_path / "y.npz").read_bytes()
    assert (tmp_path / "x.npz.json").read_text() == (tmp_path / "y.npz.json").read_text()


# ---------------------------------------------------------------- the final file


def opened(data):
    return np.asarray(Image.open(io.BytesIO(data)))


def read_npz(out):
    with np.load(out) as found:
        assert found.files == ["arr_0", "arr_1"]
        return found["arr_0"], found["arr_1"]


def read_zip(out):
    with zipfile.ZipFile(out) as archive:
        assert archive.testzip() is None
        return np.stack([opened(archive.read(f"{i:06d}.png")) for i in range(22)])[..., None], None


def read_folder(out):
    assert sorted(p.name for p in out.iterdir()) == [f"{i:06d}.png" for i in range(22)]
    return np.stack([opened((out / f"{i:06d}.png").read_bytes()) for i in range(22)])[..., None], None


def read_parquet(out):
    records = [record for part in open_parquet(out, "", 100).parts for record in part.read()]
    return np.stack([opened(record.image) for record in records])[..., None], np.array([r.label for r in records])


FORMATS = {
    "x.npz": read_npz,
    "x.npy": lambda out: (np.load(out), None),
    "x.zip": read_zip,
    "x": read_folder,
    "x.parquet": read_parquet,
}


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_holds_every_pixel_in_order(finished, tmp_path, name):
    images, labels = together(finished)
    out = tmp_path / "deep" / name
    write_set(finished, out, progress=False)
    found, found_labels = FORMATS[name](out)
    assert found.dtype == np.uint8
    assert np.array_equal(found, images.permute(0, 2, 3, 1).numpy())
    assert found_labels is None or found_labels.tolist() == labels.tolist()
    assert sorted(p.name for p in out.parent.iterdir()) == [name, f"{name}.json"]
    told = json.loads((tmp_path / "deep" / f"{name}.json").read_text())
    assert told == {**json.loads((finished.folder / "samples.json").read_text()), "images": 22, "nfe": 3, "passes": 3}


def test_parquet_is_as_on_hubs(finished, tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    write_set(finished, tmp_path / "x.parquet", progress=False)
    with parquet.ParquetFile(tmp_path / "x.parquet") as file:
        assert file.num_row_groups == 6
        row = file.read().slice(21, 1).to_pylist()[0]
        assert b'"Image"' in file.schema_arrow.metadata[b"huggingface"]
    assert row.keys() == {"image", "label"}
    assert (row["image"]["path"], row["label"]) == ("000021.png", 1)


def test_parquet_without_pyarrow_is_refused_before_the_work(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ValueError, match=r"pip install 'mean-velocity-matching\[data\]'"):
        module.check_set(tmp_path / "x.parquet", 5)


def test_a_grid_has_no_note_and_its_limit(finished, tmp_path):
    write_set(finished, tmp_path / "x.png", progress=False)
    assert Image.open(tmp_path / "x.png").size == (5 * 66 + 2, 5 * 66 + 2)
    assert [p.name for p in tmp_path.iterdir()] == ["x.png"]
    module.check_set(tmp_path / "y.png", 1024)
    with pytest.raises(ValueError, match=r"one grid, of 1024 images at most, not 1025; use \.npz"):
        module.check_set(tmp_path / "y.png", 1025)


def test_a_note_replaces_only_a_note(finished, tmp_path):
    (tmp_path / "results.json").write_text('{"fid": 1.7}')
    with pytest.raises(ValueError, match=r"its provenance goes to .*results\.json, which is another file"):
        write_set(finished, tmp_path / "results", progress=False)
    assert [p.name for p in tmp_path.iterdir()] == ["results.json"]
    for _ in range(2):
        write_set(finished, tmp_path / "x.npy", progress=False)
    assert json.loads((tmp_path / "x.npy.json").read_text())["images"] == 22


@pytest.mark.parametrize("name", FORMATS)
def test_a_crash_leaves_the_old_file_and_nothing_half_made(finished, tmp_path, monkeypatch, name):
    if "." in name:
        write_set(replace(finished, count=4), tmp_path / name, progress=False)
    before = contents(tmp_path)
    batches = Parts.batches

    def crash(parts):
        yield next(batches(parts))
        raise OSError("No space left on device")

    monkeypatch.setattr(Parts, "batches", crash)
    with pytest.raises(OSError, match="No space"):
        write_set(finished, tmp_path / name, progress=False)
    assert contents(tmp_path) == before
    assert len(list(tmp_path.iterdir())) == len(before)


@pytest.mark.parametrize("name", ["x.npz", "x.npy"])
def test_memory_is_that_of_a_part(tmp_path, name):
    """24 MB in parts of 1 MB."""
    side, size, parts = 64, 256, 24
    folder = tmp_path / "parts"
    folder.mkdir()
    (folder / "samples.json").write_text("{}")
    for number in range(parts):
        np.save(folder / f"part-{number:06d}.npy", np.full((size, side, side, 1), number, np.uint8))
        cost = {"labels": [number] * size, "nfe": 1, "passes": 1}
        (folder / f"part-{number:06d}.json").write_text(json.dumps(cost))
    found = Parts(folder, size * parts, (1, side, side)).with_cost(parts)
    tracemalloc.start()
    write_set(found, tmp_path / name, progress=False)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (tmp_path / name).stat().st_size > 24 * 2**20
    assert peak < 6 * 2**20
