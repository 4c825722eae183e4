"""Real processes, and the certainty that none of them outlives the demo.

All children share one process group, which a guard leads. The guard does nothing but hold the end of a pipe; when
the pipe closes, because the demo is done or because it was killed itself, it kills the group.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

ROOT = Path(__file__).resolve().parent.parent.parent
GUARD = "import os, signal, sys; sys.stdin.buffer.read(); os.killpg(0, signal.SIGKILL)"
# A child that was asked to end is killed after so many seconds.
GRACE = 8.0
POLL = 0.05


class StageError(Exception):
    """The demo cannot go on: something did not happen in time, or a process ended that should not have."""


class Child:
    """A process of the demo's; what it prints goes to its log file."""

    def __init__(self, name: str, process: subprocess.Popen[bytes], log: Path) -> None:
        self.name = name
        self.process = process
        self.log = log
        self.expected_to_run = True

    @property
    def pid(self) -> int:
        return self.process.pid

    def kill(self) -> int:
        """SIGKILL: no handler runs, nothing is tidied up. Returns the exit code."""
        self.expected_to_run = False
        self.process.kill()
        return self.process.wait()

    def stop(self) -> None:
        """Ask it to end (SIGTERM), and kill it if it does not."""
        self.expected_to_run = False
        if self.process.poll() is None:
            self.process.terminate()
        try:
            self.process.wait(GRACE)
        except subprocess.TimeoutExpired:
            self.kill()

    def said(self, lines: int = 15) -> str:
        """The end of its log."""
        text = self.log.read_text(errors="replace").splitlines()[-lines:]
        return "\n".join(f"    {line}" for line in text)


class Troupe:
    """The children; as a context manager it leaves none behind."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self.folder = folder
        self.environment = environment
        self.children: list[Child] = []

    def __enter__(self) -> Troupe:
        # In a group of its own, so that Ctrl-C reaches the demo alone, which then ends its children in order.
        self._guard = subprocess.Popen(
            [sys.executable, "-I", "-c", GUARD],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            process_group=0,
        )
        return self

    def __exit__(self, *exc_info: object) -> None:
        try:
            for child in reversed(self.children):
                child.stop()
        finally:
            if self._guard.stdin is not None:
                self._guard.stdin.close()
            self._guard.wait()

    def start(self, name: str, *command: str) -> Child:
        """Start ``python command…`` and let it run."""
        log = self.folder / f"{name.replace(' ', '-')}.log"
        with log.open("ab") as output:
            process = subprocess.Popen(
                [sys.executable, *command],
                cwd=ROOT,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                process_group=self._guard.pid,
            )
        child = Child(name, process, log)
        self.children.append(child)
        return child

    def manage(self, name: str, *arguments: str) -> Child:
        """Start ``manage.py arguments…`` and let it run."""
        return self.start(name, str(ROOT / "manage.py"), *arguments)

    def run(self, name: str, *arguments: str, limit: float = 60) -> tuple[int, str]:
        """Run ``manage.py arguments…`` to its end; returns the exit code and what it printed."""
        child = self.manage(name, *arguments)
        child.expected_to_run = False
        try:
            code = child.process.wait(limit)
        except subprocess.TimeoutExpired:
            child.kill()
            raise StageError(f"{name} did not end within {limit:.0f} s:\n{child.said()}") from None
        return code, child.log.read_text(errors="replace").strip()

    def check(self) -> None:
        """Raise StageError if a child ended that should be running."""
        for child in self.children:
            code = child.process.poll()
            if child.expected_to_run and code is not None:
                raise StageError(f"{child.name} ended by itself (exit {code}):\n{child.said()}")


class Patience:
    """How long the demo waits: for one thing, and in all."""

    def __init__(self, troupe: Troupe, total: float) -> None:
        self._troupe = troupe
        self._end = time.monotonic() + total

    def wait_for(self, what: str, look: Callable[[], T | None], limit: float = 30) -> T:
        """Look until there is something to see, and return it.

        Raises:
            StageError: it did not come in time, or a process ended meanwhile that should not have.
        """
        began = time.monotonic()
        end = min(began + limit, self._end)
        while True:
            seen = look()
            if seen:
                return seen
            self._troupe.check()
            if time.monotonic() >= end:
                raise StageError(f"waited {time.monotonic() - began:.0f} s in vain for {what}")
            time.sleep(POLL)

    def wait_for_file(self, what: str, path: Path) -> str:
        """Wait until a file has been written; returns its content."""
        return self.wait_for(what, lambda: path.read_text() if path.exists() else None)


def end_on_sigterm() -> None:
    """Make SIGTERM an exception like Ctrl-C, so that ``finally`` blocks run."""

    def end(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, end)


def restart_with(environment: dict[str, str]) -> None:
    """Begin this program anew with other environment variables: settings are read once. Never returns."""
    sys.stdout.flush()
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, **environment})  # noqa: S606
