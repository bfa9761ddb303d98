"""The `mvm` command. Errors name the option, the value and the remedy, and exit with code 2."""

import errno
import os
import re
import sys

from cyclopts import CycloptsError, UnknownOptionError, UnusedCliTokensError

from mvm.cli import data, judge, look, publish, report, sample, speed, sweep, train
from mvm.cli.app import INTERRUPTED, USAGE_ERROR, Overrides, app
from mvm.cli.export_onnx import onnx as onnx
from mvm.cli.tune import tune as tune
from mvm.cli.web import web as web
from mvm.process import keep_freed_memory, share_cores

__all__ = [
    "app",
    "data",
    "judge",
    "look",
    "main",
    "publish",
    "report",
    "run",
    "sample",
    "speed",
    "split_overrides",
    "sweep",
    "train",
]


def split_overrides(tokens: list[str]) -> tuple[list[str], Overrides]:
    """Return the command line without its dotted options, and those: {"train.lr": "3e-4"}.

    A list goes on after a comma: `--classes ship, horse` is one value, as people write it.
    """
    tokens = list(tokens)
    for place in range(len(tokens) - 1, 0, -1):
        if tokens[place - 1].endswith(",") and not tokens[place].startswith("-"):
            tokens[place - 1 : place + 1] = [tokens[place - 1] + tokens[place]]
    rest: list[str] = []
    found: Overrides = {}
    waiting = iter(tokens)
    for token in waiting:
        name, equals, value = token.removeprefix("--").partition("=")
        if not token.startswith("--") or "." not in name:
            rest.append(token)
            continue
        value = value if equals else next(waiting, None)
        if value is None or (not equals and value.startswith("--")):  # the next option, not a value
            raise ValueError(f"--{name} needs a value, as in --{name} VALUE")
        found[name] = value
    return rest, found


# torch's words, of its CUDA allocator and of its CPU one; the latter raises a plain RuntimeError
OUT_OF_MEMORY = re.compile("out of memory|can't allocate memory|not enough memory")
LESS_MEMORY = {"train": "try --engine.accumulate 4, or a smaller recipe", "bench": "try --engine.accumulate 4"}
FEWER = "try a smaller --batch"
_FILE_IN_THE_WAY = "a file is in the way; name another path"
REMEDIES = {
    errno.EEXIST: _FILE_IN_THE_WAY,
    errno.ENOTDIR: _FILE_IN_THE_WAY,
    errno.EISDIR: "a folder is in the way; name another path",
    errno.ENOENT: "check the path, and that this is a place where files can be made",
    errno.EACCES: "name another path, or ask for the right to use it",
    errno.EPERM: "name another path, or ask for the right to use it",
    errno.EROFS: "name another path",
    errno.ENOSPC: "make room, and run it again",
}


def _told(error: Exception, command: str) -> str:
    """Return an error's words; of the system's, which name no remedy, with one."""
    if isinstance(error, UnknownOptionError):
        return _unknown((error.token.keyword or error.token.value).split("=")[0], command) or str(error)
    if isinstance(error, UnusedCliTokensError) and command == "train":
        return f"{error} A run that is resumed knows its recipe: mvm train --resume RUN"
    if not isinstance(error, OSError) or error.filename is None:
        return str(error)
    remedy = REMEDIES.get(error.errno or 0, "")
    return f"'{error.filename}': {error.strerror}" + (f"; {remedy}" if remedy else "")


def _unknown(option: str, command: str) -> str:
    """Return the error on an option that a command lacks and other projects have; "" for any other."""
    name = option.removeprefix("--")
    if command == "sample" and (ours := sample.USUAL.get(name.replace("-", "_"))):
        return f"unknown option '{option}'; did you mean {ours}? See: mvm sample --help"
    if command in ("train", "bench"):
        from mvm.recipes.docs import meant, unknown_option
        from mvm.recipes.reading import every_option

        known = [known for known in every_option() if "." in known]
        if meant(name, known):
            return unknown_option(name, known)
    return ""


def run(tokens: list[str]) -> int:
    """Return the exit code of a command line."""
    options: dict[str, object] = {"exit_on_error": False, "print_error": False}
    try:
        rest, overrides = split_overrides(tokens)
        if overrides and rest[:1] not in (["train"], ["bench"]):
            raise ValueError(
                f"unknown option '--{next(iter(overrides))}'; dotted options belong to: mvm train, mvm bench"
            )
        command, bound, _ = app.parse_args(rest, **options)  # ty: ignore[invalid-argument-type]
        if overrides:
            bound.arguments["overrides"] = overrides
        return int(command(*bound.args, **bound.kwargs) or 0)
    except (CycloptsError, ValueError, FloatingPointError, OSError) as error:
        from mvm.untrusted import printable

        lines = (
            printable(line) for line in _told(error, "".join(tokens[:1])).split("\n")
        )  # names in it may be another's
        sys.stderr.write("mvm: " + "\n".join(lines) + "\n")  # one piece: torchrun's processes speak at once
        return USAGE_ERROR
    except KeyboardInterrupt:
        print("\nmvm: stopped", file=sys.stderr)
        return INTERRUPTED
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and not OUT_OF_MEMORY.search(str(error)):
            raise
        first = next(iter(str(error).splitlines()), "") or "the host has no more"
        print(f"mvm: out of memory ({first}); {LESS_MEMORY.get(tokens[0], FEWER)}", file=sys.stderr)
        return USAGE_ERROR


def main() -> None:
    """Run the command line of this process.

    One of torchrun's ends at once, without Python's own farewell: gloo's threads may outlive their group there and
    then abort the process, whose work is done (one in hundreds of runs on a busy machine).
    """
    share_cores()
    keep_freed_memory()
    code = run(sys.argv[1:])
    if "TORCHELASTIC_RUN_ID" in os.environ:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)
