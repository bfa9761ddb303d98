"""The `mvm` command. Errors name the option, the value and the remedy, and exit with code 2."""

import errno
import os
import re
import sys
import warnings
from pathlib import Path
from typing import Any

from cyclopts import CycloptsError, UnknownOptionError, UnusedCliTokensError

from mvm.cli import data, edit, judge, look, publish, sample, train  # noqa: F401 (their commands)
from mvm.cli.app import INTERRUPTED, USAGE_ERROR, Overrides, app
from mvm.process import keep_freed_memory, share_cores


def split_overrides(tokens: list[str]) -> tuple[list[str], Overrides]:
    """Return the command line without its dotted options, and those: {"train.lr": "3e-4"}.

    A list goes on after a comma: `--classes ship, horse` is one value, as people write it.
    """
    tokens = list(tokens)
    for i in range(len(tokens) - 1, 0, -1):
        if tokens[i - 1].endswith(",") and not tokens[i].startswith("-"):
            tokens[i - 1 : i + 1] = [tokens[i - 1] + tokens[i]]
    rest: list[str] = []
    overrides: Overrides = {}
    waiting = iter(tokens)
    for token in waiting:
        name, equals, value = token.removeprefix("--").partition("=")
        if not token.startswith("--") or "." not in name:
            rest.append(token)
            continue
        value = value if equals else next(waiting, None)
        if value is None or (not equals and value.startswith("--")):  # the next option, not a value
            raise ValueError(f"--{name} needs a value, as in --{name} VALUE")
        overrides[name] = value
    return rest, overrides


# messages of torch's CUDA allocator and of its CPU one, which raises a plain RuntimeError
OUT_OF_MEMORY = re.compile("out of memory|can't allocate memory|not enough memory")
LESS_MEMORY = {"train": "try --engine.accumulate 4, or a smaller recipe", "bench": "try --engine.accumulate 4"}
FEWER = "try a smaller --batch"
REMEDIES = {
    **dict.fromkeys((errno.EEXIST, errno.ENOTDIR), "a file is in the way; name another path"),
    errno.EISDIR: "a folder is in the way; name another path",
    errno.ENOENT: "check the path, and that files can be created there",
    **dict.fromkeys((errno.EACCES, errno.EPERM), "name another path, or get permission for this one"),
    errno.EROFS: "name another path",
    errno.ENOSPC: "free some space, and run the command again",
}


# Options as other projects call them.
USUAL = {
    **dict.fromkeys(("steps", "num_steps", "num_inference_steps", "num_sampling_steps", "sampling_steps"), "--nfe"),
    **dict.fromkeys(("guidance_scale", "cfg_scale", "scale", "guidance"), "--cfg"),
    **dict.fromkeys(("n", "count", "num_images", "num_samples", "num_images_per_prompt"), "--num"),
    **dict.fromkeys(("batch_size", "bs"), "--batch"),
    **dict.fromkeys(("sampler", "scheduler"), "--solver"),
    **dict.fromkeys(("output", "output_dir", "out_dir"), "--out"),
}


def _message(error: Exception, command: str) -> str:
    """Return an error's message; those of the system name no remedy and get one."""
    if isinstance(error, UnknownOptionError):
        return _unknown((error.token.keyword or error.token.value).split("=")[0], command) or str(error)
    if isinstance(error, UnusedCliTokensError) and command == "train":
        return f"{error} To resume, name the run alone, which holds its recipe: mvm train --resume RUN"
    if not isinstance(error, OSError) or error.filename is None:
        return str(error)
    remedy = REMEDIES.get(error.errno or 0, "")
    return f"'{error.filename}': {error.strerror}" + (f"; {remedy}" if remedy else "")


def _unknown(option: str, command: str) -> str:
    """Return the message on an option that other projects have and this command lacks; "" for any other."""
    name = option.removeprefix("--")
    if command in ("train", "bench"):
        from mvm.recipes.docs import meant, unknown_option
        from mvm.recipes.reading import every_option

        known = [known for known in every_option() if "." in known]
        if meant(name, known):
            return unknown_option(name, known)
    ours = USUAL.get(name.replace("-", "_"))
    if ours and any(ours in argument.names for argument in app[command].assemble_argument_collection()):
        return f"unknown option '{option}'; did you mean {ours}? See: mvm {command} --help"
    return ""


def run(tokens: list[str]) -> int:
    """Return the exit code of a command line."""
    options: dict[str, object] = {"exit_on_error": False, "print_error": False}
    try:
        rest, overrides = split_overrides(tokens)
        if overrides and rest[:1] not in (["train"], ["bench"]):
            odd = next(iter(overrides))
            raise ValueError(f"unknown option '--{odd}'; dotted options belong to: mvm train, mvm bench")
        command, bound, _ = app.parse_args(rest, **options)  # ty: ignore[invalid-argument-type]
        if overrides:
            bound.arguments["overrides"] = overrides
        return int(command(*bound.args, **bound.kwargs) or 0)
    except (CycloptsError, ValueError, FloatingPointError, OSError) as error:
        from mvm.untrusted import printable

        # names in the message may come from a file; written in one piece, as torchrun's processes may print at once
        message = "\n".join(map(printable, _message(error, "".join(tokens[:1])).split("\n")))
        sys.stderr.write(f"mvm: {message}\n")
        return USAGE_ERROR
    except KeyboardInterrupt:
        print("\nmvm: stopped", file=sys.stderr)
        return INTERRUPTED
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and not OUT_OF_MEMORY.search(str(error)):
            raise
        first = next(iter(str(error).splitlines()), "") or "no host memory is left"
        print(f"mvm: out of memory ({first}); {LESS_MEMORY.get(tokens[0], FEWER)}", file=sys.stderr)
        return USAGE_ERROR


PACKAGE = Path(__file__).parent.parent
_show_with_source = warnings.showwarning


def _show(message: Warning | str, category: type[Warning], filename: str, lineno: int, *rest: Any) -> None:
    """Print a warning of this package as its words alone, on a line of their own beside a progress bar."""
    if PACKAGE not in Path(filename).parents:
        _show_with_source(message, category, filename, lineno, *rest)
        return
    from tqdm import tqdm

    tqdm.write(f"mvm: warning: {message}", file=sys.stderr)


def main() -> None:
    """Run the command line of this process.

    A process of torchrun ends at once, without Python's own cleanup: gloo's threads may outlive their group there and
    then abort the process, whose work is done (one in hundreds of runs on a busy machine).
    """
    share_cores()
    keep_freed_memory()
    warnings.showwarning = _show  # ty: ignore[invalid-assignment]
    if sys.stdout is not None:  # as it is where the shell has closed it
        sys.stdout.reconfigure(errors="backslashreplace")  # ty: ignore[missing-union-attribute]  as stderr
    code = run(sys.argv[1:])
    if "TORCHELASTIC_RUN_ID" in os.environ:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)
