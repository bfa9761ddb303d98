"""What README and docs/ tell a user to type, typed; links lead somewhere; every page is reached from the README."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from unittest.mock import MagicMock

import numpy as np
import pytest
from PIL import Image

from mvm.cli import app, run, split_overrides
from mvm.recipes import load_recipe, override
from mvm.recipes.reading import every_option
from text_encoders import tiny_encoder

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
OWN_TESTS = (
    "how-to/other-libraries.md",
    "how-to/diffusers.md",
    "how-to/latents.md",
    "how-to/onnx.md",
    "how-to/page.md",
    "how-to/published-checkpoints.md",
)  # another file under tests/ runs what these say
PAGES = {path.relative_to(DOCS).as_posix(): path.read_text(encoding="utf-8") for path in sorted(DOCS.rglob("*.md"))}
PAGES["README.md"] = (ROOT / "README.md").read_text(encoding="utf-8")
TYPED = {name: text for name, text in PAGES.items() if name not in OWN_TESTS}
OWN_IMAGES = "tutorials/own-images.md"

# Commands that are parsed, recipe and options included, but not run: (page, how they begin) -> why.
PARSED = {
    ("README.md", "mvm app"): "serves until Ctrl-C; tests/app opens it in a browser",
    (
        "how-to/fine-tune.md",
        "mvm train cifar10-small --init-from",
    ): "full size; tests/cli/test_init_from.py types small ones",
    ("how-to/fine-tune.md", "mvm sample runs/tuned"): "needs the run before it",
    (
        "results/equal-terms.md",
        "mvm train cifar10-ddpm --objective",
    ): "in place of the line before it; one folder is one run",
    (OWN_IMAGES, "mvm train cifar10-small --init-from"): "full size; tests/cli/test_init_from.py types small ones",
    ("how-to/edit.md", "mvm edit inpaint cifar10 photo.png"): "needs a photo; tests/cli/test_edit_command.py types it",
    ("how-to/edit.md", "mvm edit deblur cifar10 blurred"): "needs the pictures of the Python lines before it",
    ("how-to/many-gpus.md", "mvm train imagenet32-dit-b"): "needs ImageNet and a GPU",
    ("how-to/many-gpus.md", "torchrun --standalone --nproc-per-node 8"): "needs ImageNet and 8 GPUs",
    ("how-to/many-gpus.md", "torchrun --nnodes 2"): "two terminals at once, in tests/training/test_processes.py",
    ("how-to/share-a-model.md", "mvm push exports"): "sends to the hub",
    ("how-to/share-a-model.md", "mvm sample OWNER/"): "asks the hub",
}

# What a page calls by a word in capitals, and where a command is made short, not other.
STAND_INS = {"SOURCE": "pictures", "PHOTOS": "pictures", "WEIGHTS": "weights", "cats": "class-0"}
TINY = {"--network.depth": "1", "--train.batch": "4"}
TRAIN = {**TINY, "--train.steps": "3", "--train.keep_best": "false", "--preview.every": "0"}
SHORT = {
    "train": TRAIN,
    "bench": {**TINY, "--steps": "3", "--samples": "2"},
    "sample": {"--num": "4", "--precision": "fp32"},  # a CPU is slow in bf16
    "sweep": {"--num": "8", "--nfe": "2,3", "--metrics": "fd-pixels", "--precision": "fp32"},
    "tune": {"--num": "2", "--nfe": "2", "--rounds": "1", "--reference-nfe": "3"},
    "compare": {"--num": "8", "--nfe": "2", "--metrics": "fd-pixels", "--blocks": "2"},
    "eval": {"--metrics": "fd-pixels"},
    **{
        f"edit {task}": {"--nfe": "1", "--index": "0,1", "--iterations": "1"}
        for task in ("inpaint", "outpaint", "upscale", "deblur")
    },
    "edit image-to-image": {"--nfe": "1", "--index": "0,1"},
    "data stats": {"--features": "pixels"},
}


def blocks(text: str, *languages: str) -> list[str]:
    return re.findall(rf"```(?:{'|'.join(languages)})\n(.*?)```", text, re.DOTALL)


def commands(block: str) -> list[list[str]]:
    """Return the command lines of a block as words; what installs is not typed, any other program is unknown here."""
    lines = [shlex.split(line, comments=True) for line in block.replace("\\\n", " ").splitlines()]
    lines = [words for words in lines if words and words[0] not in ("pip", "make", "source")]
    assert all(words[0] in ("mvm", "torchrun") for words in lines), lines
    return lines


def changed(words: list[str], options: dict[str, str]) -> list[str]:
    """Return the command with these values, in place of its own where it has them."""
    words = list(words)
    for option, value in options.items():
        if option in words:
            words[words.index(option) + 1] = value
        else:
            words += [option, value]
    return words


def short(words: list[str]) -> list[str]:
    """Return a command line of mvm, without its name, that takes seconds."""
    words = [STAND_INS.get(word, word) for word in words if word != "--compile"]  # the compiler's minute is for a GPU
    if words[0] == "export":
        words.append("--no-grid")  # tests/cli/test_publish_command.py draws it
    options = SHORT.get(words[0], SHORT.get(" ".join(words[:2]), {}))
    if words[0] == "eval" and "--num" in words:  # of a run; files have a number of their own
        options = {**options, "--num": "8"}
    if words[0] == "sample" and "--nfe" in words and "--rho" not in words:  # much noise needs many
        options = {**options, "--nfe": str(min(8, int(words[words.index("--nfe") + 1])))}
    if "dopri5" in words:
        options = {**options, "--tolerance": "0.01"}
    return changed(words, options)


def typed(words: list[str]) -> int:
    """Return the exit code of a command, made short."""
    if words[0] == "mvm":
        return run(short(words[1:]))
    program = words.index("mvm") + 1
    launched = [sys.executable, "-m", "torch.distributed.run", *words[1:program], *short(words[program:])]
    return subprocess.run(launched, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False).returncode


def parse(words: list[str]) -> None:
    """Raise if mvm would not understand the command."""
    rest, overrides = split_overrides(words[words.index("mvm") + 1 :])
    app.parse_args(rest, exit_on_error=False, print_error=False)
    if rest[0] in ("train", "bench"):
        override(load_recipe(rest[1]), overrides)


def only_parsed(page: str, words: list[str]) -> bool:
    return any(page == of and shlex.join(words).startswith(start) for of, start in PARSED)


def draw_pictures(folder: Path) -> None:
    """Pictures of ten classes, none square, some grey."""
    for number in range(30):
        inside = folder / f"class-{number % 10}"
        inside.mkdir(parents=True, exist_ok=True)
        colour = (8 * number, 100, 255 - 8 * number)
        picture = Image.new("RGB", (48, 40), colour)
        picture.paste((255, 255, 255), (number, 5, number + 10, 30))
        (picture.convert("L") if number % 7 == 0 else picture).save(inside / f"{number}.png")


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the pages take for granted: pictures, prepared data, runs."""
    folder = tmp_path_factory.mktemp("prepared")
    draw_pictures(folder / "pictures")
    draw = np.random.default_rng(0)
    captions = [f"a {word} square" for word in ("red", "blue")] * 4
    np.savez(folder / "captioned.npz", images=draw.integers(0, 256, (8, 20, 16, 3), np.uint8), captions=captions)
    vectors = {"images": draw.integers(0, 256, (8, 16, 16, 3), np.uint8), "v": draw.normal(size=(8, 5))}
    np.savez(folder / "vectors.npz", **vectors)
    np.savez(folder / "signals.npz", images=draw.normal(size=(8, 1, 64)).astype(np.float32))
    tiny_encoder(folder / "encoders" / "text", "bert")
    data = str(folder / "data" / "cifar10")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert run(["data", "prepare", "pictures", "--out", "data/cifar10", "--size", "32", "--classes", "10"]) == 0
        train = ["train", "cifar10", "--data.name", "folder", "--data.path", data, "--out", "runs/cifar10"]
        assert run(changed(train, TRAIN)) == 0
    shutil.copytree(folder / "data" / "cifar10", folder / "data" / "photos")
    for name in ("a", "b"):
        shutil.copytree(folder / "runs" / "cifar10", folder / "runs" / name)
    return folder


def first_of_own_images() -> str:
    return blocks(PAGES[OWN_IMAGES], "bash")[0]


BASH = [
    pytest.param(page, block, id=f"{page}-{number}")
    for page, text in TYPED.items()
    for number, block in enumerate(blocks(text, "bash", "sh"))
    if (page, number) != (OWN_IMAGES, 0)  # typed below, in an empty folder
]


@pytest.mark.parametrize(("page", "block"), BASH)
def test_commands_run(page: str, block: str, prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    work = tmp_path / "work"
    shutil.copytree(prepared, work)
    if "runs/photos" in block and "mvm train" not in block:
        (work / "runs" / "a").rename(work / "runs" / "photos")
    if page == "README.md":
        shutil.rmtree(work / "data" / "photos")
        (work / "pictures").rename(work / "photos")
    monkeypatch.chdir(work)
    for words in commands(block):
        if only_parsed(page, words):
            parse(words)
        else:
            assert typed(words) == 0, shlex.join(words)


def mentioned(text: str) -> list[list[str]]:
    """Return the commands of mvm that a page names without typing them: in running text, and in console blocks."""
    running = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    lines = [line for block in blocks(text, "console") for line in block.replace("\\\n", " ").splitlines()]
    found = re.findall(r"(?:^|[^`])`((?:mvm|torchrun) [^`\n]+)`", running)
    return [shlex.split(line, comments=True) for line in (*found, *lines) if line.startswith(("mvm ", "torchrun "))]


@pytest.mark.parametrize("page", PAGES)
def test_commands_that_are_mentioned_exist(page: str) -> None:
    """With these options; what is in capitals stands for a value."""
    for words in mentioned(PAGES[page]):
        command, rest = app, words[words.index("mvm") + 1 :]
        while rest and not rest[0].startswith("-") and rest[0] in command:
            command, rest = command[rest[0]], rest[1:]
        known = {"--help", "--version"}
        if command.default_command:  # `mvm edit` and `mvm data` are names of several
            known |= {name for argument in command.assemble_argument_collection() for name in argument.names}
        options = [word.split("=")[0] for word in rest if word.startswith("--")]
        dotted = [option.removeprefix("--") for option in options if "." in option]
        assert command is not app or not rest or rest[0].startswith(("-", "...")), shlex.join(words)
        assert not [option for option in options if "." not in option and option not in known], shlex.join(words)
        assert not [option for option in dotted if option not in every_option()], shlex.join(words)


@pytest.mark.parametrize("page", PAGES)
def test_programs_that_are_mentioned_exist(page: str) -> None:
    for program in re.findall(r"(?:python|bash) ((?:benchmarks|tools|examples|tests)/[\w/]+\.(?:py|sh))", PAGES[page]):
        assert (ROOT / program).is_file(), program


@pytest.mark.parametrize("page", PAGES)
def test_console_blocks_hold_commands_alone(page: str) -> None:
    """Of what takes a GPU or a file of the reader's; anything else is typed or run, as bash or python."""
    lines = [line for block in blocks(PAGES[page], "console") for line in block.replace("\\\n", " ").splitlines()]
    commands_ = [shlex.split(line, comments=True) for line in lines]
    programs = [next(word for word in words if "=" not in word) for words in commands_ if words]
    assert set(programs) <= {"mvm", "torchrun", "python", "bash"}


def test_every_exception_is_needed() -> None:
    lines = [(page, shlex.join(words)) for page, block in (case.values for case in BASH) for words in commands(block)]
    for of, start in PARSED:
        assert any(page == of and line.startswith(start) for page, line in lines), start


@pytest.mark.parametrize(
    ("page", "code"), [pytest.param(page, code, id=page) for page in TYPED for code in blocks(TYPED[page], "python")]
)
def test_python_blocks_run(page: str, code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "wandb", MagicMock())  # a service: nothing is sent from a test
    exec(compile(code, page, "exec"), {})


def test_the_readme_has_two_commands_that_need_nothing_else() -> None:
    first = blocks(PAGES["README.md"], "bash")[0]
    assert [line.split()[:2] for line in first.splitlines()] == [["make", "demo"], ["make", "test"]]


@pytest.mark.parametrize("page", [page for page in OWN_TESTS if page in PAGES])
def test_other_pages_have_their_own_test(page: str) -> None:
    others = [path for path in (ROOT / "tests").rglob("test_*.py") if path != Path(__file__)]
    assert any(f'"{page}"' in path.read_text(encoding="utf-8") for path in others)


def test_from_a_folder_to_a_report_in_five_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    draw_pictures(tmp_path / "photos")
    five = commands(first_of_own_images())
    assert len(five) == 5
    told = []
    for words in five:
        assert typed(words) == 0, shlex.join(words)
        told.append(capsys.readouterr().out.splitlines()[-1])
    assert told[0] == "data/photos: 30 images of 10 classes, 0 skipped; see: mvm data info data/photos"
    assert told[2] == "runs/photos is at step 3 of 3; sample: mvm sample runs/photos --out grid.png"
    assert told[3] == "wrote 4 images to runs/photos.png; adams, 26 evaluations, 26 network passes each"
    assert told[4] == "wrote runs/photos-report/report.html: 4 cells of 8 images"
    for line in (told[0], told[2], told[3], told[4]):  # the page quotes them, with its own numbers
        assert re.sub(r"\d+", "N", line) in re.sub(r"\d+", "N", PAGES[OWN_IMAGES])
    assert Image.open("runs/photos.png").size[0] > 32
    report = Path("runs/photos-report/report.html").read_text(encoding="utf-8")
    assert "<svg" in report
    assert "data:image/png;base64," in report
    assert not re.search(r'<(script|link|img|iframe)[^>]*(src|href)="(?!data:)', report)
    assert "url(http" not in report


def links(text: str) -> list[str]:
    """Return the targets of links to files here, without what stands in code and without anchors."""
    text = re.sub(r"```.*?```|`[^`\n]*`", "", text, flags=re.DOTALL)
    return [target for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text) if "://" not in target]


def documents() -> list[Path]:
    tracked = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    found = [ROOT / line for line in tracked.stdout.splitlines()] or [ROOT / "README.md", *DOCS.glob("*.md")]
    return [path for path in found if path.is_file()]


@pytest.mark.parametrize("document", documents(), ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(document: Path) -> None:
    for target in links(document.read_text(encoding="utf-8")):
        assert (document.parent / target).exists(), target


def test_every_page_is_reached_from_the_readme() -> None:
    waiting, seen = [ROOT / "README.md"], set()
    while waiting:
        page = waiting.pop()
        seen.add(page)
        found = {(page.parent / target).resolve() for target in links(page.read_text(encoding="utf-8"))}
        waiting += [path for path in found - seen if path.suffix == ".md" and path.is_file()]
    assert not [path for path in DOCS.rglob("*.md") if path.resolve() not in seen]
