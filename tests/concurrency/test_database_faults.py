"""Connections that go, a server that is away, another alias, forks: the work goes on, once."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from django.db import connection

from loom_django.kernel.state import Status
from loom_django.runtime import loom
from loom_django.services.schedules import execution_id_of
from tests.concurrency.proxy import Proxy
from tests.crash.kit import (
    Child,
    Lab,
    Zygote,
    check_history,
    eventually,
    finished,
    lines_with,
    only_postgresql,
    rows_of,
    standing,
    state,
)

SHORT = {"LEASE_TTL": 0.5, "LEASE_RENEW_INTERVAL": 0.1, "POLL_INTERVAL": 0.05}
# Seconds without a server; "make outage" has a minute.
OUTAGE = float(os.environ.get("LOOM_TEST_OUTAGE", "3"))
# A worker has five services, a body, a renewing and a listening thread, each trying again after 0.5, 1, 2 … seconds.
MOST_ATTEMPTS = 8 * (3 + OUTAGE / 3)


@pytest.fixture
def proxy(lab: Lab) -> Iterator[Proxy]:
    settings = connection.settings_dict
    with Proxy(settings["HOST"], int(settings["PORT"])) as running:
        yield running


def cut_all_connections() -> int:
    """As a load balancer or an administrator would, for all but the test's own."""
    with connection.cursor() as cursor:
        cursor.execute(
            "select count(pg_terminate_backend(pid)) from pg_stat_activity "
            "where datname = current_database() and pid <> pg_backend_pid()"
        )
        return int(cursor.fetchone()[0])


def await_idle(worker: Child) -> None:
    """Wait until the worker has its connection and has looked for work once."""
    eventually(lambda: _connections() > 0, "the worker is connected")


def _connections() -> int:
    with connection.cursor() as cursor:
        cursor.execute(
            "select count(*) from pg_stat_activity "
            "where datname = current_database() and pid <> pg_backend_pid() and state = 'idle'"
        )
        return int(cursor.fetchone()[0])


# A pool that is smaller than what a worker has at work, as the one of ``"pool": True`` is.
POOL = {"OPTIONS": {"pool": {"min_size": 1, "max_size": 1, "timeout": 0.2}}}


@only_postgresql
@pytest.mark.parametrize(
    "database",
    [
        {"CONN_MAX_AGE": 0},
        {"CONN_MAX_AGE": 60},
        {"CONN_MAX_AGE": None},
        pytest.param({"OPTIONS": {"pool": True}}, id="pool"),
    ],
)
def test_connections_that_are_cut_while_idle(lab: Lab, database: dict[str, Any]):
    """Whatever CONN_MAX_AGE is, the first query after the cut ends no worker and fails no step."""
    worker = lab.spawn("command", "run_loom_worker", loom=SHORT, database=database)
    for number in range(2):
        await_idle(worker)
        eventually(cut_all_connections, "there was a connection to cut")
        lab.run("start", "played", f"x-{number}", database=database)
        eventually(lambda: loom.store.status(f"x-{number}") is Status.SUSPENDED, "it is served")  # noqa: B023
    assert not worker.over
    for number in range(2):
        assert rows_of(f"x-{number}") == 1
        assert len(lab.effects(f"x-{number}")) == 4
        check_history(f"x-{number}")


@only_postgresql
def test_a_small_pool_starves_no_loop_and_no_renewal(lab: Lab):
    """Django's pool is for requests: each thread of a worker keeps a connection that no other one waits for."""
    names = [f"x-{number}" for number in range(6)]
    starter = lab.spawn("start", "gate", *names, database=POOL, fresh=True)
    assert starter.wait() == 0, starter.log
    assert not lines_with(starter.log, "WARNING "), "telling the workers waits for no request"
    worker = lab.spawn("command", "run_loom_worker", loom=SHORT, database=POOL)
    eventually(lambda: len(lab.effects()) == len(names), "all are at work", instead=lambda: worker.log)
    for name in names:
        held = loom.store.held(name)
        eventually(lambda: _renewed(name, held), "its lease is renewed", instead=lambda: worker.log)  # noqa: B023
    for name in names:
        lab.open_gate(name)
    eventually(lambda: all(map(finished, names)), "all end", instead=lambda: worker.log)
    assert len(lab.effects()) == 2 * len(names)
    assert not lines_with(worker.log, "WARNING "), worker.log
    assert not lines_with(worker.log, "ERROR "), worker.log


@only_postgresql
def test_a_body_that_holds_the_whole_pool_has_its_lease_renewed(lab: Lab):
    """Inline, in a process whose pool has one connection: the renewal waits for none of it."""
    child = lab.spawn("start", "gate", "x", loom={**SHORT, "DISPATCHER": "inline"}, database=POOL)
    lab.await_effect("x")
    held = loom.store.held("x")
    eventually(lambda: _renewed("x", held), "the lease is renewed", patience=10, instead=lambda: child.log)
    lab.open_gate("x")
    assert child.wait() == 0, child.log
    assert finished("x")


@only_postgresql
def test_connections_that_are_cut_between_two_steps(lab: Lab):
    """A step does not notice; its outcome is written on a new connection, and so is the renewal."""
    lab.run("start", "gate", "x", loom=SHORT)
    worker = lab.spawn("command", "run_loom_worker", loom=SHORT)
    lab.await_effect("x")
    eventually(cut_all_connections, "there was a connection to cut")
    lab.open_gate("x")
    eventually(lambda: finished("x"), "it goes on")
    assert [line["step"] for line in lab.effects("x")] == ["gated", "charge"]
    assert not worker.over
    check_history("x")


@only_postgresql
def test_connections_that_are_cut_inside_a_transaction(lab: Lab):
    """A transactional step that loses its connection left nothing, and runs again."""
    lab.run("start", "gate-in-transaction", "x", loom=SHORT)
    worker = lab.spawn("command", "run_loom_worker", loom=SHORT)
    lab.await_effect("x")
    eventually(cut_all_connections, "there was a connection to cut")
    lab.open_gate("x")
    eventually(lambda: finished("x"), "it goes on")
    assert state("x").status is Status.COMPLETED, worker.log
    assert len(lab.effects("x")) == 2
    assert rows_of("x") == 1
    check_history("x")


@only_postgresql
def test_a_server_that_is_away_for_a_while(lab: Lab, proxy: Proxy):
    """Few attempts, few lines, and everything works when it is back: loops, a step in hand, its renewal.

    What fell due meanwhile is late and not lost: a sleep's end, and the occurrence of a schedule.
    """
    declared: Any = ("declare_schedule", ["* * * * *"], {"catch_up": "all"})
    due = datetime(2026, 6, 1, 3, tzinfo=UTC)
    seen = (due - timedelta(seconds=20)).isoformat()
    assert lab.spawn_acts([declared, ("look_at_schedules", [[seen]], {})]).wait() == 0
    lab.shift = (due - datetime.now(UTC)).total_seconds() - OUTAGE
    lab.run("start", "gate", "x")
    lab.run("start", "naps", "z", args=[1, OUTAGE])
    ready = lab.folder / "ready"
    command: Any = ("command", ["run_loom_worker", "--ready-file", str(ready)], {})
    worker = lab.spawn_acts([declared, command], database=proxy.address)
    lab.await_effect("x")
    eventually(lambda: healthy(ready) is True, "the worker says that all is well")
    before = proxy.connections
    with proxy.down():
        eventually(lambda: healthy(ready) is False, "the worker says that all is not well")
        _let_pass(OUTAGE / 2)
        lab.open_gate("x")
        _let_pass(OUTAGE / 2)
    attempts = proxy.refused
    assert 0 < attempts <= MOST_ATTEMPTS, attempts
    lab.run("start", "one-idempotent", "y", args=[0])
    for id in ("x", "y", "z", execution_id_of("s", due)):
        eventually(lambda: finished(id), f"{id} is served", instead=lambda: worker.log)  # noqa: B023
    eventually(lambda: healthy(ready) is True, "the worker says that all is well again")
    assert not worker.over
    assert proxy.connections > before
    assert len(lines_with(worker.log, "ERROR")) <= MOST_LINES, worker.log
    # An append is sent again for as long as the lease was.
    assert [line["step"] for line in lab.effects("x")] == ["gated", "charge"]
    check_history("x")


@only_postgresql
@pytest.mark.parametrize("flow", ["gate", "async-gate"])
def test_a_worker_that_is_told_to_end_while_the_server_is_away(lab: Lab, proxy: Proxy, flow: str):
    """It ends, though a step hangs and nothing can be handed back, and says so; the lease's end hands it on."""
    lab.run("start", flow, "x")
    argv = ("run_loom_worker", "--grace", "0.2")
    worker = lab.spawn("command", *argv, database=proxy.address, fresh=True)
    lab.await_effect("x")
    with proxy.down():
        worker.signal(signal.SIGTERM)
        assert worker.wait() == 1, worker.log
    assert len(lines_with(worker.log, "could not be handed back")) == 1, worker.log
    assert standing("x") == "held"
    lab.open_gate("x")
    lab.pass_time()
    lab.run("heal")
    assert state("x").status is Status.COMPLETED
    check_history("x")


# One from each service every half a minute.
MOST_LINES = 5 * (1 + OUTAGE // 30)


def healthy(file: Path) -> bool | None:
    return bool(json.loads(file.read_text())["healthy"]) if file.exists() else None


def _let_pass(seconds: float) -> None:
    """The outage itself has a length; nothing is waited for."""
    time.sleep(seconds)


def test_another_alias(
    child_env: Callable[..., dict[str, str]], zygotes: dict[str, Zygote], tmp_path: Path, lab: Lab
):
    """With loom and its flows on an alias of their own, "default" is asked nothing: it would refuse."""
    env = {**lab.env, "LOOM_TEST_ALIAS": "loom"}
    apart = Lab(tmp_path, env, zygotes.setdefault("alias", Zygote(env)))
    orphan = apart.spawn(
        "start", "played", "z", loom={"DISPATCHER": "inline"}, points=[("after-effect", "book", 1, "die")]
    )
    orphan.wait()
    apart.run("start", "played", "x", loom={"DISPATCHER": "inline"})
    apart.run("start", "played", "y")
    apart.run("command", "run_loom_worker", "--once")
    apart.pass_time()
    apart.run("command", "loom_recover")
    apart.run("command", "run_loom_timers", "--once")
    apart.run("command", "run_loom_worker", "--once")
    apart.run("command", "loom_census")
    apart.run("command", "loom_verify")
    apart.run("heal")
    for id in "xyz":
        assert standing(id) == "finished"
        assert rows_of(id) == 1
        check_history(id)
    apart.close()


def test_a_step_that_forks(lab: Lab):
    """A child that a step forks and that ends as any process does takes nothing of its parent's with it."""
    lab.run("start", "forks", "x")
    lab.run("command", "run_loom_worker", "--once")
    assert state("x").status is Status.COMPLETED, state("x").error
    assert len(lab.effects("x")) == 3
    check_history("x")


def test_a_process_that_forked_after_it_ran_something(lab: Lab):
    """The child renews its own leases: it has neither the thread nor the leases of its parent."""
    lab.open_gate("first")
    child = lab.spawn("start_in_a_fork", "gate", "first", "second", loom={**SHORT, "DISPATCHER": "inline"})
    lab.await_effect("second")
    held = loom.store.held("second")
    assert held is not None
    assert held.owner.split(":")[1] != str(child.pid)
    eventually(lambda: _renewed("second", held), "the lease is renewed in the fork")
    lab.open_gate("second")
    assert child.wait() == 0, child.log
    assert child.value == 0, child.log
    assert {state(id).status for id in ("first", "second")} == {Status.COMPLETED}
    assert len(lab.effects("second")) == 2


def _renewed(id: str, before: Any) -> bool:
    now = loom.store.held(id)
    return now is not None and now.token == before.token and now.until > before.until
