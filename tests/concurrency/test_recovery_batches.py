"""A recovery pass of several beside connections that hold rows of one of them, and that are cut."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from typing import Any

import pytest
from django.db import OperationalError, connection

from loom_django import FlowContext, definitions, flow
from loom_django.engine.core import NoKeeper, random_token
from loom_django.runtime import Loom
from loom_django.services.dispatch import WorkerDispatcher
from loom_django.services.recovery import Summary, recover_abandoned
from loom_django.stores import store_for
from tests.crash.kit import only_postgresql
from tests.stores.rivals import InThread, connect, wait_until_blocked

pytestmark = [only_postgresql, pytest.mark.django_db(transaction=True)]

IDS = [f"x-{number}" for number in range(5)]


@pytest.fixture
def abandoned(monkeypatch: pytest.MonkeyPatch) -> Iterator[Loom]:
    """A runtime, and five executions whose leases are over."""
    loom = Loom(store_for("default"), keeper=NoKeeper())
    loom.dispatcher = WorkerDispatcher()

    @flow("batches")
    def body(ctx: FlowContext) -> None: ...

    monkeypatch.setattr(definitions, "_bound_runtime", lambda: loom)
    for id in IDS:
        body.using(execution_id=id).start()
    known = loom.engine.known()
    loom.store.claim_ready(owner="dead", token=random_token(), ttl=-1, limit=5, known=known)
    yield loom
    definitions.registry.forget("batches")


def ready(loom: Loom) -> list[str]:
    return sorted(lease.execution_id for lease in loom.store.stale_ready(grace=-60, limit=9))


def recover(loom: Loom) -> Summary:
    return recover_abandoned(loom, leases=loom.store)


def test_one_whose_row_is_locked_is_left_for_the_next_pass(abandoned: Loom) -> None:
    """Nobody waits for it, and the others go on."""
    with connect() as rival:
        rival.execute("select 1 from loom_execution where id = %s for update", [IDS[1]])
        assert recover(abandoned).recovered == 4
        assert ready(abandoned) == [IDS[0], *IDS[2:]]
    assert recover(abandoned).recovered == 1
    assert ready(abandoned) == IDS


def test_one_whose_fence_is_locked_holds_up_no_other(abandoned: Loom) -> None:
    """Somebody answers it in a long transaction, say: the others are handed on meanwhile, and it after that."""
    with connect() as rival:
        rival.execute("select 1 from loom_fence where execution_id = %s for update", [IDS[1]])
        run = InThread(lambda: recover(abandoned))
        wait_until_blocked()
        assert ready(abandoned) == [IDS[0], *IDS[2:]]
    assert run.join(20).recovered == 5
    assert ready(abandoned) == IDS


@pytest.mark.parametrize("call", ["take_over_all", "read_short", "acquire_fences_at", "release_all"])
def test_a_pass_whose_connection_is_cut_forgets_nobody(
    abandoned: Loom, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """It ends there, or goes on with a new connection; what it held is handed on when its leases are over."""
    plain = getattr(abandoned.store, call)

    def cut(*args: Any, **options: Any) -> Any:
        with connect(autocommit=True) as operator:
            operator.execute("select pg_terminate_backend(%s)", [connection.connection.info.backend_pid])
        return plain(*args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(abandoned.store, call, cut)
        with suppress(OperationalError):
            recover(abandoned)
    abandoned.store.shift_clock(timedelta(seconds=61))
    try:
        recover(abandoned)
        assert ready(abandoned) == IDS
        assert {abandoned.store.fence(id) for id in IDS} <= {2, 3}
    finally:
        abandoned.store.shift_clock(timedelta(seconds=-61))
