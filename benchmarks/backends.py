"""Where the work is done: in memory, in an SQLite file, in a PostgreSQL; each also as a bare driver loop."""

from __future__ import annotations

import json
import os
import sqlite3
import sys
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

BACKENDS: Final = ("memory", "sqlite", "sqlite-normal", "postgresql")

# The appends of one execution: of each append the events, of each event kind and body.
Appends = Sequence[Sequence[tuple[str, str]]]

_COLUMNS = "execution_id, sequence, kind, payload, writer"
_TABLE = """
    create table bare_event (
        execution_id varchar(255) not null, sequence bigint not null, kind varchar(255) not null,
        payload {json} not null, writer bigint not null, primary key (execution_id, sequence)
    )
"""


def configure(postgres_url: str | None, folder: Path) -> None:
    """Set Django up with a database of its own on each server that is to be measured, and migrate them."""
    import django
    import environ
    from django.conf import settings
    from django.core.management import call_command

    databases: dict[str, Any] = {
        "default": {
            "ENGINE": "django.db.backends.sqlite3",
            "NAME": str(folder / "loom.sqlite3"),
            "OPTIONS": {"timeout": 30},
        },
        "sqlite-normal": {
            "ENGINE": "django.db.backends.sqlite3",
            "NAME": str(folder / "normal.sqlite3"),
            "OPTIONS": {"timeout": 30, "init_command": "pragma synchronous = normal"},
        },
    }
    if postgres_url is not None:
        databases["postgresql"] = environ.Env.db_url_config(postgres_url)
    settings.configure(
        DATABASES=databases,
        DATABASE_ROUTERS=["benchmarks.backends.Router"],
        INSTALLED_APPS=[
            "django.contrib.admin",
            "django.contrib.auth",
            "django.contrib.contenttypes",
            "django.contrib.messages",
            "django.contrib.sessions",
            "loom_django",
        ],
        ROOT_URLCONF="tests.urls",
        STATIC_URL="static/",
        TEMPLATES=[{"BACKEND": "django.template.backends.django.DjangoTemplates", "APP_DIRS": True}],
        SECRET_KEY="benchmarks only",
        USE_TZ=True,
    )
    django.setup()
    for alias in databases:
        call_command("migrate", database=alias, verbosity=0)


class Router:
    """Which database Django's models are read from; the stores name theirs."""

    alias: str | None = None

    def db_for_read(self, model: Any, **hints: Any) -> str | None:
        return self.alias


@contextmanager
def reading(alias: str) -> Iterator[None]:
    """Models are read from the database of this alias meanwhile."""
    Router.alias = alias
    try:
        yield
    finally:
        Router.alias = None


@contextmanager
def database_of_its_own(server_url: str) -> Iterator[str]:
    """A database that goes away afterwards, on a server that may hold others."""
    import psycopg
    from psycopg import sql

    from tests import postgres

    name = f"loom_bench_{uuid.uuid4().hex[:12]}"
    with psycopg.connect(server_url, autocommit=True) as connection:
        connection.execute(sql.SQL("create database {}").format(sql.Identifier(name)))
        try:
            yield postgres.url_with(server_url, database=name)
        finally:
            connection.execute(sql.SQL("drop database {} with (force)").format(sql.Identifier(name)))


def make_store(backend: str) -> Any:
    """The store that loom uses there."""
    from loom_django.stores import store_for
    from loom_django.stores.memory import MemoryStore

    return MemoryStore() if backend == "memory" else store_for(_alias(backend))


def connect(backend: str) -> None:
    """Open the calling thread's connection, so that no run pays for it."""
    if backend != "memory":
        django_connection(backend).ensure_connection()


def django_connection(backend: str) -> Any:
    from django.db import connections

    return connections[_alias(backend)]


def is_sqlite(backend: str) -> bool:
    return backend.startswith("sqlite")


def _alias(backend: str) -> str:
    return "default" if backend == "sqlite" else backend


class Bare:
    """The least that keeps the same bytes as durably: one INSERT and one commit for each append."""

    def __init__(self, backend: str) -> None:
        self.backend = backend
        self._local = threading.local()
        self._lock = threading.Lock()
        self._kept: dict[str, list[tuple[Any, ...]]] = {}
        if backend != "memory":
            with django_connection(backend).cursor() as cursor:
                cursor.execute(_TABLE.format(json="json" if backend == "postgresql" else "text"))

    def write(self, appends: Appends) -> str:
        """Write one execution; return its id."""
        key, sequence = str(uuid.uuid4()), 0
        for events in appends:
            rows = [(key, sequence + place, kind, body, 1) for place, (kind, body) in enumerate(events, 1)]
            sequence += len(events)
            self._insert(key, rows)
        return key

    def read(self, key: str) -> list[Any]:
        """Read one execution's events, parsed."""
        if self.backend == "memory":
            return [json.loads(row[3]) for row in self._kept[key]]
        mark, text = ("%s", "payload::text") if self.backend == "postgresql" else ("?", "payload")
        found = self._driver().execute(
            f"select {text} from bare_event where execution_id = {mark} order by sequence", [key]
        )
        return [json.loads(row[0]) for row in found.fetchall()]

    def _insert(self, key: str, rows: list[tuple[Any, ...]]) -> None:
        if self.backend == "memory":
            with self._lock:
                self._kept.setdefault(key, []).extend(rows)
            return
        mark = "%s" if self.backend == "postgresql" else "?"
        values = ", ".join([f"({', '.join([mark] * 5)})"] * len(rows))
        self._driver().execute(
            f"insert into bare_event ({_COLUMNS}) values {values}", [value for row in rows for value in row]
        )

    def _driver(self) -> Any:
        if not hasattr(self._local, "driver"):
            self._local.driver = self._connect()
        return self._local.driver

    def _connect(self) -> Any:
        settings = django_connection(self.backend).settings_dict
        if is_sqlite(self.backend):
            driver = sqlite3.connect(settings["NAME"], isolation_level=None, timeout=30)
            driver.execute("pragma journal_mode = wal")
            driver.execute(settings["OPTIONS"].get("init_command", ""))
            return driver
        import psycopg

        names = {"host": "HOST", "port": "PORT", "user": "USER", "password": "PASSWORD", "dbname": "NAME"}
        given = {name: settings[key] for name, key in names.items() if settings[key]}
        connection = psycopg.connect(autocommit=True, **given)
        connection.prepare_threshold = 0
        return connection


def about(backend: str) -> dict[str, str]:
    """What the server says of itself, as far as it bears on a figure."""
    if backend == "memory":
        return {}
    with django_connection(backend).cursor() as cursor:
        if is_sqlite(backend):
            cursor.execute("pragma synchronous")
            return {"version": sqlite3.sqlite_version, "synchronous": str(cursor.fetchone()[0])}
        found = {}
        for name in ("server_version", "fsync", "synchronous_commit"):
            cursor.execute(f"show {name}")
            found[name] = cursor.fetchone()[0]
        return found


def say(*what: object) -> None:
    """What is measured now, for who waits for it."""
    print(time.strftime("%H:%M:%S"), *what, file=sys.stderr, flush=True)


def cpu() -> str:
    """The processor's name, and how many of it."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{os.cpu_count()} x {names[0] if names else 'unknown'}"
