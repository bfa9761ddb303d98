"""Models made to harm, not by chance: runs and exports whose sizes, paths, names, tensors and files were chosen.

A case is what was changed, as JSON; checksums are right, as an attacker would make them. What loads is sampled once and
exported, and its card must hold no markup.
"""

import contextlib
import hashlib
import json
import os
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fuzz_seeds
import torch
from fuzz_format import Format
from fuzz_mutate import HOSTILE_VALUES
from safetensors.torch import load_file, save_file

from mvm.latent import load_vae
from mvm.model import load
from mvm.published import export
from mvm.published.write import SEAL

WORK = 1e9  # multiply-adds of a pass that is tried
SIZES = (0, 1, 2, 3, 7, 64, 511, 512, 513, 1024, 4096, 30_720, 65_536, 10**6, 10**8, 1 << 31, 1 << 40, 1 << 63, -1)
NUMBERS = (0.0, 1.0, -1.0, 1e-308, 1e30, 1e308, -1e308, 5.0, 1000.0, 0.5)
PATHS = (
    *("/", "/etc/passwd", "/dev/zero", "/proc/self/environ", "..", "../..", "../codec", "codec", "codec/..", "."),
    *(
        "evil/enc",
        "evil/enc@main",
        "hf://evil/enc",
        "https://evil.example/x",
        "file:///etc",
        "//evil/share",
        "~",
        "$HOME",
    ),
    *("C:\\evil", "\\\\evil\\share", "a" * 5000, "\x00", "x\ny", "sit:x.pt"),
)
MARKUP = (
    *("<img src=x onerror=alert(1)>", "<script>alert(1)</script>", "[x](javascript:alert(1))", "![x](//evil.example)"),
    *(
        "](x",
        "```",
        "`",
        "| a |",
        "---\n- x",
        "# x",
        "\x1b[2J",
        "\u202e",
        "&lt;img&gt;",
        "{{x}}",
        "${x}",
        "%s%n",
        "x\n\n## y",
    ),
)
OPTIONS = {
    "network": {
        **dict.fromkeys(("depth", "width", "heads", "patch", "inner_block"), SIZES),
        "size": ("tiny", "XL", "x"),
        "kind": ("dit", "ddt", "own", "module:os:system", "module:x:Y", "__class__"),
        "design": ("modern", "classic", "lightning", "raev2"),
        "skip": (True,),
        "local": (True,),
        "modulation": ("shared",),
        "time": ("fourier", "1-t", "step"),
        "dropout": NUMBERS,
    },
    "data": {
        **dict.fromkeys(("channels", "size", "classes"), SIZES),
        "name": ("folder", "own", "cifar10", "imagenet512", "x"),
        "path": PATHS,
        "mirror": (True,),
        "space": ([1 << 20], [4, 4], [1, 1, 1], [1 << 40, 1], [65_536, 65_536], [8] * 9),
        "values": ("float", "uint8"),
        "names": ([*MARKUP[:10]], list(MARKUP), ["a"] * 10, ["a"] * 100_000),
        "augment": NUMBERS,
    },
    "codec": {
        **dict.fromkeys(("path", "encoder", "latents"), PATHS),
        "kind": ("rae", "vae", "pixels"),
        "channels": SIZES,
        "side": SIZES,
        "scale": NUMBERS,
        "posterior": ("draw",),
    },
    "condition": {
        "kind": ("labels", "vector", "tokens", "image", "none", "own"),
        "width": SIZES,
        "length": SIZES,
        "encoder": PATHS,
    },
    "path": {"schedule": ("linear-flow", "variance-preserving", "x"), "T": NUMBERS},
    "objective": {"kind": ("v", "eps", "x0", "flow"), "label_drop": NUMBERS},
    "repa": {"encoder": PATHS, "block": SIZES},
    "train": {"steps": SIZES, "batch": SIZES, "lr": NUMBERS},
    "sample": {
        **dict.fromkeys(
            ("rho", "cfg", "low", "high", "tolerance", "internal", "auto_scale", "shift", "t_min"), NUMBERS
        ),
        "nfe": SIZES,
        "solver": ("adams", "sa", "adaptive", "heun", "x"),
        "share": NUMBERS,
    },
}
ROOT = {"name": MARKUP + PATHS, "description": MARKUP, "seed": SIZES, "task": ("decoder", "field", "x")}
FILES = (
    *("x.pkl", "x.pt", "pytorch_model.bin", "codec/x.ckpt", "modeling.py", "run.sh", "x.so", "notes.txt", "tuned.json"),
    *("codec/rae.json", "codec/config.json", "codec/decoder.safetensors", "codec/diffusion_pytorch_model.safetensors"),
    *("<img src=x>.png", "x\x1b[2J.png", "a" * 250, "d/" * 100 + "x", "README.md", "config.json", "recipe.json"),
)
CONTENTS = ("", "x", "{}", "[]", "[" * 50_000, "\x80\x04cos\nsystem\n(S'true'\ntR.", json.dumps({"format": 1}))
LINKS = ("/etc/passwd", "/dev/zero", "/", "..", ".", "nowhere", "../../..", "/proc/self/fd/0")
Step = tuple[str, Any, Any]


def _option(rng: random.Random) -> Step:
    section = rng.choice((*OPTIONS, *OPTIONS, ""))
    table = OPTIONS.get(section, ROOT)
    name = rng.choice(list(table))
    value = rng.choice(HOSTILE_VALUES[:11]) if rng.random() < 0.1 else rng.choice(table[name])
    return "option", [*filter(None, (section,)), name], value


def _told(rng: random.Random) -> Step:
    """What stands beside the recipe in config.json, or in a manifest."""
    where = rng.choice(
        (["classes"], ["license"], ["source", "run"], ["source", "step"], ["source", "weights"], ["sha256"])
    )
    return "told", where, rng.choice((*MARKUP, *SIZES, list(MARKUP[:10]), ["a"] * 10, None))


def _tensor(rng: random.Random) -> Step:
    kinds = ("empty", "fill", "drop", "add", "wide", "type", "many")
    return "tensor", rng.choice(kinds), (rng.random(), rng.choice(("nan", "inf", "-inf", "60000", "3e38")))


def _index(rng: random.Random) -> Step:
    where = rng.choice((["latent_shape"], ["decoder", "patch"], ["decoder", "size"], ["encoder", "name"], ["words"]))
    return "index", where, rng.choice((*SIZES, *PATHS, *MARKUP, [3, 2, 2], [3, 1 << 40, 1 << 40], [1 << 40, 2, 2]))


def _file(rng: random.Random) -> Step:
    return "file", rng.choice(FILES), rng.choice(CONTENTS)


def _link(rng: random.Random) -> Step:
    return (
        rng.choice(("link", "link", "pipe")),
        rng.choice((*FILES[:12], "checkpoints", "codec", "samples")),
        rng.choice(LINKS),
    )


CHOICES: tuple[Callable[[random.Random], Step], ...] = (*[_option] * 6, _told, _tensor, _tensor, _index, _file, _link)


def spoiled(rng: random.Random, data: bytes) -> bytes:
    """Return what an attacker changes: one to four things."""
    return json.dumps([rng.choice(CHOICES)(rng) for _ in range(rng.choice((1, 1, 2, 3, 4)))]).encode()


def _set(table: Any, names: list[str], value: Any) -> None:
    for name in names[:-1]:
        table = table.setdefault(name, {}) if isinstance(table, dict) else {}
    if isinstance(table, dict):
        table[names[-1]] = value


def _change_tensors(weights: dict[str, torch.Tensor], kind: str, how: tuple[float, str]) -> None:
    name = (sorted(weights) or [""])[int(how[0] * len(weights))]
    weights.setdefault(name, torch.zeros(1))
    if kind == "fill":
        weights[name] = torch.full(weights[name].shape, float(how[1])).to(weights[name].dtype)
    elif kind == "drop":
        del weights[name]
    elif kind == "empty":
        weights[name] = torch.zeros(0)
    elif kind == "wide":
        weights[name] = torch.zeros(0, 1 << 40)
    elif kind == "type":
        weights[name] = weights[name].to((torch.int8, torch.float64, torch.bfloat16, torch.bool)[int(how[0] * 4)])
    elif kind == "add":
        weights[MARKUP[int(how[0] * len(MARKUP))]] = torch.zeros(1)
    else:
        weights |= {f"blocks.{number}.attention.{how[1]}": torch.zeros(0) for number in range(int(how[0] * 20_000))}


class HostileRun(Format):
    """A run of pixels; subclasses are other models."""

    name, file, share = "run made to harm", "case.json", 0.3
    spoil = staticmethod(spoiled)
    recipe, weights = "recipe.json", "checkpoints/step-00000002/ema.safetensors"

    def lay(self) -> list[bytes]:
        self.whole, self.model = self.folder / ".whole", self.folder / "model"
        self.make(self.whole)
        return [b"[]"]

    def make(self, folder: Path) -> None:
        fuzz_seeds.run(folder)

    def put(self, data: bytes) -> None:
        for left in (self.model, self.folder / "out"):
            shutil.rmtree(left, ignore_errors=True)
        shutil.copytree(self.whole, self.model)
        for kind, what, value in json.loads(data):
            getattr(self, f"put_{kind}")(what, value)

    def put_option(self, names: list[str], value: Any) -> None:
        self.change(self.recipe, names, value)

    def put_told(self, names: list[str], value: Any) -> None:
        self.change("checkpoints/step-00000002/manifest.json", names[-1:], value)

    def put_index(self, names: list[str], value: Any) -> None:
        if (self.model / "codec" / "rae.json").is_file():
            self.change("codec/rae.json", names, value)

    def put_tensor(self, kind: str, how: tuple[float, str]) -> None:
        path = self.model / self.weights
        if not path.is_file():  # its folder was changed before
            return
        weights = load_file(path)
        _change_tensors(weights, kind, how)
        save_file(weights, path)
        self.seal(hashlib.sha256(path.read_bytes()).hexdigest())

    def seal(self, digest: str) -> None:
        self.change("checkpoints/step-00000002/manifest.json", ["sha256"], {"ema.safetensors": digest})

    def put_file(self, name: str, contents: str) -> None:
        path = self.model / name
        if not (path.is_dir() or path.is_symlink()):  # else changed before
            self.clear(name).write_text(contents)

    def put_link(self, name: str, target: str) -> None:
        self.clear(name).symlink_to(target)

    def put_pipe(self, name: str, target: str) -> None:
        os.mkfifo(self.clear(name))

    def clear(self, name: str) -> Path:
        path = self.model / name
        if not path.parent.is_dir():
            path.parent.unlink(missing_ok=True)
            path.parent.mkdir(parents=True)
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        path.unlink(missing_ok=True)
        return path

    def change(self, name: str, names: list[str], value: Any) -> None:
        path = self.model / name
        if not path.is_file() or path.is_symlink():
            return
        try:
            table = json.loads(path.read_text())
        except (ValueError, RecursionError):
            return  # changed before
        _set(table, names, value)
        path.write_text(json.dumps(table))

    def read(self) -> None:
        model = load(self.model)
        try:
            if model.recipe.multiply_adds < WORK and model.recipe.condition.kind in ("labels", "none"):
                model.generate(1, nfe=2, solver="adams", progress=False)
            export(self.model, self.folder / "out")
        except (ValueError, FloatingPointError) as error:  # of the network, not of a file
            raise ValueError(f"{self.model}: {error}") from None
        card, _, _ = (self.folder / "out" / "README.md").read_text().rpartition(SEAL)
        assert not re.search(r"<(?!/?code>)|\]\(|\x1b", re.sub(r"```.*?```", "", card, flags=re.DOTALL)), card


class HostileLatentRun(HostileRun):
    name, share = "run of latents made to harm", 0.2

    def make(self, folder: Path) -> None:
        fuzz_seeds.latent_run(folder)
        with contextlib.suppress(ValueError):
            load_vae(folder, 4)  # which imports diffusers, and that libraries of its own


class HostileExport(HostileRun):
    name, weights = "export made to harm", "model.safetensors"
    recipe = "config.json"

    def make(self, folder: Path) -> None:
        fuzz_seeds.published(folder)
        shutil.rmtree(folder / ".run")
        (folder / ".made").rmdir()

    def put_option(self, names: list[str], value: Any) -> None:
        self.change(self.recipe, ["recipe", *names], value)
        for name in ("model_index.json", "scheduler", "transformer"):  # which would disagree
            self.clear(name)

    def put_told(self, names: list[str], value: Any) -> None:
        self.change(self.recipe, names, value)

    def seal(self, digest: str) -> None:
        self.change(self.recipe, ["sha256"], digest)


MODELS: tuple[type[Format], ...] = (HostileRun, HostileLatentRun, HostileExport)
