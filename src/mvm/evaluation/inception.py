"""The InceptionV3 of 2015-12-05 behind every published FID: uint8 images -> features.

    network = load_inception("pt_inception-2015-12-05-6726825d.pth")    # or a folder of safetensors, or "": the cache
    pool, spatial, logits = network(images)                             # FID and KID, sFID, Inception Score

Parameters have the names of pytorch-fid. Of torchvision's InceptionV3 the weights, two kinds of pools, the resize and
the scaling differ: figures made with it are no FID.
"""

import hashlib
import json
import os
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from string import ascii_lowercase
from typing import NamedTuple, Self

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d, max_pool2d, relu

SIDE = 299  # of the network's input
NORM_EPS = 1e-3  # TensorFlow's, which trained the weights
WIDTH, CLASSES = 2048, 1008
SPATIAL_LAYER, SPATIAL_CHANNELS = "Mixed_6d", 7
SPATIAL_WIDTH = SPATIAL_CHANNELS * 17 * 17

PUBLISHED_NAME = "pt_inception-2015-12-05-6726825d.pth"
PUBLISHED_SHA256 = "6726825d0af5f729cebd5821db510b11b1cfad8faad88a03f1befd49fb9129b2"  # of the file
PUBLISHED_AT = f"https://github.com/mseitzer/pytorch-fid/releases/download/fid_weights/{PUBLISHED_NAME}"
FINGERPRINT = (
    "f52412653ee45bed604b0f4fa0d3942ce5f50784fece9766dfa6cbecddbe4555"  # of its weights without fc, by `fingerprint`
)
OPTION = "--inception FILE_OR_FOLDER"
CLASSIFIER, COUNTER = ("fc.weight", "fc.bias"), "num_batches_tracked"


class Features(NamedTuple):
    """What the network says of B images, in float32.

    pool: (B, 2048), means of the last map: FID, KID, precision and recall.
    spatial: (B, 2023), for sFID as ADM's evaluator takes it: the first 7 channels of "mixed_6/conv", which is the 1x1
    branch of Mixed_6d after its ReLU, 17x17, in the order row, column, channel of the published `mu_s` and `sigma_s`.
    logits: (B, 1008) without the bias, from which the Inception Score has always been computed; None without fc.
    """

    pool: Tensor
    spatial: Tensor
    logits: Tensor | None


class Unit(nn.Module):
    """Convolution without bias, batch normalisation, ReLU; `same` keeps the side at stride 1."""

    def __init__(self, width: int, out: int, kernel: tuple[int, int], stride: int = 1, same: bool = True) -> None:
        super().__init__()
        padding = (kernel[0] // 2, kernel[1] // 2) if same else 0
        self.conv = nn.Conv2d(width, out, kernel, stride, padding, bias=False)
        self.bn = nn.BatchNorm2d(out, eps=NORM_EPS)

    def forward(self, x: Tensor) -> Tensor:
        return relu(self.bn(self.conv(x)))


def mean_pool(x: Tensor) -> Tensor:
    """Return means over 3x3; at the border over the pixels that exist, as in TensorFlow."""
    return avg_pool2d(x, 3, stride=1, padding=1, count_include_pad=False)


def max_pool(x: Tensor) -> Tensor:
    """Return maxima over 3x3, of the same side."""
    return max_pool2d(x, 3, stride=1, padding=1)


def halving_pool(x: Tensor) -> Tensor:
    """Return maxima over every other 3x3."""
    return max_pool2d(x, 3, stride=2)


class Step(NamedTuple):
    """One convolution of a chain; of stride 2 it has no padding."""

    out: int
    kernel: tuple[int, int] = (1, 1)
    stride: int = 1


class Chain(NamedTuple):
    """A branch of a block: steps one after the other, then the tips side by side."""

    name: str
    steps: tuple[Step, ...]
    tips: tuple[Step, ...] = ()

    def step_names(self) -> list[str]:
        """Return name_1, name_2, ...; of a single convolution the bare name."""
        if len(self.steps) == 1 and not self.tips:
            return [self.name]
        return [f"{self.name}_{number}" for number in range(1, len(self.steps) + 1)]

    def tip_names(self) -> list[str]:
        """Return name_3a and name_3b after two steps."""
        return [f"{self.name}_{len(self.steps) + 1}{letter}" for letter in ascii_lowercase[: len(self.tips)]]


class Block(nn.Module):
    """Chains of convolutions and a pool of one input, put together along the channels in that order."""

    def __init__(
        self, width: int, chains: Sequence[Chain], pool: Callable[[Tensor], Tensor] = halving_pool, pooled: int = 0
    ) -> None:
        super().__init__()
        self.chains, self.pool = chains, pool
        for chain in chains:
            self._grow(chain, width)
        self.branch_pool = Unit(width, pooled, (1, 1)) if pooled else nn.Identity()

    def _grow(self, chain: Chain, width: int) -> None:
        for name, step in zip(chain.step_names(), chain.steps, strict=True):
            self.add_module(name, Unit(width, step.out, step.kernel, step.stride, same=step.stride == 1))
            width = step.out
        for name, step in zip(chain.tip_names(), chain.tips, strict=True):
            self.add_module(name, Unit(width, step.out, step.kernel))

    def _walk(self, chain: Chain, x: Tensor) -> list[Tensor]:
        for name in chain.step_names():
            x = self.get_submodule(name)(x)
        return [self.get_submodule(name)(x) for name in chain.tip_names()] or [x]

    def forward(self, x: Tensor) -> Tensor:
        parts = [part for chain in self.chains for part in self._walk(chain, x)]
        return torch.cat([*parts, self.branch_pool(self.pool(x))], 1)


def _block_35(width: int, pooled: int) -> Block:
    """Return a block on 35x35; the letters A to E of torchvision are 35, to_17, 17, to_8 and 8 here."""
    single = Chain("branch1x1", (Step(64),))
    five = Chain("branch5x5", (Step(48), Step(64, (5, 5))))
    double = Chain("branch3x3dbl", (Step(64), Step(96, (3, 3)), Step(96, (3, 3))))
    return Block(width, (single, five, double), mean_pool, pooled)


def _block_to_17() -> Block:
    three = Chain("branch3x3", (Step(384, (3, 3), 2),))
    double = Chain("branch3x3dbl", (Step(64), Step(96, (3, 3)), Step(96, (3, 3), 2)))
    return Block(288, (three, double))


def _block_17(inner: int) -> Block:
    row, column = (1, 7), (7, 1)
    single = Chain("branch1x1", (Step(192),))
    seven = Chain("branch7x7", (Step(inner), Step(inner, row), Step(192, column)))
    back_and_forth = (Step(inner, column), Step(inner, row), Step(inner, column), Step(192, row))
    return Block(768, (single, seven, Chain("branch7x7dbl", (Step(inner), *back_and_forth))), mean_pool, 192)


def _block_to_8() -> Block:
    three = Chain("branch3x3", (Step(192), Step(320, (3, 3), 2)))
    seven = Chain("branch7x7x3", (Step(192), Step(192, (1, 7)), Step(192, (7, 1)), Step(192, (3, 3), 2)))
    return Block(768, (three, seven))


def _block_8(width: int, pool: Callable[[Tensor], Tensor]) -> Block:
    tips = (Step(384, (1, 3)), Step(384, (3, 1)))
    single = Chain("branch1x1", (Step(320),))
    three = Chain("branch3x3", (Step(384),), tips)
    double = Chain("branch3x3dbl", (Step(448), Step(384, (3, 3))), tips)
    return Block(width, (single, three, double), pool, 192)


def _layers() -> dict[str, nn.Module]:
    """Return the layers in their order; the comments give channels and side of what comes out."""
    return {
        "Conv2d_1a_3x3": Unit(3, 32, (3, 3), stride=2, same=False),  # 32, 149
        "Conv2d_2a_3x3": Unit(32, 32, (3, 3), same=False),  # 32, 147
        "Conv2d_2b_3x3": Unit(32, 64, (3, 3)),  # 64, 147
        "pool_2": nn.MaxPool2d(3, stride=2),  # 64, 73
        "Conv2d_3b_1x1": Unit(64, 80, (1, 1)),  # 80, 73
        "Conv2d_4a_3x3": Unit(80, 192, (3, 3), same=False),  # 192, 71
        "pool_4": nn.MaxPool2d(3, stride=2),  # 192, 35
        "Mixed_5b": _block_35(192, pooled=32),  # 256, 35
        "Mixed_5c": _block_35(256, pooled=64),  # 288, 35
        "Mixed_5d": _block_35(288, pooled=64),  # 288, 35
        "Mixed_6a": _block_to_17(),  # 768, 17
        "Mixed_6b": _block_17(128),  # 768, 17
        "Mixed_6c": _block_17(160),  # 768, 17
        "Mixed_6d": _block_17(160),  # 768, 17; TensorFlow's mixed_6
        "Mixed_6e": _block_17(192),  # 768, 17
        "Mixed_7a": _block_to_8(),  # 1280, 8
        "Mixed_7b": _block_8(1280, mean_pool),  # 2048, 8
        "Mixed_7c": _block_8(2048, max_pool),  # 2048, 8; the maximum is the 2015 graph's, later ones have the mean
    }


def _neighbours(length: int, out: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return the pixels left and right of each output position i * length / out, and its way between them, in [0, 1).

    Steps are float32 as in TensorFlow: in float64 some positions would come out a rounding aside.
    """
    scale = np.float32(length) / np.float32(out)
    position = np.arange(out, dtype=np.float32) * scale
    left = np.floor(position)
    way = torch.from_numpy(position - left).to(device)
    left = torch.from_numpy(left.astype(np.int64)).to(device).clamp_max(length - 1)
    return left, (left + 1).clamp_max(length - 1), way


def resize_tf1(images: Tensor, side: int = SIDE) -> Tensor:
    """Return float images (B, C, H, W) as (B, C, side, side) by TensorFlow 1's bilinear resize.

    Its corners of pixels coincide, not their centres (no half-pixel shift), and shrinking does not smooth: both are
    flaws, but every published figure has them. Gathers and single products, so that all devices give the same bits.
    """
    left, right, way = _neighbours(images.shape[3], side, images.device)
    west, east = images[..., left], images[..., right]
    images = west + (east - west) * way  # (B, C, H, side)
    upper, lower, way = _neighbours(images.shape[2], side, images.device)
    north, south = images[:, :, upper], images[:, :, lower]
    return north + (south - north) * way[:, None]


def _pixels(images: Tensor) -> Tensor:
    """Return uint8 images (B, 1 or 3, H, W) as the network's input (B, 3, 299, 299), (g - 128) / 128."""
    if images.dtype != torch.uint8 or images.ndim != 4 or images.shape[1] not in (1, 3) or 0 in images.shape[2:]:
        found = f"{images.dtype} of shape {tuple(images.shape)}"
        raise ValueError(f"Inception takes uint8 images (B, 1 or 3, H, W), not {found}")
    x = ((resize_tf1(images.float()) - 128) / 128).expand(-1, 3, -1, -1)
    # Channels innermost: 1.5 to 2 times as fast on a CPU; on GPUs nobody measured it in float32.
    return x.contiguous(memory_format=torch.channels_last) if x.device.type == "cpu" else x


@contextmanager
def full_float32(device: torch.device) -> Generator[None]:
    """Switch off autocast, TF32 and its kin on CPUs, and leave every switch as it was found."""
    cuda, cudnn, mkldnn = torch.backends.cuda, torch.backends.cudnn, torch.backends.mkldnn
    backends = cuda.matmul, cudnn.conv, mkldnn.matmul, mkldnn.conv  # ty: ignore (torch makes them at import)
    before, matmul = [backend.fp32_precision for backend in backends], torch.get_float32_matmul_precision()
    try:
        # The older switch too: where it and the newer ones disagree, torch raises an error when it asks itself.
        torch.set_float32_matmul_precision("highest")
        for backend in backends:
            backend.fp32_precision = "ieee"
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        torch.set_float32_matmul_precision(matmul)
        for backend, value in zip(backends, before, strict=True):
            backend.fp32_precision = value


class Inception(nn.Module):
    """network(images uint8 (B, 1 or 3, H, W)) -> Features; frozen, without gradient, always in eval, in float32.

    classifier: whether there is an fc, hence logits.
    """

    def __init__(self, classifier: bool = False) -> None:
        super().__init__()
        layers = _layers()
        self.order = tuple(layers)
        for name, layer in layers.items():
            self.add_module(name, layer)
        self.fc = nn.Linear(WIDTH, CLASSES) if classifier else None
        self.requires_grad_(False).train(False)

    def train(self, mode: bool = True) -> Self:
        """Stay in eval, whatever a surrounding module is told: batch statistics would make figures of the batch."""
        return super().train(False)

    @property
    def fingerprint(self) -> str:
        """The sha256 of the weights as they are now, without fc."""
        return fingerprint(self.state_dict())

    @torch.no_grad()
    def forward(self, images: Tensor) -> Features:
        with full_float32(images.device):
            return self._features(_pixels(images))

    def _features(self, x: Tensor) -> Features:
        """Return the features of scaled images (B, 3, 299, 299)."""
        spatial = x
        for name in self.order:
            x = self.get_submodule(name)(x)
            if name == SPATIAL_LAYER:  # the 1x1 branch stands first, so these channels are its first
                spatial = x[:, :SPATIAL_CHANNELS].permute(0, 2, 3, 1).flatten(1)
        pool = x.mean((2, 3))
        return Features(pool, spatial, None if self.fc is None else pool @ self.fc.weight.T)


def _counted(name: str) -> bool:
    """Whether a tensor is part of the fingerprint: fc may be absent, and the counters do nothing."""
    return name not in CLASSIFIER and not name.endswith(COUNTER)


def fingerprint(weights: Mapping[str, Tensor]) -> str:
    """Return the sha256 over names, shapes and float32 bytes in the order of names: the same in any container."""
    digest = hashlib.sha256()
    for name in sorted(filter(_counted, weights)):
        values = weights[name].detach().cpu().float().contiguous().numpy().astype("<f4", copy=False)
        digest.update(f"{name} {values.shape}\n".encode())
        digest.update(values.tobytes())
    return digest.hexdigest()


def cache_folder(platform: str = sys.platform) -> Path:
    """Return MVM_CACHE, or the folder for mvm in the user's cache of this platform."""
    if chosen := os.environ.get("MVM_CACHE"):
        return Path(chosen)
    if platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local") / "mvm"
    if platform == "darwin":
        return Path.home() / "Library" / "Caches" / "mvm"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mvm"


def _needed(found: str) -> ValueError:
    """Return the error that says what was found and how to get the weights."""
    folder = cache_folder() / "inception"
    return ValueError(
        f"{found}. FID needs the weights '{PUBLISHED_NAME}' (sha256 {PUBLISHED_SHA256}) or the same as safetensors: "
        f"download {PUBLISHED_AT} and name it with {OPTION}, or put it into '{folder}'"
    )


def _indexed(index: Path) -> list[Path]:
    """Return the shards an index names."""
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (KeyError, ValueError, AttributeError, TypeError) as error:
        raise ValueError(f"'{index}' is no index of shards: it has no weight_map of names to files") from error
    if missing := [name for name in names if not (index.parent / name).is_file()]:
        raise ValueError(f"'{index}' names {', '.join(missing)}, but there is no such file beside it")
    return [index.parent / name for name in names]


def _files_in(folder: Path) -> list[Path]:
    """Return the files of a folder that hold the weights: an index's shards, or all safetensors, or the .pth."""
    if indices := sorted(folder.glob("*.safetensors.index.json")):
        return _indexed(indices[0])
    return sorted(folder.glob("*.safetensors")) or sorted(folder.glob("*.pth"))


def _locate(source: str | Path | None) -> list[Path]:
    """Return the files of a source: a file, a folder, or nothing for the cache."""
    path = Path(source) if source else cache_folder() / "inception"
    files = _files_in(path) if path.is_dir() else [path]
    if not files or not files[0].is_file():
        found = "holds no .safetensors or .pth" if path.is_dir() else "is not there"
        raise _needed(f"'{path}' {found}")
    return files


def _read(path: Path) -> dict[str, Tensor]:
    """Return the tensors of one file; nothing in it is executed."""
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        found = torch.load(path, map_location="cpu", weights_only=True)
    except PermissionError:
        raise
    except Exception as error:  # of a torn or foreign .pth torch raises ten kinds of error
        raise ValueError(f"'{path}' is no whole file of weights alone; {OPTION} takes .safetensors and .pth") from error
    if not isinstance(found, Mapping) or not all(isinstance(value, Tensor) for value in found.values()):
        raise ValueError(f"'{path}' holds something other than named tensors; {OPTION} takes weights alone")
    return dict(found)


def _read_all(files: Sequence[Path]) -> dict[str, Tensor]:
    """Return the tensors of all files as float32, without the counters; a name that comes twice is refused."""
    weights: dict[str, Tensor] = {}
    for path in files:
        shard = _read(path)
        if twice := sorted(shard.keys() & weights.keys()):
            raise ValueError(f"'{path}' holds {twice[0]} again; the folder must hold one set of weights")
        weights |= shard
    return {name: value.float() for name, value in weights.items() if not name.endswith(COUNTER)}


def _is_published(files: Sequence[Path]) -> bool:
    if len(files) != 1:
        return False
    with files[0].open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == PUBLISHED_SHA256


def _differing(weights: Mapping[str, Tensor], network: nn.Module) -> list[str]:
    """Return the names that are missing, unknown, or of another shape."""
    have = {name: value.shape for name, value in weights.items()}
    want = {name: value.shape for name, value in network.state_dict().items() if not name.endswith(COUNTER)}
    return sorted(name for name in have.keys() | want.keys() if have.get(name) != want.get(name))


def _build(weights: Mapping[str, Tensor], source: Path) -> Inception:
    """Return the network of these weights; on "meta" nothing is drawn, so that loading moves no random state."""
    with torch.device("meta"):
        network = Inception(classifier=CLASSIFIER[0] in weights)
    if wrong := _differing(weights, network):
        found = f"{len(wrong)} tensors are missing, unknown or of another shape, '{wrong[0]}' first"
        raise _needed(f"'{source}' does not hold the FID InceptionV3: {found}")
    network.load_state_dict(weights, strict=True, assign=True)  # torch adds the counters that were left out
    return network.requires_grad_(False)


def load_inception(source: str | Path | None = None, *, trust: bool = False) -> Inception:
    """Return the network with the weights of a file (.safetensors, .pth), a folder of shards, or the cache ("").

    Weights of another fingerprint than FINGERPRINT are refused, unless `trust`. The fingerprint leaves fc out, since
    not every copy has it; so an fc counts only in the published file, which is known by its own sha256 (or with
    `trust`). Elsewhere it is left aside and there are no logits.
    """
    files = _locate(source)
    weights = _read_all(files)
    if not trust and CLASSIFIER[0] in weights and not _is_published(files):
        weights = {name: value for name, value in weights.items() if name not in CLASSIFIER}
    network = _build(weights, files[0])
    found = network.fingerprint
    if found != FINGERPRINT and not trust:
        raise ValueError(
            f"the weights in '{files[0].parent}' have the fingerprint {found}, those of '{PUBLISHED_NAME}' have "
            f"{FINGERPRINT}: figures made with them are no FID. Give {OPTION} the published ones, or trust=True in code"
        )
    return network
