"""The golden matrix: hashes of the results of many small runs, so that a refactoring can be proven to change nothing.

    python benchmarks/golden.py record                    writes benchmarks/golden.jsonl
    python benchmarks/golden.py check                     runs the matrix again and names every difference
    python benchmarks/golden.py check --against REVISION  compares with that revision instead, run on this machine

Cells are every backend with all methods, plain and under each feature that changes what happens to an update, then
runs that were killed or extended, Ray, a deployment with real Flower nodes, recipes, fits, and help texts. Only the
command line and the files of a run folder are used, so that the tool works before and after any change of modules.

Results are equal bit for bit on one kind of processor only. golden.jsonl names the one it was made on; elsewhere
`check` compares losses and metrics to 1 %, and `--against` gives the exact answer. Set one thread, as this does.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
FILE = Path(__file__).with_suffix(".jsonl")
TOLERANCE = 0.01  # relative, on another kind of processor
SMALL = "--rounds 4 --clients 8 --steps 3 --eval-every 2 --checkpoint-every 2 --seeds 0 --no-report"
BACKENDS = {
    "stacked": "--backend stacked",
    "fused": "--backend fused",
    "rows": "--backend rows",
    "vmap": "--backend vmap",
    "cnn": "--model cnn_small",
    "batched": "--plugin {plugin} --model tiny_adapters --backend batched",
}
FEATURES = {
    "plain": "",
    "example-privacy": "--dp-noise 1",
    "user-privacy": "--user-noise 0.5",
    "user-quantile": "--user-noise 0.5 --user-quantile 0.5",
    "secure-sum": "--secure-sum",
    "robust": "--robust median",
    "largest-norm": "--largest-norm 0.5",
    "compressed": "--compress qsgd:7",
    "topk": "--compress topk:0.1",
    "async": "--mode fedbuff",
    "folds": "--folds 2",
    "warm-start": "--pretrain 1 --warm-start 2",
    "momentum-kept": "--momentum 0.9 --optimizer-state kept",
    "adam": "--optimizer adam --lr 0.001",
    "dropouts": "--dropout 0.2 --stragglers 0.3",
    "clock": "--clock lognormal",
}
PLUGIN = """
import kinfed
from torch import nn

@kinfed.register("model", "tiny_adapters", summary="adapters on a small network", example=((1, 8, 8), 10))
def tiny_adapters(shape, classes):
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.Tanh(), nn.Linear(16, classes))
    return kinfed.lora(net, "1", rank=2, train="3")
"""
SEQUENCES = """
import sys
import kinfed
from sklearn.datasets import load_digits

x, y = load_digits(return_X_y=True)
x = x.reshape(-1, 8, 8).astype("float32") / 16
federation = kinfed.Federation.from_arrays(x, y, [i % 8 for i in range(len(y))])
kinfed.run(
    federation=federation, model={"name": "lstm", "hidden": 6}, backend=sys.argv[2], algorithms="all", rounds=4,
    steps=3, eval_every=2, checkpoint_every=2, seeds=[0], out=sys.argv[1],
)
"""
TABLE = """
import random
import sys

random.seed(5)
with open(sys.argv[1], "w") as file:
    print("site,age,colour,gap,outcome", file=file)
    for i in range(360):
        site = i % 6
        age, colour = random.gauss(50, 10), random.choice(["red", "green", "blue"])
        gap = "" if random.random() < 0.2 else f"{random.random():.3f}"
        sick = random.random() < 0.5 + 0.02 * (age - 50) * (1 if site < 3 else -1) + 0.1 * (colour == "red")
        print(f"s{site},{age:.2f},{colour},{gap},{'sick' if sick else 'well'}", file=file)
"""


@dataclass(frozen=True)
class Cell:
    """Commands that leave files in {out}; `equal_to` names the cell whose results these must be."""

    name: str
    commands: tuple[str, ...]
    kills: bool = False
    equal_to: str = ""


def cells() -> Iterator[Cell]:
    """The matrix, cheap cells first."""
    yield Cell("help", ("help",))
    run = "kinfed run --algorithms all " + SMALL
    for backend, choice in BACKENDS.items():
        for feature, options in FEATURES.items():
            yield Cell(f"{backend}/{feature}", (f"{run} {choice} {options} --out {{out}}/run",))
        plain = f"{run} {choice}"
        yield Cell(f"{backend}/resumed", (f"{plain} --out {{out}}/run",), kills=True, equal_to=f"{backend}/plain")
        shorter = f"{plain} --rounds 2 --out {{out}}/run"
        longer = "kinfed run --no-report --extend --rounds 4 --out {out}/run"
        yield Cell(f"{backend}/extended", (shorter, longer), equal_to=f"{backend}/plain")
    for backend in ("auto", "fused"):
        yield Cell(f"lstm/{backend}", (f"python {{sequences}} {{out}}/run {backend}",))
    some = "--algorithms local,fedavg,ditto,scaffold,selffl,fedfomo,cgpfl,kin,fedper"
    for backend in ("stacked", "fused"):
        ray = f"--pool ray --workers 2 --backend {backend}"
        yield Cell(f"ray/{backend}", (f"kinfed run {some} {SMALL} {ray} --out {{out}}/run",))
    for name in ("fedavg", "ditto"):
        secure = "--secure-sum" if name == "fedavg" else ""
        flower = f"kinfed deploy up --local 3 --rounds 2 --steps 3 --model mlr --seeds 0 --algorithms {name} {secure}"
        yield Cell(f"deployment/{name}", (f"{flower} --out {{out}}/trial",))
    for recipe in ("selffl-synthetic", "selffl-users", "fedfomo-validation", "cgpfl-heur"):
        yield Cell(f"recipe/{recipe}", (f"kinfed reproduce {recipe} --scale smoke --out {{out}}/reproduced",))
    fit = "--trials 1 --rounds 3 --out {out}/fit"
    yield Cell("fit/demo", (f"kinfed fit --demo {fit}",))
    columns = "--client-column site --label-column outcome"
    yield Cell("fit/table", ("python {table} {out}/table.csv", f"kinfed fit {{out}}/table.csv {columns} {fit}"))


@dataclass
class Runner:
    """Runs cells with the package of one tree."""

    tree: Path
    folder: Path

    def __post_init__(self) -> None:
        self.files = {}
        for name, text in (("plugin", PLUGIN), ("sequences", SEQUENCES), ("table", TABLE)):
            self.files[name] = self.folder / f"{name}.py"
            self.files[name].write_text(text)
        places = [self.tree, self.tree / "papers"]
        self.environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(map(str, places)),
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "OMP_NUM_THREADS": "1",
            "COLUMNS": "100",
            "TERM": "dumb",
            "NO_COLOR": "1",
            "KINFED_DATA": os.environ.get("KINFED_DATA", str(ROOT.parent / "shared" / "data")),
        }

    def values(self, cell: Cell) -> dict[str, Any]:
        """{what: hash or number} of a cell's files; {"failed": last words} of a command that fails."""
        if cell.commands == ("help",):
            return self._help_texts()
        out = self.folder / "cell"
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir()
        for command in cell.commands:
            words = command.format(out=out, **self.files).split()
            status, text = self._killed(words, out) if cell.kills else self._run(words)
            if status:
                return {"failed": text.strip().splitlines()[-1][:200] if text.strip() else f"status {status}"}
        return dict(_hashes(out))

    def _run(self, words: list[str]) -> tuple[int, str]:
        done = subprocess.run(
            self._started(words), capture_output=True, text=True, env=self.environment, cwd=self.folder, check=False
        )
        return done.returncode, done.stderr

    def _killed(self, words: list[str], out: Path) -> tuple[int, str]:
        """Killed three times, each time some rounds later, and resumed."""
        journal = out / "run" / "rounds.jsonl"
        for lines in (20, 95, 180):
            resume = ["--resume"] if (out / "run").exists() else []
            process = subprocess.Popen(
                self._started([*words, *resume]), env=self.environment, cwd=self.folder,
                stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            )  # fmt: skip
            while process.poll() is None and (not journal.exists() or journal.read_bytes().count(b"\n") < lines):
                time.sleep(0.02)
            process.kill()
            process.wait()
        return self._run([*words, "--resume"])

    def _started(self, words: list[str]) -> list[str]:
        python = [sys.executable] if words[0] == "python" else [sys.executable, "-m", "kinfed"]
        return [*python, *words[1:]]

    def _help_texts(self) -> dict[str, Any]:
        """Help of every command, and what `init` and `list` print."""
        pages = {}
        waiting: list[tuple[str, ...]] = [()]
        while waiting:
            path = waiting.pop()
            text = self._printed(*path, "--help")
            pages[" ".join(("kinfed", *path, "--help"))] = _digest(text)
            commands = text.partition("Commands ─")[2]
            waiting += [(*path, name) for name in re.findall(r"^│ ([a-z]\S*) ", commands, re.M)]
        for words in (("init", "made.toml"), *(("list", each) for each in ("methods", "partitions", "models"))):
            pages[" ".join(("kinfed", *words))] = _digest(self._printed(*words))
        pages["made.toml"] = _digest((self.folder / "made.toml").read_text())
        (self.folder / "made.toml").unlink()
        return pages

    def _printed(self, *words: str) -> str:
        command = [sys.executable, "-m", "kinfed", *words]
        return subprocess.run(
            command, capture_output=True, text=True, env=self.environment, cwd=self.folder, check=True
        ).stdout


def _hashes(folder: Path) -> Iterator[tuple[str, Any]]:
    """Hashes of what a folder holds, by file and, in run folders, by method."""
    tensors: dict[str, list[str]] = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = path.relative_to(folder).as_posix()
        if path.name == "rounds.jsonl":
            yield from _of_journal(name, path)
        elif path.name == "clients.csv":
            yield from _of_clients(name, path)
        elif path.suffix == ".safetensors" and "vault" not in path.parts:
            owner = re.sub(r"/\d{8}-[0-9a-f]{16}$", "", name.removesuffix(".safetensors"))
            content = re.sub(rb'"seconds":"[^"]*"', b"", path.read_bytes())
            tensors.setdefault(owner, []).append(_digest(content))
        elif path.name in ("results.csv", "results.md"):
            lines = path.read_text().splitlines()
            yield name, _digest("\n".join(line for line in lines if not line.startswith("Scale ")))  # date, seconds
        elif path.name in ("config.json", "summary.json", "fit.json", "study.json"):
            yield name, _digest(json.dumps(_timeless(json.loads(path.read_text())), sort_keys=True))
    yield from ((name, _digest(" ".join(digests))) for name, digests in tensors.items())


def _of_journal(name: str, path: Path) -> Iterator[tuple[str, Any]]:
    by_method: dict[str, list[Any]] = {}
    for line in path.read_text().splitlines():
        record = json.loads(line)
        by_method.setdefault(str(record.get("algorithm")), []).append(_timeless(record))
    for method, records in by_method.items():
        yield f"{name}/{method}", _digest(json.dumps(records, sort_keys=True))
        loss = ((records[-1].get("personal") or {}).get("loss"), (records[-1].get("server") or {}).get("loss"))
        yield f"{name}/losses/{method}", [None if each is None else float(f"{each:.6g}") for each in loss]


def _of_clients(name: str, path: Path) -> Iterator[tuple[str, Any]]:
    by_method: dict[str, list[Any]] = {}
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            by_method.setdefault(row.get("algorithm", ""), []).append(_timeless(row))
    for method, rows in by_method.items():
        yield f"{name}/{method}", _digest(json.dumps(rows, sort_keys=True))


# What differs between two equal runs: time, the machine, and where the run lies.
_OF_THE_MOMENT = (
    "versions", "kinfed", "started", "created", "out", "data", "plugins", "path", "table", "tables", "id",
    "files", "seal",  # digests of files that hold seconds
)  # fmt: skip


def _timeless(record: Any) -> Any:
    if isinstance(record, Mapping):
        kept = {key: value for key, value in record.items() if key not in _OF_THE_MOMENT}
        return {key: _timeless(value) for key, value in kept.items() if "seconds" not in key.split("_")}
    return [_timeless(each) for each in record] if isinstance(record, list) else record


def _digest(content: str | bytes) -> str:
    return hashlib.sha256(content.encode() if isinstance(content, str) else content).hexdigest()[:8]


def processor() -> str:
    """The kind of processor, and what torch makes of it."""
    import torch

    info = Path("/proc/cpuinfo")
    names = re.findall(r"model name\s*: (.*)", info.read_text()) if info.exists() else []
    return f"{names[0] if names else platform.processor()}, {torch.backends.cpu.get_cpu_capability()}"


def measure(
    tree: Path, pattern: str, seen: Callable[[dict[str, Any], str], None] = lambda results, cell: None
) -> dict[str, Any]:
    """All cells whose name matches, with the package in `tree`; `seen` is called after each."""
    results: dict[str, Any] = {}
    with _working_folder() as folder:
        runner = Runner(tree, folder)
        for cell in cells():
            if re.search(pattern, cell.name):
                begun = time.perf_counter()
                results[cell.name] = runner.values(cell)
                print(f"{cell.name:30} {len(results[cell.name]):5} {time.perf_counter() - begun:6.1f} s", flush=True)
                if "failed" in results[cell.name]:
                    print(f"  {results[cell.name]['failed']}", flush=True)
                seen(results, cell.name)
    return results


@contextmanager
def _working_folder() -> Iterator[Path]:
    """A folder that is at the same place for every tree, as settings and their hashes name paths."""
    folder = Path(tempfile.gettempdir()) / "kinfed-golden"
    try:
        folder.mkdir()
    except FileExistsError:
        sys.exit(f"{folder} is there: another matrix is running, or was killed; remove the folder in the latter case")
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def differences(wanted: Mapping[str, Any], got: Mapping[str, Any], exact: bool, cell: str) -> Iterator[str]:
    """A line for every value of a cell that is another one, only in one of the two, or too far away; and for results
    that should be those of an earlier cell and are not."""
    if cell in wanted:
        for what in sorted(wanted[cell].keys() | got[cell].keys()):
            old, new = wanted[cell].get(what, "absent"), got[cell].get(what, "absent")
            numbers = isinstance(old, list) and isinstance(new, list)
            if exact or old == "absent" or new == "absent" or cell == "help":
                same = old == new
            else:
                same = not numbers or all(map(_near, old, new))
            if not same:
                yield f"{cell}: {what}: {old} -> {new}"
    for twin in cells():
        if twin.name == cell and twin.equal_to in got:
            whole, again = _results(got[twin.equal_to]), _results(got[twin.name])
            yield from (f"{twin.name}: {what} is not that of {twin.equal_to}" for what in _unequal(whole, again))


def _results(values: Mapping[str, Any]) -> dict[str, Any]:
    """What a run must share with one that went another way: not its configuration and checkpoints."""
    return {what: value for what, value in values.items() if not re.search(r"config\.json|checkpoints/", what)}


def _unequal(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    return sorted(what for what in a.keys() | b.keys() if a.get(what) != b.get(what))


def _near(old: float | None, new: float | None) -> bool:
    if old is None or new is None:
        return old is new
    return abs(old - new) <= TOLERANCE * max(abs(old), abs(new))


def write(file: Path, results: Mapping[str, Mapping[str, Any]]) -> None:
    """Keep results: a line with the processor, then one for each kind of file in each cell."""
    lines: list[Any] = [processor()]
    for cell, values in results.items():
        kinds: dict[str, dict[str, Any]] = {}
        for what, value in values.items():
            kind, _, name = what.rpartition("/")
            kinds.setdefault(kind, {})[name] = value
        lines += [[cell, kind, names] for kind, names in kinds.items()]
    file.write_text("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines))


def read(file: Path) -> tuple[str, dict[str, dict[str, Any]]]:
    """The processor that results were made on, and the results."""
    first, *lines = (json.loads(line) for line in file.read_text().splitlines())
    results: dict[str, dict[str, Any]] = {}
    for cell, kind, names in lines:
        results.setdefault(cell, {}).update({f"{kind}/{name}" if kind else name: names[name] for name in names})
    return first, results


def _tree_of(revision: str, folder: Path) -> Path:
    """The files of a revision."""
    tree = folder / "tree"
    tree.mkdir()
    archive = subprocess.run(["git", "archive", revision], cwd=ROOT, capture_output=True, check=True).stdout
    subprocess.run(["tar", "-x", "-C", str(tree)], input=archive, check=True)
    return tree


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["record", "check"])
    parser.add_argument("--only", default="", help="regular expression of cells")
    parser.add_argument("--against", help="a revision to compare with")
    parser.add_argument("--file", type=Path, default=FILE)
    options = parser.parse_args()
    if options.what == "record":
        measure(ROOT, options.only, lambda results, _: write(options.file, results))
        return
    if options.against:
        with tempfile.TemporaryDirectory(prefix="golden-tree-") as folder:
            wanted, exact = measure(_tree_of(options.against, Path(folder)), options.only), True
    else:
        made_on, wanted = read(options.file)
        exact = made_on == processor()
    found = 0

    def compare(results: dict[str, Any], cell: str) -> None:
        nonlocal found
        for line in differences(wanted, results, exact, cell):
            print(line, flush=True)
            found += 1

    measure(ROOT, options.only, compare)
    print(f"{found or 'no'} differences" + ("" if exact else " beyond 1 %: another kind of processor"))
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
