"""Starts into a queue, and starts that wait for their time."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import RFC_4122, UUID

import pytest

from loom_django import FlowContext, flow
from loom_django.errors import ExecutionConflictError, InvalidInputError
from loom_django.kernel.state import Status
from loom_django.services.dispatch import WorkerDispatcher
from loom_django.services.recovery import ReadyService
from loom_django.stores.base import Known
from loom_django.testing import override_loom
from tests.engine.conftest import World

QUEUES = {"default": {}, "mail": {"concurrency": 1}}


@pytest.fixture
def told(world: World) -> Iterator[Any]:
    """A flow that returns what it was given, with a queue to be put in."""

    @flow("so.told")
    def body(ctx: FlowContext, what: str = "x") -> str:
        return what

    with override_loom(QUEUES=QUEUES):
        yield body


def claimed(world: World, **options: Any) -> list[str]:
    found = world.engine.store.claim_ready(owner="me", token=7, ttl=60, limit=9, known=Known(None), **options)
    return [one.execution_id for one in found]


def test_a_start_goes_into_its_queue(world: World, told: Any) -> None:
    """The log and the row tell it; without the option it is the default one."""
    world.loom.dispatcher = WorkerDispatcher()
    mail, plain = told.using(queue="mail").start(), told.start()
    assert world.state(mail).options["queue"] == "mail"
    assert claimed(world, queues=["mail"]) == [mail.id]
    assert claimed(world, queues=["default"]) == [plain.id]


def test_an_id_that_is_not_given_begins_with_the_time(world: World, told: Any) -> None:
    """So that executions which start together lie together in each index; the rest of it is random."""
    before = time.time_ns() // 1_000_000
    ids = [UUID(told.start().id) for _ in range(2)]
    assert all(one.version == 7 and one.variant == RFC_4122 for one in ids)
    assert all(before <= one.int >> 80 <= time.time_ns() // 1_000_000 for one in ids)
    assert ids[0].int & (1 << 62) - 1 != ids[1].int & (1 << 62) - 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"queue": "post"}, r"'post' is not declared: add it to LOOM\[\"QUEUES\"\].*'default', 'mail'"),
        ({"queue": ""}, "is not declared"),
        ({"queue": 3}, "must be text"),
        ({"queue": "q" * 101}, "100 are allowed"),
        ({"start_at": datetime(2030, 1, 1)}, "aware datetime: give it a time zone"),
        ({"start_at": 60}, "aware datetime"),
        ({"start_at": timedelta(hours=1)}, "aware datetime"),
        ({"start_at": datetime(9999, 6, 1, tzinfo=UTC)}, "between the years"),
    ],
)
def test_what_cannot_be_is_refused_at_the_call(
    world: World, told: Any, options: dict[str, Any], message: str
) -> None:
    """Nothing is written, and it is said what to do."""
    with pytest.raises(InvalidInputError, match=message):
        told.using(execution_id="so-1", **options).start()
    assert world.engine.store.status("so-1") is None


def test_an_answer_brings_it_back_into_its_queue(world: World, told: Any) -> None:
    """So do a wake and a takeover: the row keeps its queue, and the queue's limit counts it again."""

    @flow("so.asks")
    def asks(ctx: FlowContext) -> str:
        ctx.suspend("Go")
        return "gone"

    world.loom.dispatcher = None
    handle = asks.using(queue="mail").start()
    world.loom.dispatcher = WorkerDispatcher()
    assert claimed(world) == []
    world.loom.resume(handle.id, event_type="Go")
    assert claimed(world, besides=["mail"]) == []
    assert claimed(world, queues=["mail"]) == [handle.id]


@pytest.mark.parametrize("inline", [True, False])
def test_a_delayed_start_exists_and_is_not_run_before_its_time(world: World, told: Any, inline: bool) -> None:
    """Whoever dispatches it: nobody runs it now, and somebody does then."""
    world.loom.dispatcher = None if inline else WorkerDispatcher()
    start_at = world.engine.store.now() + timedelta(hours=1)
    handle = told.using(start_at=start_at).start()
    assert handle.created
    assert handle.status is Status.PENDING
    world.shift(timedelta(minutes=59))
    assert claimed(world) == []
    assert not ReadyService(world.loom).tick()
    world.shift(timedelta(minutes=1, seconds=2))
    if inline:
        assert ReadyService(world.loom).tick()
        assert handle.result() == "x"
    else:
        assert claimed(world) == [handle.id]


def test_a_delayed_start_is_idempotent(world: World, told: Any) -> None:
    """By its id, whatever the time says now; another input is a conflict, as ever."""
    later = world.engine.store.now() + timedelta(hours=1)
    first = told.using(execution_id="so-2", start_at=later).start()
    again = told.using(execution_id="so-2", start_at=later + timedelta(hours=1)).start()
    at_once = told.using(execution_id="so-2").start()
    assert [handle.created for handle in (first, again, at_once)] == [True, False, False]
    assert at_once.status is Status.PENDING
    with pytest.raises(ExecutionConflictError):
        told.using(execution_id="so-2", start_at=later).start("y")


def test_a_start_whose_time_has_come_is_run_at_once(world: World, told: Any) -> None:
    """A time that lies behind is now."""
    handle = told.using(start_at=datetime(2020, 1, 1, tzinfo=UTC)).start()
    assert handle.result() == "x"


def test_a_length_as_deadline_counts_from_the_time_of_the_start(world: World, told: Any) -> None:
    """An execution that is to start tomorrow and may take an hour is not over today."""
    start_at = world.engine.store.now() + timedelta(days=1)
    handle = told.using(start_at=start_at, deadline=3600).start()
    (row,) = world.engine.store.timers(handle.id)
    assert row.deadline
    assert row.wake_at == start_at + timedelta(hours=1)
    world.advance(timedelta(hours=23))
    assert handle.status is Status.PENDING
    world.advance(timedelta(hours=3))
    assert handle.status is Status.FAILED


def test_using_keeps_what_it_is_not_given(world: World, told: Any) -> None:
    """A copy with a queue may be given an id later; the flow itself stays as it was."""
    mail = told.using(queue="mail", priority=3)
    changed = mail.using(execution_id="so-3", priority=4)
    assert (changed.options.queue, changed.options.priority) == ("mail", 4)
    assert (mail.options.execution_id, mail.options.priority) == (None, 3)
    assert told.options.queue is None
    assert world.loom.start(mail, execution_id="so-4").id == "so-4"
    assert world.state("so-4").options["queue"] == "mail"
