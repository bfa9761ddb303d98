"""The first hour of a new user, played end to end with the command that the wheel installs.

    python tests/first_hour.py [--keep FOLDER]      # needs the development install beside it, to build the wheel

Install the wheel without extras -> prepare ugly photos -> train -> interrupt -> resume -> extend -> fine-tune to other
classes -> sample by class name -> report -> export -> sample the export from another folder. What each command prints
is shown, and what it must have done is checked.
"""

import argparse
import io
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import venv
import zipfile
from pathlib import Path

import numpy as np
from PIL import Image

ROOT = Path(__file__).resolve().parent.parent
HEIC = b"\x00\x00\x00\x18ftypheic\x00\x00\x00\x00heicmif1" + bytes(64)  # what a phone's file begins with
SMALL = "--network.depth 1 --network.width 32 --network.heads 2 --network.patch 4 --train.batch 8 --train.warmup 0"
PATIENCE = 600  # seconds for any command: no check here is about speed


def picture(color: tuple[int, int, int], size: tuple[int, int], mode: str = "RGB", orientation: int = 0) -> bytes:
    """Return a file of one colour with a dark left edge, so that a rotation shows."""
    image = Image.new("RGB", size, color)
    image.paste((0, 0, 0), (0, 0, size[0] // 4, size[1]))
    exif = Image.Exif()
    if orientation:
        exif[0x0112] = orientation
    buffer = io.BytesIO()
    image.convert(mode).save(buffer, "JPEG" if mode in ("RGB", "L", "CMYK") else "PNG", exif=exif)
    return buffer.getvalue()


def ugly_photos(folder: Path) -> None:
    """Write what people have: sizes, modes, rotations, a phone's format, a broken file, an empty class, é and 犬."""
    draw = np.random.default_rng(0)
    for name, color in (("café au lait", (150, 110, 80)), ("犬", (200, 170, 60)), ("o'clock", (40, 90, 200))):
        (folder / name).mkdir(parents=True)
        for number in range(8):
            size = tuple(int(side) for side in draw.integers(24, 90, 2))
            mode = ("RGB", "L", "CMYK", "P", "RGBA", "1", "RGB", "LA")[number]
            data = picture(color, size, mode, orientation=6 if number == 6 else 0)
            (folder / name / f"{number} photo.{'jpg' if mode in ('RGB', 'L', 'CMYK') else 'png'}").write_bytes(data)
    (folder / "empty class").mkdir()
    (folder / "café au lait" / "IMG_0001.HEIC").write_bytes(HEIC)
    (folder / "犬" / "broken.jpg").write_bytes(picture((9, 9, 9), (40, 40))[:200])
    (folder / "notes.txt").write_text("not a picture")
    (folder / ".DS_Store").write_bytes(b"\x00")


def zipped(path: Path) -> None:
    """Write a zip with one top folder, as `zip -r` makes it, of two classes, one of which the first folder has too."""
    with zipfile.ZipFile(path, "w") as archive:
        for number in range(8):
            kind = ("o'clock", "teapot")[number % 2]
            archive.writestr(f"holiday 2026/{kind}/{number}.jpg", picture((30 * number, 200, 90), (50, 40)))
        archive.writestr("__MACOSX/holiday 2026/._x.jpg", b"no picture")


class User:
    """Types commands in a folder, with the installed `mvm` on the path and nothing of the checkout in sight."""

    def __init__(self, home: Path, binaries: Path) -> None:
        self.home = home
        kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
        self.environment = {**kept, "PATH": f"{binaries}{os.pathsep}{kept['PATH']}", "COLUMNS": "100"}

    def types(self, line: str, code: int = 0, where: Path | None = None) -> str:
        """Return what a command prints; it must end with `code` and without a traceback."""
        print(f"$ {line}", flush=True)
        done = subprocess.run(
            shlex.split(line),
            cwd=where or self.home,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
        said = (done.stdout + done.stderr).replace("\r", "\n")
        shown = [text for text in said.splitlines() if text.strip() and "%|" not in text]
        print("".join(f"    {text}\n" for text in shown), end="", flush=True)
        assert done.returncode == code, f"{line}: exit code {done.returncode}, not {code}\n{said[-3000:]}"
        assert "Traceback" not in said, said[-3000:]
        return said

    def interrupts(self, line: str, log: Path, lines: int) -> str:
        """Return what a command prints that is stopped by Ctrl-C once its log has so many lines."""
        print(f"$ {line}    (and Ctrl-C)", flush=True)
        process = subprocess.Popen(
            shlex.split(line), cwd=self.home, env=self.environment, stderr=subprocess.PIPE, text=True
        )
        try:
            deadline = time.monotonic() + PATIENCE
            while process.poll() is None and time.monotonic() < deadline:
                if log.is_file() and len(log.read_text().splitlines()) >= lines:
                    break
                time.sleep(0.05)
            start = time.monotonic()
            process.send_signal(signal.SIGINT)
            _, said = process.communicate(timeout=PATIENCE)
        finally:
            process.kill()
        print(f"    stopped in {time.monotonic() - start:.1f} s")
        assert process.returncode == 130, said[-3000:]
        assert "Traceback" not in said, said[-3000:]
        return said


def build(folder: Path) -> Path:
    """Return the wheel, built from the source distribution, so that both are whole."""
    code = "import sys; from setuptools import build_meta as b; print(b.build_{}(sys.argv[1]))"
    subprocess.run([sys.executable, "-c", code.format("sdist"), str(folder)], cwd=ROOT, check=True, capture_output=True)
    source = next(folder.glob("mean_velocity_matching-*.tar.gz"))
    subprocess.run(["tar", "xzf", source, "-C", folder], check=True)
    subprocess.run(
        [sys.executable, "-c", code.format("wheel"), str(folder)],
        cwd=folder / source.name.removesuffix(".tar.gz"),
        check=True,
        capture_output=True,
    )
    return next(folder.glob("*.whl"))


def install(folder: Path, wheel: Path) -> Path:
    """Return the folder of programs of a clean environment with the wheel in it, without extras."""
    venv.create(folder, with_pip=True)
    pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-c"]
    torch = next(line for line in (ROOT / "constraints.txt").read_text().splitlines() if line.startswith("torch=="))
    for what in (torch, str(wheel)):
        subprocess.run([*pip, str(ROOT / "constraints.txt"), what], check=True)
    return folder / "bin"


def hour(user: User, wheel: Path, python: Path) -> None:
    """Play it."""
    home = user.home
    version = user.types('python -c "import mvm; print(mvm.__version__)"').strip()
    assert f"mean_velocity_matching-{version}-" in wheel.name
    user.types("mvm sample digits --num 10 --nfe 5 --out first.png")
    assert "pip install 'mean-velocity-matching[plots]'" in user.types("mvm demo --quick", code=2)

    # raw photos where prepared data are needed: the error holds the command to type
    ugly_photos(home / "my photos")
    train = "mvm train digits --data.name folder --data.path"
    said = user.types(f"{train} 'my photos' {SMALL} --out 'runs/my run'", code=2)
    assert "mvm data prepare 'my photos' --out 'data/my photos-32' --size 32" in said, said
    said = user.types("mvm data prepare 'my photos' --out 'data/my photos-32' --size 32 --workers 1")
    assert "24 images of 3 classes, 2 skipped" in said
    assert "IMG_0001.HEIC" in said
    assert "mean-velocity-matching[heic]" in said
    assert "broken.jpg" in said
    assert "empty class" in said
    user.types("mvm data prepare 'my photos' --out data/strict --size 32 --workers 1 --strict", code=2)
    user.types("mvm data info 'data/my photos-32'")

    # train, stop, resume, extend
    run = home / "runs" / "my run"
    length = "--train.steps 2000 --train.log_every 1 --train.save_every 500 --preview.every 500 --preview.count 16"
    preview = "--preview.grid 12 --sample.nfe 3"
    line = f"{train} 'data/my photos-32' {SMALL} {length} {preview} --out 'runs/my run'"
    said = user.interrupts(line, run / "metrics.jsonl", 5)
    assert "24 images, 3 classes (café au lait, o'clock, 犬)" in said
    assert "continue with: mvm train --resume 'runs/my run'" in said
    stopped = max(int(folder.name.removeprefix("step-")) for folder in (run / "checkpoints").iterdir())
    said = user.types(f"mvm train --resume 'runs/my run' --until {stopped + 5}")
    assert f"is at step {stopped + 5} of 2000" in said
    said = user.types("mvm train --resume 'runs/my run' --train.lr 1e-3", code=2)
    assert "train.lr 0.002 there, 0.001 now" in said
    short = f"--train.steps {stopped + 10} --train.lr 1e-3 --allow-change"
    assert f"is at step {stopped + 10} of" in user.types(f"mvm train --resume 'runs/my run' {short}")
    assert f"of {stopped + 12}" in user.types(f"mvm train --resume 'runs/my run' --train.steps {stopped + 12}")
    told = json.loads((run / "changes.json").read_text())
    assert [(one["option"], one["new"]) for one in told] == [
        *(("train.steps", stopped + 10), ("train.lr", 1e-3)),
        ("train.steps", stopped + 12),
    ]
    lines = [json.loads(text)["step"] for text in (run / "metrics.jsonl").read_text().splitlines() if "loss" in text]
    assert lines == list(range(1, stopped + 13))  # no step is lost, none is there twice
    assert "there is no run in runs/digits" in user.types("mvm train digits --resume", code=2)

    # sample by class name, from any folder
    elsewhere = home / "elsewhere"
    elsewhere.mkdir()
    sample = f"mvm sample '{run}' --classes \"O'Clock, 犬\" --num 6 --nfe 3"
    user.types(f"{sample} --out by-class.png", where=elsewhere)
    user.types(f"{sample} --out by-class.npz", where=elsewhere)
    with np.load(elsewhere / "by-class.npz") as found:
        assert found["arr_1"].tolist() == [1, 2] * 3

    # fine-tune to other classes
    zipped(home / "holiday.zip")
    user.types("mvm data prepare holiday.zip --out data/holiday --size 32 --workers 1")
    tune = f"mvm train digits --data.name folder --data.path data/holiday {SMALL} --train.steps 4 --out runs/holiday"
    said = user.types(f"{tune} --init-from 'runs/my run'")
    assert "made anew: label.weight for 2 classes (kept: the null class, o'clock)" in said
    user.types("mvm sample runs/holiday --classes teapot --num 2 --nfe 3 --out teapots.png")

    # report, once the extra that the command asks for is there
    assert "pip install 'mean-velocity-matching[plots]'" in user.types("mvm report 'runs/my run'", code=2)
    pip = f"{python} -m pip install --quiet --disable-pip-version-check -c '{ROOT / 'constraints.txt'}'"
    user.types(f"{pip} '{wheel}[plots]'")
    user.types("mvm report 'runs/my run'")
    page = (run / "report.html").read_text()
    assert "mvm train --resume" in page
    assert not re.search(r'(src|href)="https?:', page)  # nothing is loaded from outside

    # export, and sample the export from another folder
    user.types("mvm export 'runs/my run' --out exports/photos --license cc-by-4.0")
    card = (home / "exports" / "photos" / "README.md").read_text()
    assert "handwritten digits" not in card
    assert "café au lait, o'clock, 犬" in card
    moved = elsewhere / "photos"
    (home / "exports" / "photos").rename(moved)
    user.types("mvm sample photos --classes 'café au lait' --num 2 --nfe 3 --out again.npz", where=elsewhere)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", type=Path, help="play it in this folder, and leave it there")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        place = options.keep or Path(scratch)
        (place / "dist").mkdir(parents=True)
        (place / "home").mkdir()
        wheel = build(place / "dist")
        binaries = install(place / "venv", wheel)
        hour(User(place / "home", binaries), wheel, binaries / "python")
    print("the first hour: done")


if __name__ == "__main__":
    main()
