"""A process that keeps its memory meets few page faults; one that does not meets many."""

import platform
import subprocess
import sys

import pytest

from mvm import heap

CODE = """
import resource, sys
import torch
from mvm.process import keep_freed_memory
if sys.argv[1] == "keep":
    assert keep_freed_memory()
def passes(count):  # as a network does: a large tensor, another of it, little of that kept
    for _ in range(count):
        small = torch.ones(2**18)
        for _ in range(2):
            large = torch.ones(2**23 + 1)  # above 32 MiB: up to there glibc keeps blocks by itself, now and then
            larger = large * 2
            small = larger[: 2**18] + small
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
passes(3)
found = []
for _ in range(5):  # the heap may still grow by a piece once, whenever torch's own allocations happen to split it
    before = faults()
    passes(2)
    found.append(faults() - before)
print(sorted(found)[2])
"""


def faults(how: str) -> int:
    done = subprocess.run([sys.executable, "-c", CODE, how], capture_output=True, text=True, check=True)
    return int(done.stdout)


def keeps_large_blocks() -> bool:
    name, version = platform.libc_ver()
    return name == "glibc" and [int(part) for part in version.split(".")] >= [2, 35]


@pytest.mark.skipif(not keeps_large_blocks(), reason="the C library is not glibc, or one that keeps 32 MiB at most")
def test_memory_that_is_kept_is_not_asked_for_again():
    kept, returned = faults("keep"), faults("return")
    assert kept < returned / 4


@pytest.mark.parametrize(
    ("largest", "asked", "kept"),
    [
        (2**30, [(-3, 2**30), (-1, heap.ALL)], True),
        (2**25, [(-3, 2**30), (-3, 2**25), (-1, heap.ALL)], True),  # glibc before 2.35
        (0, [(-3, 2**30), (-3, 2**25)], False),  # nothing is left half done
    ],
)
def test_the_end_of_the_heap_is_kept_only_with_its_blocks(monkeypatch, largest, asked, kept):
    calls = []

    def mallopt(option, size):
        calls.append((option, size))
        return int(option == heap.M_TRIM_THRESHOLD or size <= largest)

    monkeypatch.setattr(heap, "_mallopt", lambda: mallopt)
    assert heap.keep_freed_memory() is kept
    assert calls == asked


def test_another_c_library_is_left_alone(monkeypatch):
    monkeypatch.setattr(heap, "_mallopt", lambda: None)
    assert not heap.keep_freed_memory()
