"""What a check looks up: every limit of a policy with its changes, and where it is counted."""

import logging
from collections.abc import Mapping
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Final

from headgate._native import i64
from headgate.errors import refuse
from headgate.gate.changes import Effective
from headgate.gate.policy import TIERS, UNKNOWN_TIER, Policy, check_agent
from headgate.limits.decision import Limit
from headgate.limits.numbers import permille
from headgate.stores.base import Store
from headgate.stores.memory import in_process

AGENTS: Final = "agents"
ADDRESSES: Final = "addresses"
_LOGGED: Final = 1000  # names of unknown actions that are logged at the most

_log = logging.getLogger("headgate")


class Meter:
    """One limit at work: where it is counted, and whether it is only watched."""

    def __init__(self, store: Store, channel: str, tier: str, kind: str, limit: Limit, shadow: bool) -> None:
        self.channel: Final = channel
        self.tier: Final = tier
        self.name: Final = f"{channel}:{tier}:{kind}"
        self.limit: Final = limit
        self.identity: Final = (self.name, limit)
        self.shadow: Final = shadow
        memory = in_process(store)
        self.buckets: Final = None if memory is None else memory.limit_table(self.name, limit)


class Lookup:
    """Everything that a check looks up. It is replaced as a whole, so that each check sees one state of affairs."""

    def __init__(self, policy: Policy, effective: Effective, store: Store, unknown: set[tuple[str, str]]) -> None:
        self.unknown: Final = unknown  # the actions that were logged; it outlives the plan
        self.policy: Final = policy
        self.effective: Final = effective
        self.exempt: Final = effective.exempt
        self.any_exempt: Final = bool(effective.exempt)
        self.meters: Final[dict[str, dict[str, Meter]]] = {channel: {} for channel in policy.channels}
        for lane, limit in effective.limits.items():
            self.meters[lane[0]][lane[1]] = self._meter(store, lane, self._default(lane), limit, "")
        self.by_action: Final[dict[str, dict[str, Meter]]] = {channel: {} for channel in policy.channels}
        for (channel, action), tier in policy.actions.items():
            self.by_action[channel][action] = self.meters[channel][tier]
        self.own: Final = {
            agent: self._own_meters(store, agent) for agent in {*effective.overrides, *policy.shadow_agents}
        }
        self.addresses: Final = {
            "request": Meter(store, "address", "request", "default", policy.address_limit, policy.shadow),
            "registration": Meter(
                store, "address", "registration", "default", policy.registration_limit, policy.shadow
            ),
        }
        self.low: Final[i64] = 1000 - permille("warn_at", policy.warn_at)
        self.backoff: Final = policy.backoff
        memory = in_process(store)
        self.offenders: Final = None if memory is None else memory.violation_table(AGENTS, policy.backoff)

    def _default(self, lane: tuple[str, str]) -> str:
        turn = self.effective.turns.get(lane, 0)
        return f"default.{turn}" if turn else "default"

    def _meter(self, store: Store, lane: tuple[str, str], kind: str, limit: Limit, agent: str) -> Meter:
        policy, (channel, tier) = self.policy, lane
        shadow = policy.shadow or tier in policy.shadow_tiers or agent in policy.shadow_agents
        meter = Meter(store, channel, tier, kind, limit, shadow)
        if meter.buckets is not None:
            meter.buckets.validate = check_agent
        return meter

    def _own_meters(self, store: Store, agent: str) -> dict[str, dict[str, Meter]]:
        """Everybody's meters, save where an agent has its own or is watched."""
        meters = {channel: dict(of_channel) for channel, of_channel in self.meters.items()}
        overrides: Mapping[tuple[str, str], Limit] = self.effective.overrides.get(agent, {})
        lanes = self.effective.limits if agent in self.policy.shadow_agents else overrides
        for lane in lanes:
            own = overrides.get(lane)
            kind, limit = (self._default(lane), self.effective.limits[lane]) if own is None else ("own", own)
            meters[lane[0]][lane[1]] = self._meter(store, lane, kind, limit, agent)
        return meters

    def meter(self, agent: str, channel: object, tier: object, action: object) -> Meter:
        """The meter that an agent's check runs under: of a tier, or of an action, classified."""
        of_channel = self.by_action.get(channel) if isinstance(channel, str) else None
        if of_channel is None:
            refuse("channel", f"one of {', '.join(self.policy.channels)}", channel)
        if tier is None:
            meter = of_channel.get(action) if isinstance(action, str) else None
            if meter is None:
                meter = self._unclassified(str(channel), action)
        elif action is not None:
            refuse("check", "a tier or an action, not both", (tier, action))
        else:
            found = self.meters[str(channel)].get(tier) if isinstance(tier, str) else None
            if found is None:
                refuse("tier", f"one of {', '.join(TIERS)}", tier)
            meter = found
        if self.own:
            own = self.own.get(agent)
            if own is not None:
                return own[meter.channel][meter.tier]
        return meter

    def _unclassified(self, channel: str, action: object) -> Meter:
        if not isinstance(action, str):
            refuse("check", "a tier or an action", action)
        if len(self.unknown) < _LOGGED and (channel, action) not in self.unknown:
            self.unknown.add((channel, action))
            _log.warning("unknown action %.100r on channel %s: taken as %s", action, channel, UNKNOWN_TIER)
        return self.meters[channel][UNKNOWN_TIER]

    def meters_of(self, agent: str) -> list[Meter]:
        """The meters that hold for an agent."""
        meters = self.own.get(agent, self.meters)
        return [meter for of_channel in meters.values() for meter in of_channel.values()]


def address_key(plan: Lookup, address: object) -> str | None:
    """The key that an address counts under, or None if it is exempt."""
    found = _address(address)
    for network in plan.policy.exempt_addresses:
        if found in network:
            return None
    return _counted_as(found)


def counted_as(address: str) -> str:
    """What an address counts as: an IPv6 address as its /64."""
    return _counted_as(_address(address))


def _address(address: object) -> IPv4Address | IPv6Address:
    try:
        found = ip_address(address) if isinstance(address, str) else None
    except ValueError:
        found = None
    if found is None:
        refuse("address", "an IP address", address)
    if isinstance(found, IPv6Address) and found.ipv4_mapped is not None:
        return found.ipv4_mapped
    return found


def _counted_as(found: IPv4Address | IPv6Address) -> str:
    return f"{IPv6Address(int(found) >> 64 << 64)}/64" if isinstance(found, IPv6Address) else str(found)


def address_meter(plan: Lookup, purpose: object) -> Meter:
    meter = plan.addresses.get(purpose) if isinstance(purpose, str) else None
    if meter is None:
        refuse("purpose", "one of request, registration", purpose)
    return meter
