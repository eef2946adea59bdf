"""The index of runs, and the board that shows it: this machine only, read-only, live."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
import torch

from kinfed.board.board_server import BoardServer, live_view
from kinfed.core.storage import to_json
from kinfed.data.federations.federation import Federation
from kinfed.errors import ConfigError
from kinfed.records.run_index import find_runs, is_running, matching
from kinfed.runs.experiment import run
from kinfed.runs.method_run import Interrupted

SETTINGS: dict[str, Any] = {"model": "mlr", "rounds": 2, "steps": 1, "workers": 1, "seeds": (0,), "eval_every": 1}
HOSTILE = "<img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run, one that stopped, one that this process claims to write, and a damaged one."""
    place = tmp_path_factory.mktemp("board") / "runs"
    x = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
    data = Federation.from_arrays(x, (x[:, 0] > 0).to(torch.int64), [i % 4 for i in range(40)])
    run(federation=data, out=place / "study" / "done", algorithms="local,ditto", **SETTINGS)
    calls = iter([False, False, True])
    with pytest.raises(Interrupted):
        run(
            federation=data, out=place / HOSTILE, algorithms="local,fedavg", should_stop=lambda: next(calls), **SETTINGS
        )
    shutil.copytree(place / HOSTILE, place / "now")
    (place / "now" / ".lock-holder").write_text(f"process {os.getpid()} on {socket.gethostname()}", "utf-8")
    (place / "broken").mkdir()
    (place / "broken" / "config.json").write_text("{")
    (place.parent / "secret.txt").write_text("secret")
    return place


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[BoardServer]:
    with BoardServer(folder, 0) as board:
        thread = threading.Thread(target=board.serve_forever, daemon=True)
        thread.start()
        yield board
        board.shutdown()
        thread.join()


def ask(
    server: BoardServer, path: str, method: str = "GET", host: str | None = None
) -> tuple[int, str, dict[str, str]]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=60)
    connection.putrequest(method, path, skip_host=True)
    connection.putheader("Host", host or f"127.0.0.1:{server.server_address[1]}")
    connection.endheaders()
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, text, dict(answer.getheaders())


def test_runs_are_found_at_any_depth_with_their_state(folder: Path) -> None:
    runs = {entry.name: entry for entry in find_runs(folder)}
    assert {name: entry.state for name, entry in runs.items()} == {
        "study/done": "finished", HOSTILE: "stopped", "now": "running", "broken": "damaged",
    }  # fmt: skip
    done = runs["study/done"]
    assert (done.done, done.planned, done.algorithms) == (4, 4, ["local", "ditto"])
    summary = json.loads((done.path / "summary.json").read_text())["results"]
    best = max(summary, key=lambda result: result["personal"]["accuracy"])
    assert done.best is not None
    assert (done.best.algorithm, done.best.mean) == (best["algorithm"], best["personal"]["accuracy"])
    assert (runs[HOSTILE].done, runs[HOSTILE].planned) == (3, 4)
    assert "JSON" in runs["broken"].problem
    assert find_runs(folder / "study" / "done")[0].name == "done"
    with pytest.raises(ConfigError, match="is no folder"):
        find_runs(folder / "nowhere")


def test_a_figure_of_hundreds_of_digits_damages_its_own_run_alone(folder: Path, tmp_path: Path) -> None:
    """It ended the list of all runs, of the board and of `kinfed runs`."""
    for name in ("good", "bad"):
        shutil.copytree(folder / "study" / "done", tmp_path / name)
    summary = json.loads((tmp_path / "bad" / "summary.json").read_text())
    summary["results"][0]["personal"]["accuracy"] = 10**400
    (tmp_path / "bad" / "summary.json").write_text(json.dumps(summary))
    assert {entry.name: entry.state for entry in find_runs(tmp_path)} == {"good": "finished", "bad": "damaged"}


def test_runs_are_filtered(folder: Path) -> None:
    runs = find_runs(folder)

    def names(**wanted: Any) -> set[str]:
        return {entry.name for entry in matching(runs, **{"where": {}, **wanted})}

    assert names(algorithm="ditto") == {"study/done"}
    assert names(state="running") == {"now"}
    assert names(dataset="digits", where={"algorithms.fedavg.method": "fedavg"}) == {HOSTILE, "now"}
    assert names(where={"rounds": "2", "lr": "0.05", "seeds": "0", "stratify": "false"}) == {
        HOSTILE,
        "now",
        "study/done",
    }
    assert names(where={"rounds": "3"}) == set()
    with pytest.raises(ConfigError, match="a run is finished, running, stopped or damaged"):
        names(state="done")


def test_a_dead_process_runs_nothing(tmp_path: Path) -> None:
    assert not is_running(tmp_path)
    process = subprocess.Popen(["true"])
    process.wait()
    (tmp_path / ".lock-holder").write_text(f"process {process.pid} on {socket.gethostname()}", "utf-8")
    assert not is_running(tmp_path)
    (tmp_path / ".lock-holder").write_text(f"process {process.pid} on another machine", "utf-8")
    assert is_running(tmp_path)


def test_the_board_lists_runs_and_shows_one(server: BoardServer) -> None:
    status, _, headers = ask(server, "/")
    assert status == 200
    assert "script-src 'self'" in headers["Content-Security-Policy"]
    assert headers["X-Frame-Options"] == "DENY"
    rows = json.loads(ask(server, "/api/runs")[1])
    assert {row["name"] for row in rows} == {"study/done", HOSTILE, "now", "broken"}
    live = json.loads(ask(server, "/live/now")[1])
    assert live["state"] == "running"
    assert [(trial["algorithm"], trial["round"], trial["finished"]) for trial in live["trials"]] == [
        ("local", 2, True),
        ("fedavg", 1, False),
    ]
    assert live["figure"]["data"]
    status, page, _ = ask(server, "/run/%3Cimg%20src%3Dx%20onerror%3Dalert(1)%3E")
    assert status == 200
    assert HOSTILE not in page
    assert "&lt;img" in page
    assert ask(server, "/report/study%2Fdone")[0] == 200


@pytest.mark.parametrize("host", ["evil.example", "evil.example:{port}", "127.0.0.1", "localhost:1", ""])
def test_other_hosts_are_refused(server: BoardServer, host: str) -> None:
    port = server.server_address[1]
    status, text, _ = ask(server, "/api/runs", host=host.format(port=port) or "x")
    assert status == 421
    assert "study" not in text
    assert ask(server, "/api/runs", host=f"localhost:{port}")[0] == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_nothing_can_be_written(server: BoardServer, method: str) -> None:
    assert ask(server, "/api/runs", method)[0] == 405


def test_no_address_leads_out_of_the_folder(server: BoardServer, folder: Path) -> None:
    for name in ("../secret.txt", "..%2Fsecret.txt", "%2e%2e%2fsecret.txt", "/etc/passwd", "study", "..", "", "."):
        for kind in ("run", "live", "report"):
            assert ask(server, f"/{kind}/{name}")[0] == 404
    for path in ("/secret.txt", "/../secret.txt", "/templates/list.html", "/board.py"):
        status, text, _ = ask(server, path)
        assert status == 404
        assert "secret" not in text
    before = sorted(path for path in folder.rglob("*"))
    ask(server, "/live/now")
    assert sorted(path for path in folder.rglob("*")) == before


@pytest.mark.parametrize("address", ["http://[", "/run/%ff%00", "/live/broken", "/report/broken"])
def test_the_board_goes_on_after_what_it_cannot_show(
    server: BoardServer, address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, text, _ = ask(server, address)
    assert status in (404, 500)
    assert text
    assert "Traceback" not in text + capsys.readouterr().err
    assert ask(server, "/api/runs")[0] == 200


def test_results_of_other_types_are_a_damaged_run(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "study" / "done", tmp_path / "run")
    path = tmp_path / "run" / "summary.json"
    summary = json.loads(path.read_text())
    for wrong in (7, [1], "x"):
        summary["results"][0]["personal"] = wrong
        path.write_text(json.dumps(summary))
        (entry,) = find_runs(tmp_path)
        assert (entry.state, bool(entry.problem)) == ("damaged", True)


def test_a_run_that_diverged_is_shown(folder: Path, tmp_path: Path) -> None:
    """What is not finite has no number in JSON, and a browser reads nothing else."""
    shutil.copytree(folder / "now", tmp_path / "run")
    journal = tmp_path / "run" / "rounds.jsonl"
    lines = [json.loads(line) for line in journal.read_text().splitlines()]
    lines[-1]["personal"]["accuracy"] = None
    journal.write_text("".join(json.dumps(line) + "\n" for line in lines))
    (entry,) = find_runs(tmp_path)
    view = to_json(live_view(entry))
    assert "NaN" not in view
    assert json.loads(view)["trials"]


def test_the_board_is_on_this_machine_only(server: BoardServer, folder: Path) -> None:
    assert server.server_address[0] == "127.0.0.1"
    with pytest.raises(ConfigError, match=r"port \d+ cannot be used"):
        _Other(folder, server.server_address[1])
    with pytest.raises(ConfigError, match="is no folder"):
        BoardServer(folder / "nowhere")


class _Other(BoardServer):
    allow_reuse_address = False


CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.mark.browser
@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
@pytest.mark.parametrize("path", ["/", "/run/now"])
def test_a_browser_shows_it(server: BoardServer, tmp_path: Path, path: str) -> None:
    assert CHROMIUM is not None
    done = subprocess.run(
        [
            *(CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--enable-logging=stderr"),
            *("--disable-background-networking", f"--user-data-dir={tmp_path / 'profile'}"),
            *("--virtual-time-budget=5000", "--dump-dom", server.url.rstrip("/") + path),
        ],
        capture_output=True,
        text=True,
        timeout=110,
        check=True,
    )
    assert 'data-board="ready"' in done.stdout
    assert not [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    assert "<img" not in done.stdout
    if path == "/":
        assert "4 of 4" in done.stdout
        assert "&lt;img src=x" in done.stdout
    else:
        assert "main-svg" in done.stdout
        assert ">running</span>" in done.stdout


def test_a_deployment_shows_whom_it_awaits_and_what_is_left_of_epsilon(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "now", tmp_path / "study")
    site = {"connected": True, "last_seen": None, "last_answer": None, "awaited_since": None, "last_error": ""}
    waiting = site | {"connected": False, "awaited_since": "2026-11-19T05:00:00+00:00", "last_error": HOSTILE}
    status = {"doing": "round 2 of 2", "clients": {"a": site, "b": waiting}, "epsilon_limit": 8.0, "rounds": 4}
    (tmp_path / "study" / "status.json").write_text(to_json(status))
    (entry,) = find_runs(tmp_path)
    assert (entry.done, entry.planned) == (3, 8)  # two methods of four rounds: it was begun with two, and has grown
    view = live_view(entry)
    assert view["trials"][0]["planned"] == 8
    assert (view["kind"], view["doing"]) == ("deployment", "round 2 of 2; awaited: b")
    assert view["budget"] == "epsilon 8 at most"
    assert [(one["name"], one["connected"], bool(one["awaited"])) for one in view["sites"]] == [
        ("a", True, False), ("b", False, True)
    ]  # fmt: skip
    (tmp_path / "study" / "status.json").write_text(to_json(status | {"secret_choice": True}))
    assert [one["awaited"] for one in live_view(entry)["sites"]] == ["", ""]


def test_fits_studies_and_entries_are_listed_with_their_pages(tmp_path: Path) -> None:
    entry = {"suite": "arena-1", "subset": "lite", "method": "ditto"}
    study = {"cells": [[["digits", "", "0.1"], ["local", "kin"], [0, 1], 5], [["digits", "", "1"], ["local"], [0], 5]]}
    fit = {"table": "visits.csv", "contenders": [{"method": "local"}, {"method": "ditto"}]}
    for folder, name, record in (("a", "entry", entry), ("s", "study", study), ("f", "fit", fit)):
        (tmp_path / folder / "cells" / "one").mkdir(parents=True)
        (tmp_path / folder / f"{name}.json").write_text(json.dumps(record))
        (tmp_path / folder / f"{name}.html").write_text("<script>alert(1)</script>")
    (tmp_path / "s" / "cells" / "one" / "summary.json").write_text("{}")
    (tmp_path / "f" / "config.json").write_text("a fit's settings are not a run's")
    runs = {one.name: one for one in find_runs(tmp_path)}
    about = {name: (one.kind, one.state, one.dataset, one.algorithms) for name, one in runs.items()}
    assert about == {
        "a": ("arena entry", "finished", "arena-1 lite", ["ditto"]),
        "s": ("study", "stopped", "digits", ["local", "kin"]),
        "f": ("fit", "finished", "visits.csv", ["local", "ditto"]),
    }
    assert (runs["s"].done, runs["s"].planned) == (1, 2)
    (tmp_path / "f" / "fit.json").write_text("[]")
    (damaged,) = (one for one in find_runs(tmp_path) if one.name == "f")
    assert damaged.state == "damaged"
    with BoardServer(tmp_path, 0) as board:
        thread = threading.Thread(target=board.serve_forever, daemon=True)
        thread.start()
        status, text, headers = ask(board, "/page/a")
        assert (status, text) == (200, "<script>alert(1)</script>")
        assert headers["Content-Security-Policy"].startswith("sandbox allow-scripts; default-src 'none'")
        assert ask(board, "/page/f")[0] == 404
        assert {row["name"]: row["opens"] for row in json.loads(ask(board, "/api/runs")[1])} == {
            "a": "page", "s": "page", "f": ""
        }  # fmt: skip
        board.shutdown()
        thread.join()


def test_a_fit_that_was_stopped_is_no_damaged_run(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        to_json({"fingerprint": "", "config": {"table": "visits.csv", "algorithms": "ditto,kin"}})
    )
    (entry,) = find_runs(tmp_path)
    assert (entry.kind, entry.state, entry.algorithms) == ("fit", "stopped", ["ditto", "kin"])


def test_two_runs_are_compared_side_by_side(server: BoardServer) -> None:
    status, text, headers = ask(server, f"/both/study%2Fdone/{quote(HOSTILE, safe='')}")
    assert status == 200
    assert "frame-ancestors" in headers["Content-Security-Policy"]
    assert HOSTILE not in text
    for path in ("/both/study%2Fdone", "/both/study%2Fdone/nothing", "/both/a/b/c", "/both/"):
        assert ask(server, path)[0] == 404
