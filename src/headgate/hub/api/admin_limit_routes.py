"""Admin routes: limits, and the agents that are exempt from them."""

import asyncio
from collections.abc import Mapping
from typing import Annotated, Any, Final

from msgspec import Meta, Struct, json

from headgate.errors import InvalidInput, refuse
from headgate.gate import Gate
from headgate.gate.changes import default, exemption, override, session_limit
from headgate.gate.policy import ChannelTier, check_agent
from headgate.hub.agents.registry import Registry
from headgate.hub.api.routing import Body, Call, admin_route
from headgate.hub.errors import RequestError
from headgate.hub.sockets.frames import AgentId
from headgate.limits.decision import Limit
from headgate.limits.notation import rate_limit_of

MOST_LIMITS: Final = 10
"""In one list."""
_LONGEST_LIMIT: Final = 200
_SESSION: Final = "session"  # beside the tiers

Limits = dict[str, dict[str, str]]
"""Limits as text, by channel and tier."""

LimitText = Annotated[str, Meta(min_length=1, max_length=_LONGEST_LIMIT, examples=["60/minute", "60/minute burst 10"])]
LimitTexts = LimitText | Annotated[list[LimitText], Meta(min_length=1, max_length=MOST_LIMITS)]
"""A limit, or several that apply together."""
NewLimits = Annotated[
    dict[str, Any],  # `_given` reads it: the texts of msgspec don't name the tier
    Meta(
        description="limits by tier, for every channel, or below the name of a channel, for that one; below "
        "`session`, the limit of each session",
        extra_json_schema={"additionalProperties": json.schema(LimitTexts | dict[str, LimitTexts])},
    ),
]


class RateLimits(Struct):
    defaults: Limits
    overrides: dict[str, Limits]
    session: str
    """The limit of every session of an agent without one of its own."""
    session_overrides: dict[str, str]


class AgentLimits(Struct):
    agent_id: str
    limits: Limits
    """The limits in effect for the agent."""
    override: Limits
    """The limits that are its own."""
    session: str
    """The limit in effect for each of its sessions."""
    session_override: str | None
    """The same, if it is its own."""
    exempt: bool
    registered: bool
    """Whether there is an agent of this name."""


class ExemptAgents(Struct):
    agents: list[str]


class ChangedExemptAgents(ExemptAgents):
    unregistered: list[str]
    """Names that were given, and that no agent has."""


class NewExemptAgents(Body):
    agents: Annotated[list[AgentId], Meta(max_length=1000)]


class NewExemption(Body):
    agent_id: AgentId


# Limits ---------------------------------------------------------------------------------------------------------------


async def _rate_limits(_call: Call, gate: Gate) -> RateLimits:
    effective = gate.effective
    overrides = {agent: by_channel(limits) for agent, limits in sorted(effective.overrides.items())}
    sessions = {agent: str(limit) for agent, limit in sorted(effective.session_overrides.items())}
    return RateLimits(by_channel(effective.limits), overrides, str(effective.session_limit), sessions)


async def _set_defaults(call: Call, gate: Gate) -> RateLimits:
    edits = [
        session_limit(limit) if tier == _SESSION else default(tier, limit, channel)
        for channel, tier, limit in _given(call, gate)
    ]
    await gate.achange(edits, by=call.by)
    return await _rate_limits(call, gate)


async def _remove_defaults(call: Call, gate: Gate) -> RateLimits:
    tier = call.parts.get("tier")
    if tier not in (None, _SESSION, *gate.policy.tiers):
        refuse("tier", f"one of {', '.join([*gate.policy.tiers, _SESSION])}", tier)
    await gate.aremove_default(tier, by=call.by)
    return await _rate_limits(call, gate)


async def _set_override(call: Call, gate: Gate, registry: Registry) -> AgentLimits:
    agent = call.parts["agent"]
    registered = await registry.find(agent) is not None  # first: a store that is away must not fail a change half-way
    edits = [
        session_limit(limit, agent) if tier == _SESSION else override(agent, tier, limit, channel)
        for channel, tier, limit in _given(call, gate)
    ]
    await gate.achange(edits, by=call.by)
    return _limits_of(gate, agent, registered)


async def _remove_override(call: Call, gate: Gate, registry: Registry) -> AgentLimits:
    agent = call.parts["agent"]
    registered = await registry.find(agent) is not None
    if agent in gate.effective.overrides or agent in gate.effective.session_overrides:
        await gate.aremove_override(agent, by=call.by)
    return _limits_of(gate, agent, registered)


def _given(call: Call, gate: Gate) -> list[tuple[str | None, str, Limit]]:
    """The limits in a body, as channel (None: every channel), tier and limit: all of them, or an error."""
    channels, tiers = gate.policy.channels, gate.policy.tiers
    found: list[tuple[str | None, str, Limit]] = []
    for name, value in call.body.items():
        if name in (*tiers, _SESSION):
            found.append((None, name, _limit(name, value)))
        elif name not in channels:
            refuse("body", f"one of {', '.join([*tiers, *channels, _SESSION])}", name)
        elif not isinstance(value, dict):
            refuse(name, 'an object with limits by tier, such as {"light": "60/minute"}', value)
        else:
            for tier, text in value.items():
                if tier not in tiers:
                    refuse(name, f"one of {', '.join(tiers)}", tier)
                found.append((name, tier, _limit(f"{name}.{tier}", text)))
    if not found:
        raise RequestError(400, "invalid", f"body: expected limits for some of {', '.join(tiers)}, got none")
    return sorted(found, key=lambda one: one[0] is not None)  # those below a channel come last, and prevail there


def _limit(place: str, given: Any) -> Limit:
    example = f"{given}/minute" if type(given) is int and given > 0 else "60/minute"
    limit_texts(place, given, f"a limit such as '{example}', or a list of 1 to {MOST_LIMITS}")
    try:
        return rate_limit_of("limit", given)
    except InvalidInput as error:
        raise InvalidInput(f"{place}: {error}") from None


def limit_texts(where: str, given: Any, expected: str) -> list[str]:
    """The texts of a limit in a body, each of a length that can be read quickly."""
    texts = given if isinstance(given, list) else [given]
    if not 1 <= len(texts) <= MOST_LIMITS or not all([isinstance(text, str) for text in texts]):
        refuse(where, expected, given)
    if any([len(text) > _LONGEST_LIMIT for text in texts]):
        refuse(where, f"at most {_LONGEST_LIMIT} characters for a limit", given)
    return texts


def by_channel(limits: Mapping[ChannelTier, Limit]) -> Limits:
    """Limits as text."""
    found: Limits = {}
    for (channel, tier), limit in limits.items():
        found.setdefault(channel, {})[tier] = str(limit)
    return found


def _limits_of(gate: Gate, agent: str, registered: bool) -> AgentLimits:
    effective = gate.effective
    own = effective.session_overrides.get(agent)
    return AgentLimits(
        agent_id=agent,
        limits=by_channel(effective.limits_of(agent)),
        override=by_channel(effective.overrides.get(agent, {})),
        session=str(effective.session_limit_of(agent)),
        session_override=None if own is None else str(own),
        exempt=effective.is_exempt(agent),
        registered=registered,
    )


# Exempt agents: "whitelist" in the paths ------------------------------------------------------------------------------


async def _exempt(_call: Call, gate: Gate) -> ExemptAgents:
    return ExemptAgents(sorted(gate.effective.exempt))


async def _replace_exempt(call: Call, gate: Gate, registry: Registry) -> ChangedExemptAgents:
    wanted = {check_agent(agent) for agent in call.body.agents}
    names = sorted(wanted)
    found = await asyncio.gather(*map(registry.find, names))
    unregistered = [name for name, record in zip(names, found, strict=True) if record is None]
    different = sorted(wanted ^ gate.effective.exempt)
    await gate.achange([exemption(agent, agent in wanted) for agent in different], by=call.by)
    return ChangedExemptAgents(sorted(gate.effective.exempt), unregistered)


async def _add_exempt(call: Call, gate: Gate, registry: Registry) -> ChangedExemptAgents:
    agent = check_agent(call.body.agent_id)
    unregistered = [] if await registry.find(agent) else [agent]
    if not gate.is_exempt(agent):
        await gate.aadd_exemption(agent, by=call.by)
    return ChangedExemptAgents(sorted(gate.effective.exempt), unregistered)


async def _remove_exempt(call: Call, gate: Gate) -> ExemptAgents:
    if gate.is_exempt(call.parts["agent"]):
        await gate.aremove_exemption(call.parts["agent"], by=call.by)
    return await _exempt(call, gate)


_LIMITS: Final = "/api/admin/rate-limits"
ROUTES: Final = (
    admin_route("GET", _LIMITS, _rate_limits, "all defaults and overrides"),
    admin_route("PUT", f"{_LIMITS}/defaults", _set_defaults, "change the defaults", body=NewLimits),
    admin_route("DELETE", f"{_LIMITS}/defaults", _remove_defaults, "put the defaults back to those of the policy"),
    admin_route(
        "DELETE", f"{_LIMITS}/defaults/{{tier}}", _remove_defaults,
        "put the default of a tier, or of sessions, back to that of the policy",
    ),
    admin_route("PUT", f"{_LIMITS}/{{agent}}", _set_override, "give an agent limits of its own", body=NewLimits),
    admin_route("DELETE", f"{_LIMITS}/{{agent}}", _remove_override, "put an agent back to the defaults"),
    admin_route("GET", f"{_LIMITS}/whitelist", _exempt, "the exempt agents"),
    admin_route(
        "PUT", f"{_LIMITS}/whitelist", _replace_exempt,
        "replace the list of exempt agents", body=NewExemptAgents,
    ),
    admin_route("POST", f"{_LIMITS}/whitelist", _add_exempt, "exempt an agent", body=NewExemption),
    admin_route("DELETE", f"{_LIMITS}/whitelist/{{agent}}", _remove_exempt, "hold an agent to its limits again"),
)  # fmt: skip
