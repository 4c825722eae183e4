"""A site of its own: a database, processes that serve it, and what they left in the outside world."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests import postgres
from tests.chaos.ledger import LEDGER

# How long anything here may take that is only waited for, in seconds.
PATIENCE = 120.0


class Site:
    """The database is migrated and Django is set up in this process when this is entered."""

    def __init__(self, folder: Path, server: postgres.Server | None) -> None:
        self.folder = folder
        self.server = server
        self.ledger_file = folder / "ledger"
        self.processes: list[subprocess.Popen[bytes]] = []

    def start_process(self, *argv: str) -> subprocess.Popen[bytes]:
        """A management command in a process of its own."""
        with (self.folder / f"{len(self.processes)}.log").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "django", *argv], stdout=log, stderr=subprocess.STDOUT
            )
        self.processes.append(process)
        return process

    def start_worker(self, *options: str) -> subprocess.Popen[bytes]:
        ready = str(self._ready_file(len(self.processes)))
        return self.start_process("run_loom_worker", "--ready-file", ready, *options)

    def stop_workers(self, workers: list[subprocess.Popen[bytes]]) -> None:
        """Have them drain; each is to end well."""
        for worker in workers:
            eventually(self._ready_file(self.processes.index(worker)).exists, "the worker has begun")
            worker.send_signal(signal.SIGTERM)
        for worker in workers:
            assert worker.wait(PATIENCE) == 0, f"a worker did not drain:\n{self.log_of(worker)[-4000:]}"

    def _ready_file(self, number: int) -> Path:
        return self.folder / f"{number}.ready"

    def log_of(self, process: subprocess.Popen[bytes]) -> str:
        return (self.folder / f"{self.processes.index(process)}.log").read_text(errors="replace")

    def ledger(self, kind: str) -> list[dict[str, Any]]:
        """The lines of that kind, in the order in which they were written."""
        if not self.ledger_file.exists():
            return []
        lines = [json.loads(line) for line in self.ledger_file.read_text().splitlines()]
        return [line for line in lines if line["kind"] == kind]

    def close(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
            process.wait()


@contextlib.contextmanager
def site(folder: Path, database: str) -> Iterator[Site]:
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(postgres.running()) if database == "postgresql" else None
        os.environ |= {
            "DJANGO_SETTINGS_MODULE": "tests.chaos.settings",
            "LOOM_TEST_DATABASE": database,
            "LOOM_TEST_SQLITE_PATH": str(folder / "site.sqlite3"),
            postgres.URL: server.url if server else "",
            LEDGER: str(folder / "ledger"),
        }
        import django
        from django.core.management import call_command

        django.setup()
        call_command("migrate", run_syncdb=True, verbosity=0)
        made = Site(folder, server)
        stack.callback(made.close)
        yield made


def eventually(fact: Callable[[], Any], what: str, *, instead: Callable[[], object] = lambda: "") -> Any:
    """Wait until something is so and return it; ``instead`` tells what is so if it is not."""
    deadline = time.monotonic() + PATIENCE
    while not (found := fact()):
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {PATIENCE} s: {what} {instead()}")
        time.sleep(0.1)
    return found
