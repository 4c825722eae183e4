"""Old logs against today's bodies: kept as files beside the tests of a flow, or read where they live.

A replay runs the body as a resume would, served from the log alone. No tool is called and nothing is written.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from loom_django import conf
from loom_django.definitions import Flow, registry
from loom_django.engine import moves
from loom_django.engine.core import Engine
from loom_django.errors import InvalidInputError, LoomError
from loom_django.kernel.events import Event
from loom_django.models import Execution
from loom_django.runtime import loom
from loom_django.stores.memory import MemoryStore
from loom_django.testing.determinism import NonDeterminismError, replay

# Of so many failures the whole text is told.
TOLD: Final = 5


def assert_replays(log: str | os.PathLike[str], /, *, flow: str | Flow[..., Any] | None = None) -> None:
    """Play a log again against the flow and version that it names, and fail if the body asks for something else.

    Args:
        log: a file that ``loom_history ID --format jsonl`` wrote (a path, or a text that ends in ".jsonl"), or
            the id of an execution in the database.
        flow: another flow or version to play it against, a Flow or an id (the version that new starts get):
            whether the log could be moved there.

    Raises:
        NonDeterminismError: the body asks for other steps, arguments or waits than the log holds.
        FlowCodeMismatchError: without ``flow``: no registered version has the recorded code.
        InvalidInputError: the file is no whole log, or has neither a park nor an end: there is nothing to play.
        ExecutionNotFoundError: no execution of that id.
    """
    from_file = not isinstance(log, str) or log.endswith(".jsonl")
    events = _events_in(Path(log)) if from_file else loom.history(str(log))
    target = None if flow is None else moves.target(registry, flow)
    if not replay(_nowhere(), events, target):
        raise InvalidInputError(f"{log} holds neither a park nor an end: there is nothing to play again")


def replay_live(flow_id: str, limit: int = 100) -> int:
    """Play the logs of live executions of a flow, the newest first, against the code that would continue them.

    Returns:
        How many were played. One that has neither parked nor ended is not.

    Raises:
        AssertionError: it names each one that would not replay, or has no code here.
    """
    engine, played = _nowhere(), 0
    failed: dict[str, Exception] = {}
    rows = Execution.objects.using(conf.get_settings().DATABASE).live().of_flow(flow_id)
    for execution_id in rows.order_by("-created_at", "pk").values_list("pk", flat=True)[:limit]:
        try:
            played += replay(engine, loom.store.read(execution_id))
        except (NonDeterminismError, LoomError) as exc:
            failed[execution_id] = exc
    if failed:
        told = "\n".join(str(exc) for exc in list(failed.values())[:TOLD])
        raise AssertionError(
            f"{len(failed)} of {len(failed) + played} do not replay: {', '.join(failed)}\n{told}"
        )
    return played


def _nowhere() -> Engine:
    """An engine over an empty store: a replay has nothing to look up, and could write nothing."""
    return Engine(MemoryStore(), conf.get_settings, registry)


def _events_in(path: Path) -> list[Event]:
    with path.open(encoding="utf-8") as lines:
        events = list(_parsed(path, (line for line in lines if line.strip())))
    if [event.sequence for event in events] != list(range(1, len(events) + 1)) or not events:
        raise InvalidInputError(
            f"{path} is no whole log: write it by manage.py loom_history ID --format jsonl, without --after"
        )
    return events


def _parsed(path: Path, lines: Iterable[str]) -> Iterable[Event]:
    for number, line in enumerate(lines, 1):
        try:
            told = json.loads(line)
            yield Event(
                execution_id=told["execution_id"],
                sequence=told["sequence"],
                kind=told["kind"],
                body=json.dumps(told["payload"]),
                is_kernel=told["is_kernel"],
            )
        except (ValueError, KeyError, TypeError) as exc:
            raise InvalidInputError(f"{path}, line {number}, is no event of a log: {exc!r}") from exc
