"""A whole deployment on one machine, from data to personal models: what `kinfed deploy up --local 3` does.

    <folder>/run        the run's folder, as the server writes it
            sites/<c>   what the site of a client has: its data, node.toml, its vault
            logs        what every process wrote
            work        keys, certificates, Flower's files, the app; removed at the end

The clients are those of a simulation with the same settings, data and seed, and so are the models.
"""

import json
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np

from kinfed.config import DEFAULTS as RUN_DEFAULTS
from kinfed.config import NON_RESULT_SETTINGS, Named, RunConfig
from kinfed.core import storage
from kinfed.data import Federation
from kinfed.deploy.operator.control import CONNECTION, Control, Say, finish, log_size
from kinfed.deploy.operator.site_kit import can_name_a_key, node_toml
from kinfed.deploy.programs.app_folder import make_app
from kinfed.deploy.programs.processes import Processes, flower_environment, flower_program, free_port, is_listening
from kinfed.deploy.server.status import FILE as STATUS
from kinfed.deploy.settings import NONE, SETTINGS, Deployment
from kinfed.errors import ConfigError
from kinfed.runs import build_federation

# Defaults that differ from a simulation's: short, one method, one seed, everybody in every round.
DEFAULTS = {"algorithms": "ditto", "seeds": "0", "rounds": 5, "participation": 1.0, "eval_every": 0}
START_SECONDS = 120.0  # for the superlink to listen
HOST = "127.0.0.1"
DATA_SETTINGS = (  # that decide what the clients of a trial have
    "dataset", "partition", "clients", "client_column", "label_column", "group_column", "split_column",
    "time_column", "event_column", "task", "columns", "data",
)  # fmt: skip


@dataclass(frozen=True)
class Site:
    client: str
    folder: Path
    group: str = ""
    data: str = ""  # a file in the folder
    more: Mapping[str, str] = field(default_factory=dict)  # other keys of its node

    @property
    def vault(self) -> Path:
        return self.folder / "vault"


@dataclass(frozen=True)
class TrialPlan:
    """What a trial runs: settings of a deployment, and what writes its sites."""

    names: list[str]
    settings: dict[str, Any]
    write: Callable[[Path], list[Site]]
    node: Mapping[str, str] = field(default_factory=dict)  # other keys of all nodes


@dataclass(frozen=True)
class Trial:
    folder: Path
    plan: TrialPlan
    seconds: float = 1800.0  # that all of it may take
    warm: bool = True
    resume: bool = False  # a trial that was stopped goes on in its folder

    @classmethod
    def of_run(cls, folder: Path, config: RunConfig, seconds: float = 1800.0, warm: bool = True) -> Self:
        """A trial whose clients are those of a simulation."""
        federation = build_federation(config, config.seeds[0])
        names = site_names(federation)
        settings = deployment_settings(config, federation, names)
        weights = config.model.options.get("weights")
        node = {"weights": str(Path(weights).expanduser().resolve())} if weights else {}
        plan = TrialPlan(names, settings, lambda folder: write_sites(folder, federation, names), node)
        return cls(folder, plan, seconds, warm)

    @property
    def run_folder(self) -> Path:
        return self.folder / "run"

    @property
    def _work(self) -> Path:
        return self.folder / "work"

    @cached_property
    def _control(self) -> Control:
        work = self._work.resolve()
        return Control(work / "operator", f"{HOST}:{free_port()}", work / "certs" / "ca.crt")

    def run(self, say: Say, should_stop: Callable[[], bool] = lambda: False) -> list[Site]:
        """Run the trial, and return its sites. When this returns or raises, no process is left."""
        from kinfed.deploy.operator.certs import make_certificates

        end = time.monotonic() + self.seconds
        for program in ("flower-superlink", "flower-supernode", "flwr"):
            flower_program(program)  # before anything is written
        if self.folder.exists() and any(self.folder.iterdir()) and not self.resume:
            raise ConfigError(f"{self.folder} holds files already; choose a new folder for the trial")
        names = self.plan.names
        settings = self.plan.settings | {
            "out": str(self.run_folder.resolve()), "keys": str((self._work / "certs").resolve()),
            "deadline": self.seconds, "wait": self.seconds,
        }  # fmt: skip
        Deployment.parse(settings)  # what cannot run is refused before anything is written
        shutil.rmtree(self._work, ignore_errors=True)  # of a trial that was killed
        (self.run_folder / STATUS).unlink(missing_ok=True)
        sites = self.plan.write(self.folder / "sites")
        make_certificates(self._work / "certs", [HOST, "localhost"], names)
        make_app(self._work / "app", settings)
        processes = Processes(self.folder / "logs")
        try:
            port = self._start_server(processes, say)
            self._register(names, say)
            for site in sites:
                self._start_node(processes, site, port)
            say(f"started  {len(sites)} nodes: {', '.join(names)}")
            self._control.run(self._work / "app")
            self._control.follow(self.run_folder, say, should_stop, end, log_size(self.run_folder), processes.check)
        finally:
            processes.stop()
            shutil.rmtree(self._work, ignore_errors=True)
        return sites

    def _environment(self, home: str) -> dict[str, str]:
        folder = self._work.resolve() / home
        storage.make_folder(folder)
        return flower_environment(folder) | {"OMP_NUM_THREADS": "1"}

    def _start_server(self, processes: Processes, say: Say) -> int:
        port, certs, work = free_port(), self._work.resolve() / "certs", self._work.resolve()
        control = int(self._control.address.rpartition(":")[2])
        self._control.connect()
        ports = ["--host", HOST, "--port", str(port), "--control-port", str(control)]
        command = ["server", str(certs), *ports, "--folder", str(work / "server")]
        self._start(processes, "superlink", command, "server")
        processes.wait(
            "the superlink to listen", START_SECONDS, lambda: is_listening(HOST, port) and is_listening(HOST, control)
        )
        say(f"started  superlink on {HOST}:{port}, with TLS and node authentication")
        return port

    def _register(self, names: list[str], say: Say) -> None:
        """Register all keys at the same time: each takes a process."""
        keys = [str(self._work / "certs" / f"{name}.pub") for name in names]
        running = [self._control.flwr("supernode", "register", key, CONNECTION) for key in keys]
        for name, process in zip(names, running, strict=True):
            finish(process, f"register the key of {name}")
        say(f"registered the keys of {', '.join(names)}")

    def _start_node(self, processes: Processes, site: Site, port: int) -> None:
        certs, path = self._work.resolve() / "certs", site.folder / "node.toml"
        node = {
            "client": site.client,
            "data": site.data,
            "vault": "vault",
            "peers": str(certs),
            **self.plan.node,
            **site.more,
        }
        node |= {"group": site.group} if site.group else {}
        text = node_toml(f"{HOST}:{port}", node, ca=str(certs / "ca.crt"), key=str(certs / site.client))
        storage.write_atomically(path, text.encode())
        home = f"node-{site.client}"
        self._start(processes, home, ["node", str(path), "--home", str(self._work.resolve() / home)], home)

    def _start(self, processes: Processes, name: str, command: list[str], home: str) -> None:
        """One of `kinfed deploy`'s own commands."""
        warm = [] if self.warm else ["--cold"]
        processes.start(name, [sys.executable, "-m", "kinfed", "deploy", *command, *warm], self._environment(home))


def site_names(federation: Federation) -> list[str]:
    """The clients' own names if they can name a key file, else client-0, client-1, ..."""
    names = federation.names
    if all(can_name_a_key(name) and "," not in name and not name.isdigit() for name in names):
        return list(names)
    return [f"client-{k}" for k in range(len(names))]


def write_sites(folder: Path, federation: Federation, names: list[str]) -> list[Site]:
    """One folder and one .npz file per client. Features are scaled as in a simulation, and every row has its split."""
    if federation.features.packing is not None:
        raise ConfigError(
            f"nodes of a deployment have examples of one array, and these have several inputs, "
            f"{federation.features.packing.in_words()}; run them in a simulation (kinfed.run)"
        )
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
        sites.append(Site(name, path.parent, group, path.name))
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
    known = (*SETTINGS, *DATA_SETTINGS, *NON_RESULT_SETTINGS, "algorithms", "seeds", "preset", "as_published")
    for name in config.changed:
        if name not in known:
            raise ConfigError(f"{name} is no setting of a deployment; leave it out")
    values = {name: getattr(config, name) for name in SETTINGS if name in RUN_DEFAULTS and name != "clients"}
    named = {name: values[name] for name in ("model", "robust") if isinstance(values[name], Named)}
    owned = {f"{name}.{key}": value for name, one in named.items() for key, value in one.options.items()}
    problem = federation.problem
    if not (problem.classifies or problem.is_single_number):
        target = {"target": json.dumps(problem.to_json())}
    elif problem.is_regression:
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
