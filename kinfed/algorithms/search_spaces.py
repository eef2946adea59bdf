"""What `kinfed tune` varies, method by method: frozen data beside the registry.

Every combination inside a space is one that the method accepts (tests try the corners). Ranges are wide around the
papers' values and the same for all data sets; `tune` says where a choice lies at the edge of its range. What decides
what a method *is*, what leaves a client, or how much it computes is not varied, except where a paper tunes it itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from kinfed.errors import ConfigError, unknown_name


@dataclass(frozen=True)
class Range:
    """Numbers from low to high, both included."""

    low: float
    high: float
    log: bool = True  # even on a logarithmic scale
    whole: bool = False

    def __post_init__(self) -> None:
        if not self.low < self.high or (self.log and self.low <= 0):
            raise ConfigError(f"a range needs low < high, and low > 0 on a logarithmic scale; got {self}")
        if self.whole and (self.low != int(self.low) or self.high != int(self.high)):
            raise ConfigError(f"a range of whole numbers has whole ends; got {self.low:g} and {self.high:g}")

    def __str__(self) -> str:
        kind = "whole numbers" if self.whole else "numbers"
        return f"{kind} {self.low:g} to {self.high:g}" + (", logarithmic" if self.log else "")

    def __contains__(self, value: Any) -> bool:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        return number and self.low <= value <= self.high and (not self.whole or value == int(value))

    def at_edge(self, value: float) -> bool:
        """Whether a chosen value is so near an end that the best may lie beyond it."""
        if self.whole:
            return value in (self.low, self.high)
        if self.log:
            return value < self.low * 1.2 or value > self.high / 1.2
        return min(value - self.low, self.high - value) < 0.03 * (self.high - self.low)


Space = Mapping[str, Range]

LR = Range(1e-3, 1.0)
_L_MAX = Range(10, 100, whole=True)
_FEDOPT = {"lr": LR, "server_lr": Range(1e-3, 1.0), "tau": Range(1e-4, 0.1)}
_FOMO = {"lr": LR, "models": Range(1, 5, log=False, whole=True), "epsilon": Range(0.0, 1.0, log=False)}
_ENVELOPE = {"lr": Range(1e-3, 0.05), "lam": Range(1.0, 20.0)}  # both need lr * lam <= 1

_SPACES: dict[str, dict[str, Range]] = {
    "local": {"lr": LR},
    "fedavg": {"lr": LR},
    "fedavg_smooth": {"lr": LR},
    "fedprox": {"lr": LR, "mu": Range(1e-3, 1.0)},
    "fedavg_data": {"lr": LR},
    "fedavgm": {"lr": LR, "gamma": Range(0.0, 0.99, log=False), "server_lr": Range(0.1, 2.0)},
    "fedadam": _FEDOPT,
    "fedyogi": _FEDOPT,
    "fedadagrad": _FEDOPT,
    "ditto": {"lr": LR, "lam": Range(1e-2, 1.9)},
    "pfedme": _ENVELOPE,
    "perfedavg": {"lr": LR, "alpha": Range(1e-3, 0.5)},
    "perfedavg_hf": {"lr": LR, "alpha": Range(1e-3, 0.5)},
    "apfl": {"lr": LR, "alpha": Range(0.0, 1.0, log=False)},
    "l2sgd": {"lr": LR, "theta": Range(0.0, 0.5, log=False)},
    "lgfedavg": {"lr": LR},
    "fedper": {"lr": LR},
    "fedrep": {"lr": LR},
    "ifca": {"lr": LR, "clusters": Range(2, 6, log=False, whole=True)},
    "cfl": {"lr": LR, "eps1": Range(0.02, 2.0), "eps2": Range(0.1, 10.0)},
    "flhc": {"lr": LR, "n1": Range(1, 20, whole=True), "quantile": Range(0.1, 0.9, log=False)},
    "fedem": {"lr": LR, "components": Range(1, 4, log=False, whole=True)},
    "mocha": {"lam": Range(1e-5, 1.0)},  # its coordinate steps have no learning rate
    "mocha_deep": {"lr": LR, "lam1": Range(1e-6, 1e-2), "lam2": Range(1e-3, 0.9)},
    "pfedhn": {"lr": LR, "server_lr": Range(1e-3, 0.5)},
    "cgpfl": {**_ENVELOPE, "contexts": Range(2, 6, log=False, whole=True)},
    "cgpfl_heur": _ENVELOPE,
    "fedfomo": _FOMO,
    "fedfomo_ma": {**_FOMO, "models": Range(2, 5, log=False, whole=True)},
    "selffl": {"lr": LR, "l_max": _L_MAX},
    "selffl_init": {"lr": LR},
    "selffl_steps": {"lr": LR, "l_max": _L_MAX},
    "selffl_agg": {"lr": LR},
    "selffl_control": {"lr": LR},
    "selffl_exact": {"lr": LR, "l_max": _L_MAX},
    "selffl_augmented": {"lr": LR, "l_max": _L_MAX},
    "selffl_cluster": {"lr": LR, "l_max": _L_MAX},
}
SPACES: Mapping[str, Space] = MappingProxyType({name: MappingProxyType(space) for name, space in _SPACES.items()})


def space_of(method: str, fixed: Mapping[str, Any], changes: Mapping[str, Range] | None = None) -> dict[str, Range]:
    """The method's space without the options that the user has fixed, with ranges of the user's own."""
    space = dict(SPACES[method])
    for option, range_ in (changes or {}).items():
        if option not in space:
            raise unknown_name(f"tuned option of {method}", option, space)
        if option in fixed:
            raise ConfigError(f"{method}.{option} is fixed at {fixed[option]!r} and has a range; keep one of the two")
        space[option] = range_
    return {option: range_ for option, range_ in space.items() if option not in fixed}


def parse_ranges(texts: Iterable[str], methods: Mapping[str, str]) -> dict[str, dict[str, Range]]:
    """Ranges by label and option from texts "label.option=low:high"; `methods` says what each label stands for.

    A range is of the same kind as the usual one: logarithmic (unless it begins at 0), whole numbers."""
    found: dict[str, dict[str, Range]] = {}
    for text in texts:
        key, _, ends = text.partition("=")
        label, _, option = key.strip().rpartition(".")
        low, _, high = ends.partition(":")
        try:
            numbers = float(low), float(high)
        except ValueError:
            raise ConfigError(f"--range takes label.option=low:high, such as ditto.lam=0.01:10; got {text!r}") from None
        if label not in methods:
            raise unknown_name("owner in --range", label, methods)
        usual = SPACES[methods[label]].get(option)
        if usual is None:
            raise unknown_name(f"tuned option of {methods[label]}", option, SPACES[methods[label]])
        found.setdefault(label, {})[option] = Range(*numbers, log=usual.log and numbers[0] > 0, whole=usual.whole)
    return found
