"""Crashes in the re-run, after a verdict, between retries: how often, and under which key."""

from __future__ import annotations

import pytest

from loom_django.kernel import codec
from loom_django.kernel.events import Kind
from loom_django.kernel.state import Status
from tests.crash.kit import KILLED, Lab, check_history, kinds, rows_of, standing, state

WORKER = ("run_loom_worker", "--once", "--no-recovery", "--max-executions", "1")


def die(lab: Lab, point: str, step: str, *, times: int = 1) -> None:
    """A worker takes what is ready and dies at that point."""
    # However busy the machine, a step that does nothing counts as quick.
    child = lab.spawn("command", *WORKER, points=[(point, step, times, "die")], carry=3600.0)
    assert child.wait() == KILLED, child.log


def recover(lab: Lab) -> None:
    lab.pass_time()
    lab.run("command", "loom_recover")


def finish(lab: Lab) -> None:
    lab.run("command", *WORKER)


@pytest.mark.parametrize("second", ["before-effect", "in-effect", "after-effect"])
@pytest.mark.parametrize("kind", ["idempotent", "undeclared", "transactional"])
def test_a_second_kill_in_the_rerun(lab: Lab, kind: str, second: str):
    """Each crash at such a point can add one run, the key stays, and transactional rows are there once."""
    lab.run("start", f"one-{kind}", "x", args=[0])
    die(lab, "in-effect", "pay")
    recover(lab)
    die(lab, second, "pay")
    recover(lab)
    finish(lab)
    assert len(lab.effects("x")) == 2 + (second != "before-effect")
    assert {line["key"] for line in lab.effects("x")} == {"x:pay"}
    assert rows_of("x") == (kind == "transactional")
    check_history("x")
    assert state("x").status is Status.COMPLETED


def test_after_three_crashes_the_fourth_attempt_says_so(lab: Lab):
    """The number of an attempt counts the crashes, and nothing that recovers moves it back."""
    lab.run("start", "one-idempotent", "x", args=[0])
    for _ in range(3):
        die(lab, "in-effect", "pay")
        recover(lab)
    finish(lab)
    assert [line["attempt"] for line in lab.effects("x")] == [1, 2, 3, 4]
    assert state("x").frames["pay"].attempts == 4


def test_a_kill_after_retry_fresh_asks_again_under_the_next_key(lab: Lab):
    """A verdict's fresh key is that of its attempt alone: a crash in it is a new question, with that key."""
    lab.run("start", "one-not-idempotent", "x", args=[0])
    seen = []
    for _ in range(2):
        die(lab, "in-effect", "pay")
        recover(lab)
        doubts = [event for event in check_history("x") if event.kind == Kind.EFFECT_INDOUBT]
        seen.append(doubts[-1].data["key"])
        assert state("x").status is Status.SUSPENDED
        lab.run("resolve", "x", "pay", "retry-fresh")
    finish(lab)
    assert seen == ["x:pay", "x:pay:r1"]
    assert [line["key"] for line in lab.effects("x")] == ["x:pay", "x:pay:r1", "x:pay:r2"]
    assert state("x").status is Status.COMPLETED
    check_history("x")


def test_a_verdict_survives_the_kill_of_whoever_acts_on_it(lab: Lab):
    """The verdict is in the log before a body runs: a crash before its effect asks for no second verdict."""
    lab.run("start", "one-not-idempotent", "x", args=[0])
    die(lab, "in-effect", "pay")
    recover(lab)
    lab.run("resolve", "x", "pay", "retry-fresh")
    die(lab, "before-start", "pay")
    recover(lab)
    finish(lab)
    assert [line["key"] for line in lab.effects("x")] == ["x:pay", "x:pay:r1"]
    assert kinds("x")[-3:] == ["STEP_STARTED", "STEP_COMPLETED", "EXECUTION_COMPLETED"]


@pytest.mark.parametrize(("flow", "suffix"), [("retries", ""), ("retries-fresh", ":r1")])
def test_the_key_of_a_retry_is_that_of_the_log(lab: Lab, flow: str, suffix: str):
    """Retry, crash in the retry, recovery elsewhere: one key, or the fresh one that STEP_RETRYING promised."""
    step = flow.replace("retries", "retried").replace("-", "_")
    lab.run("start", flow, "x")
    die(lab, "in-effect", step, times=2)
    recover(lab)
    finish(lab)
    key = f"x:{step}"
    assert [line["key"] for line in lab.effects("x")] == [key, key + suffix, key + suffix]
    assert state("x").frames[step].failures == 1
    check_history("x")


@pytest.mark.parametrize(("point", "runs"), [("before-start", 2), ("before-effect", 1)])
def test_a_quick_outcome_is_durable_with_the_next_marker(lab: Lab, point: str, runs: int):
    """A quick step can run again although the flow is past it, until the next step's marker is durable."""
    lab.run("start", "two-quick", "x")
    die(lab, point, "charge")
    recover(lab)
    finish(lab)
    assert len(lab.effects("x", "quick")) == runs
    assert len(lab.effects("x", "charge")) == 1
    check_history("x")


TALK = "agent#1.talk:turn"

# All of them, at all points, were seen to hold; these are the ones that differ from each other.
AGENT_KILLS = [
    (f"{TALK}:1", "after-effect"),
    (f"{TALK}:1:tool:1", "in-effect"),
    (f"{TALK}:1:tool:1", "after-outcome"),
    (f"{TALK}:1:tool:2", "after-effect"),
    (f"{TALK}:1:tool:3", "before-effect"),
    (f"{TALK}:2", "before-start"),
    (f"{TALK}:3", "after-outcome"),
]


@pytest.mark.parametrize(("step", "point"), AGENT_KILLS)
def test_an_agent_is_killed(lab: Lab, step: str, point: str):
    """In a branch, in a decider, in a saga: no transfer is made twice, no booking, and nothing that was said is lost."""
    lab.run("start", "assisted", "x")
    die(lab, point, step)
    recover(lab)
    finish(lab)
    for doubt in state("x").in_doubt:
        assert doubt.step_id == f"{TALK}:1:tool:1"
        lab.run("resolve", "x", doubt.step_id, "completed-with-result", output="sent")
        finish(lab)
    assert state("x").reason == "waiting"
    lab.run("resume", "x", "Go")
    finish(lab)
    ended = state("x")
    assert ended.status is Status.COMPLETED
    talk = codec.decode(ended.result)["talk"]
    assert talk == ["done", 3, "sent", 1, "charged", talk[5], "charged"]
    assert "no tool '__class__'" in talk[5]
    assert len(lab.effects("x", f"{TALK}:1:tool:1")) <= 1
    assert rows_of("x") == 1
    keys = {(line["step"], line["key"]) for line in lab.effects("x")}
    assert len({step for step, _ in keys}) == len(keys)
    assert ended.meters == {"usd": 3}
    check_history("x")
    assert standing("x") == "finished"
