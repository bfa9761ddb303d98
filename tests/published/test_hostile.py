"""Folders that were made to harm, or went wrong: refused by name, before anything of them is used."""

import json
import os
import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import mvm
from mvm.files import sha256
from mvm.published import read_config, read_weights
from mvm.published.format import MOST_JSON


def rewrite(folder, change):
    """Change config.json by a function of its table."""
    path = folder / "config.json"
    told = json.loads(path.read_text())
    change(told)
    path.write_text(json.dumps(told))


def reseal(folder):
    """Make the checksum right again, as an attacker would."""
    rewrite(folder, lambda told: told.update(sha256=sha256(folder / "model.safetensors")))


FOLDER = {"name": "folder", "channels": 1, "size": 8, "classes": 10}  # data of the user's own


class Bomb:
    def __reduce__(self):
        return (Path.touch, (Path("went-off"),))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "x.pt", "x.pth", "x.pkl", "x.ckpt", "codec/x.PKL", "x.npz"])
def test_pickles(folder, name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(ValueError, match=rf"'{name}' may hold pickled code"):
        mvm.load(folder)
    assert not Path("went-off").exists()


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("modeling.py", "is code"),
        ("run.sh", "is code"),
        ("notes.txt", "is not part of the format"),
        ("codec/model_index.json", "is not part of the format"),
        ("more/README.md", "is not part of the format"),
        ("model.safetensors.index.json", "is not part of the format"),
        ("codec/picture.png", "is not part of the format"),
        ("scheduler/config.json", "is not part of the format"),
        ("transformer/diffusion_pytorch_model.safetensors", "is not part of the format"),
        ("transformer/diffusion_pytorch_model.bin", "may hold pickled code"),
        ("pipeline.py", "is code"),
    ],
)
def test_other_files(folder, name, reason):
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text("x")
    with pytest.raises(ValueError, match=f"'{name}' {reason}"):
        mvm.load(folder)


@pytest.mark.parametrize(
    ("name", "change", "key"),
    [
        ("model_index.json", {"transformer": ["os", "system"]}, "transformer"),
        ("model_index.json", {"_class_name": ["pipeline", "Evil"]}, "_class_name"),
        ("model_index.json", {"evil": ["subprocess", "Popen"]}, "evil"),
        ("model_index.json", {"settings": {"nfe": 1 << 40}}, "settings.nfe"),
        ("scheduler/scheduler_config.json", {"rho": 0.5}, "rho"),
        ("scheduler/scheduler_config.json", {"solver_options": {"spread": 1e9}}, "solver_options.spread"),
        ("transformer/config.json", {"network_options": {"depth": 1 << 40}}, "network_options.depth"),
        ("transformer/config.json", {"auto_map": {"AutoModel": "x.y"}}, "auto_map"),
    ],
)
def test_what_it_tells_diffusers_is_not_obeyed(folder, name, change, key):
    told = json.loads((folder / name).read_text())
    (folder / name).write_text(json.dumps({**told, "_diffusers_version": "0.1"}))
    mvm.load(folder)
    (folder / name).write_text(json.dumps({**told, **change}))
    with pytest.raises(ValueError, match=rf"{name}: '{key}' is not what config\.json says"):
        mvm.load(folder)


@pytest.mark.parametrize("text", ["", "[]", "[" * 100_000, '{"a": 1, "a": 1}', '{"rho": NaN}', " " * MOST_JSON + "{}"])
def test_tables_for_diffusers_that_are_none(folder, text):
    (folder / "model_index.json").write_text(text)
    with pytest.raises(ValueError, match=r"model_index\.json"):
        mvm.load(folder)


def test_what_may_lie_beside(folder):
    for name in ("LICENSE", "samples.png", ".gitattributes"):
        (folder / name).write_text("x")
    (folder / ".git").mkdir()
    (folder / ".git" / "x.pkl").write_text("never read")
    mvm.load(folder)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "README.md", "LICENSE", "model_index.json"])
def test_links_out_of_the_folder(folder, tmp_path, name):
    path = folder / name
    if path.exists():
        path.rename(tmp_path / name)
    else:
        (tmp_path / name).write_text("x")
    path.symlink_to(tmp_path / name)
    with pytest.raises(ValueError, match=f"'{name}' is a link that leads out of the folder"):
        mvm.load(folder)


def test_a_folder_that_is_a_link(folder, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (folder / "codec").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match="'codec' is a link that leads out"):
        mvm.load(folder)
    (folder / "codec").unlink()
    (tmp_path / "link").symlink_to(folder)
    mvm.load(tmp_path / "link")  # the user's own way to it


def test_a_link_to_itself(folder):
    (folder / "LICENSE").symlink_to("LICENSE")
    with pytest.raises(ValueError, match="'LICENSE' is a link that leads out of the folder, or nowhere"):
        mvm.load(folder)


def test_a_pipe_that_would_be_waited_for(folder):
    os.mkfifo(folder / "LICENSE")
    with pytest.raises(ValueError, match="'LICENSE' is not a plain file"):
        mvm.load(folder)


def test_a_config_without_end(folder):
    (folder / "config.json").write_text(" " * MOST_JSON + "{}")
    with pytest.raises(ValueError, match=r"'config\.json' is larger than"):
        mvm.load(folder)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "Expecting value"),
        ("[]", "a table is needed"),
        ("[" * 100_000, "too deeply nested"),
        ('{"format": 1, "format": 1}', "a key is there twice"),
        ('{"format": NaN}', "NaN is no number"),
        ('{"library_name": "other"}', "a model of something else"),
        ('{"library_name": "mvm", "format": 2}', "format is 2; this version of mvm reads 1"),
        ('{"library_name": "mvm", "format": 1}', "the keys must be"),
    ],
)
def test_configs_that_are_none(folder, text, reason):
    (folder / "config.json").write_text(text)
    with pytest.raises(ValueError, match=rf"config\.json: .*{reason}"):
        mvm.load(folder)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda told: told.update(auto_map={"AutoModel": "x.y"}), "the keys must be"),
        (lambda told: told["recipe"]["data"].update(FOLDER, path="/etc"), r"data\.path='/etc' must be a name"),
        (
            lambda told: told["recipe"]["data"].update(FOLDER, path="a/../../b"),
            r"data\.path='a/\.\./\.\./b' must be a name",
        ),
        (lambda told: told["recipe"]["repa"].update(encoder="/dino"), r"repa\.encoder='/dino' must be a name"),
        (lambda told: told["recipe"].update(evil=1), "unknown key 'evil'"),
        (lambda told: told["recipe"]["train"].update(steps="1"), r"train\.steps='1' must be of type int"),
        (lambda told: told["source"].update(step="4"), r"source\.step='4' must be of type int"),
        (lambda told: told["source"].pop("run"), "run"),
        (lambda told: told.update(classes=["a"]), "classes has 1 names"),
        (lambda told: told.update(classes="0123456789"), "classes must be a list"),
        (lambda told: told.update(classes=[f"\x1b[2J{n}" for n in range(10)]), "printable"),
        (lambda told: told["recipe"].update(name="\x1b[2Jx"), r"recipe\.name=.* must be printable"),
        (lambda told: told["source"].update(run="\x1b]0;x"), r"source\.run=.* must be printable"),
        (lambda told: told.update(license="mit\nx: y"), "is no identifier"),
        (lambda told: told.update(recipe=[]), "a table"),
        (lambda told: told["recipe"].update(task="decoder"), "decoder|unknown key"),
    ],
)
def test_configs_with_other_contents(folder, change, reason):
    rewrite(folder, change)
    with pytest.raises(ValueError, match=rf"config\.json: .*({reason})"):
        mvm.load(folder)


BIG = 1 << 40


@pytest.mark.parametrize(
    ("part", "values", "reason"),
    [
        ("network", {"depth": BIG}, "at most 512"),
        ("network", {"depth": 512}, "does not fit"),
        ("network", {"depth": 3}, "does not fit"),
        ("network", {"width": BIG, "heads": 1}, "does not fit"),
        ("data", {"name": "folder", "path": "x", "channels": 1, "size": BIG, "classes": 10}, "tokens"),
        ("data", {"name": "folder", "path": "x", "channels": BIG, "size": 8, "classes": 10}, "does not fit"),
        (
            "data",
            {"name": "folder", "path": "x", "channels": 1, "size": 8, "classes": BIG},
            r"data\.classes=.* out of range",
        ),
    ],
)
def test_sizes_that_would_fill_the_memory(folder, part, values, reason):
    rewrite(folder, lambda told: told["recipe"][part].update(values))
    with pytest.raises(ValueError, match=reason):
        mvm.load(folder)


def test_damaged_weights(folder):
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(ValueError, match=r"model\.safetensors is damaged \(sha256"):
        mvm.load(folder)
    path.write_bytes(whole[:-1])
    with pytest.raises(ValueError, match="no whole safetensors file"):
        mvm.load(folder)
    path.write_bytes((1 << 60).to_bytes(8, "little") + whole[8:])  # a header without end
    with pytest.raises(ValueError, match="no whole safetensors file"):
        mvm.load(folder)
    path.unlink()
    with pytest.raises(ValueError, match=r"model\.safetensors is missing"):
        mvm.load(folder)


@pytest.mark.parametrize(
    "change",
    [
        lambda weights: weights.pop("embed.bias"),
        lambda weights: weights.update(more=torch.zeros(1)),
        lambda weights: weights.update({"embed.bias": torch.zeros(17)}),
        lambda weights: weights.update({"embed.bias": torch.zeros(16, dtype=torch.int8)}),
        lambda weights: weights.update({"embed.bias": torch.zeros(16, dtype=torch.float64)}),
    ],
)
def test_other_tensors(folder, change):
    path = folder / "model.safetensors"
    weights = load_file(path)
    change(weights)
    save_file(weights, path)
    reseal(folder)
    with pytest.raises(ValueError, match=r"model\.safetensors (does not fit its config\.json|holds )"):
        read_weights(folder, read_config(folder))
