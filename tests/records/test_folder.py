"""Run folders: valid and reproducible files, nothing overwritten or half-written, resumed equals uninterrupted."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from manifests import as_of_an_earlier_version, change_manifest

from kinfed.algorithms.base import ServerModels
from kinfed.core.storage import to_json
from kinfed.data.federations.description import describe
from kinfed.errors import StorageError
from kinfed.records.compare import same_results, strip_times
from kinfed.records.run_files import RunFiles
from kinfed.records.run_folder import CLIENT_COLUMNS, JournalMark, RunFolder
from kinfed.testing import tiny_federation

CONFIG: dict[str, Any] = {"rounds": 60, "seeds": [0, 1], "algorithms": {"local": {}, "ditto": {"lam": 1.0}}}


def opened(path: Path, config: dict[str, Any] = CONFIG, fingerprint: str = "mine", resume: bool = False) -> RunFolder:
    return RunFolder.open(path, config, fingerprint, resume=resume)


def record(algorithm: str, seed: int, round: int, seconds: float = 0.0) -> dict[str, Any]:
    metrics = {"loss": 1 / round, "accuracy": 0.1 * round}
    return {"round": round, "seconds": seconds, "seed": seed, "personal": metrics, "algorithm": algorithm}


def mark(*rounds: tuple[str, int, int]) -> dict[str, Any]:
    """What a checkpoint says about these lines of the journal."""
    mark = JournalMark()
    for which in rounds:
        mark.add(to_json(record(*which)).encode())
    return asdict(mark)


def tree(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


# Opening


def test_a_new_folder_gets_its_configuration_first(tmp_path: Path) -> None:
    with opened(tmp_path / "deep" / "run") as run:
        envelope = RunFiles(run.path).envelope
    assert envelope["fingerprint"] == "mine"
    assert envelope["config"] == CONFIG
    assert envelope["versions"].keys() == {"python", "torch", "numpy"}
    assert list(envelope["config"]["algorithms"]) == ["local", "ditto"]  # the order given, not the alphabet's
    assert tree(tmp_path / "deep" / "run").keys() == {"config.json", ".lock"}


def test_this_run_is_continued_only_if_asked(tmp_path: Path) -> None:
    opened(tmp_path).close()
    before = (tmp_path / "config.json").read_bytes()
    with pytest.raises(StorageError, match="already holds this run; add --resume to continue it, or choose another"):
        opened(tmp_path)
    opened(tmp_path, resume=True).close()
    assert (tmp_path / "config.json").read_bytes() == before
    opened(tmp_path / "new", resume=True).close()  # nothing there yet: a start


def test_another_run_is_refused_with_what_differs(tmp_path: Path) -> None:
    opened(tmp_path).close()
    other = {"rounds": 30, "seeds": [0], "algorithms": {"local": {}, "ditto": {"lam": 2.0}}, "dropout": 0.5}
    before = tree(tmp_path)
    with pytest.raises(StorageError) as caught:
        opened(tmp_path, other, "yours", resume=True)
    for part in (
        "rounds: 60 there, 30 now",
        "seeds: [0, 1] there, [0] now",
        "algorithms.ditto.lam: 1.0 there, 2.0 now",
        "dropout: absent there, 0.5 now",
        "resume it with the configuration it was started with, or choose another folder with --out",
    ):
        assert part in str(caught.value)
    with pytest.raises(StorageError, match=r"holds another run \(rounds: 60 there, 30 now.*\); choose another folder"):
        opened(tmp_path, other, "yours")
    with pytest.raises(StorageError, match=r"\(made from other data or code\)"):
        opened(tmp_path, CONFIG, "yours")
    many = {f"option{i}": i for i in range(9)}
    with pytest.raises(StorageError, match=r"and 7 more\)"):
        opened(tmp_path, many, "yours")
    assert tree(tmp_path).keys() == before.keys()
    assert (tmp_path / "config.json").read_bytes() == before["config.json"]


def test_unrelated_files_are_left_alone(tmp_path: Path) -> None:
    for name in ("thesis.tex", "a.csv", "b.csv", "c.csv"):
        (tmp_path / name).write_text("precious")
    with pytest.raises(StorageError, match=r"holds files but no run of kinfed \(a.csv, b.csv, c.csv, \.\.\.\); choose"):
        opened(tmp_path, resume=True)
    assert tree(tmp_path).keys() == {"thesis.tex", "a.csv", "b.csv", "c.csv"}
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match=r"cannot use .*file: Not a directory"):
        opened(tmp_path / "file")


def test_a_start_that_was_killed_early_leaves_no_obstacle(tmp_path: Path) -> None:
    (tmp_path / ".lock").write_text("process 1 on there")
    (tmp_path / ".draft-1-0.tmp").write_text('{"half')
    opened(tmp_path).close()
    assert tree(tmp_path).keys() == {"config.json", ".lock"}


def test_a_damaged_configuration_is_named(tmp_path: Path) -> None:
    opened(tmp_path).close()
    (tmp_path / "config.json").write_text('{"config": {')
    with pytest.raises(StorageError, match=r"config\.json is damaged: not valid JSON"):
        opened(tmp_path, resume=True)
    for text, words in (("[1]", "holds a list, not an object"), ('{"config": 3}', "has no fingerprint and config")):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(StorageError, match=words):
            opened(tmp_path, resume=True)
    with pytest.raises(StorageError, match="is no run folder"):
        _ = RunFiles(tmp_path / "absent").envelope


def test_one_writer_at_a_time(tmp_path: Path) -> None:
    with opened(tmp_path):
        with pytest.raises(StorageError, match=rf"is being written by process {os.getpid()} on .*; wait until it ends"):
            opened(tmp_path, resume=True)
        RunFiles(tmp_path).records()  # readers are welcome
    opened(tmp_path, resume=True).close()


def test_a_killed_writer_frees_the_folder(tmp_path: Path) -> None:
    opened(tmp_path).close()
    hold = (
        "import sys, time; from kinfed.records.run_folder import RunFolder; "
        f"run = RunFolder.open(sys.argv[1], {CONFIG!r}, 'mine', resume=True); "
        "print('held', flush=True); time.sleep(600)"
    )
    holder = subprocess.Popen([sys.executable, "-c", hold, str(tmp_path)], stdout=subprocess.PIPE)
    assert holder.stdout is not None
    with holder.stdout:
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(StorageError, match=f"being written by process {holder.pid} on "):
            opened(tmp_path, resume=True)
        holder.kill()
        holder.wait()
    opened(tmp_path, resume=True).close()


def test_writing_needs_the_lock(tmp_path: Path) -> None:
    run = opened(tmp_path)
    run.close()
    with pytest.raises(RuntimeError, match="not open for writing"):
        run.append_round(record("ditto", 0, 1))
    with pytest.raises(RuntimeError, match="not open for writing"):
        RunFolder(tmp_path).write_summary({})


# The journal


def test_lines_are_valid_json_with_a_fixed_order(tmp_path: Path) -> None:
    with opened(tmp_path) as run:
        run.append_round(
            {
                "seconds": 1.5,
                "round": 3,
                "algorithm": "ditto",
                "seed": 0,
                "personal": {"loss": float("nan"), "accuracy": 0.1 + 0.2},
                "server": None,
                "method": {"rho": torch.tensor([1.0, torch.inf]), "k": np.float32(0.5), "n": torch.tensor(4), 7: True},
            }
        )
    assert (tmp_path / "rounds.jsonl").read_text() == (
        '{"algorithm": "ditto", "seed": 0, "round": 3, '
        '"method": {"7": true, "k": 0.5, "n": 4, "rho": [1.0, null]}, '
        '"personal": {"accuracy": 0.30000000000000004, "loss": null}, "seconds": 1.5, "server": null}\n'
    )
    with pytest.raises(TypeError, match=r"value\.a\[1\] is a set"), opened(tmp_path, resume=True) as run:
        run.append_round(record("ditto", 0, 4) | {"a": [1, {2}]})
    with pytest.raises(ValueError, match="round is missing"), opened(tmp_path, resume=True) as run:
        run.append_round({"algorithm": "ditto", "seed": 0})


def test_a_line_is_readable_at_once(tmp_path: Path) -> None:
    with opened(tmp_path) as run:
        for round in (1, 2):
            run.append_round(record("ditto", 0, round))
            assert RunFiles(tmp_path).records()[-1]["round"] == round
        run.sync()
    assert RunFiles(tmp_path / "absent").records() == []


@settings(max_examples=60)
@given(cut=st.integers(0, 400), checkpoint=st.integers(0, 4), data=st.data())
def test_a_resumed_journal_equals_the_uninterrupted_one(
    tmp_path_factory: pytest.TempPathFactory, cut: int, checkpoint: int, data: st.DataObject
) -> None:
    """Two methods of four rounds, killed at any byte; the second resumes from any checkpointed round."""
    folder = tmp_path_factory.mktemp("run")
    plan = [(algorithm, 0, round) for algorithm in ("local", "ditto") for round in range(1, 5)]
    whole = b"".join((to_json(record(*which)) + "\n").encode() for which in plan)
    ends = [0]
    for line in whole.splitlines(keepends=True):
        ends.append(ends[-1] + len(line))
    # The journal was synced before the checkpoint, so it reaches at least to there.
    length = ends[4 + checkpoint] + cut % (len(whole) - ends[4 + checkpoint] + 1)
    with opened(folder):
        (folder / "rounds.jsonl").write_bytes(whole[:length] + data.draw(st.sampled_from([b"", b"\0" * 9, b"{"])))
    with opened(folder, resume=True) as run:
        run.rewind("local", 0, 4, mark(*plan[:4]))
        run.rewind("ditto", 0, checkpoint or None, mark(*plan[4 : 4 + checkpoint]))
        for which in plan[4 + checkpoint :]:
            run.append_round(record(*which))
        assert run.journal_mark("ditto", 0) == mark(*plan[4:])
    assert (folder / "rounds.jsonl").read_bytes() == whole


def test_rewinding_leaves_other_trials_alone(tmp_path: Path) -> None:
    with opened(tmp_path) as run:
        for which in [("local", 0, 1), ("ditto", 0, 1), ("ditto", 1, 1), ("ditto", 1, 2), ("ditto", 1, 3)]:
            run.append_round(record(*which))
        run.rewind("ditto", 1, 2, mark(("ditto", 1, 1), ("ditto", 1, 2)))
        run.rewind("fedavg", 0, 10)  # a warm start: its first round comes later
        left = [(r["algorithm"], r["seed"], r["round"]) for r in RunFiles(run.path).records()]
        assert left == [("local", 0, 1), ("ditto", 0, 1), ("ditto", 1, 1), ("ditto", 1, 2)]
        run.rewind("ditto", 1, None)
        run.append_round(record("ditto", 1, 1))
        known = [(r["algorithm"], r["seed"]) for r in RunFiles(run.path).records()]
        assert known == [("local", 0), ("ditto", 0), ("ditto", 1)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda lines: lines[:1], "1 lines of 2"),
        (lambda lines: lines[1:], "1 lines of 2"),
        (lambda lines: [], "0 lines of 2"),
        (lambda lines: [lines[0], *lines], "3 lines of 2"),
        (lambda lines: lines[::-1], "not as they were written"),
        (lambda lines: [lines[0], lines[1].replace(b"0.2", b"0.9")], "not as they were written"),
    ],
)
def test_a_journal_whose_lines_vanished_or_changed_is_not_continued(
    tmp_path: Path, change: Callable[[list[bytes]], list[bytes]], message: str
) -> None:
    with opened(tmp_path) as run:
        for round in (1, 2):
            run.append_round(record("ditto", 0, round))
        checkpoint = run.journal_mark("ditto", 0)
    path = tmp_path / "rounds.jsonl"
    path.write_bytes(b"".join(change(path.read_bytes().splitlines(keepends=True))))
    before = path.read_bytes()
    with opened(tmp_path, resume=True) as run:
        with pytest.raises(
            StorageError, match=f"after the checkpoint of round 2 of ditto with seed 0: it has .*{message}"
        ):
            run.rewind("ditto", 0, 2, checkpoint)
        assert path.read_bytes() == before


def test_damage_inside_the_journal_is_named(tmp_path: Path) -> None:
    with opened(tmp_path) as run:
        for round in (1, 2, 3):
            run.append_round(record("ditto", 0, round))
    path = tmp_path / "rounds.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + lines[1][:9] + b"\n" + lines[2])
    with pytest.raises(StorageError, match=r"rounds\.jsonl is damaged: line 2 of 3 is not a round"):
        RunFiles(tmp_path).records()
    path.write_bytes(lines[0] + lines[1] + b"17\n")
    assert len(RunFiles(tmp_path).records()) == 2  # a last line is taken as cut


def test_a_line_after_a_cut_one_is_not_glued_to_it(tmp_path: Path) -> None:
    with opened(tmp_path) as run:
        run.append_round(record("ditto", 0, 1))
    with (tmp_path / "rounds.jsonl").open("ab") as file:
        file.write(b'{"algorithm": "di')
    with opened(tmp_path, resume=True) as run:
        run.append_round(record("ditto", 0, 2))
    assert [r["round"] for r in RunFiles(tmp_path).records()] == [1, 2]


def test_a_line_that_does_not_fit_leaves_no_part(tmp_path: Path) -> None:
    with opened(tmp_path) as run:
        run.append_round(record("ditto", 0, 1))
        before = (tmp_path / "rounds.jsonl").read_bytes()
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 20, limits[1]))
        try:
            with pytest.raises(StorageError, match=r"cannot append to .*rounds\.jsonl: File too large"):
                run.append_round(record("ditto", 0, 2))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert (tmp_path / "rounds.jsonl").read_bytes() == before
        run.append_round(record("ditto", 0, 2))
    assert [r["round"] for r in RunFiles(tmp_path).records()] == [1, 2]


@pytest.mark.parametrize("call", ["open", "write", "fsync", "replace"])
def test_whole_files_are_old_or_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with opened(tmp_path) as run:
        for step in (1, 2):
            writers = {
                "summary.json": lambda step=step: run.write_summary({"step": step}),
                "federation-3.json": lambda step=step: run.write_federation(3, {"step": step}),
                "models/ditto-0.safetensors": lambda step=step: run.write_models(
                    "ditto", 0, torch.ones(1, step), None, torch.ones(1, dtype=torch.bool)
                ),
            }
            if step == 1:
                for write in writers.values():
                    write()
        before = tree(tmp_path)
        with monkeypatch.context() as patch:
            patch.setattr(os, call, full)
            for name, write in writers.items():
                with pytest.raises(StorageError, match=rf"cannot write .*{name}: No space left on device"):
                    write()
        assert tree(tmp_path) == before


# Whole files


def test_clients_have_fixed_columns_then_others(tmp_path: Path) -> None:
    columns = {
        "client": ["anna, b", 1], "seed": [0, 0], "algorithm": ["ditto", "ditto"], "n_test": [3, None],
        "personal_accuracy": [1 / 3, None], "zeta": [None, True], "alpha": [None, float("nan")],
    }  # fmt: skip
    with opened(tmp_path) as run:
        run.append_clients(columns)
        with pytest.raises(ValueError, match="a cell of clients"):
            run.append_clients({name: [[1], [2]] for name in columns})
        with pytest.raises(ValueError, match="has the columns"):
            run.append_clients({"client": [1]})
    assert (tmp_path / "clients.csv").read_text().splitlines() == [
        ",".join(CLIENT_COLUMNS) + ",alpha,zeta",
        'ditto,0,"anna, b",,3,,0.3333333333333333,,,,,',
        "ditto,0,1,,,,,,,,,1",
    ]


def test_clients_of_one_method_follow_those_of_another_and_a_resumed_run_begins_anew(tmp_path: Path) -> None:
    head = ",".join(CLIENT_COLUMNS)
    with opened(tmp_path) as run:
        run.append_clients({"client": ["a", "b"]})
        run.append_clients({"client": ["c"]})
        assert (tmp_path / "clients.csv").read_text().splitlines() == [head, ",,a,,,,,,,", ",,b,,,,,,,", ",,c,,,,,,,"]
    with opened(tmp_path, resume=True) as run:
        run.append_clients({"client": ["a"]})
    assert (tmp_path / "clients.csv").read_text().splitlines() == [head, ",,a,,,,,,,"]


@pytest.mark.parametrize("call", ["open", "write", "fsync"])
def test_a_method_has_all_its_clients_in_the_table_or_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with opened(tmp_path) as run:
        for action, step in (("write", 1), ("append to", 2)):
            before = tree(tmp_path)
            with monkeypatch.context() as patch:
                patch.setattr(os, call, full)
                with pytest.raises(StorageError, match=rf"cannot {action} .*clients.csv: No space left on device"):
                    run.append_clients({"client": [step]})
            assert tree(tmp_path) == before
            run.append_clients({"client": [step]})


def test_the_table_of_very_many_clients_takes_seconds(tmp_path: Path) -> None:
    count = 100_000
    with opened(tmp_path) as run:
        began = time.perf_counter()
        run.append_clients({"client": list(map(str, range(count))), "personal_accuracy": [1 / 3] * count})
        assert time.perf_counter() - began < 5


def test_models_come_back(tmp_path: Path) -> None:
    personal, shared = torch.randn(4, 5), torch.randn(5)
    contexts, assignment = torch.randn(2, 5), torch.tensor([0, 1, 1, 0])
    took_part = torch.tensor([True, True, False, True])
    with opened(tmp_path) as run:
        run.write_models("ditto", 0, personal, ServerModels(shared[None]), took_part)
        run.write_models("ifca", 0, personal, ServerModels(contexts, assignment), took_part)
        run.write_models("a/b", 1, shared.expand(4, 5), None, took_part)
        with pytest.raises(ValueError, match=r"got \[5\]"):
            run.write_models("ditto", 0, shared, None, took_part)
    reader = RunFiles(tmp_path)
    found = reader.models("ditto", 0)
    assert torch.equal(found.personal, personal)
    assert torch.equal(found.took_part, took_part)
    assert found.server_model is not None
    assert torch.equal(found.server_model, shared)
    clustered = reader.models("ifca", 0)
    assert clustered.server is not None
    assert clustered.server.assignment is not None
    assert clustered.server_model is None  # not one for all
    assert torch.equal(clustered.server.models, contexts)
    assert torch.equal(clustered.server.assignment, assignment)
    expanded = reader.models("a/b", 1)
    assert torch.equal(expanded.personal, shared.expand(4, 5))
    assert expanded.server_model is None
    with pytest.raises(StorageError, match=r"no models of fedavg with seed 0; stored: a%2Fb-1, ditto-0, ifca-0"):
        reader.models("fedavg", 0)
    path = tmp_path / "models" / "ditto-0.safetensors"
    for damaged in (path.read_bytes()[:-1], b"", b"junk" * 50):
        path.write_bytes(damaged)
        with pytest.raises(StorageError, match=r"ditto-0\.safetensors"):
            reader.models("ditto", 0)


def test_federations_come_back(tmp_path: Path) -> None:
    who = describe(tiny_federation())
    with opened(tmp_path) as run:
        run.write_federation(3, who.to_json())
    assert RunFiles(tmp_path).description(3) == who
    with pytest.raises(StorageError, match=r"federation-4\.json does not exist"):
        RunFiles(tmp_path).description(4)


# Comparing runs


def test_folders_that_are_no_runs_have_no_results_to_compare(tmp_path: Path) -> None:
    opened(tmp_path / "run").close()
    for a, b in (("none", "nothing"), ("run", "none"), ("none", "run")):
        with pytest.raises(StorageError, match="is no run folder"):
            same_results(tmp_path / a, tmp_path / b)


def a_run(path: Path, seconds: float, config: dict[str, Any] = CONFIG, shift: float = 0.0) -> Path:
    with opened(path, config) as run:
        for round in (1, 2):
            line = record("ditto", 0, round, seconds)
            line["personal"]["accuracy"] += shift
            run.append_round(line | {"method": {"train_seconds": seconds, "rho": 0.5}})
        row = {"algorithm": "ditto", "seed": 0, "client": 0, "personal_loss": 1.0 + shift, "fit_seconds": seconds}
        run.append_clients({name: [value] for name, value in row.items()})
        run.write_models("ditto", 0, torch.full((2, 3), 1.0 + shift), None, torch.ones(2, dtype=torch.bool))
        run.write_federation(0, {"train": [[1, 2]]})
        run.write_summary({"results": [{"algorithm": "ditto", "seconds": seconds, "personal": {"loss": shift}}]})
    return path


def test_times_are_stripped_at_any_depth() -> None:
    timed = {"seconds": 1, "a": [{"train_seconds": 2, "b": 3, "seconds_idle": 4}], "secondsish": 5, "per_second": 6}
    assert strip_times(timed) == {"a": [{"b": 3}], "secondsish": 5, "per_second": 6}


def test_equal_runs_are_byte_equal_but_for_times(tmp_path: Path) -> None:
    a, b = a_run(tmp_path / "a", 1.0), a_run(tmp_path / "b", 1.0)
    assert tree(a) == tree(b)
    c = a_run(tmp_path / "c", 2.0)
    change_manifest(c, kinfed="9", versions={"torch": "9"})
    assert same_results(a, c) == []


def test_differences_are_told(tmp_path: Path) -> None:
    a = a_run(tmp_path / "a", 1.0)
    b = a_run(tmp_path / "b", 1.0, CONFIG | {"rounds": 2}, shift=0.25)
    found, shape = same_results(a, b), "float32 [2, 3]"
    for line in (
        f"config.json: rounds: 60 in {a}, 2 in {b}",
        f"rounds.jsonl: ditto[seed 0, round 1].personal.accuracy: 0.1 in {a}, 0.35 in {b}",
        f"clients.csv: ditto[seed 0, client 0].personal_loss: 1.0 in {a}, 1.25 in {b}",
        f"summary.json: results[0].personal.loss: 0.0 in {a}, 0.25 in {b}",
        f"models/ditto-0.safetensors: personal: {shape} with mean 1.0 in {a}, {shape} with mean 1.25 in {b}",
    ):
        assert line in found
    assert len(found) == 6
    assert same_results(a, b, tolerance=0.3, config=False) == []
    assert len(same_results(a, b, tolerance=0.2, config=False)) == 5


def test_missing_doubled_and_reordered_lines_are_told(tmp_path: Path) -> None:
    a, b = a_run(tmp_path / "a", 1.0), a_run(tmp_path / "b", 1.0)
    as_of_an_earlier_version(b)
    (b / "summary.json").unlink()
    lines = (b / "rounds.jsonl").read_bytes().splitlines(keepends=True)
    (b / "rounds.jsonl").write_bytes(lines[1] + lines[0])
    assert same_results(a, b) == [
        "rounds.jsonl: the same lines in another order",
        f"summary.json: missing in {b}",
    ]
    (b / "rounds.jsonl").write_bytes(b"".join(lines) + lines[1])
    [doubled, _] = same_results(a, b)
    assert doubled.startswith(f"rounds.jsonl: ditto[seed 0, round 2] (again): absent in {a}")
    (b / "rounds.jsonl").write_bytes(b"".join((to_json(record("x", 0, r)) + "\n").encode() for r in range(1, 31)))
    assert "rounds.jsonl: and 12 more differences" in same_results(a, b)
