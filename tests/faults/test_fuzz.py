"""A few thousand spoiled files of all formats; more by `make faults`, a hundred thousand by fuzz.py itself."""

import subprocess
import sys
from pathlib import Path

from fuzz_formats import FORMATS

FUZZ = Path(__file__).with_name("fuzz.py")


def spoil(*options):
    done = subprocess.run(
        [sys.executable, FUZZ, *options], capture_output=True, text=True, errors="replace", check=False
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    return done.stdout.splitlines()


def test_a_few_thousand_spoiled_files_are_read_or_refused():
    lines = spoil("--cases", "2500", "--seed", "7", "--seconds", "200")
    total = [cell.strip().replace(",", "") for cell in lines[-2].split("|")[1:-1]]
    assert total[0] == "all"
    assert int(total[1]) >= 2500
    assert int(total[2]) > 250  # some survive what was done to them, so that the readers behind the first check are met
    assert int(total[4]) == 0
    assert len({kind.__name__ for kind in FORMATS}) == len(FORMATS)
