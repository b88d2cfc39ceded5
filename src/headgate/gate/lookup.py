"""The lookup of a check: every limit in effect, by channel, tier, action, agent and address."""

import logging
from collections.abc import Sequence
from ipaddress import IPv4Address, IPv6Address, ip_address
from math import inf
from typing import Final

from headgate._native import i64
from headgate.errors import refuse
from headgate.gate.effective import Effective, apply_edits
from headgate.gate.immutable_map import ImmutableMap
from headgate.gate.policy import UNKNOWN_TIER, Policy, check_agent
from headgate.limits.decision import Limit
from headgate.limits.fixed import BLOCKED, UNLIMITED
from headgate.limits.numbers import permille
from headgate.stores.base import Block, Edit, Store
from headgate.stores.memory import MemoryStore, in_process
from headgate.stores.memory_tables import LimitTable, ViolationTable

AGENTS: Final = "agents"
ADDRESSES: Final = "addresses"
_LOGGED: Final = 1000  # names of unknown actions that are logged at most

_log = logging.getLogger("headgate")


class ActiveLimit:
    """A limit in effect, with everything that the check of a key under it needs."""

    def __init__(
        self, lookup: "Lookup", group: str, channel: str, tier: str, kind: str, limit: Limit, shadow: bool, index: i64
    ) -> None:
        self.group: Final = group  # AGENTS or ADDRESSES: the name that violations are recorded under
        self.channel: Final = channel
        self.tier: Final = tier  # for an address, the purpose
        self.index: Final[i64] = index  # of the channel and tier
        self.name: Final = f"{channel}:{tier}:{kind}"
        self.limit: Final = limit
        self.exempt: Final = kind == "exempt"
        self.shadow: Final = shadow
        self.low: Final[i64] = lookup.low
        self.backoff: Final = lookup.backoff
        buckets: LimitTable | None = None
        if lookup.memory is not None and group == AGENTS and kind != "exempt":
            buckets = lookup.memory.limit_table(self.name, limit)
            buckets.validate = check_agent
        self.buckets: Final[LimitTable | None] = buckets
        self.offenders: Final[ViolationTable | None] = None if shadow else lookup.offenders


class OwnLimits:
    """The limits of an agent that differ from the defaults."""

    def __init__(self, blocked_until: float, exempt: bool, shadow: bool, limits: list[ActiveLimit | None]) -> None:
        self.blocked_until: Final = blocked_until  # seconds since 1970; 0.0 without a block
        self.exempt: Final = exempt
        self.shadow: Final = shadow
        self.limits: Final = limits  # by index; None for the default


class Lookup:
    """Everything that a check looks up. It is replaced as a whole, so that each check sees one state.

    With `edits`, it is the lookup `before` with these edits made, and shares with it what they leave alone.
    """

    def __init__(
        self,
        policy: Policy,
        effective: Effective,
        store: Store,
        before: "Lookup | None" = None,
        edits: Sequence[Edit] | None = None,
    ) -> None:
        if edits is not None:
            effective = apply_edits(effective, policy, edits)
        self.policy: Final = policy
        self.effective: Final = effective
        self.clock: Final = store.clock
        self.memory: Final[MemoryStore | None] = in_process(store)
        self.low: Final[i64] = 1000 - permille("warn_at", policy.warn_at)
        self.backoff: Final = policy.backoff
        self.offenders: Final[ViolationTable | None] = (
            None if self.memory is None else self.memory.violation_table(AGENTS, policy.backoff)
        )
        self.unknown: Final[set[tuple[str, str]]] = set() if before is None else before.unknown  # actions, once logged
        self.defaults: Final[dict[str, dict[str, ActiveLimit]]] = {channel: {} for channel in policy.channels}
        self.exempt: Final[list[ActiveLimit]] = []  # by index, for exempt agents
        self.blocked: Final[list[ActiveLimit]] = []  # by index, for blocked agents: in shadow mode, too
        self.shadowed: Final[list[ActiveLimit]] = []  # the defaults by index, for agents in shadow mode
        for (channel, tier), limit in effective.limits.items():
            self._add_default(channel, tier, limit)
        self.by_action: Final[dict[str, dict[str, ActiveLimit]]] = {channel: {} for channel in policy.channels}
        for (channel, action), tier in policy.actions.items():
            self.by_action[channel][action] = self.defaults[channel][tier]
        own: ImmutableMap[OwnLimits] = ImmutableMap()
        if before is None or edits is None:
            changed = {*[agent for agent, _ in effective.agents.items()], *policy.shadow_agents}
        else:
            own, changed = before.own, {edit.agent for edit in edits if edit.agent}
        self.changed: Final[set[str]] = changed  # the agents that are not shared with the lookup before
        self.own: Final[ImmutableMap[OwnLimits]] = own.update({agent: self._own_limits(agent) for agent in changed})
        self.any_own: Final = len(self.own) > 0
        self.addresses: Final = {
            purpose: ActiveLimit(self, ADDRESSES, "address", purpose, "default", limit, policy.shadow, 0)
            for purpose, limit in policy.address_limits.items()
        }
        self.exempt_address: Final = ActiveLimit(self, ADDRESSES, "address", "", "exempt", UNLIMITED, False, 0)

    def _add_default(self, channel: str, tier: str, limit: Limit) -> None:
        policy, index = self.policy, len(self.exempt)
        shadow = policy.shadow or tier in policy.shadow_tiers
        generation = self.effective.generations.get((channel, tier), 0)
        kind = f"default.{generation}" if generation else "default"
        self.defaults[channel][tier] = ActiveLimit(self, AGENTS, channel, tier, kind, limit, shadow, index)
        self.shadowed.append(ActiveLimit(self, AGENTS, channel, tier, kind, limit, True, index))
        self.exempt.append(ActiveLimit(self, AGENTS, channel, tier, "exempt", UNLIMITED, False, index))
        self.blocked.append(ActiveLimit(self, AGENTS, channel, tier, "blocked", BLOCKED, False, index))

    def _own_limits(self, agent: str) -> OwnLimits | None:
        policy, rules = self.policy, self.effective.agents.get(agent)
        shadow = agent in policy.shadow_agents
        limits: list[ActiveLimit | None] = [None] * len(self.exempt)
        if rules is None:
            return OwnLimits(0.0, False, True, limits) if shadow else None
        for (channel, tier), limit in rules.overrides.items():
            in_shadow = shadow or policy.shadow or tier in policy.shadow_tiers
            index = self.defaults[channel][tier].index
            limits[index] = ActiveLimit(self, AGENTS, channel, tier, "own", limit, in_shadow, index)
        until = 0.0 if rules.block is None else inf if rules.block.until is None else rules.block.until
        if not rules.overrides and not rules.exempt and not until and not shadow:
            return None
        return OwnLimits(until, rules.exempt, shadow, limits)

    def find(self, agent: str, channel: object, tier: object, action: object) -> ActiveLimit:
        """The limit that an agent is checked against: that of a tier, or of an action, which is classified."""
        of_channel = self.by_action.get(channel) if isinstance(channel, str) else None
        if of_channel is None:
            refuse("channel", f"one of {', '.join(self.policy.channels)}", channel)
        if tier is None:
            active = of_channel.get(action) if isinstance(action, str) else None
            if active is None:
                active = self._unclassified(str(channel), action)
        elif action is not None:
            refuse("check", "a tier or an action, not both", (tier, action))
        else:
            found = self.defaults[str(channel)].get(tier) if isinstance(tier, str) else None
            if found is None:
                refuse("tier", f"one of {', '.join(self.policy.tiers)}", tier)
            active = found
        if self.any_own:
            own = self.own.get(agent)
            if own is not None:
                if own.blocked_until > 0.0 and own.blocked_until > self.clock.wall():
                    return self.blocked[active.index]
                return self.exempt[active.index] if own.exempt else self._of_agent(own, active)
        return active

    def find_counted(self, agent: str, channel: object, tier: object) -> ActiveLimit:
        """The limit that an agent's costs are counted under: the one that is found, with blocks left aside."""
        active = self.find("", channel, tier, None)
        own = self.own.get(agent)
        if own is None:
            return active
        return self.exempt[active.index] if own.exempt else self._of_agent(own, active)

    def block_of(self, agent: str) -> Block | None:
        """The block of an agent, unless it has ended."""
        rules = self.effective.agents.get(agent)
        block = None if rules is None else rules.block
        if block is None or (block.until is not None and block.until <= self.clock.wall()):
            return None
        return block

    def _of_agent(self, own: OwnLimits, default: ActiveLimit) -> ActiveLimit:
        active = own.limits[default.index]
        if active is not None:
            return active
        return self.shadowed[default.index] if own.shadow else default

    def _unclassified(self, channel: str, action: object) -> ActiveLimit:
        if not isinstance(action, str):
            refuse("check", "a tier or an action", action)
        if len(self.unknown) < _LOGGED and (channel, action) not in self.unknown:
            self.unknown.add((channel, action))
            _log.warning("unknown action %.100r on channel %s: taken as %s", action, channel, UNKNOWN_TIER)
        return self.defaults[channel][UNKNOWN_TIER]

    def find_address(self, address: object, purpose: object) -> tuple[ActiveLimit, str]:
        """The limit that an address is checked against, and the key that it is counted under."""
        found = parse_address(address)
        active = self.addresses.get(purpose) if isinstance(purpose, str) else None
        if active is None:
            refuse("purpose", f"one of {', '.join(self.addresses)}", purpose)
        for network in self.policy.exempt_addresses:
            if found in network:
                active = self.exempt_address
        return active, _counted_as(found)

    def limits_of(self, agent: str) -> list[ActiveLimit]:
        """All limits of an agent, as they are or would be if it weren't exempt or blocked."""
        own = self.own.get(agent)
        defaults = [active for of_channel in self.defaults.values() for active in of_channel.values()]
        return defaults if own is None else [self._of_agent(own, active) for active in defaults]


def counted_as(address: str) -> str:
    """The key that an address is counted under: an IPv6 address by its /64."""
    return _counted_as(parse_address(address))


def parse_address(address: object) -> IPv4Address | IPv6Address:
    """An IP address; one of IPv4 that is mapped into IPv6, as at a dual-stack socket, as IPv4."""
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
