"""`mvm verify`: the mathematics checked on exact oracles, on the CPU, in under a minute."""

from dataclasses import asdict
from typing import Any

from tqdm import tqdm

from mvm.verify import editing, solvers, theorems
from mvm.verify.check import Check

MODULES = (theorems, solvers, editing)
ALL = [check for module in MODULES for name, check in vars(module).items() if name.startswith("check_")]


def verify(progress: bool = True) -> list[Check]:
    """Run every check."""
    groups = tqdm(ALL, desc="verify", unit="group", disable=not progress)
    return [check for group in groups for check in group()]


def as_json(results: list[Check]) -> dict[str, Any]:
    """Return {"passed": bool, "checks": [{"name", "value", "limit", "passed", "comparison"}]}."""
    checks = [{**asdict(check), "passed": check.passed} for check in results]
    for entry in checks:
        entry["comparison"] = ">=" if entry.pop("at_least") else "<="
    return {"passed": all(check.passed for check in results), "checks": checks}
