"""The models a page offers: loaded when first asked for, then shared by all visitors, who only read them."""

import threading
from collections.abc import Sequence
from pathlib import Path

import torch

from mvm.model import Model, is_model, load
from mvm.published import shipped_folder, shipped_models


def _bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def offered(given: Sequence[str]) -> list[str]:
    """Return the names of models: those given, those in a given folder, then the shipped, smallest first.

    The first is what a visitor sees first, so a shipped one that is quick stands before the others.
    """
    found: list[str] = []
    for name in given:
        inside = sorted(str(path) for path in Path(name).glob("*") if path.is_dir() and is_model(str(path)))
        if not is_model(name) and not inside:
            raise ValueError(f"'{name}' is neither a run or an exported model, nor a folder that holds any")
        found += [name] if is_model(name) else inside
    shipped = sorted(shipped_models(), key=lambda name: _bytes(shipped_folder(name)))
    return list(dict.fromkeys([*found, *shipped]))


class Shelf:
    """Models by name, on one device."""

    def __init__(self, names: Sequence[str], device: torch.device) -> None:
        if not names:
            raise ValueError("there is no model to show; give a run directory: mvm app RUN")
        self.names, self.device = list(names), device
        self._loaded: dict[str, Model] = {}
        self._alone = threading.Lock()

    def get(self, name: str) -> Model:
        """Return a model; a name that is not offered is refused, as a page must not open any folder it is told."""
        if name not in self.names:
            raise ValueError(f"model '{name}' is not on this page; it has: {', '.join(self.names)}")
        with self._alone:
            if name not in self._loaded:
                self._loaded[name] = load(name).to(self.device)
            return self._loaded[name]
