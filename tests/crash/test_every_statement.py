"""Always one of four: a process is killed at each statement that it sends, and somebody takes it up.

Each act is done again and again by a fresh process that is killed before its first statement, after it, before
its second one …, until one gets through. Then every execution is looked at, and all are brought to their end by
what a site runs anyway: recovery, timers, workers, people who answer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from loom_django.kernel.state import Status
from loom_django.models import Execution
from tests.crash.acts import TASK_WORKER
from tests.crash.kit import KILLED, Lab, check_history, rows_of, standing, state

# No act here sends more statements; a bound for the loop, not a claim.
MOST = 200
# A step that happens to be slow (a busy machine) has its outcome written by an append of its own: so many more
# statements, or fewer, an act may take than when it was counted. On SQLite an append is up to ten statements.
SPREAD = 10

Prepare = Callable[[Lab, list[str]], None]
Act = tuple[str, Callable[[str], tuple[Any, ...]], dict[str, Any]]


def started(flow: str) -> Prepare:
    """Executions of a flow that a worker has run to its first park."""

    def prepare(lab: Lab, ids: list[str]) -> None:
        lab.run("start", flow, *ids)
        lab.run("command", "run_loom_worker", "--once")
        assert {standing(id) for id in ids} == {"parked"}

    return prepare


def ready(flow: str) -> Prepare:
    return lambda lab, ids: lab.run("start", flow, *ids)


def enqueued(flow: str) -> Prepare:
    return lambda lab, ids: lab.run("start", flow, *ids, loom=TASKED)


def in_doubt(lab: Lab, ids: list[str]) -> None:
    lab.run("start", "in-doubt", *ids)
    lab.run("command", "run_loom_worker", "--once")
    assert {state(id).status for id in ids} == {Status.SUSPENDED}


def nothing(lab: Lab, ids: list[str]) -> None:
    """The act makes the execution."""


def orphaned(lab: Lab, ids: list[str]) -> None:
    """Executions whose worker was killed while it was inside a step of each."""
    lab.run("start", "gate", *ids)
    argv = ("run_loom_worker", "--no-recovery", "--concurrency", str(len(ids)))
    worker = lab.spawn("command", *argv)
    for id in ids:
        lab.await_effect(id)
    worker.kill()
    assert {standing(id) for id in ids} == {"held"}
    for id in ids:
        lab.open_gate(id)


def orphaned_in_pairs(lab: Lab, ids: list[str]) -> None:
    """Two for each, so that every pass finds a batch."""
    orphaned(lab, [*ids, *(f"{id}-beside" for id in ids)])


def asleep_in_pairs(lab: Lab, ids: list[str]) -> None:
    """Likewise, so that every pass of a timer loop wakes a batch."""
    started("slept")(lab, [*ids, *(f"{id}-beside" for id in ids)])


WORKER = ("run_loom_worker", "--once", "--max-executions", "1", "--no-timers", "--no-recovery")
TIMERS = ("run_loom_timers", "--once", "--limit", "1")
INLINE = {"DISPATCHER": "inline"}
QUEUED = {"DISPATCHER": "worker"}
TASKED = {"DISPATCHER": "tasks"}

# What is prepared for all at once; what is done to each, and killed; and under which dispatcher.
SCENES: dict[str, tuple[Prepare, str, Callable[[str], tuple[Any, ...]], dict[str, Any]]] = {
    "start-inline": (nothing, "start", lambda id: ("journey", id), INLINE),
    "start-ready": (nothing, "start", lambda id: ("journey", id), QUEUED),
    "claim-and-run": (ready("journey"), "command", lambda id: WORKER, QUEUED),
    "resume-inline": (started("answered"), "resume", lambda id: (id, "Go", "gone"), INLINE),
    "resume-ready": (started("answered"), "resume", lambda id: (id, "Go", "gone"), QUEUED),
    "verdict-inline": (in_doubt, "resolve", lambda id: (id, "doubtful", "retry-fresh"), INLINE),
    "verdict-ready": (in_doubt, "resolve", lambda id: (id, "doubtful", "retry-fresh"), QUEUED),
    "timer-inline": (started("slept"), "command", lambda id: TIMERS, INLINE),
    "timer-ready": (started("slept"), "command", lambda id: TIMERS, QUEUED),
    "timer-batch": (
        asleep_in_pairs,
        "command",
        lambda id: ("run_loom_timers", "--once", "--limit", "2"),
        QUEUED,
    ),
    "deadline": (started("late"), "command", lambda id: TIMERS, QUEUED),
    "message-inline": (started("told"), "send", lambda id: (id, "note", "hello"), INLINE),
    "message-ready": (started("told"), "send", lambda id: (id, "note", "hello"), QUEUED),
    "hand-over": (started("handed-over"), "send", lambda id: (id, "note", "hello"), INLINE),
    "cancel": (started("answered"), "cancel", lambda id: (id,), QUEUED),
    "recover-inline": (orphaned, "command", lambda id: ("loom_recover", "--limit", "1"), INLINE),
    "start-tasks": (nothing, "start", lambda id: ("journey", id), TASKED),
    "run-task": (enqueued("journey"), "command", lambda id: (*TASK_WORKER, "--max-tasks", "1"), TASKED),
    "timer-tasks": (started("slept"), "command", lambda id: TIMERS, TASKED),
    "recover-tasks": (orphaned, "command", lambda id: ("loom_recover", "--limit", "1"), TASKED),
    "recover-ready": (orphaned, "command", lambda id: ("loom_recover", "--limit", "1"), QUEUED),
    "recover-batch": (orphaned_in_pairs, "command", lambda id: ("loom_recover", "--limit", "2"), QUEUED),
}


# "After" a statement differs from "before" the next one by what a tool does in between: one scene shows that.
CASES = [("before", scene) for scene in SCENES] + [("after", "start-inline")]


@pytest.mark.parametrize(("when", "scene"), CASES)
def test_a_kill_at_any_statement_leaves_one_of_four(lab: Lab, scene: str, when: str):
    """Killed at any statement of an act, an execution is one of the four, and is brought to its end."""
    prepare, act, arguments, loom = SCENES[scene]
    count = statements_of(lab, scene)
    ids = [f"{scene}-{number}" for number in range(1, count + SPREAD + 1)]
    prepare(lab, ids)
    lab.pass_time(120)  # sleeps are over and leases have run out; timeouts of an hour have not
    for number, id in enumerate(ids, start=1):
        child = lab.spawn(act, *arguments(id), loom=loom, statement=(when, number))
        if child.wait() == 0:
            assert number > count - SPREAD, f"got through at {number} of {count}:\n{child.log}"
            break
        assert child.wait() == KILLED, child.log
    stood = {id: standing(id) for id in ids}
    lab.run("heal", loom=loom)
    for id in ids:
        if stood[id] != "absent" or standing(id) != "absent":
            check_ended(lab, id)


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_kill_at_any_statement_of_a_start_without_an_id(lab: Lab, when: str):
    """Inline, it lands with its first step: nothing has run of what is not there, and what is there is brought to its end."""
    statements = lab.run("count_statements", "start", "journey", None, loom=INLINE, statement=("never", 0))
    assert 0 < len(statements) < MOST, statements
    absent = 0
    for number in range(1, len(statements) + SPREAD + 1):
        before = Execution.objects.count()
        child = lab.spawn("start", "journey", None, loom=INLINE, statement=(when, number))
        if child.wait() == 0:
            assert number > len(statements) - SPREAD, f"got through at {number}:\n{child.log}"
            break
        assert child.wait() == KILLED, child.log
        absent += Execution.objects.count() == before
    assert absent > 0, "each was there already when its process was killed before its first statement"
    ids = set(Execution.objects.values_list("pk", flat=True))
    assert {line["execution"] for line in lab.effects()} <= ids
    assert {standing(id) for id in ids} <= {"parked", "ready", "held"}
    lab.pass_time(120)
    lab.run("heal", loom=INLINE)
    for id in ids:
        check_ended(lab, id)


def statements_of(lab: Lab, scene: str) -> int:
    """How many statements the act sends when nothing stops it."""
    prepare, act, arguments, loom = SCENES[scene]
    id = f"{scene}-0"
    prepare(lab, [id])
    shift = lab.shift + 120
    statements = lab.run(
        "count_statements", act, *arguments(id), loom=loom, shift=shift, statement=("never", 0)
    )
    lab.run("heal", loom=loom)
    check_ended(lab, id)
    assert 0 < len(statements) < MOST, statements
    return len(statements)


def check_ended(lab: Lab, id: str) -> None:
    """One history to its end; what must not run twice has not; transactional rows are there once."""
    events = check_history(id)
    assert standing(id) == "finished", [event.kind for event in events]
    found = state(id)
    if found.successor is not None:
        check_ended(lab, found.successor)
    if found.flow_id == "handed-over":
        assert (found.successor is None) == (found.chain != id), "it has a successor, or is one"
        assert [event.kind for event in events].count("MESSAGE_CONSUMED") == 1
    for step in ("transfer", "doubtful"):
        effects = lab.effects(id, step)
        assert len({line["key"] for line in effects}) == len(effects), f"{step} of {id} ran twice: {effects}"
        if found.frames.get(step) and len(effects) > 1:
            assert sum(1 for event in events if event.data.get("event") == "EffectInDoubtResolved") >= 1
    if "book" in found.frames:
        assert rows_of(id) == 1
    for step in found.frames:
        assert len({line["key"] for line in lab.effects(id, step)}) <= 1 + (step == "doubtful")
