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
        at_start = (Policy(), HubSettings()) if path is None else read_content(str(path), read_toml(path), given)
        self.policy, self._at_start = at_start  # both from the same content

    def load(self) -> tuple[Policy, list[str]]:
        """The policy in the file, and the settings of the hub, such as `hub.port`, that a restart would change.

        They are logged. A `PolicyError` lists the mistakes in the policy and in the table `[hub]`.
        """
        return self._read(str(self.path), read_toml(str(self.path)))

    def read(self, source: str, content: Mapping[str, Any]) -> Policy:
        """The same policy, from the content of the file."""
        return self._read(source, content)[0]

    def _read(self, source: str, content: Mapping[str, Any]) -> tuple[Policy, list[str]]:
        policy, settings = read_content(source, content, self._given)
        names = [one.name for one in fields(HubSettings)]
        changed = [f"hub.{name}" for name in names if getattr(settings, name) != getattr(self._at_start, name)]
        if changed:
            _log.warning("changed settings wait for a restart of the hub", settings=changed)
        return policy, changed
