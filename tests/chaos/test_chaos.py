"""Chaos and storms as part of the suite: short, seeded, each on a database of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
from django.conf import settings

from tests import postgres
from tests.crash.kit import only_postgresql

SECONDS = 60


def play(what: str, *options: str) -> dict[str, Any]:
    """Run it in a process of its own, and return its account."""
    sqlite = settings.DATABASES["default"]["ENGINE"].endswith("sqlite3")
    argv = [sys.executable, "-m", "tests.chaos", what, "--database", "sqlite" if sqlite else "postgresql"]
    env = {name: value for name, value in os.environ.items() if name != postgres.URL}
    done = subprocess.run([*argv, *options], capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, f"{' '.join(argv)} failed:\n{done.stdout}\n{done.stderr[-8000:]}"
    account: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    print(account)
    return account


@pytest.mark.xdist_group("chaos")
def test_chaos():
    """A worker is killed every two seconds, PostgreSQL crashes once, and all is accounted for."""
    account = play("chaos", "--seconds", str(SECONDS), "--seed", "1")
    assert account["flows"] == 200
    assert account["kills"] >= SECONDS / 4
    assert account["restarts"] == (0 if settings.DATABASES["default"]["ENGINE"].endswith("sqlite3") else 1)


@only_postgresql
@pytest.mark.xdist_group("chaos")
def test_storm():
    """5 000 timers and 500 expired leases at once: each served once, by no more bodies than were asked for."""
    account = play("storm")
    assert (account["timers"], account["leases"]) == (5000, 500)
    assert account["connections"] > 0
