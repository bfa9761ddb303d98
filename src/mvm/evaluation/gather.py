"""Features of a set of images, over batches and processes: their moments in blocks, and all of them where asked for."""

from collections.abc import Mapping, Sequence
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
        count = images.facts.get("count")
        _check_blocks(blocks, count)  # before the work, where it is known
        networks = {key.network: self.extractor(key.network) for key in wanted}  # first: weights may be missing
        streams = {key: _Stream(blocks, keep) for key, keep in wanted.items()}
        bar = tqdm(total=count, desc="features", unit="image", disable=not (self.progress and self.place.main))
        with bar:
            for batch in images.read(self.batch, self.place):
                for indices, pictures in zip(*(part.split(MOST) for part in batch), strict=True):
                    features = {name: extractor(pictures) for name, extractor in networks.items()}
                    for key, stream in streams.items():
                        stream.add(indices, _part(features[key.network], key))
                    bar.update(len(pictures) * (1 if count is None else self.place.world))
        found = Gathered()
        for key, stream in streams.items():
            found.blocks[key], kept = stream.reduced(self.place)
            found.count = sum(block.count for block in found.blocks[key])
            if kept is not None:
                found.features[key] = kept
        _check_blocks(blocks, found.count)
        return found

    def facts(self, names: Sequence[str]) -> dict[str, Any]:
        """Return what identifies the feature networks of these figures."""
        return {name: self.extractor(name).facts for name in dict.fromkeys(MEASURES[n].key.network for n in names)}


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


def block_of(indices: Tensor, blocks: int) -> Tensor:
    """Return the block (B,) of images by their index alone: the same in any batch and process, two sets alike.

    Every `blocks` neighbours are dealt to all blocks in an order of their own, so that sizes differ by one at most and
    labels that go round do not fall into step with the blocks.
    """
    orders = noise.uniform(indices // blocks, noise.BLOCK, (blocks,)).argsort(dim=1)
    return orders.gather(1, (indices % blocks)[:, None])[:, 0]


class _Stream:
    """Features of one key batch by batch: accumulators of blocks, and the features with their indices if kept."""

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

    def reduced(self, place: Processes) -> tuple[list[Accumulator], Tensor | None]:
        """Return the blocks over all processes, and the features (count, width) in the order of the images if kept."""
        width = place.max(self.accumulators[0].mean.numel() if self.accumulators else 0)
        if width == 0:
            raise ValueError("there are no images to look at")
        device = self.accumulators[0].mean.device if self.accumulators else place.device
        blocks = self.accumulators or [Accumulator(width, device) for _ in range(self.blocks)]
        if place.world > 1:
            states = ({name: place.gather(part) for name, part in block.state().items()} for block in blocks)
            blocks = [Accumulator.from_state(state, device) for state in states]
        if not self.keep:
            return blocks, None
        features = torch.zeros(sum(block.count for block in blocks), width, device=device)
        for indices, some in self.kept:
            features[indices.to(device)] = some
        return blocks, place.sum(features)
