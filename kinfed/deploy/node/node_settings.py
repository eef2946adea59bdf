"""The settings of a node, and its owner's rules among them. Its operator gives them in node.toml, and no server can
change them: a run may ask for more privacy than the rules, never for less. kinfed.deploy.node.gate holds to them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

from kinfed.core import convert_fields, declared, option, option_of
from kinfed.data.sources import TableOptions, is_table
from kinfed.deploy.settings import distinct
from kinfed.errors import ConfigError, unknown_name
from kinfed.privacy import Privacy
from kinfed.updates import SecureSettings

DEFAULT_VAULT = "~/.kinfed/vault"
NAME = "{client}"  # in the settings of a node with several clients
IN_NODE_CONFIG = "node.toml"
TEST_FRACTION = 0.25  # of rows, where an owner asks for privacy and names none


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
        math.inf, "Largest epsilon that all answers together may cost, over all runs and servers.", gt=0, infinite=True
    )
    delta: float = option_of(Privacy, "delta")
    methods: tuple[str, ...] = option((), "Methods that may be run (default: any).")
    evaluate: tuple[Literal["train", "val", "test"], ...] = option(("test",), "Splits that models may be evaluated on.")
    evaluation_noise: float = option(
        5.0, "Under min_noise or epsilon, figures of evaluations get noise of this many rows, and cost epsilon of the "
        "rows that models are evaluated on; 0: they stay at the node.", ge=0,
    )  # fmt: skip
    exact_scores: Permission = option(
        False, "Give exact figures of evaluations although training is private: no epsilon covers the rows that models "
        "are evaluated on.",
    )  # fmt: skip
    sums: Permission = option(
        False, "Give exact counts and sums of features for a common scaling although training is private; the names of "
        "categories are never given under privacy.",
    )  # fmt: skip
    describe: Permission = option(True, "Describe the table before anything is trained: means, gaps, large counts.")
    smallest_count: int = option(
        5, "Counts of fewer rows leave in no description, and models are judged on no fewer rows.", ge=1
    )
    strict: Permission = option(False, "Refuse methods that send anything that epsilon does not cover.")
    require_secure_aggregation: Permission = option(False, "Never send an update but as a part of a secure sum.")
    least_clients: int = option_of(SecureSettings, "least")
    user_epsilon: float = option(
        math.inf, "All secure sums together may cost this at most for the client as a whole: never send an update but "
        "in a secure sum with noise from the nodes (user_at_nodes in the run).", gt=0, infinite=True,
    )  # fmt: skip
    conspirators: int = option(
        0, "This many other clients of a secure sum may tell the server their noise; this node makes up for them.", ge=0
    )

    def __post_init__(self) -> None:
        convert_fields(self, IN_NODE_CONFIG)

    @property
    def demands_privacy(self) -> bool:
        return self.min_noise > 0 or self.epsilon < math.inf

    @property
    def hides_client(self) -> bool:
        """Whether what leaves may not tell what is in the client's data at all."""
        return self.user_epsilon < math.inf

    @property
    def protects(self) -> bool:
        """Whether the owner keeps anything of the data from the server: then no run chooses which rows are for what."""
        return self.demands_privacy or self.hides_client or self.require_secure_aggregation

    @property
    def noises_scores(self) -> bool:
        """Whether evaluations are protected, too."""
        return self.demands_privacy and not self.exact_scores

    def named(self) -> dict[str, Any]:
        """The rules for the privacy log, as JSON."""
        rules = asdict(self) | {"methods": list(self.methods), "evaluate": list(self.evaluate)}
        limits = {"epsilon": self.epsilon, "user_epsilon": self.user_epsilon}
        return rules | {name: None if math.isinf(value) else value for name, value in limits.items()}


@dataclass(frozen=True)
class NodeSettings:
    """The table [node] of node.toml, for one of its clients; "" is: not set."""

    client: str = option(
        "", "Name under which the server knows the client, or several: {client} elsewhere stands for each."
    )
    data: str = option(
        "", "A table (.csv, .tsv, .csv.gz, .parquet), arrays (.npz), or /srv/load.py:load, a function of this machine."
    )
    label: str = option("", "Column with the class, if it has another name than at the server.")
    split: str = option("", "Column with train, val or test; without it some rows are drawn for the test.")
    test_fraction: float | None = option(
        None, "Share of the rows for the test, drawn here for good, if the data name none and runs shall not choose "
        "them (they never do if the owner protects anything: default 0.25).", ge=0, lt=1,
    )  # fmt: skip
    validation: float | None = option(
        None,
        "Likewise, share of the other rows for validation (if the owner protects anything: default 0).",
        ge=0,
        lt=1,
    )
    ignore: str = option_of(TableOptions, "ignore", "")
    person: str = option(
        "", "Column with the person (patient, case) of a row: all rows of one are for one purpose, and count as one "
        "where this site learns by itself what a column of its own adds.",
    )  # fmt: skip
    row_weight: str = option("", "Column of positive numbers: how much each row counts in training here.")
    image: str = option_of(TableOptions, "image_column", "")
    text: str = option_of(TableOptions, "text_column", "")
    tokenizer: str = option("", "Folder with tokenizer.json or vocab.txt, for text.")
    length: int = option_of(TableOptions, "length")
    weights: str = option("", "Folder on this machine with the weights that the setting model.weights names.")
    group: str = option("", "The client's group, for methods that use groups.")
    vault: str = option(DEFAULT_VAULT, "Folder that the personal model is kept in (kinfed.deploy.node.vault).")
    counter: str = option(
        "", "Folder for the number of private answers, by which a vault that is set back is noticed (default: the one "
        "that the vault is in).",
    )  # fmt: skip
    ledger: str = option(
        "", "Name of the ledger, and of the secret that draws roles of rows (default: the client's). The same one in "
        "the files of several federations lets them share one vault and one epsilon.",
    )  # fmt: skip
    key: str = option("", "The node's private key, which the client belongs to (default: one in the vault).")
    threads: int = option(1, "Cores to train with.", ge=1)
    peers: str = option("", "Folder with <client>.pub of all clients, whose keys secure sums then insist on.")
    rules: NodeRules = field(default_factory=NodeRules)
    extra: Mapping[str, Any] = field(default_factory=dict)  # all of the table, for a function of the node's own

    def __post_init__(self) -> None:
        convert_fields(self, IN_NODE_CONFIG)
        if self.text and not self.tokenizer:
            raise ConfigError(
                f"text={self.text!r} in node.toml needs a tokenizer: a folder of this machine with "
                "tokenizer.json or vocab.txt"
            )
        if self.person and not is_table(self.data):
            raise ConfigError(
                f"person={self.person!r} in node.toml is a column of a table, and {self.data} is none (CSV or "
                "Parquet): its rows could not be kept together by person"
            )
        rules = self.rules
        if (rules.require_secure_aggregation or rules.hides_client) and not self.peers:
            name = "user_epsilon" if rules.hides_client else "require_secure_aggregation"
            raise ConfigError(
                f'{self.client}: {name} needs peers="...", a folder with the public keys of all '
                "clients: without it a server could invent the others of a sum, and subtract them"
            )

    @classmethod
    def parse_all(cls, table: Mapping[str, Any]) -> list[NodeSettings]:
        client, data = (str(table.get(key, "")) for key in ("client", "data"))
        names = distinct("clients in node.toml", client) if client.strip() else [""]
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
                    f"this node does not say its {name}; write in [node] of node.toml, for example: "
                    'client = "hospital-a"  data = "/srv/hospital-a.csv"'
                )
        known = [*declared(cls), *declared(NodeRules)]
        unknown = [key for key in table if key not in known and not calls_function(str(table["data"]))]
        if unknown:
            raise unknown_name("key in node.toml", unknown[0], known)
        values: dict[str, Any] = {name: str(value) for name, value in table.items() if str(value) != ""}
        own, rules = ({name: values[name] for name in declared(kind) if name in values} for kind in (cls, NodeRules))
        return cls(**own, rules=NodeRules(**rules), extra=dict(table))

    @property
    def owner(self) -> str:
        """The name of the ledger, under all federations that know the client."""
        return self.ledger or self.client

    @property
    def drawn_roles(self) -> tuple[float, float] | None:
        """Shares of rows for test and validation that the node draws for good, where its data do not name them; None
        where a run may draw them."""
        if not self.rules.protects and self.test_fraction is None and self.validation is None:
            return None
        return TEST_FRACTION if self.test_fraction is None else self.test_fraction, self.validation or 0.0

    @property
    def paths(self) -> dict[str, str]:
        """Settings that name files of this machine, by their keys."""
        names = ("data", "tokenizer", "weights", "vault", "counter", "key", "peers")
        return {name: str(getattr(self, name)) for name in names if getattr(self, name)}

    @property
    def table_options(self) -> TableOptions:
        """Options for reading a table, without its class."""
        return TableOptions(
            split_column=self.split or None, weight_column=self.row_weight or None, image_column=self.image or None,
            person_column=self.person or None, ignore=self.ignore, text_column=self.text or None,
            tokenizer=self.tokenizer or None, length=self.length,
        )  # fmt: skip


def calls_function(data: str) -> bool:
    """Say whether `data` names a function of this machine, such as load.py:load."""
    path, colon, _ = data.rpartition(":")
    return bool(colon) and path.endswith(".py")
