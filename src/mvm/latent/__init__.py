"""Codecs between images and the space the path works in."""

from mvm.latent.codec import Codec, Pixels

__all__ = ["Codec", "Pixels"]
