"""What the tests of the testing kit run. Not discovered: no app, so these flows exist only where imported."""

from __future__ import annotations

import random
from datetime import timedelta
from decimal import Decimal
from typing import Any

from loom_django import (
    AsyncFlowContext,
    EffectInDoubt,
    FlowContext,
    RetryPolicy,
    StepContext,
    StepFailed,
    WaitTimedOut,
    flow,
    loom,
    tool,
)
from loom_django.errors import ContextMisuseError
from tests.shop.models import Ledger, Order


class BankTimeout(Exception):
    """The bank did not answer: nobody knows."""


class BankRefusal(Exception):
    """The bank said no: nothing happened."""


def _not_here(what: str) -> AssertionError:
    return AssertionError(f"{what} is to be stubbed in tests")


@tool(
    idempotent=True,
    retry=RetryPolicy(max_attempts=5, jitter=False, non_retryable=(AssertionError,)),
    timeout=30,
)
def charge(ctx: StepContext, order_id: int, amount: Decimal) -> dict[str, Any]:
    raise _not_here("charge")


@tool(idempotent=True)
def refund(ctx: StepContext, charge_id: str) -> None:
    raise _not_here("refund")


@tool(idempotent=False, in_doubt_on=(BankTimeout,))
def wire_transfer(ctx: StepContext, iban: str, amount: Decimal) -> str:
    raise _not_here("wire_transfer")


@tool(transactional=True)
def mark_paid(ctx: StepContext, order_id: int, by: str) -> None:
    Order.objects.filter(pk=order_id).update(paid=True, note=by)
    Ledger.objects.create(key=ctx.idempotency_key, step=ctx.step_id)


@flow("kit-order", version=1, steps=[charge, refund, wire_transfer, mark_paid])
def order(ctx: FlowContext, order_id: int, amount: Decimal, iban: str) -> str:
    receipt = ctx.run(charge, order_id, amount)
    try:
        approval = ctx.suspend("Approval", timeout=timedelta(days=2))
    except WaitTimedOut:
        ctx.run(refund, receipt["id"])
        return "expired"
    try:
        ctx.run(wire_transfer, iban, amount)
    except StepFailed as exc:
        ctx.run(refund, receipt["id"])
        return f"refused: {exc.message}"
    ctx.run(mark_paid, order_id, approval["by"])
    return "paid"


# One step each, for the points of a step's life.


@tool
def undeclared(ctx: StepContext, word: str = "x") -> str:
    return word


@tool(idempotent=True)
def repeatable(ctx: StepContext, word: str = "x") -> str:
    return word


@tool(idempotent=False)
def once(ctx: StepContext, word: str = "x") -> str:
    return word


@tool(transactional=True)
def booked(ctx: StepContext, word: str = "x") -> str:
    Ledger.objects.create(key=ctx.idempotency_key, step=ctx.step_id)
    return word


TOOLS = {"undeclared": undeclared, "repeatable": repeatable, "once": once, "booked": booked}


@flow("kit-one-step", steps=[undeclared, repeatable, once, booked])
def one_step(ctx: FlowContext, name: str) -> str:
    return str(ctx.run_step(name, "done"))


@flow("kit-same-step-twice", steps=[repeatable])
def keyed_steps(ctx: FlowContext, words: list[str]) -> list[str]:
    return [ctx.run(repeatable.keyed(word), word) for word in words]


# Time.


@flow("kit-sleeps", steps=[repeatable])
def sleeps(ctx: FlowContext, name: str, hours: list[int]) -> list[str]:
    woken = []
    for hour in hours:
        ctx.sleep(timedelta(hours=hour))
        ctx.run(repeatable, name)
        woken.append(ctx.now().isoformat())
    return woken


@flow("kit-deadline", deadline=timedelta(hours=3))
def with_deadline(ctx: FlowContext) -> None:
    ctx.suspend("Never")


@flow("kit-naps", steps=[repeatable])
def naps(ctx: FlowContext) -> None:
    ctx.sleep(timedelta(milliseconds=1))


# Messages.


@flow("kit-parcels")
def parcels(ctx: FlowContext) -> list[str]:
    seen: list[str] = []
    while True:
        try:
            event = ctx.receive("carrier", timeout=timedelta(days=14))
        except WaitTimedOut:
            return [*seen, "lost"]
        seen.append(event["status"])
        if event["status"] == "delivered":
            return seen


# Async.


@tool(idempotent=True, timeout=30)
async def fetch(ctx: StepContext, url: str) -> str:
    raise _not_here("fetch")


@tool(idempotent=False)
async def publish(ctx: StepContext, text: str) -> int:
    return len(text)


@flow("kit-async", steps=[fetch, publish])
async def pages(ctx: AsyncFlowContext, url: str) -> int:
    text = await ctx.run(fetch, url)
    await ctx.sleep(timedelta(hours=1))
    return await ctx.run(publish, text)


# Doubts told by the tool itself.


@tool(idempotent=False)
def unsure(ctx: StepContext) -> None:
    raise EffectInDoubt("the line was cut")


@flow("kit-unsure", steps=[unsure])
def asks(ctx: FlowContext) -> str:
    try:
        ctx.run(unsure)
    except StepFailed as exc:
        return f"failed: {exc.message}"
    return "went well"


# Bodies that are not deterministic, each in its own way.


@flow("kit-random-argument", steps=[repeatable])
def random_argument(ctx: FlowContext) -> None:
    ctx.run(repeatable, str(random.random()))
    ctx.suspend("Approval")


@flow("kit-random-end", steps=[repeatable])
def random_and_no_park(ctx: FlowContext) -> None:
    ctx.run(repeatable, str(random.random()))


SETTINGS: dict[str, Any] = {
    "step": "repeatable",
    "words": ["a"],
    "on": "Approval",
    "sleep": False,
    "emit": 0,
    "decide": False,
}


@flow("kit-reads-a-setting", steps=[repeatable, undeclared])
def reads_a_setting(ctx: FlowContext) -> None:
    ctx.run_step(SETTINGS["step"], "x")
    for word in list(SETTINGS["words"]):
        ctx.run(repeatable.keyed(word), word)
    for _ in range(SETTINGS["emit"]):
        ctx.emit("Counted")
    if SETTINGS["decide"]:
        ctx.decide("late", lambda: SETTINGS.update(decided=True))
    if SETTINGS["sleep"]:
        return
    ctx.suspend(SETTINGS["on"])


@flow("kit-decides", steps=[repeatable])
def decides(ctx: FlowContext) -> None:
    ctx.decide("draw", lambda: random.random())
    word = ctx.decide("word", lambda: str(random.random()))
    ctx.run(repeatable, word + str(ctx.random().random()) + str(ctx.uuid4()) + ctx.now().isoformat())
    ctx.emit("Seen", word)
    ctx.meter("tokens", 3)
    ctx.suspend("Approval")


@flow("kit-breaks", steps=[repeatable], on_error="park")
def breaks(ctx: FlowContext) -> None:
    ctx.run(repeatable)
    raise KeyError("a bug")


# Time limits, retries and attempts.


@tool(idempotent=False, timeout=30)
def slow_transfer(ctx: StepContext) -> str:
    raise _not_here("slow_transfer")


@tool(idempotent=True, timeout=30)
def slow_report(ctx: StepContext) -> str:
    raise _not_here("slow_report")


@flow("kit-slow", steps=[slow_transfer, slow_report])
def slow(ctx: FlowContext, name: str) -> str:
    try:
        return str(ctx.run_step(name))
    except StepFailed as exc:
        return exc.error_type


@tool(idempotent=True, retry=RetryPolicy(max_attempts=2, initial_interval=60))
def flaky(ctx: StepContext) -> int:
    raise _not_here("flaky")


@flow("kit-flaky", steps=[flaky])
def patient(ctx: FlowContext) -> int:
    return ctx.run(flaky)


@tool(idempotent=True)
def tells_attempt(ctx: StepContext) -> int:
    return ctx.attempt


@flow("kit-attempts", steps=[tells_attempt])
def attempts(ctx: FlowContext) -> int:
    return ctx.run(tells_attempt)


@tool
def starts_another(ctx: StepContext) -> str:
    return one_step.using(execution_id=f"{ctx.execution_id}/next").start("repeatable").id


@flow("kit-starts", steps=[starts_another])
def starts(ctx: FlowContext) -> str:
    return ctx.run(starts_another)


@flow("kit-swallows", steps=[once])
def swallows(ctx: FlowContext) -> str:
    try:
        return ctx.run(once)
    except BaseException:  # what nobody should write
        return "swallowed"
    finally:
        ctx.emit("Cleanup")


@tool
def audit(ctx: StepContext, orders: list[int], *, by: str) -> None:
    raise _not_here("audit")


@flow("kit-audits", steps=[audit])
def audits(ctx: FlowContext, orders: list[int]) -> None:
    ctx.run(audit, orders, by="anna")


@tool(idempotent=False, retry=RetryPolicy(retry_on=(BankRefusal,), jitter=False))
def careful(ctx: StepContext) -> str:
    raise _not_here("careful")


@flow("kit-careful", steps=[careful])
def asks_again(ctx: FlowContext) -> str:
    return ctx.run(careful)


@flow("kit-misuses", steps=[repeatable])
def waits_for_itself(ctx: FlowContext) -> str:
    ctx.run(repeatable)
    try:
        loom.handle(ctx.execution_id).result(timeout=0.01)
    except ContextMisuseError:
        ctx.logger.info("of course not")
    return str(ctx.suspend("Approval"))


@flow("goes-round", steps=[repeatable])
def goes_round(ctx: FlowContext, number: int) -> int:
    ctx.run(repeatable, str(number))
    if number == 3:
        return number
    ctx.continue_as_new(goes_round, number + 1)


@flow("goes-round-by-chance", steps=[repeatable])
def goes_round_by_chance(ctx: FlowContext, number: int) -> int:
    """Ends where it went on before."""
    ctx.run(repeatable, str(number))
    if len(CHANCES) % 2 == 0:
        CHANCES.append(number)
        ctx.continue_as_new(goes_round_by_chance, number + 1)
    CHANCES.append(number)
    return number


CHANCES: list[int] = []
