"""The folder of a deployment: what Flower needs to start it, a configuration to edit, and an example for nodes."""

from __future__ import annotations

import re
from pathlib import Path

from kinfed.core import storage
from kinfed.errors import ConfigError, StorageError

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
serverapp = "kinfed_app:server_app"
clientapp = "kinfed_app:client_app"

[tool.flwr.app.config]
# ---- who takes part, and for how long to wait ----
out = "runs/{name}"      # folder on the server's machine; the same folder again: the run is resumed
clients = "3"            # how many, or their names: "hospital-a,hospital-b,hospital-c"
quorum = 2               # updates without which a round does not count; 0: of more than half of those called
deadline = 600.0         # seconds that a round waits for its clients
wait = 600.0             # seconds that the start waits for all clients
patience = 3             # rounds in a row without quorum after which the run stops
participation = 1.0      # share of the clients called in a round

# ---- what is learned (kinfed list algorithms, kinfed list ditto, kinfed list models) ----
method = "ditto"
options = ""             # of the method and the model: "lam=0.5 model.width=8"
model = "mlp"
rounds = 20
seed = 0
lr = 0.05
batch = 20
steps = 20               # local steps per round, or ...
epochs = 0               # ... epochs instead (then steps = 0)
momentum = 0.0
weight-decay = 0.0
lr-decay = 1.0           # factor of the learning rate per round
augment = ""
eval-every = 5           # rounds between evaluations; each writes every node's personal model to its vault

# ---- the data, which stay on the nodes ----
classes = "10"           # how many (labels 0, 1, ...), or their names: "benign,malignant"
label-column = "label"   # in tables; a node may call it otherwise (label in its node-config)
features = ""            # columns in their order; empty: all others, which must agree at all nodes
scaling = "standard"     # mean 0, variance 1 over all clients (two sums per feature leave a node); "none"; or "255"
test-fraction = 0.25     # of a node's examples, where it does not name its test examples itself
validation = 0.0         # share of training examples for validation; 0: a fifth where the method needs it

# ---- protection ----
largest-norm = 0.0       # longer updates are rejected; 0: no bound
robust = ""              # a robust average instead of the mean (docs/methods.md); its options: "robust.share=0.2"
dp-noise = 0.0           # differential privacy (docs/privacy.md): noise, or ...
dp-epsilon = 0.0         # ... the epsilon to find it for
dp-clip = 0.0
dp-delta = 0.0
dp-budget = 0.0
dp-strict = false
"""

_SHIM = '''\
"""What Flower starts. All code is in kinfed, which is installed on the server and on every node."""

from kinfed.deploy.flower import client_app, server_app

__all__ = ["client_app", "server_app"]  # by which Flower finds them
'''

_DATA = '''\
"""An example of a node's own loader. Copy it to the node, change `load`, and start the supernode with

    --node-config 'client="hospital-a" data="/srv/kinfed/load_data.py:load" file="/srv/hospital-a.csv"'

The function gets the whole node-config, so further keys (here: file) are yours. A plain table or .npz file needs no
function:  data="/srv/hospital-a.csv" label="diagnosis".

This file runs on the node only. Nothing it reads leaves the node but what docs/deployment.md lists for the method.
"""

import csv

import numpy as np

from kinfed.deploy.node_data import Examples


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

FILES = {"pyproject.toml": _PYPROJECT, "kinfed_app.py": _SHIM, "node/load_data.py": _DATA}


def make_app(folder: Path) -> list[Path]:
    """Write the folder; one that holds files already is refused."""
    name = re.sub(r"[^a-z0-9]+", "-", folder.resolve().name.lower()).strip("-")
    if not name or name[0].isdigit():
        raise ConfigError(f"the folder's name becomes the app's, so it begins with a letter; got {folder.name!r}")
    if folder.exists() and any(folder.iterdir()):
        raise StorageError(f"{folder} holds files already; choose a new folder")
    written = []
    for path, text in FILES.items():
        storage.make_folder((folder / path).parent)
        storage.write_atomically(folder / path, text.replace("{name}", name).encode())
        written.append(folder / path)
    return written
