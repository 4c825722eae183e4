"""What a process of these tests does: each act is a call that a real process would make."""

from __future__ import annotations

import gc
import importlib
import io
import itertools
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from django.core.management import call_command
from django.db import connections, transaction

from loom_django import LoomError, loom, schedule
from loom_django.engine.unwind import Unwind, Why
from loom_django.errors import FlowCodeMismatchError
from loom_django.kernel.state import ON_MESSAGE, ON_VERDICT, TERMINAL_STATUSES
from loom_django.models import Execution
from loom_django.services.dispatch import TasksDispatcher, WorkerDispatcher
from loom_django.services.recovery import recover_abandoned
from loom_django.services.schedules import ScheduleService
from loom_django.services.timers import TimerService
from loom_django.stores import sql
from loom_django.tasks import run_task
from tests.crash import edits
from tests.crash.stage import PATIENCE, stage, wait_for
from tests.shop.models import Order

# Runs the tasks that are enqueued in the database, then ends.
TASK_WORKER = ("db_worker", "--batch", "--no-startup-delay", "--interval", "0")


def start(flow: str, *ids: str, args: tuple[Any, ...] = (), **options: Any) -> list[str]:
    return [loom.start(flow, args=args, execution_id=id, **options).status for id in ids]


def start_until(execution_id: str, when: str) -> str:
    return loom.start("until", args=(datetime.fromisoformat(when),), execution_id=execution_id).status


def command(*argv: str) -> str:
    """A management command, in this process's main thread."""
    out = io.StringIO()
    try:
        call_command(*argv, stdout=out)
    finally:
        sys.stdout.write(out.getvalue())
    return out.getvalue()


def enqueue(execution_id: str, copies: int) -> None:
    """Send messages about an execution, as a broker that delivers twice would."""
    for _ in range(copies):
        run_task().enqueue(execution_id=execution_id)


def resume(execution_id: str, event: str, payload: Any = None) -> str:
    return loom.resume(execution_id, event_type=event, payload=payload).status


def resolve(execution_id: str, step: str, resolution: str, **options: Any) -> str:
    return loom.resolve(execution_id, step, resolution, **options).status  # type: ignore[arg-type]


def send(execution_id: str, name: str, payload: Any = None, message_id: str | None = None) -> bool:
    return loom.send(execution_id, name, payload, message_id=message_id)


def begin_edited() -> dict[str, list[str]]:
    """Begin the executions of the edit table under the flows as they were; one in three is cut off in a step."""
    importlib.import_module("tests.crash.edits.before")

    def cut_off(point: str, execution_id: str, step: str) -> None:
        if (point, step) == ("after-effect", "charge"):
            raise Unwind(Why.CRASHED)

    loom.engine.crash_point = cut_off
    for edit, guard, state in edits.executions():
        loom.start(
            edits.flow_id(edit, guard), args=(state,), execution_id=edits.execution_id(edit, guard, state)
        )
    return edits.identities()


def deploy_edited() -> dict[str, list[str]]:
    """Go on with them under the flows as they are now: recovery, the timer loop, and an answer to each park."""
    importlib.import_module("tests.crash.edits.after")
    recover_abandoned(loom, leases=loom.store, limit=1000)
    command("run_loom_timers", "--once")
    for edit, guard, state in edits.executions():
        if state == "parked":
            with suppress(FlowCodeMismatchError):
                loom.resume(edits.execution_id(edit, guard, state), event_type="go")
    return edits.identities()


def send_many(execution_id: str, sender: str, count: int) -> int:
    """Send numbered messages at full speed; how many of them were new."""
    return sum(
        loom.send(execution_id, "numbered", [sender, number], message_id=f"{sender}-{number}")
        for number in range(count)
    )


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
    elif isinstance(loom.dispatcher, TasksDispatcher):
        call_command(*TASK_WORKER, stdout=io.StringIO())
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


def work_while_starting(flow: str, count: int, prefix: str) -> int:
    """A worker with recovery in this process, while another thread of it starts executions in a tight loop."""

    def start_all() -> None:
        try:
            ids = [f"{prefix}-{number}" for number in range(count)]
            for id in ids:
                loom.start(flow, args=(0,), execution_id=id)
            deadline = time.monotonic() + PATIENCE
            while _living() and time.monotonic() < deadline:
                time.sleep(0.02)
        finally:
            connections.close_all()
            os.kill(os.getpid(), signal.SIGTERM)

    starter = threading.Thread(target=start_all)
    starter.start()
    call_command("run_loom_worker", stdout=io.StringIO())
    starter.join()
    return len(_living())


def recover_until(file: str) -> int:
    """Recovery passes without a pause, until a file is there."""
    recovered = 0
    while not Path(file).exists():
        recovered += recover_abandoned(loom, leases=loom.store).recovered
    return recovered


def cancel_until(file: str) -> int:
    """Cancel whatever lives, without a pause, until a file is there."""
    cancelled = 0
    while not Path(file).exists():
        for execution_id, *_ in _living():
            with suppress(LoomError):
                loom.cancel(execution_id)
                cancelled += 1
    return cancelled


def write_orders(count: int, prefix: str) -> int:
    """What a web process does meanwhile: rows, and starts in the same transaction."""
    for number in range(count):
        with transaction.atomic():
            Order.objects.create(customer="web", amount=1, note="web")
            loom.start("played", execution_id=f"{prefix}-{number}")
    return count


def in_thread(act: str, *args: Any) -> Any:
    """An act in a thread that is not the main one."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(ACTS[act](*args))
        finally:
            connections.close_all()

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return found[0]


def break_lease_keeper() -> None:
    """From now on the thread that renews this process's leases dies at its first renewal."""

    def tick() -> None:
        raise MemoryError("no more")

    loom.engine.keeper.tick = tick  # type: ignore[attr-defined]


def break_bodies() -> None:
    """From now on a thread of this process that runs bodies dies when it has one."""
    from loom_django.services.worker import WorkerService

    def run(self: Any, claim: Any, events: Any) -> None:
        raise MemoryError("no more")

    WorkerService._run = run  # type: ignore[method-assign]


def break_listener() -> None:
    """From now on the thread of this process that hears notices dies when it begins to."""

    def listen() -> None:
        raise SystemExit

    loom.store.listen = listen  # type: ignore[assignment,method-assign]


def sleep_many(count: int, prefix: str) -> dict[str, Any]:
    """Have a worker of this process park so many executions, and measure it after half of them and after all."""
    loom.start("slept", execution_id=f"{prefix}-warm-up")
    measured = []
    for half in range(2):
        for number in range(count // 2):
            loom.start("slept", execution_id=f"{prefix}-{half}-{number}")
        call_command("run_loom_worker", "--once", stdout=io.StringIO())
        gc.collect()
        resident = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
        measured.append(resident)
    threads = [thread.name for thread in threading.enumerate() if thread.name.startswith("loom-body")]
    return {"resident": measured, "threads": threads}


def start_in_a_fork(flow: str, first: str, second: str) -> int:
    """Run one execution here and another one in a forked child, which has the lease thread of neither."""
    loom.start(flow, execution_id=first)
    connections.close_all()
    pid = os.fork()
    if not pid:
        code = 70
        try:
            loom.start(flow, execution_id=second)
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def declare_schedule(cron: str, **options: Any) -> str:
    """A schedule of this process, "s"; it starts the flow "idle"."""
    return schedule("s", flow="idle", cron=cron, args=[0], **options).id


def set_clock(seconds: float, file: str | None = None) -> None:
    """Have this process's clock be so many seconds ahead of the host's; with a file, from when that is there."""

    class Shifted(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return datetime.now(tz) + timedelta(seconds=seconds)

    def move() -> None:
        if file is not None:
            wait_for(Path(file))
        true, true_ns = time.time, time.time_ns
        time.time = lambda: true() + seconds  # type: ignore[assignment]
        time.time_ns = lambda: true_ns() + round(seconds * 1e9)  # type: ignore[assignment]
        sql.datetime = Shifted  # type: ignore[misc,attr-defined]

    if file is None:
        move()
    else:
        threading.Thread(target=move, daemon=True).start()


def look_at_schedules(
    instants: list[str], *, skew: float = 0.0, folder: str | None = None, nodes: int = 1
) -> int:
    """Look at schedules at these instants of the store's clock, with a clock that is so many seconds ahead.

    With a folder all nodes begin each look together. Returns how many executions this one started.
    """
    service = ScheduleService(loom.engine, lambda: loom.dispatcher)
    for number, instant in enumerate(instants):
        loom.store.shift_clock(datetime.fromisoformat(instant) - loom.store.now() + timedelta(seconds=skew))
        if folder is not None:
            _meet(Path(folder), number, nodes)
        while service.tick():
            pass
    return service.started


def _meet(folder: Path, number: int, nodes: int) -> None:
    """Go on when all nodes have come to this point."""
    (folder / f"met-{number}-{os.getpid()}").touch()
    deadline = time.monotonic() + PATIENCE
    while len(list(folder.glob(f"met-{number}-*"))) < nodes:
        if time.monotonic() > deadline:
            raise AssertionError(f"not all of {nodes} nodes have come to look {number}")
        time.sleep(0.001)


ACTS: dict[str, Callable[..., Any]] = {
    call.__name__: call
    for call in (
        start, start_until, command, enqueue, resume, resolve, send, send_many, cancel, count_statements, heal, work_while_starting,
        declare_schedule, look_at_schedules, set_clock,
        recover_until, cancel_until, write_orders, in_thread, break_lease_keeper, break_bodies,
        break_listener, sleep_many, start_in_a_fork, begin_edited, deploy_edited,
    )
}  # fmt: skip
