"""A good request for every route of the hub, made from its table of routes, and all that a hub remembers."""

from dataclasses import dataclass
from itertools import count
from typing import Any
from urllib.parse import quote

from msgspec import Raw

from headgate.hub.api.routing import Route
from headgate.hub.app import Hub
from headgate.hub.sockets.frames import Signal

SIGNAL = {"type": "seen", "entity": "door", "weight": 1.5, "timestamp": 1000.0}
_numbers = count(1)


@dataclass(frozen=True)
class Scene:
    """Who asks, about whom, and things of the former. No two scenes have anything in common."""

    agent: str
    token: str
    other: str
    operator: str
    newcomer: str
    own_channel: str
    channel: str
    task: str
    mail: int

    def parts(self) -> dict[str, str]:
        """What stands in the named places of paths. The policy has a plan `pro`."""
        return {
            "agent": self.other,
            "name": self.own_channel,
            "id": self.task,
            "session": "42",
            "key": "a key",
            "tier": "heavy",
            "path": f"-/-/{self.agent}",
            "account": f"-/-/{self.other}",
            "level": "team",
            "plan": "pro",
        }

    def bodies(self) -> dict[tuple[str, str], Any]:
        """The bodies of the routes that have one."""
        limits = "/api/admin/rate-limits"
        return {
            ("POST", "/api/onboard/register"): {"agent_id": self.newcomer},
            ("POST", "/api/messages"): {"to": self.other, "body": {"text": "hello"}},
            ("POST", "/api/mailbox/ack"): {"numbers": [self.mail]},
            ("POST", "/api/channels"): {"name": self.channel, "about": "a new one"},
            ("POST", "/api/channels/{name}/publish"): {"body": ["news"]},
            ("POST", "/api/tasks"): {"payload": {"do": "it"}},
            ("POST", "/api/admin/tasks"): {"payload": None},
            ("PUT", f"{limits}/defaults"): {"light": f"{130 + self.mail}/minute"},
            ("PUT", f"{limits}/{{agent}}"): {"normal": "70/minute", "ws": {"heavy": "3/minute"}},
            ("PUT", f"{limits}/whitelist"): {"agents": [self.other]},
            ("POST", f"{limits}/whitelist"): {"agent_id": self.other},
            ("POST", "/api/admin/agents"): {"agent_id": self.newcomer},
            ("POST", "/api/admin/check"): {"agent_id": self.other, "channel": "ws", "tier": "light"},
            ("POST", "/api/admin/signals"): {"agent_id": self.other, "session": 42, "signal": SIGNAL},
            ("POST", "/api/admin/store/accept"): {"agent_data": "keep"},
            ("PUT", "/api/admin/log-level"): {"level": "info"},
            ("PUT", "/api/admin/agents/{agent}/block"): {"reason": "it loops"},
            ("POST", "/api/admin/admins"): {"name": self.newcomer, "role": "viewer"},
            ("PUT", "/api/admin/agents/{agent}/role"): {"role": "viewer"},
            ("PUT", "/api/admin/accounts/{account}"): {"usd": "5/calendar day", "tokens": None, "plan": None},
            ("PUT", "/api/admin/account-defaults/levels/{level}"): {"usd": f"{self.mail + 1}/calendar day"},
            ("PUT", "/api/admin/account-defaults/plans/{plan}"): {"usd": f"{self.mail + 1}/calendar day"},
            ("PUT", "/api/admin/agents/{agent}/account"): {"account": "acme/search"},
            ("POST", "/api/admin/invitations"): {"account": "acme/search"},
            ("POST", "/v1/check"): {"key": "a key"},
            ("POST", "/v1/holds"): {"costs": {"tokens": 12, "usd": "0.03"}, "session": "42", "agent": self.agent},
            ("POST", "/v1/holds/{id}/settle"): {"costs": {"tokens": 7}},
            ("POST", "/v1/holds/{id}/extend"): {"total": {"tokens": 20}, "lease": 90},
        }

    def request(self, route: Route) -> tuple[str, Any]:
        """The path and body of a good request, for whoever may make it."""
        parts = self.parts() | ({"agent": self.operator} if "/admins/" in route.path else {})
        path = route.path.format(**{name: quote(value, safe="") for name, value in parts.items()})
        if route.path.startswith("/v1/holds/"):
            path += f"?agent={quote(self.agent, safe='')}"  # an admin has to name it
        bodies = self.bodies()
        assert ((route.method, route.path) in bodies) == (route.body is not None), "a new route? give it a body here"
        return path, bodies.get((route.method, route.path))


async def build_scene(hub: Hub) -> Scene:
    """Agents who have something in the hub, one of them with a violation."""
    number = next(_numbers)
    agent, other, operator = f"asker {number}", f"other {number}", f"operator {number}"
    token = await hub.registry.register(agent, by_admin=True)
    await hub.registry.register(other, by_admin=True)
    await hub.registry.register(operator, by_admin=True)
    await hub.gate.aset_role(operator, "viewer")
    plans = (await hub.messages.create_chat_channel(f"plans-{number}", agent, "")).name
    await hub.messages.publish(plans, agent, Raw(b'"first"'))
    await hub.messages.send(other, agent, Raw(b'"hello"'))
    (mail,) = await hub.messages.mail(agent, 1)
    await hub.sessions.open(agent, "42", None, None)
    await hub.sessions.write(agent, "42", Signal(type="seen", entity="door", weight=1, timestamp=0))
    task = await hub.scheduler.add(agent, b'{"do":"it"}')
    await hub.gate.arecord_violation(other)
    await hub.gate.ahold(agent, {"tokens": 10}, hold_id=task.task_id)
    names = agent, token, other, operator, f"newcomer {number}"
    return Scene(*names, plans, f"channel-{number}", task.task_id, mail.number)


async def stored_state(hub: Hub, where: Scene) -> dict[str, Any]:
    """All that a hub keeps in its database, what holds at its gate and why, and how the agents of a scene stand."""
    tables = "SELECT name FROM sqlite_master WHERE type = 'table'"
    found: dict[str, Any] = await hub.database.run(
        lambda db: {table: db.execute(f"SELECT * FROM {table}").fetchall() for (table,) in db.execute(tables)}
    )
    assert {"agents", "invitations", "mail", "channels", "posts", "tasks", "sessions", "signals"} <= set(found)
    holds = hub.gate.effective
    standings = [await hub.gate.astanding(agent) for agent in (where.agent, where.other)]
    return {
        **found,
        "history": hub.gate.history(),
        "policy": id(hub.gate.policy),
        "holds": (dict(holds.limits), dict(holds.overrides), holds.exempt, dict(holds.blocks), dict(holds.roles)),
        "violations": [standing.violations for standing in standings],
        "open sessions": hub.sessions.open_sessions,
        "accounts": [hub.gate.path_of(agent) for agent in (where.agent, where.other, where.newcomer)],
        "open holds": await hub.gate.alist_holds(f"-/-/{where.agent}"),
    }
