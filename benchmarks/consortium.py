"""A consortium on one machine, from start kits to pages: a Flower node for every hospital's table, and its questions.

    python benchmarks/consortium.py --out trial [--table heart_disease] [--parts describe,fit,kill,matrix]
        [--algorithms auto] [--folds 3] [--rounds 20]

Sites make keys of their own, the operator enrols them and writes kits; `kinfed deploy server` and a node for every kit
run until the end. Then, with the commands of a user (`--at`):

    describe    what the tables are like
    fit         the search, its round trips, seconds, and what differs from `kinfed fit --deploy chosen` of all rows
    kill        a smaller search, all processes killed (SIGKILL) after rounds 2 and 4, started again: what differs
    matrix      every site's model at every site

Prints what it measured. `--epsilon` gives every owner that rule, and `--noise` the search its noise.
"""

from __future__ import annotations

import argparse
import atexit
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv as pa_csv

sys.path.insert(0, str(Path(__file__).parent))

from search_equality import differences

import kinfed
from kinfed.data.sources import site_rows
from kinfed.deploy.node.vault import Vault
from kinfed.deploy.programs.processes import free_port
from kinfed.serving import ModelPipeline
from kinfed.tabular import FitResult

KINFED = [sys.executable, "-m", "kinfed"]
RUNS = {"OMP_NUM_THREADS": "1", "FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}


class Consortium:
    def __init__(self, folder: Path, table: str, rules: dict[str, str]) -> None:
        self.folder, self.rules = folder.resolve(), rules
        self.rows, self.options = site_rows(table, {})
        column = self.options.client_column
        assert column is not None
        self.column, self.parts = column, list[pa.Table]()
        self.label = str(self.options.label_column)
        owner = [str(one).strip() for one in self.rows[column].to_pylist()]
        rest = self.rows.drop_columns([column, *(name for name in self.options.ignored if name != column)])
        self.tables = {name: rest.filter(pa.array([one == name for one in owner])) for name in sorted(set(owner))}
        self.names = list(self.tables)
        self.port, self.control = free_port(), free_port()
        self.processes: list[subprocess.Popen[bytes]] = []

    # ---- kits and processes ----

    def prepare(self) -> None:
        """Keys at the sites, public halves at the operator, a kit for each site."""
        self._run("certs", "certs", "--host", "127.0.0.1", "--host", "localhost")
        for name, rows in self.tables.items():
            site = self.folder / "sites" / name
            site.mkdir(parents=True)
            pa_csv.write_csv(rows, site / "rows.csv")
            own = pa_csv.read_csv(site / "rows.csv")  # as nodes read it: digits are numbers
            self.parts.append(own.append_column(self.column, pa.array([name] * own.num_rows)))
            self._run("key", name, "--folder", str(site))
            self._run("enrol", "certs", str(site / f"{name}.pub"))
        for name in self.names:
            site = self.folder / "sites" / name
            self._run("kit", "--client", name, "--server", f"127.0.0.1:{self.port}", "--data", str(site / "rows.csv"),
                      "--out", str(site / "kit"))  # fmt: skip
            shutil.copy(site / name, site / "kit" / name)
            rules = "".join(
                f'{key} = "{value}"\n' for key, value in {**self.rules, "vault": str(site / "vault")}.items()
            )
            path = site / "kit" / "node.toml"
            text = "\n".join(line for line in path.read_text().splitlines() if not line.startswith("vault"))
            path.write_text(f"{text.rstrip()}\n{rules}")

    def start(self) -> None:
        ports = ["--host", "127.0.0.1", "--port", str(self.port), "--control-port", str(self.control)]
        self._begin("server", "server", str(self.folder / "certs"), *ports, "--folder", str(self.folder / "superlink"))
        connection = self.folder / "home" / "config.toml"
        connection.parent.mkdir(exist_ok=True)
        connection.write_text(
            f'[superlink]\ndefault = "fl"\n[superlink.fl]\naddress = "127.0.0.1:{self.control}"\n'
            f'root-certificates = "{self.folder / "certs" / "ca.crt"}"\n'
        )
        for name in self.names:
            key = self.folder / "certs" / f"{name}.pub"
            command = [str(Path(sys.executable).parent / "flwr"), "supernode", "register", str(key), "fl"]
            end = time.monotonic() + 300
            while True:
                done = subprocess.run(
                    command, env=self._environment("home"), capture_output=True, text=True, check=False
                )
                if done.returncode == 0 or "already" in done.stdout + done.stderr:
                    break
                if time.monotonic() > end:
                    raise SystemExit(done.stdout + done.stderr)
                time.sleep(2)
        for name in self.names:
            node = self.folder / "sites" / name / "kit" / "node.toml"
            self._begin(f"node-{name}", "node", str(node), "--home", str(self.folder / f"home-{name}"))

    def kill(self) -> None:
        """SIGKILL to everything at once."""
        for process in self.processes:
            for pid in [process.pid, *_children(process.pid)]:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
        for process in self.processes:
            process.wait()
        self.processes.clear()

    def _environment(self, home: str) -> dict[str, str]:
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        return os.environ | RUNS | {"FLWR_HOME": str(self.folder / home), "PATH": path}

    def _run(self, *words: str) -> None:
        command = [*KINFED, "deploy", *words]
        done = subprocess.run(command, cwd=self.folder, env=self._environment("home"), capture_output=True, text=True,
                              check=False)  # fmt: skip
        if done.returncode:
            raise SystemExit(f"{' '.join(words)}: {done.stdout}{done.stderr}")

    def _begin(self, name: str, *words: str) -> None:
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes.append(subprocess.Popen([*KINFED, "deploy", *words], cwd=self.folder, stdout=log, stderr=log,
                                                   env=self._environment(f"home-{name}")))  # fmt: skip

    # ---- questions ----

    def ask(self, *words: str, out: str, kill_after: tuple[int, ...] = ()) -> float:
        """Run a command of `kinfed deploy` with `--at`; seconds that it took. After each of these rounds all processes
        are killed, and started again with the same command."""
        where = ["--at", f"127.0.0.1:{self.control}", "--certs", str(self.folder / "certs")]
        command = [*KINFED, "deploy", *words, *where, "--sites", ",".join(self.names), "--out", out]
        began, log = time.monotonic(), self.folder / out / "log.txt"
        for rounds in (*kill_after, None):
            with (self.folder / f"{words[0]}.log").open("ab") as file:
                process = subprocess.Popen(command, cwd=self.folder, env=self._environment("home-ask"), stdout=file,
                                           stderr=file)  # fmt: skip
            if rounds is None:
                if process.wait():
                    raise SystemExit(f"{' '.join(command)}: see {self.folder / words[0]}.log")
                break
            while not (log.exists() and f"round {rounds} of" in log.read_text("utf-8")):
                if process.poll() is not None:
                    raise SystemExit(f"{words[0]} ended before round {rounds}; see {self.folder / words[0]}.log")
                time.sleep(0.5)
            process.kill()
            process.wait()
            self.kill()
            print(f"  killed everything after round {rounds}", flush=True)
            self.start()
        return time.monotonic() - began

    def models(self) -> dict[str, ModelPipeline]:
        return {name: ModelPipeline.read(Vault(self._vault(name)).model_path()) for name in self.names}

    def _vault(self, name: str) -> str:
        return str(self.folder / "sites" / name / "vault")

    def compare(self, out: str, search: dict[str, Any]) -> None:
        """A finished search beside a fit of the pooled table."""
        ours = FitResult.read(self.folder / out)
        methods = list(dict.fromkeys(one.method for one in ours.contenders))
        rows = pa.concat_tables(self.parts, promote_options="permissive")
        began = time.process_time()
        pooled = kinfed.fit(
            rows, client_column=self.column, label_column=self.label, deploy="chosen", references=False, accept="all",
            **search | {"algorithms": ",".join(methods)},
        )  # fmt: skip
        wrong, figure, weight = differences(ours, self.models(), pooled, rows.slice(0, 50))
        lines = (self.folder / out / "log.txt").read_text().splitlines()
        trips = [line for line in lines if "round trips" in line]
        print(f"  {trips[-1].partition(' ')[2]}; pooled fit: {time.process_time() - began:.0f} s of processor time")
        print(f"  figures differ by {figure:.1e}, parameters by {weight:.1e}; other choices: {wrong or 'none'}")
        for site in ours.sites:
            print(f"  {site.site}: takes {site.chosen}, gain {site.gain.value} [{site.gain.low}, {site.gain.high}]")


def _children(pid: int) -> list[int]:
    table: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text(errors="replace").rpartition(")")[2].split()
        except OSError:
            continue
        table.setdefault(int(fields[1]), []).append(int(path.parent.name))
    family, todo = [], [pid]
    while todo:
        new = table.get(todo.pop(), [])
        family += new
        todo += new
    return family


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--table", default="heart_disease")
    parser.add_argument("--parts", default="describe,fit,kill,matrix")
    parser.add_argument("--algorithms", default="auto")
    parser.add_argument("--folds", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--epsilon", type=float)
    parser.add_argument("--noise", type=float)
    chosen = parser.parse_args()
    parts = chosen.parts.split(",")
    rules = {} if chosen.epsilon is None else {"epsilon": f"{chosen.epsilon:g}", "sums": "yes"}
    net = Consortium(chosen.out, chosen.table, rules)
    net.folder.mkdir(parents=True)
    print(f"load {os.getloadavg()[0]:.1f}; {chosen.table}: {', '.join(net.names)}", flush=True)
    began = time.monotonic()
    net.prepare()
    atexit.register(net.kill)
    net.start()
    print(f"kits, keys, server and {len(net.names)} nodes: {time.monotonic() - began:.0f} s", flush=True)
    label = ["--label-column", net.label]
    classes = ["--classes", ",".join(sorted({str(one) for one in net.rows[net.label].to_pylist()}))]

    def search(name: str, settings: dict[str, Any], **more: Any) -> None:
        typed = [word for key, value in settings.items() for word in (f"--{key}", str(value))]
        noise = ["--dp-noise", f"{chosen.noise:g}"] if chosen.noise else []
        seconds = net.ask("fit", *label, *classes, *typed, *noise, out=name, **more)
        print(f"{name}: {seconds:.0f} s", flush=True)
        if not noise:
            net.compare(name, settings)

    if "describe" in parts:
        print(f"describe: {net.ask('describe', out='described'):.0f} s", flush=True)
    if "fit" in parts:
        search("search", {"algorithms": chosen.algorithms, "models": "mlr", "trials": 1, "folds": chosen.folds,
                          "rounds": chosen.rounds})  # fmt: skip
    if "kill" in parts:
        settings = {"algorithms": "glmm,ditto", "models": "mlr", "trials": 1, "folds": 2, "rounds": 6}
        search("killed", settings, kill_after=(2, 4))
    if "matrix" in parts:
        shown = net.folder / "shown"
        shown.mkdir()
        for name, model in net.models().items():
            model.save(shown / f"{name}.safetensors")
        print(f"matrix: {net.ask('evaluate', str(shown), *label, out='matrix'):.0f} s", flush=True)
        record = json.loads((net.folder / "matrix" / "evaluate.json").read_text())
        for model in record["models"]:
            scores = {name: site["scores"][model].get(record["metric"]) for name, site in record["sites"].items()}
            print(f"  {model}: {scores}", flush=True)
    print(f"load {os.getloadavg()[0]:.1f}", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
