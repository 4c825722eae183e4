"""Calls that judge the log as it is now: in a caller's transaction, on the wire, and through a pooler."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final
from urllib.parse import unquote, urlsplit

import pytest
from django.db import OperationalError, connection, transaction

from loom_django import FlowContext, definitions, flow
from loom_django.engine.core import NoKeeper
from loom_django.errors import OpenTransactionError, StaleFenceError
from loom_django.kernel.state import Status
from loom_django.runtime import Loom
from loom_django.stores import store_for
from loom_django.stores.base import Acquired, Commit
from loom_django.testing.conformance import Log, held_by
from tests import postgres
from tests.concurrency.proxy import Proxy, RoundTrip
from tests.crash.kit import eventually, only_postgresql
from tests.shop.models import Order
from tests.stores.rivals import InThread

pytestmark = [only_postgresql, pytest.mark.django_db(transaction=True)]

PGBOUNCER: Final = shutil.which("pgbouncer", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")
PARK: Final = 2


@pytest.fixture
def loom(monkeypatch: pytest.MonkeyPatch) -> Iterator[Loom]:
    made = Loom(store_for("default"), keeper=NoKeeper())

    @flow("conditional.asking")
    def asking(ctx: FlowContext) -> Any:
        return ctx.suspend("Go")

    monkeypatch.setattr(definitions, "_bound_runtime", lambda: made)
    yield made
    definitions.registry.forget("conditional.asking")


def parked(loom: Loom, *, token: int = 0) -> Log:
    """An execution that is parked, in the eyes of whoever writes to the store directly."""
    log = Log(f"log-{time.monotonic_ns()}", "conditional.other")
    loom.store.append(log.start(held_by()))
    for _ in range(token):
        loom.store.acquire_fence(log.id)
    loom.store.append(log.park(fence=token or None))
    return log


CALLS: Final[dict[str, Callable[[Loom, str], object]]] = {
    "resume": lambda loom, id: loom.resume(id, event_type="Go"),
    "resolve": lambda loom, id: loom.resolve(id, "step", "retry-fresh"),
    "cancel": lambda loom, id: loom.cancel(id),
    "retry_error": lambda loom, id: loom.retry_error(id),
    "retry_diverged": lambda loom, id: loom.retry_diverged(id),
    "record_outcome": lambda loom, id: loom.record_outcome(id, "found"),
}


@pytest.mark.parametrize("level", ["repeatable read", "serializable"])
@pytest.mark.parametrize("call", CALLS)
def test_in_a_block_of_one_snapshot_a_call_is_refused(loom: Loom, level: str, call: str) -> None:
    """Nothing is written, the caller's own work can be committed, and after the block it is a call as any."""
    handle = loom.start("conditional.asking")
    before = loom.history(handle.id)
    with transaction.atomic():
        with connection.cursor() as cursor:
            cursor.execute(f"set transaction isolation level {level}")
        Order.objects.create(customer="c", amount=1)
        with pytest.raises(OpenTransactionError, match=f"(?i){level}.*\n?.*after the block"):
            CALLS[call](loom, handle.id)
    assert loom.history(handle.id) == before
    assert loom.store.fence(handle.id) == 0
    assert Order.objects.count() == 1
    loom.resume(handle.id, event_type="Go", payload=7)
    assert handle.result() == 7


@pytest.mark.parametrize("call", ["resume", "cancel"])
def test_in_a_block_at_read_committed_a_call_works(loom: Loom, call: str) -> None:
    """It is the block's to commit: rolled back, it was never made."""
    handle = loom.start("conditional.asking")
    with transaction.atomic():
        CALLS[call](loom, handle.id)
        transaction.set_rollback(True)
    assert handle.status is Status.SUSPENDED
    with transaction.atomic():
        CALLS[call](loom, handle.id)
    assert handle.refresh().status is (Status.COMPLETED if call == "resume" else Status.CANCELLED)


# On the wire.


@pytest.fixture
def proxy(monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """This process reaches the server through it."""
    settings = connection.settings_dict
    with Proxy(settings["HOST"], int(settings["PORT"])) as running:
        connection.close()
        for name, value in running.address.items():
            monkeypatch.setitem(settings, name, value)
        yield running
        connection.close()


def asked(proxy: Proxy, work: Callable[[], object]) -> list[RoundTrip]:
    """The round trips that some work takes."""
    connection.ensure_connection()
    before = len(proxy.trips)
    work()
    return proxy.trips[before:]


def test_a_conditional_acquire_is_one_round_trip(loom: Loom, proxy: Proxy) -> None:
    """One simple query, which is one transaction; a refusal costs no more."""
    log = parked(loom)
    (taken,) = asked(proxy, lambda: loom.store.acquire_fence_if(log.id, fence=0, park_seq=PARK))
    assert taken.parsed == 0
    assert len(taken.texts) == 1
    assert taken.text.startswith("set transaction isolation level read committed; insert into loom_fence")
    (stale,) = asked(proxy, lambda: loom.store.acquire_fence_if(log.id, fence=0, park_seq=PARK))
    assert stale.text == taken.text
    assert loom.store.fence(log.id) == 1


def test_in_a_block_a_conditional_acquire_is_two_round_trips(loom: Loom, proxy: Proxy) -> None:
    """The second asks for the caller's isolation; the third is the block's own end."""
    log = parked(loom)
    with transaction.atomic():
        Order.objects.create(customer="c", amount=1)  # the block has begun on the server
        trips = asked(proxy, lambda: loom.store.acquire_fence_if(log.id, fence=0, park_seq=PARK))
    assert ["transaction_isolation" in trip.text for trip in trips if trip.texts] == [True, False]
    assert loom.store.fence(log.id) == 1


# Through a pooler.


@pytest.fixture
def pooled(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This process reaches the server through a PgBouncer that gives each transaction any server connection."""
    if PGBOUNCER is None:
        pytest.skip("no pgbouncer here (Debian: apt-get install pgbouncer)")
    settings, server = connection.settings_dict, urlsplit(os.environ[postgres.URL])
    folder, port = postgres._temporary_folder(), postgres._free_port()
    config = folder / "pgbouncer.ini"
    config.write_text(
        "[databases]\n"
        f"* = host={server.hostname} port={server.port} user={server.username}"
        f" password={unquote(server.password or '')}\n"
        "[pgbouncer]\n"
        f"listen_addr = 127.0.0.1\nlisten_port = {port}\nunix_socket_dir =\nauth_type = any\n"
        "pool_mode = transaction\nserver_round_robin = 1\n"
    )
    # It refuses to run as root, like the server.
    process = subprocess.Popen(
        [PGBOUNCER, "-q", str(config)], stderr=subprocess.DEVNULL, **postgres._account()
    )
    connection.close()
    monkeypatch.setitem(settings, "HOST", "127.0.0.1")
    monkeypatch.setitem(settings, "PORT", str(port))
    monkeypatch.setitem(settings, "DISABLE_SERVER_SIDE_CURSORS", True)
    try:
        eventually(lambda: process.poll() is not None or _connects(), "the pooler listens")
        assert process.poll() is None, "the pooler has ended"
        yield
    finally:
        connection.close()
        process.terminate()
        process.wait(20)
        shutil.rmtree(folder)


def _connects() -> bool:
    try:
        connection.ensure_connection()
    except OperationalError:
        return False
    return True


@pytest.mark.usefixtures("pooled")
def test_through_a_pooler_an_answer_and_an_acquire_exclude_each_other(loom: Loom) -> None:
    """Eight threads answer or acquire at once, again and again: never do both succeed."""
    for turn in range(20):
        log = parked(loom, token=turn % 2)
        fence = turn % 2
        answer = log.answer(held_by(), fence=fence or None)

        def race(number: int, log: Log = log, fence: int = fence, answer: Commit = answer) -> str:
            if number % 4 == 0:
                try:
                    loom.store.append(answer)
                except StaleFenceError:
                    return "stale"
                return "answered"
            got = loom.store.acquire_fence_if(log.id, fence=fence, park_seq=PARK)
            return "acquired" if isinstance(got, Acquired) else "refused"

        won = [one for one in in_threads(8, race) if one in ("answered", "acquired")]
        assert set(won) in ({"answered"}, {"acquired"}), won
        assert won.count("acquired") <= 1


@pytest.mark.usefixtures("pooled")
def test_through_a_pooler_a_flow_is_answered(loom: Loom) -> None:
    """From its start to its end, with the token taken on the way and a fact noted afterwards."""
    handle = loom.start("conditional.asking")
    loom.store.acquire_fence(handle.id)
    loom.resume(handle.id, event_type="Go", payload=7, fence_if_parked_at=loom.parked_at_sequence(handle.id))
    assert handle.result() == 7
    loom.record_outcome(handle.id, "found")
    assert loom.store.fence(handle.id) == 2


def in_threads(count: int, work: Callable[[int], str]) -> list[str]:
    barrier = threading.Barrier(count)

    def begin(number: int) -> str:
        connection.ensure_connection()
        barrier.wait(timeout=30)
        return work(number)

    threads = [InThread(partial(begin, number)) for number in range(count)]
    return [thread.join() for thread in threads]
