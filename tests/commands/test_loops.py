"""The commands that run around executions: what they print, what they exit with."""

from __future__ import annotations

import gc
import json
import logging
from collections.abc import Iterator
from datetime import timedelta
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.db import models

from loom_django import EffectInDoubt, FlowContext, StepContext, definitions, flow, loom, tool
from loom_django.engine.unwind import Unwind, Why
from loom_django.kernel.state import Status
from loom_django.models import Execution
from loom_django.services import garbage
from loom_django.services.dispatch import WorkerDispatcher
from loom_django.testing import override_loom

pytestmark = pytest.mark.django_db(transaction=True)


@tool
def step(ctx: StepContext) -> str:
    return ctx.idempotency_key


@pytest.fixture
def flows() -> Iterator[Any]:
    """A flow that sleeps for a minute, and the configured runtime reset afterwards."""

    @flow("cmd.sleeper", steps=[step])
    def sleeper(ctx: FlowContext) -> str:
        key = ctx.run(step)
        ctx.sleep(60)
        return key

    loom.reset()
    yield sleeper
    definitions.registry.forget("cmd.sleeper")
    loom.reset()


def run(name: str, *args: Any, **options: Any) -> str:
    out = StringIO()
    call_command(name, *args, stdout=out, stderr=StringIO(), **options)
    return out.getvalue()


def test_a_worker_says_that_it_runs_and_what_may_need_a_person(flows: Any, caplog: Any) -> None:
    """Whoever starts one sees that it is up; a doubt and a failure are lines, without what errors may tell."""

    @tool(idempotent=False)
    def wire(ctx: StepContext) -> None:
        raise EffectInDoubt("secret")

    @flow("cmd.doubt", steps=[wire])
    def doubt(ctx: FlowContext) -> None:
        ctx.run(wire)

    @flow("cmd.broken")
    def broken(ctx: FlowContext) -> None:
        raise KeyError("secret")

    loom.dispatcher = WorkerDispatcher()
    doubt.using(execution_id="d").start()
    broken.using(execution_id="b").start()
    logger = logging.getLogger("loom_django")
    logger.addHandler(
        caplog.handler
    )  # a project's own; a command that finds none shows the log on its stderr
    try:
        with caplog.at_level(logging.INFO, logger="loom_django"):
            run("run_loom_worker", "--once", "--concurrency", "3")
    finally:
        logger.removeHandler(caplog.handler)
        definitions.registry.forget("cmd.doubt")
        definitions.registry.forget("cmd.broken")
    said = [record.getMessage() for record in caplog.records]
    assert "a worker runs, 3 bodies at a time, of all queues" in said
    assert "an effect is in doubt" in said
    assert "an execution has failed: builtins.KeyError" in said
    assert not [line for line in said if "secret" in line]


def test_a_worker_that_runs_once_drives_executions_to_their_park_and_past_it(flows: Any) -> None:
    """--once runs what is ready and due, then ends."""
    loom.dispatcher = WorkerDispatcher()
    handle = flows.using(execution_id="w1").start()
    assert "1 executions claimed" in run("run_loom_worker", "--once")
    assert handle.status == Status.SUSPENDED
    loom.store.shift_clock(timedelta(seconds=61))
    assert "1 executions claimed" in run("run_loom_worker", "--once")
    assert handle.result() == "w1:step"


def test_a_worker_collects_garbage_seldom(flows: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bodies run with the thresholds of a worker, and the command's caller gets its own back."""
    before: Any = gc.get_threshold()
    seen: list[int] = []
    monkeypatch.setattr(loom.engine, "crash_point", lambda *what: seen.append(gc.get_threshold()[0]))
    loom.dispatcher = WorkerDispatcher()
    flows.using(execution_id="w0").start()
    run("run_loom_worker", "--once")
    assert set(seen) == {garbage.YOUNG}
    assert gc.get_threshold() == before


@override_loom(QUEUES={"mail": {"concurrency": 1}, "bank": {}})
def test_a_worker_of_some_queues_leaves_the_others(flows: Any) -> None:
    """--queues names what is served; a name that is not declared is exit code 2."""
    loom.dispatcher = WorkerDispatcher()
    mail, bank, plain = (flows.using(queue=queue).start() for queue in ("mail", "bank", None))
    assert "2 executions claimed" in run("run_loom_worker", "--once", "--queues", "mail, bank")
    assert (mail.status, bank.status, plain.status) == (
        Status.SUSPENDED,
        Status.SUSPENDED,
        Status.PENDING,
    )
    with pytest.raises(CommandError, match="'post' is not declared") as refused:
        run("run_loom_worker", "--once", "--queues", "mail,post")
    assert refused.value.returncode == 2
    assert "1 executions claimed" in run("run_loom_worker", "--once")


def test_a_worker_without_timers_leaves_them_to_others(flows: Any) -> None:
    """--no-timers wakes nobody; run_loom_timers does."""
    loom.dispatcher = WorkerDispatcher()
    handle = flows.start()
    run("run_loom_worker", "--once")
    loom.store.shift_clock(timedelta(seconds=61))
    run("run_loom_worker", "--once", "--no-timers")
    assert handle.status == Status.SUSPENDED
    assert "1 timers fired" in run("run_loom_timers", "--once")
    assert handle.status == Status.RUNNING


def test_the_timer_loop_runs_bodies_under_the_inline_dispatcher(flows: Any) -> None:
    """Inline, the timer loop is the one process beside the web server."""
    handle = flows.start()
    loom.store.shift_clock(timedelta(seconds=61))
    run("run_loom_timers", "--once")
    assert handle.status == Status.COMPLETED


def test_a_worker_ends_after_as_many_executions_as_it_was_asked_for(flows: Any, tmp_path: Path) -> None:
    """--max-executions bounds what one process does; --ready-file tells of its progress."""
    loom.dispatcher = WorkerDispatcher()
    for _ in range(3):
        flows.start()
    ready = tmp_path / "ready"
    assert "2 executions claimed" in run(
        "run_loom_worker", "--max-executions", "2", "--interval", "0.05", "--ready-file", str(ready)
    )
    assert Execution.objects.suspended().count() == 2
    assert Execution.objects.ready().count() == 1
    assert json.loads(ready.read_text())["healthy"] is True


def test_recovery_tells_what_it_did_and_what_it_would_do(flows: Any) -> None:
    """--dry-run changes nothing; --format json is for machines."""

    def crash(point: str, execution_id: str, step_id: str) -> None:
        if point == "in-effect":
            raise Unwind(Why.CRASHED)

    loom.engine.crash_point = crash
    handle = flows.using(execution_id="r1").start()
    loom.engine.crash_point = None
    loom.store.shift_clock(timedelta(seconds=61))
    assert "r1: lease of" in run("loom_recover", "--dry-run")
    assert "0 would be recovered" in run("loom_recover", "--dry-run", "--stale-after", "3600")
    assert (
        json.loads(run("loom_recover", "--dry-run", "--format", "json"))["candidates"][0]["execution_id"]
        == "r1"
    )
    assert loom.store.held("r1") is not None
    summary = json.loads(run("loom_recover", "--format", "json"))
    assert (summary["candidates"], summary["recovered"], summary["failed"]) == (1, 1, 0)
    assert handle.status == Status.SUSPENDED


def test_recovery_that_fails_for_one_exits_1(flows: Any) -> None:
    """An execution of a flow that nobody here has is named, and the exit code says so."""
    loom.engine.crash_point = _always_crash
    flows.using(execution_id="r2").start()
    loom.engine.crash_point = None
    definitions.registry.forget("cmd.sleeper")
    loom.store.shift_clock(timedelta(seconds=61))
    with pytest.raises(CommandError, match="1 executions") as failed:
        run("loom_recover")
    assert failed.value.returncode == 1


def _always_crash(point: str, execution_id: str, step_id: str) -> None:
    raise Unwind(Why.CRASHED)


def test_the_census_counts_what_is_held_ready_and_never_leased(flows: Any) -> None:
    """By status, by ownership, by version; unwatched is told apart from orphaned."""
    flows.start()
    loom.dispatcher = WorkerDispatcher()
    flows.start()
    counted = json.loads(run("loom_census", "--by-version", "--format", "json"))
    assert counted["by_status"]["SUSPENDED"] == 1
    assert counted["by_status"]["PENDING"] == 1
    assert counted["ownership"]["never_leased"] == 1
    assert counted["ownership"]["held"] == 0
    assert {row["count"] for row in counted["by_version"]} == {1}
    assert json.loads(run("loom_census", "--flow", "none", "--format", "json"))["by_status"]["PENDING"] == 0
    assert "never taken up" in run("loom_census")


def test_verify_finds_a_row_that_disagrees_and_repairs_it(flows: Any) -> None:
    """The log is the truth: a row that somebody edited is found, and rewritten from the log."""
    handle = flows.start()
    assert "0 problems" in run("loom_verify")
    rows: models.QuerySet[Any] = models.QuerySet(Execution).filter(pk=handle.id)
    rows.update(current_step="nonsense", in_doubt=3)
    with pytest.raises(CommandError) as failed:
        run("loom_verify")
    assert failed.value.returncode == 1
    run("loom_verify", "--repair", "--execution", handle.id)
    assert "0 problems" in run("loom_verify")


def test_verify_finds_a_park_that_nothing_would_wake(flows: Any) -> None:
    """Every wait that time can end has its timer row."""
    handle = flows.start()
    wake_at = loom.store.timers(handle.id)[0].wake_at
    loom.store.retire(handle.id, wake_at)
    out = StringIO()
    with pytest.raises(CommandError):
        call_command("loom_verify", stdout=out)
    assert "no timer row" in out.getvalue()


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("run_loom_worker", ["--concurrency", "0"]),
        ("run_loom_worker", ["--interval", "nan"]),
        ("run_loom_worker", ["--queues", "default,"]),
        ("run_loom_worker", ["--queues", "post"]),
        ("run_loom_timers", ["--limit", "-1"]),
        ("loom_recover", ["--stale-after", "soon"]),
    ],
)
def test_misuse_of_an_option_is_told(name: str, arguments: list[str]) -> None:
    """A number that cannot be one is refused by the parser."""
    with pytest.raises(CommandError):
        run(name, *arguments)


def test_a_command_leaves_its_process_as_it_was() -> None:
    """One that is called by a test or a script changes neither the logging nor the dispatcher of what follows."""
    logger = logging.getLogger("loom_django")
    before = (list(logger.handlers), logger.level, logger.propagate, loom.dispatcher)
    for command in ("run_loom_worker", "run_loom_timers"):
        call_command(command, "--once", stdout=StringIO(), stderr=StringIO())
    call_command("loom_recover", stdout=StringIO())
    assert (list(logger.handlers), logger.level, logger.propagate, loom.dispatcher) == before
