"""Settings of example-level privacy, and which methods admit it.

The settings are also those of a run, whose options the command line shows: what needs torch is imported where it is
used."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kinfed.core import check_options, option
from kinfed.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

    from kinfed.algorithms import AnyAlgorithm
    from kinfed.data import Federation


@dataclass(frozen=True)
class Privacy:
    """DP-SGD at every client. Either the noise is given, or the epsilon that it is to be found for. The ranges are far
    beyond what anyone would choose, and as far as the accountant's numbers neither overflow nor vanish."""

    noise: float | None = option(
        None, "Differential privacy: noise in units of the clipping norm.", ge=0.01, le=1e6, or_zero=True
    )
    epsilon: float | None = option(
        None, "Differential privacy: find the noise for this epsilon instead.", ge=1e-3, le=1e6
    )
    clip: float = option(1.0, "Largest norm of an example's gradient (default 1).", ge=1e-9, le=1e9)
    delta: float = option(1e-5, "Delta of epsilon (default 1e-5).", ge=1e-100, lt=1)
    budget: float | None = option(None, "Leave out clients that would exceed this epsilon.", ge=1e-3, le=1e6)
    strict: bool = option(False, "Refuse methods that send what epsilon does not cover.")

    def __post_init__(self) -> None:
        if (self.noise is None) == (self.epsilon is None):
            raise ConfigError(
                "differential privacy takes either a noise (dp_noise) or the epsilon to find it for (dp_epsilon); "
                + ("got neither" if self.noise is None else f"got both, {self.noise} and {self.epsilon}")
            )
        check_options(self, "differential privacy")
        if self.noise == 0 and self.budget is not None:
            raise ConfigError(
                "without noise epsilon is infinite and no budget allows a single round; give dp_noise > 0"
            )

    @property
    def limit(self) -> float | None:
        """Epsilon that no client may exceed, if there is one."""
        limits = [value for value in (self.epsilon, self.budget) if value is not None]
        return min(limits) if limits else None

    def check(self, label: str, method: AnyAlgorithm, data: Federation) -> None:
        """Refuse what would make epsilon untrue."""
        from kinfed.data import example_weights

        self.check_method(label, method, data.train.count)
        if data.description.get("class_weights") == example_weights.BY_CLIENT:
            raise ConfigError(
                "class_weights = by_client: the weight of an example would depend on the client's other examples, "
                "which clipping single gradients does not bound; give weights, such as class_weights = sick=5,well=1"
            )
        if "needs validation" in method.traits:
            _check_validation(label, data)

    def check_method(self, label: str, method: AnyAlgorithm, count: Tensor) -> None:
        """Refuse what the method and the numbers of training examples [K] rule out."""
        from kinfed.algorithms import privacy_profile

        if not method.training.poisson:
            raise ConfigError(
                f"{label} does not draw Poisson samples, from which epsilon is computed; leave poisson = true"
            )
        profile = privacy_profile(method, count)
        if profile is None:
            raise ConfigError(
                f"{label} declares no privacy profile, so it is not known what its clients would reveal; leave the "
                f"method out, or write {type(method).__name__}.privacy"
            )
        if any(math.isinf(most) for most in profile.sensitivity.values()):
            raise ConfigError(
                f"{label} cannot be private: {profile.impossible} would leave a client, and one example changes them "
                "by any amount (its values are multiplied with one another), so that no noise hides it; leave the "
                "method out, or hide every client as a whole (user_epsilon), whose sums are shortened to user_clip"
            )
        if profile.impossible:
            raise ConfigError(
                f"{label} cannot be private: {profile.impossible} would leave a client, computed from training "
                "examples outside any gradient, where noise on gradients does not hide it; leave the method out"
            )
        if self.strict and profile.uncovered:
            ways = [f"{label}.{way}" for way in profile.uncovered.values() if way]
            all_known = len(ways) == len(profile.uncovered)
            raise ConfigError(
                f"dp_strict: epsilon does not cover {', '.join(profile.uncovered)}, which {label} lets leave a client; "
                + (f"set {' and '.join(ways)}" if all_known else "leave the method out, or dp_strict")
            )
        if self.limit is not None and profile.per_round is None:
            raise ConfigError(
                f"{label} has no largest number of gradients per round, so neither can noise be found for an epsilon "
                "nor a budget be kept; bound its local steps (such as l_max), or give dp_noise alone"
            )

    def notes(self, label: str, method: AnyAlgorithm, count: Tensor) -> Iterator[str]:
        from kinfed.algorithms import privacy_profile

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
    import torch

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
    if texts := [] if learnt is None else [one.name for one in learnt.used if one.kind == "text"]:
        raise ConfigError(
            f"epsilon does not cover the scores of long texts ({', '.join(texts)}), which are learnt from labels; "
            f"leave these columns out (--columns {texts[0]}=skip), or take a model that reads texts (text_column)"
        )
    if own := [] if learnt is None else [one.name for one in learnt.own]:
        raise ConfigError(
            f"epsilon does not cover the effects of columns that not every client has ({', '.join(own)}), which are "
            "learnt from labels; take them as columns with gaps (--set dataset.own_columns=shared), or leave them out"
        )
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
    """Refuse public examples that were clients' own: their readers see what epsilon promises to hide."""
    from kinfed.data import PUBLIC_EXAMPLES

    if data.description.get(PUBLIC_EXAMPLES):
        raise ConfigError(
            f"{label}: {data.description[PUBLIC_EXAMPLES]} of the clients' own examples would be made public, which no "
            "epsilon covers; leave out public and the methods that need it, or give examples that are no client's "
            "(Federation(..., public=rows))"
        )


def check_weights(data: Federation, reason: str) -> None:
    """Refuse weights of examples that take an exact statistic of every client's training rows; `reason` begins why."""
    from kinfed.data import example_weights

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
