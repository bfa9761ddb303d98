"""One door to every kind of storage that labelled images come in."""

from collections.abc import Callable
from pathlib import Path

from mvm.data.shards import is_prepared
from mvm.data.sources.archives import open_folder, open_tars, open_zip
from mvm.data.sources.arrays import is_batch, open_array, open_batches, open_parquet
from mvm.data.sources.records import PART_SIZE, ConditionKeys, DataSource, SourcePart, SourceRecord
from mvm.options import at_least

__all__ = ["PART_SIZE", "ConditionKeys", "DataSource", "SourcePart", "SourceRecord", "open_source"]

Opener = Callable[..., DataSource]
CONDITIONED = {open_array, open_parquet, open_tars}  # that read conditions, too

SUFFIXES: dict[str, Opener] = {
    ".zip": open_zip,
    ".parquet": open_parquet,
    ".tar": open_tars,
    **dict.fromkeys((".npz", ".npy"), open_array),
    **dict.fromkeys((".tar.gz", ".tgz"), open_tars),
}


def _opener(path: Path) -> Opener:
    """Return the reader of a file by its name, of a folder by what lies in it."""
    if path.is_dir():
        if any(path.glob("*.tar")):
            return open_tars
        if any(map(is_batch, path.iterdir())):
            return open_batches
        if (path / "images.npy").is_file():
            return open_array
        return open_parquet if next(path.rglob("*.parquet"), None) else open_folder
    if is_batch(path):
        return open_batches
    for suffix, opener in SUFFIXES.items():
        if path.name.lower().endswith(suffix):
            return opener
    allowed = f"a folder, {', '.join(SUFFIXES)}, batches of CIFAR or of downsampled ImageNet by their published names"
    raise ValueError(f"source='{path}' is of no known kind; allowed: {allowed}")


def open_source(
    path: Path | str,
    split: str = "",
    part_size: int = PART_SIZE,
    wanted: ConditionKeys | None = None,
    as_arrays: bool = False,
) -> DataSource:
    """Return labelled images in parts of at most part_size, from whatever holds them.

    | kind       | what                                                                    | order             |
    |------------|-------------------------------------------------------------------------|-------------------|
    | folder     | class folders; or images only (one class); or images with dataset.json   | class, name       |
    | zip        | the same in an archive                                                  | class, name       |
    | tar        | the same, .tar, .tar.gz or .tgz, without labels beside the images        | place in it       |
    | parquet    | columns image {bytes} and label, a file or a folder of them              | file, row         |
    | webdataset | key.jpg with key.cls or key.json, a tar or a folder of them              | file, place in it |
    | numpy      | .npz with images and labels; .npy with labels.npy beside                 | row               |
    | batches    | CIFAR's pickles; downsampled ImageNet's pickles or .npz (labels from 1)  | file, row         |

    Of folder, zip and tar the only folder at the top is no class if its images lie in folders. A class folder without
    images is among the classes of the source; `prepare` leaves it out.
    split: chooses among train, test, ... where several are present. wanted: the condition to read with each sample,
    from arrays of an .npz (or .npy beside), columns of parquet, or captions in a webdataset. as_arrays: samples are
    arrays (N, C, *space) of numbers, stored as they are; of kind numpy only.
    """
    at_least("part_size", part_size, 1)
    path = Path(path)
    if not path.exists():
        raise ValueError(f"source='{path}' does not exist; name a folder or a file of images")
    if is_prepared(path):
        raise ValueError(f"source='{path}' is prepared already: train on it, or name the original images")
    opener, options = _opener(path), {}
    if as_arrays:
        if opener is not open_array:
            raise ValueError(f"source='{path}' holds pictures; give their size: --size 32, or --size HEIGHTxWIDTH")
        options["as_arrays"] = True
    if wanted is not None:
        if opener not in CONDITIONED:
            allowed = ".npz or .npy arrays, parquet columns, and webdataset tars (captions)"
            given = f"condition='{wanted.kind}:{','.join(wanted.keys)}'"
            raise ValueError(f"{given} is read from {allowed}; source='{path}' is none of these")
        options["wanted"] = wanted
    source = opener(path, split, part_size, **options)
    if not source.parts:
        raise ValueError(f"source='{path}' holds no images")
    return source
