"""Text encoders against plain forward passes, what their folders may not do, and embeddings that are kept."""

import json
import shutil
import sys

import pytest
import torch
import transformers

from mvm.data.text import TextEncoder, embed_captions, split
from mvm.store import Share
from text_encoders import SIZES, WIDTH, WORDS, network, tiny_encoder

TEXTS = ["a red circle", "two blue circle", "", "one red unknown square a a a a a"]
IDS = [[3, 4, 6, 2], [8, 5, 6, 2], [2], [9, 4, 1, 7, 3, 3, 3, 3, 3, 2]]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {kind: tiny_encoder(tmp_path_factory.mktemp(kind), kind) for kind in ("bert", "clip", "t5")}


@pytest.fixture
def own(folders, tmp_path):
    """A copy to damage."""
    shutil.copytree(folders["bert"], tmp_path / "own")
    return tmp_path / "own"


@pytest.mark.parametrize("kind", ["bert", "clip", "t5"])
def test_embeddings_are_the_networks_own(kind, folders):
    """A padded batch has what each text has alone, without padding; behind its end are zeros."""
    found = TextEncoder(folders[kind]).embed(TEXTS, 12)
    model = network(kind).eval()
    for ids, tokens, mask in zip(IDS, found["tokens"], found["mask"], strict=True):
        with torch.no_grad():
            want = model(input_ids=torch.tensor([ids])).last_hidden_state[0]
        assert mask.tolist() == [True] * len(ids) + [False] * (12 - len(ids))
        torch.testing.assert_close(tokens[: len(ids)], want, rtol=1e-5, atol=1e-5)
        assert not tokens[len(ids) :].any()


def test_facts_of_an_encoder(folders):
    bert, t5 = TextEncoder(folders["bert"]), TextEncoder(folders["t5"])
    assert (bert.width, bert.limit, t5.limit) == (WIDTH, 12, None)
    assert (bert.longest(TEXTS), bert.longest(TEXTS[:2]), bert.longest(["a"] * 30)) == (10, 4, 2)
    assert (bert.longest(["a " * 30]), t5.longest(["a " * 30])) == (12, 31)
    assert bert.embed([], 5)["tokens"].shape == (0, 5, WIDTH)
    assert "torchvision" not in sys.modules


def test_long_texts_are_cut_and_keep_their_end(folders):
    encoder = TextEncoder(folders["t5"])
    found, want = encoder.embed(["a red circle two square"], 4), encoder.embed(["a red circle"], 4)
    assert all(torch.equal(found[name], want[name]) for name in want)


def test_a_text_without_any_token_has_one(own):
    table = json.loads((own / "tokenizer.json").read_text())
    table["post_processor"] = None
    (own / "tokenizer.json").write_text(json.dumps(table))
    found = TextEncoder(own).embed([""], 3)
    assert found["mask"].tolist() == [[True, False, False]]
    assert found["tokens"].isfinite().all()


def test_the_text_half_of_a_whole_clip(tmp_path, folders):
    text, vision = network("clip"), transformers.CLIPVisionConfig(**SIZES, image_size=8, patch_size=4).to_dict()
    model = transformers.CLIPModel(transformers.CLIPConfig(text_config=text.config.to_dict(), vision_config=vision))
    model.text_model.load_state_dict(getattr(text, "text_model", text).state_dict())
    model.save_pretrained(tmp_path)
    shutil.copy(folders["clip"] / "tokenizer.json", tmp_path)
    found, want = TextEncoder(tmp_path).embed(TEXTS, 10), TextEncoder(folders["clip"]).embed(TEXTS, 10)
    assert torch.equal(found["tokens"], want["tokens"])


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_a_folder_that_lacks_a_file(own, name):
    (own / name).unlink()
    with pytest.raises(ValueError, match=rf"condition\.encoder='.*own' has no {name}; give a local folder"):
        TextEncoder(own)
    with pytest.raises(ValueError, match=r"google/t5-small' has no config\.json"):
        TextEncoder("google/t5-small")  # nothing is asked of a hub


def change(path, **values):
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def test_a_model_of_another_kind(own):
    change(own / "config.json", model_type="llama")
    with pytest.raises(ValueError, match="model_type='llama' is unknown"):
        TextEncoder(own)


def test_weights_that_are_not_there(own):
    from safetensors.torch import load_file, save_file

    weights = load_file(own / "model.safetensors")
    weights.pop("encoder.layer.1.output.dense.weight")
    save_file(weights, own / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"encoder\.layer\.1\.output\.dense\.weight are missing"):
        TextEncoder(own).embed(["a"], 2)
    (own / "model.safetensors").write_bytes(b"no weights")
    with pytest.raises(ValueError, match="its weights cannot be read"):
        TextEncoder(own).embed(["a"], 2)


def test_pickles_are_not_read(own):
    (own / "model.safetensors").unlink()
    torch.save(network("bert").state_dict(), own / "pytorch_model.bin")
    with pytest.raises(ValueError, match="its weights cannot be read"):
        TextEncoder(own).embed(["a"], 2)


def test_code_that_a_folder_names_is_not_run(own, tmp_path):
    """Neither what a config calls its own class, nor adapters, which name another folder, nor shards outside."""
    want = TextEncoder(own).embed(TEXTS, 10)
    (own / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Model: pass\n")
    codes = {"AutoConfig": "evil.Model", "AutoModel": "evil.Model", "AutoTokenizer": ["evil.Model", "evil.Model"]}
    quantized = {"quant_method": "evil", "modules": ["evil"]}
    change(
        own / "config.json",
        auto_map=codes,
        attn_implementation="evil/kernel",
        _attn_implementation="evil/kernel",
        quantization_config=quantized,
        _name_or_path="/elsewhere",
    )
    (own / "tokenizer_config.json").write_text(json.dumps({"auto_map": codes, "tokenizer_class": "evil.Model"}))
    assert torch.equal(TextEncoder(own).embed(TEXTS, 10)["tokens"], want["tokens"])
    assert not (tmp_path / "ran").exists()
    (own / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../other.safetensors"}}))
    with pytest.raises(ValueError, match="is no name of a file in this folder"):
        TextEncoder(own)
    (own / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "/elsewhere"}))
    with pytest.raises(ValueError, match="is an adapter of another model"):
        TextEncoder(own)


def test_what_cannot_be_embedded(folders):
    encoder = TextEncoder(folders["bert"])
    with pytest.raises(ValueError, match="texts must be a list of str"):
        encoder.embed("a red circle", 4)
    for length in (0, 13):
        with pytest.raises(ValueError, match=rf"condition\.length={length}: '.*' reads 1 to 12 tokens"):
            encoder.embed(["a"], length)


def test_captions_are_embedded_once(folders, tmp_path, monkeypatch):
    monkeypatch.setattr("mvm.data.text.PART", 2)
    encoder, data = TextEncoder(folders["t5"]), tmp_path / "data"
    rows = embed_captions(encoder, TEXTS, 5, data, progress=False)
    found, want = split(torch.from_numpy(rows.gather(torch.arange(4)))), encoder.embed(TEXTS, 5)
    assert torch.equal(found["mask"], want["mask"])
    assert torch.equal(found["tokens"], want["tokens"].half())
    (folder,) = tmp_path.glob("data-captions-*")
    assert sorted(path.name for path in folder.iterdir()) == ["captions-00000.npy", "captions-00001.npy", "index.json"]
    times = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    again = TextEncoder(folders["t5"])
    monkeypatch.setattr(TextEncoder, "embed", lambda *_: pytest.fail("embedded again"))
    embed_captions(again, TEXTS, 5, data, progress=False)
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == times
    monkeypatch.undo()
    (folder / "captions-00001.npy").write_bytes(b"damaged")
    monkeypatch.setattr("mvm.data.text.PART", 2)
    rows = embed_captions(again, TEXTS, 5, data, progress=False)
    assert torch.equal(split(torch.from_numpy(rows.gather(torch.arange(4))))["tokens"], found["tokens"])
    for other in ((TextEncoder(folders["bert"]), TEXTS, 5), (encoder, TEXTS[:3], 5), (encoder, TEXTS, 4)):
        embed_captions(*other, data, progress=False)
    assert len(list(tmp_path.glob("data-captions-*"))) == 4


def test_processes_share_the_captions(folders, tmp_path, monkeypatch):
    monkeypatch.setattr("mvm.data.text.PART", 2)
    encoder = TextEncoder(folders["bert"])
    alone = embed_captions(encoder, TEXTS, 6, tmp_path / "alone", progress=False)
    with pytest.raises(ValueError, match="was not written by the process whose share it is"):
        embed_captions(encoder, TEXTS, 6, tmp_path / "data", Share(0, 2), progress=False)
    with pytest.raises(ValueError, match="are not finished"):  # the first lists what all have written
        embed_captions(encoder, TEXTS, 6, tmp_path / "data", Share(1, 2), progress=False)
    both = embed_captions(encoder, TEXTS, 6, tmp_path / "data", Share(0, 2), progress=False)
    every = torch.arange(4)
    assert (both.gather(every) == alone.gather(every)).all()


def test_other_weights_have_another_fingerprint(own):
    before = TextEncoder(own).fingerprint
    assert TextEncoder(own).fingerprint == before
    change(own / "config.json", layer_norm_eps=1e-3)
    assert TextEncoder(own).fingerprint != before
    assert len(WORDS) == 12
