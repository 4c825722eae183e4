from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from django.conf import settings
from django.db import connection

from loom_django import compat
from tests import postgres


def pytest_unconfigure() -> None:
    # A process that was killed in the middle leaves SQLite's side files behind.
    if settings.DATABASES["default"]["ENGINE"].endswith("sqlite3"):
        file = Path(settings.DATABASES["default"]["NAME"])
        for left in file.parent.glob(f"loom-test-{os.getpid()}.sqlite3*"):
            left.unlink(missing_ok=True)


@pytest.fixture
def child_env() -> Callable[..., dict[str, str]]:
    """The environment in which a process that a test starts finds the test's own database.

    With `host` and `port`, PostgreSQL is reached by that address: a proxy's. The test must be one whose rows
    are committed (`django_db(transaction=True)`).
    """

    def env(*, host: str | None = None, port: int | None = None) -> dict[str, str]:
        name = str(connection.settings_dict["NAME"])
        found = {**os.environ, "DJANGO_SETTINGS_MODULE": "tests.settings"}
        if connection.vendor == "postgresql":
            url = os.environ[postgres.URL]
            found[postgres.URL] = postgres.url_with(url, host=host, port=port, database=name)
        else:
            found["LOOM_TEST_SQLITE_PATH"] = name
        return found

    return env


@pytest.fixture
def use_tasks(settings: Any) -> Iterator[Callable[..., None]]:
    """Set TASKS: a backend's class, by alias. The framework reads it once, so it is made to read it again."""
    handler = compat.django_tasks().task_backends

    def forget() -> None:
        vars(handler).clear()
        handler.__init__()

    def use(**backends: str) -> None:
        settings.TASKS = {alias: {"BACKEND": path} for alias, path in backends.items()}
        forget()

    yield use
    forget()
