"""Seeds to images to files: the same picture in any batch, and files as promised."""

import contextlib
import io
import warnings
import zipfile
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

import mvm
from mvm import noise
from mvm import pictures as module
from mvm.cli import run
from mvm.evaluation.images import of_model
from mvm.generate import Draw, Sampler, class_numbers, cycle_labels, mean_cost
from mvm.model import Model, load
from mvm.network.fast import swap
from mvm.network.fast.gpu import ByKernels, GpuRotaryAttention, GpuSwiGLU
from mvm.network.layers import Block
from mvm.pictures import check_output, grid, png_bytes, to_pillow, write_images
from mvm.precision import arithmetic, full_float32
from mvm.recipes import SampleConfig, load_recipe, override

SETTINGS = {
    "ode": SampleConfig(nfe=5),
    "sde": SampleConfig(nfe=5, rho=1.0),
    "cfg": SampleConfig(nfe=5, rho=0.75, cfg=2.0, low=0.2, high=0.9),
    "sa": SampleConfig("sa", 5, 0.5),
    "heun": SampleConfig("heun", 5),
    "euler-maruyama": SampleConfig("euler-maruyama", 5, 1.0),
}
COUNT = 9


@pytest.fixture(scope="module")
def model():
    return load("digits")


def seeds_and_labels(count=COUNT):
    return torch.arange(count) * 7 + 3, torch.arange(count) % 10


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("batch", [1, 4, 7])
def test_an_image_is_its_own_seeds_whatever_the_batch(model, name, batch):
    config, (seeds, labels) = SETTINGS[name], seeds_and_labels()
    options = {"schedule": model.schedule, "solver": config.solver, "nfe": config.nfe, "rho": config.rho}
    x = noise.initial(seeds, model.sample_shape)
    guidance = config.guidance()
    whole = mvm.sample(model, x, condition=labels, seeds=seeds, guidance=guidance, **options)
    parts = [slice(i, i + batch) for i in range(0, COUNT, batch)]
    pieces = [mvm.sample(model, x[p], condition=labels[p], seeds=seeds[p], guidance=guidance, **options) for p in parts]
    assert float((torch.cat(pieces) - whole).abs().max()) < 1e-4
    together = Sampler(model).images(labels, seeds, config, batch=256, progress=False)
    apart = Sampler(model).images(labels, seeds, config, batch=batch, progress=False)
    assert int((together.images.int() - apart.images.int()).abs().max()) <= 1
    assert int((together.images.int() - model.codec.decode(whole).int()).abs().max()) <= 1
    assert together.images.dtype == torch.uint8
    assert together.images.shape == (COUNT, 1, 8, 8)


def test_order_does_not_matter(model):
    seeds, labels = seeds_and_labels()
    back = torch.arange(COUNT - 1, -1, -1)
    forward = Sampler(model).images(labels, seeds, SETTINGS["sde"], progress=False).images
    backward = Sampler(model).images(labels[back], seeds[back], SETTINGS["sde"], progress=False).images
    assert int((forward.int() - backward[back].int()).abs().max()) <= 1


def test_seed_and_label_both_matter(model):
    seeds, labels = seeds_and_labels()
    base = Sampler(model).images(labels, seeds, SETTINGS["ode"], progress=False).images
    for other in ((labels, seeds + 1), ((labels + 1) % 10, seeds)):
        changed = Sampler(model).images(*other, SETTINGS["ode"], progress=False).images
        assert all(not torch.equal(a, b) for a, b in zip(base, changed, strict=True))


def test_ode_and_sde_share_their_start_and_differ(model):
    seeds, labels = seeds_and_labels()
    ode, sde = (Sampler(model).images(labels, seeds, SETTINGS[n], progress=False).images for n in ("ode", "sde"))
    assert not torch.equal(ode, sde)


@pytest.mark.parametrize(("name", "nfe", "passes"), [("ode", 5, 5), ("sde", 5, 5), ("heun", 5, 5)])
def test_cost(model, name, nfe, passes):
    seeds, labels = seeds_and_labels(3)
    made = Sampler(model).images(labels, seeds, SETTINGS[name], batch=2, progress=False)
    assert (made.nfe, made.passes) == (nfe, passes)
    assert torch.equal(made.labels, labels)
    assert torch.equal(made.seeds, seeds)


def test_cost_of_guidance(model):
    seeds, labels = seeds_and_labels(2)
    always = Sampler(model).images(labels, seeds, SampleConfig(nfe=5, cfg=2.0), progress=False)
    assert (always.nfe, always.passes) == (5, 10)
    inside = Sampler(model).images(labels, seeds, SETTINGS["cfg"], progress=False)
    assert inside.nfe == 5
    assert 5 < inside.passes < 10


def test_stream_yields_batch_by_batch(model):
    seeds, labels = seeds_and_labels()
    batches = zip(labels.split(4), seeds.split(4), strict=True)
    parts = list(Sampler(model).batches(batches, SETTINGS["ode"]))
    assert [len(part.images) for part in parts] == [4, 4, 1]
    assert torch.equal(torch.cat([part.seeds for part in parts]), seeds)
    assert torch.equal(torch.cat([part.labels for part in parts]), labels)


@pytest.mark.parametrize(
    ("ahead", "want"),
    [
        (0, ["launch 0", "take 0", "have 0", "launch 4", "take 4", "have 4", "launch 8", "take 8", "have 8"]),
        (1, ["launch 0", "launch 4", "take 0", "have 0", "launch 8", "take 4", "have 4", "take 8", "have 8"]),
    ],
)
def test_a_gpu_has_the_next_batch_before_the_last_is_in_hand(model, monkeypatch, ahead, want):
    """Launched, taken back, had by the caller; the images are those of a machine that has one batch at a time."""
    seeds, labels = torch.arange(9), torch.arange(9)
    plain = Sampler(model).images(labels, seeds, SETTINGS["sde"], batch=4, progress=False)
    sampler = Sampler(model)
    events, launch, sampler.ahead = [], sampler.launch, ahead

    def watched(labels, seeds, settings, *more):
        first = int(seeds[0])
        events.append(f"launch {first}")
        wait = launch(labels, seeds, settings, *more)

        def waits():
            events.append(f"take {first}")
            return wait()

        return waits

    monkeypatch.setattr(sampler, "launch", watched)
    found = []
    for made in sampler.batches(zip(labels.split(4), seeds.split(4), strict=True), SETTINGS["sde"]):
        events.append(f"have {int(made.seeds[0])}")
        found.append(made.images)
    assert events == want
    assert torch.equal(torch.cat(found), plain.images)


@pytest.mark.parametrize(("kind", "ahead"), [("cpu", 0), ("cuda", 1)])
def test_batches_ahead(monkeypatch, kind, ahead):
    model = load("digits")
    monkeypatch.setattr(Model, "device", torch.device(kind))
    assert Sampler(model).ahead == ahead


def test_bad_batch(model):
    seeds, labels = seeds_and_labels()
    with pytest.raises(ValueError, match="batch=0"):
        Sampler(model).images(labels, seeds, SETTINGS["ode"], batch=0)


def test_cycle_labels():
    assert cycle_labels([], 12, 10).tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1]
    assert cycle_labels([3, 5], 5, 10).tolist() == [3, 5, 3, 5, 3]
    assert cycle_labels([9], 2, 10).dtype == torch.int64


@pytest.mark.parametrize("classes", [[10], [-1], [3, 11]])
def test_class_out_of_range(classes):
    with pytest.raises(ValueError, match=f"classes={classes[-1]} out of range; this model has classes 0 to 9"):
        cycle_labels(classes, 4, 10)


def test_mean_cost_is_over_images():
    assert mean_cost([(3, 10, 20), (1, 30, 20)]) == (15, 20)


# --- precision and speed -----------------------------------------------------------------------------------------

CPU = torch.device("cpu")
BACKENDS = (
    torch.backends.cuda.matmul,
    torch.backends.cudnn.conv,
    torch.backends.mkldnn.matmul,
    torch.backends.mkldnn.conv,
)


def switches():
    newer = [backend.fp32_precision for backend in BACKENDS]
    return torch.get_float32_matmul_precision(), newer, torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize(
    ("name", "inside"),
    [
        ("fp32", ("highest", ["ieee"] * 4, False)),
        ("tf32", ("high", ["tf32"] * 4, False)),
        ("bf16", ("highest", ["ieee"] * 4, True)),
    ],
)
@pytest.mark.parametrize("around", [False, True])
def test_precision_is_switched_and_put_back(name, inside, around):
    with torch.autocast("cpu", torch.float16, enabled=around):
        before = switches()
        with arithmetic(name, CPU):
            assert switches() == inside
            a = torch.ones(2, 2)
            assert (a @ a).dtype == (torch.bfloat16 if name == "bf16" else torch.float32)
        assert switches() == before
        with contextlib.suppress(RuntimeError), arithmetic(name, CPU):
            raise RuntimeError
        assert switches() == before
    with full_float32(CPU):
        assert switches() == ("highest", ["ieee"] * 4, False)


def test_precision_is_that_of_the_network(model):
    seeds, labels = seeds_and_labels()
    full, half, plain = (
        Sampler(model, name).images(labels, seeds, SETTINGS["ode"], progress=False).images.int()
        for name in ("fp32", "bf16", None)
    )
    assert torch.equal(full, plain)
    assert 0 < int((full - half).abs().max()) < 64
    with torch.autocast("cpu", torch.bfloat16):  # None leaves what is around alone, as previews need it
        around = Sampler(model, None).images(labels, seeds, SETTINGS["ode"], progress=False).images
        within = Sampler(model, "fp32").images(labels, seeds, SETTINGS["ode"], progress=False).images
    assert torch.equal(around.int(), half)
    assert torch.equal(within.int(), full)


def test_switches_are_not_left_on_between_batches(model):
    seeds, labels = seeds_and_labels()
    before = switches()
    for _ in Sampler(model, "bf16").batches(zip(labels.split(4), seeds.split(4), strict=True), SETTINGS["ode"]):
        assert switches() == before


def test_unknown_precision(model):
    with pytest.raises(ValueError, match=r"precision='bf61' is unknown.*allowed: fp32, tf32, bf16"):
        Sampler(model, "bf61")


def test_compiled_network_sees_one_shape(monkeypatch):
    """The compiler itself takes half a minute here; a stand-in notes what it is given."""
    shapes = []

    def compiled(call, **options):
        assert options == {"dynamic": False}
        return lambda *arguments: (shapes.append(arguments[0].shape), call(*arguments))[1]

    monkeypatch.setattr(torch, "compile", compiled)
    model, (seeds, labels) = load("digits"), seeds_and_labels(8)
    want = Sampler(model).images(labels, seeds, SETTINGS["ode"], batch=4, progress=False).images
    sampler = Sampler(model, compile=True)
    assert sampler.compiled
    assert torch.equal(sampler.images(labels, seeds, SETTINGS["ode"], batch=4, progress=False).images, want)
    assert shapes == [(4, 1, 8, 8)] * 10


def test_a_cpu_samples_in_its_fastest_way_and_leaves_the_network_as_it_was():
    seeds, labels = seeds_and_labels(4)
    model = load("digits")
    kinds = list(map(type, model.network.modules()))

    def images(precision="fp32"):
        found = Sampler(model, precision).images(labels, seeds, SETTINGS["ode"], progress=False).images
        assert list(map(type, model.network.modules())) == kinds
        return found.int()

    lean, coarse = images("fp32"), images("int8")
    assert torch.equal(images(None), lean)
    assert 0 < int((lean - coarse).abs().max()) < 64
    swap.plain(model.network)
    kinds = list(map(type, model.network.modules()))
    assert torch.equal(images(), lean)  # applied for the while
    seen = []
    model.network.blocks[0].register_forward_pre_hook(lambda module, given: seen.append(type(module)))
    model.fast = False
    assert int((images() - lean).abs().max()) <= 1
    assert set(seen) == {Block}


ASKED = [("cuda", {}, True), ("cuda", {"kernels": False}, False), ("cpu", {}, False)]


@pytest.mark.parametrize(("device", "how", "asked"), ASKED)
def test_kernels_are_for_a_gpu_and_can_be_left_out(monkeypatch, device, how, asked):
    by_hand = SimpleNamespace()
    monkeypatch.setattr("mvm.generate.gpu.gpu_kernels", lambda: by_hand)
    monkeypatch.setattr("torch.nn.Module.compile", lambda module, **how: None)
    monkeypatch.setattr(Model, "device", torch.device(device))
    model = load("digits")
    assert Sampler(model, "bf16").facts() == {"precision": "bf16", "compiled": False}
    half = Sampler(model, "bf16", compile=True, **how)
    found = {type(module): module.kernels for module in model.network.modules() if isinstance(module, ByKernels)}
    assert found == ({GpuRotaryAttention: by_hand, GpuSwiGLU: by_hand} if asked else {})
    assert half.facts() == {"precision": "bf16", "compiled": True, **({"kernels": True} if asked else {})}
    assert Sampler(model, compile=True, **how).facts() == {"precision": "fp32", "compiled": True}


# --- pictures and files ------------------------------------------------------------------------------------------


def pictures(count=5, channels=1):
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (count, channels, 8, 8), generator=generator, dtype=torch.uint8)


LABELS = torch.tensor([3, 1, 4, 1, 5])


@pytest.mark.parametrize("channels", [1, 3])
def test_grid_puts_images_row_by_row(channels):
    images = pictures(5, channels)
    canvas = np.asarray(grid(images, columns=3, scale=2, gap=1)).reshape(2 * 17 + 1, 3 * 17 + 1, channels)
    for i in range(6):
        y, x = 1 + 17 * (i // 3), 1 + 17 * (i % 3)
        tile = canvas[y : y + 16, x : x + 16]
        want = images[i].permute(1, 2, 0).numpy().repeat(2, 0).repeat(2, 1) if i < 5 else np.full_like(tile, 255)
        assert np.array_equal(tile, want)
    assert (canvas[0] == 255).all()
    assert (canvas[:, -1] == 255).all()


@pytest.mark.parametrize("channels", [1, 3])
def test_png_is_lossless(channels):
    image = pictures(1, channels)[0]
    back = np.asarray(Image.open(io.BytesIO(png_bytes(to_pillow(image)))))
    assert np.array_equal(back.reshape(8, 8, channels), image.permute(1, 2, 0).numpy())


def read_folder(out):
    names = sorted(p.name for p in out.iterdir())
    assert names == [f"{i:06d}.png" for i in range(len(names))]
    return np.stack([np.asarray(Image.open(out / name)) for name in names])[..., None]


def read_zip(out):
    with zipfile.ZipFile(out) as archive:
        assert archive.testzip() is None
        names = archive.namelist()
        assert names == [f"{i:06d}.png" for i in range(len(names))]
        return np.stack([np.asarray(Image.open(io.BytesIO(archive.read(name)))) for name in names])[..., None]


READERS = {
    "x.npy": np.load,
    "x.npz": lambda out: np.load(out)["arr_0"],
    "x.zip": read_zip,
    "x": read_folder,
    "deep/er/x.npz": lambda out: np.load(out)["arr_0"],
}


@pytest.mark.parametrize("name", READERS)
def test_every_writer_keeps_every_pixel(tmp_path, name):
    images = pictures()
    write_images(tmp_path / name, images, LABELS)
    found = READERS[name](tmp_path / name)
    assert found.dtype == np.uint8
    assert found.shape == (5, 8, 8, 1)
    assert np.array_equal(found, images.permute(0, 2, 3, 1).numpy())
    assert [p.name for p in (tmp_path / name).parent.iterdir()] == [(tmp_path / name).name]


def test_npz_holds_the_labels(tmp_path):
    write_images(tmp_path / "x.npz", pictures(), LABELS)
    assert np.load(tmp_path / "x.npz")["arr_1"].tolist() == LABELS.tolist()


def test_png_is_one_grid(tmp_path):
    images = pictures(9)
    write_images(tmp_path / "x.png", images, torch.zeros(9))
    canvas = np.asarray(Image.open(tmp_path / "x.png"))
    assert canvas.shape == (3 * 66 + 2, 3 * 66 + 2)
    for i in range(9):
        y, x = 2 + 66 * (i // 3), 2 + 66 * (i % 3)
        tile = canvas[y : y + 64, x : x + 64]
        assert np.array_equal(tile, images[i, 0].numpy().repeat(8, 0).repeat(8, 1))


def tiles(canvas, side=64):
    """Where a grid's images stand, (x, y): the corners of its dark squares."""
    dark = canvas < 128
    return {(x, y) for y in range(canvas.shape[0] - side + 1) for x in range(canvas.shape[1] - side + 1)
            if dark[y, x] and dark[y : y + side, x : x + side].all()}  # fmt: skip


def test_a_grid_has_a_row_for_each_class_in_the_order_asked_for(tmp_path):
    """Images of a class stand side by side in the order of their seeds; the margin holds its name, and nothing else."""
    labels, names = torch.tensor([2, 0, 2, 0, 2]), ("short", "never", "a longer name")
    images = torch.arange(5, dtype=torch.uint8)[:, None, None, None].expand(5, 1, 8, 8) * 20
    write_images(tmp_path / "x.png", images, labels, names)
    canvas = np.asarray(Image.open(tmp_path / "x.png"))
    margin = canvas.shape[1] - 3 * 66
    assert canvas.shape[0] == 2 * 66 + 2
    assert tiles(canvas) == {(margin + 66 * c, 2 + 66 * r) for c, r in ((0, 0), (1, 0), (2, 0), (0, 1), (1, 1))}
    firsts = [[int(canvas[2 + 66 * r, margin + 66 * c]) for c in range(n)] for r, n in ((0, 3), (1, 2))]
    assert firsts == [[0, 40, 80], [20, 60]]
    written = [(canvas[2 + 66 * r : 66 + 66 * r, : margin - 4] < 200).any(0).sum() for r in (0, 1)]
    assert written[0] > written[1] > 0  # the longer name first
    assert (canvas[:, margin - 3 : margin] == 255).all()


def test_images_of_different_classes_each_stand_above_a_name(tmp_path):
    images = torch.zeros(4, 1, 8, 8, dtype=torch.uint8)
    write_images(tmp_path / "x.png", images, torch.arange(4), ("a", "b", "a name that is far too long", "犬"))
    canvas = np.asarray(Image.open(tmp_path / "x.png"))
    assert tiles(canvas) == {(2 + 66 * c, 2 + 84 * r) for c in (0, 1) for r in (0, 1)}
    for column, row in ((0, 0), (1, 0), (0, 1), (1, 1)):
        line = canvas[66 + 84 * row + 1 : 84 + 84 * row, 2 + 66 * column : 66 + 66 * column]
        assert (line < 200).any()


def test_one_class_or_no_names_is_a_plain_grid(tmp_path):
    images = pictures(9)
    for number, (labels, names) in enumerate(((torch.zeros(9, dtype=torch.int64), ("a", "b")), (LABELS9, ()))):
        write_images(tmp_path / f"{number}.png", images, labels, names)
        assert Image.open(tmp_path / f"{number}.png").size == (3 * 66 + 2, 3 * 66 + 2)


LABELS9 = torch.arange(9) % 2


NAMES = ("tench", "English springer", "hat, cap", "3", "Tench")


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("english springer,tench", (1, 0)),
        ("ENGLISH SPRINGER", (1,)),
        ("Tench, tench", (4, 0)),
        ("hat, cap,1", (2, 1)),
        ("hat,cap", (2,)),
        ("tench,hat, cap,tench", (0, 2, 0)),
        ("3,4", (3, 4)),
        ("", ()),
    ],
)
def test_classes_by_name(text, numbers):
    assert class_numbers(text, NAMES) == numbers


def test_an_unknown_class_is_named():
    with pytest.raises(ValueError, match=r"classes=tenhc.*'tench'.*give numbers or names"):
        class_numbers("tench,tenhc", NAMES)


@pytest.mark.parametrize("name", ["x.jpg", "x.tar.gz", "x.PNGG", "samples.v2"])
def test_unknown_suffix(tmp_path, name):
    with pytest.raises(ValueError, match=r"suffix .* is unknown; use \.png .*\.zip or a folder"):
        write_images(tmp_path / name, pictures(), LABELS)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_with_something_in_it_is_refused(tmp_path):
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "precious.txt").write_text("mine")
    with pytest.raises(ValueError, match="not empty"):
        write_images(tmp_path / "x", pictures(), LABELS)
    assert [p.name for p in (tmp_path / "x").iterdir()] == ["precious.txt"]


@pytest.mark.parametrize("name", ["x", "x.v2", "x.npz"])
def test_an_empty_folder_is_filled_whatever_its_name(tmp_path, name):
    (tmp_path / name).mkdir()
    write_images(tmp_path / name, pictures(), LABELS)
    assert len(read_folder(tmp_path / name)) == 5
    with pytest.raises(ValueError, match="not empty"):
        write_images(tmp_path / name, pictures(), LABELS)


def test_capital_suffix(tmp_path):
    write_images(tmp_path / "x.PNG", pictures(), LABELS)
    assert Image.open(tmp_path / "x.PNG").format == "PNG"


def test_a_file_named_like_a_folder_is_refused(tmp_path):
    """Before an hour of sampling, not after it."""
    (tmp_path / "x").write_text("mine")
    with pytest.raises(ValueError, match="x"):
        check_output(tmp_path / "x")


def test_a_place_inside_a_file_is_refused(tmp_path):
    (tmp_path / "x").write_text("mine")
    with pytest.raises((ValueError, OSError), match="x"):
        write_images(tmp_path / "x" / "y.png", torch.zeros(1, 1, 8, 8, dtype=torch.uint8), torch.zeros(1))


@pytest.mark.parametrize("name", ["x.npz", "x.png", "x.npy", "x.zip"])
def test_a_crash_leaves_the_old_file(tmp_path, monkeypatch, name):
    out = tmp_path / name
    out.write_text("old")

    def crash(path, images, labels, **more):
        path.write_bytes(b"half")
        raise OSError("No space left on device")

    monkeypatch.setitem(module.WRITERS, out.suffix, crash)
    with pytest.raises(OSError, match="No space"):
        write_images(out, pictures(), LABELS)
    assert out.read_text() == "old"
    monkeypatch.undo()
    write_images(out, pictures(), LABELS)
    assert out.read_bytes() != b"old"
    assert [p.name for p in tmp_path.iterdir()] == [name]


def test_classes_by_number_and_name():
    names = ("cat", "dog", "7", "ship")
    assert class_numbers("", names) == ()
    assert class_numbers("dog, 0,ship", names) == (1, 0, 3)
    assert class_numbers("7", names) == (2,)  # a name wins
    with pytest.raises(ValueError, match=r"classes=sihp.*'ship'.*: cat, dog, 7, ship$"):
        class_numbers("cat,sihp", names)


# --- the front: Model.generate ---------------------------------------------------------------------------------------

ASKED = [
    ({"num": 5, "classes": [3, 5], "nfe": 4}, ["--num", "5", "--classes", "3,5", "--nfe", "4"]),
    ({"num": 6, "batch": 4, "nfe": 4, "seed": 9}, ["--num", "6", "--batch", "4", "--nfe", "4", "--seed", "9"]),
    (
        {"num": 3, "labels": "random", "nfe": 5, "rho": 0.75, "cfg": 1.5, "interval": (0.1, 0.9)},
        ["--num", "3", "--labels", "random", "--nfe", "5", "--rho", "0.75", "--cfg", "1.5", "--interval", "0.1,0.9"],
    ),
    (
        {"num": 2, "solver": "heun", "nfe": 4, "precision": "int8"},
        ["-n", "2", "--solver", "heun", "--nfe", "4", "--precision", "int8"],
    ),
]


@pytest.mark.parametrize(("options", "words"), ASKED, ids=lambda value: " ".join(value))
@pytest.mark.parametrize("name", ["x.png", "x.npz"])
def test_generate_makes_what_mvm_sample_makes_bit_for_bit(model, tmp_path, monkeypatch, options, words, name):
    monkeypatch.chdir(tmp_path)
    assert run(["sample", "digits", *words, "--out", f"theirs/{name}"]) == 0
    made = model.generate(**options, progress=False)
    made.save(f"ours/{name}")
    assert (tmp_path / "ours" / name).read_bytes() == (tmp_path / "theirs" / name).read_bytes()
    assert made.nfe == options["nfe"]
    assert made.passes >= made.nfe
    assert made.seeds.tolist() == list(range(options.get("seed", 0), options.get("seed", 0) + options["num"]))


def test_what_is_generated_gives_pictures(model, tmp_path):
    made = model.generate(6, classes=[4, 7], nfe=2, progress=False)
    assert made.images.shape == (6, 1, 8, 8)
    assert made.images.dtype == torch.uint8
    assert len(made) == 6
    assert made.labels.tolist() == [4, 7] * 3
    assert [np.array_equal(np.asarray(one), made.images[i, 0]) for i, one in enumerate(made.pil())] == [True] * 6
    made.save(tmp_path / "x.png")
    assert made._repr_png_() == png_bytes(made.grid()) == (tmp_path / "x.png").read_bytes()
    assert model.generate(6, classes=[4], nfe=1, progress=False).grid(across=6).size == (6 * 66 + 2, 66 + 2)


def test_the_recipes_own_settings_are_the_default(model):
    own = model.recipe.sample
    labels, seeds = cycle_labels((), 2, 10), torch.arange(2)
    want = Sampler(model).images(labels, seeds, own, progress=False)
    assert torch.equal(model.generate(2, progress=False).images, want.images)
    assert model.generate(2, progress=False).nfe == own.nfe


def test_classes_go_by_number_or_name(monkeypatch):
    model = load("digits")
    model.classes = ("zero", "one, two", *map(str, range(2, 10)))
    made = model.generate(3, classes=["one, two", 0, "9"], nfe=1, progress=False)
    assert made.labels.tolist() == [1, 0, 9]
    with pytest.raises(ValueError, match=r"classes=ten is unknown.*give numbers or names of this model: zero, one"):
        model.generate(3, classes=["ten"])
    with pytest.raises(ValueError, match="classes=11 out of range"):
        model.generate(3, classes=[11])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num": 0}, "num=0"),
        ({"seed": -1}, "seed=-1"),
        ({"interval": (0.2, 0.8)}, r"interval=\(0.2, 0.8\) acts on guidance; give its scale too, e.g. cfg=1.5"),
        ({"share": 0.5}, "share=0.5 needs network.kind='ddt'"),
        ({"precision": "fp61"}, "precision='fp61' is unknown"),
        ({"solver": "adms"}, "solver='adms' is unknown.*'adams'"),
    ],
    ids=str,
)
def test_options_of_generate_that_do_not_fit(model, options, words):
    with pytest.raises(ValueError, match=words):
        model.generate(**options, progress=False)


def test_nothing_is_kept_on_a_model(model):
    before = set(vars(model))
    model.generate(2, nfe=1, progress=False)
    assert set(vars(model)) == before
    assert not before & {"compiled", "kernels", "replays", "plans", "costs"}


# --- settings that do not fit a model -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"solver": "heun", "rho": 1.0}, "ODE solver"),
        ({"solver": "dopri5", "rho": 1.0}, "rho=1.0: solver 'dopri5' is an ODE solver; use rho=0"),
        ({"internal": 1.5}, "internal=1.5 needs a network with an inner head"),
        ({"share": 0.5}, r"share=0.5 needs network.kind='ddt'"),
    ],
    ids=str,
)
def test_settings_that_do_not_fit_are_refused_before_the_bar(settings, words, capsys):
    model = load("digits")
    with pytest.raises(ValueError, match=words):
        Sampler(model).images(torch.zeros(2, dtype=torch.int64), torch.arange(2), SampleConfig(**settings))
    assert capsys.readouterr().err == ""


def test_too_much_noise_is_warned_of_where_a_model_is_judged():
    images = of_model(Sampler(load("digits")), Draw(2, batch=1), SampleConfig(nfe=2, rho=2.0))
    with pytest.warns(UserWarning, match="rho=2 with nfe=2: ") as told:
        list(images.chunks(1, lambda _: True))
    assert len(told) == 1


@pytest.mark.parametrize(("rho", "times"), [(2.0, 1), (1.0, 0)])
def test_too_much_noise_is_warned_of_once_whatever_the_batches(rho, times):
    labels, seeds = torch.zeros(3, dtype=torch.int64), torch.arange(3)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        Sampler(load("digits")).images(labels, seeds, SampleConfig(nfe=2, rho=rho), batch=1, progress=False)
    assert sum("rho=2 with nfe=2: " in str(warning.message) for warning in told) == times == len(told)


@pytest.mark.parametrize(("drop", "words"), [("0", "no null class to guide from"), ("1", "no classes to guide to")])
def test_guidance_needs_what_it_goes_between(drop, words):
    model = Model(override(load_recipe("digits"), {"objective.label_drop": drop}))
    labels, seeds = torch.zeros(2, dtype=torch.int64), torch.arange(2)
    with pytest.raises(ValueError, match=rf"cfg=2.0: objective.label_drop={drop} trains {words}; use cfg 1"):
        Sampler(model).images(labels, seeds, SampleConfig(nfe=1, cfg=2.0), progress=False)
    assert Sampler(model).images(labels, seeds, SampleConfig(nfe=1), progress=False).nfe == 1


def test_a_compiled_network_stays_compiled_for_later_samplers(monkeypatch):
    model, compiled = load("digits"), []
    monkeypatch.setattr("torch.nn.Module.compile", lambda network, **how: compiled.append(network))
    Sampler(model, compile=True)
    Sampler(model, compile=True)
    assert compiled == [model.network]
    assert Sampler(model, "bf16").facts()["compiled"] is True
    with pytest.raises(ValueError, match=r"precision='int8' .* leave out --compile"):
        Sampler(model, "int8")
    assert Sampler(load("digits"), "int8").facts() == {"precision": "int8", "compiled": False}


def test_an_unknown_option_of_generate_is_named_with_the_nearest():
    with pytest.raises(ValueError, match=r"option='nef' is unknown \(did you mean 'nfe'\?\)"):
        load("digits").generate(1, nef=3)
