"""The commands that call a hub: their arguments, and what a hub answers."""

from typing import Any

USAGE = {"channel": "ws", "tier": "light", "used": 0.5, "remaining": 1, "capacity": 2}
BUCKET = {**USAGE, "limit": "2/minute", "own": True}
CARD = {
    "agent_id": "a", "connected": True, "usage": USAGE, "violations": 1, "violations_last_hour": 1,
    "wait_left_ms": 1000, "exempt": False, "override": False,
}  # fmt: skip
OVERRIDE = {"agent_id": "a", "override": {"ws": {"light": "1/second"}}, "session_override": None}
VERDICT = {
    "agent_id": "a", "channel": "ws", "tier": "light", "outcome": "deny", "remaining": 0, "capacity": 2,
    "limit": "2/minute", "retry_after_ms": 500, "exempt": False, "violations": 1, "would_be": None, "degraded": False,
}  # fmt: skip
DENIED_ACTION = {"channel": "ws", "action": "ping", "tier": "light", "last_minute": 2, "last_hour": 3}
DETAIL = {
    **CARD, "rate_limited": True, "quiet_left_ms": 5000, "blocked": True, "denied_per_minute": 2, "role": "viewer",
    "registered": True, "revoked": False, "registered_at": 1.5, "blocked_until": 2.5, "blocked_reason": "loops",
    "buckets": [BUCKET],
    "override": {"ws": {"light": "1/second"}}, "session_limit": "1/second", "session_override": "1/second",
    "denied_actions": [DENIED_ACTION],
    "denials": [{"at": 1, "channel": "ws", "action": "ping", "tier": "", "address": "", "retry_after_ms": 5}],
    "connections": [{"kind": "ws", "address": "::1", "since": 1}], "sessions": 1, "tasks": {"held": "t", "created": 1},
    "account": "acme/search/a", "holds": [{"hold_id": "x", "state": "open"}],
    "account_limits": [
        {"account": "acme", "resource": "usd", "tool": "web", "limit": "9 usd in all", "held": "0", "left": "7.5",
         "used": 0.2},
    ],
}  # fmt: skip
ACCOUNT_ALERT = {
    "alert_id": "b",
    "account": "acme/search",
    "resource": "usd",
    "tool": "web",
    "share": 0.8,
    "limit": "500 usd/calendar month",
    "resets_at": 2,
    "raised_at": 1,
    "resolved_at": None,
    "times": 1,
}
ALERT = {
    "alert_id": "x", "agent_id": "a", "violations": 10, "within": 300, "raised_at": 1, "resolved_at": None, "times": 1,
    "total": 12, "actions": [DENIED_ACTION], "address": "::1",
}  # fmt: skip
TASK = {
    "task_id": "t", "creator": "", "state": "queued", "agent": "a", "attempt": 1, "progress": 0.5, "note": "n",
    "created_at": 1, "changed_at": 2,
}  # fmt: skip
CHANNEL = {"name": "news", "creator": "a", "about": "all", "created_at": 1, "subscribers": 2}
BLOCK = {"agent_id": "a", "blocked": True, "until": 1.5, "reason": "loops", "registered": True}
DEFAULTS = {"session": "unlimited", "overrides": {}, "session_overrides": {}, "defaults": {"ws": {"light": "1/second"}}}
TOKEN = {"agent_id": "a", "token": "hg_0123456789abcdef"}
VALUE = {
    "path": "limits.ws.light",
    "value": "1/second",
    "source": "change",
    "file_value": "2/second",
    "by": "a",
    "at": 1,
}
LIMIT = {
    "resource": "usd", "tool": "web", "limit": "9 usd in all", "source": "account", "amount": "9", "spent": "1.500000",
    "held": "0", "left": "7.5", "used": 0.2, "resets_after": None,
}  # fmt: skip
ACCOUNT = {"path": "acme", "level": "org", "plan": "pro", "agents": 1, "limits": [LIMIT, {**LIMIT, "resets_after": 9}]}
ACCOUNT_DETAIL = {**ACCOUNT, "accounts": ["acme/search"], "members": ["a"], "registered": None, "known": True}
ACCOUNT_LIMITS = {"usd": "1 usd in all", "tools": {"web": {"usd": "1 usd in all"}}}
ACCOUNT_DEFAULTS = {
    "levels": ["org"], "resources": ["usd"], "tools": ["web"], "zone": "UTC", "plans": {"pro": ACCOUNT_LIMITS},
    "level_limits": {"org": ACCOUNT_LIMITS},
}  # fmt: skip
HOLD = {
    "id": "x", "agent": "a", "account": "-/-/a", "session": "1", "tool": "", "state": "open", "costs": {"usd": "1.5"},
    "lease_left": 9.5,
}  # fmt: skip
TOTAL = {"group": {"month": "2026-11", "resource": "usd"}, "amount": "1.5"}
SIGNAL = '{"type": "t", "entity": "e", "weight": 1, "timestamp": 1}'
ANSWERS: dict[str, tuple[list[str], Any]] = {
    "agents": ([], {"agents": [CARD]}),
    "agents AGENT": (["a"], DETAIL),
    "alerts": ([], {"open": 1, "alerts": [ALERT], "account_alerts": [ACCOUNT_ALERT]}),
    "addresses": ([], {"addresses": [{"address": "::1", "purpose": "request", "denials": 1, "last_at": 1}]}),
    "block": (["a", "--for", "2h", "--reason", "loops", "--disconnect"], {"connections": 2, **BLOCK}),
    "unblock": (["a"], {**BLOCK, "agent_id": "a", "blocked": True}),
    "disconnect": (["a"], {"agent_id": "a", "connections": 2}),
    "register": (["a"], TOKEN),
    "rotate": (["a"], TOKEN),
    "invite": ([], {"invitation": "hgi_0123456789abcdef"}),
    "defaults": ([], DEFAULTS),
    "defaults list": ([], DEFAULTS),
    "defaults set": (["light=1/s"], DEFAULTS),
    "defaults reset": ([], DEFAULTS),
    "changes": ([], {"changes": [{"what": "w", "by": "a", "at": 1}]}),
    "tasks": ([], {"tasks": [TASK]}),
    "tasks list": ([], {"tasks": [TASK]}),
    "tasks push": (["{}"], {**TASK, "payload": {}, "outcome": None}),
    "channels": ([], {"more": False, "channels": [CHANNEL]}),
    "channels list": ([], {"more": False, "channels": [CHANNEL]}),
    "channels delete": (["news"], {"name": "news"}),
    "signals write": (["a", SIGNAL], {"number": 1}),
    "admins": ([], {"admins": [{"name": "a", "role": "admin", "kind": "agent", "by": "b", "at": 1}]}),
    "admins list": ([], {"admins": [{"name": "a", "role": "admin", "kind": "agent", "by": "b", "at": None}]}),
    "admins add": (["a", "--role", "admin"], {"name": "a", "role": "admin", "token": "hg_0123456789abcdef"}),
    "admins remove": (["a"], {"name": "a", "revoked": True}),
    "role set": (["a", "viewer"], {"agent_id": "a", "role": "viewer"}),
    "role remove": (["a"], {"agent_id": "a", "role": ""}),
    "log-level": (["error"], {"level": "error"}),
    "policy show": (["--effective"], {"file": "f", "overruled": ["limits.ws.light"], "values": [VALUE]}),
    "exempt set": (["a"], {"agents": ["a"], "unregistered": []}),
    "override set": (["a", "light=9/second"], OVERRIDE),
    "override remove": (["a"], OVERRIDE),
    "override": ([], {"overrides": {"a": {"ws": {"light": "1/second"}}}, "session_overrides": {"a": "1/second"}}),
    "override list": ([], {"overrides": {"a": {"ws": {"light": "1/second"}}}, "session_overrides": {"a": "1/second"}}),
    "accounts": ([], {"more": False, "accounts": [ACCOUNT]}),
    "accounts list": ([], {"more": False, "accounts": [ACCOUNT]}),
    "accounts show": (["acme"], ACCOUNT_DETAIL),
    "accounts set": (["acme", "usd=1 in all"], ACCOUNT_DETAIL),
    "accounts unset": (["acme", "usd"], ACCOUNT_DETAIL),
    "accounts plan": (["acme", "pro"], ACCOUNT_DETAIL),
    "accounts move": (["a", "acme"], {"agent_id": "a", "path": "acme/-/a", "account": "acme", "plan": "pro"}),
    "levels": ([], ACCOUNT_DEFAULTS),
    "levels list": ([], ACCOUNT_DEFAULTS),
    "levels set": (["team", "usd=1 in all"], ACCOUNT_DEFAULTS),
    "levels unset": (["team"], ACCOUNT_DEFAULTS),
    "plans": ([], ACCOUNT_DEFAULTS),
    "plans list": ([], ACCOUNT_DEFAULTS),
    "plans set": (["pro", "usd=1 in all"], ACCOUNT_DEFAULTS),
    "plans unset": (["pro"], ACCOUNT_DEFAULTS),
    "holds list": (["acme"], {"more": False, "holds": [HOLD]}),
    "holds cancel": (["a", "x"], {**HOLD, "state": "cancelled"}),
    "usage": (
        [],
        {"from": "2026-11-01", "to": "2026-11-30", "zone": "UTC", "by": ["month", "resource"], "totals": [TOTAL]},
    ),
    "exempt add": (["a"], {"agents": ["a"]}),
    "exempt remove": (["a"], {"agents": ["a"]}),
    "exempt": ([], {"agents": ["a"]}),
    "exempt list": ([], {"agents": ["a"]}),
    "violations": ([], {"agents": [CARD]}),
    "violations list": ([], {"agents": [CARD]}),
    "violations reset": (["a"], {"agent_id": "a", "reset": True}),
    "store": ([], {"store": "ok", "problems": ["none"]}),
    "store accept": (["--agent-data", "keep"], {"store": "ok", "problems": [], "accepted": True}),
    "check": (["a", "--tier", "light"], VERDICT),
    "reload": ([], {"reloaded": True, "waits_for_restart": ["hub.port"], "overruled": ["limits.ws.light"]}),
    "revoke": (["a"], {"agent_id": "a", "revoked": True}),
}
"""The arguments of each command that calls a hub, and what a hub answers. `top` needs a terminal.

One after the other, all of them work at a hub that has an agent `a`; so what takes away comes last. A word in capitals
is none of the command's, but tells two forms of it apart.
"""


def verdict(**different: Any) -> dict[str, Any]:
    """What a hub answers to a check of the tier light that leaves one token, with some differences."""
    ordinary = {
        "agent_id": "planner", "channel": "ws", "tier": "light", "outcome": "allow", "remaining": 1, "capacity": 2,
        "limit": "2/minute", "retry_after_ms": 0, "exempt": False, "violations": 0, "would_be": None,
        "degraded": False,
    }  # fmt: skip
    return ordinary | different
