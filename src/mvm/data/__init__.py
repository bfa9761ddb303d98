"""Images and their order."""

from mvm.data.embedded import Images, digits
from mvm.data.loader import Order

__all__ = ["Images", "Order", "digits"]
