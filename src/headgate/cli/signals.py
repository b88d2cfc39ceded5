"""`headgate signals`: signals of the application."""

import argparse
import json

from headgate.cli.answers import whole
from headgate.cli.hub_commands import add_hub_command, print_answer
from headgate.cli.hub_options import agent_name, hub_from
from headgate.cli.parser import Commands, add_group, json_text
from headgate.errors import printable


def add(commands: Commands) -> None:
    verbs = add_group(commands, "signals", "write signals about agents")
    verb = add_hub_command(
        verbs,
        "write",
        _write,
        "write a signal about an agent",
        "Write a signal of the application about an agent, outside its sessions or into one. It is not limited.",
        """headgate signals write planner '{"type": "seen", "entity": "page", "weight": 1, "timestamp": 1764583200}'""",
        agent=agent_name,
    )
    verb.add_argument("signal", type=json_text, metavar="JSON", help="signal: type, entity, weight, timestamp")
    verb.add_argument("--session", metavar="SESSION", help="session of the agent (default: outside its sessions)")


def _write(options: argparse.Namespace) -> int:
    hub = hub_from(options)
    answer = hub.write_signal(options.agent, json.loads(options.signal), options.session)
    text = "signal {} of {} is written"
    return print_answer(options, hub, answer, lambda: text.format(whole(answer["number"]), printable(options.agent)))
