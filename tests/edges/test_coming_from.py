"""What users of `limits`, `slowapi` and `throttled-py` bring along: limit strings, storage URLs, names for things."""

import inspect
import re
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from uuid import uuid4

import limits
import pytest
import slowapi
from hypothesis import example, given
from hypothesis import strategies as st
from throttled import Throttled
from throttled.constants import RateLimiterType
from throttled.exceptions import DataError
from throttled.rate_limiter.quota_parser import parse as parse_quota

from headgate import Decision, Gate, InvalidInput, Limiter, MemoryStore, RedisStore, TokenBucket, parse
from headgate.edges.asgi import RateLimitMiddleware
from headgate.edges.guard import Options
from headgate.stores.redis.client_urls import _parse
from tests.support.valkey import ValkeyServer, wait_for

pytestmark = pytest.mark.once

LIMITS_YEAR, YEAR = 360 * 86_400, 365 * 86_400


def parse_as_limits(text: str) -> list[TokenBucket]:
    """What `limits` reads, but a year is one of 365 days."""
    found = []
    for item in limits.parse_many(text):
        seconds = item.get_expiry()
        if item.GRANULARITY.name == "year":
            seconds = seconds // LIMITS_YEAR * YEAR
        found.append(TokenBucket(item.amount, item.amount, seconds))
    return list(dict.fromkeys(found))


def parse_as_throttled(text: str) -> list[TokenBucket]:
    quotas = parse_quota(text)
    return list(dict.fromkeys(TokenBucket(quota.burst, quota.get_limit(), quota.period_sec) for quota in quotas))


def spaced_parts(*parts: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    """Parts with any spaces between them, in any case."""
    spaces = st.sampled_from(["", " ", "  ", "\t"])
    whole = st.tuples(spaces, *(st.tuples(part, spaces).map("".join) for part in parts)).map("".join)
    return st.one_of(whole, whole.map(str.upper), whole.map(str.title))


amounts = st.integers(1, 10**6).map(str)
units = [name + plural for name in ("second", "minute", "hour", "day", "month", "year") for plural in ("", "s")]
one_limit = spaced_parts(
    amounts, st.sampled_from(["/", "per"]), st.one_of(st.just(""), st.integers(1, 400).map(str)), st.sampled_from(units)
)
short_units = "s sec secs second seconds m min mins minute minutes h hr hrs hour hours d day days w wk wks week weeks"
one_quota = st.tuples(
    amounts,
    st.sampled_from(["/", " / ", " per ", "per "]),
    st.sampled_from(short_units.split()),
    st.one_of(st.just(""), st.integers(1, 10**6).map(lambda burst: f"  burst {burst} ")),
).map("".join)


def several_parts(one: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    rest = st.lists(st.tuples(st.sampled_from(";,|"), one).map("".join), max_size=3).map("".join)
    return st.tuples(one, rest).map("".join)


@given(several_parts(one_limit))
@example("833939/343year")
def test_every_limit_string_of_limits_means_the_same_here(text: str) -> None:
    try:
        there = parse_as_limits(text)
    except InvalidInput:  # of a bucket, which some long times can't fill exactly
        with pytest.raises(InvalidInput, match="that can be counted exactly"):
            parse(text)
    else:
        assert list(parse(text).parts) == there


@given(several_parts(one_quota))
def test_every_quota_of_throttled_means_the_same_here(text: str) -> None:
    assert list(parse(text).parts) == parse_as_throttled(text)


@given(st.text(st.sampled_from("0159/ per minutesdayhourwkb;,|"), max_size=20))
def test_texts_that_both_parsers_accept_mean_the_same(text: str) -> None:
    try:
        here = list(parse(text).parts)
    except InvalidInput:
        return
    readers: tuple[tuple[Callable[[str], list[TokenBucket]], type[Exception]], ...] = (
        (parse_as_limits, ValueError),
        (parse_as_throttled, DataError),
    )
    for read, error in readers:
        try:
            there = read(text)
        except error:
            continue
        assert here == there


@pytest.mark.parametrize(
    "text",
    [
        "10/minute", "10 per minute", "100 per 5 minutes", "1/day;5 per hour", "1 per day, 5/hour|2/second", "2/3day",
        "10/MINUTE", "10 Per 2 Months", "1/year", "10perminute", "10 per5 minutes", "010/minute", " 10 / minute\n",
    ],
)  # fmt: skip
def test_limit_strings_from_the_docs_of_limits_mean_the_same_here(text: str) -> None:
    assert list(parse(text).parts) == parse_as_limits(text)


@pytest.mark.parametrize("text", ["100/s", "100/s burst 200", "10/m", "5 per min", "1/wk", "60/min;1000/h burst 50"])
def test_quotas_from_the_docs_of_throttled_mean_the_same_here(text: str) -> None:
    assert list(parse(text).parts) == parse_as_throttled(text)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("0/minute", "to let nothing pass, write 'blocked'"),  # limits lets nothing pass
        ("5/s burst 0", "to let nothing pass, write 'blocked'"),  # throttled-py lets nothing pass
        ("10/0minute", "TokenBucket per: expected a number above 0, got 0"),  # limits takes it for one minute
        ("10/s;", "second, minute, hour, day, week, month or year), got ''"),  # throttled-py: 10/s
        ("1/day:;5/hour", "'COUNT/UNIT' or 'COUNT per N UNITS'"),  # limits reads past the colon
    ],
)
def test_texts_that_only_they_accept_are_refused_with_a_hint(text: str, said: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        parse(text)
    assert said in str(caught.value)


@pytest.mark.parametrize("url", ["memory://", "async+memory://", "Memory://"])
def test_memory_by_its_url(url: str) -> None:
    limiter = Limiter("1/day", store=url)
    assert isinstance(limiter.store, MemoryStore)
    assert [bool(limiter.check("a")) for _ in range(2)] == [True, False]
    with Gate(store=url) as gate:
        assert gate.check("a", "ws", "heavy").remaining == 9


def decide_on_server(limiter: Limiter) -> list[Decision]:
    """Two decisions about somebody new; of another, if the machine was too slow for a store's usual timeout."""
    found: list[Decision] = []

    def both() -> bool:
        name = uuid4().hex
        found[:] = [limiter.check(name) for _ in range(2)]
        return not any(decision.degraded for decision in found)

    wait_for(both, "the server's word")
    return found


@pytest.mark.parametrize("scheme", ["redis", "valkey", "async+redis", "async+valkey", "REDIS"])
def test_a_server_by_its_url(redis_server: ValkeyServer, scheme: str) -> None:
    url = redis_server.url.replace("redis", scheme, 1)
    with Limiter("1/day", store=url, name=f"elsewhere {scheme}") as limiter:
        assert isinstance(limiter.store, RedisStore)
        assert [bool(decision) for decision in decide_on_server(limiter)] == [True, False]
    with Gate(store=url) as gate:
        wait_for(lambda: not gate.check("elsewhere", "ws", "heavy").degraded, "the gate's server")


@pytest.mark.parametrize(
    ("url", "scheme", "kind", "nodes", "master"),
    [
        ("redis+sentinel://one:26379,two:26380/mymaster", "redis", "+sentinel",
         [("one", 26379), ("two", 26380)], "mymaster"),
        ("async+redis+sentinel://one,two:26380/mymaster", "redis", "+sentinel",
         [("one", 26379), ("two", 26380)], "mymaster"),
        ("valkey+sentinel://one:1/m", "valkey", "+sentinel", [("one", 1)], "m"),
        ("redis+cluster://one:7001/", "redis", "+cluster", [("one", 7001)], ""),
        ("redis+cluster://:secret@one:7001, two", "redis", "+cluster", [("one", 7001), ("two", 6379)], ""),
        ("async+valkey+cluster://[::1]:1,[::1]", "valkey", "+cluster", [("::1", 1), ("::1", 6379)], ""),
        ("async+rediss://one/0", "rediss", "", [], ""),
        ("valkeys://one", "valkeys", "", [], ""),
        ("redis+unix:///tmp/redis.sock", "unix", "", [], ""),
        ("async+valkey+unix:///tmp/redis.sock?db=1", "unix", "", [], ""),
    ],
)  # fmt: skip
def test_store_urls_are_parsed(url: str, scheme: str, kind: str, nodes: list[tuple[str, int]], master: str) -> None:
    found = _parse(url)
    assert (found[0], found[1], found[3], found[4]) == (scheme, kind, nodes, master)
    RedisStore(url).close()


@pytest.mark.parametrize(
    "scheme", ["memcached", "async+memcached", "mongodb", "mongodb+srv", "async+mongodb", "async+mongodb+srv", "etcd"]
)
def test_stores_that_headgate_has_not(scheme: str) -> None:
    for make in (lambda url: Limiter("1/day", store=url), lambda url: Gate(store=url)):
        with pytest.raises(InvalidInput) as caught:
            make(f"{scheme}://user:secret@localhost:22122")
        assert str(caught.value) == (
            "store: expected a URL such as redis://host:6379/0, rediss://…, unix:///path, "
            "redis+sentinel://host:26379/name, redis+cluster://host:7000 or memory://, "
            f"got '{scheme}://user:***@localhost:22122'"
        )


# The guide -----------------------------------------------------------------------------------------------------------

GUIDE = (Path(__file__).parents[2] / "docs" / "coming-from.md").read_text(encoding="utf-8")


def part(title: str) -> str:
    return GUIDE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def test_the_guide_names_every_option_of_the_others() -> None:
    slow: list[Callable[..., object]] = [slowapi.Limiter, slowapi.Limiter.limit, slowapi.Limiter.shared_limit]
    pages: list[tuple[str, list[Callable[..., object]]]] = [
        ("From slowapi", slow),
        ("From throttled-py", [Throttled, Throttled.limit]),
    ]
    for title, makers in pages:
        names = {name for maker in makers for name in inspect.signature(maker).parameters} - {"self"}
        missing = [name for name in sorted(names) if not re.search(rf"`[^`]*\b{name}\b[^`]*`", part(title))]
        assert (title, missing) == (title, [])
    assert [name for name in RateLimiterType.choice() if f'using="{name}"' not in part("From throttled-py")] == []
    assert [name for name in limits.strategies.STRATEGIES if name.replace("-", " ") not in GUIDE] == []


def test_names_in_the_guide_exist() -> None:
    for name in sorted(set(re.findall(r"[`@](headgate(?:\.[A-Za-z_]+)+)", GUIDE))):
        module, _, attribute = name.rpartition(".")
        try:
            import_module(name)
        except ImportError:
            assert hasattr(import_module(module), attribute), name
    options = set(re.findall(r"`([a-z]+)=", part("From slowapi") + part("From flask-limiter")))
    options -= {"dependencies"}  # of FastAPI's routers
    assert options <= {*Options.__annotations__, *inspect.signature(RateLimitMiddleware).parameters}
