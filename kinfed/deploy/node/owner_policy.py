"""What a node will ever answer: its owner's configuration (--node-config), which no server can change.

    min_noise="1.0"        never train without differential privacy of at least this noise
    epsilon="8"            what all answers together, of all runs and servers, may cost at most (default: no bound)
    delta="1e-6"           of that epsilon (default 1e-5)
    methods="fedavg,ditto" the methods that may be run (default: any)
    evaluate="test"        the splits that models may be evaluated on (default: test)
    sums="yes"             give exact counts and sums of features for a common scaling although training is private
                           (default: no); the names of categories are never given under privacy
    strict="yes"           refuse methods that send anything that epsilon does not cover (default: no)
    require_secure_aggregation="yes"
                           never send an update but as a part of a secure sum (default: no)
    least_clients="5"      in a secure sum (default: 3, and never fewer)

A run may ask for more privacy than this, never for less.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from kinfed.algorithms import AnyAlgorithm
from kinfed.data import SPLITS
from kinfed.deploy.settings import STANDARD, Deployment
from kinfed.errors import ConfigError, unknown_name
from kinfed.updates import secure_sum

DEFAULT_DELTA = 1e-5


class Refused(ConfigError):
    """A question that the rules of the node's owner do not allow; nothing was computed."""


@dataclass(frozen=True)
class NodeRules:
    min_noise: float = 0.0
    epsilon: float = math.inf
    delta: float = DEFAULT_DELTA
    methods: tuple[str, ...] = ()  # none named: any
    evaluate: tuple[str, ...] = ("test",)
    sums: bool = False
    strict: bool = False
    require_secure_aggregation: bool = False
    least_clients: int = secure_sum.LEAST_CLIENTS

    @classmethod
    def parse(cls, table: Mapping[str, str]) -> NodeRules:
        """From the texts of a node-config; "" and absent keys are the defaults."""
        texts = {name: table[name] for name in cls.__dataclass_fields__ if table.get(name)}
        values: dict[str, Any] = {}
        for name in ("min_noise", "epsilon", "delta"):
            if name in texts:
                values[name] = _number(name, texts[name])
        for name in ("methods", "evaluate"):
            if name in texts:
                values[name] = tuple(part.strip() for part in texts[name].split(",") if part.strip())
        for name in ("sums", "strict", "require_secure_aggregation"):
            if name in texts:
                values[name] = _yes(name, texts[name])
        if "least_clients" in texts:
            values["least_clients"] = _whole("least_clients", texts["least_clients"], secure_sum.LEAST_CLIENTS)
        rules = cls(**values)
        if not 0 <= rules.min_noise < math.inf:
            raise ConfigError(f"min_noise in --node-config is 0 or more; got {rules.min_noise:g}")
        if not rules.epsilon > 0 or not 0 < rules.delta < 1:
            raise ConfigError(
                f"in --node-config epsilon is positive and delta in (0, 1); got {rules.epsilon:g} and {rules.delta:g}"
            )
        for split in rules.evaluate:
            if split not in SPLITS:
                raise unknown_name("split of evaluate in --node-config", split, SPLITS)
        return rules

    @property
    def demands_privacy(self) -> bool:
        return self.min_noise > 0 or self.epsilon < math.inf

    def check_method(self, client: str, deployment: Deployment, algorithm: AnyAlgorithm, count: Tensor) -> None:
        """Whether this client takes part in such a run at all. `count` [1] training examples."""
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
        private = deployment.run.privacy is not None or self.demands_privacy
        learned_from = split == "train" or (split == "val" and "needs validation" in algorithm.traits)
        if private and learned_from:
            raise Refused(
                f"{client} evaluates no model on examples that training uses: exact losses on them would tell what the "
                "noise on gradients hides"
            )

    def check_sums(self, client: str, deployment: Deployment) -> None:
        if deployment.scaling != STANDARD:
            raise Refused(f"the run does not declare a common scaling, so {client} gives no sums of features")
        if self.require_secure_aggregation:
            raise Refused(f"{client} sends data in secure sums only, and sums of its features would be unmasked")
        private = deployment.run.privacy is not None or self.demands_privacy
        if private and not self.sums:
            raise Refused(
                f'{client} gives no exact sums of its features, which epsilon would not cover; use scaling = "none" or '
                'a number, or have the owner of the node allow it (sums="yes" in --node-config)'
            )

    def check_categories(self, client: str, deployment: Deployment, columns: list[str]) -> None:
        """`columns` hold categories, whose names would be sent. Permission to give sums does not cover them."""
        private = deployment.run.privacy is not None or self.demands_privacy
        if private and columns:
            raise Refused(
                f"{client} does not say which categories its columns {', '.join(columns[:5])} hold: no epsilon covers "
                "that. Leave these columns out (features in the run, ignore in --node-config)"
            )

    def named(self) -> dict[str, Any]:
        """For the books and people who read them."""
        return {
            "min_noise": self.min_noise, "epsilon": None if math.isinf(self.epsilon) else self.epsilon,
            "delta": self.delta, "methods": list(self.methods), "evaluate": list(self.evaluate), "sums": self.sums,
            "strict": self.strict, "require_secure_aggregation": self.require_secure_aggregation,
            "least_clients": self.least_clients,
        }  # fmt: skip


def _number(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"{name} in --node-config is a number; got {text!r}") from None


def _whole(name: str, text: str, least: int) -> int:
    if not text.isdigit() or int(text) < least:
        raise ConfigError(f"{name} in --node-config is a whole number of at least {least}; got {text!r}")
    return int(text)


def _yes(name: str, text: str) -> bool:
    if text not in ("yes", "no"):
        raise ConfigError(f'{name} in --node-config is "yes" or "no"; got {text!r}')
    return text == "yes"
