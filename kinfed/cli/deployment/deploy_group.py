"""The group `kinfed deploy`: its commands in the order of its help."""

from collections.abc import Callable

from kinfed.cli.deployment import ask_sites as asking
from kinfed.cli.deployment import site_keys as keys
from kinfed.cli.deployment import start_deployment as starting
from kinfed.cli.deployment import watch_deployment as watching
from kinfed.cli.parameters import CommandGroup, DeclaredCommand, SettingsCommand

deploy = CommandGroup(help="Real clients with Flower: an app folder, keys and certificates.", no_args_is_help=True)

command: Callable[..., None]
for command in (starting.init, keys.certs, keys.key, keys.enrol):
    deploy.command()(command)
deploy.command("members")(keys.members_)
for command in (keys.revoke, watching.messages):
    deploy.command()(command)
deploy.command(cls=SettingsCommand.taking(*starting.SETTINGS, texts=starting.TEXTS))(starting.up)
for command in (starting.server, starting.node, starting.kit, asking.forget):
    deploy.command()(command)
for command, panels, after in (
    (asking.describe, asking.describe_panels, "tables"), (asking.fit, asking.fit_panels, "tables"),
    (asking.evaluate, asking.evaluate_panels, "models"),
):  # fmt: skip
    declared = DeclaredCommand.of(panels, texts=asking.TEXTS, after=after, default_form=" ({}).")
    deploy.command(cls=declared)(command)
for command in (watching.status, watching.doctor):
    deploy.command()(command)
