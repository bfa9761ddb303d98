"""Pictures, and every kind of storage that holds them."""

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import fuzz_seeds
from fuzz_format import Format
from fuzz_mutate import spoiled_json, spoiled_npy, spoiled_npz

from mvm.data.resize import centre_crop, decode, planes
from mvm.data.sources import open_source
from mvm.evaluation.images import open_images

SIDE = 16  # pixels that pictures are resized to


class Picture(Format):
    """Pictures, decoded, cropped and resized; each mode and format is a seed."""

    name, file, share = "pictures", "picture.png", 6.0

    def lay(self) -> list[bytes]:
        return fuzz_seeds.images()

    @property
    def named(self) -> str:
        return ""  # decode is handed bytes; its callers name them

    def read(self) -> None:
        planes(centre_crop(decode((self.folder / self.file).read_bytes(), 3), SIDE))


class Source(Format):
    """A source of pictures; all its records are read and decoded, as `mvm data prepare` would."""

    def read(self) -> None:
        for record in self.records():
            with suppress(ValueError):  # a bad picture, which is skipped
                planes(centre_crop(decode(record.image, 1), SIDE))

    def records(self) -> Iterator[Any]:
        source = open_source(self.folder / self.file, part_size=3)
        for part in source.parts:
            yield from part.read()


class Zip(Source):
    name, file, share = "zip", "pictures.zip", 2.0

    def lay(self) -> list[bytes]:
        return fuzz_seeds.zips()


class Tar(Source):
    name, file, share = "tar", "pictures.tar", 2.0

    def lay(self) -> list[bytes]:
        return fuzz_seeds.tars()


class Parquet(Source):
    name, file, share = "parquet", "pictures.parquet", 2.0

    def lay(self) -> list[bytes]:
        return fuzz_seeds.parquets()


class Npz(Source):
    name, file = "npz of pictures", "pictures.npz"
    spoil = staticmethod(spoiled_npz)

    def lay(self) -> list[bytes]:
        return fuzz_seeds.npzs()


class Npy(Source):
    name, file = "npy of pictures", "pictures.npy"
    spoil = staticmethod(spoiled_npy)

    def lay(self) -> list[bytes]:
        return fuzz_seeds.npys(self.folder)


class Batch(Source):
    name, file = "pickled CIFAR batch", "data_batch_1"

    def lay(self) -> list[bytes]:
        return fuzz_seeds.batches()


class DatasetJson(Source):
    name, file, share = "dataset.json of a folder", "source/dataset.json", 0.7
    spoil = staticmethod(spoiled_json)

    def lay(self) -> list[bytes]:
        return [fuzz_seeds.listed(self.folder / "source")]

    def records(self) -> Iterator[Any]:
        for part in open_source(self.folder / "source").parts:
            yield from part.read()


class Judged(Source):
    """Arrays and archives as `mvm eval` reads them."""

    name, file, share = "zip, read by eval", "pictures.zip", 0.3

    def lay(self) -> list[bytes]:
        return fuzz_seeds.zips()

    def read(self) -> None:
        for _ in open_images(self.folder / self.file, size=SIDE).read(2):
            pass


SOURCES: tuple[type[Format], ...] = (Picture, Zip, Tar, Parquet, Npz, Npy, Batch, DatasetJson, Judged)
