"""Snapshots of long logs: a resume costs the tail, and what does not fit the log is never believed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from loom_django import FlowContext, StepContext, flow, tool
from loom_django.engine import snapshots
from loom_django.engine.outside import open_journal
from loom_django.kernel.fold import Fold
from loom_django.kernel.snapshot import FORMAT, seal, write
from loom_django.kernel.state import Status
from loom_django.models import Execution
from loom_django.services.verify import verify
from loom_django.stores.base import Snapshot
from loom_django.testing import override_loom
from tests.engine.conftest import World

CALLS: list[int] = []


@tool
def work(ctx: StepContext, number: int) -> dict[str, int]:
    CALLS.append(number)
    return {"number": number}


@flow("snapshots.long", steps=[work])
def long(ctx: FlowContext, between: int, parks: int) -> int:
    total = 0
    for park in range(parks):
        total += sum(ctx.run(work, park * between + number)["number"] for number in range(between))
        total += ctx.suspend("More")
    return total


@pytest.fixture(autouse=True)
def often() -> Iterator[None]:
    CALLS.clear()
    with override_loom(SNAPSHOT_EVENTS=10):
        yield


@contextmanager
def reading(world: World, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """How many events each look at a log has read."""
    seen: list[int] = []
    store: Any = world.engine.store

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def read(*args: Any, **kwargs: Any) -> Any:
            found = call(*args, **kwargs)
            seen.append(len(found.events))
            return found

        return read

    with monkeypatch.context() as patch:
        patch.setattr(store, "load", counted(store.load))
        yield seen


def kept(world: World, execution_id: str) -> Snapshot | None:
    return world.engine.store.load(execution_id, format=FORMAT).snapshot


def put(world: World, snapshot: Snapshot) -> None:
    world.engine.store.save_snapshot(snapshot, passed=0)


def more(world: World, execution_id: str) -> None:
    world.loom.resume(execution_id, event_type="More", payload=1)


def test_a_resume_reads_the_tail_alone(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long the log has grown; what the body is given is the same."""
    handle = world.loom.start(long, args=(8, 6))
    assert (taken := kept(world, handle.id)) is not None
    assert taken.sequence == len(world.loom.history(handle.id))
    with reading(world, monkeypatch) as seen:
        for _ in range(6):
            more(world, handle.id)
    assert max(seen) <= 20
    assert world.loom.state(handle.id).result == sum(range(48)) + 6
    assert sorted(CALLS) == list(range(48))
    assert kept(world, handle.id) is None, "nobody resumes what has ended"
    world.check(handle.id)


def test_a_short_log_has_none(world: World) -> None:
    """Nor has any log where they are turned off."""
    assert kept(world, world.loom.start(long, args=(1, 1)).id) is None
    with override_loom(SNAPSHOT_EVENTS=None):
        assert kept(world, world.loom.start(long, args=(8, 1)).id) is None


def edited(snapshot: Snapshot, log: list[Any]) -> Snapshot:
    return replace(snapshot, body=snapshot.body.replace('"number":7', '"number":8'))


def unreadable(snapshot: Snapshot, log: list[Any]) -> Snapshot:
    body = "[" + snapshot.body
    return replace(snapshot, body=body, seal=seal(snapshot.execution_id, FORMAT, log[-1], body))


def of_an_event_that_was_replaced(snapshot: Snapshot, log: list[Any]) -> Snapshot:
    other = replace(log[-1], writer=log[-1].writer + 1)
    return replace(snapshot, seal=seal(snapshot.execution_id, FORMAT, other, snapshot.body))


def of_another_execution(snapshot: Snapshot, log: list[Any]) -> Snapshot:
    return replace(snapshot, seal=seal("another", FORMAT, log[-1], snapshot.body))


def at_another_place(snapshot: Snapshot, log: list[Any]) -> Snapshot:
    return replace(snapshot, sequence=snapshot.sequence - 1)


def beyond_the_end(snapshot: Snapshot, log: list[Any]) -> Snapshot:
    return replace(snapshot, sequence=snapshot.sequence + 100)


@pytest.mark.parametrize(
    "spoiled",
    [
        edited,
        unreadable,
        of_an_event_that_was_replaced,
        of_another_execution,
        at_another_place,
        beyond_the_end,
    ],
)
def test_what_does_not_fit_the_log_is_not_believed(world: World, spoiled: Callable[..., Snapshot]) -> None:
    """The log is read from its start, and the next snapshot is a good one again."""
    handle = world.loom.start(long, args=(8, 2))
    log = world.loom.history(handle.id)
    good = kept(world, handle.id)
    assert good is not None
    put(world, spoiled(good, log))
    more(world, handle.id)
    more(world, handle.id)
    assert world.loom.state(handle.id).result == sum(range(16)) + 2
    assert sorted(CALLS) == list(range(16))


def test_a_snapshot_of_other_code_neither_serves_nor_goes_at_once(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two releases side by side each have their own; what is passed by a second one of the other goes."""
    handle = world.loom.start(long, args=(8, 5))
    mine = kept(world, handle.id)
    with monkeypatch.context() as patch, reading(world, monkeypatch) as seen:
        patch.setattr(snapshots, "FORMAT", "other code")
        more(world, handle.id)
        assert seen == [18]
        assert kept(world, handle.id) == mine
        seen.clear()
        more(world, handle.id)
        assert seen == [1]
        assert kept(world, handle.id) is None
    for _ in range(3):
        more(world, handle.id)
    assert world.loom.state(handle.id).result == sum(range(40)) + 5
    assert sorted(CALLS) == list(range(40))


def test_a_snapshot_that_cannot_be_kept_is_in_nobodys_way(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The park has landed, and the execution goes on without one."""

    def refuse(snapshot: Snapshot, *, passed: int) -> None:
        raise RuntimeError("no room")

    monkeypatch.setattr(world.engine.store, "save_snapshot", refuse)
    handle = world.loom.start(long, args=(8, 1))
    assert "could not be kept" in caplog.text
    assert world.state(handle).status is Status.SUSPENDED
    more(world, handle.id)
    assert world.loom.state(handle.id).result == sum(range(8)) + 1


def test_an_id_that_was_begun_anew_has_nothing_of_the_old_log(world: World) -> None:
    """Not even where the old snapshot came back behind the deletion."""
    handle = world.loom.start(long, args=(8, 1), execution_id="anew")
    old = kept(world, handle.id)
    assert old is not None
    more(world, handle.id)
    assert world.engine.store.delete_execution(handle.id)
    with override_loom(SNAPSHOT_EVENTS=None):
        world.loom.start(long, args=(9, 1), execution_id="anew")
    put(world, old)
    more(world, handle.id)
    assert world.loom.state(handle.id).result == sum(range(9)) + 1


def test_a_fork_and_a_cancel_read_the_log_itself(world: World) -> None:
    """A snapshot that lies, as only the code could, changes neither."""
    handle = world.loom.start(long, args=(8, 2))
    log = world.loom.history(handle.id)
    lie = Fold(world.state(handle))
    lie.flow_id = "a lie"
    body = write(lie)
    put(world, Snapshot(handle.id, FORMAT, len(log), seal(handle.id, FORMAT, log[-1], body), body))
    assert open_journal(world.engine, snapshots.load(world.engine, handle.id)).fold.flow_id == "a lie"
    assert world.state(world.loom.fork(handle.id, from_step="work")).flow_id == "snapshots.long"
    assert world.state(handle).flow_id == "snapshots.long"


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("spoiled", [edited, of_another_execution])
def test_verify_tells_of_a_bad_snapshot_and_repair_drops_it(
    world: World, spoiled: Callable[..., Snapshot]
) -> None:
    """One that is good is told of by nobody."""
    if not hasattr(world.engine.store, "alias"):
        pytest.skip("rows are a database's")
    alias = Execution.objects.db
    handle = world.loom.start(long, args=(8, 1))
    good = kept(world, handle.id)
    assert good is not None
    assert list(verify(world.engine, alias)) == []
    put(world, spoiled(good, world.loom.history(handle.id)))
    (problem,) = verify(world.engine, alias, repair=True)
    assert problem.what == "its snapshot at event 18 cannot be trusted, and is not read"
    assert list(verify(world.engine, alias)) == []
    assert kept(world, handle.id) is None
