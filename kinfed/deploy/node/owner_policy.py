"""Rules of a node's owner (--node-config), which no server can change.

A run may ask for more privacy than this, never for less.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator
from torch import Tensor

from kinfed.algorithms import AnyAlgorithm
from kinfed.core import convert_fields, option, option_of
from kinfed.data import SPLITS
from kinfed.deploy.settings import STANDARD, Deployment
from kinfed.errors import ConfigError
from kinfed.privacy import Privacy
from kinfed.updates import SecureSettings

IN_NODE_CONFIG = "--node-config"


class Refused(ConfigError):
    """A request that the rules of the node's owner do not allow; nothing was computed."""


def _yes(value: Any) -> Any:
    """Refuse words other than yes and no."""
    if isinstance(value, str) and value not in ("yes", "no"):
        raise ValueError(f'is "yes" or "no"; got {value!r}')
    return value


Permission = Annotated[bool, BeforeValidator(_yes)]


@dataclass(frozen=True)
class NodeRules:
    min_noise: float = option(0.0, "Never train without differential privacy of at least this noise.", ge=0)
    epsilon: float = option(
        math.inf, "All answers together, of all runs and servers, may cost this at most.", gt=0, infinite=True
    )
    delta: float = option_of(Privacy, "delta")
    methods: tuple[str, ...] = option((), "Methods that may be run (default: any).")
    evaluate: tuple[Literal["train", "val", "test"], ...] = option(("test",), "Splits that models may be evaluated on.")
    sums: Permission = option(
        False, "Give exact counts and sums of features for a common scaling although training is private; the names of "
        "categories are never given under privacy.",
    )  # fmt: skip
    strict: Permission = option(False, "Refuse methods that send anything that epsilon does not cover.")
    require_secure_aggregation: Permission = option(False, "Never send an update but as a part of a secure sum.")
    least_clients: int = option_of(SecureSettings, "least")

    def __post_init__(self) -> None:
        convert_fields(self, IN_NODE_CONFIG)

    @property
    def demands_privacy(self) -> bool:
        return self.min_noise > 0 or self.epsilon < math.inf

    def _private(self, deployment: Deployment) -> bool:
        return deployment.run.privacy is not None or self.demands_privacy

    def check_method(self, client: str, deployment: Deployment, algorithm: AnyAlgorithm, count: Tensor) -> None:
        """Refuse runs that this client takes no part in. `count` [1] training examples."""
        method = deployment.method.strip()
        if self.methods and method not in self.methods:
            raise Refused(f"{client} takes part in {', '.join(self.methods)} only, and the run is of {method}")
        privacy = deployment.run.privacy
        if privacy is not None:
            replace(privacy, strict=privacy.strict or self.strict).check_method(method, algorithm, count)
        secure = deployment.run.secure
        if secure is not None:
            secure.averaged_fields(method, algorithm)
        elif self.require_secure_aggregation and algorithm.sends:
            raise Refused(f"{client} sends updates in secure sums only; set secure_sum in the run")

    def check_noise(self, client: str, deployment: Deployment, noise: float) -> None:
        privacy = deployment.run.privacy
        least = self.min_noise if privacy is None else max(self.min_noise, privacy.noise or 0.0)
        if not least <= noise < math.inf:  # NaN is neither
            raise Refused(
                f"{client} trains with noise of at least {least:g} only, and the server asks for {noise:g}; nothing "
                "was computed"
            )
        if privacy is None and self.demands_privacy:
            raise Refused(f"{client} trains with differential privacy only; set dp_noise or dp_epsilon in the run")

    def check_split(self, client: str, deployment: Deployment, algorithm: AnyAlgorithm, split: str) -> None:
        if split not in SPLITS:
            raise Refused(f"a split is one of {', '.join(SPLITS)}; the message asks for {split[:20]!r}")
        if split not in self.evaluate:
            raise Refused(f"{client} evaluates models on {', '.join(self.evaluate)} examples only, not on {split}")
        learned_from = split == "train" or (split == "val" and "needs validation" in algorithm.traits)
        if self._private(deployment) and learned_from:
            raise Refused(
                f"{client} evaluates no model on examples that training uses: exact losses on them would tell what the "
                "noise on gradients hides"
            )

    def check_sums(self, client: str, deployment: Deployment) -> None:
        if deployment.scaling != STANDARD:
            raise Refused(f"the run does not declare a common scaling, so {client} gives no sums of features")
        if self.require_secure_aggregation:
            raise Refused(f"{client} sends data in secure sums only, and sums of its features would be unmasked")
        if self._private(deployment) and not self.sums:
            raise Refused(
                f'{client} gives no exact sums of its features, which epsilon would not cover; use scaling = "none" or '
                'a number, or have the owner of the node allow it (sums="yes" in --node-config)'
            )

    def check_categories(self, client: str, deployment: Deployment, columns: list[str]) -> None:
        """`columns` hold categories, whose names would be sent. Permission to give sums does not cover them."""
        if self._private(deployment) and columns:
            raise Refused(
                f"{client} does not say which categories its columns {', '.join(columns[:5])} hold: no epsilon covers "
                "that. Leave these columns out (features in the run, ignore in --node-config)"
            )

    def named(self) -> dict[str, Any]:
        """The rules for the privacy log, as JSON."""
        rules = asdict(self) | {"methods": list(self.methods), "evaluate": list(self.evaluate)}
        return rules | {"epsilon": None if math.isinf(self.epsilon) else self.epsilon}
