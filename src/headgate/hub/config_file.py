"""The configuration file of a hub: a policy that can be reloaded, and a table `[hub]` that waits for a restart."""

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, Final

import structlog

from headgate.gate.policy import Policy, read_toml
from headgate.hub.settings import HubSettings, read_content

_log = structlog.get_logger("headgate.hub")


class ConfigFile:
    """The file at a path, or none. Settings that were `given` on the command line are not taken from it."""

    def __init__(self, path: Path | None, given: Mapping[str, str] | None = None) -> None:
        self.path: Final = path
        self._given: Final = given
        self._at_start: Final = None if path is None else self._settings(read_toml(path))

    def load(self) -> tuple[Policy, list[str]]:
        """The policy in the file, and what `check` says of it. A `PolicyError` lists the mistakes of either."""
        policy, settings = read_content(self._name, read_toml(self._name), self._given)
        return policy, self._changed(settings)

    def check(self, content: Mapping[str, Any]) -> list[str]:
        """The settings of the hub, such as `hub.port`, that a restart would change. They are logged.

        A wrong table `[hub]` is a `PolicyError`.
        """
        return self._changed(self._settings(content))

    def _changed(self, settings: HubSettings) -> list[str]:
        names = [one.name for one in fields(HubSettings)]
        changed = [f"hub.{name}" for name in names if getattr(settings, name) != getattr(self._at_start, name)]
        if changed:
            _log.warning("changed settings wait for a restart of the hub", settings=changed)
        return changed

    @property
    def _name(self) -> str:
        return str(self.path)

    def _settings(self, content: Mapping[str, Any]) -> HubSettings:
        return HubSettings.from_content(self._name, content, self._given)
