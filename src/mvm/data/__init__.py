"""Images and their order."""

from mvm.data.augment import AUGMENT_SIZE, augmentation, augmented
from mvm.data.loader import (
    DATA_SETS,
    IMAGENET,
    DataSet,
    Images,
    OnHost,
    Order,
    Resident,
    Store,
    digits,
    mirror,
    mirrored,
    send,
)
from mvm.data.shards import Prepared, open_prepared

__all__ = [
    "AUGMENT_SIZE", "DATA_SETS", "IMAGENET", "DataSet", "Images", "OnHost", "Order", "Prepared", "Resident", "Store",
    "augmentation", "augmented", "digits", "mirror", "mirrored", "open_prepared", "send",
]  # fmt: skip
