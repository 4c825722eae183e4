"""Retention: what is old goes, what is needed stays, and an archive gives back the log that it was given."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from django.apps import apps
from django.core.files.base import ContentFile
from django.core.files.storage import FileSystemStorage, InMemoryStorage
from django.core.management import CommandError, call_command
from django.db import connection, models

from loom_django import FlowContext, flow
from loom_django.errors import ArchiveError, OpenTransactionError
from loom_django.kernel.events import Event, Kind
from loom_django.kernel.fold import fold
from loom_django.kernel.projection import project
from loom_django.kernel.state import Status
from loom_django.models import Execution
from loom_django.runtime import loom
from loom_django.services import archive
from loom_django.services.retention import Finished, Summary, prune
from loom_django.services.verify import verify
from loom_django.stores.base import NOBODY, Commit
from tests.engine.conftest import World
from tests.engine.test_children import child_flow, waiting_flow

AGES = {"COMPLETED": 3600.0, "CANCELLED": 7200.0, "FAILED": None}
OLD = timedelta(days=1)


def run(world: World, **options: Any) -> Summary:
    return prune(world.loom, **{"ages": AGES, **options})


def there(world: World, *ids: str) -> list[str]:
    return [key for key in ids if world.engine.store.status(key) is not None]


def ended(world: World, *ids: str, flow_id: str = "r.plain") -> None:
    """Executions that have completed."""
    body = child_flow(flow_id)
    for key in ids:
        body.using(execution_id=key).start(1)


@pytest.fixture
def family(world: World) -> Callable[..., list[str]]:
    """A parent that is parked on three children, of which two have ended, all of it long ago."""

    def make(parent: str = "p") -> list[str]:
        waiting, done = waiting_flow(f"r.{parent}.waits"), child_flow(f"r.{parent}.done")

        @flow(f"r.{parent}")
        def body(ctx: FlowContext) -> Any:
            children = [ctx.start_child(done, 1), ctx.start_child(done, 2), ctx.start_child(waiting, "c")]
            outcomes = ctx.await_children(children, mode="settled")
            ctx.suspend("Go")
            return [outcome.ok for outcome in outcomes]

        body.using(execution_id=parent).start()
        world.shift(OLD)
        return [f"{parent}/r.{parent}.done#1", f"{parent}/r.{parent}.done#2", f"{parent}/r.{parent}.waits#1"]

    return make


def corrupt(world: World, execution_id: str) -> None:
    """Make a log unreadable: its second event is another's by its number."""
    store: Any = world.engine.store
    if hasattr(store, "_tables"):
        log = store._tables.logs[execution_id]
        log[1] = replace(log[1], sequence=7)
    else:
        with connection.cursor() as cursor:
            cursor.execute(
                "update loom_event set sequence = 777 where execution_id = %s and sequence = 2",
                [execution_id],
            )


# Ages.


def test_ages_are_by_status(world: World) -> None:
    """What is older than its status may be goes; what lives, is younger, or has no age stays."""
    waiting = waiting_flow("r.ages")
    ended(world, "done")
    for key in ("cancelled", "parked"):
        waiting.using(execution_id=key).start(key)
    child_flow("r.fails").using(execution_id="failed").start(-1)
    world.loom.cancel("cancelled")
    names = ("done", "cancelled", "failed", "parked")
    world.shift(timedelta(seconds=3590))
    assert run(world) == Summary()
    world.shift(timedelta(seconds=20))
    assert run(world).removed == 1
    assert there(world, *names) == ["cancelled", "failed", "parked"]
    world.shift(timedelta(hours=1))
    assert run(world).removed == 1
    world.shift(timedelta(days=9999))
    assert run(world) == Summary()
    assert there(world, *names) == ["failed", "parked"]
    assert world.loom.history("failed")


def test_many_pages_and_batches(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is looked at once, whatever is kept between them, and each batch is told."""
    monkeypatch.setattr("loom_django.services.retention._PAGE", 3)
    ids = [f"e{number}" for number in range(10)]
    ended(world, *ids)
    world.shift(OLD)
    told: list[int] = []
    done = run(
        world,
        batch_size=4,
        pins=[lambda finished: finished.id in ("e3", "e4")],
        report=lambda summary: told.append(summary.removed),
    )
    assert (done.scanned, done.removed, told) == (10, 8, [4, 8])
    assert there(world, *ids) == ["e3", "e4"]


def test_a_dry_run_changes_nothing(world: World, family: Callable[..., list[str]]) -> None:
    """It says what a run would do, archive and all."""
    ended(world, "done")
    family()
    storage = InMemoryStorage()
    said = run(world, archive=storage, dry_run=True)
    assert (said.scanned, said.removed, said.archived, len(said.pinned), said.archives) == (3, 1, 1, 2, ())
    assert there(world, "done") == ["done"]
    assert not storage.exists(archive.FOLDER)


def test_not_in_a_transaction(world: World) -> None:
    """All that it deletes would stay locked."""
    with world.engine.store.transaction(), pytest.raises(OpenTransactionError, match="prune"):
        run(world)


# Families.


def test_children_of_a_living_parent_are_pinned_at_every_moment(
    world: World, family: Callable[..., list[str]]
) -> None:
    """While it is parked on them, and until it has recorded how they ended; then they may go, and it goes on."""
    first, second, third = family()
    assert run(world).pinned == tuple((key, "pin_parked_children") for key in (first, second))
    pins: list[int] = []
    append = world.engine.store.append

    def prune_first(commit: Commit) -> None:
        if commit.execution_id == "p":
            pins.append(len(run(world).pinned))
        append(commit)

    world.engine.store.append = prune_first  # type: ignore[method-assign]
    world.loom.resume(third, event_type="Go", correlation_key="c")
    world.engine.store.append = append  # type: ignore[method-assign]
    assert pins == [2, 2]  # before its answer, and before the append that tells the ends
    world.shift(OLD)
    assert run(world).pinned == ()
    assert there(world, first, second, third, "p") == ["p"]
    world.loom.resume("p", event_type="Go")
    assert world.loom.handle("p").result() == [True, True, True]
    world.shift(OLD)
    assert run(world).removed == 1


def test_a_parent_that_parks_on_its_child_meanwhile(world: World) -> None:
    """It runs, and has not come to its wait: the child that ended long ago is pinned all the same."""
    done = child_flow("r.meanwhile.child")
    found: list[Summary] = []

    @flow("r.meanwhile")
    def body(ctx: FlowContext) -> Any:
        child = ctx.start_child(done, 4)
        ctx.suspend("Go")
        if not found:
            found.append(run(world))
        return ctx.await_child(child)

    handle = body.using(execution_id="p").start()
    world.shift(OLD)
    assert len(run(world).pinned) == 1
    world.loom.resume("p", event_type="Go")
    assert found[0].pinned == (("p/r.meanwhile.child#1", "pin_parked_children"),)
    assert handle.result() == 8


def test_children_of_a_parent_that_ended_or_is_gone_may_go(world: World) -> None:
    """Nobody will look at them."""
    done = child_flow("r.orphans.child")

    @flow("r.orphans")
    def body(ctx: FlowContext) -> None:
        ctx.start_child(done.using(on_parent_close="abandon"), 1)

    for key in ("p1", "p2"):
        body.using(execution_id=key).start()
    assert world.engine.store.delete_execution("p2")
    world.shift(OLD)
    done_all = run(world)
    assert (done_all.removed, done_all.pinned) == (3, ())


def test_an_unreadable_parent_keeps_its_family(world: World, family: Callable[..., list[str]]) -> None:
    """It is told, and the rest of the run goes on."""
    first, second, _ = family()
    ended(world, "alone")
    world.shift(OLD)
    corrupt(world, "p")
    done = run(world)
    assert (done.removed, done.kept) == (1, 2)
    [(what, why)] = done.failures
    assert what == "p"
    assert "its log cannot be read" in why
    assert there(world, first, second, "alone") == [first, second]


def test_an_unreadable_child_keeps_its_family(world: World) -> None:
    """The parent and the other children stay with it, though all of them ended long ago."""
    done = child_flow("r.rotten.child")

    @flow("r.rotten")
    def body(ctx: FlowContext, name: str) -> None:
        ctx.await_children([ctx.start_child(done, number) for number in (1, 2)])

    for key in ("bad", "good"):
        body.using(execution_id=key).start(key)
    world.shift(OLD)
    corrupt(world, "bad/r.rotten.child#2")
    done_all = run(world)
    assert (done_all.removed, done_all.kept) == (3, 3)
    assert [what for what, _ in done_all.failures] == ["bad/r.rotten.child#2"]
    assert len(there(world, "bad", "bad/r.rotten.child#1", "bad/r.rotten.child#2")) == 3


def test_a_pin_that_fails_keeps_the_family(world: World, family: Callable[..., list[str]]) -> None:
    """Its name and its error are told; the others are judged by it as before."""
    first, second, third = family()
    world.loom.cancel(third)
    world.loom.resume("p", event_type="Go")
    ended(world, "alone")
    world.shift(OLD)

    def legal_hold(finished: Finished) -> bool:
        if finished.id == second:
            raise ConnectionError("the registry does not answer")
        return finished.id == "alone"

    done = run(world, pins=[legal_hold])
    assert done.failures == ((second, "the pin legal_hold failed: the registry does not answer"),)
    assert done.pinned == (("alone", "legal_hold"),)
    assert there(world, first, second, third, "p") == [first, second, third, "p"]
    assert run(world).removed == 5


def test_a_chain_goes_together(world: World) -> None:
    """Continued members have no age of their own; a child's chain is pinned by the wait for its first member."""
    ended(world, "c", "second", "q")
    store = world.engine.store
    events, decided = store.read("c"), store.decided("c")
    assert decided is not None
    for key in ("c", "second"):
        assert store.delete_execution(key)
    continued = [*events[:-1], replace(events[-1], kind=str(Kind.EXECUTION_CONTINUED), body='{"at": 5}')]
    successor = [replace(event, execution_id="c~2") for event in events]
    for log in (continued, successor):
        commit = Commit(log[0].execution_id, tuple(log), project(fold(log)), ownership=NOBODY, new=decided)
        assert store.restore(commit)
    assert store.status("c") == Status.CONTINUED
    world.shift(OLD)
    asked: list[frozenset[str]] = []
    kept = run(world, pins=[lambda finished: bool(asked.append(finished.ids)) or "c" in finished.ids])
    assert [what for what, _ in kept.pinned] == ["c~2"]
    assert frozenset({"c", "c~2"}) in asked
    assert there(world, "c", "c~2", "q") == ["c", "c~2"]
    assert run(world).removed == 2
    assert there(world, "c", "c~2") == []


@pytest.fixture
def chain(world: World) -> str:
    """A chain of four whose newest is parked, and which has been so for long; its first three have a child each."""
    child = child_flow("r.chain.child")

    @flow("r.chain")
    def body(ctx: FlowContext, number: int) -> Any:
        if number < 4:
            ctx.start_child(child.using(execution_id=f"child-{number}"), 1)
            ctx.continue_as_new(body, number + 1)
        return ctx.suspend("Go")

    body.using(execution_id="x").start(1)
    world.shift(OLD)
    return "x"


def test_a_living_chain_is_kept_whole(world: World, chain: str) -> None:
    """What it has left behind is not old as long as it lives; what it cannot wait for any more may go."""
    summary = run(world)
    assert summary.removed == 3
    assert summary.failures == ()
    assert there(world, "child-1", "child-2", "child-3") == []
    world.loom.resume("x", event_type="Go")
    assert run(world).removed == 0
    world.shift(OLD)
    assert run(world).removed == 4
    assert there(world, "x", "x~2", "x~3", "x~4") == []


def test_what_a_living_chain_has_left_behind_may_have_an_age(world: World, chain: str) -> None:
    """All but its first and its newest member go; it is found, answered, read and awaited as before."""
    asked: list[frozenset[str]] = []
    ages = {"CONTINUED": 3600.0}
    kept = run(
        world, ages=ages, pins=[lambda finished: bool(asked.append(finished.ids)) or "x~3" in finished.ids]
    )
    assert (kept.scanned, kept.removed, len(kept.pinned)) == (2, 1, 1)
    assert asked == [frozenset({"x~2"}), frozenset({"x~3"})]
    assert run(world, ages=ages).removed == 1
    assert there(world, "x", "x~2", "x~3", "x~4") == ["x", "x~4"]
    assert run(world, ages=ages).scanned == 0
    handle = world.loom.handle("x")
    assert handle.status is Status.SUSPENDED
    if not hasattr(world.engine.store, "_tables"):
        assert list(verify(world.engine, "default")) == []
    world.loom.resume("x", event_type="Go", payload="done")
    assert handle.result(timeout=0) == "done"
    world.shift(OLD)
    assert run(world).removed == 5  # three of them children
    assert there(world, "x", "x~4") == []


def test_a_log_whose_successor_is_gone_is_told(world: World, chain: str) -> None:
    """And so is a row that tells of another chain than its log does."""
    if hasattr(world.engine.store, "_tables"):
        pytest.skip("rows of a database")
    with connection.cursor() as cursor:
        cursor.execute("delete from loom_execution where id = 'x~4'")
        cursor.execute("update loom_execution set chain = id where id = 'x~2'")
    assert sorted((problem.execution_id, problem.what) for problem in verify(world.engine, "default")) == [
        ("x~2", "chain is 'x~2', the log says 'x'"),
        ("x~2", "it was continued as x~3, which is not there"),
        ("x~3", "it was continued as x~4, which is not there"),
    ]
    list(verify(world.engine, "default", repair=True))
    assert [problem.execution_id for problem in verify(world.engine, "default")] == ["x~3"]


def test_a_row_that_the_log_contradicts_is_kept(world: World) -> None:
    """The log is the truth: what has not ended by it is told, and left alone."""
    waiting_flow("r.liar").using(execution_id="liar").start("x")
    store: Any = world.engine.store
    events = store.read("liar")
    state = fold(events)
    lie = replace(project(state), status=Status.COMPLETED, finished_at=state.at)
    if hasattr(store, "_tables"):
        store._tables.rows["liar"] = replace(store._tables.rows["liar"], projection=lie)
    else:
        models.QuerySet(Execution).filter(pk="liar").update(status="COMPLETED", finished_at=store.now())
    world.shift(OLD)
    done = run(world)
    assert done.removed == 0
    assert "see loom_verify" in dict(done.failures)["liar"]


# Archives.


def history(world: World, *ids: str) -> list[Event]:
    return [event for key in ids for event in world.engine.store.read(key)]


def test_archive_and_restore_give_the_same_log(world: World) -> None:
    """Byte by byte, with all that its start decided and a row that is the fold; what is there is refused."""
    body = child_flow("r.kept")
    ids = ["a", "b", "ü/x#1"]
    for key in ids:
        body.using(execution_id=key, priority=3, attributes={"land": "é"}).start(1)
    world.loom.record_outcome("a", "paid", {"by": "\x00\ud800"})
    world.shift(OLD)
    before, decided = history(world, *ids), [world.engine.store.decided(key) for key in ids]
    storage = InMemoryStorage()
    done = run(world, archive=storage, batch_size=2)
    assert (done.removed, done.archived, len(done.archives)) == (3, 3, 2)
    assert there(world, *ids) == []
    told = [
        archive.read_manifest(storage, name.replace(".jsonl.gz", ".manifest.json")) for name in done.archives
    ]
    assert [len(one.executions) for one in told] == [2, 1]
    assert sum(one.events for one in told) == len(before)
    assert archive.restore(world.engine, storage, "b").restored == ("b",)
    assert there(world, *ids) == ["b"]
    again = [archive.restore(world.engine, storage, name) for name in done.archives]
    assert [what for one in again for what, _ in one.refused] == ["b"]
    assert history(world, *ids) == before
    assert [world.engine.store.decided(key) for key in ids] == decided
    for key in ids:
        assert world.engine.store.status(key) == Status.COMPLETED
        world.check(key)
    if not hasattr(world.engine.store, "_tables"):
        assert list(verify(world.engine, "default")) == []


class Failing(InMemoryStorage):
    """A storage that loses something: what is written, or a byte of it."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def save(self, name: Any, content: Any, max_length: int | None = None) -> str:
        if self.how == "full":
            raise OSError("no space left")
        data = content.read()
        return super().save(name, ContentFile(data[:-1] if self.how in name else data))


@pytest.mark.parametrize(
    ("how", "says"), [("full", "no space left"), (".gz", "something else"), ("manifest", "something else")]
)
def test_nothing_is_deleted_that_was_not_read_back(world: World, how: str, says: str) -> None:
    """Neither when the storage fails nor when it gives back something else, of the file or of its manifest."""
    ended(world, "a")
    world.shift(OLD)
    with pytest.raises(ArchiveError, match=says):
        run(world, archive=Failing(how))
    assert there(world, "a") == ["a"]
    storage = InMemoryStorage()
    assert run(world, archive=storage).removed == 1


def test_a_note_that_comes_meanwhile_is_not_lost(world: World) -> None:
    """What was archived without it is not deleted; the next run archives it with the note."""
    ended(world, "a", "b")
    world.shift(OLD)

    class Noted(InMemoryStorage):
        def save(self, name: Any, content: Any, max_length: int | None = None) -> str:
            if name.endswith(".gz") and world.kinds("a")[-1] != "OUTCOME_RECORDED":
                world.loom.record_outcome("a", "paid")
            return super().save(name, content)

    storage = Noted()
    first = run(world, archive=storage)
    assert (first.removed, first.changed) == (1, 1)
    before = history(world, "a")
    assert run(world, archive=storage).removed == 1
    archive.restore(world.engine, storage, "a")
    assert history(world, "a") == before


def test_an_archive_that_was_damaged_is_refused(world: World) -> None:
    """Nothing of it is put back; nor is what has no manifest, or an id that no archive knows."""
    ended(world, "a")
    world.shift(OLD)
    storage = InMemoryStorage()
    [name] = run(world, archive=storage).archives
    data = archive._bytes(storage, name)
    storage.delete(name)
    storage.save(name, ContentFile(data[:-3]))
    for wanted in (name, "a"):
        with pytest.raises(ArchiveError, match="SHA-256"):
            archive.restore(world.engine, storage, wanted)
    storage.delete(name)
    with pytest.raises(ArchiveError, match="cannot be read"):
        archive.restore(world.engine, storage, "a")
    storage.delete(name.replace(".jsonl.gz", ".manifest.json"))
    with pytest.raises(ArchiveError, match="has no manifest"):
        archive.restore(world.engine, storage, name)
    with pytest.raises(ArchiveError, match="no manifest under loom/ names"):
        archive.restore(world.engine, storage, "a")
    assert there(world, "a") == []


def test_what_lives_can_be_put_back_too(world: World) -> None:
    """An archive of other hands may hold a park: its fence row, its wakes and its owner are made again."""
    waiting_flow("r.alive").using(execution_id="parked", deadline=timedelta(days=2)).start("x")
    store = world.engine.store
    events, decided = tuple(store.read("parked")), store.decided("parked")
    assert decided is not None
    world.loom.cancel("parked")
    assert store.delete_execution("parked")
    storage = InMemoryStorage()
    name = archive.write(storage, [archive.Whole(events, decided)], store.now().date())
    assert archive.restore(world.engine, storage, name).restored == ("parked",)
    assert [row.deadline for row in store.timers("parked")] == [False, True]
    assert store.ensure_park_fences(after="", limit=9).made == 0
    world.loom.resume("parked", event_type="Go")
    assert world.loom.handle("parked").status == Status.COMPLETED


# The commands, over the database.

on_database = pytest.mark.django_db(transaction=True)


@pytest.fixture
def archived(settings: Any, tmp_path: Path) -> Iterator[Path]:
    """``LOOM["ARCHIVE_STORAGE"]`` is a folder."""
    about = {"BACKEND": "django.core.files.storage.FileSystemStorage", "OPTIONS": {"location": str(tmp_path)}}
    settings.STORAGES = {**settings.STORAGES, "archive": about}
    settings.LOOM = {"ARCHIVE_STORAGE": "archive"}
    yield tmp_path
    loom.reset()


def command(*args: str) -> tuple[int, str]:
    out = StringIO()
    try:
        call_command(*args, stdout=out)
    except CommandError as exc:
        return exc.returncode, out.getvalue() + str(exc)
    return 0, out.getvalue()


@pytest.fixture
def old(settings: Any) -> Iterator[Callable[..., None]]:
    """Executions that completed a hundred days ago."""
    loom.reset()
    loom.store.shift_clock(-timedelta(days=100))

    def make(*ids: str) -> None:
        body = child_flow("r.old")
        for key in ids:
            body.using(execution_id=key).start(1)
        loom.store.shift_clock(timedelta(days=100))

    yield make
    from loom_django.definitions import registry

    registry.forget("r.old")
    loom.reset()


@on_database
def test_the_commands(archived: Path, old: Callable[..., None]) -> None:
    """Dry run, archive, restore by id and by name; and the exit codes of it."""
    old("a", "b")
    before = loom.history("a")
    assert command("loom_prune", "--dry-run") == (
        0,
        "scanned 2, would be removed 2, archived 0, pinned 0, kept 0, changed meanwhile 0\n",
    )
    code, said = command("loom_prune", "--archive", "--format", "json")
    told = json.loads(said)
    assert (code, told["removed"], told["archived"]) == (0, 2, 2)
    assert (archived / told["archives"][0]).exists()
    assert command("loom_restore", "a") == (0, "restored a\n")
    assert loom.history("a") == before
    code, said = command("loom_restore", told["archives"][0])
    assert code == 1
    assert "restored b" in said
    assert "refused a: there is an execution of this id" in said
    assert command("loom_restore", "nobody")[0] == 1


@on_database
def test_a_log_that_has_lost_its_row_is_not_written_over(archived: Path, old: Callable[..., None]) -> None:
    """An archive of it is refused: which of the two is right is for loom_verify, and for a person."""
    old("a")
    assert command("loom_prune", "--archive")[0] == 0
    assert command("loom_restore", "a")[0] == 0
    with connection.cursor() as cursor:
        cursor.execute("delete from loom_execution")
        cursor.execute("delete from loom_event where sequence > 1")
    assert command("loom_restore", "a")[0] == 1
    assert not Execution.objects.exists()
    assert len(loom.store.read("a")) == 1


@on_database
def test_archiving_needs_a_storage(old: Callable[..., None]) -> None:
    """Without one the command was not used as it is meant, and nothing is removed."""
    old("a")
    for args in (("loom_prune", "--archive"), ("loom_restore", "a")):
        code, said = command(*args)
        assert code == 2
        assert "ARCHIVE_STORAGE" in said
    assert loom.history("a")


@on_database
def test_a_foreign_key_that_blocks_is_named(archived: Path, old: Callable[..., None]) -> None:
    """What it refers to is neither archived nor deleted, and is told; the others go."""
    old("a", "b")

    class Receipt(models.Model):
        execution = models.ForeignKey(Execution, models.DO_NOTHING, related_name="+")

        class Meta:
            app_label = "shop"

        def __str__(self) -> str:
            return str(self.pk)

    receipts: Any = models.QuerySet(Receipt)
    try:
        with connection.schema_editor() as editor:
            editor.create_model(Receipt)
        receipts.create(execution_id="a")
        code, said = command("loom_prune", "--archive")
        assert code == 1
        assert "removed 1, archived 1, pinned 0, kept 1" in said
        assert "a: rows of shop.Receipt.execution refer to it by a foreign key" in said
        [manifest] = archive.manifests(FileSystemStorage(archived))
        assert [item["id"] for item in manifest.executions] == ["b"]
        assert set(Execution.objects.values_list("pk", flat=True)) == {"a"}
        receipts.all().delete()
        assert command("loom_prune")[0] == 0
    finally:
        with connection.schema_editor() as editor:
            editor.delete_model(Receipt)
        del apps.all_models["shop"]["receipt"]
        apps.clear_cache()


KILLED = """
import os, signal, sys
import django; django.setup()
from django.core.files.storage import FileSystemStorage
from loom_django.runtime import loom
from loom_django.services.retention import prune

point, folder = sys.argv[1:]
die = lambda: os.kill(os.getpid(), signal.SIGKILL)
delete = loom.store.delete_execution
deleted = []

def delete_or_die(execution_id, **options):
    if point == "before" or len(deleted) == 1:
        die()
    deleted.append(execution_id)
    return delete(execution_id, **options)

class Storage(FileSystemStorage):
    def _save(self, name, content):
        if point in name:
            with open(self.path("half"), "wb") as file:
                file.write(content.read()[:9])
            os.makedirs(os.path.dirname(self.path(name)), exist_ok=True)
            os.rename(self.path("half"), self.path(name))
            die()
        return super()._save(name, content)

loom.store.delete_execution = delete_or_die
prune(loom, archive=Storage(folder), batch_size=3)
"""


@on_database
@pytest.mark.parametrize(("point", "left"), [(".gz", 3), ("manifest", 3), ("before", 3), ("between", 2)])
def test_a_killed_run_loses_nothing(
    archived: Path, old: Callable[..., None], child_env: Callable[..., dict[str, str]], point: str, left: int
) -> None:
    """SIGKILL in a half-written file, between archive and deletions, and between two of them."""
    ids = ["a", "b", "c"]
    old(*ids)
    before = [loom.history(key) for key in ids]
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, point, str(archived)], env=child_env(), timeout=120, check=False
    )
    assert killed.returncode == -signal.SIGKILL
    assert Execution.objects.count() == left
    code, said = command("loom_prune", "--archive")
    assert (code, Execution.objects.count()) == (0, 0), said
    storage = FileSystemStorage(archived)
    for key in ids:
        assert archive.restore(loom.engine, storage, key).restored == (key,)
    assert [loom.history(key) for key in ids] == before


@on_database
def test_two_runs_at_once(archived: Path, old: Callable[..., None]) -> None:
    """The other one takes them away between this one's archive and its deletions: nothing is an error."""
    old("a", "b")
    storage = FileSystemStorage(archived)

    class Overtaken(FileSystemStorage):
        def save(self, name: Any, content: Any, max_length: int | None = None) -> str:
            saved: str = super().save(name, content)
            if name.endswith(".json"):
                assert prune(loom, archive=storage).removed == 2
            return saved

    done = prune(loom, archive=Overtaken(archived))
    assert (done.removed, done.changed, done.failures) == (0, 2, ())
    assert archive.restore(loom.engine, storage, "a").restored == ("a",)
