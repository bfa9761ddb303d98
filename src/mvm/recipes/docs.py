"""What each option of a recipe means, read from the docstring under its field; and other projects' names for it."""

import inspect
import re
import shlex
from collections.abc import Iterable, Iterator
from dataclasses import MISSING, dataclass, fields, is_dataclass
from typing import Any, get_type_hints

from mvm.options import closest, meanings
from mvm.recipes.schema import TASK

TYPES: dict[Any, str] = {tuple[float, ...]: "numbers", tuple[int, ...]: "whole numbers"}


@dataclass(frozen=True)
class OptionDoc:
    """An option: what it means, its type in words, the value it has where a recipe says nothing, and its choices."""

    meaning: str
    type: str
    default: Any
    choices: tuple[str, ...] = ()


def tables(config: Any, where: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted name, table) of a recipe, itself first, under the name ""."""
    yield where, config
    for entry in fields(config):
        if is_dataclass(value := getattr(config, entry.name)):
            yield from tables(value, f"{where}.{entry.name}" if where else entry.name)


def table_docs(recipe: Any) -> dict[str, str]:
    """Return the tables of a recipe by dotted name, "" the recipe itself, each with what it is about in a line."""
    return {name: (inspect.getdoc(type(table)) or "").split("\n")[0] for name, table in tables(recipe)}


def option_docs(recipe: Any) -> dict[str, OptionDoc]:
    """Return what each option of a recipe means, by dotted name; options come table by table."""
    docs = {}
    for where, table in tables(recipe):
        kinds, words = get_type_hints(type(table)), meanings(type(table))
        for entry in fields(table):
            if entry.name != TASK and entry.default is not MISSING:  # tables are made by a factory
                kind, meaning = kinds[entry.name], words.get(entry.name, "")
                choices = re.search(r"One of: ([^.]+)\.", meaning)
                names = tuple(choices[1].split(", ")) if choices else ()
                option = OptionDoc(meaning, TYPES.get(kind) or kind.__name__, entry.default, names)
                docs[f"{where}.{entry.name}".lstrip(".")] = option
    return docs


def as_typed(value: Any) -> str:
    """Return an option's value as a shell takes it: a,b for a list, and quotes where an empty one would be lost."""
    if isinstance(value, bool):
        return str(value).lower()
    return shlex.quote(",".join(map(str, value)) if isinstance(value, tuple) else str(value))


# Names in other projects, ours, and what to know besides. A name that is the last part of an option needs no entry.
_USUAL = (
    ("learning_rate base_lr max_lr", "train.lr", ""),
    ("epochs num_epochs max_epochs num_train_epochs", "train.steps", "steps = epochs * images / train.batch"),
    ("max_steps iterations iters num_steps num_iterations max_train_steps", "train.steps", ""),
    ("batch_size bs global_batch_size train_batch_size", "train.batch", ""),
    ("per_device_train_batch_size", "train.batch", "which counts the images of all GPUs"),
    ("ema_decay ema_rate", "train.ema", ""),
    ("wd", "train.weight_decay", ""),
    ("warmup_steps lr_warmup_steps num_warmup_steps warmup_iters", "train.warmup", ""),
    ("lr_scheduler lr_scheduler_type lr_schedule scheduler", "train.decay", ""),
    ("grad_clip max_grad_norm gradient_clip_val clip_grad", "train.clip", ""),
    ("betas adam_beta1", "train.beta1", ""),
    ("betas adam_beta2", "train.beta2", ""),
    ("optim", "train.optimizer", ""),
    ("log_interval logging_steps", "train.log_every", ""),
    ("save_interval save_steps checkpointing_steps ckpt_every", "train.save_every", ""),
    ("gradient_accumulation_steps accumulation grad_accum accumulate_grad_batches", "engine.accumulate", ""),
    ("mixed_precision fp16 bf16 amp dtype", "engine.precision", ""),
    ("gradient_checkpointing activation_checkpointing", "engine.recompute", ""),
    ("num_workers workers", "--workers of mvm data prepare", "training reads one step ahead, without workers"),
    ("num_classes", "data.classes", "read from the folder of data.path"),
    ("image_size img_size resolution", "data.size", "read from the folder, as mvm data prepare --size made it"),
    ("data data_dir data_path train_data_dir dataset", "data.path", "with --data.name folder"),
    ("random_flip hflip", "data.mirror", ""),
    ("model", "network.size", ""),
    ("patch_size", "network.patch", ""),
    ("num_layers n_layers", "network.depth", ""),
    ("hidden_size hidden_dim embed_dim dim", "network.width", ""),
    ("num_heads n_heads", "network.heads", ""),
    ("cond_drop class_dropout_prob cfg_dropout uncond_prob", "objective.label_drop", ""),
    ("prediction_type parameterization", "objective.kind", ""),
    ("guidance_scale cfg_scale", "sample.cfg", ""),
    ("num_inference_steps sampling_steps num_sampling_steps num_steps", "sample.nfe", ""),
    ("sampler", "sample.solver", ""),
    ("global_seed random_seed", "--seed", ""),
    ("output_dir out_dir save_dir logdir run_name", "--out", ""),
    ("resume_from resume_from_checkpoint", "--resume", "the newest checkpoint in OUT"),
)


def meant(name: str, known: Iterable[str]) -> list[tuple[str, str]]:
    """Return the options that an unknown name may mean, with remarks: other projects' names first, then misspellings.

    An option of the table that was named goes before those of other tables.
    """
    known = list(dict.fromkeys(known))
    table, _, last = name.replace("-", "_").lower().rpartition(".")
    usual = [(ours, remark) for theirs, ours, remark in _USUAL if last in theirs.split()]
    usual = [(ours, remark) for ours, remark in usual if ours in known or ours.startswith("--")]
    same = [(option, "") for option in known if "." in option and option.rpartition(".")[2] == last]
    here = [each for each in usual + same if table and each[0].rpartition(".")[0] == table]
    siblings = {option.rpartition(".")[2]: option for option in known if option.rpartition(".")[0] == table}
    alike = [siblings[one] for one in closest(last, siblings)] if siblings else closest(name, known if table else ())
    return here or usual or same or [(option, "") for option in alike]


def hint(name: str, known: Iterable[str]) -> str:
    """Return " (did you mean 'train.lr'?)" for an unknown key of a recipe file, or "" when nothing is likely."""
    if not (likely := dict(meant(name, known))):
        return ""
    remarks = "".join(f" {remark}" for remark in dict.fromkeys(likely.values()) if remark)
    return f" (did you mean {' or '.join(map(repr, likely))}?{remarks})"


def unknown_option(name: str, known: Iterable[str]) -> str:
    """Return the error on an option of the command line, given without dashes, that is none of the recipe's."""
    if not (likely := dict(meant(name, known))):
        return f"unknown option '--{name}'; see: mvm options"
    options = " or ".join(option if option.startswith("--") else f"--{option}" for option in likely)
    remarks = "; ".join(remark for remark in dict.fromkeys(likely.values()) if remark)
    first = next(iter(likely))
    page = "mvm train --help" if first.startswith("--") else f"mvm options {first.rpartition('.')[2]}"
    return f"unknown option '--{name}'; did you mean {options}{remarks and f' ({remarks})'}? See: {page}"
