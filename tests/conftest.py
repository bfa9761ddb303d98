"""One thread per test process: two threads on a loaded machine ran ten times slower."""

import os

import pytest
import torch

torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")


def _asked_seconds(item: pytest.Item) -> float:
    marker = item.get_closest_marker("timeout")
    return marker.args[0] if marker else 0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=_asked_seconds, reverse=True)  # the longest first: one that begins last is waited for
    if os.environ.get("MVM_SLOW"):
        return
    for item in items:
        if "slow" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="slow: set MVM_SLOW=1 to run (.ci/run does)"))
