"""Run directories of strangers: checked as published models are, and nothing outside of them is opened unasked."""

import json
import os
import pickle
import shutil
import socket
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import mvm
from mvm import checkpoint
from mvm.cli import run as command
from mvm.latent import Decoder, DecoderConfig, EncoderConfig
from mvm.latent.codec import Origin
from mvm.latent.encoder import Statistics
from mvm.latent.rae import DecoderOnly
from mvm.network import build_network
from mvm.options import MOST_NFE
from mvm.published.format import write_codec
from mvm.recipes import load_recipe, override, to_json
from mvm.recipes.reading import changed

TINY = {"network.depth": "2", "network.heads": "2", "network.width": "16", "network.patch": "4"}
STEP = "checkpoints/step-00000002"


def write_run(folder, recipe, weights=None):
    """Write a run with one checkpoint, as anybody can; weights: in place of the recipe's own."""
    torch.manual_seed(0)
    weights = build_network(*recipe.blueprint).state_dict() if weights is None else weights
    folder.mkdir(parents=True, exist_ok=True)
    checkpoint.save(folder / STEP, {"ema": weights}, {"step": 2, "data": "", "codec": ""})
    (folder / "recipe.json").write_text(to_json(recipe))
    return folder


@pytest.fixture
def stranger(tmp_path):
    """A run of digits from elsewhere."""
    return write_run(tmp_path / "downloads" / "r3b", override(load_recipe("digits"), TINY))


def rewrite(folder, change):
    """Change recipe.json by a function of its table."""
    path = folder / "recipe.json"
    told = json.loads(path.read_text())
    change(told)
    path.write_text(json.dumps(told))


class Bomb:
    def __reduce__(self):
        return (Path.touch, (Path("went-off"),))


@pytest.mark.parametrize(
    "name", ["x.pt", "x.pkl", "checkpoints/x.bin", f"{STEP}/x.pth", "codec/x.ckpt", "samples/x.PT"]
)
def test_pickles_beside_a_run(stranger, name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (stranger / name).parent.mkdir(exist_ok=True)
    (stranger / name).write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(ValueError, match=rf"'{name}' may hold pickled code"):
        mvm.load(stranger)
    assert not Path("went-off").exists()


def test_folders_of_trackers_are_not_read(stranger, tmp_path):
    """wandb keeps its program's code there, and links into a cache of its own."""
    (stranger / "wandb" / "files").mkdir(parents=True)
    (stranger / "wandb" / "files" / "train.py").write_text("x")
    (stranger / "wandb" / "debug.log").symlink_to(tmp_path)
    assert mvm.load(stranger).generate(1, nfe=1, progress=False).images.shape == (1, 1, 8, 8)


def test_an_average_is_not_made_of_a_run_that_is_not_read(stranger, tmp_path, capsys):
    (tmp_path / "secret").write_text("x")
    (stranger / "codec").mkdir()
    (stranger / "codec" / "decoder.safetensors").symlink_to(tmp_path / "secret")
    assert command(["ema", str(stranger), "--width", "0.1", "--out", str(tmp_path / "out")]) == 2
    assert "is a link that leads out" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("change", [{"description": "my\tdigits"}, {"network.depth": "513"}])
def test_what_a_run_may_not_say_is_refused_before_it_is_trained(tmp_path, change):
    recipe = override(load_recipe("digits"), TINY | {"train.steps": "1"})
    with pytest.raises(ValueError, match=r"without tabs|at most 512"):
        mvm.train(changed(recipe, change) if "description" in change else override(recipe, change), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_buffers_of_any_number_in_a_network_of_ones_own(tmp_path):
    class Counting(torch.nn.Conv2d):
        def __init__(self):
            super().__init__(1, 1, 3, padding=1)
            self.register_buffer("calls", torch.zeros(2, dtype=torch.int32))
            self.register_buffer("scale", torch.ones(2, dtype=torch.float64))

        def forward(self, x, t):
            return super().forward(x)

    mvm.train(Counting(), torch.zeros(4, 1, 8, 8), tmp_path / "run", steps=1, batch=2, progress=False)
    assert mvm.load(tmp_path / "run", network=Counting()).network is not None


@pytest.mark.parametrize("name", ["modeling.py", "codec/run.sh", "checkpoints/x.so"])
def test_code_beside_a_run(stranger, name):
    (stranger / name).parent.mkdir(exist_ok=True)
    (stranger / name).write_text("x")
    with pytest.raises(ValueError, match=f"'{name}' is code"):
        mvm.load(stranger)


def test_what_a_run_may_hold(stranger):
    for name in (
        "metrics.jsonl",
        "notes.txt",
        "samples/step-1.png",
        "features/part-0.npy",
        "x.npz",
        "events.out.tfevents",
    ):
        (stranger / name).parent.mkdir(exist_ok=True)
        (stranger / name).write_text("x")
    (stranger / "checkpoints" / ".step-00000003.tmp").mkdir()
    (stranger / "checkpoints" / ".step-00000003.tmp" / "x.bin").write_text("being written")
    mvm.load(stranger)


@pytest.mark.parametrize("name", ["recipe.json", f"{STEP}/ema.safetensors", "checkpoints"])
def test_links_out_of_a_run(stranger, tmp_path, name):
    (stranger / name).rename(tmp_path / "elsewhere")
    (stranger / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match=f"'{name}' is a link that leads out of the folder"):
        mvm.load(stranger)


def test_a_pipe_in_a_run(stranger):
    os.mkfifo(stranger / "tuned.json")
    with pytest.raises(ValueError, match=r"'tuned\.json' is not a plain file"):
        mvm.load(stranger)


BIG = 1 << 40
FOLDER = {"data.name": "folder", "data.path": "x", "data.channels": 1, "data.size": 8, "data.classes": 10}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"network.width": 30_720}, "does not fit"),
        ({"network.width": BIG, "network.heads": 1}, "does not fit"),
        ({"network.depth": BIG}, "at most 512"),
        (FOLDER | {"data.size": BIG}, "tokens"),
        (
            {"data.name": "folder", "data.path": "x", "data.size": 8, "data.classes": BIG},
            r"data\.classes=.* out of range",
        ),
        ({"name": "\x1b[2Jx"}, r"recipe\.name=.* must be printable"),
        ({"sample.nfe": 10**8}, rf"nfe=100000000 is out of range; it must lie in \[1, {MOST_NFE}\]"),
        ({"sample.cfg": 1e308}, r"cfg=1e\+308 is out of range"),
    ],
)
def test_sizes_of_a_run(stranger, changes, reason, monkeypatch):
    def build(told):
        for name, value in changes.items():
            *sections, last = name.split(".")
            table = told
            for section in sections:
                table = table[section]
            table[last] = value

    rewrite(stranger, build)
    monkeypatch.setattr("mvm.model.Model", None)  # nothing may be built
    with pytest.raises(ValueError, match=rf"(?s){stranger.name}.*{reason}"):
        mvm.load(stranger)


def test_depth_padded_with_empty_tensors(tmp_path):
    """A small file of very many tensors of no size, whose blocks would be built for minutes."""
    recipe = override(load_recipe("digits"), TINY)
    weights = build_network(*recipe.blueprint).state_dict()
    weights |= {f"blocks.{number}.x": torch.zeros(0) for number in range(20_000)}
    folder = write_run(tmp_path / "run", recipe, weights)
    rewrite(folder, lambda told: told["network"].update(depth=20_000))
    with pytest.raises(ValueError, match=r"network\.depth=20000 is out of range; it must be at most 512"):
        mvm.load(folder)


# --- what lies outside --------------------------------------------------------------------------------------------


@pytest.fixture
def no_network(monkeypatch):
    """Fail where anything asks for a connection."""

    def refuse(*args, **options):
        raise AssertionError(f"asked the network: {args}")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)


def autoencoder(folder, encoder="evil/enc"):
    torch.manual_seed(0)
    origin = Origin("e" * 64, "an encoder")
    decoder = Decoder(DecoderConfig("tiny", 2), (3, 4, 4), origin)
    statistics = Statistics(torch.zeros(3, 4, 4), torch.ones(3, 4, 4), origin, 4)
    DecoderOnly(EncoderConfig(encoder), decoder, statistics).save(folder)
    return folder


def latent_run(folder, path, encoder=""):
    """Write a run of latents that names its autoencoder by a path."""
    recipe = changed(override(load_recipe("digits"), TINY | {"network.patch": "1"}), {
        "data.name": "folder", "data.path": "x", "data.channels": 3, "data.size": 8, "data.classes": 10,
        "codec.kind": "rae", "codec.path": str(path), "codec.channels": 3, "codec.side": 4, "codec.encoder": encoder,
    })  # fmt: skip
    return write_run(folder, recipe)


@pytest.mark.parametrize("named", ["evil/enc", "../../rae", "../rae", "/etc", "ABSOLUTE", "", "//evil/share", "~"])
def test_an_autoencoder_outside_is_not_followed(tmp_path, named, no_network):
    autoencoder(tmp_path / "rae")
    path = tmp_path / "rae" if named == "ABSOLUTE" else named
    run = latent_run(tmp_path / "downloads" / "r3b", path)
    with pytest.raises(ValueError, match=r"holds no codec/, and names one that lies elsewhere, codec\.path=.*--allow-"):
        mvm.load(run)
    with pytest.raises(ValueError, match="lies elsewhere"):
        mvm.generate(str(run), 1)


def test_consent_opens_it(tmp_path, no_network):
    autoencoder(tmp_path / "rae")
    run = latent_run(tmp_path / "downloads" / "r3b", tmp_path / "rae")
    for consent in ({"allow_download": True}, {"codec": tmp_path / "rae"}):
        assert mvm.load(run, **consent).generate(1, nfe=2, progress=False).images.shape == (1, 3, 8, 8)
    options = ["--num", "1", "--nfe", "2", "--device", "cpu", "--out", str(tmp_path / "x.png")]
    assert command(["sample", str(run), *options]) == 2
    assert command(["sample", str(run), "--allow-download", *options]) == 0


def test_a_run_holds_its_decoder_or_names_one_beside_it(tmp_path, no_network):
    """As it was written on this machine: by an absolute path beside, which a stranger does not know; or in it."""
    beside = latent_run(tmp_path / "runs" / "field", autoencoder(tmp_path / "runs" / "first" / "rae"))
    mvm.load(beside)
    inside = latent_run(tmp_path / "downloads" / "r3b", "/nowhere")
    autoencoder(inside / "codec")
    mvm.load(inside).generate(1, nfe=2, progress=False)
    shutil.move(inside, tmp_path / "elsewhere")
    mvm.load(tmp_path / "elsewhere").generate(1, nfe=2, progress=False)


@pytest.mark.parametrize("where", ["recipe", "index"])
def test_the_hub_is_not_asked_for_an_encoder(tmp_path, where, no_network):
    run = latent_run(tmp_path / "downloads" / "r3b", "/nowhere", "evil/enc" if where == "recipe" else "")
    autoencoder(run / "codec", "evil/enc" if where == "index" else "x")
    (run / "evil" / "enc").mkdir(parents=True)  # in the run, and of that name on the hub
    model = mvm.load(run)
    with pytest.raises(ValueError, match=r"opened without its encoder .*--allow-download"):
        model.codec.encode(torch.zeros(1, 3, 8, 8, dtype=torch.uint8))
    with pytest.raises(ValueError, match="opened without its encoder"):
        mvm.load(run, encoder=True)


def test_a_text_encoder_outside_is_not_followed(tmp_path, no_network):
    kind = {"condition.kind": "tokens", "condition.width": "4", "condition.length": "3", "condition.encoder": "/etc"}
    run = write_run(tmp_path / "downloads" / "r3b", override(load_recipe("digits"), TINY | kind))
    model = mvm.load(run)
    with pytest.raises(ValueError, match=r"condition\.encoder='/etc', which lies outside .*--encoder FOLDER"):
        model.generate(1, captions=["a"], progress=False)
    with pytest.raises(ValueError, match=r"'/etc' has no config\.json"):
        mvm.load(run, allow_download=True).generate(1, captions=["a"], progress=False)


def test_a_hostile_decoder_in_a_run(tmp_path):
    run = latent_run(tmp_path / "r3b", "")
    autoencoder(run / "codec")
    path = run / "codec" / "decoder.safetensors"
    save_file({**load_file(path), "more": torch.zeros(1)}, path, {"encoder": "e" * 64, "encoder_words": "an encoder"})
    with pytest.raises(ValueError, match=r"decoder\.safetensors does not fit its rae\.json: more"):
        mvm.load(run)
    index = json.loads((run / "codec" / "rae.json").read_text())
    (run / "codec" / "rae.json").write_text(json.dumps({**index, "latent_shape": [3, BIG, BIG]}))
    with pytest.raises(ValueError, match="has latents and images"):
        mvm.load(run)


def test_what_is_written_is_what_is_read(tmp_path):
    autoencoder(tmp_path / "rae")
    run = latent_run(tmp_path / "runs" / "r3b", tmp_path / "rae")
    model = mvm.load(run, allow_download=True)
    write_codec(run, model.codec)
    assert mvm.load(run).codec.identity == model.codec.identity
