"""How a process of our own uses the host: memory kept for its next tensors, cores shared with other programs."""

import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

# glibc's numbers for its options. Blocks above the first size are asked of the system one by one; above the second what
# is free at the end of the heap goes back to it. Either way each page of the next tensor is a fault.
M_MMAP_THRESHOLD, M_TRIM_THRESHOLD = -3, -1
LARGEST_BLOCKS = (2**30, 2**25)  # bytes; older versions take no more than the second
ALL = 2**31 - 1


# Turns of a waiting OpenMP thread before it sleeps, where other programs want the cores. libgomp's default of 300,000
# then holds a core that the very thread it waits for needs. On a quiet machine the default is faster: a wake-up costs
# more than the wait. Both measured: benchmarks/results/cpu-sampling.md.
SPINS_WHEN_SHARED = "5000"
LOOKS, APART = 5, 0.005  # at the load, and seconds between them


LOAD = Path("/proc/loadavg")


def _others_running() -> int:
    """Return how many other threads of the machine run or could; 0 where the system does not report it."""
    counts = []
    for _ in range(LOOKS):
        try:
            counts.append(int(LOAD.read_text().split()[3].partition("/")[0]))
        except (OSError, ValueError, IndexError):
            return 0
        time.sleep(APART)
    return sorted(counts)[LOOKS // 2] - 1


def share_cores() -> None:
    """Let OpenMP's threads wait briefly if all cores are busy, unless the user has set it; before torch is imported."""
    chosen = {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys()
    if not chosen and _others_running() >= (os.cpu_count() or 1):
        os.environ["GOMP_SPINCOUNT"] = SPINS_WHEN_SHARED


INTERRUPTED = 130  # exit code of a command that Ctrl-C stopped


def interruptible_imports() -> None:
    """Make Ctrl-C end the process while a module is imported; anywhere else it is KeyboardInterrupt.

    Some modules guard their own imports with a bare `except:`, in which a KeyboardInterrupt is lost. At that time
    nothing has to be saved.
    """

    def handler(number: int, frame: FrameType | None) -> None:
        while frame is not None:
            if frame.f_code.co_filename.startswith("<frozen importlib"):
                os.write(sys.stderr.fileno(), b"\nmvm: stopped\n")
                os._exit(INTERRUPTED)
            frame = frame.f_back
        raise KeyboardInterrupt

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # ignored in a shell's background: so it stays
        signal.signal(signal.SIGINT, handler)


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
