"""The vault: what a node keeps survives whatever happens to the node, and is never another's."""

from __future__ import annotations

import os
import resource
import signal
import stat
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kinfed.deploy.node.vault import Vault
from kinfed.deploy.transport.wire import Packet
from kinfed.errors import ConfigError, StorageError


def state(value: float, size: int = 4) -> dict[str, Tensor]:
    return {"v": torch.full((1, size), value), "seen": torch.tensor([True])}


def kept(vault: Vault, rounds: list[tuple[int, int]], run: str = "r1", client: str = "a") -> None:
    """(round, the round it was made from), each with its number as the state."""
    entry = vault.entry(run, client)
    with entry.locked():
        for number, before in rounds:
            entry.keep(number, state(float(number)), before, "ditto")


def value(found: dict[str, Tensor] | None) -> float | None:
    return None if found is None else float(found["v"][0, 0])


def test_a_state_comes_back_as_it_was(tmp_path: Path) -> None:
    kept(Vault(tmp_path), [(1, 0)])
    found = Vault(tmp_path).entry("r1", "a").state(1)
    assert found is not None
    assert found["v"].equal(state(1.0)["v"])
    assert found["seen"].dtype == torch.bool


def test_the_last_two_rounds_are_there(tmp_path: Path) -> None:
    vault = Vault(tmp_path)
    kept(vault, [(1, 0), (2, 1), (5, 2)])
    entry = vault.entry("r1", "a")
    assert [value(entry.state(n)) for n in (0, 1, 2, 5)] == [None, None, 2.0, 5.0]


def test_a_round_that_did_not_count_is_replaced_by_the_next(tmp_path: Path) -> None:
    """Round 3 was trained from 2 and lost; round 4 starts from 2 again, which stays until 4 has counted."""
    vault = Vault(tmp_path)
    kept(vault, [(1, 0), (2, 1), (3, 2), (4, 2)])
    entry = vault.entry("r1", "a")
    assert [value(entry.state(n)) for n in (2, 3, 4)] == [2.0, None, 4.0]


def test_a_repeated_round_starts_where_it_started(tmp_path: Path) -> None:
    vault = Vault(tmp_path)
    kept(vault, [(1, 0), (2, 1), (2, 1)])
    assert value(vault.entry("r1", "a").state(1)) == 1.0
    assert vault.entries()[0].version == 3


def test_a_first_round_that_did_not_count_leaves_nothing(tmp_path: Path) -> None:
    vault = Vault(tmp_path)
    kept(vault, [(1, 0), (2, 0)])
    assert vault.entry("r1", "a").state(0) is None
    assert vault.entry("r1", "a").state(1) is None


def test_a_method_without_state_still_has_its_rounds(tmp_path: Path) -> None:
    entry = Vault(tmp_path).entry("r1", "a")
    with entry.locked():
        entry.keep(1, {}, 0, "cfl")
    assert entry.state(1) == {}
    assert entry.state(2) is None


def test_runs_and_clients_are_apart(tmp_path: Path) -> None:
    vault = Vault(tmp_path)
    kept(vault, [(1, 0)])
    assert vault.entry("r2", "a").state(1) is None
    assert vault.entry("r1", "b").state(1) is None


@pytest.mark.parametrize(("run", "client"), [("r2", "a"), ("r1", "b")])
def test_a_file_moved_from_another_run_or_client_is_refused(tmp_path: Path, run: str, client: str) -> None:
    vault = Vault(tmp_path)
    kept(vault, [(1, 0)])
    other = vault.entry(run, client)
    with other.locked():
        (vault.entry("r1", "a").folder / "state.safetensors").rename(other.folder / "state.safetensors")
    with pytest.raises(StorageError, match="state of another run is never used"):
        other.state(1)


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty"])
def test_damage_is_noticed(tmp_path: Path, damage: str) -> None:
    vault = Vault(tmp_path)
    kept(vault, [(1, 0)])
    path = vault.entry("r1", "a").folder / "state.safetensors"
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes({"cut": bytes(data[:-5]), "flipped": bytes(data), "empty": b""}[damage])
    with pytest.raises(StorageError, match="damaged"):
        vault.entry("r1", "a").state(1)


def test_only_the_owner_may_look(tmp_path: Path) -> None:
    vault = Vault(tmp_path / "deep" / "vault")
    kept(vault, [(1, 0)])
    vault.secret("a")
    entry = vault.entry("r1", "a")
    for folder in (vault.folder, entry.folder, vault.folder / "secrets"):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    entry.keep_model({"w": torch.ones(2)}, {})
    entry.keep_answer("train", "q", Packet({"round": 1}, {"up": {"delta": torch.ones(1, 2)}}))
    vault.privacy_log("b")
    paths = [path for path in vault.folder.rglob("*") if path.is_file()]
    assert len(paths) >= 7
    assert {path.name for path in paths if stat.S_IMODE(path.stat().st_mode) != 0o600} == set()
    assert {path.name for path in vault.folder.rglob("*") if path.is_dir() and path.stat().st_mode & 0o77} == set()


def test_a_secret_is_made_once_and_per_client(tmp_path: Path) -> None:
    first = Vault(tmp_path).secret("a")
    assert Vault(tmp_path).secret("a").key == first.key
    assert Vault(tmp_path).secret("b").key != first.key
    (tmp_path / "secrets" / "a.key").write_bytes(b"short")
    with pytest.raises(StorageError, match="5 bytes instead of 32"):
        Vault(tmp_path).secret("a")


def test_clearing_a_run_leaves_the_others_and_the_secrets(tmp_path: Path) -> None:
    vault = Vault(tmp_path)
    key = vault.secret("a").key
    kept(vault, [(1, 0)], "r1", "a")
    kept(vault, [(1, 0)], "r1", "b")
    kept(vault, [(3, 0)], "r2", "a")
    assert vault.clear("r1", "a") == ["a"]
    assert vault.clear("r1") == ["b"]
    assert [(held.run, held.client, held.round) for held in vault.entries()] == [("r2", "a", 3)]
    assert vault.secret("a").key == key
    with pytest.raises(ConfigError, match="nothing of run 'r1'"):
        vault.clear("r1")


@pytest.mark.parametrize("place", ["tensors", "scaling"])
def test_a_flipped_bit_of_a_model_is_noticed(tmp_path: Path, place: str) -> None:
    vault = Vault(tmp_path)
    kept(vault, [(1, 0)])
    entry = vault.entry("r1", "a")
    entry.keep_model({"w": torch.ones(2)}, {"inputs": '{"mean": 0.25}'})
    path = vault.model_path()
    data = bytearray(path.read_bytes())
    data[-3 if place == "tensors" else data.index(b"0.25") + 2] ^= 1
    path.write_bytes(bytes(data))
    with pytest.raises(StorageError, match="damaged"):
        vault.model_path()


def test_an_answer_comes_back_as_it_was(tmp_path: Path) -> None:
    entry = Vault(tmp_path).entry("r1", "a")
    answer = Packet({"round": 3, "gradients": [[0.1, 1, 2]]}, {"up": {"delta": torch.arange(3.0)[None]}})
    with entry.locked():
        entry.keep_answer("train", "q", answer)
    again = entry.answer("train", "q")
    assert again is not None
    assert again.header == answer.header
    assert torch.equal(again.group("up")["delta"], answer.group("up")["delta"])
    assert entry.answer("train", "other") is None
    assert entry.answer("evaluate", "q") is None


@pytest.mark.parametrize("run", ["secrets", "books", "Secrets", ""])
def test_a_run_cannot_take_the_place_of_secrets_or_books(tmp_path: Path, run: str) -> None:
    with pytest.raises(StorageError, match="a run cannot be called"):
        Vault(tmp_path).entry(run, "a")


def test_a_model_is_found_by_run_and_client(tmp_path: Path) -> None:
    vault = Vault(tmp_path)
    kept(vault, [(1, 0)])
    with pytest.raises(ConfigError, match="models come with the first evaluation"):
        vault.model_path()
    for client in ("a", "b"):
        kept(vault, [(1, 0)], client=client)
        vault.entry("r1", client).keep_model({"w": torch.ones(2)}, {"client": client})
    with pytest.raises(ConfigError, match="choose one with --client: a, b"):
        vault.model_path()
    assert vault.model_path(client="b") == vault.entry("r1", "b").folder / "model.safetensors"


_WRITER = """
    import sys, torch
    from kinfed.deploy.node.vault import Vault
    entry = Vault(sys.argv[1]).entry("r1", "a")
    number = 0
    while True:
        number += 1
        with entry.locked():
            entry.keep(number, {"v": torch.full((1, 200_000), float(number))}, number - 1, "ditto")
        print(number, flush=True)
"""


def test_kill_9_at_any_moment_leaves_a_complete_state(tmp_path: Path) -> None:
    """A process that does nothing but write is killed again and again; what was acknowledged is there, complete."""
    for times in (1, 4, 9):
        with subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(_WRITER), str(tmp_path)], stdout=subprocess.PIPE, text=True
        ) as writer:
            assert writer.stdout is not None
            said = [int(writer.stdout.readline()) for _ in range(times)][-1]
            writer.send_signal(signal.SIGKILL)
        entry = Vault(tmp_path).entry("r1", "a")
        last = Vault(tmp_path).entries()[0].round
        assert last >= said
        for number in {last, max(last - 1, 1)}:
            found = entry.state(number)
            assert found is not None
            assert bool((found["v"] == number).all())


def test_a_full_disk_says_so_and_keeps_what_was_there(tmp_path: Path) -> None:
    """The limit of file sizes is the operating system's own way to refuse a write half-way through."""
    vault = Vault(tmp_path)
    kept(vault, [(1, 0)])
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    entry = vault.entry("r1", "a")
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, before[1]))
        with entry.locked(), pytest.raises(StorageError, match="what was written before is intact"):
            entry.keep(2, state(2.0, 100_000), 1, "ditto")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert value(entry.state(1)) == 1.0
    assert vault.entries()[0].round == 1
    assert not [name for name in os.listdir(entry.folder) if name.startswith(".draft")]


def test_the_vault_needs_no_module_that_windows_lacks() -> None:
    missing = "import sys; sys.modules.update(fcntl=None, resource=None, pwd=None)"
    code = f"{missing}; import kinfed.deploy.server.deployment_server"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
