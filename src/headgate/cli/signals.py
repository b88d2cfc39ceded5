"""`headgate signals`: signals of the application."""

import json

from headgate.cli.answers import whole
from headgate.cli.hub_commands import add_change_command, note_unregistered
from headgate.cli.hub_options import agent_name
from headgate.cli.parser import Commands, add_group, json_text
from headgate.errors import printable


def add(commands: Commands) -> None:
    verbs = add_group(commands, "signals", "write signals about agents")
    verb = add_change_command(
        verbs,
        "write",
        lambda hub, options: hub.write_signal(options.agent, json.loads(options.signal), options.session),
        lambda options, answer: f"signal {whole(answer['number'])} of {printable(options.agent)} is written",
        "write a signal about an agent",
        "Write a signal of the application about an agent, outside its sessions or into one. It is not limited.",
        """headgate signals write planner '{"type": "seen", "entity": "page", "weight": 1, "timestamp": 1764583200}'""",
        agent=agent_name,
        note=lambda hub, options, _: note_unregistered(hub, options.agent),
    )
    verb.add_argument("signal", type=json_text, metavar="JSON", help="signal: type, entity, weight, timestamp")
    verb.add_argument("--session", metavar="SESSION", help="session of the agent (default: outside its sessions)")
