"""All checks of a method's contract, in one call."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from kinfed.data import Federation
from kinfed.testing import declarations, hardship, invariance, messages, running_statistics  # noqa: F401  # their checks
from kinfed.testing.workbench import CHECKS, Bench, Method

# What a class or the engine decides, whatever the options and the data: where a method has passed all checks, its
# variants need not pass these again.
OF_THE_CLASS = (
    *("settings_are_plain", "message_types_are_declared", "workers_do_not_matter", "gradient_paths_agree"),
    *("outsiders_are_left_alone", "global_generators_are_untouched", "who_is_evaluated_does_not_matter"),
)
VARIANT_CHECKS = tuple(name for name in CHECKS if name not in OF_THE_CLASS)


def check_variant(method: str | Method, *, options: Mapping[str, Any] | None = None) -> None:
    """Put a method that has passed all checks, with other options, to those that options can break."""
    bench = Bench(method, options=options)
    for name in VARIANT_CHECKS:
        CHECKS[name](bench)


def check_algorithm(
    method: str | Method,
    *,
    options: Mapping[str, Any] | None = None,
    federation: Federation | None = None,
    model: Callable[[], nn.Module] | None = None,
) -> None:
    """Put a method, by its registered name or as an object, to all checks. Raises ContractError at the first that
    fails. A method that needs special data or a special model brings them; a few clients and parameters will do.

    Example:

        >>> kinfed.testing.check_algorithm("fedprox", options={"mu": 0.1})
    """
    bench = Bench(method, options=options, federation=federation, model=model)
    for check in CHECKS.values():
        check(bench)
