"""Help reads as pages do: commands and options in groups, examples that are true, short sentences in plain words."""

import inspect
import io
import re
import shlex

import pytest
from cyclopts import App
from rich.console import Console

from mvm.cli import app, split_overrides
from mvm.cli.app import examples
from mvm.recipes import load_recipe, override, shipped
from mvm.recipes.docs import option_docs, table_docs

WIDTH, SENTENCE = 80, 35
# Commands by what they are for, and what their options are about: both in the order of the help.
COMMANDS = {
    "Start": ["demo", "models"],
    "Train": ["bench", "data", "ema", "options", "recipes", "report", "train", "tune"],
    "Sample": ["app", "edit", "sample"],
    "Evaluate": ["compare", "eval", "sweep", "verify"],
    "Share": ["convert", "export", "onnx", "push"],
}
GROUPS = [
    "Arguments", "Training", "Input", "Editing", "Images", "Sampling", "Guidance", "Measurement", "Features", "Model",
    "Output", "Server", "Hardware",
]  # fmt: skip
# Options whose name means one thing in most commands and another here.
OTHER_MEANING = {
    "train": ("--seed",),
    "demo": ("--seed",),
    "data prepare": ("--condition", "--classes"),
    "data stats": ("--encoder",),
    "convert": ("--classes", "--encoder", "--factor"),
    "compare": ("--encoder",),
    "eval": ("--encoder",),
    "sweep": ("--encoder",),
}
PRIVATE = re.compile(
    r"\b(told|by heart|laws? of|mended|by the clock|kept apart|stands?|is said|asked for|goes? on|gone round"
    r"|goes? round|passes|earlier default|found and fixed|was lost)\b"
    r"|(?<![Ll]earning )\brate\b"
)


def commands(of: App = app, path: tuple[str, ...] = ()) -> dict[str, App]:
    """Return every command by its words, `data` and `data prepare` alike."""
    found = {}
    for name in of:
        if not name.startswith("-"):
            words = (*path, name)
            found[" ".join(words)] = of[name]
            found |= commands(of[name], words)
    return found


ALL = commands()


def arguments(command: str):
    """Return what a command takes; nothing of one that only holds others."""
    return list(ALL[command].assemble_argument_collection(parse_docstring=True)) if ALL[command].default_command else []


def help_of(command: str, width: int = WIDTH) -> str:
    file = io.StringIO()
    app.help_print(command.split(), console=Console(file=file, width=width))
    return file.getvalue()


def example_lines(of: App) -> list[str]:
    title, *lines = of.help_epilogue.splitlines()
    assert title == "Examples:"
    return lines


def sentences(text: str) -> list[str]:
    blocks = re.split(r"\n\s*\n|\n(?=- )", text)
    return [one for block in blocks for one in re.split(r"(?<=[.!?:;])\s+", " ".join(block.split()))]


def description(of: App) -> str:
    """Return a command's help without that of its options."""
    return re.split(r"\nParameters\n-+\n", inspect.cleandoc(of.help))[0]


def texts(command: str) -> list[str]:
    return [
        description(ALL[command]),
        *(argument.parameter.help or "" for argument in arguments(command) if shown(argument)),
    ]


def shown(argument) -> bool:
    return argument.show and not argument.children


# --- groups -------------------------------------------------------------------------------------------------------


def test_commands_are_listed_by_what_they_are_for():
    listed, group = {}, ""
    for line in help_of("").splitlines():
        if title := re.match(r"╭─ (.+?) ─", line):
            group = title[1]
        elif name := re.match(r"│ ([a-z]+)  ", line):
            listed.setdefault(group, []).append(name[1])
    assert listed == COMMANDS
    assert list(listed) == list(COMMANDS)


@pytest.mark.parametrize("command", ALL)
def test_every_option_belongs_to_a_known_group(command):
    for argument in filter(shown, arguments(command)):
        (group,) = argument.parameter.group
        assert group.name in GROUPS, argument.name
    titles = re.findall(r"^╭─ (.+?) ─", help_of(command), re.MULTILINE)
    assert "Parameters" not in titles
    if titles != ["Commands"]:
        assert titles == [group for group in GROUPS if group in titles]


def test_an_option_has_one_group_in_all_commands():
    groups = {}
    for command in ALL:
        for argument in filter(shown, arguments(command)):
            if argument.name.startswith("-") and argument.name not in OTHER_MEANING.get(command, ()):
                groups.setdefault(argument.name, set()).add(argument.parameter.group[0].name)
    assert {name: found for name, found in groups.items() if len(found) > 1} == {}


# --- examples -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["", *ALL])
def test_examples_can_be_typed(command):
    of = ALL[command] if command else app
    lines = example_lines(of)
    assert 1 <= len(lines) <= 4
    for line in lines:
        assert len(line) <= WIDTH, line
        typed, _, what = line.partition("  # ")
        assert what
        words = shlex.split(typed)
        if ">" in words:
            words = words[: words.index(">")]
        assert words[0] == "mvm"
        rest, overrides = split_overrides(words[1:])
        app.parse_args(rest, exit_on_error=False, print_error=False)
        if rest[0] in ("train", "bench") and rest[1] in shipped():
            override(load_recipe(rest[1]), overrides)
    if command:  # most show the command itself
        assert lines[0].startswith(f"  mvm {command} ") or lines[0].strip() == f"mvm {command}"


@pytest.mark.parametrize("command", ["sample", "data prepare", "edit inpaint"])
def test_help_ends_with_its_own_examples(command):
    out = help_of(command).rstrip().splitlines()
    assert out[-len(example_lines(ALL[command])) :] == example_lines(ALL[command])
    assert out[0].startswith(f"Usage: mvm {command} ")


def test_examples_are_aligned():
    assert examples("mvm a  # one", "mvm bc  # two") == "Examples:\n  mvm a   # one\n  mvm bc  # two"


# --- words --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ALL)
def test_sentences_of_help_are_short_and_plain(command):
    for text in texts(command):
        assert text
        assert not [one for one in sentences(text) if len(one.split()) > SENTENCE]
        assert not PRIVATE.search(text), text
    for argument in filter(shown, arguments(command)):
        assert argument.parameter.help.endswith("."), argument.name


@pytest.mark.parametrize("name", ["digits", "imagenette-ddt-clip", "imagenette-rae-s"])
def test_sentences_of_options_are_short_and_plain(name):
    recipe = load_recipe(name)
    for text in [*table_docs(recipe).values(), *(doc.meaning for doc in option_docs(recipe).values())]:
        assert not [one for one in sentences(text) if len(one.split()) > SENTENCE], text
        assert not PRIVATE.search(text), text


def test_private_words_are_found():
    """The check itself: it sees what it should."""
    assert PRIVATE.search("At four times the rate.")
    assert PRIVATE.search("Training goes on.")
    assert not PRIVATE.search("The learning rate.")
    assert len(sentences("One. Two: three\n\n- four\n- five")) == 5


@pytest.mark.parametrize(
    ("command", "option", "default"),
    [
        ("sample", "--cfg", "the model's"),
        ("sample", "--num", "16"),
        ("sample", "--kernels", "on"),
        ("sample", "--compile", None),
        ("sample", "--classes", None),
        ("sweep", "--nfe", "8,13,26"),
        ("sweep", "--cfg", None),
    ],
)
def test_defaults_are_shown(command, option, default):
    line = next(line for line in help_of(command, width=1000).splitlines() if re.match(rf"│ +{option} ", line))
    found = re.search(r"\[default: (.*?)\]", line)
    assert (found and found[1]) == default


@pytest.mark.parametrize("command", ["data prepare", "sample"])
def test_defaults_on_the_page_are_those_of_the_terminal(command):
    section = re.split(rf"(?m)^##+ mvm {command}$", app.generate_docs(output_format="markdown"))[1].split("\n## ")[0]
    assert "*[default: auto]*" in section
    assert not re.search(r'default: (""|False|None)', section)


def test_the_axes_of_a_sweep_are_shown_as_they_are():
    from mvm.evaluation.cells import USUAL

    shown_nfe = {argument.name: argument.parameter.show_default for argument in arguments("sweep")}
    assert tuple(map(int, shown_nfe["--nfe"].split(","))) == USUAL["nfe"]
    assert tuple(map(float, shown_nfe["--rho"].split(","))) == USUAL["rho"]


def test_lines_of_the_source_do_not_show():
    out = help_of("eval", width=1000)
    assert "Under torchrun the processes share the work. Features are always float32.\n" in out
    assert "\n- a folder that `mvm data prepare` wrote, or data:digits\n" in out  # a list stays one
