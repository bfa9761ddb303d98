"""LPIPS: the network by a second, plain writing of it; its gradients; what is and is not loaded."""

import io
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import conv2d, max_pool2d

from mvm.metrics.lpips import BACKBONES, LPIPS, load_lpips
from mvm.pixels import to_unit

ASSETS = Path(os.environ.get("MVM_ASSETS", "no assets"))
needs_weights = pytest.mark.skipif(not (ASSETS / "lpips").is_dir(), reason="MVM_ASSETS names no folder with lpips/")


def draw(*shape, seed=0):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed)) * 2 - 1


def drawn(shapes, widths):
    """Random weights, by their published names; the linear layers are positive, as the published ones are."""
    generator, found = torch.Generator().manual_seed(0), {}
    for name, shape in shapes.items():
        scale = (2 / (shape[1] * shape[2] * shape[3])) ** 0.5
        found[f"features.{name}.weight"] = torch.randn(shape, generator=generator) * scale
        found[f"features.{name}.bias"] = torch.randn(shape[0], generator=generator) * 0.1
    for index, width in enumerate(widths):
        found[f"lin{index}.model.1.weight"] = torch.rand(1, width, 1, 1, generator=generator)
    return found


@pytest.fixture(scope="module")
def weights():
    shapes = {"0": (64, 3, 11, 11), "3": (192, 64, 5, 5), "6": (384, 192, 3, 3), "8": (256, 384, 3, 3)}
    return drawn({**shapes, "10": (256, 256, 3, 3)}, (64, 192, 384, 256, 256))


# VGG16 as published: numbers of torchvision's layers, and the width of each
VGG = {0: 64, 2: 64, 5: 128, 7: 128, 10: 256, 12: 256, 14: 256, 17: 512, 19: 512, 21: 512, 24: 512, 26: 512, 28: 512}


@pytest.fixture(scope="module")
def vgg_weights():
    inputs = [3, *VGG.values()]
    shapes = {str(name): (width, inputs[i], 3, 3) for i, (name, width) in enumerate(VGG.items())}
    return drawn(shapes, (64, 128, 256, 512, 512))


@pytest.fixture
def file(tmp_path, weights):
    save_file(weights, tmp_path / "alex.safetensors")
    return tmp_path / "alex.safetensors"


@pytest.fixture
def network(weights):
    network = LPIPS()
    network.load_state_dict(weights)
    return network


@pytest.fixture
def vgg(vgg_weights):
    network = LPIPS("vgg")
    network.load_state_dict(vgg_weights)
    return network


def published(monkeypatch, network, backbone="alex"):
    """Take the weights of this network for the published ones."""
    monkeypatch.setitem(BACKBONES, backbone, replace(BACKBONES[backbone], fingerprint=network.fingerprint))


def by_hand(w, a, b):
    """The published definition: no modules, and lengths by a square root of a sum."""

    def convolved(x, name, **how):
        return conv2d(x, w[f"features.{name}.weight"], w[f"features.{name}.bias"], **how).clamp(min=0)

    def alex(x):
        first = convolved(x, "0", stride=4, padding=2)
        second = convolved(max_pool2d(first, kernel_size=3, stride=2), "3", padding=2)
        third = convolved(max_pool2d(second, kernel_size=3, stride=2), "6", padding=1)
        fourth = convolved(third, "8", padding=1)
        return first, second, third, fourth, convolved(fourth, "10", padding=1)

    def vgg(x):
        """Maps after ReLUs 1_2, 2_2, 3_3, 4_3, 5_3."""
        found = []
        for names in ((0, 2), (5, 7), (10, 12, 14), (17, 19, 21), (24, 26, 28)):
            x = max_pool2d(x, 2) if found else x
            for name in names:
                x = convolved(x, str(name), padding=1)
            found.append(x)
        return found

    def maps(x):
        shift, scale = torch.tensor([[-0.030, -0.088, -0.188], [0.458, 0.448, 0.450]])[:, :, None, None]
        return (vgg if "features.28.weight" in w else alex)((x - shift) / scale)

    total = torch.zeros(len(a))
    for index, (x, y) in enumerate(zip(maps(a), maps(b), strict=True)):
        x, y = (m / ((m**2).sum(1, keepdim=True).sqrt() + 1e-10) for m in (x, y))
        weighted = ((x - y) ** 2 * w[f"lin{index}.model.1.weight"]).sum(1)
        total = total + weighted.mean((1, 2))
    return total


@pytest.mark.parametrize(("height", "width"), [(31, 31), (40, 64)])
def test_equals_the_plain_writing(network, weights, height, width):
    a, b = draw(3, 3, height, width), draw(3, 3, height, width, seed=1)
    found = network(a, b)
    assert found.shape == (3,)
    assert found.min() > 0.1
    assert torch.allclose(found, by_hand(weights, a, b), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("side", [16, 37])
def test_vgg_equals_the_plain_writing(vgg, vgg_weights, side):
    a, b = draw(2, 3, side, side).requires_grad_(), draw(2, 3, side, side, seed=1)
    found, want = vgg(a, b), by_hand(vgg_weights, a, b)
    assert found.min() > 0.1
    assert torch.allclose(found, want, rtol=1e-5, atol=1e-6)
    ours, theirs = (torch.autograd.grad(value.sum(), a)[0] for value in (found, want))
    assert (ours - theirs).norm() < 1e-4 * theirs.norm()
    with pytest.raises(ValueError, match="16 pixels a side or more, not 15x16"):
        vgg(draw(1, 3, 15, 16), draw(1, 3, 15, 16))


def test_bf16_is_near_and_never_in_reported_figures(vgg, vgg_weights):
    half = LPIPS("vgg", torch.bfloat16)
    half.load_state_dict(vgg_weights)
    a, b = draw(2, 3, 40, 40), draw(2, 3, 40, 40, seed=1)
    want, found = vgg(a, b), half(a, b)
    assert found.dtype == torch.float32
    assert 0 < float((found - want).abs().max()) < 0.02 * float(want.min())
    stored = torch.randint(0, 256, (2, 2, 3, 33, 33), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    assert torch.equal(half.measure(*stored), vgg.measure(*stored))


def test_it_is_traced_as_one_graph_but_for_reported_figures(vgg):
    a, b = draw(2, 3, 32, 32), draw(2, 3, 32, 32, seed=1)
    wanted, stored = vgg(a, b), [((images + 1) * 127).to(torch.uint8) for images in (a, b)]
    figures, graphs = vgg.measure(*stored), []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    vgg.compile(backend=backend, fullgraph=True)
    assert torch.equal(vgg(a, b), wanted)
    assert torch.equal(vgg.measure(*stored), figures)
    assert len(graphs) == 1


def test_gradient_equals_the_plain_writings(network, weights):
    a, b = draw(2, 3, 33, 33).requires_grad_(), draw(2, 3, 33, 33, seed=1).requires_grad_()
    found = torch.autograd.grad(network(a, b).sum(), (a, b))
    want = torch.autograd.grad(by_hand(weights, a, b).sum(), (a, b))
    for ours, theirs in zip(found, want, strict=True):
        assert theirs.norm() > 0
        assert (ours - theirs).norm() < 1e-4 * theirs.norm()


def test_places_without_any_feature_have_a_gradient(network):
    """After the ReLU all channels of a place may be 0; the square root's gradient would be NaN there."""
    network.features["10"].bias.fill_(-1e3)
    a = draw(1, 3, 33, 33).requires_grad_()
    network(a, draw(1, 3, 33, 33, seed=1)).sum().backward()
    assert a.grad is not None
    assert a.grad.isfinite().all()
    assert a.grad.norm() > 0


def test_is_a_distance_of_sorts(network):
    a, b = draw(2, 3, 35, 35), draw(2, 3, 35, 35, seed=1)
    assert torch.equal(network(a, a), torch.zeros(2))
    assert torch.equal(network(a, b), network(b, a))
    near, middle, far = (network(a, a + size * b) for size in (0.01, 0.1, 1.0))
    assert (near < middle).all()
    assert (middle < far).all()


def test_judges_each_pair_alone(network):
    a, b = draw(4, 3, 33, 33), draw(4, 3, 33, 33, seed=1)
    halves = torch.cat((network(a[:2], b[:2]), network(a[2:], b[2:])))
    assert torch.allclose(network(a, b), halves, rtol=1e-5, atol=0)


def test_grey_images_count_as_grey_colour_images(network):
    a, b = draw(2, 1, 33, 33), draw(2, 1, 33, 33, seed=1)
    assert torch.allclose(network(a, b), network(a.expand(-1, 3, -1, -1), b.expand(-1, 3, -1, -1)), rtol=1e-6)


def test_is_frozen_and_ignores_autocast_and_train(network):
    a, b = draw(2, 3, 33, 33), draw(2, 3, 33, 33, seed=1)
    want = network(a, b)
    assert not network.train().training
    assert not any(parameter.requires_grad for parameter in network.parameters())
    with torch.autocast("cpu", torch.bfloat16):
        found = network(a, b)
    assert found.dtype == torch.float32
    assert torch.equal(found, want)
    assert network(a.double(), b.double()).dtype == torch.float32


def test_measure_takes_stored_images(network):
    images = torch.randint(0, 256, (2, 2, 3, 33, 33), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    found = network.measure(images[0], images[1])
    assert found.dtype == torch.float64
    assert torch.equal(found.float(), network(to_unit(images[0]), to_unit(images[1])))
    with pytest.raises(ValueError, match=r"uint8 images, not torch\.float32"):
        network.measure(to_unit(images[0]), images[1])


@pytest.mark.parametrize(
    ("a", "b", "message"),
    [
        ((1, 3, 30, 64), (1, 3, 30, 64), "31 pixels a side or more, not 30x64"),
        ((1, 4, 33, 33), (1, 4, 33, 33), r"not \(1, 4, 33, 33\) with"),
        ((1, 3, 33, 33), (2, 3, 33, 33), r"not \(1, 3, 33, 33\) with \(2, 3, 33, 33\)"),
    ],
)
def test_refuses_what_it_cannot_compare(network, a, b, message):
    with pytest.raises(ValueError, match=message):
        network(torch.zeros(a), torch.zeros(b))


# ---- loading ----


def test_only_the_published_weights_are_taken(file, network, monkeypatch):
    with pytest.raises(
        ValueError, match=rf"fingerprint {network.fingerprint}, the published ones {BACKBONES['alex'].fingerprint}"
    ):
        load_lpips(file)
    state = torch.get_rng_state()
    trusted = load_lpips(file, trust=True)
    assert torch.equal(torch.get_rng_state(), state)
    assert trusted.fingerprint == network.fingerprint
    assert not any(parameter.requires_grad or parameter.is_meta for parameter in trusted.parameters())
    published(monkeypatch, network)
    a, b = draw(1, 3, 33, 33), draw(1, 3, 33, 33, seed=1)
    assert torch.equal(load_lpips(file)(a, b), network(a, b))
    assert load_lpips(file.parent).fingerprint == network.fingerprint


def test_the_published_pieces_make_the_same(tmp_path, weights, network, monkeypatch):
    """torchvision's file has AlexNet's classifier as well; the package's has the linear layers alone."""
    alexnet = {name: value for name, value in weights.items() if name.startswith("features.")}
    torch.save({**alexnet, "classifier.1.weight": torch.zeros(2, 2)}, tmp_path / "alexnet-owt-7be5be79.pth")
    torch.save({name: weights[name] for name in weights.keys() - alexnet.keys()}, tmp_path / "alex.pth")
    published(monkeypatch, network)
    assert load_lpips(tmp_path).fingerprint == network.fingerprint


def test_each_backbone_has_its_own_weights(tmp_path, weights, vgg_weights, vgg, monkeypatch):
    save_file(vgg_weights, tmp_path / "vgg.safetensors")
    save_file(weights, tmp_path / "alex.safetensors")
    published(monkeypatch, vgg, "vgg")
    assert load_lpips(tmp_path / "vgg.safetensors", "vgg").fingerprint == vgg.fingerprint
    with pytest.raises(ValueError, match=r"does not hold LPIPS with VGG16.*vgg16-\*\.pth"):
        load_lpips(tmp_path / "alex.safetensors", "vgg")
    with pytest.raises(ValueError, match=r"backbone='vgg16' is unknown.*allowed: alex, vgg"):
        load_lpips(tmp_path / "vgg.safetensors", "vgg16")
    monkeypatch.setenv("MVM_CACHE", str(tmp_path / "cache"))
    with pytest.raises(ValueError, match=r"lpips-vgg' is not there.*vgg16-"):
        load_lpips(None, "vgg")


def test_linear_layers_are_those_another_package_ships():
    """torchmetrics carries the published linear layers; the fingerprints are of these with torchvision's features."""
    folder = Path(pytest.importorskip("torchmetrics").__file__).parent / "functional" / "image" / "lpips_models"
    for name, backbone in BACKBONES.items():
        linear = torch.load(folder / f"{name}.pth", weights_only=True, map_location="cpu")
        network = LPIPS(name)
        assert {key for key in network.state_dict() if key.startswith("lin")} == set(linear)
        widths = [layer.shape[1] for layer in backbone.layers if layer.compared]
        assert [value.shape[1] for value in linear.values()] == widths


def test_the_cache_is_looked_into(tmp_path, weights, network, monkeypatch):
    monkeypatch.setenv("MVM_CACHE", str(tmp_path))
    with pytest.raises(ValueError, match=r"lpips' is not there.*alexnet-owt"):
        load_lpips()
    (tmp_path / "lpips").mkdir()
    with pytest.raises(ValueError, match=r"holds no \.safetensors or \.pth"):
        load_lpips("")
    save_file(weights, tmp_path / "lpips" / "alex.safetensors")
    assert load_lpips(trust=True).fingerprint == network.fingerprint


def test_missing_unknown_and_misshapen_weights_are_named(tmp_path, weights):
    path = tmp_path / "some.safetensors"
    for changed in (
        {name: value for name, value in weights.items() if name != "lin3.model.1.weight"},
        {**weights, "lin3.model.1.weight": torch.zeros(1, 255, 1, 1)},
    ):
        save_file(changed, path)
        with pytest.raises(ValueError, match=r"1 tensors are missing.*'lin3\.model\.1\.weight' first"):
            load_lpips(path, trust=True)
    save_file({**weights, "features.12.bias": torch.zeros(1)}, path)
    with pytest.raises(ValueError, match=r"'features\.12\.bias' first"):
        load_lpips(path, trust=True)


def test_what_holds_no_weights_alone_is_refused(tmp_path, weights):
    (tmp_path / "torn.safetensors").write_bytes(b"torn")
    with pytest.raises(ValueError, match=r"torn\.safetensors' is no whole file"):
        load_lpips(tmp_path / "torn.safetensors")
    torch.save([1, 2], tmp_path / "list.pth")
    with pytest.raises(ValueError, match="something other than named tensors"):
        load_lpips(tmp_path / "list.pth")
    folder = tmp_path / "twice"
    folder.mkdir()
    for name in ("a.safetensors", "b.safetensors"):
        save_file(weights, folder / name)
    with pytest.raises(ValueError, match=r"b\.safetensors' holds features\.0\.bias again"):
        load_lpips(folder)


# ---- the published weights ----


@needs_weights
def test_published_weights_on_photographs():
    """Equal to the plain writing; a photograph is nearer to itself with noise than to another."""
    parquet = pytest.importorskip("pyarrow.parquet")
    import numpy as np
    from PIL import Image

    rows = parquet.read_table(next((ASSETS / "imagenette224").glob("*.parquet"))).slice(0, 4).to_pylist()
    photos = [np.array(Image.open(io.BytesIO(row["image"]["bytes"])).convert("RGB")) for row in rows]
    images = to_unit(torch.stack([torch.from_numpy(photo).permute(2, 0, 1) for photo in photos]))
    network = load_lpips(ASSETS / "lpips")
    weights = load_file(next((ASSETS / "lpips").glob("*.safetensors")))
    assert all((weights[f"lin{index}.model.1.weight"] >= 0).all() for index in range(5))
    others = network(images, images.roll(1, 0))
    assert torch.allclose(others, by_hand(weights, images, images.roll(1, 0)), rtol=1e-5)
    noise = draw(*images.shape)
    little, more = (network(images, (images + size * noise).clamp(-1, 1)) for size in (0.05, 0.2))
    assert (little < more).all()
    assert (more < others).all()
    assert 0.5 < others.min() < others.max() < 1.2
