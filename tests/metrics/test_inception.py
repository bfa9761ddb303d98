"""The FID network: structure by a second, plain writing of it; its figures by published golden values."""

import hashlib
import json
import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import avg_pool2d, batch_norm, conv2d, max_pool2d, pad

from mvm.metrics import inception
from mvm.metrics import weights as published
from mvm.metrics.distances import frechet_distance, kernel_distance, moments
from mvm.metrics.inception import Inception, fingerprint, resize_tf1
from mvm.metrics.weights import load_inception
from mvm.precision import full_float32

ASSETS = Path(os.environ.get("MVM_ASSETS", "no assets")) / "inception"
needs_weights = pytest.mark.skipif(not ASSETS.is_dir(), reason="MVM_ASSETS names no folder with inception/")


def pictures(count=2, channels=3, height=32, width=32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (count, channels, height, width), generator=generator, dtype=torch.uint8)


def stirred(network, seed=0):
    """The network with all weights drawn anew, so that signals keep their size and no default hides a mistake."""
    generator = torch.Generator().manual_seed(seed)
    for name, value in network.state_dict().items():
        if name.endswith("conv.weight"):
            value.normal_(0, (2 / value[0].numel()) ** 0.5, generator=generator)
        elif value.is_floating_point():
            low = 0.7 if name.endswith(("bn.weight", "running_var")) else -0.3
            value.uniform_(low, low + 0.6, generator=generator)
    return network


@pytest.fixture(scope="module")
def network():
    return stirred(Inception(classifier=True))


@pytest.fixture(scope="module")
def weights(network):
    return {name: value for name, value in network.state_dict().items() if not name.startswith("fc.")}


@pytest.fixture
def known(monkeypatch, weights):
    """The random weights pass for the published ones."""
    monkeypatch.setattr(published, "FINGERPRINT", fingerprint(weights))


# ---- resize ----


def resized_by_loops(image, side):
    """TensorFlow 1's bilinear resize of one channel, pixel by pixel in float32."""
    height, width = image.shape
    down, across = np.float32(height) / np.float32(side), np.float32(width) / np.float32(side)
    out = np.zeros((side, side), np.float32)
    for i in range(side):
        y = np.float32(i) * down
        top, bottom = int(y), min(int(y) + 1, height - 1)
        for j in range(side):
            x = np.float32(j) * across
            left, right = int(x), min(int(x) + 1, width - 1)
            dx, dy = x - np.float32(left), y - np.float32(top)
            above = image[top, left] + (image[top, right] - image[top, left]) * dx
            below = image[bottom, left] + (image[bottom, right] - image[bottom, left]) * dx
            out[i, j] = above + (below - above) * dy
    return out


@pytest.mark.parametrize(("height", "width", "side"), [(5, 7, 13), (32, 32, 61), (9, 40, 17), (1, 3, 8), (48, 31, 47)])
def test_resize_equals_loops_to_the_last_bit(height, width, side):
    images = pictures(2, 2, height, width).float()
    found = resize_tf1(images, side)
    assert found.shape == (2, 2, side, side)
    for image, got in zip(images.flatten(0, 1).numpy(), found.flatten(0, 1).numpy(), strict=True):
        assert np.array_equal(got, resized_by_loops(image, side))


def test_resize_equals_loops_at_the_size_in_use():
    image = pictures(1, 1).float()
    assert np.array_equal(resize_tf1(image)[0, 0].numpy(), resized_by_loops(image[0, 0].numpy(), 299))


def test_resize_has_no_half_pixel_shift_and_does_not_smooth():
    row = torch.tensor([0.0, 10.0]).expand(1, 1, 2, 2)
    assert resize_tf1(row, 4)[0, 0, 0].tolist() == [0, 5, 10, 10]
    assert resize_tf1(torch.arange(16.0).view(1, 1, 4, 4), 2)[0, 0].tolist() == [[0, 2], [8, 10]]


@pytest.mark.parametrize("side", [1, 7, 299])
def test_resize_to_the_same_side_changes_nothing(side):
    images = pictures(1, 3, side, side).float()
    assert torch.equal(resize_tf1(images, side), images)


@pytest.mark.parametrize("side", range(1, 300, 13))
def test_resize_stays_within_the_image(side):
    assert torch.equal(resize_tf1(torch.full((1, 1, side, side), 200.0)), torch.full((1, 1, 299, 299), 200.0))


# ---- structure ----


def test_pools_of_one_corner():
    """The mean does not count padding: at a corner over 4 pixels, in torchvision's network over 9."""
    x = torch.arange(16.0).view(1, 1, 4, 4)
    assert inception.mean_pool(x)[0, 0, 0, 0] == (0 + 1 + 4 + 5) / 4
    assert inception.mean_pool(x)[0, 0, 1, 1] == 5
    assert inception.mean_pool(x).shape == inception.max_pool(x).shape == x.shape
    assert inception.max_pool(-x)[0, 0, 0, 0] == 0
    assert inception.max_pool(x)[0, 0, 0, 0] == 5
    assert inception.halving_pool(x)[0, 0].tolist() == [[10]]


def unit(block, name, x, stride=1, same=True):
    """Convolution, normalisation, ReLU in float64 from the bare tensors, torch's modules left aside."""
    tensors = {key: value.double() for key, value in block.get_submodule(name).state_dict().items()}
    kernel = tensors["conv.weight"]
    rows, columns = (size // 2 if same else 0 for size in kernel.shape[2:])
    x = conv2d(pad(x, (columns, columns, rows, rows)), kernel, stride=stride)
    names = ("running_mean", "running_var", "weight", "bias")
    return batch_norm(x, *(tensors[f"bn.{key}"] for key in names), eps=0.001).relu()


def chained(block, x, *names):
    for name in names:
        x = unit(block, name, x)
    return x


def means(x):
    """3x3 means of the pixels that exist."""
    inside = avg_pool2d(torch.ones_like(x), 3, 1, 1)
    return avg_pool2d(x, 3, 1, 1) / inside


def maxima(x):
    return max_pool2d(pad(x, (1, 1, 1, 1), value=-torch.inf), 3, 1)


def plain_5(block, x):
    double = chained(block, x, "branch3x3dbl_1", "branch3x3dbl_2", "branch3x3dbl_3")
    five = chained(block, x, "branch5x5_1", "branch5x5_2")
    return [unit(block, "branch1x1", x), five, double, unit(block, "branch_pool", means(x))]


def plain_6a(block, x):
    double = unit(block, "branch3x3dbl_3", chained(block, x, "branch3x3dbl_1", "branch3x3dbl_2"), 2, same=False)
    return [unit(block, "branch3x3", x, 2, same=False), double, max_pool2d(x, 3, 2)]


def plain_6(block, x):
    seven = chained(block, x, *(f"branch7x7_{i}" for i in (1, 2, 3)))
    double = chained(block, x, *(f"branch7x7dbl_{i}" for i in (1, 2, 3, 4, 5)))
    return [unit(block, "branch1x1", x), seven, double, unit(block, "branch_pool", means(x))]


def plain_7a(block, x):
    three = unit(block, "branch3x3_2", unit(block, "branch3x3_1", x), 2, same=False)
    seven = chained(block, x, "branch7x7x3_1", "branch7x7x3_2", "branch7x7x3_3")
    return [three, unit(block, "branch7x7x3_4", seven, 2, same=False), max_pool2d(x, 3, 2)]


def plain_7(block, x, pool=means):
    three, double = chained(block, x, "branch3x3_1"), chained(block, x, "branch3x3dbl_1", "branch3x3dbl_2")
    threes = [unit(block, f"branch3x3_2{side}", three) for side in "ab"]
    doubles = [unit(block, f"branch3x3dbl_3{side}", double) for side in "ab"]
    return [unit(block, "branch1x1", x), *threes, *doubles, unit(block, "branch_pool", pool(x))]


def plain_7c(block, x):
    return plain_7(block, x, maxima)


# name, plain writing, channels in and out
BLOCKS = [
    ("Mixed_5b", plain_5, 192, 256),
    ("Mixed_5c", plain_5, 256, 288),
    ("Mixed_5d", plain_5, 288, 288),
    ("Mixed_6a", plain_6a, 288, 768),
    ("Mixed_6b", plain_6, 768, 768),
    ("Mixed_6c", plain_6, 768, 768),
    ("Mixed_6d", plain_6, 768, 768),
    ("Mixed_6e", plain_6, 768, 768),
    ("Mixed_7a", plain_7a, 768, 1280),
    ("Mixed_7b", plain_7, 1280, 2048),
    ("Mixed_7c", plain_7c, 2048, 2048),
]


def check_block(network, name, plain, width, out):
    x = torch.randn(1, width, 9, 9, generator=torch.Generator().manual_seed(1))
    block = network.get_submodule(name)
    found, want = block(x), torch.cat(plain(block, x.double()), 1)
    assert found.shape[1] == out
    assert found.shape == want.shape
    assert want.std() > 0.05
    assert (found - want).abs().max() < 1e-5 * want.abs().max()


@pytest.mark.parametrize(("name", "plain", "width", "out"), BLOCKS, ids=[block[0] for block in BLOCKS])
def test_blocks_equal_a_plain_writing(network, name, plain, width, out):
    check_block(network, name, plain, width, out)


def plain_layers(network, x):
    """Yield name and float64 value of every layer, convolutions written out; pools of the stem stand between."""
    x = unit(network, "Conv2d_1a_3x3", x, 2, same=False)
    yield "Conv2d_1a_3x3", x
    yield "Conv2d_2a_3x3", (x := unit(network, "Conv2d_2a_3x3", x, same=False))
    yield "Conv2d_2b_3x3", (x := unit(network, "Conv2d_2b_3x3", x))
    yield "Conv2d_3b_1x1", (x := unit(network, "Conv2d_3b_1x1", max_pool2d(x, 3, 2)))
    yield "Conv2d_4a_3x3", (x := unit(network, "Conv2d_4a_3x3", x, same=False))
    x = max_pool2d(x, 3, 2)
    for name, plain, *_ in BLOCKS:
        yield name, (x := torch.cat(plain(network.get_submodule(name), x), 1))


def check_layers(network, images, tolerance):
    """Compare every layer and all outputs of the network with the plain writing, relative to the layer's largest."""
    seen = {}
    hooks = [
        network.get_submodule(name).register_forward_hook(lambda _, __, out, name=name: seen.update({name: out}))
        for name in network.order
    ]
    found = network(images)
    for hook in hooks:
        hook.remove()
    want = dict(plain_layers(network, (resize_tf1(images.float()) / 128 - 1).double()))
    for name, value in want.items():
        assert seen[name].shape == value.shape
        assert (seen[name] - value).abs().max() < tolerance * value.abs().max(), name
    pool = want["Mixed_7c"].mean((2, 3))
    assert torch.allclose(found.pool.double(), pool, rtol=0, atol=tolerance * float(pool.max()))
    branch = unit(network.Mixed_6d, "branch1x1", want["Mixed_6c"])
    spatial = branch[:, :7].permute(0, 2, 3, 1).reshape(len(images), -1)
    assert torch.allclose(found.spatial.double(), spatial, rtol=0, atol=tolerance * float(spatial.max()))
    return found, pool


def test_the_whole_network_equals_a_plain_writing_layer_by_layer(network):
    found, pool = check_layers(network, pictures(1), 1e-5)
    assert [tuple(part.shape) for part in found] == [(1, 2048), (1, 2023), (1, 1008)]
    assert {part.dtype for part in found} == {torch.float32}
    logits = pool @ network.fc.weight.double().T  # without the bias
    assert torch.allclose(found.logits.double(), logits, rtol=1e-4, atol=1e-4)
    assert found.spatial.shape[1] == inception.SPATIAL_WIDTH


# sha256 of "name shape" lines in the order of names, taken from the real weights
NAMES_AND_SHAPES = "a5bae068eaa00f74278a56125f266fbd771c9c79e5bdaa66c448a2adb92ef70a"


def test_names_and_sizes_of_pytorch_fid(network, weights):
    lines = "".join(f"{name} {tuple(weights[name].shape)}\n" for name in sorted(weights))
    assert hashlib.sha256(lines.encode()).hexdigest() == NAMES_AND_SHAPES
    state = network.state_dict()
    assert len(state) == 94 * 6 + 2
    assert sum(value.numel() for value in network.parameters()) == 21_785_568 + 1008 * 2049  # as published
    assert state["Mixed_7c.branch3x3dbl_3b.conv.weight"].shape == (384, 384, 3, 1)
    assert state["fc.weight"].shape == (1008, 2048)
    assert {module.eps for module in network.modules() if isinstance(module, torch.nn.BatchNorm2d)} == {0.001}


def test_grey_images_are_repeated(network):
    grey = pictures(1, 1)
    assert torch.equal(network(grey).pool, network(grey.expand(-1, 3, -1, -1)).pool)


def test_an_image_has_the_same_features_in_any_batch(network):
    images = pictures(3)
    together = network(images)
    for sizes in ([1, 2], [2, 1]):
        apart = [network(part) for part in images.split(sizes)]
        for found, want in zip(zip(*apart, strict=True), together, strict=True):
            assert torch.allclose(torch.cat(found), want, rtol=1e-5, atol=1e-5)
    assert torch.equal(network(images).pool, together.pool)


def test_no_image_gives_no_features(network):
    assert network(pictures(0)).pool.shape == (0, 2048)


def test_frozen_and_always_in_eval(network):
    network.train()
    assert not any(module.training for module in network.modules())
    before = network.fingerprint
    with torch.enable_grad():
        assert not network(pictures(1, 1)).pool.requires_grad
    assert network.fingerprint == before
    assert not any(parameter.requires_grad for parameter in network.parameters())


@pytest.mark.parametrize(
    "images",
    [pictures().float(), pictures()[0], pictures(height=0), *(pictures(channels=n) for n in (2, 4, 32))],
)
def test_other_images_are_refused(network, images):
    with pytest.raises(ValueError, match=r"uint8 images \(B, 1 or 3, H, W\)"):
        network(images)


# ---- precision ----


def switches():
    backends = torch.backends.cuda.matmul, torch.backends.cudnn.conv
    backends = *backends, torch.backends.mkldnn.matmul, torch.backends.mkldnn.conv
    return [backend.fp32_precision for backend in backends]


@pytest.fixture
def medium():
    torch.set_float32_matmul_precision("medium")
    yield
    torch.set_float32_matmul_precision("highest")


def test_two_threads_that_leave_in_turn_leave_switches_that_agree():
    """The second finds what the first has set, and sets that again; torch asks itself when it exports a network."""
    one, two = full_float32(torch.device("cpu")), full_float32(torch.device("cpu"))
    try:
        for context in (one, two):
            context.__enter__()
            assert not torch.backends.cudnn.allow_tf32
        for context in (one, two):
            context.__exit__(None, None, None)
            assert torch.backends.cudnn.allow_tf32 == (context is one)
    finally:
        torch.backends.cudnn.allow_tf32 = True


@pytest.mark.usefixtures("medium")
def test_full_precision_inside_and_every_switch_as_before(network):
    before, inside = switches(), []
    hook = network.Mixed_7c.register_forward_hook(
        lambda _, __, out: inside.append((switches(), torch.is_autocast_enabled("cpu"), out.dtype))
    )
    with torch.autocast("cpu", torch.bfloat16):
        found = network(pictures(1))
        assert torch.is_autocast_enabled("cpu")
    hook.remove()
    assert "tf32" in before
    assert inside == [(["ieee"] * 4, False, torch.float32)]
    assert switches() == before
    assert torch.get_float32_matmul_precision() == "medium"
    assert torch.backends.cuda.matmul.allow_tf32  # raises where torch's older and newer switches disagree
    assert torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("highest")
    assert torch.equal(found.pool, network(pictures(1)).pool)


@pytest.mark.usefixtures("medium")
def test_switches_are_restored_after_an_error():
    before = switches()
    with pytest.raises(KeyError), inception.full_float32(torch.device("cpu")):
        raise KeyError
    assert switches() == before


# ---- fingerprint ----


def test_fingerprint_sees_every_weight_and_nothing_else(network, weights):
    want = fingerprint(weights)
    assert network.fingerprint == want
    assert len(want) == 64
    assert fingerprint(dict(reversed(weights.items()))) == want
    assert fingerprint({name: value for name, value in weights.items() if value.ndim}) == want  # no counters
    kernels = {name: value for name, value in weights.items() if value.ndim == 4}
    other_layout = {name: value.contiguous(memory_format=torch.channels_last) for name, value in kernels.items()}
    assert fingerprint({**weights, **other_layout}) == want
    for name in ("Conv2d_1a_3x3.conv.weight", "Mixed_7c.branch_pool.bn.running_var"):
        other = weights[name].clone()
        other.view(-1)[-1] += 1e-6
        assert fingerprint({**weights, name: other}) != want


def test_fingerprint_by_hand():
    """Names, shapes and little-endian float32 in the order of names, written down once more."""
    tensors = {"b": torch.tensor([[1.0, 2.0]]), "a": torch.tensor([3.0], dtype=torch.float64)}
    text = b"a (1,)\n" + np.array([3], "<f4").tobytes() + b"b (1, 2)\n" + np.array([1, 2], "<f4").tobytes()
    assert fingerprint(tensors) == hashlib.sha256(text).hexdigest()


# ---- loading ----


def save_shards(folder, weights, index):
    names = sorted(weights)
    shards = {"one.safetensors": names[:200], "two.safetensors": names[200:]}
    for file, part in shards.items():
        save_file({name: weights[name] for name in part}, folder / file)
    if index:
        table = {name: file for file, part in shards.items() for name in part}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": table}))


@pytest.mark.usefixtures("known")
def test_every_container_gives_the_same_network(tmp_path, network, weights):
    (tmp_path / "plain").mkdir()
    (tmp_path / "indexed").mkdir()
    save_shards(tmp_path / "plain", weights, index=False)
    save_shards(tmp_path / "indexed", weights, index=True)
    save_file({"unrelated": torch.zeros(1)}, tmp_path / "indexed" / "aside.safetensors")
    save_file(weights, tmp_path / "one.safetensors")
    torch.save(weights, tmp_path / "one.pth")
    state, want = torch.get_rng_state(), network(pictures(1))
    for source in ("plain", "indexed", "one.safetensors", "one.pth"):
        found = load_inception(tmp_path / source)
        assert found.fingerprint == network.fingerprint
        assert found.fc is None
        assert not any(parameter.requires_grad for parameter in found.parameters())
        assert all(not value.is_meta for value in found.state_dict().values())
    features = found(pictures(1))
    assert torch.equal(features.pool, want.pool)
    assert torch.equal(features.spatial, want.spatial)
    assert features.logits is None
    assert torch.equal(torch.get_rng_state(), state)  # loading a metric must not move a training run


@pytest.mark.usefixtures("known")
def test_counters_may_be_absent(tmp_path, weights):
    save_file({name: value for name, value in weights.items() if value.ndim}, tmp_path / "one.safetensors")
    assert load_inception(tmp_path / "one.safetensors").Mixed_5b.branch1x1.bn.num_batches_tracked == 0


@pytest.mark.usefixtures("known")
def test_fc_counts_in_the_published_file_only(tmp_path, monkeypatch, network):
    path = tmp_path / "with_fc.pth"
    torch.save(network.state_dict(), path)
    assert load_inception(path).fc is None
    assert torch.equal(load_inception(path, trust=True).fc.weight, network.fc.weight)
    monkeypatch.setattr(published, "PUBLISHED_SHA256", hashlib.sha256(path.read_bytes()).hexdigest())
    found = load_inception(tmp_path)  # a folder with the .pth alone
    assert torch.equal(found.fc.weight, network.fc.weight)


def test_other_fingerprints_are_refused_unless_trusted(tmp_path, network, weights):
    path = tmp_path / "one.safetensors"
    save_file(weights, path)
    with pytest.raises(ValueError, match=f"{network.fingerprint}.*{published.FINGERPRINT}.*no FID"):
        load_inception(path)
    assert load_inception(path, trust=True).fingerprint == network.fingerprint


@pytest.mark.usefixtures("known")
def test_half_precision_is_refused_unless_trusted(tmp_path, weights):
    path = tmp_path / "one.safetensors"
    save_file({name: value.half() if value.ndim else value for name, value in weights.items()}, path)
    with pytest.raises(ValueError, match="fingerprint"):
        load_inception(path)
    assert load_inception(path, trust=True).Mixed_5b.branch1x1.conv.weight.dtype == torch.float32


def test_the_cache_is_looked_into(tmp_path, monkeypatch, weights):
    monkeypatch.setenv("MVM_CACHE", str(tmp_path))
    monkeypatch.setenv("MVM_OFFLINE", "1")
    for source in ("", None):
        with pytest.raises(ValueError, match="holds no weights, and MVM_OFFLINE") as caught:
            load_inception(source)
    needed = (published.PUBLISHED_NAME, published.PUBLISHED_SHA256, "--inception FILE_OR_FOLDER", "https://")
    assert all(part in str(caught.value) for part in (*needed, str(tmp_path / "inception")))
    (tmp_path / "inception").mkdir()
    with pytest.raises(ValueError, match=r"holds no \.safetensors or \.pth"):
        load_inception(tmp_path / "inception")
    save_file(weights, tmp_path / "inception" / "any.safetensors")
    assert load_inception("", trust=True).fc is None


def test_an_empty_cache_is_filled_by_a_download(tmp_path, monkeypatch, known, weights):
    monkeypatch.setenv("MVM_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("MVM_OFFLINE", raising=False)
    kept = tmp_path / "cache" / "inception" / published.PUBLISHED_NAME
    monkeypatch.setattr(published, "PUBLISHED_AT", (tmp_path / "none.pth").as_uri())
    with pytest.raises(ValueError, match=r"the download failed .*--inception"):
        load_inception()
    torch.save(weights, tmp_path / "sent.pth")
    monkeypatch.setattr(published, "PUBLISHED_AT", (tmp_path / "sent.pth").as_uri())
    with pytest.raises(ValueError, match="it was not kept"):
        load_inception()
    assert not list(kept.parent.iterdir())
    checksum = hashlib.sha256((tmp_path / "sent.pth").read_bytes()).hexdigest()
    monkeypatch.setattr(published, "PUBLISHED_SHA256", checksum)
    found = load_inception()
    assert found.fingerprint == fingerprint(weights)
    (tmp_path / "sent.pth").unlink()
    assert kept.is_file()
    assert load_inception().fingerprint == found.fingerprint  # from the cache


def test_cache_folders(monkeypatch):
    for name in ("MVM_CACHE", "XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    assert published.cache_folder("linux") == Path.home() / ".cache" / "mvm"
    assert published.cache_folder("darwin") == Path.home() / "Library" / "Caches" / "mvm"
    assert published.cache_folder("win32") == Path.home() / "AppData" / "Local" / "mvm"
    monkeypatch.setenv("XDG_CACHE_HOME", "x")
    monkeypatch.setenv("LOCALAPPDATA", "y")
    assert (published.cache_folder("linux"), published.cache_folder("win32")) == (Path("x/mvm"), Path("y/mvm"))
    monkeypatch.setenv("MVM_CACHE", "z")
    assert published.cache_folder("linux") == Path("z")


@pytest.mark.parametrize("change", ["missing", "unknown", "shape", "half of fc"])
def test_other_networks_are_refused(tmp_path, weights, change):
    name = "Mixed_6c.branch1x1.conv.weight"
    changed = dict(weights)
    if change == "missing":
        del changed[name]
    elif change == "shape":
        changed[name] = changed[name][:5].clone()
    else:
        name = "fc.weight" if change == "half of fc" else "AuxLogits.fc.weight"
        changed[name] = torch.zeros(1008, 2048)
    save_file(changed, tmp_path / "one.safetensors")
    named = "fc.bias" if change == "half of fc" else name
    with pytest.raises(ValueError, match=f"1 tensors are .*'{named}' first.*{published.PUBLISHED_NAME}"):
        load_inception(tmp_path, trust=True)


def test_a_set_of_weights_twice_in_a_folder_is_refused(tmp_path):
    for name in ("a", "b"):
        save_file({"x": torch.zeros(1)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(ValueError, match=r"b\.safetensors' holds x again"):
        load_inception(tmp_path)


INDEX = "m.safetensors.index.json"


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        *((INDEX, text, "is no index of shards") for text in ("{", "[]", "{}", '{"weight_map": 3}')),
        (INDEX, '{"weight_map": {"x": "gone.safetensors"}}', r"names gone\.safetensors, but"),
        *(("a.pth", value, "other than named tensors") for value in ([torch.zeros(1)], {"epoch": 3}, torch.zeros(1))),
    ],
)
def test_folders_of_something_else_are_refused(tmp_path, name, content, words):
    if name == INDEX:
        (tmp_path / name).write_text(content)
    else:
        torch.save(content, tmp_path / name)
    with pytest.raises(ValueError, match=words):
        load_inception(tmp_path)


class Hostile:
    """Unpickling it makes a folder."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_nothing_in_a_file_is_executed(tmp_path):
    trap = tmp_path / "trap"
    torch.save({"x": Hostile(trap)}, tmp_path / "new.pth")
    (tmp_path / "old.pth").write_bytes(pickle.dumps(Hostile(trap), protocol=2))
    for name in ("new.pth", "old.pth"):
        with pytest.raises(ValueError, match="no whole file of weights alone"):
            load_inception(tmp_path / name, trust=True)
    assert not trap.exists()


@pytest.mark.parametrize("suffix", [".pth", ".safetensors", ".txt"])
@pytest.mark.parametrize("content", [b"", b"hello", b"PK\x03\x04 torn", bytes(64), b"\x80\x02}q"])
def test_broken_files_are_named(tmp_path, suffix, content):
    path = tmp_path / f"broken{suffix}"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=f"broken{suffix}' is no whole file of weights alone"):
        load_inception(path)


def test_torn_files_are_named(tmp_path):
    torch.save({"x": torch.zeros(1000)}, tmp_path / "a.pth")
    save_file({"x": torch.zeros(1000)}, tmp_path / "a.safetensors")
    for path in (tmp_path / "a.pth", tmp_path / "a.safetensors"):
        path.write_bytes(path.read_bytes()[:-500])
        with pytest.raises(ValueError, match="is no whole file"):
            load_inception(path)


# ---- the real weights ----


@needs_weights
def test_real_weights_have_the_fingerprint_in_any_container(tmp_path):
    real = {}
    for shard in sorted(ASSETS.glob("*.safetensors")):
        real |= load_file(shard)
    assert load_inception(ASSETS).fingerprint == published.FINGERPRINT
    torch.save({**real, "fc.weight": torch.zeros(1008, 2048), "fc.bias": torch.zeros(1008)}, tmp_path / "one.pth")
    found = load_inception(tmp_path / "one.pth")
    assert found.fingerprint == published.FINGERPRINT
    assert found.fc is None


@needs_weights
def test_real_weights_layer_by_layer():
    golden = np.load(ASSETS / "golden-256.npz")["train"][:2]
    check_layers(load_inception(ASSETS), torch.from_numpy(golden).permute(0, 3, 1, 2), 2e-5)


@needs_weights
@pytest.mark.timeout(3600)
def test_golden_fid_and_kid():
    """512 images, 1 to 3 minutes on a core."""
    network, images = load_inception(ASSETS), np.load(ASSETS / "golden-256.npz")
    train, test = (
        torch.cat([network(part).pool for part in torch.from_numpy(images[name]).permute(0, 3, 1, 2).split(16)])
        for name in ("train", "test")
    )
    assert frechet_distance(moments(train), moments(test)) == pytest.approx(110.2808262, abs=1e-3)
    assert kernel_distance(train, test, 100, 64).mean == pytest.approx(-0.00067925, abs=1e-6)
