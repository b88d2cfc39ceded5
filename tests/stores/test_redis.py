"""The store in a real server, on clocks that tests set and on the server's own."""

from collections.abc import Iterator
from itertools import count

import pytest

from headgate import ManualClock
from headgate.stores import conformance
from headgate.stores.account_walks import ACCOUNT_WALKS
from headgate.stores.hold_walks import WALKS
from headgate.stores.redis import RedisStore
from tests.support.valkey import PATIENCE, ValkeyServer, other_server_programs

_prefixes = (f"test{number}:" for number in count())


@pytest.fixture(
    scope="module", params=["valkey", *[pytest.param(name, marks=pytest.mark.long) for name in other_server_programs()]]
)
def any_server(request: pytest.FixtureRequest) -> Iterator[ValkeyServer]:
    with ValkeyServer(program=other_server_programs().get(request.param)) as server:
        yield server


CASES = [
    pytest.param(case, id=case.__name__, marks=[pytest.mark.long] if case in (*WALKS, *ACCOUNT_WALKS) else [])
    for case in (*conformance.CASES, *conformance.HOLD_CASES, *conformance.ACCOUNT_CASES)
]
"""The walks take seconds each; in memory they are walked with every change."""


@pytest.mark.parametrize("case", CASES)
def test_it_conforms(any_server: ValkeyServer, case: conformance.Case) -> None:
    made = []

    def make(clock: ManualClock) -> RedisStore:
        made.append(RedisStore(any_server.url, prefix=next(_prefixes), clock=clock, timeout=PATIENCE))
        return made[-1]

    try:
        case(make)
    finally:
        for store in made:
            store.close()
