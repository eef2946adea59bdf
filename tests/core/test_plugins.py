"""The identity of code that is not kinfed's: whole files, and the modules beside them that they import."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kinfed.core import plugins
from kinfed.errors import ConfigError


def written(folder: Path, **files: str) -> Path:
    """A folder of modules; two underscores in a name stand for a folder."""
    for name, text in files.items():
        path = folder / (name.replace("__", "/") + ".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


FILES = {
    "mine": "import kinfed, os, near\ndef late():\n    from pack import deep\n",
    "near": "from farther import VALUE\n",
    "farther": "VALUE = 1\n",
    "pack__init": "",
    "pack__deep": "from . import sibling\nfrom .inner.core import x\n",
    "pack__sibling": "A = 1\n",
    "pack__inner__core": "x = 1\n",
    "kinfed": "this is not read\n",
    "stranger": "B = 1\n",
}


def folder_of(tmp_path: Path, name: str, **changes: str) -> Path:
    files = FILES | changes
    folder = written(tmp_path / name, **{name: text for name, text in files.items() if name != "pack__init"})
    (folder / "pack" / "__init__.py").write_text(files["pack__init"])
    return folder


def digest(folder: Path) -> str:
    return plugins.code_digest(folder / "mine.py", "mine")


def test_the_place_of_a_plugin_does_not_matter(tmp_path: Path) -> None:
    assert digest(folder_of(tmp_path, "here")) == digest(folder_of(tmp_path, "there"))


@pytest.mark.parametrize("module", sorted(FILES))
def test_every_module_that_is_imported_from_beside_counts_and_no_other(tmp_path: Path, module: str) -> None:
    before, after = folder_of(tmp_path, "a"), folder_of(tmp_path, "b", **{module: FILES[module] + "X = 2\n"})
    assert (digest(before) == digest(after)) == (module in ("kinfed", "stranger"))


def test_modules_that_import_each_other_are_read_once(tmp_path: Path) -> None:
    folder = written(tmp_path, mine="import a\n", a="import b\n", b="import a, mine\n")
    assert digest(folder) != digest(written(tmp_path / "more", mine="import a\n", a="import b\n", b="import a\n"))


def test_a_file_that_is_no_python_has_a_digest_and_is_refused(tmp_path: Path) -> None:
    folder = written(tmp_path, mine="def (\n")
    assert len(digest(folder)) == 32
    with pytest.raises(ConfigError, match="cannot be loaded: SyntaxError"):
        plugins.load(folder / "mine.py")


def test_of_a_module_in_a_package_only_the_package_counts(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "a", pack__deep="import near\nfrom pack import sibling\n")
    before = plugins.code_digest(folder / "pack" / "deep.py", "pack.deep")
    (folder / "near.py").write_text("CHANGED = 1\n")
    assert plugins.code_digest(folder / "pack" / "deep.py", "pack.deep") == before
    (folder / "pack" / "sibling.py").write_text("A = 2\n")
    assert plugins.code_digest(folder / "pack" / "deep.py", "pack.deep") != before


def test_of_a_class_in_the_program_its_text_and_the_modules_beside_count(tmp_path: Path) -> None:
    program = (
        "import beside\nfrom kinfed.core import plugins\n"
        "class Mine:\n    a = {a}\nprint(plugins.class_digest(Mine), {b})\n"
    )

    def printed(a: int, b: int, value: int) -> str:
        folder = written(tmp_path / f"{a}{b}{value}", program=program.format(a=a, b=b), beside=f"VALUE = {value}\n")
        done = subprocess.run([sys.executable, folder / "program.py"], capture_output=True, text=True, timeout=60)
        return done.stdout.split()[0]

    assert printed(1, 1, 1) == printed(1, 2, 1)
    assert len({printed(1, 1, 1), printed(2, 1, 1), printed(1, 1, 2)}) == 3


def test_kinfed_s_own_classes_have_no_digest() -> None:
    assert plugins.class_digest(plugins.Plugin) is None


def test_equal_names_of_plugins_are_told_apart() -> None:
    assert plugins.content_names(["a/mine.py", "b/mine.py", Path("c/other.py")]) == [
        "code of plugin mine.py",
        "code of plugin mine.py (2)",
        "code of plugin other.py",
    ]
