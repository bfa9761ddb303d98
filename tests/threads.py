"""Processes that are threads, with the collectives of `Processes`: several ranks in one test."""

import threading
from dataclasses import dataclass

import torch

from mvm.distributed.processes import Processes


class Group:
    """What the threads of one group share."""

    def __init__(self, world):
        self.barrier, self.slots = threading.Barrier(world, timeout=1200), [None] * world

    def exchange(self, rank, value):
        self.slots[rank] = value
        self.barrier.wait()
        found = list(self.slots)
        self.barrier.wait()
        return found


@dataclass(frozen=True)
class Thread(Processes):
    """A process that is a thread."""

    group: Group | None = None

    def sum(self, values):
        return torch.stack(self.group.exchange(self.rank, values)).sum(0)

    def gather(self, mine):
        return torch.cat(self.group.exchange(self.rank, mine))

    def broadcast(self, value):
        return self.group.exchange(self.rank, value)[0]


def in_threads(world, work):
    """Return work(place) of every rank; where it failed, the error, which ends the others too."""
    group, found = Group(world), {}

    def run(rank):
        try:
            found[rank] = work(Thread(rank, world, group=group))
        except BaseException as error:
            group.barrier.abort()
            found[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found[rank] for rank in range(world)]
