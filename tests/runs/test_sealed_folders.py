"""A run folder is one sealed document: what was changed in it is noticed by whoever reads it, and no crash breaks the
seal."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import Done, kinfed
from manifests import as_of_an_earlier_version, change_settings

from kinfed.analysis.comparison import pool_seeds
from kinfed.core import storage
from kinfed.data.federations.federation import Federation
from kinfed.errors import StorageError
from kinfed.records.compare import same_results
from kinfed.records.reader import load_run, load_runs
from kinfed.records.run_files import JobFiles, RunFiles
from kinfed.runs.experiment import run

SETTINGS: dict[str, Any] = {
    "model": "mlr", "eval_every": 2, "steps": 2, "batch": 5, "participation": 0.5, "workers": 1, "backend": "stacked",
    "algorithms": "local,fedavg",
}  # fmt: skip
TABLE = "c,u,y\n" + "".join(f"{'abcd'[i % 4]},{i % 7},{'yn'[i // 4 % 2]}\n" for i in range(80))
RUN = (
    "run", "--dataset", "t.csv", "--client-column", "c", "--label-column", "y", "--rounds", "6", "--seeds", "0",
    "--participation", "0.5", "--algorithms", "local,fedavg", "--no-report", "--out", "run",
)  # fmt: skip


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("finished")
    (place / "t.csv").write_text(TABLE)
    done = kinfed(*RUN, cwd=place)
    assert done.returncode == 0, done.stderr
    return place


@pytest.fixture
def place(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "copy"))


def contents_of(folder: Path) -> dict[str, bytes]:
    names = (path for path in folder.rglob("*") if path.is_file() and not path.name.startswith(".lock"))
    return {str(path.relative_to(folder)): path.read_bytes() for path in names}


def edit(folder: Path) -> None:
    """Let fewer clients take part, as an editor of text does."""
    path = folder / "config.json"
    text = path.read_text()
    assert '"participation": 0.5' in text
    path.write_text(text.replace('"participation": 0.5', '"participation": 0.1'))


def refused(done: Done, *words: str) -> None:
    assert done.returncode == 2, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    for word in words:
        assert word in " ".join(done.stderr.split())


READERS = [
    ("run", "--out", "run", "--extend", "--rounds", "8", "--no-report"),
    ("run", "--out", "run", "--resume", "--no-report"),
    ("report", "run"),
    ("report", "run", "other"),
    ("compare", "run", "other"),
    ("export", "run", "--client", "a", "--algorithm", "fedavg"),
    ("predict", "t.csv", "--run", "run", "--client", "a", "--algorithm", "fedavg"),
    ("adopt", "run", "--table", "t.csv", "--label-column", "y", "--algorithm", "fedavg"),
    ("gain", "run"),
]


@pytest.mark.parametrize("arguments", READERS, ids=" ".join)
def test_an_edited_configuration_is_refused_by_all_that_read_it(place: Path, arguments: tuple[str, ...]) -> None:
    shutil.copytree(place / "run", place / "other")
    edit(place / "run")
    before = contents_of(place / "run")
    refused(kinfed(*arguments, cwd=place), "config.json was changed after kinfed had written it", "restore the file")
    assert contents_of(place / "run") == before
    assert "damaged" in kinfed("runs", ".", cwd=place).stdout


def test_an_edited_configuration_without_a_seal_cannot_grow(place: Path) -> None:
    """As in a folder of an earlier version: the fingerprint is of the configuration that the run was started with."""
    as_of_an_earlier_version(place / "run")
    edit(place / "run")
    before = contents_of(place / "run")
    refused(kinfed(*READERS[0], cwd=place), "does not hold the configuration that the run was started with")
    assert contents_of(place / "run") == before
    refused(kinfed(*READERS[1], cwd=place), "holds another run")


def test_a_forged_configuration_does_not_fit_the_checkpoints(place: Path) -> None:
    """Whoever seals an edited configuration again still has the fingerprint and the checkpoints of another one."""
    change_settings(place / "run", participation=0.1)
    refused(kinfed(*READERS[1], cwd=place), "holds another run")


def test_a_folder_of_an_earlier_version_is_read_resumed_and_grows(place: Path) -> None:
    as_of_an_earlier_version(place / "run")
    before = contents_of(place / "run")
    for arguments in READERS[2], READERS[5], READERS[8]:
        done = kinfed(*arguments, cwd=place)
        assert done.returncode == 0, done.stderr
    assert {name: text for name, text in contents_of(place / "run").items() if name != "report.html"} == before
    done = kinfed(*READERS[0], cwd=place)
    assert done.returncode == 0, done.stderr
    assert "seal" in JobFiles(place / "run").envelope


def test_every_file_of_a_finished_run_is_sealed(place: Path) -> None:
    folder = place / "run"
    ours = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    listed = set(JobFiles(folder).envelope["files"])
    unlisted = {name for name in ours - listed if not name.startswith("checkpoints/")}
    assert unlisted <= {"config.json", ".lock"}
    assert not JobFiles(folder).changed_files()
    for name in sorted(listed):
        path = folder / name
        before = path.read_bytes()
        path.write_bytes(before + b" ")
        assert JobFiles(folder).changed_files() == [name]
        path.write_bytes(before)


def test_changed_results_are_told_and_never_taken_for_measured(place: Path) -> None:
    folder = place / "run"
    shutil.copytree(folder, place / "other")
    for name, old, new in (
        ("rounds.jsonl", b": 0.", b": 1."),
        ("federation-0.json", b"{", b"{ "),
        ("clients.csv", b",0.", b",1."),
    ):
        path = folder / name
        path.write_bytes(path.read_bytes().replace(old, new, 1))
    assert "Changed after the run had ended: clients.csv, federation-0.json, rounds.jsonl." in " ".join(
        load_run(folder, "run").notes
    )
    done = kinfed("compare", "run", "other", cwd=place)
    assert done.returncode == 1
    assert "clients.csv: changed in run after the run had ended" in done.stdout
    refused(kinfed("gain", "run", cwd=place), "changed after the run had ended")
    refused(
        kinfed(*READERS[5], cwd=place), "federation-0.json was changed after the run had ended", "kinfed run --out run"
    )


def test_another_models_file_in_the_place_of_one_is_not_exported(place: Path) -> None:
    models = place / "run" / "models"
    shutil.copy(models / "local-0.safetensors", models / "fedavg-0.safetensors")
    refused(kinfed(*READERS[5], cwd=place), "fedavg-0.safetensors was changed after the run had ended")
    done = kinfed(*READERS[1], cwd=place)  # what the sentence says: written again from the checkpoints
    assert done.returncode == 0, done.stderr
    done = kinfed(*READERS[5], cwd=place)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"", "lacks the columns algorithm, client"),
        (b"nothing\n1\n", "lacks the columns algorithm, client"),
        (b"algorithm,seed,client,n_train,n_test\nlocal,0\n", "line 2 has more or fewer cells than the header"),
        (b"algorithm,seed,client,n_train,n_test\nlocal,0,a,1,1,1\n", "line 2 has more or fewer cells"),
        (b"algorithm,seed,client,n_train,n_test\n" + b"x" * 200_000 + b",0,a,1,1\n", "field larger than field limit"),
    ],
)
def test_a_broken_table_of_clients_gets_a_sentence_from_compare(place: Path, text: bytes, words: str) -> None:
    shutil.copytree(place / "run", place / "other")
    (place / "run" / "clients.csv").write_bytes(text)
    refused(kinfed("compare", "run", "other", cwd=place), words, "clients.csv")


# Pooling


@pytest.fixture(scope="module")
def data() -> Federation:
    x = torch.randn(80, 4, generator=torch.Generator().manual_seed(0))
    return Federation.from_arrays(x, (x[:, 0] > 0).to(torch.int64), [f"c{i % 5}" for i in range(80)])


def test_changed_results_and_other_code_are_not_pooled(data: Federation, tmp_path: Path) -> None:
    for seed in (0, 1):
        run(federation=data, out=tmp_path / str(seed), **SETTINGS, rounds=2, seeds=(seed,))
    folders = [tmp_path / "0", tmp_path / "1"]
    assert len(pool_seeds(load_runs(folders))) == 1
    one, other = load_runs(folders)
    one.contents["code of plugin x.py"], other.contents["code of plugin x.py"] = "a", "b"
    assert len(pool_seeds([one, other])) == 2
    path = tmp_path / "1" / "clients.csv"
    path.write_text(path.read_text().replace("0.", "1.", 1))
    assert len(pool_seeds(load_runs(folders))) == 2


# Crashes


class Killed(BaseException):
    """The end of a process."""


def test_a_crash_at_any_write_leaves_a_folder_that_reads_and_goes_on(
    data: Federation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small, large = ({**SETTINGS, "algorithms": "fedavg", "rounds": rounds, "seeds": (0,)} for rounds in (2, 3))
    start, at_once = tmp_path / "start", tmp_path / "once"
    run(federation=data, out=start, **small)
    run(federation=data, out=at_once, **large)
    commit = storage.Draft.commit
    crashed = True
    number = 0
    while crashed:
        folder = Path(shutil.copytree(start, tmp_path / f"crash-{number}"))
        count = 0

        def dying(self: storage.Draft, path: Path, last: int = number) -> None:
            nonlocal count
            if count == last:
                raise Killed
            count += 1
            commit(self, path)

        with monkeypatch.context() as patch:
            patch.setattr(storage.Draft, "commit", dying)
            try:
                run(federation=data, out=folder, extend=True, rounds=3)
                crashed = False
            except Killed:
                pass
        if crashed:
            assert not JobFiles(folder).changed_files() or count == 0, f"write {count}"
            load_run(folder, "run")
            run(federation=data, out=folder, extend=True, rounds=3)
        assert same_results(folder, at_once) == []
        assert not JobFiles(folder).changed_files()
        assert set(JobFiles(folder).envelope["files"]) == set(JobFiles(at_once).envelope["files"])
        shutil.rmtree(folder)
        number += 1
    assert number > 10


def test_while_a_run_is_written_nothing_of_it_is_sealed(
    data: Federation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does who reads it in between take its files for changed."""
    settings = {**SETTINGS, "rounds": 2, "seeds": (0,)}
    run(federation=data, out=tmp_path, **settings)
    reader = RunFiles(tmp_path)
    assert "files" in reader.envelope
    seen = []

    def watching() -> bool:
        seen.append("files" in JobFiles(tmp_path).envelope)
        return False

    run(federation=data, out=tmp_path, extend=True, rounds=4, should_stop=watching)
    assert seen
    assert not any(seen)
    as_of_an_earlier_version(tmp_path)
    assert reader.changed_files() == []  # those of the manifest that it has read are being written


def test_a_journal_that_changed_says_to_restore_it(data: Federation, tmp_path: Path) -> None:
    run(federation=data, out=tmp_path, **SETTINGS, rounds=2, seeds=(0,))
    path = tmp_path / "rounds.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"round": 2', b'"round": 3', 1))
    with pytest.raises(StorageError, match=r"rounds\.jsonl was changed after the run had ended; restore it$"):
        RunFiles(tmp_path).records()
