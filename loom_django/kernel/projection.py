"""The projection of a log: what lists, filters and queues need to know of an execution without its log.

``project`` is a function of the fold and nothing else, so a row can be checked and rewritten at any time.
Ownership (ready, lease) is no part of it: that is no fact of the log.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from loom_django.kernel import codec
from loom_django.kernel.fold import Fold
from loom_django.kernel.state import ExecutionState, Status, Wait

MAX_ERROR_TEXT = 500


@dataclass(slots=True)  # one for each append; a frozen one would cost eight times as much
class Projection:
    """The columns of ``loom_execution`` that the fold decides. Times in microseconds, 0 for none."""

    status: Status
    last_sequence: int
    flow_id: str
    version: int
    flow_hash: str
    code_hash: str
    created_at: int
    updated_at: int
    finished_at: int
    current_step: str
    in_doubt: int
    waits: str  # JSON: the pending waits, [{"id", "on", "key", "wake_at", "since"}]
    waiting_on: str  # what the first of them waits on, for filters
    error_type: str
    error_message: str


def project(state: ExecutionState | Fold) -> Projection:
    """Return the projection of a state, or of a fold on its way."""
    fold = state if isinstance(state, Fold) else Fold(state)
    waits = fold.pending_waits()
    return Projection(
        fold.status,
        fold.last_sequence,
        fold.flow_id,
        fold.version,
        fold.flow_hash,
        fold.code_hash,
        fold.started_at,
        fold.at,
        fold.finished_at,
        _current_step(fold),
        len(fold.doubtful),
        _waits(waits),
        waits[0].on[:255] if waits else "",
        *(_error(fold.error) if fold.error else ("", "")),
    )


def _current_step(fold: Fold) -> str:
    """The newest step that was begun. Dicts keep the log's order, so this costs O(1) for a straight flow."""
    return next(reversed(fold.frames), "")


def _waits(waits: tuple[Wait, ...]) -> str:
    return json.dumps([_wait(wait) for wait in waits], separators=(",", ":")) if waits else "[]"


def _wait(wait: Wait) -> dict[str, Any]:
    item = {
        "id": wait.id,
        "on": wait.on,
        "key": wait.correlation_key,
        "wake_at": wait.wake_at,
        "since": wait.since,
    }
    # Which ones is for the log to say: a row is to stay small.
    if wait.children:
        item |= {"children": len(wait.children), "mode": wait.mode}
    return {**item, "budget": dict(wait.budget)} if wait.budget else item


def _error(error: Mapping[str, Any]) -> tuple[str, str]:
    message = _plain(codec.decode(error.get("message", "")))
    return str(error.get("type", ""))[:255], message[:MAX_ERROR_TEXT]


def _plain(text: Any) -> str:
    """Text that any database takes: the log keeps NUL and lone surrogates, a list of errors need not."""
    return str(text).replace("\x00", "\\x00").encode("utf-8", "backslashreplace").decode("utf-8")
