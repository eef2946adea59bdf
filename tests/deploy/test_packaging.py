"""Unit files, images and lists of requirements: what they name exists, and their commands do what is written there."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest

from kinfed.cli.app import app
from kinfed.deploy.programs.processes import free_port

ROOT = Path(__file__).parents[2]
PACKAGING = ROOT / "packaging"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
LEFT_OUT = {"plotly", "huggingface_hub", "pillow"}
DOCKERFILES = sorted((PACKAGING / "containers").glob("*.Dockerfile"))
UNITS = sorted((PACKAGING / "systemd").glob("*.service"))


def parse(command: list[str]) -> None:
    """Parse a command of kinfed without doing anything."""
    import typer

    group = typer.main.get_command(app)
    while (found := getattr(group, "commands", {}).get(command[0])) is not None:
        group, command = found, command[1:]
        if not hasattr(group, "commands"):
            break
    group.make_context(group.name, list(command))


def instruction(file: Path, name: str) -> list[str]:
    """The words of the last instruction of this name, in the form of JSON."""
    text = file.read_text().replace("\\\n", " ")
    return json.loads(re.findall(rf"^{name} (\[.*\])$", text, re.M)[-1])


def test_a_node_needs_all_but_plots_hub_and_images() -> None:
    lines = (PACKAGING / "requirements-node.txt").read_text().splitlines()
    slim = {line for line in lines if line and not line.startswith("#")}
    base = {line for line in PROJECT["dependencies"] if re.split("[><=]", line)[0] not in LEFT_OUT}
    assert slim == base | set(PROJECT["optional-dependencies"]["node"])
    flower = set(PROJECT["optional-dependencies"]["flower"])
    assert flower < set(PROJECT["optional-dependencies"]["node"])


@pytest.mark.timeout(400)
def test_a_node_imports_nothing_of_what_is_left_out() -> None:
    names = sorted({"pillow": "PIL"}.get(package, package) for package in LEFT_OUT)
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({names}))\n"
        "import kinfed.deploy.node.node, kinfed.deploy.node.fit_client, kinfed.deploy.node.question_client\n"
        "import kinfed.deploy.operator.deploy_doctor, kinfed.cli.app"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda path: path.stem)
def test_an_image_is_rootless_and_runs_a_command_that_there_is(file: Path) -> None:
    words = [*instruction(file, "ENTRYPOINT"), *instruction(file, "CMD")]
    assert words[0] == "kinfed"
    parse(words[1:])
    text = file.read_text()
    assert re.findall(r"^USER (\S+)$", text, re.M)[-1] == "10001"
    assert all((ROOT / name).exists() for line in re.findall(r"^COPY (?!--from)(.+) \S+$", text, re.M)
               for name in line.split())  # fmt: skip


@pytest.mark.parametrize("file", UNITS, ids=lambda path: path.stem)
def test_a_unit_runs_a_command_that_there_is(file: Path) -> None:
    (start,) = re.findall(r"^ExecStart=(.+)$", file.read_text(), re.M)
    program, *words = shlex.split(start)
    assert program == "/opt/kinfed/bin/kinfed"
    parse(words)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
@pytest.mark.parametrize("file", UNITS, ids=lambda path: path.stem)
def test_systemd_finds_nothing_wrong_with_a_unit(file: Path, tmp_path: Path) -> None:
    name = file.name.replace("@.", "@trial.")
    text = file.read_text().replace("/opt/kinfed/bin/kinfed", str(Path(sys.executable).parent / "kinfed"))
    (tmp_path / name).write_text(text)
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(tmp_path / name)], capture_output=True, text=True, check=False
    )
    complaints = [line for line in (done.stderr + done.stdout).splitlines() if str(tmp_path) in line or name in line]
    assert complaints == []


def test_the_compose_file_names_images_that_there_are() -> None:
    yaml = pytest.importorskip("yaml")
    about = yaml.safe_load((PACKAGING / "containers" / "compose.yaml").read_text())
    for service in about["services"].values():
        build = service["build"]
        assert (PACKAGING / "containers" / build["context"] / build["dockerfile"]).is_file()
        assert service["cap_drop"] == ["ALL"]
        assert service["read_only"] is True


def test_the_conda_recipe_needs_what_the_wheel_needs() -> None:
    yaml = pytest.importorskip("yaml")
    text = re.sub(r"\$\{\{.*?\}\}", "0", (PACKAGING / "conda" / "recipe.yaml").read_text())
    wanted = {line.replace(" ", "").replace("pytorch", "torch") for line in yaml.safe_load(text)["requirements"]["run"]}
    needed = {line.replace("Jinja2", "jinja2") for line in PROJECT["dependencies"]}
    assert wanted == needed | {f"python{PROJECT['requires-python']}"}


@pytest.mark.flower
@pytest.mark.timeout(600)
def test_the_server_s_entry_point_starts_becomes_healthy_and_stops(tmp_path: Path) -> None:
    """The words of the image in the places of this machine, with its variables."""
    from kinfed.deploy.operator.certs import make_certificates

    file = PACKAGING / "containers" / "server.Dockerfile"
    make_certificates(tmp_path / "certs", ["127.0.0.1"])
    port, control, health = free_port(), free_port(), free_port()
    places = {"/certs": str(tmp_path / "certs"), "8000": str(port), "0.0.0.0": "127.0.0.1",
              "/runs/superlink": str(tmp_path / "superlink")}  # fmt: skip
    words = [*instruction(file, "ENTRYPOINT"), *(places.get(word, word) for word in instruction(file, "CMD"))]
    given = re.findall(r"(KINFED_\w+)=(\S+)", file.read_text())
    variables = {name: value.replace("9464", str(health)) for name, value in given}
    environment = os.environ | variables | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    log = (tmp_path / "log").open("wb")
    server = subprocess.Popen([*words, "--control-port", str(control)], env=environment, stdout=log, stderr=log)
    try:
        (probe,) = re.findall(r'CMD \["python", "-c", "(.+)"\]$', file.read_text(), re.M)
        check = [sys.executable, "-c", probe.replace("9464", str(health))]
        end = time.monotonic() + 300
        while subprocess.run(check, capture_output=True, check=False).returncode and time.monotonic() < end:
            assert server.poll() is None, (tmp_path / "log").read_text()
        assert subprocess.run(check, check=False).returncode == 0, (tmp_path / "log").read_text()
    finally:
        server.terminate()
        assert server.wait(200) == 0
        log.close()
    lines = (tmp_path / "log").read_text().splitlines()
    assert all("time" in json.loads(line) for line in lines if line.startswith("{"))
