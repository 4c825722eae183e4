"""Snapshots of long logs: taken by whoever parks or hands on an execution, trusted only where they fit the log.

Nothing hangs on one but speed. What is not there, was written by other code, stands behind another event than the
log has there, or cannot be read, is left alone, and the log is read from its start.
"""

from __future__ import annotations

import logging
from dataclasses import replace

from loom_django.engine.core import Engine
from loom_django.engine.journal import Journal
from loom_django.kernel.snapshot import FORMAT, read, seal, write
from loom_django.kernel.state import ExecutionState
from loom_django.stores.base import Loaded, Snapshot

log = logging.getLogger("loom_django.run")


def load(engine: Engine, execution_id: str) -> Loaded:
    """A log with its token; of a long one the state that a snapshot holds, and what came after it."""
    if not _every(engine):
        return engine.store.load(execution_id)
    loaded = engine.store.load(execution_id, format=FORMAT)
    if loaded.snapshot is None:
        return loaded
    state = state_of(loaded.snapshot, loaded)
    if state is not None:
        return replace(loaded, state=state)
    log.warning(
        "a snapshot does not fit its log, which is read from the start",
        extra={"execution_id": execution_id, "sequence": loaded.snapshot.sequence},
    )
    return engine.store.load(execution_id)


def state_of(snapshot: Snapshot, loaded: Loaded) -> ExecutionState | None:
    """What a snapshot holds, if it is of the log that begins with the event it stands behind."""
    newest = loaded.events[0]
    if snapshot.seal != seal(newest.execution_id, snapshot.format, newest, snapshot.body):
        return None
    try:
        return read(snapshot.body)
    except (ValueError, TypeError, LookupError):
        return None


def due(journal: Journal) -> bool:
    """True if a log that has just been appended to has grown long since its last snapshot."""
    fold, newest, every = journal.fold, journal.landed, _every(journal.engine)
    # Of a log ten times as long a tenth as often: what is written over its life stays in proportion to it.
    if not every or fold.last_sequence - journal.snapshot < max(every, journal.snapshot // 8):
        return False
    return newest is not None and newest.sequence == fold.last_sequence


def take(journal: Journal) -> None:
    """Keep the fold of a log, if it is :func:`due`.

    Best effort: the append has landed, and a failure here is logged and forgotten.
    """
    engine, fold, newest = journal.engine, journal.fold, journal.landed
    if newest is None or not due(journal):
        return
    try:
        body = write(fold)
        mark = seal(fold.execution_id, FORMAT, newest, body)
        snapshot = Snapshot(fold.execution_id, FORMAT, newest.sequence, mark, body)
        engine.store.save_snapshot(snapshot, passed=journal.snapshot)
    except Exception as exc:
        log.warning(
            "a snapshot of a long log could not be kept",
            exc_info=exc,
            extra={"execution_id": fold.execution_id},
        )
    else:
        journal.snapshot = newest.sequence


def forget(journal: Journal) -> None:
    """Drop what was kept of a log that has ended: nobody resumes it. Best effort, as above."""
    if not journal.snapshot:
        return
    try:
        journal.engine.store.drop_snapshots(journal.execution_id)
    except Exception as exc:
        log.debug("snapshots of an ended log go with its deletion: %s", exc)


def _every(engine: Engine) -> int:
    """By how many events a log grows between two snapshots; 0 for none."""
    return (engine.settings().SNAPSHOT_EVENTS or 0) if FORMAT else 0
