"""Alerts: a command or a webhook that is told when a trouble begins and when it has ended.

A hook that begins with http:// or https:// gets a POST with JSON, through the proxy that HTTPS_PROXY names; any other
one is a command, without a shell, that gets the JSON on its standard input:

    {"time": ..., "side": "node", "name": "hospital-a", "state": "begins", "level": "wrong", "check": "disk",
     "text": "/srv has 12 MB left", "advice": "free some room ..."}

What could not be told is tried again at the next look. Texts speak of programs, disks, keys and runs, never of rows.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime

from kinfed.deploy.operations.checks import OK, Condition
from kinfed.errors import ConfigError

SECONDS = 20.0  # that a hook may take


@dataclass
class Alerts:
    hook: str
    side: str
    name: str
    say: Callable[[str], None]
    _told: dict[tuple[str, str], Condition] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_hook(self.hook)

    def look(self, conditions: Iterable[Condition]) -> None:
        """Tell what has begun and what has ended since the last look."""
        # By check and by its first word, the name of what it is about: numbers in a text may change at every look.
        now = {(one.check, one.text.split()[0]): one for one in conditions if one.level != OK}
        for key in now.keys() - self._told.keys():
            if self._tell("begins", now[key]):
                self._told[key] = now[key]
        for key in self._told.keys() - now.keys():
            if self._tell("ended", self._told[key]):
                del self._told[key]

    def _tell(self, state: str, condition: Condition) -> bool:
        time = datetime.now(UTC).isoformat(timespec="seconds")
        about = {"time": time, "side": self.side, "name": self.name, "state": state, **asdict(condition)}
        try:
            run_hook(self.hook, json.dumps(about, ensure_ascii=False).encode())
        except (OSError, subprocess.SubprocessError) as error:
            self.say(f"alert: {self.hook.split('?')[0]} failed ({error}); it is tried again. {condition.text}")
            return False
        return True


def check_hook(hook: str) -> None:
    try:
        words = shlex.split(hook)
    except ValueError as error:
        raise ConfigError(f"--alert is a command, or an address; {hook!r} is no command: {error}") from None
    if not words:
        raise ConfigError("--alert is a command, or an address that begins with http:// or https://; got nothing")


def run_hook(hook: str, content: bytes) -> None:
    """Call the hook; OSError or SubprocessError if it fails."""
    if hook.startswith(("http://", "https://")):
        request = urllib.request.Request(hook, content, {"Content-Type": "application/json"}, method="POST")
        with urllib.request.urlopen(request, timeout=SECONDS):
            return
    subprocess.run(shlex.split(hook), input=content, timeout=SECONDS, check=True, stdout=subprocess.DEVNULL)
