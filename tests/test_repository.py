"""What a project promises around its code: one version, notes of a release, commands that exist, extras with a text."""

from __future__ import annotations

import re
import runpy
import tomllib
from pathlib import Path

import pytest
import yaml

import kinfed
from kinfed.cli.doctor_command import EXTRAS

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
FOR_DEVELOPMENT = {"dev", "docs", "release"}


def test_the_version_has_one_place() -> None:
    assert PROJECT["project"]["dynamic"] == ["version"]
    assert PROJECT["tool"]["hatch"]["version"]["path"] == "kinfed/version.py"
    assert f"version: {kinfed.__version__}\n" in (ROOT / "CITATION.cff").read_text("utf-8")
    assert f"## [{kinfed.__version__}]" in (ROOT / "CHANGELOG.md").read_text("utf-8")


def test_notes_of_a_release_come_from_the_changelog(tmp_path: Path) -> None:
    notes = runpy.run_path(str(ROOT / ".ci/release_notes.py"))["notes"]
    assert "### Added" in notes(kinfed.__version__)
    with pytest.raises(SystemExit, match=r"does not say 9\.9\.9"):
        notes("9.9.9")
    (tmp_path / "kinfed").mkdir()
    (tmp_path / "kinfed/version.py").write_text('__version__ = "2.0.0"\n')
    (tmp_path / "CHANGELOG.md").write_text("## [2.0.0] - 2030-01-01\n\n- new\n\n## [1.0.0] - 2029-01-01\n\n- old\n")
    assert notes("2.0.0", tmp_path) == "- new\n"
    (tmp_path / "CHANGELOG.md").write_text("## [1.0.0] - 2029-01-01\n\n- old\n")
    with pytest.raises(SystemExit, match="no heading"):
        notes("2.0.0", tmp_path)


def test_changes_are_by_kind() -> None:
    text = (ROOT / "CHANGELOG.md").read_text("utf-8")
    kinds = set(re.findall(r"^### (.*)$", text, re.M))
    assert kinds <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), re.M))


@pytest.mark.parametrize("file", sorted((ROOT / ".github/workflows").glob("*.yml")), ids=lambda path: path.name)
def test_workflows_call_commands_that_exist(file: Path) -> None:
    jobs = yaml.safe_load(file.read_text("utf-8"))["jobs"].values()
    commands = [step["run"] for job in jobs for step in job["steps"] if "run" in step]
    assert {word for command in commands for word in re.findall(r"make ([a-z-]+)", command)} <= make_targets()
    for command in commands:
        program = command.split()[0]
        assert not program.startswith(".ci/") or (ROOT / program).stat().st_mode & 0o100


@pytest.mark.parametrize("file", ["CONTRIBUTING.md", "README.md", "docs/install.md", "docs/start.md"])
def test_documents_name_targets_that_exist(file: str) -> None:
    text = (ROOT / file).read_text("utf-8")
    named = {name for names in re.findall(r"`make ([a-z -]+)`", text) for name in names.split()}
    assert named <= make_targets()


def test_templates_and_hooks_are_valid() -> None:
    for file in (ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml"):
        content = yaml.safe_load(file.read_text("utf-8"))
        assert file.name == "config.yml" or {"name", "description", "body"} <= content.keys()
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text("utf-8"))["repos"][0]["hooks"]
    assert all(hook["language"] == "system" and hook["entry"].startswith(".venv/bin/") for hook in hooks)


def test_every_extra_is_explained() -> None:
    extras = PROJECT["project"]["optional-dependencies"].keys() - FOR_DEVELOPMENT
    assert extras == EXTRAS.keys()
    install, readme = ((ROOT / file).read_text("utf-8") for file in ("docs/install.md", "README.md"))
    for extra in extras:
        row = re.search(rf"^\| [^|]*`{extra}`[^|]* \|", install, re.M)
        assert row, f"docs/install.md does not say what {extra} is for"
        assert f"`{extra}`" in readme, f"README.md does not say that {extra} is not in the base install"


def test_everything_that_is_needed_is_pinned() -> None:
    pinned = {
        line.partition("==")[0].lower().replace("_", "-")
        for line in (ROOT / "constraints.txt").read_text("utf-8").splitlines()
        if "==" in line
    }
    extras = PROJECT["project"]["optional-dependencies"].values()
    texts = [*PROJECT["project"]["dependencies"], *(text for extra in extras for text in extra)]
    names = {re.split(r"[<>=!~\[; ]", text)[0].lower().replace("_", "-") for text in texts}
    assert names <= pinned, f"constraints.txt does not pin {', '.join(sorted(names - pinned))}"


def test_attacks_of_the_mutation_run_take_defences_away_that_are_there() -> None:
    """Text that has changed since would end the run before its first mutant."""
    for entry in tomllib.loads((ROOT / "benchmarks/mutants.toml").read_text("utf-8"))["named"]:
        source = (ROOT / entry["path"]).read_text("utf-8")
        assert source.count(entry["before"]) == 1, entry
        compile(source.replace(entry["before"], entry["after"]), entry["path"], "exec")
        for file, _, test in (name.partition("::") for name in entry.get("tests", ())):
            assert f"def {test}" in (ROOT / file).read_text("utf-8"), entry
