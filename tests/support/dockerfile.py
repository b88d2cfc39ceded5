"""Reads a Dockerfile, to run its commands where there is no container engine."""

import json
import re
import shlex
from typing import NamedTuple


class Instruction(NamedTuple):
    """A line of a Dockerfile, and its number of the stage."""

    stage: int
    name: str
    text: str

    @property
    def command(self) -> list[str]:
        """The command of a CMD or HEALTHCHECK in JSON."""
        found: list[str] = json.loads(self.text[self.text.index("[") :])
        return found


def instructions(text: str) -> list[Instruction]:
    """The instructions of a Dockerfile."""
    lines = [line for line in text.splitlines(keepends=True) if not line.startswith("#")]
    found: list[Instruction] = []
    for line in re.sub(r"\\\n", "", "".join(lines)).splitlines():
        if line.strip():
            name, _, rest = line.partition(" ")
            stage = (found[-1].stage if found else -1) + (name == "FROM")
            found.append(Instruction(stage, name, rest.strip()))
    return found


def variables(found: list[Instruction], stage: int) -> dict[str, str]:
    """What the ENV instructions of a stage set."""
    texts = [one.text for one in found if one.name == "ENV" and one.stage == stage]
    return dict(part.split("=", 1) for text in texts for part in shlex.split(text))
