"""Stage 1 in the one loop: a decoder learns, stops and goes on bit for bit, and ends as an autoencoder."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from mvm import checkpoint, noise
from mvm.data.prepare import prepare
from mvm.latent import RAE, load_rae, measure
from mvm.metrics.lpips import LPIPS
from mvm.objective.adversarial import augmented
from mvm.recipes import DecoderRecipe, override, parse_recipe, to_json
from mvm.training import decoder_trainer, preview
from mvm.training.data import completed, held_out_by_class, training_store
from mvm.training.decoder_trainer import HEADS, DecoderTrainer
from mvm.training.loop import train
from mvm.training.preview import DecoderPreview, known_figures, pairs

transformers = pytest.importorskip("transformers", reason="needs mean-velocity-matching[encoders]")

COUNT, HELD_OUT, SIDE = 24, 5, 16
SMALL = {"hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2, "num_channels": 3, "patch_size": 4}
TINY = {
    "data.name": "folder",
    "data.mirror": "yes",
    "held_out.count": str(HELD_OUT),
    "encoder.layers": "1,4",
    "encoder.resolution": str(SIDE),
    "decoder.size": "tiny",
    "decoder.patch": "4",
    "reconstruction.lpips": "0",
    "reconstruction.resolution": str(SIDE),
    "reconstruction.disc_start": "1",
    "reconstruction.gan_start": "2",
    "train.batch": "8",
    "train.steps": "4",
    "train.lr": "3e-3",
    "train.ema": "0.9",
    "train.log_every": "1",
    "train.save_every": "2",
    "preview.every": "2",
    "preview.grid": "4",
    "preview.count": "4",
}
GAN = {"reconstruction.gan": "0.75"}
PLAIN = {"reconstruction.gan": "0"}


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    """A folder with a ViT of random weights: 4 x 4 latents of 16 channels at 16 px."""
    torch.manual_seed(0)
    model = transformers.Dinov2Model(transformers.Dinov2Config(**SMALL, image_size=SIDE))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.3)
    folder = tmp_path_factory.mktemp("encoder")
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Smooth colour images: planes of light that a decoder can learn in a few steps."""
    place = tmp_path_factory.mktemp("data")
    draw = np.random.default_rng(0)
    ramp = np.linspace(-1, 1, SIDE)
    slopes = draw.uniform(-90, 90, (2, COUNT, 1, 1, 3))
    images = 128 + slopes[0] * ramp[:, None, None] + slopes[1] * ramp[None, :, None]
    images = np.clip(images, 0, 255).astype(np.uint8)
    np.savez(place / "source.npz", images=images, labels=np.arange(COUNT) % 2)
    prepare(place / "source.npz", place / "prepared", size=SIDE, workers=1, progress=False)
    return place / "prepared"


@pytest.fixture(scope="module")
def recipe(encoder, folder):
    """recipe(**changes), an underscore for the dot: a run of four steps, adversarial from its third."""

    def make(changes=GAN, **more):
        told = {"data.path": str(folder), "encoder.name": str(encoder), "reconstruction.encoder": str(encoder)}
        dotted = {name.replace("__", "."): value for name, value in more.items()}
        named = override(DecoderRecipe(name="tiny"), {**told, **TINY, **changes, **dotted})
        return replace(named, data=replace(named.data, channels=3, size=SIDE, classes=2))

    return make


@pytest.fixture(scope="module")
def whole(recipe, tmp_path_factory):
    """A run of four steps without a stop; not to be changed."""
    run = tmp_path_factory.mktemp("whole") / "run"
    train(recipe(), run, progress=False)
    return run


def lines(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def tensors(run):
    """Every tensor of the newest checkpoint, by part and name."""
    found = checkpoint.latest(run)
    parts = [path.stem for path in sorted(found.glob("*.safetensors"))]
    return {f"{part}/{name}": value for part in parts for name, value in checkpoint.load(found, part).items()}


def assert_identical(run, other):
    ours, theirs = tensors(run), tensors(other)
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


def trainer_of(recipe):
    return DecoderTrainer(recipe, training_store(recipe, torch.device("cpu")))


# ---- learning


def test_the_loss_falls(recipe, tmp_path):
    run = tmp_path / "run"
    train(recipe(PLAIN, train__steps="60", train__save_every="60", preview__every="30"), run, progress=False)
    losses = [line["loss"] for line in lines(run) if "loss" in line]
    looks = [line["psnr"] for line in lines(run) if "psnr" in line]
    assert len(losses) == 60
    assert losses[-1] < 0.6 * losses[0]
    assert len(looks) == 2
    assert looks[1] > looks[0]


def test_both_sides_learn_from_their_starts(recipe):
    trainer = trainer_of(recipe())
    seen = []
    for _ in range(4):
        before = {name: value.clone() for name, value in trainer.heads.state_dict().items()}
        decoder = trainer.decoder.head.weight.detach().clone()
        trainer.advance()
        (record,) = trainer.read()
        assert not torch.equal(decoder, trainer.decoder.head.weight)
        moved = [not torch.equal(value, before[name]) for name, value in trainer.heads.state_dict().items()]
        seen.append((any(moved), "disc_total" in record.values, "gan" in record.values))
    assert seen == [(False, False, False), (True, True, False), (True, True, True), (True, True, True)]
    assert {"loss", "l1", "gan", "lambda", "disc_real", "disc_fake", "grad_norm", "lr"} <= record.values.keys()
    assert trainer.decoder.training


@pytest.mark.parametrize(("schedule", "begun"), [("shared", 0), ("own", 1)])
def test_the_discriminator_has_the_decoders_learning_rate_or_its_own(recipe, schedule, begun):
    """Two steps of warm-up, then linear to nothing at step 4; judged from step 1 on."""
    told = {"train__warmup": "2", "train__decay": "linear", "train__final": "0", "train__lr": "1"}
    trainer = trainer_of(recipe(reconstruction__disc_schedule=schedule, reconstruction__gan_start="4", **told))
    rates = [0.5, 1, 1, 0.5, 0]
    for step in range(4):
        trainer.advance()
        assert {group["lr"] for each in trainer.decoder_optimizers for group in each.param_groups} == {rates[step]}
        found = {group["lr"] for each in trainer.judge_optimizers for group in each.param_groups}
        assert step == 0 or found == {rates[step - begun]}


def test_a_recipe_of_before_means_what_it_did(recipe):
    """Runs of 0.1 and 0.2 tell no last_norm and no disc_schedule, and their heads have the norm of 8 images."""
    told = json.loads(to_json(recipe()))
    del told["reconstruction"]["last_norm"], told["reconstruction"]["disc_schedule"]
    old = parse_recipe(json.dumps(told), ".json", "x")
    assert old == recipe()
    judge = trainer_of(old).objective.judge
    assert judge.features.last_norm
    assert (judge.heads[0].enter_norm.together, judge.heads[0].enter_norm.eps) == (8, 1e-5)
    published = recipe(
        reconstruction__norm="image", reconstruction__last_norm="no", reconstruction__disc_schedule="own"
    )
    assert trainer_of(published).heads.state_dict().keys() == judge.heads.state_dict().keys()


def test_a_step_by_hand(recipe):
    """Latents of the mirrored images, noised by each sample's seed, and L1 to those images: one AdamW step."""
    settings = recipe(PLAIN, train__clip="0")
    trainer, other = trainer_of(settings), trainer_of(settings)
    batch = other.batch()
    positions = torch.arange(8)
    seeds = other.order.seeds(positions)
    shown = other.trained_on[other.order.indices(positions)]
    flips = torch.stack([image.flip(-1) for image in shown])
    same = [(batch.images[i] == side[i] / 127.5 - 1).all().item() for i in range(8) for side in (shown, flips)]
    assert all(same[2 * i] or same[2 * i + 1] for i in range(8))
    assert any(same[::2])
    assert any(same[1::2])
    restored = other.decoder(RAE.noised(batch.latents, seeds, 0.8))
    loss = (restored - batch.images).abs().mean() / 2
    loss.backward()
    optimizer = torch.optim.AdamW(other.decoder.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0)
    optimizer.step()
    trainer.advance()
    (record,) = trainer.read()
    assert record.values["loss"] == pytest.approx(loss.item(), rel=1e-6)
    for mine, theirs in zip(trainer.decoder.parameters(), other.decoder.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


def test_compiled_blocks_train_as_plain_ones(recipe, monkeypatch):
    """Decoder, both encoders, heads, noise and augmentation; traced, but not made into machine code."""
    compiled, real = [], torch.compile

    def traced(function, **options):
        compiled.append(function)
        return real(function, **options, backend="aot_eager")

    def compile(module):
        compiled.append(module)
        module._compiled_call_impl = real(module._call_impl, backend="aot_eager")

    monkeypatch.setattr(torch.nn.Module, "compile", compile)
    monkeypatch.setattr(torch, "compile", traced)
    monkeypatch.setattr(noise, "compiled_normals", noise.compiled_normals.__wrapped__)  # what is traced is not kept
    plain, other = trainer_of(recipe()), trainer_of(recipe(engine__compile="blocks"))
    encoders = other.encoder.encoder, other.objective.judge.features.encoder
    blocks = [block for each in encoders for block in each.body.network.encoder.layer]
    assert {*blocks, *other.decoder.blocks, other.objective.judge.heads, augmented} == {*compiled}
    for _ in range(3):
        plain.advance()
        other.advance()
    assert noise._normals in compiled
    for mine, theirs in zip(other.read(), plain.read(), strict=True):
        assert mine.values == pytest.approx(theirs.values, rel=1e-4)


def test_parts_of_a_batch_give_the_gradient_of_the_whole(recipe):
    """Without the adversarial loss, whose weight is each part's own."""
    whole, parts = (trainer_of(recipe(PLAIN, engine__accumulate=number)) for number in ("1", "3"))
    for trainer in (whole, parts):
        trainer.advance()
    first, second = whole.read()[0].values, parts.read()[0].values
    assert second["loss"] == pytest.approx(first["loss"], rel=1e-6)
    assert second["grad_norm"] == pytest.approx(first["grad_norm"], rel=1e-5)


def test_held_out_images_are_never_trained_on(recipe, monkeypatch):
    trainer = trainer_of(recipe(PLAIN))
    gather, seen = trainer.store.gather, set()
    monkeypatch.setattr(trainer.store, "gather", lambda indices: (seen.update(indices.tolist()), gather(indices))[1])
    for _ in range(8):  # more than three epochs
        trainer.advance()
    rest, held_out = trainer.trained_on.indices, trainer.held_out.indices
    assert seen == set(rest.tolist())
    assert rest.tolist() == sorted(set(range(COUNT)) - set(held_out.tolist()))
    assert sorted(trainer.store.labels[held_out].bincount().tolist()) == [2, 3]
    assert torch.equal(trainer.held_out[torch.arange(HELD_OUT)], trainer.store[held_out])


def test_held_out_images_are_spread_over_the_classes():
    """Of 40, 1, 3 and 20 images sorted by class, 12 are 4, 1, 3 and 4; the first 4 are one of each."""
    labels = torch.arange(4).repeat_interleave(torch.tensor([40, 1, 3, 20]))
    found = held_out_by_class(labels, 12, seed=0)
    assert labels[found].bincount().tolist() == [4, 1, 3, 4]
    assert labels[found[:4]].sort().values.tolist() == [0, 1, 2, 3]
    assert len(set(found.tolist())) == 12
    assert torch.equal(found, held_out_by_class(labels, 12, seed=0))
    assert set(found.tolist()) != set(held_out_by_class(labels, 12, seed=1).tolist())
    assert len(held_out_by_class(labels, 0, seed=0)) == 0
    extra = [labels[held_out_by_class(labels, 5, seed)].bincount().argmax().item() for seed in range(30)]
    assert 1 not in extra  # the odd one is of a class that has a second,
    assert len(set(extra)) > 1  # not always of the same


def test_a_run_begun_with_the_last_images_held_out_goes_on_with_them(recipe, tmp_path, monkeypatch, capsys):
    """Its checkpoints, of mvm 0.2 and before, do not say which are held out."""
    run, settings = tmp_path / "run", recipe(PLAIN)
    train(settings, run, until=2, progress=False)
    manifest = checkpoint.latest(run) / "manifest.json"
    facts = json.loads(manifest.read_text())
    assert facts.pop("held_out") == "by class"
    manifest.write_text(json.dumps(facts))
    capsys.readouterr()
    rules, seen = [], set()
    advance = DecoderTrainer.advance

    def noted(trainer):
        rules.append(trainer.rule)
        seen.update(trainer.indices(trainer.positions(trainer.step)).tolist())
        advance(trainer)

    monkeypatch.setattr(DecoderTrainer, "advance", noted)
    train(settings, run, until=3, resume=True, progress=False)
    assert "holds out the last 5 images, as it began" in capsys.readouterr().err
    longer = replace(settings, train=replace(settings.train, steps=9))
    rae = train(longer, run, resume=True, progress=False)  # from a checkpoint that does say it
    assert rules == 7 * ["last"]
    assert seen == set(range(COUNT - HELD_OUT))
    assert checkpoint.read_manifest(checkpoint.latest(run))["held_out"] == "last"
    trainer = trainer_of(settings)
    found = measure(trainer.encoder, trainer.store[torch.arange(COUNT - HELD_OUT)], progress=False)
    assert torch.equal(rae.statistics.mean, found.mean.float())


def test_an_unknown_rule_of_holding_out_is_refused(recipe, tmp_path):
    run, settings = tmp_path / "run", recipe(PLAIN)
    train(settings, run, until=2, progress=False)
    manifest = checkpoint.latest(run) / "manifest.json"
    manifest.write_text(manifest.read_text().replace("by class", "by colour"))
    with pytest.raises(ValueError, match=r"step-00000002.*held out by the rule 'by colour'"):
        train(settings, run, resume=True, progress=False)


# ---- stopping and going on


def test_a_run_that_was_stopped_goes_on_bit_for_bit(recipe, whole, tmp_path):
    run = tmp_path / "run"
    paused = train(recipe(), run, until=2, progress=False)
    assert paused.statistics is None
    assert not (run / "rae").exists()
    train(recipe(), run, resume=True, progress=False)
    assert_identical(run, whole)
    kept = tensors(run)
    assert any(name.startswith(f"optimizer/{HEADS}") and name.endswith("._u") for name in kept)
    assert any(name.startswith(f"optimizer/{HEADS}") and name.endswith("/exp_avg") for name in kept)
    own = [{k: v for k, v in line.items() if k != "images_per_second"} for line in lines(run)]
    assert own == [{k: v for k, v in line.items() if k != "images_per_second"} for line in lines(whole)]


def test_two_processes_train_as_one(recipe, tmp_path):
    """Figures of every step, both sides', until the decoder follows the discriminator by each process's own lambda.

    Weights without any effect, such as the keys' biases, are moved by rounding alone: they are not compared.
    """
    settings = recipe(train__batch="16", reconstruction__gan_start="3")  # 8 images each, as the heads' norm takes them
    (tmp_path / "tiny.json").write_text(to_json(settings))
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "mvm"]
    words = [*start, "train", "tiny.json", "--device", "cpu", "--out", "two"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    found = subprocess.run(
        words, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=1200, check=False
    )
    assert found.returncode == 0, found.stderr[-3000:]
    train(settings, tmp_path / "one", progress=False)
    assert tensors(tmp_path / "two").keys() == tensors(tmp_path / "one").keys()
    pairs_of_lines = list(zip(lines(tmp_path / "two"), lines(tmp_path / "one"), strict=True))
    assert len(pairs_of_lines) == 6  # four steps, two looks
    for ours, theirs in pairs_of_lines:
        assert ours.keys() == theirs.keys()
        exact = ours.keys() - {"images_per_second"} if "gan" not in ours and ours["step"] < 4 else {"step", "l1"}
        for name in exact & ours.keys():
            assert ours[name] == pytest.approx(theirs[name], rel=1e-3, abs=1e-4), (ours["step"], name)
    both, one = (load_rae(tmp_path / run / "rae").statistics for run in ("two", "one"))
    torch.testing.assert_close(both.mean, one.mean, rtol=1e-6, atol=1e-6)
    assert both.count == one.count


# ---- what comes of it


def test_the_autoencoder(recipe, whole):
    rae = load_rae(whole / "rae")
    settings = recipe()
    trainer = trainer_of(settings)
    averaged = checkpoint.load(checkpoint.latest(whole), "ema")
    assert all(torch.equal(value, averaged[name]) for name, value in rae.decoder.named_parameters())
    found = measure(trainer.encoder, trainer.trained_on, progress=False)
    assert rae.statistics.count == found.count == 2 * (COUNT - HELD_OUT)
    assert torch.equal(rae.statistics.mean, found.mean.float())
    images = trainer.held_out[torch.arange(HELD_OUT)]
    latents = rae.encode(images)
    assert latents.shape == (HELD_OUT, 16, 4, 4)
    restored = rae.decode(latents)
    assert restored.shape == images.shape
    assert torch.equal(restored, rae.decode(rae.encode(images)))


def test_a_finished_run_writes_the_autoencoder_again_where_it_is_missing(recipe, tmp_path, monkeypatch):
    run, settings = tmp_path / "run", recipe(PLAIN)
    first = train(settings, run, progress=False)
    index = (run / "rae" / "rae.json").read_text()
    stamp = (run / "rae").stat().st_mtime_ns
    with monkeypatch.context() as patch:
        patch.setattr(decoder_trainer, "measure", None)  # nothing is measured again
        again = train(settings, run, resume=True, progress=False)
        assert (run / "rae").stat().st_mtime_ns == stamp
        assert again.fingerprint == first.fingerprint
        longer = train(replace(settings, train=replace(settings.train, steps=6)), run, resume=True, progress=False)
        assert longer.fingerprint == first.fingerprint
        assert load_rae(run / "rae").decoder.fingerprint == longer.decoder.fingerprint != first.decoder.fingerprint
    (run / "rae" / "statistics.safetensors").unlink()
    last = train(replace(settings, train=replace(settings.train, steps=6)), run, resume=True, progress=False)
    assert load_rae(run / "rae").fingerprint == last.fingerprint
    assert json.loads(index)["encoder"]["layers"] == "1,4"


def test_previews(whole):
    looks = [line for line in lines(whole) if "psnr" in line]
    assert [line["step"] for line in looks] == [2, 4]
    assert all({"psnr", "ssim", "rfd_encoder"} <= line.keys() for line in looks)
    manifest = checkpoint.read_manifest(checkpoint.latest(whole))
    assert manifest["quality"] == DecoderPreview.quality(looks[-1]) == -looks[-1]["psnr"]
    assert [path.name for path in sorted((whole / "samples").iterdir())] == ["step-00000002.png", "step-00000004.png"]


def test_a_preview_shows_originals_above_what_became_of_them(recipe, whole):
    images = trainer_of(recipe()).held_out[torch.arange(4)]
    rae = load_rae(whole / "rae")
    restored = rae.decode(rae.encode(images))
    shown = torch.from_numpy(np.array(Image.open(whole / "samples" / "step-00000004.png"))).permute(2, 0, 1)
    tile = [[shown[:, 2 + r * 18 : 18 + r * 18, 2 + c * 18 : 18 + c * 18] for c in range(4)] for r in range(2)]
    assert torch.equal(torch.stack(tile[0]), images)
    assert (torch.stack(tile[1]).int() - restored.int()).abs().max() <= 1  # statistics there and back


def test_figures_are_those_that_the_images_are_large_enough_for(recipe, monkeypatch):
    objective = trainer_of(recipe(PLAIN)).objective
    cpu = torch.device("cpu")
    assert list(known_figures(objective, 10, cpu)) == ["psnr"]
    assert list(known_figures(objective, 16, cpu)) == ["psnr", "ssim"]
    monkeypatch.setattr(preview, "load_lpips", lambda source, backbone: LPIPS(backbone))
    assert list(known_figures(objective, 32, cpu)) == ["psnr", "ssim", "lpips_held_out"]
    by_vgg = replace(objective, config=replace(objective.config, lpips_net="vgg"))
    assert list(known_figures(by_vgg, 16, cpu)) == ["psnr", "ssim", "lpips_held_out_vgg"]


def test_rows_of_pairs():
    originals = torch.arange(1, 4, dtype=torch.uint8).view(3, 1, 1, 1)
    assert pairs(originals, originals + 10, 2).flatten().tolist() == [1, 2, 11, 12, 3, 255, 13, 255]


def test_the_recipe_is_kept(recipe, whole):
    assert parse_recipe((whole / "recipe.json").read_text(), ".json", "x") == completed(recipe())


# ---- refusals


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"held_out__count": "24"}, r"held_out\.count=24 leaves nothing .* 24 images"),
        ({"held_out__count": "99"}, r"held_out\.count=99 leaves nothing"),
        ({"decoder__patch": "8"}, r"decoder\.patch=8 makes images \(3, 32, 32\) of 4x4 latents, .* \(3, 16, 16\)"),
        ({"encoder__resolution": "8"}, r"decoder\.patch=4 makes images \(3, 8, 8\) of 2x2"),
        ({"encoder__resolution": "9"}, r"encoder\.resolution=9 does not suit .* multiple of 4"),
        ({"encoder__layers": "1,9"}, r"encoder\.layers='1,9' does not suit 4 blocks"),
        ({"encoder__layers": "first"}, r"encoder\.layers='first' does not suit 4 blocks"),
        ({"encoder__name": ""}, r"encoder\.name is empty; give a DINOv2"),
        ({"encoder__name": "nowhere"}, r"^encoder\.name='nowhere' is unknown"),
        ({"reconstruction__encoder": ""}, r"reconstruction\.gan=0\.75 needs reconstruction\.encoder"),
    ],
)
def test_bad_options_are_named_and_leave_nothing_behind(recipe, tmp_path, changes, said):
    with pytest.raises(ValueError, match=said):
        train(recipe(**changes), tmp_path / "run", progress=False)
    assert not (tmp_path / "run").exists()


def test_another_encoder_is_refused_on_resume(recipe, whole, encoder, tmp_path):
    """A folder may be moved; other weights in it are another encoder."""
    model = transformers.Dinov2Model.from_pretrained(encoder)
    model.save_pretrained(tmp_path / "moved")
    with torch.no_grad():
        model.encoder.layer[0].mlp.fc1.weight[0, 0] += 1
    model.save_pretrained(tmp_path / "changed")
    run = shutil.copytree(whole, tmp_path / "run")
    train(recipe(encoder__name=str(tmp_path / "moved")), run, resume=True, progress=False)
    with pytest.raises(ValueError, match=r"step-00000004.*cannot be used with"):
        train(recipe(encoder__name=str(tmp_path / "changed")), run, resume=True, progress=False)
    with pytest.raises(ValueError, match=r"other values: reconstruction\.tau 0\.8 there, 0\.1 now"):
        train(recipe(reconstruction__tau="0.1"), run, resume=True, progress=False)


@pytest.mark.parametrize("held_out", [5, 0])
def test_weights_of_another_run_may_have_seen_what_is_held_out(recipe, whole, tmp_path, capsys, held_out):
    settings = recipe(train__steps="1", held_out__count=str(held_out), preview__every="0")
    train(settings, tmp_path / "next", progress=False, init=(whole, "ema"))
    assert ("may have learned from images that are held out here" in capsys.readouterr().err) == (held_out > 0)


def test_weights_of_another_decoder_are_refused(recipe, whole, tmp_path):
    train(recipe(train__steps="1", train__save_every="1"), tmp_path / "next", progress=False, init=(whole, "ema"))
    with pytest.raises(ValueError, match=r"do not fit the recipe's decoder"):
        train(recipe(decoder__size="S"), tmp_path / "other", progress=False, init=(whole, "ema"))
