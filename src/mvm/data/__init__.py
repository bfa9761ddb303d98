"""Images and their order."""

from mvm.data.embedded import DATA_SETS, DataSet, Images, digits
from mvm.data.loader import Order

__all__ = ["DATA_SETS", "DataSet", "Images", "Order", "digits"]
