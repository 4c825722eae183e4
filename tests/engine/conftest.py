from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from datetime import timedelta
from typing import Any

import pytest

from loom_django import conf, definitions
from loom_django.engine.core import Engine, NoKeeper
from loom_django.engine.unwind import Unwind, Why
from loom_django.kernel.fold import fold
from loom_django.kernel.projection import Projection, project
from loom_django.kernel.state import ExecutionState
from loom_django.models import Execution
from loom_django.runtime import Handle, Loom
from loom_django.services.recovery import Summary, recover_abandoned
from loom_django.services.timers import TimerService
from loom_django.services.verify import columns
from loom_django.stores import store_for
from loom_django.stores.base import Commit
from loom_django.stores.memory import MemoryStore
from tests.pipes import watch_pipes


class World:
    """A runtime over one store, with a clock that a test moves."""

    def __init__(self, loom: Loom) -> None:
        self.loom = loom
        self.loom.engine.draw = lambda: 1.0
        self.shifted = timedelta()

    @property
    def engine(self) -> Engine:
        return self.loom.engine

    def kinds(self, execution_id: str) -> list[str]:
        return [event.kind for event in self.loom.history(execution_id)]

    def state(self, handle: Handle[Any] | str) -> ExecutionState:
        return self.loom.state(handle if isinstance(handle, str) else handle.id)

    def shift(self, by: timedelta) -> None:
        """Move the clock and serve nothing."""
        self.engine.store.shift_clock(by)
        self.shifted += by

    def advance(self, by: timedelta) -> None:
        """Move the clock and serve what became due, until nothing more is."""
        self.shift(by)
        service = TimerService(self.engine, lambda: self.loom.dispatcher)
        while service.tick():
            pass

    def recover(self, **options: Any) -> Summary:
        return recover_abandoned(self.loom, leases=self.engine.store, **options)

    def check(self, execution_id: str) -> None:
        """The fold of each prefix is a state, and the last one is what a fresh fold says."""
        events = self.loom.history(execution_id)
        assert [event.sequence for event in events] == list(range(1, len(events) + 1))
        for length in range(1, len(events) + 1):
            project(fold(events[:length]))


def watch_projection(store: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """After every append, whatever a test does: the row that landed is the fold of the log that landed.

    Of what an event loop lands by itself this is seen at the end, by a call of what is returned.
    """
    append, append_shared = store.append, store.append_shared
    piped: dict[str, Commit] = {}

    def check(commit: Commit) -> None:
        state = fold(store.read(commit.execution_id))
        assert stored_projection(store, commit.execution_id) == columns(project(state))

    def checked(commit: Commit) -> None:
        append(commit)
        check(commit)

    def checked_shared(commits: Sequence[Commit]) -> list[Exception | None]:
        outcomes: list[Exception | None] = append_shared(commits)
        for commit, outcome in zip(commits, outcomes, strict=True):
            if outcome is None:
                check(commit)
        return outcomes

    monkeypatch.setattr(store, "append", checked)
    monkeypatch.setattr(store, "append_shared", checked_shared)
    monkeypatch.setattr(store, "pipe", store.pipe)
    watch_pipes(store, after=lambda commits, _: piped.update({one.execution_id: one for one in commits}))

    def check_piped() -> None:
        for commit in piped.values():
            if store.status(commit.execution_id) is not None:
                check(commit)

    return check_piped


def stored_projection(store: Any, execution_id: str) -> dict[str, Any]:
    if isinstance(store, MemoryStore):
        return columns(store._tables.rows[execution_id].projection)
    names = [field.name for field in fields(Projection)]
    return dict(Execution.objects.using(store.alias).values(*names).get(pk=execution_id))


@pytest.fixture(
    params=[
        pytest.param("memory", marks=pytest.mark.once),
        pytest.param("database", marks=pytest.mark.django_db(transaction=True)),
    ]
)
def world(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """The engine over the reference store, and over the database of this pass."""
    if request.param == "memory":
        store: Any = MemoryStore()
    else:
        request.getfixturevalue("transactional_db")
        store = store_for(conf.get_settings().DATABASE)
    check_piped = watch_projection(store, monkeypatch)
    with world_over(store) as made:
        yield made
    check_piped()


@contextmanager
def world_over(store: Any) -> Iterator[World]:
    """A runtime over a store, in the place of the configured one; the flows that are declared meanwhile are forgotten."""
    loom = Loom(store, keeper=NoKeeper())
    before = definitions._bound_runtime
    definitions.bind_runtime(lambda: loom)
    known = set(definitions.registry.highest())
    made = World(loom)
    yield made
    for flow_id in set(definitions.registry.highest()) - known:
        definitions.registry.forget(flow_id)
    store.shift_clock(-made.shifted)
    definitions._bound_runtime = before
    conf._listeners.remove(loom.reset)


@pytest.fixture
def crash_at(world: World) -> Callable[[str, str], None]:
    """Have the next run end at a point of a step's life, as if the process had been killed there."""

    def arm(step: str, point: str) -> None:
        def reached(at: str, execution_id: str, step_id: str) -> None:
            if (at, step_id) == (point, step):
                world.engine.crash_point = None
                raise Unwind(Why.CRASHED)

        world.engine.crash_point = reached

    return arm
