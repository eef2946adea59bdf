"""The settings of a node, and its owner's rules among them. Its operator gives them in --node-config, and no server can
change them: a run may ask for more privacy than the rules, never for less.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator
from torch import Tensor

from kinfed.algorithms import AnyAlgorithm
from kinfed.core import convert_fields, declared, option, option_of
from kinfed.data import SPLITS
from kinfed.data.sources import TableOptions
from kinfed.deploy.settings import STANDARD, Deployment, distinct
from kinfed.errors import ConfigError, unknown_name
from kinfed.privacy import Privacy
from kinfed.updates import SecureSettings

DEFAULT_VAULT = "~/.kinfed/vault"
NAME = "{client}"  # in the settings of a node with several clients
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


@dataclass(frozen=True)
class NodeSettings:
    """--node-config of a supernode, for one of its clients; "" is: not set."""

    client: str = option(
        "", "Name under which the server knows the client, or several: {client} elsewhere stands for each."
    )
    data: str = option(
        "", "A table (.csv, .tsv, .csv.gz, .parquet), arrays (.npz), or /srv/load.py:load, a function of this machine."
    )
    label: str = option("", "Column with the class, where it is called otherwise than at the server.")
    split: str = option("", "Column with train, val or test; without it some rows are drawn for the test.")
    ignore: str = option_of(TableOptions, "ignore", "")
    row_weight: str = option("", "Column of positive numbers: how much each row counts in training here.")
    image: str = option_of(TableOptions, "image_column", "")
    text: str = option_of(TableOptions, "text_column", "")
    tokenizer: str = option("", "Folder with tokenizer.json or vocab.txt, for text.")
    length: int = option_of(TableOptions, "length")
    weights: str = option("", "Where this machine has the weights that the setting model.weights names.")
    group: str = option("", "The client's group, for methods that use groups.")
    vault: str = option(DEFAULT_VAULT, "Where the personal model is kept (kinfed.deploy.node.vault).")
    key: str = option("", "The node's private key, which the client belongs to (default: one in the vault).")
    threads: int = option(1, "Cores to train with.", ge=1)
    peers: str = option("", "Folder with <client>.pub of all clients, whose keys secure sums then insist on.")
    rules: NodeRules = field(default_factory=NodeRules)
    extra: Mapping[str, Any] = field(default_factory=dict)  # all of the table, for a function of the node's own

    def __post_init__(self) -> None:
        convert_fields(self, IN_NODE_CONFIG)
        if self.text and not self.tokenizer:
            raise ConfigError(
                f"text={self.text!r} in --node-config needs a tokenizer: a folder of this machine with "
                "tokenizer.json or vocab.txt"
            )
        if self.rules.require_secure_aggregation and not self.peers:
            raise ConfigError(
                f'{self.client}: require_secure_aggregation needs peers="...", a folder with the public keys of all '
                "clients: without it a server could invent the others of a sum, and subtract them"
            )

    @classmethod
    def parse_all(cls, table: Mapping[str, Any]) -> list[NodeSettings]:
        client, data = (str(table.get(key, "")) for key in ("client", "data"))
        names = distinct("clients in --node-config", client) if client.strip() else [""]
        if len(names) > 1 and NAME not in data and not calls_function(data):
            raise ConfigError(
                f"the clients {', '.join(names)} of this node would all have the data {data!r}; write {NAME} in it "
                f"where a client's name belongs, such as /srv/{NAME}.csv"
            )
        return [cls.parse({key: str(value).replace(NAME, name) for key, value in table.items()} | {"client": name})
                for name in names]  # fmt: skip

    @classmethod
    def parse(cls, table: Mapping[str, Any]) -> NodeSettings:
        for name in ("client", "data"):
            if not str(table.get(name, "")):
                raise ConfigError(
                    f"this node does not say its {name}; start the supernode with "
                    """--node-config 'client="hospital-a" data="/srv/hospital-a.csv"'"""
                )
        known = [*declared(cls), *declared(NodeRules)]
        unknown = [key for key in table if key not in known and not calls_function(str(table["data"]))]
        if unknown:
            raise unknown_name("key in --node-config", unknown[0], known)
        values: dict[str, Any] = {name: str(value) for name, value in table.items() if str(value) != ""}
        own, rules = ({name: values[name] for name in declared(kind) if name in values} for kind in (cls, NodeRules))
        return cls(**own, rules=NodeRules(**rules), extra=dict(table))

    @property
    def table_options(self) -> TableOptions:
        """Options for reading a table, without its class."""
        return TableOptions(
            split_column=self.split or None, weight_column=self.row_weight or None, image_column=self.image or None,
            ignore=self.ignore, text_column=self.text or None, tokenizer=self.tokenizer or None, length=self.length,
        )  # fmt: skip


def calls_function(data: str) -> bool:
    """Say whether `data` names a function of this machine, such as load.py:load."""
    path, colon, _ = data.rpartition(":")
    return bool(colon) and path.endswith(".py")
