"""A real Redis for the tests of Celery, where the machine has one: a Debian package, no wheel brings it."""

from __future__ import annotations

import shutil
import socket
import subprocess
import tempfile
import time
from pathlib import Path

import pytest

PATIENCE = 30.0

needs_redis = pytest.mark.skipif(
    shutil.which("redis-server") is None,
    reason="no redis-server on PATH (Debian: apt install redis-server); .ci/run installs it",
)

# The shell waits for the end of its input, which comes with the end of whoever started it, however that ends.
_UNTIL_THE_STARTER_ENDS = 'redis-server "$@" & read _; kill -9 $!'


class Server:
    """One server on a free loopback port that keeps nothing on disk; it may be stopped and started again."""

    def __init__(self) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: int = probe.getsockname()[1]
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        folder = Path(tempfile.gettempdir())
        options = ["--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
        self._process = subprocess.Popen(
            ["sh", "-c", _UNTIL_THE_STARTER_ENDS, "sh", *options],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            cwd=folder,
            start_new_session=True,
        )
        deadline = time.monotonic() + PATIENCE
        while not self._answers():
            if time.monotonic() > deadline:
                raise AssertionError("redis-server does not answer")
            time.sleep(0.02)

    def stop(self) -> None:
        if self._process is not None:
            self._process.communicate()
            self._process = None

    def command(self, *words: str) -> bytes:
        """Send one command and return the beginning of what comes back."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE) as connection:
            connection.sendall((" ".join(words) + "\r\n").encode())
            return connection.recv(4096)

    def _answers(self) -> bool:
        try:
            return self.command("PING") == b"+PONG\r\n"
        except OSError:
            return False
