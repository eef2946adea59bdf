"""Plugins: Python files that register methods, data sets, models, ...; and the identity of code that is not kinfed's.

A plugin is run when a user names its file (`load`). The path that a run folder has recorded is never followed by
itself: `admitted` looks for the recorded code among the files that were named in this process.

The code of a module is its whole file, and the modules beside it that it imports, and what these import: beside it is
what lies in the same folder or, for a module of a package, in the same package. Imports are read from the text, also
those inside functions; nothing is run for it.
"""

import ast
import hashlib
import importlib.util
import inspect
import shlex
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType

from kinfed.errors import ConfigError, KinfedError

PREFIX = "kinfed_plugin_"  # of the names of modules that are loaded from files
SHOWN_DIGITS = 12  # of a digest in sentences


@dataclass(frozen=True)
class Plugin:
    """A plugin that was run, and the digest of its code at that moment."""

    module: ModuleType
    code: str


class _TextLoader(SourceFileLoader):
    """Runs the text of a file, which is what its digest is of; a compiled file beside it may come from anyone."""

    def get_code(self, fullname: str) -> CodeType:
        code: CodeType = self.source_to_code(self.get_data(self.path), self.path)
        return code


_loaded: dict[Path, Plugin] = {}


def load(path: Path | str) -> ModuleType:
    """Run a plugin file, which registers what it adds. The same file is run once per process."""
    file = Path(path).resolve()
    if file in _loaded:
        return _loaded[file].module
    if not file.is_file():
        raise ConfigError(f"there is no plugin file {path}")
    if file.suffix != ".py":
        raise ConfigError(f"a plugin is a Python file (.py); got {path}")
    name = PREFIX + file.stem + "_" + hashlib.sha256(str(file).encode()).hexdigest()[:8]
    loader = _TextLoader(name, str(file))
    spec = importlib.util.spec_from_file_location(name, file, loader=loader)
    assert spec is not None  # a loader is given
    module, code = importlib.util.module_from_spec(spec), digest_of(file)
    sys.modules[name] = module
    try:
        loader.exec_module(module)
    except (Exception, SystemExit) as error:  # one that ends the process would say nothing at all
        del sys.modules[name]
        if isinstance(error, KinfedError):
            raise
        raise ConfigError(f"the plugin {path} cannot be loaded: {error!r}") from error
    _loaded[file] = Plugin(module, code)
    return module


def digest_of(file: Path) -> str:
    """Digest of a plugin's code: as it was run in this process, otherwise as its files are now."""
    plugin = _loaded.get(file.resolve())
    return code_digest(file.resolve(), file.stem) if plugin is None else plugin.code


def content_names(files: Sequence[Path | str]) -> list[str]:
    """Names of plugins' digests among the contents of a run; the folder of a file does not matter."""
    names = [Path(file).name for file in files]
    counts = [names[: place + 1].count(name) for place, name in enumerate(names)]
    return [f"code of plugin {name}" + (f" ({n})" if n > 1 else "") for name, n in zip(names, counts, strict=True)]


def admitted(path: str, code: str | None, folder: Path) -> Path:
    """The file named in this process that has the `code` of a plugin that a folder has recorded under `path`. Folders
    of earlier versions recorded no digest (None): there a file of the same name must do."""
    named = {file: plugin for file, plugin in _loaded.items() if file.name == Path(path).name}
    for file, plugin in (_loaded if code is not None else named).items():
        if code in (None, plugin.code):
            return file
    if named:
        file, plugin = next(iter(named.items()))
        raise ConfigError(
            f"{file} is not the plugin that {folder} was made with: it, or a module beside it that it imports, has "
            f"changed (sha256 {str(code)[:SHOWN_DIGITS]} there, {plugin.code[:SHOWN_DIGITS]} now); restore it, or "
            "choose another folder with --out"
        )
    where = shlex.quote(path)
    if code is None:
        raise ConfigError(
            f"{folder} was made with the plugin {path}, and reading a folder runs no code. If you trust that file, add "
            f"--plugin {where} (in Python: plugins)"
        )
    raise ConfigError(
        f"{folder} was made with the plugin {path} (sha256 {code[:SHOWN_DIGITS]}), and reading a folder runs no code. "
        f"If you trust that file, add --plugin {where}, or --trust-plugins to run it as recorded, by path and hash (in "
        "Python: plugins, or kinfed.load(folder, trust_plugins=True))"
    )


def load_recorded(path: str, code: str | None, folder: Path) -> Path:
    """Run the plugin that a folder has recorded, if the file is still what it was: the user has confirmed it."""
    file, reason = Path(path), ""
    if code is None:
        reason = "its hash was not recorded"
    elif not file.is_file():
        reason = "there is no such file"
    elif digest_of(file) != code:
        reason = f"it is not what it was (sha256 {code[:SHOWN_DIGITS]})"
    if reason:
        raise ConfigError(f"{folder} was made with the plugin {path}, but {reason}; name the file: --plugin FILE")
    load(file)
    return file


# ---- code ----


def class_digest(kind: type) -> str | None:
    """Digest of the code of a class; None for kinfed's own, and without source text, as in a shell. Of a class in
    the program that runs (`__main__`), which says how many rounds there are as well, its own text counts, and the
    modules beside the program."""
    name = kind.__module__
    if name.partition(".")[0] == "kinfed":
        return None
    file = getattr(sys.modules.get(name), "__file__", None)
    if name != "__main__":
        path = None if file is None else Path(file).resolve()
        if path is None or not path.is_file():
            return None
        return digest_of(path) if name.startswith(PREFIX) else code_digest(path, name)
    try:
        text = inspect.getsource(kind)
    except (OSError, TypeError):
        return None
    if file is None:
        return _hash(text.encode())
    script = Path(file).resolve()
    return _combined({"": _hash(text.encode()), **_hashes(script, script.stem, leave_out=script)})


def code_digest(file: Path, name: str) -> str:
    """32 hexadecimal digits of the code of the module `name` in a file."""
    return _combined(_hashes(file, name))


def _combined(hashes: dict[str, str]) -> str:
    return _hash(repr(sorted(hashes.items())).encode())


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:32]


def _hashes(file: Path, name: str, leave_out: Path | None = None) -> dict[str, str]:
    files = _files_of_code(file, name)
    return {module: _hash(path.read_bytes()) for module, path in files.items() if path != leave_out}


def _files_of_code(file: Path, name: str) -> dict[str, Path]:
    """The module's file and those beside it that it needs, by the names of modules."""
    depth, is_package = name.count("."), file.name == "__init__.py"
    root = file.parents[depth + is_package]
    # Beside an installed module lie all other packages.
    shared = {Path(place).resolve() for place in sysconfig.get_paths().values()}
    top = name.partition(".")[0] if depth or is_package or root in shared else ""
    files, waiting = {}, [(name, file)]
    while waiting:
        module, path = waiting.pop()
        if module in files:
            continue
        files[module] = path
        for imported in _imported_names(path, module if path.name == "__init__.py" else module.rpartition(".")[0]):
            if imported.partition(".")[0] not in ("kinfed", "") and (not top or imported.partition(".")[0] == top):
                waiting += _found(root, imported)
    return files


def _imported_names(path: Path, package: str) -> Iterator[str]:
    """Names of all modules that a file may import; `package` is the one that relative imports start from."""
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):
        return  # it cannot be run either
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".") if package else []
            start = parts[: len(parts) - node.level + 1] if node.level else []
            base = ".".join([*start, *([node.module] if node.module else [])])
            yield base
            yield from (f"{base}.{alias.name}".lstrip(".") for alias in node.names)


def _found(root: Path, name: str) -> Iterator[tuple[str, Path]]:
    """The module of a name below a folder, and the packages that it is in, as far as there are files of them."""
    parts = name.split(".")
    for length in range(1, len(parts) + 1):
        place = root.joinpath(*parts[:length])
        for path in (place.with_name(place.name + ".py"), place / "__init__.py"):
            if path.is_file():
                yield ".".join(parts[:length]), path
