"""Small valid files of every format, to be spoiled."""

import contextlib
import io
import json
import pickle
import tarfile
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import save_file

from mvm import checkpoint
from mvm.data.prepare import prepare
from mvm.latent import Decoder, DecoderConfig, EncoderConfig
from mvm.latent.cache import write_latents
from mvm.latent.codec import Origin
from mvm.latent.encoder import Statistics
from mvm.latent.rae import DecoderOnly
from mvm.metrics.moments import Moments, save_moments
from mvm.published import export
from mvm.recipes import load_recipe, override
from mvm.recipes.reading import changed, shipped, to_json

TINY = {"network.depth": "1", "network.heads": "1", "network.width": "8", "network.patch": "8"}
ORIGIN = Origin("e" * 64, "a small encoder")


def _draw(*shape: int) -> np.ndarray:
    return np.random.default_rng(len(shape)).integers(0, 256, shape, np.uint8)


def _saved(image: Image.Image, kind: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def images() -> list[bytes]:
    """Return pictures in every format and many modes."""
    colour, grey = Image.fromarray(_draw(9, 12, 3)), Image.fromarray(_draw(9, 12))
    deep = Image.fromarray(_draw(9, 12).astype(np.uint16) * 257)
    exif = Image.Exif()
    exif[0x0112] = 6  # turn by a quarter
    palette = colour.quantize(8)
    palette.info["transparency"] = 3
    frames = [Image.fromarray(_draw(9, 12, 3)), colour]
    more: dict[str, Any] = {"save_all": True, "append_images": frames}
    plain = [_saved(colour, kind) for kind in ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF", "PPM", "JPEG2000", "AVIF")]
    return [
        *plain,
        *(_saved(grey, kind) for kind in ("PNG", "JPEG", "PPM", "TIFF")),
        *(_saved(deep, kind) for kind in ("PNG", "TIFF")),
        *(_saved(colour.convert("CMYK"), kind) for kind in ("JPEG", "TIFF")),
        *(_saved(colour, "TIFF", compression=name) for name in ("tiff_lzw", "tiff_adobe_deflate", "jpeg")),
        _saved(colour, "JPEG", exif=exif, progressive=True),
        _saved(palette, "PNG", transparency=3),
        _saved(palette, "GIF", transparency=3, **more),
        _saved(colour, "WEBP", **more),
        _saved(colour, "PNG", **more),
        _saved(colour.convert("RGBA"), "WEBP", lossless=True),
        _saved(grey.convert("1"), "PNG"),
        _saved(grey.convert("LA"), "PNG"),
        _saved(Image.new("RGB", (1, 1)), "PNG"),
    ]


def _few() -> list[tuple[str, bytes]]:
    some = images()
    return [("ant/0.png", some[0]), ("ant/1.jpg", some[1]), ("bee/2.gif", some[4]), ("bee/3.png", some[-1])]


def pictures(folder: Path) -> None:
    """Write a folder of pictures in two classes."""
    for name, data in _few():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)


def listed(folder: Path) -> bytes:
    """Write a folder of pictures; return its dataset.json."""
    pictures(folder)
    return json.dumps({"labels": [[name, place % 2] for place, (name, _) in enumerate(_few())]}).encode()


def recipes() -> list[bytes]:
    """Return recipes in TOML: those in the package, and one that names a base."""
    return [*(text.encode() for text in shipped().values()), b'base = "digits"\nname = "x"\n[train]\nsteps = 10\n']


def recipe() -> Any:
    """Return a recipe of a network of a few hundred numbers."""
    return override(load_recipe("digits"), TINY)


def run(folder: Path, made: Any = None) -> None:
    """Write a run directory with one checkpoint and a log; made: its recipe."""
    from mvm.network import build_network

    torch.manual_seed(0)
    made = made or recipe()
    network = build_network(made.network, made.sample_shape, 10).state_dict()
    info = {"step": 2, "quality": 0.5, "data": "stamp", "codec": ""}
    folder.mkdir(parents=True, exist_ok=True)
    checkpoint.save(checkpoint.step_folder(folder, 2), {"ema": network, "model": network}, info)
    (folder / "recipe.json").write_text(to_json(made))
    (folder / "metrics.jsonl").write_text("".join(f'{{"step": {step}, "loss": 1.5}}\n' for step in (1, 2, 3)))


def latent_run(folder: Path) -> None:
    """Write a run of latents with its decoder."""
    options = {"name": "folder", "path": "x", "channels": 3, "size": 4, "classes": 10}
    codec = {"kind": "rae", "path": "/nowhere", "channels": 3, "side": 2}
    changes = {f"data.{name}": value for name, value in options.items()} | {"network.patch": 1}
    run(folder, changed(recipe(), changes | {f"codec.{name}": value for name, value in codec.items()}))
    autoencoder(folder / "codec")


def published(folder: Path) -> None:
    """Write a published model."""
    run(folder / ".run")
    export(folder / ".run", folder / ".made", license="mit")
    for path in (folder / ".made").iterdir():
        path.rename(folder / path.name)


def figures() -> list[bytes]:
    """Return what mvm eval --json writes, as far as a card reads it."""
    sampler = {"solver": "heun", "nfe": 8, "rho": 1.0, "cfg": 2.0, "low": 0.0, "high": 1.0, "evaluations": 8}
    told = {
        "images": {"sampler": sampler, "count": 10, "origin": {"sha256": "0" * 64}, "draw": {"seed": 0, "labels": "x"}},
        "metrics": {"fid": {"value": 1.5, "error": None}, "kid": {"value": 0.5, "error": 0.1}},
        "reference": {"name": "digits", "split": "train", "count": 100},
        "software": {"mvm": "0", "device": "cpu"},
        "warnings": ["few"],
    }
    facts = {**{key: told[key] for key in ("reference", "software", "warnings")}, "images": 10}
    facts |= {"draw": told["images"]["draw"], "model": {"sha256": "0" * 64}}
    return [json.dumps(told).encode(), json.dumps({"facts": facts, "results": [{**sampler, **told}]}).encode()]


def autoencoder(folder: Path) -> None:
    """Write a decoder with its statistics."""
    torch.manual_seed(0)
    decoder = Decoder(DecoderConfig("tiny", 2), (3, 2, 2), ORIGIN)
    statistics = Statistics(torch.zeros(3, 2, 2), torch.ones(3, 2, 2), ORIGIN, 4)
    DecoderOnly(EncoderConfig("small"), decoder, statistics).save(folder)


def pth() -> list[bytes]:
    """Return weights as torch saves them, now and before 1.6."""
    found = []
    for modern in (True, False):
        buffer = io.BytesIO()
        tensors = {"a.weight": torch.ones(3, 4), "b": torch.zeros(2, dtype=torch.float16), "a.counter": torch.tensor(1)}
        torch.save(tensors, buffer, _use_new_zipfile_serialization=modern)
        found.append(buffer.getvalue())
    return found


def shard_map(folder: Path) -> list[bytes]:
    """Write shards of weights; return their index."""
    for name in ("a", "b"):
        save_file({name: torch.ones(2)}, folder / f"{name}.safetensors")
    return [json.dumps({"metadata": {}, "weight_map": {"a": "a.safetensors", "b": "b.safetensors"}}).encode()]


def prepared(folder: Path) -> None:
    """Write a prepared folder."""
    pictures(folder / ".source")
    prepare(folder / ".source", folder / ".out", size=8, workers=1, progress=False)
    for path in (folder / ".out").iterdir():
        path.rename(folder / path.name)


def conditioned(folder: Path, condition: str) -> None:
    """Write a prepared folder of signals with a condition."""
    signals, texts = np.linspace(-1, 1, 60, dtype=np.float32).reshape(5, 2, 6), np.array(["a", "b c", "a", "ß", ""])
    np.savez(folder / ".source.npz", images=signals, tokens=signals[:, :, :3], text=texts)
    options = {"condition": condition, "workers": 1, "progress": False, "part_size": 3}
    prepare(folder / ".source.npz", folder / ".out", **options)
    for path in (folder / ".out").iterdir():
        path.rename(folder / path.name)


def sidecar(source: Path, out: Path) -> bytes:
    """Write the shards of a prepared folder; return the sidecar that its first shard had."""
    from mvm.data import prepare as module

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    real, module._accept = module._accept, interrupt  # its shards are finished by then
    with contextlib.suppress(KeyboardInterrupt):
        prepare(source, out, size=8, workers=1, progress=False)
    module._accept = real
    return (out / "shard-00000.json").read_bytes()


def latents(folder: Path) -> None:
    """Write the latents of five pictures, in shards of two."""
    codec: Any = SimpleNamespace(
        latent_shape=(2, 2, 2), fingerprint="c" * 64, encode=lambda x: x[:, :2, :2, :2].float()
    )
    write_latents(folder, codec, torch.from_numpy(_draw(5, 3, 4, 4)), stamp="stamp", shard=2, progress=False)


def moments(folder: Path) -> list[bytes]:
    """Return a file of moments, and one of ADM's kind."""
    save_moments(folder / "m.npz", Moments(torch.zeros(3), torch.eye(3), 10), {"images": {"name": "x"}})
    buffer = io.BytesIO()
    np.savez_compressed(buffer, mu=np.zeros(3, np.float32), sigma=np.eye(3), arr_0=_draw(2, 4, 4, 3))
    return [(folder / "m.npz").read_bytes(), buffer.getvalue()]


def parts(folder: Path) -> None:
    """Write samples made in parts."""
    (folder / "samples.json").write_text(json.dumps({"mvm": "0", "draw": {"num": 2}, "settings": {"nfe": 4}}))
    (folder / "part-000000.json").write_text(json.dumps({"labels": [0, 1], "nfe": 4, "passes": 4}))
    np.save(folder / "part-000000.npy", _draw(2, 2, 2, 1))


def zips() -> list[bytes]:
    """Return archives of pictures: stored, packed in two ways, and with a dataset.json."""
    found = []
    for method in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2):
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w", method) as archive:
            for name, data in _few():
                archive.writestr(name, data)
            if method == zipfile.ZIP_DEFLATED:
                archive.writestr("dataset.json", json.dumps({"labels": [[name, 0] for name, _ in _few()]}))
        found.append(buffer.getvalue())
    return found


def tars() -> list[bytes]:
    """Return webdataset tars in three dialects, and one of links, folders and devices."""
    found = []
    for dialect in (tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w", format=dialect) as tar:
            for place, (_, data) in enumerate(_few()):
                name = "ü" * 60 if dialect != tarfile.USTAR_FORMAT else "x"
                _add(tar, f"{name}/{place}.png", data)
                _add(
                    tar,
                    f"{name}/{place}.cls" if place % 2 else f"{name}/{place}.json",
                    b"1" if place % 2 else b'{"label": 1}',
                )
        found.append(buffer.getvalue())
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE, tarfile.DIRTYPE):
            _add(tar, f"{kind.decode()}.png", b"", kind, "../../etc/passwd")
        _add(tar, "../0.png", _few()[0][1])
        _add(tar, "../0.cls", b"1")
    return [*found, buffer.getvalue()]


def _add(tar: tarfile.TarFile, name: str, data: bytes, kind: bytes = tarfile.REGTYPE, link: str = "") -> None:
    member = tarfile.TarInfo(name)
    member.size, member.type, member.linkname = len(data), kind, link
    tar.addfile(member, io.BytesIO(data))


def parquets() -> list[bytes]:
    """Return parquet files: nested as on the hub and plain, packed and not."""
    import pyarrow as arrow
    import pyarrow.parquet as parquet

    data, labels = [data for _, data in _few()], [0, 1, 0, 1]
    names = {b"huggingface": json.dumps({"info": {"features": {"label": {"names": ["ant", "bee"]}}}}).encode()}
    nested = arrow.table({"image": [{"bytes": item, "path": "x"} for item in data], "label": labels})
    plain = arrow.table({"img": arrow.array(data, arrow.binary()), "label": labels})
    found = []
    for table, options in (
        (nested.replace_schema_metadata(names), {"compression": "snappy"}),
        (plain, {"compression": "none", "use_dictionary": False, "row_group_size": 2}),
        (plain, {"compression": "zstd"}),
        (plain, {"compression": "gzip", "data_page_version": "2.0"}),
    ):
        buffer = io.BytesIO()
        parquet.write_table(table, buffer, **options)
        found.append(buffer.getvalue())
    return found


def npzs() -> list[bytes]:
    """Return pictures in .npz, packed and not."""
    found = []
    for save in (np.savez, np.savez_compressed):
        buffer = io.BytesIO()
        save(buffer, images=_draw(4, 5, 5, 3), labels=np.array([0, 1, 0, 1]))
        found.append(buffer.getvalue())
    return found


def npys(folder: Path) -> list[bytes]:
    """Return pictures in .npy, of every layout; write their labels."""
    np.save(folder / "labels.npy", np.array([0, 1, 0, 1]))
    found = []
    for shape in ((4, 5, 5, 3), (4, 3, 5, 5), (4, 5, 5), (4, 75)):
        buffer = io.BytesIO()
        np.save(buffer, _draw(*shape))
        found.append(buffer.getvalue())
    return found


def batches() -> list[bytes]:
    """Return CIFAR's pickles in several protocols."""
    told = {b"data": _draw(4, 48), b"labels": [0, 1, 0, 1], b"filenames": [b"x"] * 4}
    return [pickle.dumps(told, protocol) for protocol in (0, 2, 4, 5)]
