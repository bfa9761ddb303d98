"""The representation autoencoder: deterministic, and its parts belong together or are refused."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file

from mvm import noise
from mvm.latent import RAE, Decoder, DecoderConfig, load_rae, measure
from mvm.latent.rae import DECODER, STATISTICS
from mvm.pixels import to_uint8


@pytest.fixture
def rae(make_rae, encoders, images):
    return make_rae(encoders("dinov3", layers="last-2"), images)


def test_there_and_back(rae, images):
    latents = rae.encode(images)
    assert latents.shape == (10, *rae.latent_shape) == (10, 16, 4, 4)
    assert latents.dtype == torch.float32
    found = rae.decode(latents)
    assert (found.shape, found.dtype) == ((10, *rae.image_shape), torch.uint8)
    assert rae.image_shape == (3, 16, 16)
    assert found.float().std() > 1


def test_it_is_deterministic_even_in_training_mode(rae, images):
    first = rae.decode(rae.encode(images))
    assert torch.equal(rae.decode(rae.encode(images)), first)
    assert torch.equal(rae.train().decode(rae.encode(images)), first)


def test_encode_normalises_and_decode_restores(rae, images):
    raw = rae.encoder(images)
    mean, variance = rae.statistics.mean, rae.statistics.variance
    assert torch.allclose(rae.encode(images), (raw - mean) / (variance + 1e-5).sqrt(), atol=1e-6)
    with torch.no_grad():
        want = rae.decoder(raw)
    assert torch.allclose(rae.decode_float(rae.encode(images)), want, atol=1e-4)
    assert torch.equal(rae.reconstruct(images), want)
    assert (rae.decode(rae.encode(images)).int() - to_uint8(want).int()).abs().max() <= 1


def test_gradients_reach_the_decoder_alone(rae, images):
    rae.decode_float(rae.encode(images)).mean().backward()
    assert rae.decoder.head.weight.grad is not None
    assert all(parameter.grad is None for parameter in rae.encoder.parameters())
    assert not rae.decode(rae.encode(images)).requires_grad


def test_mirrored_latents_are_those_of_the_mirrored_image(rae, images):
    assert torch.equal(rae.encode(images.flip(-1)), rae.encode(images.flip(-1).contiguous()))
    assert not torch.allclose(rae.encode(images.flip(-1)), rae.encode(images).flip(-1), atol=0.1)


def test_noise_of_each_samples_own_seed(rae, images):
    raw, seeds = rae.raw(images), torch.arange(10) + 7
    found = rae.noised(raw, seeds, 0.8)
    sigma = 0.8 * noise.uniform(seeds, noise.TIME)[:, None, None, None]
    want = raw + sigma.float() * noise.normal(seeds, noise.TRAIN, raw.shape[1:])
    assert torch.allclose(found, want, atol=1e-6)
    assert torch.equal(rae.noised(raw[3:5], seeds[3:5], 0.8), found[3:5])
    assert torch.equal(rae.noised(raw, seeds, 0), raw)
    with pytest.raises(ValueError, match="tau=-1 is out of range"):
        rae.noised(raw, seeds, -1)


def test_noise_level_is_uniform():
    """Of 4000 seeds the levels' mean is tau/2 and their largest close to tau, unlike half-normal ones."""
    latents = torch.zeros(4000, 4, 8, 8)
    levels = RAE.noised(latents, torch.arange(4000), 0.8).flatten(1).std(1)
    assert abs(levels.mean() - 0.4) < 0.01
    assert 0.75 < levels.max() < 1.0


def test_stage_1_needs_no_statistics(encoders, images, tmp_path):
    encoder = encoders()
    rae = RAE(encoder, Decoder(DecoderConfig("tiny", 4), encoder.latent_shape, encoder.origin))
    rae.decoder(rae.noised(rae.raw(images), torch.arange(10))).mean().backward()
    assert rae.reconstruct(images).shape == (10, 3, 16, 16)
    for ask in (lambda: rae.encode(images), lambda: rae.decode(torch.zeros(1, 16, 4, 4)), lambda: rae.fingerprint):
        with pytest.raises(ValueError, match="no latent statistics yet; measure them"):
            ask()
    rae.save(tmp_path / "rae")
    found = load_rae(tmp_path / "rae")
    assert found.statistics is None
    assert torch.equal(found.reconstruct(images), rae.reconstruct(images))
    found.set_statistics(measure(encoder, images, progress=False).result(encoder.origin))
    assert found.encode(images).shape == (10, 16, 4, 4)


def test_saved_and_loaded(rae, images, tmp_path):
    folder = tmp_path / "new" / "rae"
    rae.save(folder)
    assert sorted(path.name for path in folder.iterdir()) == [DECODER, "rae.json", STATISTICS]
    assert set(load_file(folder / DECODER)) == set(rae.decoder.state_dict())  # nothing of the encoder
    found = load_rae(folder)
    assert found.fingerprint == rae.fingerprint
    assert found.decoder.fingerprint == rae.decoder.fingerprint
    assert torch.equal(found.encode(images), rae.encode(images))
    assert torch.equal(found.decode(found.encode(images)), rae.decode(rae.encode(images)))
    told = json.loads((folder / "rae.json").read_text())
    assert told["encoder"]["layers"] == "3,4"
    assert told["encoder"]["fingerprint"] == rae.encoder.fingerprint
    with torch.no_grad():
        rae.decoder.head.bias += 1
    rae.save(folder)  # over an older one
    assert load_rae(folder).decoder.fingerprint == rae.decoder.fingerprint
    assert [path.name for path in folder.parent.iterdir()] == ["rae"]


def test_encoder_that_was_moved(rae, images, tmp_path, folders):
    moved = tmp_path / "moved"
    shutil.copytree(folders("dinov3"), moved)
    rae.save(tmp_path / "rae")
    assert load_rae(tmp_path / "rae", str(moved)).encoder.config.name == str(moved)
    assert torch.equal(load_rae(tmp_path / "rae", rae.encoder).encode(images), rae.encode(images))


def test_other_encoders_are_refused(rae, encoders, folders, tmp_path):
    rae.save(tmp_path / "rae")
    mine = rae.encoder.fingerprint[:12]
    for other in (encoders("dinov3"), encoders("dinov3", seed=1, layers="last-2"), encoders("dinov2")):
        match = rf"autoencoder .*blocks 3, 4; 16 px\) \[{mine}\] cannot be used with .*\[{other.fingerprint[:12]}\]"
        with pytest.raises(ValueError, match=match):
            load_rae(tmp_path / "rae", other)
    with pytest.raises(ValueError, match=r"autoencoder .* cannot be used with"):
        load_rae(tmp_path / "rae", folders("dinov3", 1))


def test_parts_of_different_encoders_do_not_mix(make_rae, encoders, images):
    last, two = encoders(), encoders(layers="last-2")
    one, other = make_rae(last, images), make_rae(two, images)
    with pytest.raises(ValueError, match=r"decoder of the encoder .*blocks 4; .* cannot be used with .*blocks 3, 4;"):
        RAE(two, one.decoder, other.statistics)
    with pytest.raises(
        ValueError, match=r"statistics of the encoder .*blocks 4; .* cannot be used with .*blocks 3, 4;"
    ):
        RAE(two, other.decoder, one.statistics)


@pytest.mark.parametrize("name", [DECODER, STATISTICS])
def test_files_of_another_folder_are_refused(make_rae, encoders, images, tmp_path, name):
    for folder, encoder in (("one", encoders()), ("other", encoders(layers="last-2"))):
        make_rae(encoder, images).save(tmp_path / folder)
    shutil.copy(tmp_path / "other" / name, tmp_path / "one" / name)
    with pytest.raises(ValueError, match=rf"{name}' of the encoder .*blocks 3, 4; .* cannot be used with .*blocks 4;"):
        load_rae(tmp_path / "one")


@pytest.mark.parametrize("name", [DECODER, STATISTICS])
def test_files_of_the_same_encoder_but_another_run_are_refused(make_rae, encoders, images, tmp_path, name):
    make_rae(encoders(), images).save(tmp_path / "one")
    make_rae(encoders(), images[:7], seed=1).save(tmp_path / "other")
    shutil.copy(tmp_path / "other" / name, tmp_path / "one" / name)
    with pytest.raises(ValueError, match=rf"{name}' has the fingerprint .* its folder says"):
        load_rae(tmp_path / "one")


def test_damage_is_named(rae, tmp_path):
    rae.save(tmp_path / "rae")
    path = tmp_path / "rae" / DECODER
    whole = path.read_bytes()
    path.write_bytes(whole[:-4])
    with pytest.raises(ValueError, match=rf"{DECODER}' holds no decoder"):
        load_rae(tmp_path / "rae")
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(ValueError, match=rf"{DECODER}' has the fingerprint"):
        load_rae(tmp_path / "rae")
    (tmp_path / "rae" / "rae.json").write_text("{")
    with pytest.raises(ValueError, match=r"rae\.json' is damaged"):
        load_rae(tmp_path / "rae")
    with pytest.raises(ValueError, match="holds no autoencoder"):
        load_rae(tmp_path)


def test_a_folder_of_something_else_is_not_replaced(rae, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="is not empty and holds no autoencoder"):
        rae.save(tmp_path)
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_fingerprint_is_what_latents_depend_on(make_rae, encoders, images):
    base = make_rae(encoders(), images)
    assert make_rae(encoders(), images, seed=1).fingerprint == base.fingerprint  # another decoder, the same latents
    others = {make_rae(encoders(layers=(3,)), images).fingerprint, make_rae(encoders(), images[:9]).fingerprint}
    assert len(others | {base.fingerprint}) == 3
