"""Everything that depends on Django's inner workings or on its version, in one place."""

from __future__ import annotations

import asyncio
import contextvars
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from typing import Any, Final

import asgiref.local
from django.db import Error, connections
from django.db.transaction import Atomic, TransactionManagementError

# What a Local of asgiref's keeps in a context is tagged with its thread, from a release on.
_Tagged: Final = getattr(asgiref.local, "_Storage", None)

# libpq's PQTRANS_INTRANS and PQTRANS_INERROR.
_OPEN: Final = (2, 3)


def refuses_queries() -> bool:
    """True where Django refuses each use of a connection, so that no transaction is open: an event loop runs."""
    return in_loop() and not os.environ.get("DJANGO_ALLOW_ASYNC_UNSAFE")


def in_loop() -> bool:
    """True where an event loop runs in this thread."""
    return asyncio._get_running_loop() is not None


def open_transaction(connection: Any) -> bool:
    """True inside any transaction, TestCase's included; does not connect to find out.

    Autocommit that is switched off without an atomic block is a transaction too.
    """
    if connection.in_atomic_block:
        return True
    return not (
        connection.settings_dict["AUTOCOMMIT"] if connection.connection is None else connection.autocommit
    )


def in_transaction(connection: Any) -> bool:
    """True inside a transaction that somebody opened on purpose; TestCase's own blocks do not count."""
    if connection.in_atomic_block:
        return not all(_is_testcase(block) for block in connection.atomic_blocks)
    return open_transaction(connection)


def begun_by_hand(connection: Any) -> bool:
    """True inside a transaction that Django knows nothing of: somebody sent BEGIN. No round trip."""
    driver = connection.connection
    if driver is None or connection.in_atomic_block:
        return False
    if connection.vendor == "sqlite":
        return bool(driver.in_transaction)
    return driver.pgconn.transaction_status in _OPEN


def in_any_transaction(connection: Any) -> bool:
    """True inside a transaction that somebody opened on purpose, in whatever way."""
    return in_transaction(connection) or begun_by_hand(connection)


def mark_if_rolled_back(connection: Any) -> None:
    """Have an atomic block know that SQLite has ended its transaction, as some errors make it do, a full disk say.

    Else what follows in the block would be committed without what came before.
    """
    driver = connection.connection
    if connection.in_atomic_block and driver is not None and not driver.in_transaction:
        connection.needs_rollback = True


def leave_transaction(connection: Any) -> bool:
    """Roll back whatever is open, TestCase's blocks excepted, and close the connection; True if that was to do.

    Where autocommit is off by the settings a connection is always in a transaction, and stays there.
    """
    if not connection.settings_dict["AUTOCOMMIT"]:
        return False
    while connection.atomic_blocks and not _is_testcase(connection.atomic_blocks[-1]):
        cause = TransactionManagementError("this block was never left")
        with suppress(Error):
            connection.atomic_blocks[-1].__exit__(type(cause), cause, None)
    if connection.in_atomic_block:
        return True
    with suppress(Error):
        connection.rollback()
    with suppress(Error):
        connection.set_autocommit(True)
    connection.close()
    return True


def leave_transactions() -> bool:
    """:func:`leave_transaction` on each of this thread's connections; True if there was one to leave."""
    left = False
    for connection in connections.all(initialized_only=True):
        if in_any_transaction(connection):
            left |= leave_transaction(connection)
    return left


def in_testcase(connection: Any) -> bool:
    """True where the connection lives in a TestCase's transaction."""
    return any(_is_testcase(block) for block in connection.atomic_blocks)


def has_testcases() -> bool:
    """True if a TestCase can have opened a transaction in this process."""
    return "django.test.testcases" in sys.modules


def in_test_run() -> bool:
    """True while Django's test environment is set up, by its own runner or by pytest-django."""
    utils = sys.modules.get("django.test.utils")
    return utils is not None and hasattr(utils._TestState, "saved_data")


def other_transaction(alias: str) -> str:
    """The alias of another database on which somebody opened a transaction on purpose, or ''."""
    open_ones = (name for name in connections if name != alias and in_transaction(connections[name]))
    return next(open_ones, "")


def _is_testcase(block: Any) -> bool:
    # Django marks the blocks that TestCase opens, for atomic(durable=True).
    return bool(block._from_testcase)


class ImmediateAtomic(Atomic):
    """``atomic()`` that takes SQLite's write lock at its beginning.

    A deferred transaction that has read cannot wait for a rival's write: its own first write fails at once.
    """

    def __init__(self, using: str) -> None:
        super().__init__(using, savepoint=True, durable=False)

    def __enter__(self) -> None:
        connection: Any = connections[self.using or "default"]
        connection.ensure_connection()  # which sets the mode; a connection that is made later would set it back
        mode, connection.transaction_mode = connection.transaction_mode, "IMMEDIATE"
        try:
            super().__enter__()
        finally:
            connection.transaction_mode = mode


def adopt_locals() -> None:
    """Have what asgiref's Locals hold in the current context, a language or a zone, seen in this thread.

    For a context that was copied on purpose from another thread, as ``sync_to_async`` does it.
    """
    if _Tagged is None:
        return
    here = threading.get_ident()
    for variable, value in contextvars.copy_context().items():
        if type(value) is _Tagged and value.thread_id != here:
            variable.set(_Tagged(here, value.data))


def renew_connections() -> None:
    """Drop this thread's connections that are broken or past their age.

    A maximum age of 0 means "until the end of the request". A thread of loom's own lives longer than any
    request, so such a connection is kept and its health is checked before its next use.
    """
    connection: Any
    for connection in connections.all(initialized_only=True):
        if connection.in_atomic_block or connection.connection is None:
            continue
        connection.queries_log.clear()  # what DEBUG keeps of each statement, a request's start would drop
        if connection.settings_dict["CONN_MAX_AGE"] == 0 and not connection.errors_occurred:
            connection.health_check_enabled = True
            connection.health_check_done = False
        else:
            connection.close_if_unusable_or_obsolete()


def leave_pools() -> None:
    """Have this thread's connections come out of no pool: it must not wait for one, nor keep one from others."""
    for alias in connections:
        if connections.settings[alias]["OPTIONS"].get("pool"):
            connections[alias] = _unpooled(alias)


@contextmanager
def without_pools() -> Iterator[None]:
    """Have no thread of this process take a connection out of a pool.

    A pool is for requests, which give back soon what they took. Threads that live long would hold all it has.
    """
    taken = {
        alias: connections.settings[alias]["OPTIONS"].pop("pool")
        for alias in connections
        if connections.settings[alias]["OPTIONS"].get("pool") and _give_back(alias)
    }
    try:
        yield
    finally:
        for alias, pool in taken.items():
            connections[alias].close()
            connections.settings[alias]["OPTIONS"]["pool"] = pool


def _give_back(alias: str) -> bool:
    """Put this thread's connection back into its pool; False if a transaction is open on it."""
    connection = connections[alias]
    if connection.in_atomic_block:
        return False
    connection.close()
    return True


def _unpooled(alias: str) -> Any:
    connection: Any = connections[alias].copy()
    connection.settings_dict["OPTIONS"].pop("pool", None)
    return connection


def django_tasks() -> Any:
    """Django's Tasks framework: its own from Django 6.0 on, else the backport; None if there is neither."""
    for name in ("django.tasks", "django_tasks"):
        with suppress(ImportError):
            return import_module(name)
    return None


def runs_no_task(backend: Any) -> str:
    """Which of the framework's two stand-ins a task backend is, "immediate" or "dummy"; "" for a real one."""
    for name in ("immediate", "dummy"):
        module = import_module(f"{django_tasks().__name__}.backends.{name}")
        if isinstance(backend, getattr(module, f"{name.title()}Backend")):
            return name
    return ""


def shared_connection(alias: str) -> Any:
    """A connection in autocommit, never out of a pool, that threads may use one after the other; not open yet."""
    connection = _unpooled(alias)
    connection.settings_dict["AUTOCOMMIT"] = True
    connection.inc_thread_sharing()
    return connection


@contextmanager
def connection_apart(alias: str) -> Iterator[Any]:
    """A connection that is nobody else's, in autocommit, never out of a pool; closed afterwards."""
    connection = _unpooled(alias)
    connection.settings_dict["AUTOCOMMIT"] = True
    try:
        connection.ensure_connection()
        yield connection
    finally:
        connection.close()


def driver_apart(alias: str) -> Any:
    """The driver's own connection, made and set up by Django, which knows nothing more of it; in autocommit.

    None where somebody watches what Django sends over it, and would not see what goes around Django.
    """
    connection = _unpooled(alias)
    connection.settings_dict["AUTOCOMMIT"] = True
    connection.ensure_connection()
    if connection.queries_logged or connection.execute_wrappers:
        connection.close()
        return None
    driver, connection.connection = connection.connection, None
    return driver
