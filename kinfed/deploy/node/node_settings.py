"""The settings of a node. Its operator gives them in --node-config, and nobody else can."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kinfed.core import convert_fields, declared, option, option_of
from kinfed.data.sources import TableOptions
from kinfed.deploy.node.owner_policy import IN_NODE_CONFIG, NodeRules
from kinfed.deploy.settings import distinct
from kinfed.errors import ConfigError, unknown_name

DEFAULT_VAULT = "~/.kinfed/vault"
NAME = "{client}"  # in the settings of a node with several clients


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

    @classmethod
    def parse_all(cls, table: Mapping[str, Any]) -> list[NodeSettings]:
        """Settings of each client."""
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
        given: dict[str, Any] = {name: str(value) for name, value in table.items() if str(value) != ""}
        own, rules = ({name: given[name] for name in declared(kind) if name in given} for kind in (cls, NodeRules))
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
