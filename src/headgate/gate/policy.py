"""Policy: which limit applies to whom.

A policy is a value, read from one TOML file or from the same structure in Python. Everything has a default, so
`Policy()` is complete. A policy with mistakes is refused as a whole; all mistakes are reported at once, each with its
path.
"""

import os
import re
import stat
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from ipaddress import IPv4Network, IPv6Network, ip_network
from os import PathLike, fspath
from typing import Any, Final, TypeAlias, TypeGuard, TypeVar

from headgate.errors import HeadgateError, InvalidInput, refuse
from headgate.gate.account_settings import account_settings, read_accounts
from headgate.gate.accounts import Accounts
from headgate.gate.settings_reader import SettingsReader
from headgate.gate.toml_text import flatten, limit_setting, to_toml, toml_key, toml_value
from headgate.limits.decision import Limit
from headgate.limits.notation import parse, rate_limit_of
from headgate.limits.numbers import duration, permille, whole
from headgate.limits.violations import Backoff
from headgate.stores.base import MAX_TIMEOUT, ON_FAILURE

Network: TypeAlias = IPv4Network | IPv6Network
ChannelTier: TypeAlias = tuple[str, str]
"""A channel and a tier."""
T = TypeVar("T")

BUILT_IN_TIERS: Final = ("light", "normal", "heavy")
"""The tiers of every policy. `Policy.tiers` has those that a policy adds, too."""
UNKNOWN_TIER: Final = "normal"
"""The tier of unclassified actions."""
MAX_AGENT: Final = 128
MAX_FILE: Final = 8 * 1024 * 1024
"""Bytes of a policy file: enough for the overrides of 100,000 agents."""

PURPOSES: Final = {
    "request": ("limit", "60/minute"),
    "registration": ("registration", "5/minute"),
    "connection": ("connection", "600/minute"),
    "authentication": ("authentication", "60/minute"),
}
"""The purposes of checks by address, with the setting in `[addresses]` and its default. Each has its own bucket:

requests without a token, registrations, connects of WebSockets, and wrong tokens.
"""

_TABLES: Final = (
    *("warn_at", "channels", "tiers", "exempt", "shadow", "limits", "actions", "addresses", "sessions", "accounts"),
    *("agents", "backoff", "alerts", "store", "hub"),
)
_OF_AGENTS: Final = ("session", "shadow", "account", "plan")  # keys in the table of an agent, beside tiers and channels
_MAX_CHANNELS: Final = 1000
_MAX_OWN_TIERS: Final = 16  # each has a bucket for every agent and channel, and series of metrics
_MAX_TIER: Final = 64  # characters: tiers are in headers, frames and labels
_MAX_STEPS: Final = 100  # of the backoff: each violation sends them to the store
_TOO_DEEP: Final = "expected tables and lists a few levels deep, got hundreds of levels"
_LIMITS: Final = {"light": "120/minute", "normal": "60/minute", "heavy": "10/minute"}
_ACTIONS: Final = {
    "ws": {
        "light": "ping list_agents list_channels status channel_history session_close",
        "normal": "message channel_publish channel_subscribe channel_unsubscribe task_accepted task_progress "
        "task_complete task_failed task_recovering",
        "heavy": "identify session_open",
    },
    "http": {
        "light": "get_agents get_channels get_tasks get_metrics get_health get_mailbox get_schemas get_dashboard_state "
        "get_dashboard get_signals post_check get_counter delete_counter post_hold_settle post_hold_cancel",
        "normal": "post_message post_channel_publish post_mailbox_ack get_messages get_task_detail get_channel_info "
        "delete_channel post_hold post_hold_extend get_hold get_account admin unknown_route",
        "heavy": "post_task post_channel post_admin_push_task post_onboard_register post_onboard_rotate "
        "post_onboard_revoke",
    },
}


class PolicyError(HeadgateError, ValueError):
    """A policy can't be used. `mistakes` has one line for each mistake, with its path inside the policy."""

    def __init__(self, source: str, mistakes: list[str]) -> None:
        self.mistakes: Final = tuple(mistakes)
        count = "1 mistake" if len(mistakes) == 1 else f"{len(mistakes)} mistakes"
        super().__init__("\n  ".join([f"{source}: {count}", *mistakes]))


@dataclass(frozen=True, init=False, repr=False)
class Policy:
    """The limits of agents, accounts and addresses.

    >>> policy = Policy(limits={"heavy": "5/minute", "ws": {"light": "600/minute"}}, exempt=["monitor"])
    >>> print(policy.limits["ws", "heavy"], policy.limits["http", "heavy"], policy.limits["ws", "light"], sep=", ")
    5/minute, 5/minute, 600/minute
    >>> policy.tier_of("http", "post_task")
    'heavy'
    """

    channels: tuple[str, ...]
    tiers: tuple[str, ...]
    """light, normal and heavy, and the tiers that this policy adds."""
    limits: Mapping[ChannelTier, Limit]
    actions: Mapping[tuple[str, str], str]
    """The tier of each channel and action."""
    warn_at: float
    exempt: frozenset[str]
    overrides: Mapping[str, Mapping[ChannelTier, Limit]]
    shadow: bool
    """Whether all limits are counted and none is enforced."""
    shadow_tiers: frozenset[str]
    shadow_agents: frozenset[str]
    address_limits: Mapping[str, Limit]
    """The limits by address: of each purpose in `PURPOSES`."""
    session_limit: Limit
    """The limit of every session of an agent."""
    session_overrides: Mapping[str, Limit]
    """The limits of the sessions of some agents."""
    exempt_addresses: tuple[Network, ...]
    accounts: Accounts
    agent_accounts: Mapping[str, str]
    """The paths of the accounts that agents belong to."""
    agent_plans: Mapping[str, str]
    backoff: Backoff
    on_failure: str
    """How to decide while the store is away: "open", "closed", or "local"."""
    on_failure_holds: str
    """The same for holds, budgets and slots."""
    store_timeout: float
    """The longest that a check waits for the store, in seconds."""
    nodes: int
    """How many nodes share the store: while it is away, "local" enforces a share of each limit."""
    given: frozenset[str] = field(compare=False)
    """The paths of all values that were given, except those of agents: the others are defaults."""

    def __init__(self, **settings: Any) -> None:
        self._read("policy", settings)

    @classmethod
    def load(cls, path: str | PathLike[str]) -> "Policy":
        """Read a TOML file."""
        return cls.from_settings(fspath(path), read_toml(path))

    @classmethod
    def from_settings(cls, source: str, settings: Mapping[str, Any]) -> "Policy":
        """A policy from the content of a file. `source` is the file's name in errors."""
        policy = cls.__new__(cls)
        policy._read(source, settings)
        return policy

    def _read(self, source: str, settings: Mapping[str, Any]) -> None:
        reader = _Reader()
        try:
            values = reader.policy(settings)
        except RecursionError:
            raise PolicyError(source, [_TOO_DEEP]) from None
        if reader.mistakes:
            raise PolicyError(source, reader.mistakes)
        own = {name: value for name, value in settings.items() if name not in ("agents", "hub")}
        values["given"] = frozenset([path for path, _ in flatten(own)])
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def tier_of(self, channel: str, action: str) -> str | None:
        """The tier that an action is classified into, or None."""
        return self.actions.get((channel, action))

    def settings(self) -> dict[str, Any]:
        """The whole policy in the structure that builds it: `Policy(**policy.settings()) == policy`."""
        shadow: bool | list[str] = self.shadow or sorted(self.shadow_tiers)
        agents: dict[str, Any] = {}
        for agent, limits in self.overrides.items():
            for (channel, tier), limit in limits.items():
                agents.setdefault(agent, {}).setdefault(channel, {})[tier] = limit_setting(limit)
        for agent, limit in self.session_overrides.items():
            agents.setdefault(agent, {})["session"] = limit_setting(limit)
        for agent in sorted(self.shadow_agents):
            agents.setdefault(agent, {})["shadow"] = True
        for key, values in (("account", self.agent_accounts), ("plan", self.agent_plans)):
            for agent, value in values.items():
                agents.setdefault(agent, {})[key] = value
        return {
            "warn_at": self.warn_at,
            "channels": list(self.channels),
            "tiers": list(self.tiers[len(BUILT_IN_TIERS) :]),
            "exempt": sorted(self.exempt),
            "shadow": shadow,
            "limits": {
                channel: {tier: limit_setting(self.limits[channel, tier]) for tier in self.tiers}
                for channel in self.channels
            },
            "actions": {
                channel: {action: tier for (where, action), tier in self.actions.items() if where == channel}
                for channel in self.channels
            },
            "addresses": {
                **{PURPOSES[purpose][0]: limit_setting(limit) for purpose, limit in self.address_limits.items()},
                "exempt": [str(network) for network in self.exempt_addresses],
            },
            "sessions": {"limit": limit_setting(self.session_limit)},
            "accounts": account_settings(self.accounts),
            "agents": agents,
            "backoff": {
                "steps": list(self.backoff.steps),
                "quiet": self.backoff.quiet,
                "enforce": self.backoff.enforce,
            },
            "alerts": {"violations": self.backoff.alert_after, "window": self.backoff.alert_window},
            "store": self.store_options,
        }

    @property
    def store_options(self) -> dict[str, Any]:
        """The options that a server's store is opened with."""
        return {
            "on_failure": self.on_failure,
            "on_failure_holds": self.on_failure_holds,
            "timeout": self.store_timeout,
            "nodes": self.nodes,
        }

    def toml(self) -> str:
        """The whole policy as TOML that `load` reads."""
        return to_toml(self.settings())

    def changed(self) -> list[tuple[str, str, str]]:
        """The differences from the default policy: the path, the value, and the default, in TOML."""
        defaults = Policy().values()
        found = [(path, value, defaults.get(path, "")) for path, value in self.values().items()]
        return [(path, value, default) for path, value, default in found if value != default]

    def values(self) -> dict[str, str]:
        """Every value in TOML, by its path, such as `limits.ws.heavy`."""
        return {path: toml_value(value) for path, value in flatten(self.settings())}

    def gives(self, path: str) -> bool:
        """Whether the file gives the value at a path. It may be the same as the default."""
        table, _, rest = path.partition(".")
        for_all = f"limits.{rest.partition('.')[2]}" if table == "limits" else path  # a tier on every channel
        return table == "agents" or path in self.given or for_all in self.given

    def __repr__(self) -> str:
        defaults = Policy().settings()
        changed = {name: value for name, value in self.settings().items() if value != defaults[name]}
        return f"Policy({', '.join(f'{name}={value!r}' for name, value in changed.items())})"


def read_toml(path: str | PathLike[str]) -> dict[str, Any]:
    """The content of a TOML file; a `PolicyError` if it can't be read."""
    return parse_toml(fspath(path), read_file(path))


def read_file(path: str | PathLike[str]) -> bytes:
    """The bytes of a policy file; a `PolicyError` if they can't be read. It never waits, as on a pipe."""
    source = fspath(path)
    try:
        with open(path, "rb", opener=_open_at_once) as file:
            regular = stat.S_ISREG(os.fstat(file.fileno()).st_mode)
            content = file.read(MAX_FILE + 1) if regular else b""
    except OSError as error:
        raise PolicyError(source, [f"expected a readable file, got: {error.strerror}"]) from error
    except ValueError as error:  # NUL in the path
        raise PolicyError(source, [f"expected the path of a file, got: {error}"]) from error
    if not regular:
        raise PolicyError(source, ["expected a regular file, got a pipe or a device"])
    if len(content) > MAX_FILE:
        raise PolicyError(source, [f"expected a file of at most {MAX_FILE} bytes, got a larger one"])
    return content


def _open_at_once(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))  # Windows has no named pipes among its files


def parse_toml(source: str, content: bytes) -> dict[str, Any]:
    """The settings in a TOML file; a `PolicyError` that names the source if it is none."""
    try:
        return tomllib.loads(content.decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise PolicyError(source, [f"expected TOML, got: {error}"]) from error
    except RecursionError:
        raise PolicyError(source, [_TOO_DEEP]) from None
    except ValueError:  # Python's bound on the digits of an int
        lines = [i for i, line in enumerate(content.splitlines(), 1) if re.search(rb"[\d_]{640}", line)]
        where = f"line {lines[0]}: " if lines else ""
        raise PolicyError(source, [f"{where}expected a number of 64 bits, got one of thousands of digits"]) from None


def check_agent(agent: object) -> str:
    """An agent's name: 1 to 128 printable characters."""
    if not isinstance(agent, str) or not 1 <= len(agent) <= MAX_AGENT or not agent.isprintable():
        refuse("agent", f"1 to {MAX_AGENT} printable characters", agent)
    return str.__str__(agent)


class _Reader(SettingsReader):
    """Reads a policy."""

    def __init__(self) -> None:
        super().__init__()
        self._channels: tuple[str, ...] = ()
        self._tiers: tuple[str, ...] = ()

    def policy(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        self.check_keys("", settings, _TABLES)
        self._channels = self._names("channels", settings.get("channels", list(_ACTIONS)), _channel, (1, _MAX_CHANNELS))
        own = self._names("tiers", settings.get("tiers", []), partial(_own_tier, self._channels), (0, _MAX_OWN_TIERS))
        self._tiers = (*BUILT_IN_TIERS, *own)
        shadow, shadow_tiers = self._shadow(settings.get("shadow", False))
        agents = self.table("agents", settings)
        addresses = self.table("addresses", settings)
        self.check_keys("addresses", addresses, [*(key for key, _ in PURPOSES.values()), "exempt"])
        sessions = self.table("sessions", settings)
        self.check_keys("sessions", sessions, ["limit"])
        accounts = read_accounts(self, self.table("accounts", settings))
        store = self.table("store", settings)
        self.check_keys("store", store, ["on_failure", "on_failure_holds", "timeout", "nodes"])
        return {
            "channels": self._channels,
            "tiers": self._tiers,
            "limits": self._defaults(self.table("limits", settings)),
            "actions": self._actions(self.table("actions", settings)),
            "warn_at": self.value("warn_at", settings, 0.8, _fraction),
            "exempt": frozenset(self.values("exempt", settings.get("exempt", []), check_agent)),
            "overrides": dict(self._overrides(agents)),
            "shadow": shadow,
            "shadow_tiers": shadow_tiers,
            "shadow_agents": frozenset(
                agent
                for agent, table in agents.items()
                if isinstance(table, dict) and self.value(f"agents.{toml_key(agent)}.shadow", table, False, _bool)
            ),
            "address_limits": {
                purpose: self.value(f"addresses.{key}", addresses, parse(default), _limit)
                for purpose, (key, default) in PURPOSES.items()
            },
            "session_limit": self.value("sessions.limit", sessions, parse("unlimited"), _limit),
            "session_overrides": dict(self._of_agents(agents, "session", _limit)),
            "exempt_addresses": tuple(self.values("addresses.exempt", addresses.get("exempt", []), _network)),
            "accounts": accounts,
            "agent_accounts": dict(self._of_agents(agents, "account", partial(accounts.check_account, ""))),
            "agent_plans": dict(self._of_agents(agents, "plan", partial(accounts.check_plan, ""))),
            "backoff": self._backoff(self.table("backoff", settings), self.table("alerts", settings)),
            "on_failure": self.value("store.on_failure", store, "local", _on_failure),
            "on_failure_holds": self.value("store.on_failure_holds", store, "closed", _on_failure),
            "store_timeout": self.value("store.timeout", store, 0.25, _timeout),
            "nodes": self.value("store.nodes", store, 1, _nodes),
        }

    def _names(
        self, path: str, given: object, read: Callable[[object], str], within: tuple[int, int]
    ) -> tuple[str, ...]:
        return tuple(dict.fromkeys(self.values(path, given, read, within)))

    def _defaults(self, given: Mapping[str, Any]) -> dict[ChannelTier, Limit]:
        """The limit of every channel and tier. A tier that the policy adds has none unless it is given."""
        limits = self._limits("limits", given)
        tables = {channel: given.get(channel) for channel in self._channels}
        for tier in self._tiers[len(BUILT_IN_TIERS) :]:
            without = [name for name, table in tables.items() if not isinstance(table, Mapping) or tier not in table]
            if without and tier not in given:
                where = "" if len(without) == len(tables) else f" for {', '.join(without)}"
                self.mistakes.append(f"limits.{tier}: expected a limit, since tiers lists {tier}, got none{where}")
        return {
            (channel, tier): limits.get((channel, tier)) or parse(_LIMITS.get(tier, "unlimited"))
            for channel in self._channels
            for tier in self._tiers
        }

    def _limits(self, path: str, given: Mapping[str, Any]) -> dict[ChannelTier, Limit]:
        """Limits by tier, for every channel, and by tier below a channel, for that one."""
        channels, tiers = self._channels, self._tiers
        of_agent = path.startswith("agents.")  # where a name is hardly meant as that of a new tier
        to_add = _nothing if of_agent else self._setting_of_tier
        self.check_keys(path, given, [*tiers, *channels, *(_OF_AGENTS if of_agent else ())], to_add)
        limits: dict[ChannelTier, Limit] = {}
        for tier in tiers:
            if (limit := self.value(f"{path}.{tier}", given, None, _limit)) is not None:
                limits |= {(channel, tier): limit for channel in channels}
        for channel in channels:
            table = self.table(channel, given, f"{path}.{channel}")
            self.check_keys(f"{path}.{channel}", table, tiers, to_add)
            for tier in tiers:
                if (limit := self.value(f"{path}.{channel}.{tier}", table, None, _limit)) is not None:
                    limits[channel, tier] = limit
        return limits

    def _setting_of_tier(self, name: str) -> str:
        """The setting that adds a tier of this name; "" if none may be called so, or there are too many."""
        own = self._tiers[len(BUILT_IN_TIERS) :]
        try:
            _own_tier(self._channels, name)
        except InvalidInput:
            return ""
        return f"tiers = {toml_value([*own, name])}" if len(own) < _MAX_OWN_TIERS else ""

    def _overrides(self, agents: Mapping[str, Any]) -> Iterator[tuple[str, dict[ChannelTier, Limit]]]:
        for agent in agents:
            path = f"agents.{toml_key(agent)}"
            self.parsed(path, agent, check_agent)
            if limits := self._limits(path, self.table(agent, agents, path)):
                yield agent, limits

    def _of_agents(self, agents: Mapping[str, Any], key: str, read: Callable[[object], T]) -> Iterator[tuple[str, T]]:
        """The values of a key in the tables of agents."""
        for agent, table in agents.items():
            path = f"agents.{toml_key(agent)}.{key}"
            if isinstance(table, dict) and (found := self.value(path, table, None, read)) is not None:
                yield agent, found

    def _actions(self, given: Mapping[str, Any]) -> dict[ChannelTier, str]:
        channels, read = self._channels, partial(_one_of, self._tiers)
        self.check_keys("actions", given, channels)
        actions = {
            (channel, action): tier
            for channel in channels
            for tier, names in _ACTIONS.get(channel, {}).items()
            for action in names.split()
        }
        for channel in channels:
            table = self.table(channel, given, f"actions.{channel}")
            for action in table:
                if (tier := self.value(f"actions.{channel}.{toml_key(action)}", table, None, read, action)) is not None:
                    actions[channel, action] = tier
        return actions

    def _shadow(self, given: object) -> tuple[bool, frozenset[str]]:
        if isinstance(given, bool):
            return given, frozenset()
        if not isinstance(given, list):
            self.add_mistake("shadow", "true, false or a list of tiers", given)
            return False, frozenset()
        return False, frozenset(self.values("shadow", given, partial(_one_of, self._tiers)))

    def _backoff(self, backoff: Mapping[str, Any], alerts: Mapping[str, Any]) -> Backoff:
        self.check_keys("backoff", backoff, ["steps", "quiet", "enforce"])
        self.check_keys("alerts", alerts, ["violations", "window"])
        default = Backoff()
        steps = self.values("backoff.steps", backoff.get("steps", default.steps), _seconds, within=(1, _MAX_STEPS))
        return Backoff(
            steps=steps or default.steps,
            quiet=self.value("backoff.quiet", backoff, default.quiet, _seconds),
            enforce=self.value("backoff.enforce", backoff, default.enforce, _bool),
            alert_after=self.value("alerts.violations", alerts, default.alert_after, _count),
            alert_window=self.value("alerts.window", alerts, default.alert_window, _seconds),
        )


_limit: Final = partial(rate_limit_of, "limit")
_count: Final = partial(whole, "", most=1000)
_nodes: Final = partial(whole, "", most=10_000)
_seconds: Final = partial(duration, "")
_timeout: Final = partial(duration, "", most=MAX_TIMEOUT)


def _fraction(value: object) -> float:
    return permille("", value) / 1000


def _nothing(_: str) -> str:
    return ""


def _bool(value: object) -> bool:
    if not isinstance(value, bool):
        refuse("", "true or false", value)
    return value


def _one_of(known: tuple[str, ...], value: object) -> str:
    if not isinstance(value, str) or value not in known:
        refuse("", f"one of {', '.join(known)}", value)
    return value


_on_failure: Final = partial(_one_of, ON_FAILURE)


def _channel(value: object) -> str:
    taken = (*BUILT_IN_TIERS, *_OF_AGENTS)
    if not _is_name(value) or value in taken:
        refuse("", f"a name of letters, digits and underscores other than {', '.join(taken)}", value)
    return value


def _own_tier(channels: tuple[str, ...], value: object) -> str:
    # The buckets of addresses are stored as those of a channel "address", by purpose.
    taken = (*BUILT_IN_TIERS, *_OF_AGENTS, *channels, *(PURPOSES if "address" in channels else ()))
    if not _is_name(value) or len(value) > _MAX_TIER or value in taken:
        shape = f"a name of up to {_MAX_TIER} letters, digits and underscores"
        refuse("", f"{shape} other than {', '.join(taken)}", value)
    return value


def _is_name(value: object) -> TypeGuard[str]:
    return isinstance(value, str) and value.isidentifier() and value.isascii()


def _network(value: object) -> Network:
    try:
        if isinstance(value, (str, IPv4Network, IPv6Network)):
            return ip_network(value)
    except ValueError:
        pass
    return refuse("", "an address or a network such as '10.0.0.0/8'", value)
