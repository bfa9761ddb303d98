"""Features of a set of images, batch by batch and process by process: moments in blocks, and what is kept whole."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from mvm import noise
from mvm.distributed.processes import Processes
from mvm.evaluation.images import ImageSet
from mvm.metrics.extractors import Extractor, Sources, open_extractor
from mvm.metrics.measures import KID_SIZE, MEASURES, Gathered, Key
from mvm.metrics.moments import Accumulator
from mvm.options import at_least

BATCH = 250
MOST = 1000  # images through a network at a time: Inception's first layers take 15 GB for these, and more are no faster


@dataclass
class Judge:
    """Feature networks, opened when first needed, and how to run them."""

    sources: Sources = field(default_factory=Sources)
    place: Processes = field(default_factory=Processes)
    batch: int = BATCH
    blocks: int = 1  # into which images are dealt for a jackknife error; 1: none
    kid_size: int = KID_SIZE
    progress: bool = True
    opened: dict[str, Extractor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        at_least("kid_size", self.kid_size, 2)

    def extractor(self, name: str) -> Extractor:
        """Return the network of that name."""
        if name not in self.opened:
            self.opened[name] = open_extractor(name, self.sources, self.place.device)
        return self.opened[name]

    def gather(self, images: ImageSet, wanted: Mapping[Key, bool], blocks: int = 1) -> Gathered:
        """Return moments of the wanted features, dealt into blocks, and the features of keys marked True.

        Every process reads its batches; all processes return the same.
        """
        at_least("blocks", blocks, 1)
        _check_blocks(blocks, images.facts.get("count"))  # before the work, where it is known
        networks = {key.network: self.extractor(key.network) for key in wanted}  # first: weights may be missing
        streams = {key: _Stream(blocks, keep) for key, keep in wanted.items()}
        count = images.facts.get("count")
        bar = tqdm(total=count, desc="features", unit="image", disable=not (self.progress and self.place.main))
        with bar:
            for indices, pictures in _at_most(MOST, images.read(self.batch, self.place)):
                named = {name: extractor(pictures) for name, extractor in networks.items()}
                for key, stream in streams.items():
                    stream.add(indices, _part(named[key.network], key))
                bar.update(len(pictures) * (1 if count is None else self.place.world))
        found = _reduced(streams, self.place)
        _check_blocks(blocks, found.count)
        return found

    def facts(self, names: Sequence[str]) -> dict[str, Any]:
        """Return what tells the feature networks of these figures apart."""
        return {name: self.extractor(name).facts for name in dict.fromkeys(MEASURES[n].key.network for n in names)}


def _at_most(count: int, chunks: Iterable[tuple[Tensor, Tensor]]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (indices, images) in chunks of no more than so many."""
    for indices, images in chunks:
        yield from zip(indices.split(count), images.split(count), strict=True)


def _check_blocks(blocks: int, count: int | None) -> None:
    if count is not None and blocks > max(1, count):
        raise ValueError(f"{blocks} blocks of {count} images leave some empty; ask for fewer blocks, or more images")


def _part(named: Mapping[str, Tensor], key: Key) -> Tensor:
    if key.part not in named:
        raise ValueError(
            f"these weights of '{key.network}' have no classifier, so no Inception Score can be made; "
            "leave 'is' out of --metrics, or give --inception the published .pth, which has it"
        )
    return named[key.part]


class _Stream:
    """Features of one key as they come: accumulators of blocks, and the features with their indices if kept."""

    def __init__(self, blocks: int, keep: bool) -> None:
        self.blocks, self.keep = blocks, keep
        self.accumulators: list[Accumulator] = []
        self.kept: list[tuple[Tensor, Tensor]] = []

    def add(self, indices: Tensor, features: Tensor) -> None:
        if not self.accumulators:
            self.accumulators = [Accumulator(features.shape[1], features.device) for _ in range(self.blocks)]
        if self.blocks == 1:
            self.accumulators[0].add(features)
        else:
            dealt = block_of(indices, self.blocks).to(features.device)
            for number, accumulator in enumerate(self.accumulators):
                accumulator.add(features[dealt == number])
        if self.keep:
            self.kept.append((indices, features.float()))


def block_of(indices: Tensor, blocks: int) -> Tensor:
    """Return the block (B,) of images by their index alone: the same in any batch and process, two sets alike.

    Every `blocks` neighbours are dealt to all blocks in an order of their own, so that sizes differ by one at most and
    labels that go round do not fall into step with the blocks.
    """
    orders = noise.uniform(indices // blocks, noise.BLOCK, (blocks,)).argsort(dim=1)
    return orders.gather(1, (indices % blocks)[:, None])[:, 0]


def _reduced(streams: Mapping[Key, _Stream], place: Processes) -> Gathered:
    """Return what all processes have gathered, joined."""
    found = Gathered()
    for key, stream in streams.items():
        width = place.max(stream.accumulators[0].mean.numel() if stream.accumulators else 0)
        if width == 0:
            raise ValueError("there are no images to look at")
        device = stream.accumulators[0].mean.device if stream.accumulators else place.device
        mine = stream.accumulators or [Accumulator(width, device) for _ in range(stream.blocks)]
        found.blocks[key] = [_joined(accumulator, place) for accumulator in mine]
        found.count = sum(block.count for block in found.blocks[key])
        if stream.keep:
            found.features[key] = _in_order(stream.kept, found.count, width, device, place)
    return found


def _joined(mine: Accumulator, place: Processes) -> Accumulator:
    if place.world == 1:
        return mine
    return Accumulator.from_state({name: place.gather(part) for name, part in mine.state().items()}, mine.mean.device)


def _in_order(
    kept: Sequence[tuple[Tensor, Tensor]], count: int, width: int, device: torch.device, place: Processes
) -> Tensor:
    """Return all features (count, width) in the order of the images."""
    features = torch.zeros(count, width, device=device)
    for indices, some in kept:
        features[indices.to(device)] = some
    return place.sum(features)
