"""What a process of these tests does: each act is a call that a real process would make."""

from __future__ import annotations

import io
import itertools
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from django.core.management import call_command

from loom_django import loom
from loom_django.kernel.state import ON_MESSAGE, ON_VERDICT, TERMINAL_STATUSES
from loom_django.models import Execution
from loom_django.services.dispatch import WorkerDispatcher
from loom_django.services.recovery import recover_abandoned
from loom_django.services.timers import TimerService
from tests.crash.stage import PATIENCE, stage


def start(flow: str, *ids: str, args: tuple[Any, ...] = ()) -> list[str]:
    return [loom.start(flow, args=args, execution_id=id).status for id in ids]


def command(*argv: str) -> str:
    """A management command, in this process's main thread."""
    out = io.StringIO()
    call_command(*argv, stdout=out)
    return out.getvalue()


def resume(execution_id: str, event: str, payload: Any = None) -> str:
    return loom.resume(execution_id, event_type=event, payload=payload).status


def resolve(execution_id: str, step: str, resolution: str, **options: Any) -> str:
    return loom.resolve(execution_id, step, resolution, **options).status  # type: ignore[arg-type]


def send(execution_id: str, name: str, payload: Any = None, message_id: str | None = None) -> bool:
    return loom.send(execution_id, name, payload, message_id=message_id)


def cancel(execution_id: str) -> str:
    return loom.cancel(execution_id).status


def count_statements(act: str, *args: Any, **kwargs: Any) -> list[str]:
    """The statements that an act sends."""
    from tests.crash import acts

    before = len(stage.statements)
    getattr(acts, act)(*args, **kwargs)
    return stage.statements[before:]


def heal(*, verdict: str = "completed-with-result", answer: bool = True) -> int:
    """Bring everything to its end as a running site would: recovery, timers, workers, and people who answer.

    The clock moves on by an hour per round, so that nothing has to be waited for. Returns the rounds.
    """
    deadline = time.monotonic() + PATIENCE
    for number in itertools.count():
        if not _living():
            return number
        if time.monotonic() > deadline:
            raise TimeoutError(f"still living after {number} rounds: {_living()}")
        _round(verdict, answer)
        loom.store.shift_clock(timedelta(hours=1))
    raise AssertionError


def _living() -> list[tuple[Any, ...]]:
    rows = Execution.objects.exclude(status__in=[str(status) for status in TERMINAL_STATUSES])
    return list(rows.values_list("pk", "status", "waiting_on", "ready_at", "lease_until"))


def _round(verdict: str, answer: bool) -> None:
    while recover_abandoned(loom, leases=loom.store, limit=500).recovered:
        pass
    timers = TimerService(loom.engine, lambda: loom.dispatcher)
    while timers.tick():
        pass
    if isinstance(loom.dispatcher, WorkerDispatcher):
        call_command("run_loom_worker", "--once", "--no-timers", "--no-recovery", stdout=io.StringIO())
    if answer:
        for execution_id, *_ in _living():
            _answer(execution_id, verdict)


def _answer(execution_id: str, verdict: str) -> None:
    for wait in loom.state(execution_id).pending_waits:
        if wait.on == ON_VERDICT:
            output = {"output": "settled"} if verdict == "completed-with-result" else {}
            loom.resolve(execution_id, str(wait.correlation_key), verdict, **output)  # type: ignore[arg-type]
        elif wait.on == "Go":
            loom.resume(execution_id, event_type="Go", payload="gone")
        elif wait.on == ON_MESSAGE:
            loom.send(execution_id, str(wait.correlation_key), "hello")
        else:
            continue
        return


ACTS: dict[str, Callable[..., Any]] = {
    call.__name__: call for call in (start, command, resume, resolve, send, cancel, count_statements, heal)
}
