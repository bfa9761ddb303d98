"""`mvm verify`: the mathematics checked on exact oracles, on the CPU, in under a minute."""

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from tqdm import tqdm

from mvm.verify import editing, solvers, theorems
from mvm.verify.check import Check, Checks

ALL: tuple[Callable[[], Checks], ...] = (
    theorems.check_characteristic_functions,
    theorems.check_reverse_dynamics,
    theorems.check_score,
    theorems.check_regression,
    theorems.check_conversions,
    solvers.check_orders,
    solvers.check_shared_marginals,
    solvers.check_defaults,
    solvers.check_digits,
    solvers.check_brightness,
    solvers.check_adaptive,
    solvers.check_schedules,
    solvers.check_likelihood,
    editing.check_gaussian_posterior,
    editing.check_posteriors,
    editing.check_inversion,
)


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
