"""The flows of these tests, and the provider that their tools act on: a ledger file.

The ledger gets one line per effect and is on disk before the tool goes on, so it tells what the outside world
saw, whatever became of the process.
"""

from __future__ import annotations

import asyncio
import json
import math
import multiprocessing
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

from loom_django import (
    AsyncFlowContext,
    EffectInDoubt,
    FlowContext,
    ModelTurn,
    RetryPolicy,
    StepContext,
    StepFailed,
    ToolCall,
    flow,
    tool,
)
from tests.crash.stage import PATIENCE, stage, wait_for
from tests.shop.models import Order

LEDGER = "LOOM_TEST_LEDGER"


def effect(ctx: StepContext) -> None:
    """Act on the outside world."""
    line = {
        "execution": ctx.execution_id,
        "step": ctx.step_id,
        "key": ctx.idempotency_key,
        "attempt": ctx.attempt,
        "pid": os.getpid(),
    }
    ledger = os.open(os.environ[LEDGER], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(ledger, (json.dumps(line) + "\n").encode())
        os.fsync(ledger)
    finally:
        os.close(ledger)
    stage.reached("in-effect", ctx.step_id)


# One step of each kind. What is "slow" takes longer than an outcome is carried to the next boundary.


@tool(name="pay", idempotent=True)
def pay_idempotent(ctx: StepContext, slow: float) -> str:
    effect(ctx)
    time.sleep(slow)
    return "paid"


@tool(name="pay", idempotent=False)
def pay_once(ctx: StepContext, slow: float) -> str:
    effect(ctx)
    time.sleep(slow)
    return "paid"


@tool(name="pay")
def pay_undeclared(ctx: StepContext, slow: float) -> str:
    effect(ctx)
    time.sleep(slow)
    return "paid"


@tool(name="pay", transactional=True)
def pay_in_transaction(ctx: StepContext, slow: float) -> str:
    Order.objects.create(customer="crash", amount=1, note=ctx.execution_id)
    effect(ctx)
    time.sleep(slow)
    return "paid"


@flow("one-idempotent", steps=[pay_idempotent])
def one_idempotent(ctx: FlowContext, slow: float) -> str:
    return ctx.run(pay_idempotent, slow)


@flow("one-not-idempotent", steps=[pay_once])
def one_not_idempotent(ctx: FlowContext, slow: float) -> str:
    return ctx.run(pay_once, slow)


@flow("one-undeclared", steps=[pay_undeclared])
def one_undeclared(ctx: FlowContext, slow: float) -> str:
    return ctx.run(pay_undeclared, slow)


@flow("one-transactional", steps=[pay_in_transaction])
def one_transactional(ctx: FlowContext, slow: float) -> str:
    return ctx.run(pay_in_transaction, slow)


# The same, async.


@tool(name="pay", idempotent=True)
async def apay_idempotent(ctx: StepContext, slow: float) -> str:
    effect(ctx)
    await asyncio.sleep(slow)
    return "paid"


@tool(name="pay", idempotent=False)
async def apay_once(ctx: StepContext, slow: float) -> str:
    effect(ctx)
    await asyncio.sleep(slow)
    return "paid"


@tool(name="pay")
async def apay_undeclared(ctx: StepContext, slow: float) -> str:
    effect(ctx)
    await asyncio.sleep(slow)
    return "paid"


@flow("async-idempotent", steps=[apay_idempotent])
async def async_idempotent(ctx: AsyncFlowContext, slow: float) -> str:
    return await ctx.run(apay_idempotent, slow)


@flow("async-not-idempotent", steps=[apay_once])
async def async_not_idempotent(ctx: AsyncFlowContext, slow: float) -> str:
    return await ctx.run(apay_once, slow)


@flow("async-undeclared", steps=[apay_undeclared])
async def async_undeclared(ctx: AsyncFlowContext, slow: float) -> str:
    return await ctx.run(apay_undeclared, slow)


@flow("async-transactional", steps=[pay_in_transaction])
async def async_transactional(ctx: AsyncFlowContext, slow: float) -> str:
    return await ctx.run(pay_in_transaction, slow)


# A flow with everything in it.


@tool
def quick(ctx: StepContext) -> str:
    effect(ctx)
    return "quick"


@tool(idempotent=True)
def charge(ctx: StepContext) -> str:
    effect(ctx)
    return "charged"


@tool(idempotent=False)
def transfer(ctx: StepContext) -> str:
    effect(ctx)
    return "sent"


@tool(transactional=True)
def book(ctx: StepContext) -> int:
    """Reads, then writes: what cannot wait for a rival's write if the transaction began as a reader."""
    booked = Order.objects.filter(note=ctx.execution_id).count()
    Order.objects.create(customer="crash", amount=1, note=ctx.execution_id)
    effect(ctx)
    return booked + 1


@flow("journey", steps=[quick, charge, transfer, book, quick.named("last")])
def journey(ctx: FlowContext) -> dict[str, Any]:
    done: list[Any] = [ctx.run(quick), ctx.run(charge), ctx.run(transfer), ctx.run(book)]
    ctx.sleep(60)
    done.append(ctx.suspend("Go", timeout=3600))
    done.append(ctx.receive("note"))
    done.append(ctx.run(quick.named("last")))
    return {"done": done}


@flow("answered", steps=[transfer, book, quick])
def answered(ctx: FlowContext) -> list[Any]:
    """Parks at once; an answer has it go on to its end."""
    given = ctx.suspend("Go", timeout=3600)
    return [given, ctx.run(transfer), ctx.run(book), ctx.run(quick)]


@flow("told", steps=[transfer])
def told(ctx: FlowContext) -> list[Any]:
    return [ctx.receive("note", timeout=3600), ctx.run(transfer)]


@flow("handed-over", steps=[transfer])
def handed_over(ctx: FlowContext, number: int = 1) -> str:
    """Goes on in a successor when it has had its message and paid; that does the same, and ends."""
    ctx.receive("note")
    paid = ctx.run(transfer)
    if number == 1:
        ctx.continue_as_new(handed_over, 2)
    return paid


@flow("collects")
def collects(ctx: FlowContext, left: int, each: int) -> None:
    """Takes so many messages, and continues as new after each few of them."""
    for _ in range(min(left, each)):
        ctx.receive("numbered")
    if left > each:
        ctx.continue_as_new(collects, left - each, each)


@flow("slept", steps=[transfer])
def slept(ctx: FlowContext) -> str:
    ctx.sleep(60)
    return ctx.run(transfer)


@flow("late", steps=[transfer], deadline=60)
def late(ctx: FlowContext) -> str:
    ctx.suspend("Go")
    return ctx.run(transfer)


@tool(idempotent=True)
def converse(ctx: StepContext, messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> ModelTurn:
    ctx.meter("usd", 1)
    effect(ctx)
    turns = [["transfer", "book", "charge"], ["__class__", "charge"], []]
    names = turns[sum(message["role"] == "assistant" for message in messages)]
    return ModelTurn("done", [ToolCall("same", name, {}) for name in names])


@flow("assisted", steps=[converse, transfer, book, charge, quick], step_families=["agent"])
def assisted(ctx: FlowContext) -> Any:
    """An agent in a branch, in a decider, in a flow that undoes; replayed once it has ended."""

    def talk(branch: FlowContext) -> list[Any]:
        result = branch.agent_loop("agent", model=converse, tools=[transfer, book, charge], messages=[])
        told = [message["content"] for message in result.messages if message["role"] == "tool"]
        return [result.text, result.turns, *told]

    ctx.on_failure(quick)
    said = ctx.decide("said", lambda inner: inner.parallel({"talk": talk, "side": charge.bind()}))
    ctx.suspend("Go")
    return said


@flow("steps", steps=[quick])
def steps(ctx: FlowContext, count: int) -> int:
    """That many quick undeclared steps."""
    for number in range(count):
        ctx.run(quick.keyed(number))
    return count


# A step that stays inside until a file is there.


def _stay(ctx: StepContext) -> str:
    effect(ctx)
    wait_for(Path(os.environ[LEDGER]).parent / f"gate-{ctx.execution_id}")
    return "through"


@tool(idempotent=True)
def gated(ctx: StepContext) -> str:
    return _stay(ctx)


@tool(idempotent=False)
def gated_once(ctx: StepContext) -> str:
    return _stay(ctx)


@flow("gate", steps=[gated, charge])
def gate(ctx: FlowContext) -> list[str]:
    return [ctx.run(gated), ctx.run(charge)]


@flow("async-gate", steps=[gated, charge])
async def async_gate(ctx: AsyncFlowContext) -> list[str]:
    return [await ctx.run(gated), await ctx.run(charge)]


async def _astay(ctx: StepContext) -> str:
    effect(ctx)
    gate = Path(os.environ[LEDGER]).parent / f"gate-{ctx.execution_id}"
    async with asyncio.timeout(PATIENCE):
        while not gate.exists():
            await asyncio.sleep(0.005)
    return "through"


@tool(idempotent=True)
async def agated(ctx: StepContext) -> str:
    return await _astay(ctx)


@tool(idempotent=False)
async def agated_once(ctx: StepContext) -> str:
    return await _astay(ctx)


@flow("async-tool-gate", steps=[agated, charge])
async def async_tool_gate(ctx: AsyncFlowContext) -> list[str]:
    async def through(ctx: AsyncFlowContext) -> str:
        return await ctx.run(agated)

    async def slept(ctx: AsyncFlowContext) -> str:
        await ctx.sleep(0.05)
        return await ctx.run(charge)

    return sorted((await ctx.parallel({"through": through, "slept": slept})).values())


@flow("async-tool-gate-once", steps=[agated_once, charge])
async def async_tool_gate_once(ctx: AsyncFlowContext) -> list[str]:
    return [await ctx.run(agated_once), await ctx.run(charge)]


@flow("gate-once", steps=[gated_once, charge])
def gate_once(ctx: FlowContext) -> list[str]:
    return [ctx.run(gated_once), ctx.run(charge)]


# Steps that do not let others of their process have a turn.


@tool(idempotent=True)
def burn(ctx: StepContext, seconds: float) -> int:
    """Pure Python, all the time."""
    effect(ctx)
    turns, end = 0, time.monotonic() + seconds
    while time.monotonic() < end:
        turns += 1
    return turns


@tool(idempotent=True)
async def block(ctx: StepContext, seconds: float) -> None:
    """Its event loop stands still."""
    effect(ctx)
    time.sleep(seconds)


@flow("burns", steps=[burn])
def burns(ctx: FlowContext, seconds: float) -> int:
    return ctx.run(burn, seconds)


@flow("blocks", steps=[block])
async def blocks(ctx: AsyncFlowContext, seconds: float) -> None:
    await ctx.run(block, seconds)
    time.sleep(seconds)  # loom: ok


@tool(idempotent=True)
def span(ctx: StepContext, seconds: float) -> None:
    """Tells from when to when it was at work."""
    began = time.monotonic()
    time.sleep(seconds)
    with Path(os.environ[LEDGER]).with_name("spans").open("a") as spans:
        spans.write(f"{began} {time.monotonic()} {ctx.execution_id}\n")


@flow("spans", steps=[span, span.named("again")])
def spans(ctx: FlowContext, seconds: float) -> None:
    """At work, asleep, and at work again."""
    ctx.run(span, seconds)
    ctx.sleep(0.05)
    ctx.run(span.named("again"), seconds)


@tool
def idle_step(ctx: StepContext) -> None:
    """As quick as a step can be."""


@flow("naps", steps=[idle_step])
def naps(ctx: FlowContext, count: int, seconds: float) -> None:
    for number in range(count):
        ctx.sleep(seconds)
        ctx.run(idle_step.keyed(number))


# Attempts and their keys.


class ProviderError(Exception):
    """The provider said no."""


def _fails_at_first(ctx: StepContext) -> int:
    effect(ctx)
    if ctx.attempt == 1:
        raise ProviderError("not now")
    return ctx.attempt


@tool(idempotent=True, retry=RetryPolicy(max_attempts=5, initial_interval=0.001))
def retried(ctx: StepContext) -> int:
    return _fails_at_first(ctx)


@tool(idempotent=True, retry=RetryPolicy(max_attempts=5, initial_interval=0.001, fresh_key=True))
def retried_fresh(ctx: StepContext) -> int:
    return _fails_at_first(ctx)


@flow("retries", steps=[retried])
def retries(ctx: FlowContext) -> int:
    return ctx.run(retried)


@flow("retries-fresh", steps=[retried_fresh])
def retries_fresh(ctx: FlowContext) -> int:
    return ctx.run(retried_fresh)


@flow("two-quick", steps=[quick, charge])
def two_quick(ctx: FlowContext) -> list[str]:
    return [ctx.run(quick), ctx.run(charge)]


@tool(idempotent=False)
def doubtful(ctx: StepContext) -> str:
    """Nobody knows, the first time."""
    effect(ctx)
    if ctx.attempt == 1:
        raise EffectInDoubt("the line went dead")
    return "sent"


@flow("in-doubt", steps=[doubtful, book])
def in_doubt(ctx: FlowContext) -> list[Any]:
    return [ctx.run(doubtful), ctx.run(book)]


@flow("played", steps=[quick, charge, transfer, book])
def played(ctx: FlowContext) -> dict[str, Any]:
    """A step of each kind, a park, an answer, an end."""
    done: list[Any] = [ctx.run(quick), ctx.run(charge), ctx.run(transfer), ctx.run(book)]
    done.append(ctx.suspend("Go", timeout=3600))
    done.append(ctx.run(quick.keyed("again")))
    return {"done": done}


@flow("idle", steps=[idle_step])
def idle(ctx: FlowContext, count: int) -> int:
    for number in range(count):
        ctx.run(idle_step.keyed(number))
    return count


@flow("idle-then-wait", steps=[idle_step])
def idle_then_wait(ctx: FlowContext, count: int) -> Any:
    for number in range(count):
        ctx.run(idle_step.keyed(number))
    return ctx.suspend("Go")


@tool(transactional=True)
def gated_in_transaction(ctx: StepContext) -> str:
    Order.objects.create(customer="crash", amount=1, note=ctx.execution_id)
    return _stay(ctx)


@flow("gate-in-transaction", steps=[gated_in_transaction])
def gate_in_transaction(ctx: FlowContext) -> str:
    return ctx.run(gated_in_transaction)


def _end_as_any_process() -> None:
    """A forked process's work: nothing, and its end with all that Python does then."""


@tool(idempotent=True)
def forking(ctx: StepContext) -> int:
    effect(ctx)
    subprocess.run([sys.executable, "-c", ""], check=True)
    child = multiprocessing.get_context("fork").Process(target=_end_as_any_process)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # a fork beside threads is just what is tried
        child.start()
    child.join()
    return int(child.exitcode or 0)


@flow("forks", steps=[quick, forking, charge])
def forks(ctx: FlowContext) -> list[Any]:
    return [ctx.run(quick), ctx.run(forking), ctx.run(charge)]


# Values and errors that others stumble over.

NUL = "a\x00b"
DEEP: Any = {"one": [{"two": {"three": [math.nan, math.inf, -math.inf, -0.0, float("1e400")]}}]}
BIG = [9007199254740993, -(2**63), 2**64, 10**40, -(10**5000)]


@tool(idempotent=False)
def echo(ctx: StepContext, value: Any) -> Any:
    effect(ctx)
    return value


@flow("echoes", steps=[echo])
def echoes(ctx: FlowContext, value: Any) -> Any:
    """What goes in comes out: as input, argument, result, answer, emitted value, decision, message, and end."""
    ctx.emit("seen", value)
    decided = ctx.decide("value", lambda: value)
    step = ctx.run(echo, value)
    answer = ctx.suspend("Go")
    message = ctx.receive("note")
    return [value, decided, step, answer, message]


class TwoArgumentsError(Exception):
    def __init__(self, first: str, second: str) -> None:
        super().__init__(first)
        self.second = second


class UnprintableError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


def _cyclic() -> Exception:
    one, other = ValueError("one"), ValueError("x" * 5_000_000)
    one.__cause__, other.__cause__ = other, one
    return one


def _local() -> Exception:
    class HereError(Exception):
        pass

    return HereError("from in here")


ODD_ERRORS: dict[str, Callable[[], BaseException]] = {
    "two-arguments": lambda: TwoArgumentsError("a", "b"),
    "unprintable": UnprintableError,
    "cyclic": _cyclic,
    "nul": lambda: ValueError(NUL),
    "group": lambda: ExceptionGroup("several", [ValueError("one"), KeyError("two")]),
    "base-group": lambda: BaseExceptionGroup("several", [KeyboardInterrupt(), ValueError("one")]),
    "generator-exit": GeneratorExit,
    "system-exit": lambda: SystemExit(3),
    "keyboard-interrupt": KeyboardInterrupt,
    "cancelled": asyncio.CancelledError,
    "local": _local,
}


@tool(idempotent=True)
def odd(ctx: StepContext, name: str) -> None:
    effect(ctx)
    raise ODD_ERRORS[name]()


@flow("odd-errors", steps=[odd, quick])
def odd_errors(ctx: FlowContext, name: str) -> list[str]:
    """Catches the failure, parks, and catches it again in the replay."""
    try:
        ctx.run(odd, name)
    except StepFailed as failed:
        ctx.suspend("Go")
        return [failed.error_type, failed.message[:200]]
    return ["nothing was raised"]


@flow("until", steps=[charge])
def until(ctx: FlowContext, when: datetime) -> list[Any]:
    ctx.sleep_until(when)
    slept = ctx.now()
    ctx.sleep(2)
    return [slept, ctx.now(), ctx.run(charge)]


# Long runs. Their effects are counted by a byte each: a forced write for each would take longer than all else.


@tool
def counted(ctx: StepContext) -> int:
    with Path(os.environ[LEDGER] + "-counted").open("a") as file:
        file.write(f"{ctx.step_id}\n")
    return 1


@flow("counts", steps=[counted])
def counts(ctx: FlowContext, count: int) -> int:
    return sum(ctx.run(counted.keyed(number)) for number in range(count))


@flow("counts-then-waits", steps=[counted], durability="deferred")
def counts_then_waits(ctx: FlowContext, count: int) -> int:
    done = sum(ctx.run(counted.keyed(number)) for number in range(count))
    ctx.suspend("Go")
    return done
