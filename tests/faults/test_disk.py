"""A disk that is really full, and one that cannot be written to: a small tmpfs, in a mount namespace of its own."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.faults.activities import TRAIN, fingerprint, train

ROOM = "size=50m"


def in_own_mounts(script: str, folder: Path) -> subprocess.CompletedProcess:
    """Run a shell script that may mount what it likes on $FOLDER; its mounts end with it."""
    dotted = [word for name, value in TRAIN.items() for word in (f"--{name}", value)]
    command = " ".join([sys.executable, "-m", "mvm", "train", "digits", *dotted, "--device", "cpu"])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "FOLDER": str(folder), "TRAIN": command}
    words = ["unshare", "--mount", "sh", "-ec", script]
    return subprocess.run(words, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture
def folder(tmp_path):
    """A folder to mount on; without the right to mount, the test is left out."""
    found = tmp_path / "disk"
    found.mkdir()
    if shutil.which("unshare") is None or in_own_mounts('mount -t tmpfs none "$FOLDER"', found).returncode:
        pytest.skip("mounting is not permitted here; crashes.py has a disk that says it is full")
    return found


@pytest.mark.slow
def test_a_run_on_a_full_disk_goes_on_when_there_is_room(folder, tmp_path):
    assert train(tmp_path, False) == 0
    script = f"""
        mount -t tmpfs -o size=200k none "$FOLDER"
        $TRAIN --out "$FOLDER/run" || echo "code $?"
        mount -o remount,{ROOM} "$FOLDER"
        $TRAIN --out "$FOLDER/run" --auto-resume
        cp -r "$FOLDER/run" "$FOLDER/../copy"
    """
    done = in_own_mounts(script, folder)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "code 2" in done.stdout
    assert "mvm: a checkpoint could not be saved" in done.stderr
    assert "Traceback" not in done.stderr
    copy = {name.removeprefix("copy/"): value for name, value in fingerprint(tmp_path).items() if "copy/" in name}
    plain = {name.removeprefix("run/"): value for name, value in fingerprint(tmp_path).items() if "run/" in name}
    assert copy == plain
    assert not list((tmp_path / "copy").rglob(".*"))


@pytest.mark.slow
def test_a_folder_that_cannot_be_written_to_is_named(folder):
    script = """
        mount -t tmpfs -o ro none "$FOLDER"
        $TRAIN --out "$FOLDER/run" || echo "code $?"
    """
    done = in_own_mounts(script, folder)
    assert done.stdout.strip().endswith("code 2")
    assert f"'{folder / 'run'}': Read-only file system; name another path" in done.stderr
    assert "Traceback" not in done.stderr
