"""`mvm verify`: the mathematics checked on exact oracles, on the CPU, in under a minute."""

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from tqdm import tqdm

from mvm.verify.check import Check, Checks
from mvm.verify.solvers import (
    DIGITS_BARS,
    RHOS,
    STD_BARS,
    STDS,
    Law,
    check_adaptive,
    check_brightness,
    check_defaults,
    check_digits,
    check_likelihood,
    check_orders,
    check_schedules,
    check_shared_marginals,
    digits_oracle,
    image_stds,
    marginal,
    measured_order,
    nonlinear_order,
    rmse,
    sampled_law,
    sampled_stds,
    spectrum_error,
    worst_std_error,
)
from mvm.verify.theorems import (
    check_characteristic_functions,
    check_conversions,
    check_regression,
    check_reverse_dynamics,
    check_score,
)

__all__ = [
    "ALL",
    "DIGITS_BARS",
    "RHOS",
    "STDS",
    "STD_BARS",
    "Check",
    "Checks",
    "Law",
    "as_json",
    "check_adaptive",
    "check_brightness",
    "check_characteristic_functions",
    "check_conversions",
    "check_defaults",
    "check_digits",
    "check_likelihood",
    "check_orders",
    "check_regression",
    "check_reverse_dynamics",
    "check_schedules",
    "check_score",
    "check_shared_marginals",
    "digits_oracle",
    "image_stds",
    "marginal",
    "measured_order",
    "nonlinear_order",
    "rmse",
    "sampled_law",
    "sampled_stds",
    "spectrum_error",
    "verify",
    "worst_std_error",
]

ALL: tuple[Callable[[], Checks], ...] = (
    check_characteristic_functions,
    check_reverse_dynamics,
    check_score,
    check_regression,
    check_conversions,
    check_orders,
    check_shared_marginals,
    check_defaults,
    check_digits,
    check_brightness,
    check_adaptive,
    check_schedules,
    check_likelihood,
)


def verify(progress: bool = True) -> list[Check]:
    """Run every check."""
    results: list[Check] = []
    for group in tqdm(ALL, desc="verify", unit="group", disable=not progress):
        results.extend(group())
    return results


def as_json(results: list[Check]) -> dict[str, Any]:
    """Return {"passed": bool, "checks": [{"name", "value", "limit", "passed"}]}."""
    checks = [{**asdict(check), "passed": check.passed} for check in results]
    for entry in checks:
        entry["comparison"] = ">=" if entry.pop("at_least") else "<="
    return {"passed": all(check.passed for check in results), "checks": checks}
