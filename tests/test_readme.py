"""What the README tells a user to type, typed."""

import re
import shlex
from pathlib import Path

import pytest

from mvm.cli import run

README = (Path(__file__).parent.parent / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


COMMANDS = [
    line.split("#")[0].strip() for block in blocks("bash") for line in block.splitlines() if line.startswith("mvm")
]


@pytest.mark.parametrize("code", blocks("python"))
def test_python_blocks_run(code: str) -> None:
    names: dict[str, object] = {}
    exec(compile(code, "README.md", "exec"), names)
    assert names["images"].shape == (8, 1, 8, 8)  # ty: ignore[unresolved-attribute]


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_run(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shorter = ["--train.steps", "3"] if "train" in command else []
    assert run([*shlex.split(command)[1:], *shorter]) == 0


def test_opens_with_the_two_commands() -> None:
    assert [line.split()[:2] for line in blocks("bash")[0].splitlines()] == [["make", "demo"], ["make", "test"]]


def test_links_lead_somewhere() -> None:
    root = Path(__file__).parent.parent
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert (root / target).exists(), target
