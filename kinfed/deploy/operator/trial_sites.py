"""Sites of a trial: the clients of a simulation with files of their own, and the settings of a deployment that computes
the same."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kinfed.config import DEFAULTS, NON_RESULT_SETTINGS, Named, RunConfig
from kinfed.core import storage
from kinfed.data import Federation
from kinfed.deploy.operator.site_kit import can_name_a_key
from kinfed.deploy.settings import NONE, SETTINGS
from kinfed.errors import ConfigError

DATA_SETTINGS = (  # that decide what the clients of a trial have
    "dataset", "partition", "clients", "client_column", "label_column", "group_column", "split_column",
    "columns", "data",
)  # fmt: skip


@dataclass(frozen=True)
class Site:
    client: str
    folder: Path
    group: str = ""

    @property
    def vault(self) -> Path:
        return self.folder / "vault"


def site_names(federation: Federation) -> list[str]:
    """The clients' own names if they can name a key file, else client-0, client-1, ..."""
    names = federation.names
    if all(can_name_a_key(name) and "," not in name and not name.isdigit() for name in names):
        return list(names)
    return [f"client-{k}" for k in range(len(names))]


def write_sites(folder: Path, federation: Federation, names: list[str]) -> list[Site]:
    """One folder and one .npz file per client. Features are scaled as in a simulation, and every row has its split."""
    sites, classes = [], class_names(federation)
    for k, name in enumerate(names):
        parts = {split: federation.split(split)[k] for split in ("train", "val", "test")}
        rows = np.concatenate([part.numpy() for part in parts.values()])
        sizes = [len(part) for part in parts.values()]
        split = np.repeat(np.arange(3), sizes)
        path = folder / name / f"{name}.npz"
        storage.make_folder(path.parent)
        index = federation.labels.new_tensor(rows)
        labels = federation.labels[index].numpy()
        y = labels if classes is None else np.array(classes)[labels]
        inputs = "tokens" if federation.features.is_tokens else "x"
        arrays: dict[str, Any] = {inputs: federation.features.gather(index).numpy(), "y": y, "test": split == 2}
        with storage.storage_errors("write", path):
            np.savez(path, **arrays, **({"val": split == 1} if sizes[1] else {}))
        group = ""
        if federation.groups is not None:
            # The server numbers groups by their sorted names; the digits keep the order of their numbers.
            number = int(federation.groups[k])
            group = f"{number:06d}" + ("" if federation.group_names is None else f"-{federation.group_names[number]}")
        sites.append(Site(name, path.parent, group))
    return sites


def deployment_settings(config: RunConfig, federation: Federation, names: list[str]) -> dict[str, Any]:
    """The settings of a deployment that computes what a run with this configuration does, for these clients."""
    if len(config.algorithms) != 1:
        raise ConfigError(f"a deployment runs one method; got {', '.join(config.algorithms)}: choose with --algorithms")
    if len(config.seeds) != 1:
        raise ConfigError(f"a deployment has one seed; got {len(config.seeds)}: choose with --seeds")
    ((label, chosen),) = config.algorithms.items()
    options = {key: value for key, value in chosen.items() if key != "method"}
    if label != chosen["method"]:
        raise ConfigError(f"a deployment calls its method by its name; got {label!r} for {chosen['method']!r}")
    for name in config.changed:
        if name not in (*SETTINGS, *DATA_SETTINGS, *NON_RESULT_SETTINGS, "algorithms", "seeds", "preset"):
            raise ConfigError(f"{name} is no setting of a deployment; leave it out")
    values = {name: getattr(config, name) for name in SETTINGS if name in DEFAULTS and name != "clients"}
    named = {name: values[name] for name in ("model", "robust") if isinstance(values[name], Named)}
    owned = {f"{name}.{key}": value for name, one in named.items() for key, value in one.options.items()}
    problem = federation.problem
    if problem.is_regression:
        target = {"target": f"{problem.mean!r},{problem.scale!r}"}
    else:
        target = {"classes": ",".join(class_names(federation) or []) or str(federation.num_classes)}
    return {name: _flat(value) for name, value in values.items()} | {
        "clients": ",".join(names) if len(names) > 1 else names[0], "method": label, "seed": config.seeds[0],
        "options": " ".join(f"{key}={_literal(value)}" for key, value in (options | owned).items()),
        **target, "scaling": NONE, "label_column": "label",
    }  # fmt: skip


def class_names(federation: Federation) -> list[str] | None:
    """Names of the classes, if a list of names can hold them; None: they go by their numbers."""
    names = federation.class_names
    if names is None or len(set(names)) < len(names) or any("," in name or name != name.strip() for name in names):
        return None
    return names


def _flat(value: Any) -> bool | int | float | str:
    if value is None:
        return ""
    if isinstance(value, Named):
        return value.name
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    if isinstance(value, bool | int | float | str):
        return value
    raise ConfigError(f"{value!r} cannot be a setting of a deployment")


def _literal(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    if " " in text:
        raise ConfigError(f"options of a deployment are separated by spaces; {text!r} holds one")
    return text
