"""Tiny encoders with random weights, in folders as transformers writes them."""

import pytest
import torch

SMALL = {"hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2, "num_channels": 3, "patch_size": 4}


def stirred(model, seed=0):
    """The model with every parameter drawn anew: defaults such as zero biases would hide mistakes."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return model.eval()


def make_model(kind, seed=0):
    transformers = pytest.importorskip("transformers", reason="needs mean-velocity-matching[encoders]")
    if kind == "dinov2":
        model = transformers.Dinov2Model(transformers.Dinov2Config(**SMALL, image_size=16))
    elif kind == "dinov2_with_registers":
        config = transformers.Dinov2WithRegistersConfig(**SMALL, image_size=16, num_register_tokens=3)
        model = transformers.Dinov2WithRegistersModel(config)
    else:
        config = transformers.DINOv3ViTConfig(**SMALL, intermediate_size=24, num_register_tokens=2)
        model = transformers.DINOv3ViTModel(config)
    return stirred(model, seed)


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    """folders(kind, seed): a folder with that model."""
    made = {}

    def folder(kind="dinov2", seed=0):
        if (kind, seed) not in made:
            made[kind, seed] = tmp_path_factory.mktemp(f"{kind}-{seed}")
            make_model(kind, seed).save_pretrained(made[kind, seed])
        return str(made[kind, seed])

    return folder


@pytest.fixture
def encoders(folders):
    """encoders(kind, seed, **config): a LatentEncoder at 16 px, so 4 x 4 latents of 16 channels."""
    from mvm.latent import EncoderConfig, load_latent_encoder

    def load(kind="dinov2", seed=0, **config):
        return load_latent_encoder(EncoderConfig(folders(kind, seed), **{"resolution": 16, **config}))

    return load


@pytest.fixture
def make_rae():
    """make_rae(encoder, images, seed): an autoencoder with an untrained decoder, and statistics of the images."""
    from mvm.latent import RAE, Decoder, DecoderConfig, measure

    def make(encoder, images, seed=0):
        torch.manual_seed(seed)
        decoder = Decoder(DecoderConfig("tiny", 4), encoder.latent_shape, encoder.origin)
        return RAE(encoder, decoder, measure(encoder, images, progress=False).result(encoder.origin)).eval()

    return make


@pytest.fixture
def images():
    generator = torch.Generator().manual_seed(3)
    return torch.randint(0, 256, (10, 3, 16, 16), generator=generator, dtype=torch.uint8)
