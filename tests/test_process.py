"""A process that keeps its memory meets few page faults; one that does not meets many."""

import platform
import subprocess
import sys

import pytest

from mvm import process

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
        (2**30, [(-3, 2**30), (-1, process.ALL)], True),
        (2**25, [(-3, 2**30), (-3, 2**25), (-1, process.ALL)], True),  # glibc before 2.35
        (0, [(-3, 2**30), (-3, 2**25)], False),  # nothing is left half done
    ],
)
def test_the_end_of_the_heap_is_kept_only_with_its_blocks(monkeypatch, largest, asked, kept):
    calls = []

    def mallopt(option, size):
        calls.append((option, size))
        return int(option == process.M_TRIM_THRESHOLD or size <= largest)

    monkeypatch.setattr(process, "_mallopt", lambda: mallopt)
    assert process.keep_freed_memory() is kept
    assert calls == asked


def test_another_c_library_is_left_alone(monkeypatch):
    monkeypatch.setattr(process, "_mallopt", lambda: None)
    assert not process.keep_freed_memory()


@pytest.mark.parametrize(
    ("running", "environment", "spins"),
    [
        (5, {}, "5000"),
        (3, {}, "5000"),  # ourselves and two others on two cores
        (2, {}, None),
        (1, {}, None),
        (9, {"OMP_WAIT_POLICY": "active"}, None),
        (9, {"GOMP_SPINCOUNT": "7"}, "7"),
    ],
)
def test_threads_wait_briefly_where_others_want_the_cores(running, environment, spins, tmp_path, monkeypatch):
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "loadavg").write_text(f"0.50 0.40 0.30 {running}/321 4711\n")
    monkeypatch.setattr(process, "LOAD", tmp_path / "loadavg")
    monkeypatch.setattr(process.os, "cpu_count", lambda: 2)
    process.share_cores()
    assert process.os.environ.get("GOMP_SPINCOUNT") == spins
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)


def test_a_system_that_does_not_tell_its_load_is_left_alone(tmp_path, monkeypatch):
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(process, "LOAD", tmp_path / "nothing")
    process.share_cores()
    assert "GOMP_SPINCOUNT" not in process.os.environ


SWALLOW = """
import os, signal
try:
    os.kill(os.getpid(), signal.SIGINT)
    for _ in range(1000):
        pass
except BaseException:
    pass
"""


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
@pytest.mark.parametrize(
    ("line", "code", "said"), [("import swallow", 130, "stopped"), ("exec(SWALLOW)", 0, "survived")]
)
def test_ctrl_c_in_an_import_is_not_lost(line, code, said, tmp_path):
    """A module may swallow it; outside of imports the code that runs decides."""
    (tmp_path / "swallow.py").write_text(SWALLOW)
    program = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from mvm.process import interruptible_imports; interruptible_imports()\n"
        f"SWALLOW = {SWALLOW!r}\n{line}\nprint('survived')"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    assert said in done.stdout + done.stderr
