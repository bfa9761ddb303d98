"""A process that keeps its memory meets few page faults; one that does not meets many."""

import subprocess
import sys

import pytest

CODE = """
import resource, sys
import torch
from mvm.heap import keep_freed_memory
if sys.argv[1] == "keep" and not keep_freed_memory():
    print("no glibc")
    raise SystemExit
def passes(count):  # as a network does: a large tensor, another of it, little of that kept
    for _ in range(count):
        small = torch.ones(2**18)
        for _ in range(8):
            large = torch.ones(2**21 + 1)
            larger = large * 2
            small = larger[: 2**18] + small
passes(3)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
passes(10)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(how: str) -> int:
    done = subprocess.run([sys.executable, "-c", CODE, how], capture_output=True, text=True, check=True)
    if done.stdout.strip() == "no glibc":
        pytest.skip("the C library is not glibc")
    return int(done.stdout)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's switch")
def test_memory_that_is_kept_is_not_asked_for_again():
    kept, returned = faults("keep"), faults("return")
    assert kept < returned / 4
