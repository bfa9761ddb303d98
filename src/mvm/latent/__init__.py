"""Codecs between images and the space the path works in."""

from mvm.latent.cache import Latents, LoadedLatents, open_latents, write_latents
from mvm.latent.codec import Arrays, Codec, Pixels, Undecoded
from mvm.latent.encoder import (
    EncoderConfig,
    LatentEncoder,
    LatentMoments,
    Statistics,
    load_latent_encoder,
    load_statistics,
    measure,
)
from mvm.latent.rae import (
    RAE,
    Decoder,
    DecoderConfig,
    DecoderOnly,
    LatentDecoder,
    is_rae,
    load_decoder_only,
    load_rae,
)
from mvm.latent.vae import VAE, load_vae

__all__ = [
    "RAE", "VAE", "Arrays", "Codec", "Decoder", "DecoderConfig", "DecoderOnly", "EncoderConfig", "LatentDecoder",
    "LatentEncoder", "LatentMoments", "Latents", "LoadedLatents", "Pixels", "Statistics", "Undecoded", "is_rae",
    "load_decoder_only", "load_latent_encoder", "load_rae", "load_statistics", "load_vae", "measure", "open_latents",
    "write_latents",
]  # fmt: skip
