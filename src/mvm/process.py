"""How a process of our own uses the host: memory kept for its next tensors, cores that others may want too."""

import ctypes
import os
from collections.abc import Callable

# glibc's numbers for its options. Blocks above the first size are asked of the system one by one; above the second what
# is free at the end of the heap goes back to it. Either way each page of the next tensor is a fault.
M_MMAP_THRESHOLD, M_TRIM_THRESHOLD = -3, -1
LARGEST_BLOCKS = (2**30, 2**25)  # bytes; older versions take no more than the second
ALL = 2**31 - 1


# Turns of a waiting OpenMP thread before it sleeps. libgomp's default, 300,000, holds a core for milliseconds that the
# thread it waits for may need; none at all (OMP_WAIT_POLICY=passive) costs a wake-up at every product. Measured beside
# other programs and alone: benchmarks/results/cpu-sampling.md.
SPINS = "5000"


def share_cores() -> None:
    """Let OpenMP's threads wait briefly, unless the user has said how; before torch is imported."""
    if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys():
        os.environ["GOMP_SPINCOUNT"] = SPINS


def _mallopt() -> Callable[[int, int], int] | None:
    try:
        return ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # another C library, or another system
        return None


def keep_freed_memory() -> bool:
    """Let the C library keep freed memory; return whether it does (glibc). For a process of our own, not for a library.

    Sampling 16 images of 32x32 in a fresh process met 2.4 million page faults without this, a fifth of its time.
    """
    mallopt = _mallopt()
    # The second option alone would do harm: with any of them set, glibc no longer raises the first by itself.
    if mallopt is None or not any(mallopt(M_MMAP_THRESHOLD, size) for size in LARGEST_BLOCKS):
        return False
    return bool(mallopt(M_TRIM_THRESHOLD, ALL))
