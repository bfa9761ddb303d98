"""Codecs between images and the space the path works in."""

from mvm.latent.codec import GREY_SCALE, Codec, Pixels

__all__ = ["GREY_SCALE", "Codec", "Pixels"]
