"""A slow and plain model of limits with holds, which writes the history of random calls on it."""

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cache
from typing import Any

SECOND = 1_000_000
LIMITS: list[dict[str, Any]] = [
    {"limit": "bucket", "kind": "bucket", "capacity": 10, "refill": 3, "per": 10},
    {"limit": "window", "kind": "window", "most": 12, "seconds": 10},
    {"limit": "slots", "kind": "slots", "most": 2},
    {"limit": "budget", "kind": "budget", "amount": 30, "periods": [0, 20 * SECOND, 40 * SECOND]},
]
VERBS = [*["check"] * 4, *["hold"] * 4, "settle", "settle", "cancel", "extend", "peek", "charge", "refund"]
FAR = 10**12  # microseconds; a wait that is no shorter is none


@dataclass
class Cost:
    """A cost in an account. A hold's is taken at the hold's or the extend's instant."""

    account: tuple[str, str]
    at: int
    value: int
    period: int
    hold: str = ""


@dataclass
class Hold:
    call: Mapping[str, Any]
    end: int
    ended: bool = False
    costs: list[Cost] = field(default_factory=list)

    def is_open(self, now: int) -> bool:
        return not self.ended and now < self.end


class HoldModel:
    """Decides each call at its instant, by adding up all that was ever taken."""

    def __init__(self) -> None:
        self.limits = {limit["limit"]: limit for limit in LIMITS}
        self.costs: list[Cost] = []
        self.holds: dict[str, Hold] = {}

    def taken(self, account: tuple[str, str], now: int) -> Fraction:
        limit = self.limits[account[0]]
        if limit["kind"] == "slots":
            holds = [hold for hold in self.holds.values() if hold.is_open(now) and hold.call["key"] == account[1]]
            return Fraction(len([hold for hold in holds if account[0] in hold.call["limits"]]))
        costs = [cost for cost in self.costs if cost.account == account and not self._released(cost, now)]
        if limit["kind"] == "window":
            return Fraction(sum(cost.value for cost in costs if now < cost.at + limit["seconds"] * SECOND))
        if limit["kind"] == "budget":
            return Fraction(sum(cost.value for cost in costs if cost.period == self._period(now)))
        missing, last = Fraction(0), 0
        for cost in [*costs, Cost(account, now, 0, 0)]:  # in the order of their instants
            missing = max(Fraction(0), missing - Fraction(limit["refill"] * (cost.at - last), limit["per"] * SECOND))
            missing, last = max(Fraction(0), missing + cost.value), cost.at
        return missing

    def _released(self, cost: Cost, now: int) -> bool:
        hold = self.holds.get(cost.hold)
        return hold is not None and bool(hold.call.get("release")) and not hold.ended and now >= hold.end

    def _period(self, now: int) -> int:
        return len([start for start in self.limits["budget"]["periods"] if start <= now])

    def left(self, account: tuple[str, str], now: int) -> int:
        limit = self.limits[account[0]]
        most = limit.get("capacity") or limit.get("most") or limit["amount"]
        return int((most - self.taken(account, now)) // 1)

    def fits(self, key: str, limits: list[str], cost: int, now: int) -> bool:
        return all(self.left((name, key), now) >= (1 if name == "slots" else cost) for name in limits)

    def wait(self, key: str, limits: list[str], cost: int, now: int) -> int | None:
        """Microseconds until it fits; without calls, room only grows."""
        low, high = 0, FAR
        if not self.fits(key, limits, cost, now + high):
            return None
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self.fits(key, limits, cost, now + middle) else (middle, high)
        return high

    def apply(self, call: Mapping[str, Any], now: int) -> dict[str, Any]:
        """Carry it out; what was said."""
        verb, key, limits, cost = call["verb"], call["key"], list(call.get("limits", ())), call.get("cost", 1)
        if verb == "peek":
            return {"said": "passed", "remaining": self.left((limits[0], key), now)}
        if verb in ("extend", "settle", "cancel"):
            return self._apply_to_hold(call, now)
        if verb == "hold" and call["hold"] in self.holds:
            return {"said": "passed"}
        if verb in ("check", "hold") and not self.fits(key, limits, cost, now):
            return {"said": "denied", "retry": self.wait(key, limits, cost, now)}
        if verb == "hold":
            self.holds[call["hold"]] = Hold(call, now + call["lease"])
        for name in limits:
            value = -self._refundable((name, key), cost, now) if verb == "refund" else cost
            self._take((name, key), value, now, call.get("hold", ""))
        return {"said": "passed"}

    def _refundable(self, account: tuple[str, str], cost: int, now: int) -> int:
        """No more than was spent; what is held can still come back by itself."""
        costs = [one for one in self.costs if one.account == account and not one.hold]
        spent = sum(one.value for one in costs if one.period == self._period(now))
        return min(cost, spent) if account[0] == "budget" else cost

    def _take(self, account: tuple[str, str], value: int, now: int, hold: str) -> None:
        if account[0] == "slots":
            return
        owner = self.holds.get(hold)
        period = owner.costs[0].period if owner and owner.costs else self._period(now)
        cost = Cost(account, now, value, period, hold)
        self.costs.append(cost)
        if owner:
            owner.costs.append(cost)

    def _apply_to_hold(self, call: Mapping[str, Any], now: int) -> dict[str, Any]:
        hold = self.holds.get(call["hold"])
        if hold is None:
            return {"said": "refused"}
        key, limits = hold.call["key"], [name for name in hold.call["limits"] if name != "slots"]
        if call["verb"] == "extend":
            if not hold.is_open(now):
                return {"said": "refused"}
            if not self.fits(key, limits, call["cost"], now):
                return {"said": "denied", "retry": None}
            for name in limits:
                self._take((name, key), call["cost"], now, call["hold"])
            hold.end = now + call["lease"]
            return {"said": "passed"}
        if hold.ended:  # repeated by the same caller
            return {"said": "passed"}
        if now >= hold.end and hold.call.get("release"):
            return {"said": "refused"}
        hold.ended = True
        for name in limits:
            rest = call.get("cost", 0)
            for cost in [cost for cost in hold.costs if cost.account[0] == name]:
                cost.value = min(cost.value, rest)
                rest -= cost.value
            if rest:
                self._take((name, key), rest, now, call["hold"])
        return {"said": "passed"}


@cache
def random_history(seed: int, count: int, *, jitter: int = 0, killed: float = 0.0) -> tuple[dict[str, Any], ...]:
    """An honest history: exact, or with calls that last, in the order of their ends; some callers are killed."""
    dice = random.Random(seed)
    model, now, calls = HoldModel(), 0, []
    ends: dict[str, dict[str, Any]] = {}
    for index in range(count):
        now += dice.choice([0, 0, 1, 333_333, 333_333, SECOND // 2, SECOND, 2 * SECOND])
        call = _random_call(dice, model, ends, f"h{index}")
        is_killed = dice.random() < killed
        said = {"said": None} if is_killed and dice.random() < 0.5 else model.apply(call, now)
        called, returned = now - dice.randint(0, jitter), now + dice.randint(0, jitter)
        call = {**call, **said, "called": max(called, 0), "returned": returned}
        if is_killed:
            call.update(said=None, returned=None)
            call.pop("retry", None)
        if call["verb"] != "peek" or not is_killed:
            calls.append(call)
    for name in model.limits:
        for key in "ab":
            peek = {"verb": "peek", "key": key, "limits": [name], "called": now, "returned": now}
            calls.append({**peek, **model.apply(peek, now)})
    if jitter:
        calls.sort(key=lambda call: (call["returned"] is None, call["returned"] or 0))
    return (*LIMITS, *calls)


def _random_call(dice: random.Random, model: HoldModel, ends: dict[str, dict[str, Any]], name: str) -> dict[str, Any]:
    key = dice.choice("ab")
    verb = dice.choice(VERBS)
    if verb in ("settle", "cancel", "extend") and model.holds:
        hold = dice.choice(list(model.holds)[-6:])
        call: dict[str, Any] = {"verb": verb, "key": model.holds[hold].call["key"], "hold": hold}
        if verb == "extend":
            return {**call, "cost": dice.randint(0, 2), "lease": dice.choice([10, 20]) * SECOND}
        return ends.setdefault(hold, call if verb == "cancel" else {**call, "cost": dice.randint(0, 6)})
    if verb == "hold":
        limits = dice.choice([["slots"], ["bucket", "slots"], ["window", "budget"], [*model.limits]])
        lease, release = dice.choice([3, 5, 20]) * SECOND, dice.random() < 0.3
        call = {"verb": verb, "key": key, "limits": limits, "cost": dice.randint(1, 4), "hold": name}
        again = [dict(hold.call) for hold in list(model.holds.values())[-3:]]
        return dice.choice(again) if again and dice.random() < 0.1 else {**call, "lease": lease, "release": release}
    if verb == "peek":
        return {"verb": verb, "key": key, "limits": [dice.choice(list(model.limits))]}
    if verb in ("charge", "refund"):
        names = ["bucket", "budget"] if verb == "refund" else ["bucket", "window", "budget"]
        return {"verb": verb, "key": key, "limits": [dice.choice(names)], "cost": dice.randint(1, 3)}
    limits = dice.choice([["bucket"], ["window"], ["slots"], ["budget"], ["bucket", "window"], ["window", "slots"]])
    return {"verb": "check", "key": key, "limits": limits, "cost": dice.randint(1, 3)}
