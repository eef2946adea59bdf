"""The folder of a deployment: what Flower needs to start it, a configuration to edit, and an example for nodes."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kinfed.core import storage
from kinfed.deploy.settings import SECTIONS, SETTINGS, describe_setting
from kinfed.errors import ConfigError, StorageError, unknown_name

_PYPROJECT = """\
# A deployment of kinfed. Start it with:  flwr run . <superlink>
# The nodes and the server need the same version of kinfed installed; this folder only says what to run.

[project]
name = "{name}"
version = "1.0.0"
description = "Personalized federated learning with kinfed"
license = "Apache-2.0"
dependencies = []   # kinfed is installed on every machine already

[tool.flwr.app]
publisher = "kinfed"

[tool.flwr.app.components]
{components}

# "" is: not set. What stands here can be overridden:  flwr run . <superlink> --run-config 'rounds=40 lr=0.1'
[tool.flwr.app.config]
{settings}"""

SHIM_FILE = "kinfed_app.py"
COMPONENTS = {"serverapp": "kinfed_app:server_app", "clientapp": "kinfed_app:client_app"}
SHIM = '''\
"""What Flower starts. All code is in kinfed, which is installed on the server and on every node."""

from kinfed.deploy.programs.flower import client_app, server_app

__all__ = ["client_app", "server_app"]  # by which Flower finds them
'''

_DATA = '''\
"""An example of a node's own loader. Copy it to the node, change `load`, and write in [node] of its node.toml

    data = "/srv/kinfed/load_data.py:load"
    file = "/srv/hospital-a.csv"

The function gets the whole table [node], so further keys (here: file) are yours. A plain table or .npz file needs no
function:  data = "/srv/hospital-a.csv"  label = "diagnosis".

This file runs on the node only. Nothing it reads leaves the node but what docs/deployment.md lists for the method.
"""

import csv

import numpy as np

from kinfed.deploy.node.node_data import Examples


def load(node):
    """Features, classes and, where it is known, which examples are for the test."""
    x, y, test = [], [], []
    with open(node["file"], newline="") as file:
        for row in csv.DictReader(file):
            x.append([float(row["age"]), float(row["pressure"]), 1.0 if row["smoker"] == "yes" else 0.0])
            y.append(row["diagnosis"])  # one of the deployment's classes
            test.append(row["year"] >= "2024")
    return Examples(np.array(x), np.array(y), test=np.array(test))
'''

_COMMENT_COLUMN = 26  # where the texts about settings begin


def make_app(folder: Path, settings: Mapping[str, Any] | None = None) -> list[Path]:
    """Write the folder; one that holds files already is refused. `settings` replace defaults, by name."""
    name = re.sub(r"[^a-z0-9]+", "-", folder.resolve().name.lower()).strip("-")
    if not name or name[0].isdigit():
        raise ConfigError(f"the folder's name becomes the app's, so it begins with a letter; got {folder.name!r}")
    if folder.exists() and any(folder.iterdir()):
        raise StorageError(f"{folder} holds files already; choose a new folder")
    components = "\n".join(f"{kind} = {json.dumps(reference)}" for kind, reference in COMPONENTS.items())
    table = _settings_table({"out": f"runs/{name}", **(settings or {})})
    project = _PYPROJECT.format(name=name, components=components, settings=table)
    paths = []
    for file, text in (("pyproject.toml", project), (SHIM_FILE, SHIM), ("node/load_data.py", _DATA)):
        path = folder / file
        storage.make_folder(path.parent)
        storage.write_atomically(path, text.encode())
        paths.append(path)
    return paths


def _settings_table(values: Mapping[str, Any]) -> str:
    """Every setting with its value or default and its text, as TOML. A JSON value of Flower's few types is one."""
    if unknown := sorted(values.keys() - set(SETTINGS)):
        raise unknown_name("setting of the deployment", unknown[0], SETTINGS)
    sections = []
    for heading, names in SECTIONS.items():
        lines = [f"# ---- {heading} ----"]
        for name in names:
            default, text = describe_setting(name)
            line = f"{name.replace('_', '-')} = {json.dumps(values.get(name, default))}"
            lines.append(f"{line:<{_COMMENT_COLUMN}} # {text}")
        sections.append("\n".join(lines) + "\n")
    return "\n".join(sections)
