"""The options of commands that take settings, made from their declarations.

    @app.command(cls=SettingsCommand.taking("dataset", "clients"))
    def describe(context: typer.Context) -> None:
        config = settings_of(context).make_config()

Values go on as they were typed: what a setting may be is said where it is declared, for files and Python too. The
options are made when a command is parsed, so that `kinfed --help` does not wait for them.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple, get_args, get_origin

import click
import typer
from click.shell_completion import CompletionItem
from rich.markup import escape
from typer import Argument, Option
from typer.core import TyperArgument, TyperCommand, TyperOption
from typer.models import CommandFunctionType
from typer.utils import get_params_from_function

from kinfed.errors import ConfigError, KinfedError

if TYPE_CHECKING:
    from kinfed.config import RunConfig

    ParamType = click.ParamType[Any]  # generic for type checkers, but in older versions of click not when it runs
else:
    ParamType = click.ParamType

_FILE, _SETS = "config", "sets"  # parameters that are no settings: the TOML file, and the values of --set
_ADVANCED = "Options of methods, data sets, partitions and models"


@dataclass(frozen=True)
class TypedSettings:
    """Settings as typed: a file, settings, and owner.option=value texts."""

    file: Path | None = None
    values: dict[str, Any] = field(default_factory=dict)
    sets: tuple[str, ...] = ()

    @property
    def change_results(self) -> bool:
        """Whether anything was typed that decides results, and not only how and where they are computed."""
        from kinfed.config import NON_RESULT_SETTINGS

        return self.file is not None or bool(self.sets) or not self.values.keys() <= set(NON_RESULT_SETTINGS)

    def load_plugins(self) -> None:
        """Run the plugins that were typed, which a folder that is read next may need."""
        _load(self.values.get("plugins"))

    def make_config(self, defaults: Mapping[str, Any] | None = None) -> RunConfig:
        """The configuration; `defaults` are those of a command, where they are others than a run's."""
        from kinfed.config import make_config

        return make_config(self.file, self.values, self.sets, defaults)


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


class OptionPanel(NamedTuple):
    """Options that stand together in the help, and the dataclass that declares them."""

    heading: str | None
    kind: type[Any]
    names: Iterable[str]


class DeclaredCommand(Command):
    """A command that takes declared options beside the parameters of its function, which gets those that were typed as
    `context.obj`, by name."""

    panels: ClassVar[Callable[..., Iterable[OptionPanel]]]  # a function: declarations are imported late
    texts: ClassVar[Mapping[str, str]] = {}  # help that differs from the declaration's
    required: ClassVar[tuple[str, ...]] = ()
    after: ClassVar[str] = ""  # the parameter of the function behind which the options stand; "": behind all
    default_form: ClassVar[str] = " [dim]\\[default: {}][/]"

    @classmethod
    def of(cls, panels: Callable[[], Iterable[OptionPanel]], **about: Any) -> type[DeclaredCommand]:
        return type(cls.__name__, (cls,), {"panels": staticmethod(panels), **about})

    @cached_property
    def _made(self) -> list[click.Parameter]:
        return [self._option(panel, name) for panel in self.panels() for name in panel.names]

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        own = super().get_params(ctx)
        place = next((place for place, param in enumerate(own, 1) if param.name == self.after), len(own))
        return [*own[:place], *self._made, *own[place:]]

    def invoke(self, ctx: click.Context) -> Any:
        values = {str(option.name): ctx.params.pop(str(option.name)) for option in self._made}
        ctx.obj = self._typed({name: value for name, value in values.items() if value is not None and value != ()})
        return super().invoke(ctx)

    def _typed(self, values: dict[str, Any]) -> Any:
        """Value of `context.obj` for the function."""
        return values

    def _option(self, panel: OptionPanel, name: str) -> TyperOption:
        from kinfed.core import declared, option_types

        declaration, kind = declared(panel.kind)[name], _kind(option_types(panel.kind)[name])
        flag = kind is bool
        dashed = declaration.flag or "--" + name.replace("_", "-")
        return TyperOption(
            param_decls=[f"{dashed}/--no-{dashed[2:]}" if flag else dashed, name], default=None,
            required=name in self.required, is_flag=flag or None,
            multiple=get_origin(kind) is tuple and Path in get_args(kind),
            type=None if flag else _type(kind, declaration.registry), envvar=declaration.variable or None,
            show_envvar=bool(declaration.variable), help=self._help(panel, name, declaration.text),
            rich_help_panel=panel.heading,
        )  # fmt: skip

    def _help(self, panel: OptionPanel, name: str, text: str) -> str:
        if name in self.texts:
            return escape(self.texts[name])
        default = _shown(panel.kind.__dataclass_fields__[name].default)
        if not default:
            return escape(text)
        form = self.default_form
        return escape(re.sub(r"(?<!\.)\.$", "", text) if form.endswith(".") else text) + form.format(escape(default))


class SettingsCommand(DeclaredCommand):
    """A command that takes settings of a run, which its function gets by `settings_of`."""

    reads_file: ClassVar[bool] = True  # whether a TOML file with settings may be named, too

    @classmethod
    def taking(
        cls, *settings: str, texts: Mapping[str, str] | None = None, reads_file: bool = True
    ) -> type[DeclaredCommand]:
        """A command that takes these settings; without names: all of them."""

        def panels() -> Iterator[OptionPanel]:
            from kinfed.config import HEADINGS, RunConfig

            for heading, names in HEADINGS.items():
                chosen = names if not settings else [name for name in settings if name in names]
                yield OptionPanel(heading, RunConfig, chosen)

        return cls.of(panels, texts=texts or {}, reads_file=reads_file)

    @cached_property
    def _made(self) -> list[click.Parameter]:
        return [*([_file_argument()] if self.reads_file else []), *super()._made, _sets_option()]

    def _typed(self, values: dict[str, Any]) -> Any:
        file, sets = values.pop(_FILE, None), values.pop(_SETS, ())
        from kinfed.data.sources import is_table

        if file is not None and any(option.name == "dataset" for option in self._made) and is_table(file):
            if "dataset" in values:
                raise ConfigError(f"two data sets: {file} and --dataset {values['dataset']}; give one")
            file, values["dataset"] = None, file
        return TypedSettings(None if file is None else Path(file), values, tuple(sets))


def _file_argument() -> click.Parameter:
    argument = TyperArgument(param_decls=[_FILE], required=False, type=Text("FILE"), metavar="[FILE]")
    argument.help = "TOML file with settings, which options override; or a table to run on."  # afterwards: see Command
    return argument


def _sets_option() -> click.Parameter:
    text = "owner.option=value, e.g. ditto.lam=0.5, partition.classes=3 (repeatable)."
    return TyperOption(
        param_decls=["--set", _SETS], multiple=True, type=Text("OWNER.OPTION=VALUE"), help=text,
        rich_help_panel=_ADVANCED,
    )  # fmt: skip


def _kind(hint: Any) -> Any:
    """The type that a value is typed as, without "or none"; of names or one text of them, a text."""
    from kinfed.core import alternatives

    kinds = alternatives(hint)
    return kinds[0] if len(kinds) == 1 else str if str in kinds else kinds


def _shown(default: Any) -> str:
    """A default as it would be typed; "" if the text says what happens by default."""
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
    """A value that goes on as it is typed; the words can be completed."""

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
        from kinfed.core import plugins, registry_of

        try:
            for file in ctx.params.get("plugins") or ():
                plugins.load(file)
            return [*registry_of(self._registry), *(("all",) if self._registry == "algorithm" else ())]
        except KinfedError:
            return ()  # a completion has nowhere to complain; the command itself will

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        if self._registry != "algorithm":
            return super().shell_complete(ctx, param, incomplete)
        begin = max(incomplete.rfind(mark) for mark in ",=-") + 1
        items = super().shell_complete(ctx, param, incomplete[begin:])
        return [CompletionItem(incomplete[:begin] + item.value) for item in items]


def _load(files: Iterable[Path] | None) -> Iterable[Path] | None:
    from kinfed.core import plugins

    for file in files or ():
        plugins.load(file)
    return files


Plugins = Annotated[
    list[Path] | None,
    Option(
        "--plugin", help="Python file that registers your own methods, data sets, ... (repeatable).", callback=_load
    ),
]
TrustPlugins = Annotated[
    bool, Option("--trust-plugins", help="Run the plugins that the folder has recorded, if they are unchanged.")
]


def trust_recorded(folder: Path | None, wanted: bool) -> None:
    """Run the plugins of a folder, if the user wants it, and say which."""
    if not wanted:
        return
    from kinfed.cli.terminal import say
    from kinfed.records import JobFiles

    if folder is None:
        raise ConfigError("--trust-plugins is about the plugins of a folder; name the folder")
    for file, digest in JobFiles(folder).load_plugins():
        say(f"plugin   {file} (sha256 {digest}), as recorded in {folder}")


def plugin_words(config: RunConfig) -> str:
    """The option that a command on the folder of this run needs to run its plugins."""
    return " --trust-plugins" if config.plugins else ""


RunFolderArgument = Annotated[Path, Argument(help="Folder of a finished run.")]


def integers(option: str, text: str) -> tuple[int, ...]:
    """Whole numbers separated by commas."""
    try:
        return tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError:
        raise ConfigError(f"{option} takes whole numbers separated by commas; got {text!r}") from None
