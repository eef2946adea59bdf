"""The settings of a node. Its operator gives them in --node-config, and nobody else can:

client="hospital-a"                  the name under which the server knows the client (required), or several:
client="ward-1,ward-2"               {client} in the other values stands for the name of each
data="/srv/hospital-a.csv"           a table (.csv, .tsv, .csv.gz, .parquet), arrays (.npz), or
data="/srv/load.py:load"             a Python function of this machine, called with the node's configuration
label="diagnosis"                    the column with the class, where it is called otherwise than at the server
split="fold"                         a column with train, val or test; without it some rows are drawn for the test
ignore="name,street"                 columns that are not features
row_weight="trust"                   a column of positive numbers: how much each row counts in training here
image="picture"                      a column of images instead of feature columns
text="letter"                        a column of texts instead of feature columns, cut into tokens by
tokenizer="/srv/minilm"              the tokenizer in this folder,
length="64"                          so many tokens of each
weights="/srv/minilm"                where this machine has the weights that the setting model.weights names
group="north"                        the client's group, for methods that use groups
vault="/var/lib/kinfed"              where the personal model is kept (kinfed.deploy.node.vault)
key="/etc/kinfed/hospital-a"         the node's private key, which the client belongs to (default: one in the vault)
threads="4"                          cores to train with (default 1)
peers="/etc/kinfed/peers"            folder with <client>.pub of all clients, whose keys secure sums then insist on
min_noise, epsilon, delta, methods, evaluate, sums, strict, require_secure_aggregation, least_clients
                                     what the node answers at all (kinfed.deploy.node.owner_policy)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kinfed.data.sources import LENGTH, TableOptions
from kinfed.deploy.node.owner_policy import NodeRules
from kinfed.deploy.settings import distinct
from kinfed.errors import ConfigError, unknown_name

DEFAULT_VAULT = "~/.kinfed/vault"
NAME = "{client}"  # in the settings of a node with several clients


@dataclass(frozen=True)
class NodeSettings:
    """--node-config of a supernode, for one of its clients."""

    client: str
    data: str
    label: str = ""
    split: str = ""
    ignore: str = ""
    row_weight: str = ""
    image: str = ""
    text: str = ""
    tokenizer: str = ""
    length: str = str(LENGTH)
    weights: str = ""
    group: str = ""
    vault: str = DEFAULT_VAULT
    key: str = ""
    threads: str = "1"
    min_noise: str = ""
    epsilon: str = ""
    delta: str = ""
    methods: str = ""
    evaluate: str = ""
    sums: str = ""
    strict: str = ""
    require_secure_aggregation: str = ""
    least_clients: str = ""
    peers: str = ""
    extra: Mapping[str, Any] | None = None  # everything in the table, for a function of the node's own

    @classmethod
    def parse_all(cls, table: Mapping[str, Any]) -> list[NodeSettings]:
        """One for each client."""
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
        fields = [name for name in cls.__dataclass_fields__ if name != "extra"]
        for name in ("client", "data"):
            if not str(table.get(name, "")):
                raise ConfigError(
                    f"this node does not say its {name}; start the supernode with "
                    """--node-config 'client="hospital-a" data="/srv/hospital-a.csv"'"""
                )
        unknown = [key for key in table if key not in fields and not calls_function(str(table["data"]))]
        if unknown:
            raise unknown_name("key in --node-config", unknown[0], fields)
        settings = cls(**{name: str(table[name]) for name in fields if name in table}, extra=dict(table))
        for name, least in (("threads", 1), ("length", 3)):
            value: str = getattr(settings, name)
            if not value.isdigit() or int(value) < least:
                raise ConfigError(f"{name} in --node-config is a whole number of at least {least}; got {value!r}")
        if settings.text and not settings.tokenizer:
            raise ConfigError(
                f"text={settings.text!r} in --node-config needs a tokenizer: a folder of this machine with "
                "tokenizer.json or vocab.txt"
            )
        NodeRules.parse(settings.__dict__)
        return settings

    @property
    def table_options(self) -> TableOptions:
        """How a table is read, without its class."""
        return TableOptions(
            split_column=self.split or None,
            weight_column=self.row_weight or None,
            image_column=self.image or None,
            ignore=self.ignore,
            text_column=self.text or None,
            tokenizer=self.tokenizer or None,
            length=int(self.length),
        )

    @property
    def rules(self) -> NodeRules:
        return NodeRules.parse(self.__dict__)


def calls_function(data: str) -> bool:
    """Whether `data` names a function of this machine, such as load.py:load."""
    path, colon, _ = data.rpartition(":")
    return bool(colon) and path.endswith(".py")
