"""Fuzzed streams of bytes: the hub doesn't crash, stall or log a mistake, and closes what was closed.

`FUZZ_STREAMS` is the number of streams of the long test, 20,000 unless the environment says otherwise; 200,000 is the
full form. `FUZZ_SEED` chooses others. A stream that may have done harm is written to a file; `FUZZ_FILE` names one
to be sent alone, many times, since its harm may depend on the moment.
"""

import asyncio
import json
import os
import time
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.byte_fuzz_campaign import HUNG, REFUSED
from tests.support.byte_fuzzer import ENDINGS, ByteFuzzer, Stream
from tests.support.hub_checks import UNLIMITED, fuzzed_hub, logged_mistakes
from tests.support.hub_process import HubProcess
from tests.support.module_process import module_process
from tests.support.ping_watcher import PingWatcher

STREAMS = int(os.environ.get("FUZZ_STREAMS", "20000"))
SEED = int(os.environ.get("FUZZ_SEED", "7"))
FILE, TIMES = os.environ.get("FUZZ_FILE", ""), 200
MOST_FILES = 100
"""Streams that are written when several may have done harm."""


class Sent(NamedTuple):
    """A stream that was sent."""

    name: str
    kind: str
    begin: float
    end: float
    ended: str


class LogWatcher:
    """Notes when a hub logs a mistake."""

    def __init__(self, hub: HubProcess) -> None:
        self._hub, self._read = hub, 0
        self.moments: list[float] = []

    async def watch(self) -> None:
        while True:
            lines = self._hub.err[self._read :]
            self._read += len(lines)
            self.moments += [time.monotonic()] * len(logged_mistakes(lines))
            await asyncio.sleep(0.05)


async def send(hub: HubProcess, tokens: dict[str, str], record: Path, *streams: str) -> None:
    """Send streams to a hub by a program of its own, which writes down what it sends."""
    async with module_process("byte_fuzz_campaign", str(hub.port), str(record), *streams) as sender:
        await sender.communicate(json.dumps(tokens).encode())


def recorded(record: Path) -> list[Sent]:
    """What was sent. A stream has a line from its beginning, and another from its end."""
    lines = record.read_text().splitlines() if record.exists() else []
    return list({one.name: one for one in (Sent(*json.loads(line)) for line in lines)}.values())


def campaign(folder: Path, seed: int, count: int, file: str = "") -> list[Sent]:
    """Send so many streams of a seed to a new hub, or as often the one in a file, and look at what became of it."""
    print(f"\nseed {seed}" + f", {file}" * bool(file))
    with fuzzed_hub(folder, UNLIMITED) as (hub, tokens, problems):
        watcher, log, record = PingWatcher(hub), LogWatcher(hub), folder / "record.jsonl"

        async def attack() -> None:
            watching = asyncio.ensure_future(log.watch())
            await send(hub, tokens, record, str(seed), str(count), *filter(None, [file]))
            watching.cancel()

        begin, moments, told = time.monotonic(), log.moments, ""
        try:
            _, pings = asyncio.run(watcher.watch(attack))
            told = str(pings)
            moments += [moment for slow in pings.slow for moment in slow]
            problems.extend(f"a ping took {end - start:.1f} s" for start, end in pings.slow)
        except (ConnectionError, TimeoutError) as lost:
            moments.append(time.monotonic())
            problems.append(f"the hub lost the watcher: {lost!r}")
        sent, took = recorded(record), time.monotonic() - begin
        print(f"{len(sent):,} streams in {took:.0f} s: {len(sent) / took:,.0f}/s; ping {told}")
        for counts in (Counter(one.kind for one in sent), Counter(one.ended for one in sent)):
            print(", ".join(f"{what} {times:,}" for what, times in sorted(counts.items())))
        harmful = [one for one in sent if one.ended in (HUNG, REFUSED)]
        problems.extend(f"{one.name} ({one.kind}): {one.ended}" for one in harmful[:5])
        harmful += [one for one in sent if any(one.begin < moment and one.end > moment - 1 for moment in moments)]
        problems.extend(written(folder / "streams", harmful))
    return sent


def written(folder: Path, harmful: list[Sent]) -> list[str]:
    """Write streams to files; how to send one of them alone."""
    names = list(dict.fromkeys(one.name for one in harmful))[:MOST_FILES]
    for name in names:
        seed, _, number = name.partition("/")
        ByteFuzzer(int(seed)).stream(int(number)).write(folder)
    if not names:
        return []
    return [f"{len(names)} streams may have done it, see {folder}; send one alone by FUZZ_FILE=… ./dev long {__file__}"]


@pytest.mark.long
def test_b11_many_streams_of_bytes(tmp_path: Path) -> None:
    if FILE:
        assert campaign(tmp_path, SEED, TIMES, FILE)
        return
    sent = campaign(tmp_path, SEED, STREAMS)
    assert len(sent) == STREAMS
    assert {one.kind for one in sent} == {"requests", "head", "chunks", "upgrade", "frames", "conversation"}
    assert {"101", "200", "400", "421", "431"} <= {one.ended for one in sent}


def test_a_stream_is_the_same_for_the_same_seed_and_after_a_file(tmp_path: Path) -> None:
    one, other = ByteFuzzer(3), ByteFuzzer(3)
    for number in range(200):
        made = one.stream(number)
        assert other.stream(number) == made == Stream.read(made.write(tmp_path))
        assert made.ending in ENDINGS
    assert one.stream(5) == ByteFuzzer(3).stream(5), "whatever was made before it"
    assert one.stream(5) != ByteFuzzer(4).stream(5)
