"""Bugs planted on purpose, one at a time, and whether the nearest tests notice.

    python benchmarks/mutants.py                              the rooms that protect people, all mutants: hours
    python benchmarks/mutants.py --share 0.1                  a tenth of them, always the same
    python benchmarks/mutants.py kinfed/updates/robust.py     one file or folder, without the named ones
    python benchmarks/mutants.py --named                      the bugs of mutants.toml alone: two minutes

A mutant is one change of one line: a comparison that lets its boundary in or out, a condition turned round, a check
left out, a sum that is a difference, a smallest that is a largest, a number that is one more. Its tests are those of
its room, and those elsewhere that import its module, without those that start other processes: all of them run once,
and what they execute is recorded; then a mutant needs only the tests that execute its statement, the fastest first. It
is killed if one of them fails (or takes ten times the processor time), and survives otherwise. One whose tests hang is
`hung`, which is as good, and may be a busy machine's doing: try it again.

mutants.toml beside this file lists named mutants, which are attacks that worked once: each takes one defence away, and
`tests` are the files, or single tests, that are to notice; and survivors with the reason why nothing can tell them from
the original. A survivor that is not listed makes the command fail. Processes are forked from one that has imported
torch, so that a mutant costs its tests and little else.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import math
import os
import re
import resource
import signal
import sys
import tempfile
import threading
import time
import tomllib
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
LIST = Path(__file__).with_suffix(".toml")
ROOMS = ("privacy", "updates", "deploy/node", "deploy/secure", "deploy/server", "deploy/transport", "analysis")
MARKERS = "not ray and not flower and not browser and not documents"
LEAST_SECONDS, PATIENCE = 30.0, 10.0  # of a mutant's tests: at least, and so many times what they take without it
MOST_SECONDS = 60.0  # of the tests of one mutant, as they take without it; all of the processor, but for
HANGING = 1200.0  # seconds without an end

NOTICED = ("killed", "hung")

SWAPS: dict[type[ast.AST], str] = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==", ast.In: "not in",
    ast.NotIn: "in", ast.Is: "is not", ast.IsNot: "is", ast.Add: "-", ast.Sub: "+", ast.Mult: "/", ast.Div: "*",
}  # fmt: skip
NAMES = {"min": "max", "max": "min", "any": "all", "all": "any", "clamp_min": "clamp_max", "clamp_max": "clamp_min"}


@dataclass(frozen=True)
class Mutant:
    path: str  # of the file, from the root of the repository
    place: str  # the function or class that it is in
    before: str  # text of the change, in one line
    after: str
    source: str  # the whole file with the change
    lines: tuple[int, int] = (0, 0)  # first and last of its statement; 0 of one that is executed at import
    why: str = ""  # of named ones: what would go wrong
    tests: tuple[str, ...] = ()  # of named ones: the files of tests that are to notice, instead of the nearest

    @property
    def key(self) -> str:
        return f"{self.path} {self.place}: {self.before} → {self.after}"

    def drawn(self, share: float) -> bool:
        return int(hashlib.sha256(self.key.encode()).hexdigest()[:8], 16) < share * 16**8


@dataclass
class Verdict:
    mutant: Mutant
    outcome: str  # killed, hung, survived, untested
    seconds: float
    by: str = ""  # the first test that failed


def main() -> None:
    parser = argparse.ArgumentParser("mutants.py")
    parser.add_argument("places", nargs="*", help="files or folders; default: the rooms that protect people")
    parser.add_argument("--named", action="store_true", help="only the bugs that mutants.toml names")
    parser.add_argument("--share", type=float, default=1.0, help="of the generated mutants")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--tests", default="", help="files of tests, with commas between, in place of the nearest")
    parser.add_argument("--survey", default="", help="file for what the tests execute, to be used again")
    arguments = parser.parse_args()
    listed = tomllib.loads(LIST.read_text())
    mutants = [] if arguments.places else named_mutants(listed)
    if not arguments.named:
        places = arguments.places or [f"kinfed/{room}" for room in ROOMS]
        files = sorted({file for place in places for file in python_files(ROOT / place)})
        mutants += [mutant for file in files for mutant in generated_mutants(file) if mutant.drawn(arguments.share)]
    preload()
    verdicts = list(judged(mutants, arguments.jobs, arguments.survey, arguments.tests))
    sys.exit(report(verdicts, {entry["mutant"]: entry["reason"] for entry in listed.get("survivor", [])}))


def python_files(place: Path) -> Iterator[Path]:
    files = [place] if place.is_file() else place.rglob("*.py")
    yield from (file for file in files if file.name != "__init__.py")


def named_mutants(listed: dict[str, Any]) -> list[Mutant]:
    mutants = []
    for entry in listed["named"]:
        source = (ROOT / entry["path"]).read_text()
        if source.count(entry["before"]) != 1:
            sys.exit(f"{LIST.name}: {entry['path']} has {entry['before']!r} not once; bring the entry up to date")
        source = source.replace(entry["before"], entry["after"])
        tests = tuple(entry.get("tests", ()))
        mutants.append(Mutant(entry["path"], "", entry["before"], entry["after"], source, (0, 0), entry["why"], tests))
    return mutants


def generated_mutants(file: Path) -> Iterator[Mutant]:
    source, path = file.read_text(), str(file.relative_to(ROOT))
    lines = source.splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line.encode()))
    data = source.encode()
    seen: dict[str, int] = {}
    for place, of_statement, begin, end, text in changes(ast.parse(source), data, starts):
        number = data[:begin].count(b"\n")
        before = lines[number].strip()
        offset = begin - starts[number]
        row = lines[number].encode()
        last = min(end - starts[number], len(row))
        after = (row[:offset] + text.encode() + row[last:]).decode().strip()
        if after == before:
            continue
        key = f"{place}: {before} → {after}"
        seen[key] = seen.get(key, 0) + 1
        if seen[key] == 1:
            changed = (data[:begin] + text.encode() + data[end:]).decode()
            yield Mutant(path, place, before, after, changed, of_statement)


def changes(
    tree: ast.Module, data: bytes, starts: list[int]
) -> Iterator[tuple[str, tuple[int, int], int, int, str]]:  # fmt: skip
    """Place, lines of the statement, bytes from and to, and the text to put there, of every change."""

    def span(node: Any) -> tuple[int, int]:
        return starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset

    def between(left: Any, right: Any, text: str) -> tuple[int, int, str] | None:
        """The operator between two operands, if nothing else stands there."""
        begin, end = span(left)[1], span(right)[0]
        found = re.fullmatch(rb"([\s)]*)(not in|is not|[<>=!+*/-]+|in|is|and|or)([\s(]*)", data[begin:end])
        return None if found is None else (begin + found.start(2), begin + found.end(2), text)

    def visit(
        node: ast.AST, place: str, lines: tuple[int, int], runs: bool
    ) -> Iterator[tuple[str, tuple[int, int], int, int, str]]:  # fmt: skip
        """`runs`: whether the node is in a function, and not executed at import."""
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            place = f"{place}.{node.name}" if place else node.name
        if isinstance(node, ast.stmt) and runs:
            body = getattr(node, "body", None)
            lines = node.lineno, body[0].lineno - 1 if body else node.end_lineno or node.lineno
            lines = lines[0], max(lines)
        found: list[tuple[int, int, str] | None] = []
        if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in SWAPS:
            found = [between(node.left, node.comparators[0], SWAPS[type(node.ops[0])])]
        elif isinstance(node, ast.BinOp) and type(node.op) in SWAPS and not is_text(node):
            found = [between(node.left, node.right, SWAPS[type(node.op)])]
        elif isinstance(node, ast.BoolOp):
            text = "or" if isinstance(node.op, ast.And) else "and"
            found = [between(*pair, text) for pair in zip(node.values, node.values[1:], strict=False)]
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            found = [(span(node)[0], span(node)[0] + len("not "), "")]
        elif isinstance(node, ast.If) and any(isinstance(one, ast.Raise) for one in node.body):
            found = [(*span(node.test), "False")]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute):
            name = node.func.id if isinstance(node.func, ast.Name) else node.func.attr
            end = span(node.func)[1]
            found = [(end - len(name), end, NAMES[name])] if name in NAMES else []
        elif isinstance(node, ast.Constant) and type(node.value) in (int, float) and node.value is not True:
            found = [(*span(node), str(node.value + 1))]
        elif isinstance(node, ast.Constant) and type(node.value) is bool:
            found = [(*span(node), str(not node.value))]
        for one in found:
            if one is not None:
                yield (place, lines, *one)
        skipped: Iterable[Any] = ()
        if isinstance(node, ast.arg | ast.AnnAssign):
            skipped = (node.annotation,)
        elif isinstance(node, ast.FunctionDef):
            skipped = (*node.decorator_list, node.returns)
        elif isinstance(node, ast.ClassDef):
            skipped = node.decorator_list
        elif isinstance(node, ast.Raise | ast.JoinedStr | ast.Assert):
            return  # words, and what cannot happen
        for child in ast.iter_child_nodes(node):
            if not any(child is one for one in skipped):
                inside = isinstance(node, ast.FunctionDef) and child in node.body
                yield from visit(child, place, lines, runs or inside)

    yield from visit(tree, "", (0, 0), False)


def is_text(node: ast.BinOp) -> bool:
    kinds = ast.JoinedStr | ast.Constant | ast.List | ast.Tuple
    return any(isinstance(one, kinds) and not is_number(one) for one in (node.left, node.right))


def is_number(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, int | float)


def tests_near(paths: Iterable[str]) -> list[str]:
    """Files of tests of the rooms of these modules, and those elsewhere that import one of them; without those that
    start other processes."""
    files = {file: file.read_text() for file in sorted((ROOT / "tests").rglob("test_*.py"))}
    files = {file: text for file, text in files.items() if not re.search(r"^pytestmark.*\n?.*(ray|flower)", text, re.M)}
    rooms = {Path(path).parts[1] for path in paths}
    modules = "|".join(re.escape(path.removesuffix(".py").replace("/", ".")) for path in paths)
    near = [file for file, text in files.items() if file.parent.name in rooms or re.search(rf"\b({modules})\b", text)]
    return [str(file.relative_to(ROOT)) for file in near]


def preload() -> None:
    """What takes long to import and no mutant is in."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.path[:0] = [str(ROOT), str(ROOT / "papers"), str(ROOT / "tests")]
    os.chdir(ROOT)
    import numpy  # noqa: F401
    import pydantic  # noqa: F401
    import pytest  # noqa: F401
    import scipy.stats  # noqa: F401
    import sklearn.cluster  # noqa: F401
    import torch  # noqa: F401


@dataclass
class Survey:
    """What tests execute of some modules, and how long they take; tests that fail without any mutant are left out."""

    seconds: dict[str, float] = field(default_factory=dict)  # by test, as pytest calls it
    lines: dict[str, dict[str, set[int]]] = field(default_factory=dict)  # of modules by test and path

    @classmethod
    def of(cls, paths: list[str], files: list[str], out: Path) -> Survey:
        """`files`: of tests; `out`: where it is kept, and taken from if it is there already."""
        log = out.with_suffix(".log")
        if not paths or not files:
            return cls()
        if not out.exists():
            print(f"{len(files)} files of tests, once, to see what they execute", flush=True)
            _, status = os.waitpid(start(files, log, None, Watch(paths, out)), 0)
            if not out.exists():
                sys.exit(f"the tests cannot run without mutants ({status}):\n{log.read_text(errors='replace')[-3000:]}")
        record = json.loads(out.read_text())
        for name in record["failed"]:
            print(f"fails without any mutant, and is left out: {name}", flush=True)
        passed = {name: one for name, one in record["tests"].items() if name not in record["failed"]}
        seconds = {name: one["seconds"] for name, one in passed.items()}
        return cls(seconds, {name: {k: set(v) for k, v in one["lines"].items()} for name, one in passed.items()})

    def tests_of(self, mutant: Mutant) -> list[str]:
        """Those that execute the mutant's statement, or anything of its file if it is executed at import."""
        first, last = mutant.lines
        wanted = set(range(first, last + 1))
        reached = [name for name, lines in self.lines.items() if (own := lines.get(mutant.path))
                   and (not first or not wanted.isdisjoint(own))]  # fmt: skip
        tests, seconds = [], 0.0
        for name in sorted(reached, key=lambda name: self.seconds[name]):
            seconds += self.seconds[name]
            if tests and seconds > MOST_SECONDS:
                break
            tests.append(name)
        return tests


class Watch:
    """A plugin of pytest's that writes which lines of some modules every test executes."""

    def __init__(self, paths: list[str], out: Path) -> None:
        self.paths, self.out = {str(ROOT / path): path for path in paths}, out
        self.tests: dict[str, dict[str, Any]] = {}
        self.failed: set[str] = set()
        self.seen: dict[str, set[int]] = {}

    def _call(self, frame: Any, event: str, _: Any) -> Any:
        return self._line if frame.f_code.co_filename in self.paths else None

    def _line(self, frame: Any, event: str, _: Any) -> Any:
        self.seen.setdefault(self.paths[frame.f_code.co_filename], set()).add(frame.f_lineno)
        return self._line

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.seen, self.began = {}, time.process_time()
        threading.settrace(self._call)
        sys.settrace(self._call)

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self.failed.add(report.nodeid)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        sys.settrace(None)
        lines = {path: sorted(some) for path, some in self.seen.items()}
        self.tests[nodeid] = {"seconds": time.process_time() - self.began, "lines": lines}

    def pytest_sessionfinish(self) -> None:
        self.out.write_text(json.dumps({"tests": self.tests, "failed": sorted(self.failed)}))


@dataclass
class Running:
    mutant: Mutant
    began: float
    log: Path


def judged(mutants: list[Mutant], jobs: int, survey_file: str, files: str) -> Iterator[Verdict]:
    running: dict[int, Running] = {}
    waiting = list(reversed(mutants))
    with tempfile.TemporaryDirectory() as folder:
        paths = sorted({mutant.path for mutant in mutants if not mutant.tests})
        near = files.split(",") if files else tests_near(paths)
        survey = Survey.of(paths, near, Path(survey_file or f"{folder}/survey.json"))
        while waiting or running:
            while waiting and len(running) < jobs:
                mutant = waiting.pop()
                tests = list(mutant.tests) or survey.tests_of(mutant)
                if not tests:
                    verdict = Verdict(mutant, "untested", 0.0)
                    print(f"{verdict.outcome:9}          {mutant.key}", flush=True)
                    yield verdict
                    continue
                log = Path(folder) / f"{len(waiting)}.log"
                limit = PATIENCE * max(LEAST_SECONDS, sum(survey.seconds.get(name, 0.0) for name in tests))
                running[start([*tests, "-x"], log, mutant, seconds=limit)] = Running(mutant, time.monotonic(), log)
            for pid, one in list(running.items()):
                seconds = time.monotonic() - one.began
                ended, status = os.waitpid(pid, os.WNOHANG)
                outcome = "killed" if status else "survived"
                if not ended and seconds > HANGING:
                    os.killpg(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
                    ended, outcome = pid, "hung"
                if ended:
                    del running[pid]
                    verdict = Verdict(one.mutant, outcome, seconds, first_failure(one.log))
                    print(f"{verdict.outcome:9} {seconds:5.1f} s  {one.mutant.key}", flush=True)
                    yield verdict
            time.sleep(0.05)


def start(tests: list[str], log: Path, mutant: Mutant | None, *plugins: object, seconds: float = 0.0) -> int:
    """A process of its own group that runs the tests on the mutant, in so many seconds of the processor at most."""
    if pid := os.fork():
        return pid
    os.setpgid(0, 0)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    if seconds:
        used = time.process_time()
        resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(used + seconds), resource.RLIM_INFINITY))
    code = 2
    try:
        import pytest

        if mutant is not None:
            plant(mutant)
        code = pytest.main([*tests, "-q", "-n0", "-p", "no:cacheprovider", "-m", MARKERS], plugins=list(plugins))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(int(code))


def plant(mutant: Mutant) -> None:
    original, target = SourceFileLoader.get_code, str(ROOT / mutant.path)

    def get_code(self: SourceFileLoader, name: str) -> Any:
        if self.path == target:
            return compile(mutant.source, target, "exec", dont_inherit=True)
        return original(self, name)

    SourceFileLoader.get_code = get_code  # type: ignore[method-assign,assignment]


def first_failure(log: Path) -> str:
    found = re.search(r"^(?:FAILED|ERROR) (\S+)", log.read_text(errors="replace"), re.MULTILINE)
    return "" if found is None else found.group(1)


def report(verdicts: list[Verdict], reasons: dict[str, str]) -> int:
    """Prints the table and what to do; 1 where a survivor is not listed."""
    rooms: dict[str, list[Verdict]] = {}
    for verdict in verdicts:
        rooms.setdefault("named" if verdict.mutant.why else verdict.mutant.path, []).append(verdict)
    print(f"\n{'':48} mutants  killed  listed  survived")
    for name, some in sorted(rooms.items()):
        survivors = [one for one in some if one.outcome not in NOTICED]
        listed = sum(one.mutant.key in reasons for one in survivors)
        killed = len(some) - len(survivors)
        print(f"{name:48} {len(some):7} {killed:7} {listed:7} {len(survivors) - listed:9}")
    new = [one for one in verdicts if one.outcome not in NOTICED and one.mutant.key not in reasons]
    for one in new:
        print(f"\n{one.outcome}: {one.mutant.key}" + (f"\n  {one.mutant.why}" if one.mutant.why else ""))
    stale = [one.mutant.key for one in verdicts if one.outcome in NOTICED and one.mutant.key in reasons]
    for key in stale:
        print(f"\nlisted as a survivor, and killed: take it out of {LIST.name}: {key}")
    print(f"\n{len(verdicts)} mutants, {sum(one.seconds for one in verdicts):.0f} s of tests, {len(new)} not noticed")
    return 1 if new else 0


if __name__ == "__main__":
    main()
