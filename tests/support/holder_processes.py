"""Processes that hold something and write down what they were told, to be killed while they are at work."""

import json
import os
import random
import signal
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol, Self

from tests.support.hold_campaign import Line, microseconds, read_record
from tests.support.module_process import ROOT
from tests.support.redis_store import server_time
from tests.support.valkey import ValkeyServer, wait_for
from tools.check_history import check_history

KILLS = int(os.environ.get("HOLD_KILLS", "16"))
HOLDERS = 8
HOUR = 3_600_000_000  # microseconds


class KeyKind(Protocol):
    """What some holds have in common. The keys of a kind begin with its name."""

    @property
    def name(self) -> str: ...

    @property
    def lenient(self) -> bool: ...


def judge(calls: Iterable[Line], limits: list[Line], kinds: Sequence[KeyKind], folder: Path) -> None:
    """Expect that the calls on each key can be explained."""
    by_key: dict[str, list[Line]] = defaultdict(list)
    for line in calls:
        by_key[line["key"]].append(line)
    found: list[str] = []
    for kind in kinds:
        keys = [key for key in by_key if key.startswith(kind.name)]
        told = Counter(f"{line['verb']} {line['said']}" for key in keys for line in by_key[key])
        print(f"{kind.name}: {told.total():,} calls: {dict(sorted(told.items()))}")
        assert told["hold passed"] > 0
        assert told["hold denied"] > 0
        for key in keys:
            history = [*limits, *sorted(by_key[key], key=lambda line: line["called"])]
            crimes = check_history(history, lenient_denials=kind.lenient)
            if crimes:
                file = folder / f"{key}.history.jsonl"
                file.write_text("".join([json.dumps(line) + "\n" for line in history]))
                found += [f"{len(crimes)} crimes, in {file}", *map(str, crimes[:10])]
    assert not found, "\n".join(found)


def starts_of_hours(raw: Any) -> list[int]:
    """The next starts of hours by a server's clock, as monotonic time."""
    ahead = server_time(raw) - microseconds()
    first = server_time(raw) // HOUR + 1
    return [(first + number) * HOUR - ahead for number in range(3)]


class Holders:
    """Processes that hold, and the files in which they write that down."""

    def __init__(self, module: str, nodes: list[ValkeyServer], folder: Path, written: int) -> None:
        self.module, self.folder, self.written = module, folder, written
        self.url = "redis+cluster://" + ",".join(f"127.0.0.1:{node.port}" for node in nodes)
        self.running: dict[int, subprocess.Popen[bytes]] = {}
        self.gone: dict[int, int] = {}
        """When nothing that was asked by it was under way any more."""
        self._clients = [node.client(decode_responses=True) for node in nodes]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.running.values():
            process.kill()
            process.wait()
        for client in self._clients:
            client.close()

    def file(self, number: int) -> Path:
        return self.folder / f"{number}.jsonl"

    def start(self, *before: int) -> None:
        number = len(self.running) + len(self.gone)
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        self.running[number] = subprocess.Popen(
            [
                *(sys.executable, "-m", self.module, self.url, str(self.file(number)), str(number)),
                *[str(self.file(one)) for one in before],
            ],
            stdin=subprocess.PIPE, cwd=ROOT, env={**os.environ, "PYTHONPATH": path},
        )  # fmt: skip

    def is_at_work(self, number: int) -> bool:
        """Whether it has made some calls. None may have ended by itself."""
        ended = [one for one, process in self.running.items() if process.poll() is not None]
        assert not ended, f"holder {ended[0]} has failed"
        return self.file(number).exists() and self.file(number).stat().st_size > self.written

    def kill(self, number: int) -> None:
        process = self.running.pop(number)
        process.kill()
        assert process.wait() == -signal.SIGKILL
        assert process.stdin is not None
        process.stdin.close()
        wait_for(lambda: not self._is_connected(number), f"end of {number}")
        self.gone[number] = microseconds()

    def _is_connected(self, number: int) -> bool:
        """Whether anything that it has sent may still be under way."""
        return any(found["name"] == f"holder-{number}" for client in self._clients for found in client.client_list())

    def kill_some(self, count: int, kills: int) -> None:
        """Let so many work at the same time, and kill one after the other, and in the end all of them."""
        chance = random.Random(7)
        for _ in range(count):
            self.start()
        for number in range(kills):
            self._kill_at_work(chance.choice(list(self.running)))
            self.start(number_before := max(self.gone, key=self.gone.__getitem__))
            if number % 20 == 19:
                print(f"{number + 1} killed, the last one was {number_before}", flush=True)
        for number in list(self.running):
            self._kill_at_work(number)

    def _kill_at_work(self, number: int) -> None:
        wait_for(lambda: self.is_at_work(number), f"work of {number}")
        self.kill(number)

    def history(self) -> list[Line]:
        """All calls. One without an answer has taken effect before its holder's connections were closed, or never."""
        return [
            {**line, "returned": gone} if line["returned"] is None else line
            for number, gone in self.gone.items()
            for line in read_record(self.file(number))
        ]
