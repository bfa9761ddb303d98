"""Images and their order."""

from mvm.data.augment import AUGMENT_SIZE, augmentation, augmented
from mvm.data.catalogue import DATA_SETS, DataSet, Images, digits
from mvm.data.loader import OnHost, Order, Resident, Store, mirror, mirrored, send
from mvm.data.shards import Prepared, open_prepared

__all__ = [
    "AUGMENT_SIZE", "DATA_SETS", "DataSet", "Images", "OnHost", "Order", "Prepared", "Resident", "Store",
    "augmentation", "augmented", "digits", "mirror", "mirrored", "open_prepared", "send",
]  # fmt: skip
