"""The options of commands that take settings of a run, made from the declarations in `RunConfig`.

    @app.command(cls=SettingsCommand.taking("dataset", "clients"))
    def describe(context: typer.Context) -> None:
        config = settings_of(context).make_config()

Values go to `make_config` as they were typed: what a setting may be is said there, for files and Python too. The
options are made when a command is parsed, so that `kinfed --help` does not wait for them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, get_args, get_origin

import click
import typer
from click.shell_completion import CompletionItem
from rich.markup import escape
from typer.core import TyperArgument, TyperCommand, TyperOption
from typer.models import CommandFunctionType
from typer.utils import get_params_from_function

from kinfed.errors import ConfigError, KinfedError

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

    from kinfed.config import RunConfig

    ParamType = click.ParamType[Any]  # generic for type checkers, but in older versions of click not when it runs
else:
    ParamType = click.ParamType

_FILE, _SETS = "config", "sets"  # parameters that are no settings: the TOML file, and the values of --set
_ADVANCED = "Options of methods, data sets, partitions and models"


@dataclass(frozen=True)
class TypedSettings:
    """What was typed: a file, settings, and owner.option=value texts."""

    file: Path | None = None
    values: dict[str, Any] = field(default_factory=dict)
    sets: tuple[str, ...] = ()

    @property
    def change_results(self) -> bool:
        """Whether anything was typed that decides results, and not only how and where they are computed."""
        from kinfed.config import NON_RESULT_SETTINGS

        return self.file is not None or bool(self.sets) or not self.values.keys() <= set(NON_RESULT_SETTINGS)

    def make_config(self) -> RunConfig:
        from kinfed.config import make_config

        return make_config(self.file, self.values, self.sets)


def settings_of(context: typer.Context) -> TypedSettings:
    typed = context.obj
    assert isinstance(typed, TypedSettings), "the command is no SettingsCommand"
    return typed


class Command(TyperCommand):
    """A command whose arguments keep their help texts, which typer 0.20 loses with click 8.5. They are looked up when
    this command is used, and not for all commands whenever one is."""

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        arguments = [p for p in self.params if isinstance(p, TyperArgument) and p.name is not None and p.help is None]
        if arguments:
            assert self.callback is not None
            declared = get_params_from_function(inspect.unwrap(self.callback))
            for argument in arguments:
                argument.help = getattr(declared[str(argument.name)].default, "help", None)
        return super().get_params(ctx)


class CommandGroup(typer.Typer):
    """A typer whose commands are of the class `Command` where nothing else is said."""

    def command(
        self, name: str | None = None, *, cls: type[TyperCommand] | None = None, **about: Any
    ) -> Callable[[CommandFunctionType], CommandFunctionType]:
        return super().command(name, cls=cls or Command, **about)


class SettingsCommand(Command):
    """A command that takes settings beside the parameters of its function, which gets them by `settings_of`."""

    settings: ClassVar[tuple[str, ...] | None] = None  # None: all
    texts: ClassVar[Mapping[str, str]] = {}  # help that differs from the declaration's
    reads_file: ClassVar[bool] = True  # whether a TOML file with settings may be named, too

    @classmethod
    def taking(
        cls, *settings: str, texts: Mapping[str, str] | None = None, reads_file: bool = True
    ) -> type[SettingsCommand]:
        """A command that takes these settings; without names: all of them."""
        about = {"settings": settings or None, "texts": texts or {}, "reads_file": reads_file}
        return type(cls.__name__, (cls,), about)

    @cached_property
    def _made(self) -> list[click.Parameter]:
        from kinfed.config import PANELS, RunConfig

        names = RunConfig.model_fields if self.settings is None else self.settings
        options = [_option(name, RunConfig.model_fields[name], self.texts.get(name)) for name in names]
        options.sort(key=lambda option: PANELS.index(str(option.rich_help_panel)))
        return [*([_file_argument()] if self.reads_file else []), *options, _sets_option()]

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        return [*super().get_params(ctx), *self._made]

    def invoke(self, ctx: click.Context) -> Any:
        values = {option.name: ctx.params.pop(option.name) for option in self._made if option.name is not None}
        file, sets = values.pop(_FILE, None), values.pop(_SETS)
        typed = {name: value for name, value in values.items() if value is not None and value != ()}
        if file is not None and "dataset" in values and _is_table(file):
            if "dataset" in typed:
                raise ConfigError(f"two data sets: {file} and --dataset {typed['dataset']}; give one")
            file, typed["dataset"] = None, file
        ctx.obj = TypedSettings(None if file is None else Path(file), typed, tuple(sets))
        return super().invoke(ctx)


def _is_table(file: str) -> bool:
    from kinfed.data.sources import is_table

    return is_table(file)


def _file_argument() -> click.Parameter:
    argument = TyperArgument(param_decls=[_FILE], required=False, type=Text("FILE"), metavar="[FILE]")
    argument.help = "TOML file with settings, which options override; or a table to run on."  # afterwards: see Command
    return argument


def _sets_option() -> click.Parameter:
    text = "owner.option=value, e.g. ditto.lam=0.5, partition.classes=3 (repeatable)."
    return TyperOption(
        param_decls=["--set", _SETS],
        multiple=True,
        type=Text("OWNER.OPTION=VALUE"),
        help=text,
        rich_help_panel=_ADVANCED,
    )


def _option(name: str, declaration: FieldInfo, text: str | None) -> TyperOption:
    extra = declaration.json_schema_extra
    assert isinstance(extra, dict), f"setting {name} is declared without `setting`"
    kind = _kind(declaration.annotation)
    flag = kind is bool
    dashed = str(extra["option"] or "--" + name.replace("_", "-"))
    default = "" if text else _shown(declaration.get_default(call_default_factory=True))
    return TyperOption(
        param_decls=[f"{dashed}/--no-{dashed[2:]}" if flag else dashed, name],
        default=None,
        is_flag=flag or None,
        multiple=get_origin(kind) is tuple and Path in get_args(kind),
        type=None if flag else _type(kind, str(extra["registry"])),
        envvar=str(extra["variable"]) or None,
        show_envvar=bool(extra["variable"]),
        help=escape(text or str(declaration.description))
        + (f" [dim]{escape(f'[default: {default}]')}[/]" if default else ""),
        rich_help_panel=str(extra["panel"]),
    )


def _kind(hint: Any) -> Any:
    """The type that a value is typed as, without "or none"."""
    from kinfed.config import alternatives

    kinds = [get_args(kind)[0] if get_origin(kind) is Annotated else kind for kind in alternatives(hint)]
    return kinds[0] if len(kinds) == 1 else tuple(kinds)


def _shown(default: Any) -> str:
    """A default as it would be typed; "" where the text says what happens by default."""
    if default is None or default == () or isinstance(default, bool):
        return ""
    if isinstance(default, list | tuple):
        return ",".join(map(str, default))
    return f"{default:g}" if isinstance(default, float) else str(getattr(default, "name", default))


def _type(kind: Any, registry: str) -> ParamType:
    if registry:
        return RegisteredName(registry)
    if get_origin(kind) is Literal:
        return Text(f"[{'|'.join(get_args(kind))}]", get_args(kind))
    if isinstance(kind, tuple):  # auto, or a number
        words = get_args(kind[0])
        return Text(f"[{'|'.join(words)}|NUMBER]", words)
    if get_origin(kind) is tuple:
        return Text({int: "INTEGERS", float: "NUMBERS"}.get(get_args(kind)[0], "FILE"))
    return Text({int: "INTEGER", float: "NUMBER", Path: "PATH"}.get(kind, "TEXT"))


class Text(ParamType):
    """A value that goes to `make_config` as it is typed; the words can be completed."""

    def __init__(self, metavar: str, words: Iterable[str] = ()) -> None:
        self.name = metavar
        self._words = tuple(words)

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str:
        return self.name

    def words(self, ctx: click.Context) -> Iterable[str]:
        return self._words

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        return [CompletionItem(word) for word in self.words(ctx) if word.startswith(incomplete)]


class RegisteredName(Text):
    """A name of a registry. Of several methods, separated by commas, the last is completed."""

    def __init__(self, registry: str) -> None:
        super().__init__("NAMES" if registry == "algorithm" else "NAME")
        self._registry = registry

    def words(self, ctx: click.Context) -> Iterable[str]:
        from kinfed.core import load_plugin, registry_of

        try:
            for file in ctx.params.get("plugins") or ():
                load_plugin(file)
            return [*registry_of(self._registry), *(("all",) if self._registry == "algorithm" else ())]
        except KinfedError:
            return ()  # a completion has nowhere to complain; the command itself will

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        if self._registry != "algorithm":
            return super().shell_complete(ctx, param, incomplete)
        begin = max(incomplete.rfind(mark) for mark in ",=-") + 1
        items = super().shell_complete(ctx, param, incomplete[begin:])
        return [CompletionItem(incomplete[:begin] + item.value) for item in items]


def _load(files: list[Path] | None) -> list[Path] | None:
    from kinfed.core import load_plugin

    for file in files or ():
        load_plugin(file)
    return files


Plugins = Annotated[
    list[Path] | None,
    typer.Option(
        "--plugin", help="Python file that registers your own methods, data sets, ... (repeatable).", callback=_load
    ),
]
RunFolderArgument = Annotated[Path, typer.Argument(help="Folder of a finished run.")]


def integers(option: str, text: str) -> tuple[int, ...]:
    """Whole numbers separated by commas."""
    try:
        return tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError:
        raise ConfigError(f"{option} takes whole numbers separated by commas; got {text!r}") from None
