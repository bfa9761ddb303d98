"""The fuzzer's formats of what runs keep beside their weights: encoder weights, features, cells of a sweep."""

import json

import fuzz_seeds
import numpy as np
import torch
from fuzz_format import Format
from fuzz_mutate import spoiled_json, spoiled_npy

from mvm.evaluation import sweep
from mvm.network import dinov3
from mvm.training.features import BankKey, DiskBank


class MetaWeights(Format):
    name, file, share = "Meta's .pth of an encoder", "dinov3.pth", 0.5

    def lay(self) -> list[bytes]:
        return fuzz_seeds.pth()

    def read(self) -> None:
        dinov3.read_weights(self.folder / self.file)


class FeatureIndex(Format):
    """A folder of features; subclasses spoil one of its files."""

    name, file, share = "index.json of features", "index.json", 0.5
    spoil = staticmethod(spoiled_json)
    key = BankKey("encoder", "0" * 64, 16, 2, 3, "float16", 5, "1" * 64)

    def lay(self) -> list[bytes]:
        self.key.parts(self.folder).write_missing(lambda part: [np.ones((2, 5, 4, 3), np.int16)], progress=False)
        return [(self.folder / self.file).read_bytes()]

    def read(self) -> None:
        bank = DiskBank(self.key, self.folder, "cpu")
        bank.lookup(torch.tensor([4]), torch.tensor([True]))


class FeaturePart(FeatureIndex):
    name, file, share = "part-*.npy of features", "part-00000.npy", 0.5
    spoil = staticmethod(spoiled_npy)


class Cell(Format):
    name, file, share = "cell of a sweep", "cell.json", 0.5
    spoil = staticmethod(spoiled_json)

    def lay(self) -> list[bytes]:
        result = {"solver": "adams", "nfe": 8, "rho": 0.0, "cfg": 1.0, "low": 0.0, "high": 1.0, "evaluations": 8}
        result |= {"passes": 8, "seconds": 1.5, "grid": "cells/cell.png", "internal": 1.0}
        result["metrics"] = {"fd-pixels": {"value": 1.5, "error": float(np.float32(0.1)), "note": ""}}
        facts = {"networks": {"fd-pixels": {}}, "reference": {"name": "digits"}, "software": {}, "warnings": ["few"]}
        return [json.dumps({"settings": {}, "result": result, "facts": facts}).encode()]

    def read(self) -> None:
        sweep._read_cell(self.folder / self.file)


KEPT: tuple[type[Format], ...] = (MetaWeights, FeatureIndex, FeaturePart, Cell)
