"""What the user asks for, and which methods can give it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from kinfed.algorithms import AnyAlgorithm, privacy_profile
from kinfed.data import PUBLIC_EXAMPLES, Federation, example_weights
from kinfed.errors import ConfigError

# Far beyond what anybody would choose, and as far as the accountant's numbers neither overflow nor vanish.
_COMPUTABLE = {
    "noise": (0.01, 1e6), "epsilon": (1e-3, 1e6), "clip": (1e-9, 1e9), "delta": (1e-100, 1.0), "budget": (1e-3, 1e6),
}  # fmt: skip


@dataclass(frozen=True)
class Privacy:
    """DP-SGD at every client. Either the noise is given, or the epsilon that it is to be found for."""

    noise: float | None = None
    """σ: standard deviation of the noise in a sum of clipped gradients, in units of the clipping norm."""
    epsilon: float | None = None
    """No client may end above this; the noise is found by the accountant."""
    clip: float = 1.0
    """c: the largest norm of an example's gradient; longer ones are scaled down to it."""
    delta: float = 1e-5
    """The chance with which epsilon may not hold."""
    budget: float | None = None
    """A client that cannot take part in another round without exceeding this is left out."""
    strict: bool = False
    """Refuse methods that let anything leave a client that epsilon does not cover."""

    def __post_init__(self) -> None:
        if (self.noise is None) == (self.epsilon is None):
            raise ConfigError(
                "differential privacy takes either a noise (dp_noise) or the epsilon to find it for (dp_epsilon); "
                + ("got neither" if self.noise is None else f"got both, {self.noise} and {self.epsilon}")
            )
        if self.noise is not None and not 0 <= self.noise < math.inf:
            raise ConfigError(f"dp_noise is a multiple of the clipping norm, 0 or more; got {self.noise}")
        for name in ("epsilon", "clip", "budget"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ConfigError(f"dp_{name} must be positive and finite; got {value}")
        for name, (low, high) in _COMPUTABLE.items():
            value = getattr(self, name)
            if value and not low <= value <= high:
                raise ConfigError(f"dp_{name} = {value:g} is outside of what can be computed: {low:g} to {high:g}")
        if not 0 < self.delta < 1:
            raise ConfigError(f"dp_delta is a chance in (0, 1), well below one over the examples; got {self.delta}")
        if self.noise == 0 and self.budget is not None:
            raise ConfigError(
                "without noise epsilon is infinite and no budget allows a single round; give dp_noise > 0"
            )

    @property
    def limit(self) -> float | None:
        """What no client's epsilon may exceed, if anything."""
        limits = [value for value in (self.epsilon, self.budget) if value is not None]
        return min(limits) if limits else None

    def check(self, label: str, method: AnyAlgorithm, data: Federation) -> None:
        """Refuse what would make epsilon untrue."""
        self.check_method(label, method, data.train.count)
        if data.description.get("class_weights") == example_weights.BY_CLIENT:
            raise ConfigError(
                "class_weights = by_client: the weight of an example would depend on the client's other examples, "
                "which clipping single gradients does not bound; give weights, such as class_weights = sick=5,well=1"
            )
        if "needs validation" in method.traits:
            _check_validation(label, data)

    def check_method(self, label: str, method: AnyAlgorithm, count: Tensor) -> None:
        """As far as the method and the numbers of training examples [K] tell."""
        if not method.training.poisson:
            raise ConfigError(
                f"{label} does not draw Poisson samples, from which epsilon is computed; leave poisson = true"
            )
        profile = privacy_profile(method, count)
        if profile is None:
            raise ConfigError(
                f"{label} declares no privacy profile, so nobody can say what its clients would reveal; leave the "
                f"method out, or write {type(method).__name__}.privacy"
            )
        if profile.impossible:
            raise ConfigError(
                f"{label} cannot be private: {profile.impossible} would leave a client, computed from training "
                "examples outside any gradient, where noise on gradients does not hide it; leave the method out"
            )
        if self.strict and profile.uncovered:
            ways = [f"{label}.{way}" for way in profile.uncovered.values() if way]
            raise ConfigError(
                f"dp_strict: epsilon does not cover {', '.join(profile.uncovered)}, which {label} lets leave a client; "
                + (
                    f"set {' and '.join(ways)}"
                    if len(ways) == len(profile.uncovered)
                    else "leave the method out, or dp_strict"
                )
            )
        if self.limit is not None and profile.per_round is None:
            raise ConfigError(
                f"{label} has no largest number of gradients per round, so neither can noise be found for an epsilon "
                "nor a budget be kept; bound its local steps (such as l_max), or give dp_noise alone"
            )

    def notes(self, label: str, method: AnyAlgorithm, count: Tensor) -> Iterator[str]:
        """What a reader of the results must know."""
        if self.noise == 0:
            yield f"{label}: gradients are clipped but without noise: there is no privacy, epsilon is infinite"
        profile = privacy_profile(method, count)
        if profile is not None and profile.uncovered:
            yield f"{label}: not covered by epsilon: {'; '.join(profile.uncovered)}"
        most = int(count.max())
        if self.delta * most >= 1:
            yield (
                f"{label}: delta {self.delta:g} is not below 1/{most}, so large that even publishing one of a client's "
                "examples at random would count as private; choose a smaller dp_delta"
            )


def _check_validation(label: str, data: Federation) -> None:
    lacking = int(((data.val.count == 0) & (data.train.count > 0)).sum())
    shared = bool(torch.isin(data.val.rows, data.train.rows).any())
    if lacking or shared:
        who = f"{lacking} client(s) have none" if lacking else "some of them are training examples, too"
        raise ConfigError(
            f"{label} judges models on validation examples, and {who}: training examples would be used outside any "
            "gradient; give every client validation examples of its own, or leave out clients with a single example"
        )


def check_statistics(data: Federation) -> None:
    """Refuse weights and a table's columns that were learnt from exact statistics of training rows, which no epsilon
    covers, unless the user says that these are no secret."""
    learnt = data.preprocessing
    if data.description.get("dataset_options", {}).get("public_statistics"):
        return
    check_weights(data, "epsilon does not cover")
    if learnt is None or learnt.learns_nothing:
        return
    raise ConfigError(
        "epsilon does not cover the statistics of columns that clients would send before training (means, deviations, "
        "categories). Where they are public knowledge, say so: --set dataset.public_statistics=true. A table of "
        "numbers without gaps needs none with --set dataset.standardize=false"
    )


def check_public(data: Federation, label: str) -> None:
    """Refuse public examples that were clients' own: whoever reads them sees what epsilon speaks of hiding."""
    if data.description.get(PUBLIC_EXAMPLES):
        raise ConfigError(
            f"{label}: {data.description[PUBLIC_EXAMPLES]} of the clients' own examples would be made public, which no "
            "epsilon covers; leave out public and the methods that need it, or give examples that are no client's "
            "(Federation(..., public=rows))"
        )


def check_weights(data: Federation, reason: str) -> None:
    """Refuse weights of examples that take an exact statistic of every client's training rows; `reason` begins why."""
    if data.description.get("class_weights") == example_weights.BALANCED:
        raise ConfigError(
            f"{reason} the numbers of examples by class that class_weights = balanced takes from every client; give "
            "the weights, such as class_weights = sick=5,well=1"
        )
    if data.weights is not None:
        raise ConfigError(
            f"{reason} the sums of weights that every client sends so that weights of rows have mean one; leave the "
            "weights out"
        )
