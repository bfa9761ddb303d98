"""What the README tells a user to type, typed."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from mvm.cli import run

README = (Path(__file__).parent.parent / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def commands(block: str) -> list[list[str]]:
    lines = [line.split("#")[0].strip() for line in block.splitlines() if line.startswith(("mvm", "torchrun"))]
    return [shlex.split(line) for line in lines]


def typed(command: list[str]) -> int:
    """The exit code of a command, made short."""
    program, *rest = command
    if program == "torchrun":
        torchrun = [sys.executable, "-m", "torch.distributed.run", *rest, *SHORTER["train"]]
        return subprocess.run(torchrun, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False).returncode
    return run([*rest, *SHORTER.get(rest[0], [])])


# options that make a command short, not other
TINY = ["--network.depth", "1", "--train.batch", "4"]
SHORTER = {
    "train": [*TINY, "--train.steps", "3", "--train.keep_best", "false", "--preview.every", "0"],
    "bench": [*TINY, "--steps", "3", "--samples", "2"],
    "sweep": ["--num", "100"],
    "tune": ["--num", "2", "--rounds", "1", "--reference-nfe", "9"],
}


@pytest.mark.parametrize("code", blocks("python"))
def test_python_blocks_run(code: str) -> None:
    names: dict[str, object] = {}
    exec(compile(code, "README.md", "exec"), names)
    if "points" not in names:
        assert names["images"].shape == (8, 1, 8, 8)  # ty: ignore[unresolved-attribute]
        return
    distance = (names["points"] - names["points"].sign()).abs()  # ty: ignore[unresolved-attribute]
    assert distance.median() < 0.2, "to the nearest of the four blobs, whose deviation is 0.1"


def draw_photos(folder: Path) -> None:
    """A folder of pictures of two classes, as the README's user has."""
    for number, name in enumerate(("cat", "cat", "dog", "dog")):
        (folder / name).mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (48, 40), (60 * number, 100, 200)).save(folder / name / f"{number}.png")


@pytest.mark.parametrize("block", [block for block in blocks("bash") if commands(block)])
def test_commands_run(block: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    draw_photos(tmp_path / "photos")
    for command in commands(block):
        assert typed(command) == 0, command


def test_opens_with_the_two_commands() -> None:
    assert [line.split()[:2] for line in blocks("bash")[0].splitlines()] == [["make", "demo"], ["make", "test"]]


def test_links_lead_somewhere() -> None:
    root = Path(__file__).parent.parent
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert (root / target).exists(), target
