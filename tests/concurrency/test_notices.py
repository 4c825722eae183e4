"""How soon an idle loop notices, what that costs while nothing happens, and that no notice is relied on."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import pytest
from django.db import connection, transaction
from django.test.utils import CaptureQueriesContext

from loom_django import FlowContext, compat, definitions, flow
from loom_django.conf import get_settings
from loom_django.kernel.events import Kind
from loom_django.management.options import beat
from loom_django.runtime import loom
from loom_django.services.dispatch import WorkerDispatcher
from loom_django.services.loop import Loop
from loom_django.services.notices import GAP, Listener, Notifier, poll_interval
from loom_django.services.timers import TimerService
from loom_django.services.worker import WorkerService, next_in
from loom_django.testing import override_loom
from tests.crash.kit import Child, Lab, eventually, finished, history, on_postgresql, only_postgresql

# A poll so far away that whatever happens before was no poll.
NEVER = {"POLL_INTERVAL": 600}
# Seconds; what a promise in milliseconds may take on a machine that does other things too.
AT_ONCE = 5.0
# Seconds, the median of the wakes.
PROMPT = 0.05
NAPS, NAP = 15, 0.15


def listeners() -> list[int]:
    with connection.cursor() as cursor:
        cursor.execute(
            "select pid from pg_stat_activity where datname = current_database() and query ilike 'listen%%'"
        )
        return [row[0] for row in cursor.fetchall()]


def spawn_idle(lab: Lab, **settings: Any) -> Child:
    """A worker that hears, has looked for work, and has gone to sleep."""
    worker = lab.spawn("command", "run_loom_worker", loom={**NEVER, **settings})
    eventually(listeners, "the worker listens")
    return worker


@pytest.mark.parametrize("polls", [True, False])
def test_a_wake_comes_when_it_is_due(lab: Lab, polls: bool):
    """The loop sleeps until then: not until its next poll, which may be long after, and not for less."""
    if not (polls or on_postgresql()):
        polls = True  # the first look is a poll
    settings = {} if polls else NEVER
    lab.run("start", "naps", "x", args=[NAPS, NAP], loom=settings)
    worker = lab.spawn("command", "run_loom_worker", loom=settings)
    eventually(lambda: finished("x"), "it has slept enough")
    assert not worker.over
    late = [
        (event.data["at"] - event.data["wake_at"]) / 1e6
        for event in history("x")
        if event.kind == Kind.TIMER_FIRED
    ]
    assert len(late) == NAPS
    assert min(late) >= 0
    assert statistics.median(late) < PROMPT, late


@only_postgresql
def test_a_start_in_another_process_is_noticed_at_once(lab: Lab):
    """And a message; also by a process that ends right after, and each long before the next poll."""
    spawn_idle(lab)
    began = time.monotonic()
    lab.run("start", "told", "x", fresh=True)
    eventually(lambda: loom.store.status("x") == "SUSPENDED", "the start is served", patience=AT_ONCE)
    lab.run("send", "x", "note", "hello", fresh=True)
    eventually(lambda: finished("x"), "the message is served", patience=AT_ONCE)
    assert time.monotonic() - began < NEVER["POLL_INTERVAL"]


@only_postgresql
def test_a_notice_that_is_lost_costs_one_poll(lab: Lab):
    """The connection that hears is cut before each: what happens meanwhile is served, and hearing comes back."""
    worker = spawn_idle(lab, POLL_INTERVAL=1.0)
    for id in ("x", "y"):
        before = listeners()
        with connection.cursor() as cursor:
            for pid in before:
                cursor.execute("select pg_terminate_backend(%s, 5000)", [pid])
        lab.run("start", "one-idempotent", id, args=[0])
        eventually(lambda: finished(id), "it is served", patience=AT_ONCE)  # noqa: B023
        eventually(lambda: set(listeners()) - set(before), "it listens again")  # noqa: B023
    assert not worker.over


@only_postgresql
def test_polling_alone_will_do(lab: Lab):
    """As behind a transaction pooler: nobody listens, nobody sends, and all is served."""
    alone = {"NOTIFY": False}
    lab.spawn("command", "run_loom_worker", loom=alone)
    lab.run("start", "slept", "x", loom=alone)
    lab.run("start", "one-idempotent", "y", args=[0], loom=alone)
    eventually(lambda: finished("y") and loom.store.status("x") == "SUSPENDED", "both are served")
    assert listeners() == []


@pytest.fixture
def noted() -> Any:
    """A flow for a worker, and a connection that hears what is sent."""

    @flow("notices.noted")
    def body(ctx: FlowContext) -> str:
        return "x"

    loom.reset()
    loom.dispatcher = WorkerDispatcher(loom.engine.ring)
    yield body
    definitions.registry.forget("notices.noted")
    loom.reset()


@dataclass
class Ear:
    """Hears notices, with the backends that sent them."""

    connection: Any

    def hear(self, seconds: float, most: int | None = None) -> list[int]:
        return [notice.pid for notice in self.connection.notifies(timeout=seconds, stop_after=most)]


@pytest.fixture
def ear(transactional_db: None) -> Iterator[Ear]:
    with compat.connection_apart("default") as own:
        own.connection.execute("listen loom_ready")
        yield Ear(own.connection)


@only_postgresql
@pytest.mark.django_db(transaction=True)
def test_a_notice_is_none_of_the_caller_s_transaction(noted: Any, ear: Ear):
    """It is sent after the commit, by another connection; a transaction that is undone sends none."""
    with CaptureQueriesContext(connection) as sent:
        with suppress(ZeroDivisionError), transaction.atomic():
            noted.start()
            raise ZeroDivisionError
        with transaction.atomic():
            noted.start()
            assert ear.hear(2 * GAP) == []
    (sender,) = ear.hear(AT_ONCE, most=1)
    assert sender != connection.connection.info.backend_pid
    assert not [query for query in sent.captured_queries if "notify" in query["sql"]]


@only_postgresql
@pytest.mark.django_db(transaction=True)
def test_notices_go_together(noted: Any, ear: Ear):
    """A hundred starts in a row are told by a few notices, and the last start by one after it."""
    began = time.monotonic()
    for _ in range(100):
        noted.start()
    elapsed = time.monotonic() - began
    heard = ear.hear(1.0)
    assert 1 <= len(heard) <= elapsed / GAP + 3


@pytest.mark.django_db(transaction=True)
def test_an_idle_loop_asks_few_things_a_poll() -> None:
    """Is anything ready for threads, or for the event loop, is anything due, what comes next: and then it sleeps, a
    second where notices come."""
    worker = WorkerService(loom.engine, concurrency=4)
    store = loom.store
    loop = Loop(
        [beat("worker"), worker, TimerService(loom.engine, lambda: loom.dispatcher)],
        interval=lambda: poll_interval(get_settings(), store),
        after_turn=lambda: None,
        draw=lambda: 0.0,
        next_in=lambda: next_in(store, worker, timers=True),
    )
    loop.turn()  # says that it is alive, which it does not do each time
    with CaptureQueriesContext(connection) as sent:
        assert not loop.turn()
        pause = loop._pause()
    asked = [
        query["sql"] for query in sent.captured_queries if query["sql"] not in ("begin immediate", "commit")
    ]
    assert len(asked) <= (4 if on_postgresql() else 5), asked
    assert pause == 0.75 * (1.0 if on_postgresql() else 0.25)


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize(
    ("settings", "seconds"),
    [({}, (1.0, 0.25)), ({"NOTIFY": False}, (0.25, 0.25)), ({"POLL_INTERVAL": 7}, (7, 7))],
)
def test_how_often_loops_look_by_themselves(settings: dict[str, Any], seconds: tuple[float, float]) -> None:
    """Seldom where they are told, often where they are not, or as the setting says."""
    with override_loom(**settings):
        assert poll_interval(get_settings(), loom.store) == seconds[0 if on_postgresql() else 1]


@only_postgresql
@pytest.mark.django_db(transaction=True)
def test_a_notifier_outlives_a_database_that_is_away(
    ear: Ear, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    """A notice that cannot be sent is one line, no error of the caller's, and the next one is sent."""
    notifier = Notifier(loom.store, get_settings)
    failed: list[int] = []
    plain = type(loom.store).notify

    def notify(store: Any) -> None:
        if len(failed) < 3:
            failed.append(1)
            raise ConnectionError("away")
        plain(store)

    monkeypatch.setattr(type(loom.store), "notify", notify)
    for _ in range(3):
        count = len(failed)
        notifier.ring()
        eventually(lambda: len(failed) > count, "it was tried")  # noqa: B023
    notifier.ring()
    assert len(ear.hear(AT_ONCE, most=1)) == 1
    assert len([record for record in caplog.records if "could not be sent" in record.message]) == 1


@only_postgresql
@pytest.mark.django_db(transaction=True)
def test_a_listener_that_is_stopped_leaves_no_connection() -> None:
    """And one that starts has the loop look: what was said before it listened was missed."""
    heard: list[int] = []
    listener = Listener(loom.store, lambda: heard.append(1))
    listener.start()
    eventually(lambda: heard, "it has the loop look")
    assert len(listeners()) == 1
    listener.stop()
    eventually(lambda: listeners() == [], "it is gone")
    assert not listener.broken
