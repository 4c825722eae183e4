"""What the tests of promises stand on: processes that can be killed, and what may be said of an execution.

Nothing here sleeps to let something happen: each wait is for a fact (a file, a row, a process that ended), with
a deadline that only a failing test meets.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
from django.conf import settings
from django.db import connection

from loom_django.kernel.events import AUDIT, Event, Kind
from loom_django.kernel.fold import fold
from loom_django.kernel.state import TERMINAL_STATUSES, ExecutionState, Status
from loom_django.models import Execution
from loom_django.runtime import loom
from loom_django.services.verify import verify
from tests.crash.flows import LEDGER
from tests.crash.stage import PATIENCE
from tests.shop.models import Order

KILLED = -signal.SIGKILL


def eventually(
    fact: Callable[[], Any],
    what: str,
    *,
    patience: float = PATIENCE,
    instead: Callable[[], object] = lambda: "",
) -> Any:
    """Wait until something is so and return it; ``instead`` tells what is so if it is not."""
    deadline = time.monotonic() + patience
    while not (found := fact()):
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {patience} s: {what} {instead()}")
        time.sleep(0.01)
    return found


class Zygote:
    """A process that has loaded Django and forks one for each job."""

    def __init__(self, env: dict[str, str]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.crash.child"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=env,
            bufsize=0,
        )
        self.pids: dict[int, int] = {}
        self.codes: dict[int, int] = {}
        self.stopped: set[int] = set()
        self._unread = b""

    def ask(self, job: dict[str, Any]) -> int:
        """Have a process forked; return its id."""
        assert self.process.stdin is not None
        self.process.stdin.write((json.dumps(job) + "\n").encode())
        self.listen(lambda: job["number"] in self.pids)
        return self.pids[job["number"]]

    def listen(self, until: Callable[[], bool], patience: float = PATIENCE) -> None:
        """Take in what the zygote says until something is known."""
        deadline = time.monotonic() + patience
        while not until():
            if not self.hear(deadline - time.monotonic()) and time.monotonic() > deadline:
                raise AssertionError(f"no process has done so within {patience} s")

    def hear(self, patience: float = 0.0) -> bool:
        """Take in what the zygote says next; False if it says nothing."""
        out = self.process.stdout
        assert out is not None
        if not select.select([out], [], [], max(patience, 0.0))[0]:
            return False
        came = out.read(1 << 16)
        if not came:
            raise AssertionError(f"the zygote ended with {self.process.wait()}")
        *lines, self._unread = (self._unread + came).split(b"\n")
        for line in lines:
            self._note(json.loads(line))
        return True

    def _note(self, said: dict[str, Any]) -> None:
        if "job" in said:
            self.pids[said["job"]] = said["pid"]
            self.codes.pop(said["pid"], None)  # the number of one that ended long ago
        elif "code" in said:
            self.codes[said["pid"]] = said["code"]
        else:
            self.stopped.add(said["pid"])

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(PATIENCE)
        assert self.process.stdout is not None
        self.process.stdout.close()


@dataclass
class Child:
    """One process that a test started."""

    pid: int
    out: Path
    log_file: Path
    zygote: Zygote | None = None
    process: subprocess.Popen[bytes] | None = None

    @property
    def log(self) -> str:
        return self.log_file.read_text() if self.log_file.exists() else ""

    @property
    def over(self) -> bool:
        if self.process is not None:
            return self.process.poll() is not None
        assert self.zygote is not None
        self.zygote.hear()
        return self.pid in self.zygote.codes

    def wait(self, patience: float = PATIENCE) -> int:
        """Wait for its end; the exit code, negative for a signal."""
        if self.process is not None:
            return self.process.wait(patience)
        zygote = self.zygote
        assert zygote is not None
        zygote.listen(lambda: self.pid in zygote.codes, patience)
        return zygote.codes[self.pid]

    def wait_until_stopped(self) -> None:
        zygote = self.zygote
        assert zygote is not None
        zygote.listen(lambda: self.pid in zygote.stopped)
        zygote.stopped.discard(self.pid)

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        if not self.over:
            with suppress(ProcessLookupError):
                self.signal(signal.SIGKILL)
            self.wait()

    @property
    def value(self) -> Any:
        """What its last act returned."""
        assert self.out.exists(), f"it has not finished:\n{self.log}"
        return json.loads(self.out.read_text())


@dataclass
class Lab:
    """Starts processes on the test's own database, and tells what they left."""

    folder: Path
    env: dict[str, str]
    zygote: Zygote
    loom: dict[str, Any] = field(default_factory=lambda: {"DISPATCHER": "worker"})
    children: list[Child] = field(default_factory=list)
    shift: float = 0.0
    _number: int = 0

    @property
    def ledger(self) -> Path:
        return self.folder / "ledger"

    # Processes.

    def spawn(self, act: str, *args: Any, fresh: bool = False, **options: Any) -> Child:
        """Start a process that does one act.

        Options go to the process (those named in ``_OPTIONS``), all others to the act. A ``fresh`` one is started
        from nothing, not forked.
        """
        named = {name: options.pop(name) for name in _OPTIONS if name in options}
        return self.spawn_acts([(act, args, options)], fresh=fresh, **named)

    def spawn_acts(self, acts: list[Any], *, fresh: bool = False, **options: Any) -> Child:
        """Start a process that does several acts, one after the other."""
        self._number += 1
        name = f"{self._number}-{acts[0][0]}"
        job = {
            "number": time.monotonic_ns(),
            "acts": acts,
            "out": str(self.folder / f"{name}.out"),
            "log": str(self.folder / f"{name}.log"),
            "shift": self.shift,
            **options,
            "loom": {**self.loom, **options.get("loom", {})},
            "env": {LEDGER: str(self.ledger), **options.get("env", {})},
        }
        out, log = Path(job["out"]), Path(job["log"])
        if fresh:
            # What settings are made of must be there when they are read.
            env = {**self.env, **job["env"]}
            process = subprocess.Popen([sys.executable, "-m", "tests.crash.child", json.dumps(job)], env=env)
            child = Child(process.pid, out, log, process=process)
        else:
            child = Child(self.zygote.ask(job), out, log, zygote=self.zygote)
        self.children.append(child)
        return child

    def run(self, act: str, *args: Any, expect: int = 0, **options: Any) -> Any:
        """Start a process, wait for its end, and return what its act returned."""
        child = self.spawn(act, *args, **options)
        code = child.wait()
        assert code == expect, f"{act} ended with {code}, not {expect}:\n{child.log}"
        return child.value if code == 0 and child.out.exists() else None

    def pass_time(self, seconds: float = 3600.0) -> None:
        """Move the store's clock for all processes that start from now on."""
        self.shift += seconds

    def open_gate(self, execution_id: str) -> None:
        (self.folder / f"gate-{execution_id}").touch()

    def close(self) -> None:
        for child in self.children:
            child.kill()

    # What is there afterwards.

    def effects(self, execution_id: str | None = None, step: str | None = None) -> list[dict[str, Any]]:
        """The lines of the ledger."""
        if not self.ledger.exists():
            return []
        lines = [json.loads(line) for line in self.ledger.read_text().splitlines()]
        return [
            line
            for line in lines
            if execution_id in (None, line["execution"]) and step in (None, line["step"])
        ]

    def counted(self) -> Counter[str]:
        """How often each step of the long flows ran."""
        return Counter(self.ledger.with_name("ledger-counted").read_text().split())

    def await_effect(self, execution_id: str, *, count: int = 1, step: str | None = None) -> None:
        eventually(
            lambda: len(self.effects(execution_id, step)) >= count, f"{count} effects of {execution_id}"
        )

    def await_expiry(self, *, leases: int = 1) -> None:
        """Wait until so many leases have ended by the database's clock."""
        eventually(lambda: len(loom.store.expired(limit=1000)) >= leases, f"{leases} leases have run out")


_OPTIONS = ("loom", "points", "statement", "database", "shift", "env", "carry")


# What may be said of an execution.


def history(execution_id: str) -> list[Event]:
    return loom.store.read(execution_id)


def kinds(execution_id: str) -> list[str]:
    return [event.kind for event in history(execution_id)]


def state(execution_id: str) -> ExecutionState:
    return fold(history(execution_id))


def rows_of(execution_id: str) -> int:
    """How many rows a transactional tool of that execution left."""
    return Order.objects.filter(note=execution_id).count()


Standing = Literal["absent", "finished", "parked", "ready", "held"]


def finished(execution_id: str) -> bool:
    """True once it has ended; asked in one statement, so that others may be writing."""
    return loom.store.status(execution_id) in TERMINAL_STATUSES


def standing(execution_id: str) -> Standing:
    """Which one of the four an execution is; fails if it is none, or more than one, or owes a timer.

    Several reads: not while somebody is writing.
    """
    events = history(execution_id)
    row = Execution.objects.filter(pk=execution_id).first()
    if row is None:
        assert not events, f"{execution_id} has a log and no row"
        assert not loom.store.timers(execution_id), f"{execution_id} has a timer and no row"
        return "absent"
    assert [event.sequence for event in events] == list(range(1, len(events) + 1)), "a gap in the log"
    found = fold(events)
    assert [problem.what for problem in verify(loom.engine, "default", execution_id=execution_id)] == []
    are: dict[Standing, bool] = {
        "finished": found.status in TERMINAL_STATUSES,
        "parked": found.status is Status.SUSPENDED,
        "ready": row.ready_at is not None,
        "held": row.lease_token is not None and row.lease_until is not None,
    }
    true = [name for name, holds in are.items() if holds]
    assert len(true) == 1, f"{execution_id} is {true or 'none of the four'}: {row.__dict__}"
    if true[0] == "finished":
        assert not loom.store.timers(execution_id), f"{execution_id} has ended and is owed a wake"
    return true[0]


def check_history(execution_id: str) -> list[Event]:
    """One gapless history in which each step, wait and execution has one outcome; return it."""
    events = history(execution_id)
    assert [event.sequence for event in events] == list(range(1, len(events) + 1)), kinds(execution_id)
    outcomes = Counter(
        event.data["step"] for event in events if event.kind in (Kind.STEP_COMPLETED, Kind.STEP_FAILED)
    )
    assert all(count == 1 for count in outcomes.values()), outcomes
    ends = [event.kind for event in events if event.kind in _ENDS]
    assert len(ends) <= 1, ends
    behind = kinds(execution_id)[kinds(execution_id).index(ends[0]) + 1 :] if ends else []
    assert set(behind) <= AUDIT, kinds(execution_id)
    answered = Counter(event.data["wait"] for event in events if event.kind == Kind.EXECUTION_RESUMED)
    assert all(count == 1 for count in answered.values()), answered
    assert [problem.what for problem in verify(loom.engine, "default", execution_id=execution_id)] == []
    return events


_ENDS = (Kind.EXECUTION_COMPLETED, Kind.EXECUTION_FAILED, Kind.EXECUTION_CANCELLED)


def on_postgresql() -> bool:
    return bool(connection.vendor == "postgresql")


only_postgresql = pytest.mark.skipif(
    settings.DATABASES["default"]["ENGINE"] != "django.db.backends.postgresql",
    reason="it is about connections to a server, which SQLite has none of",
)


def lines_with(text: str, what: str) -> list[str]:
    return [line for line in text.splitlines() if what in line]


def ids(prefix: str) -> Iterator[str]:
    number = 0
    while True:
        number += 1
        yield f"{prefix}-{number}"
