"""A project's processes as they are run in production: a task backend's workers, and loom's timer loop."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path

from loom_django.kernel.state import Status
from loom_django.runtime import loom
from tests.crash.flows import LEDGER
from tests.crash.kit import Lab, eventually, finished

LOOM = {
    "DISPATCHER": "tasks",
    "LEASE_TTL": 3,
    "LEASE_RENEW_INTERVAL": 0.75,
    "READY_GRACE": 1,
    "POLL_INTERVAL": 0.05,
}
TIMERS = ("-m", "django", "run_loom_timers")


def parked(execution_id: str) -> bool:
    """True once it waits for an answer; asked in one statement, as :func:`finished` is."""
    return loom.store.status(execution_id) is Status.SUSPENDED


class Site:
    """Processes on the lab's database, each started from nothing."""

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        self.lab.loom = LOOM
        self.processes: list[subprocess.Popen[bytes]] = []

    def run(self, *command: str) -> subprocess.Popen[bytes]:
        """Start one in a session of its own."""
        env = {**self.lab.env, "LOOM_TEST_LOOM": json.dumps(LOOM), LEDGER: str(self.lab.ledger)}
        with self.log.open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, *command], env=env, stdout=log, stderr=log, start_new_session=True
            )
        self.processes.append(process)
        return process

    @property
    def log(self) -> Path:
        return self.lab.folder / "site.log"

    def await_end(self, *ids: str) -> None:
        try:
            for execution_id in ids:
                eventually(partial(finished, execution_id), f"{execution_id} has ended")
        except AssertionError as exc:
            raise AssertionError(f"{exc}\n{self.log.read_text()}") from exc

    def kill(self, process: subprocess.Popen[bytes]) -> None:
        """All processes of its session at once, as when the machine goes."""
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def close(self) -> None:
        for process in self.processes:
            self.kill(process)
