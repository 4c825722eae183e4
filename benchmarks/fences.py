"""The columns of ADR 0118: what a fence costs an execution, and what each way of answering a park costs.

An execution has one step and ends; one that parks has one step, parks, is answered and ends.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final

from benchmarks.frame import Bench, Case
from loom_django import FlowContext, StepContext, flow, tool
from loom_django.engine.core import random_token
from loom_django.engine.run import run_execution
from loom_django.engine.start import start

PARKED_AT: Final = 4  # EXECUTION_STARTED, STEP_STARTED, STEP_COMPLETED, EXECUTION_SUSPENDED


@tool
def book(ctx: StepContext, order: str, amount: int) -> dict[str, Any]:
    """A result of the size of a small record."""
    return {"order": order, "amount": amount, "reference": ctx.idempotency_key, "state": "booked"}


@flow("benchmarks.one_step", steps=[book])
def one_step(ctx: FlowContext, order: str) -> str:
    booked = ctx.run(book, order, 1999)
    return str(booked["state"])


@flow("benchmarks.parks", steps=[book])
def parks(ctx: FlowContext, order: str) -> str:
    booked = ctx.run(book, order, 1999)
    answer = ctx.suspend("Approval")
    return f"{booked['state']} {answer['by']}"


ORDER: Final = "order-2026-000017"


def run_unfenced(bench: Bench, _: Any) -> str:
    return bench.loom.start(one_step, args=(ORDER,)).id


def run_fenced(bench: Bench, _: Any) -> str:
    """The same, under a token that is taken between the start and the body."""
    token = random_token()
    owner = bench.engine.held(token)
    started = start(bench.engine, one_step, one_step.bind_input((ORDER,), {}), one_step.options, owner)
    journal, key = started.journal, started.execution_id
    assert journal is not None
    journal.present(bench.store.acquire_fence(key))
    run_execution(bench.engine, key, token=token, fence=journal.fence, journal=journal)
    return key


def park(bench: Bench) -> str:
    return bench.loom.start(parks, args=(ORDER,)).id


def answer_unfenced(bench: Bench, key: str) -> str:
    return _answer(bench, key)


def answer_acquiring(bench: Bench, key: str) -> str:
    return _answer(bench, key, fence=bench.store.acquire_fence(key))


def answer_if_parked(bench: Bench, key: str) -> str:
    return _answer(bench, key, fence_if_parked_at=PARKED_AT)


def _answer(bench: Bench, key: str, **how: Any) -> str:
    return bench.loom.resume(key, event_type="Approval", payload={"by": "anna"}, **how).id


@contextmanager
def share_locks() -> Iterator[None]:
    """Appends lock the fence row FOR SHARE, to see what FOR NO KEY UPDATE costs."""
    from loom_django.stores import postgresql_append

    look = postgresql_append._look
    postgresql_append._look = lambda parts: look(replace(parts)).replace("no key update", "share")
    postgresql_append.text_of.cache_clear()
    try:
        yield
    finally:
        postgresql_append._look = look
        postgresql_append.text_of.cache_clear()


CASES: Final = (
    Case("execution, unfenced", run_unfenced),
    Case("execution, fenced", run_fenced),
    Case("park/resume, unfenced", lambda bench, _: answer_unfenced(bench, park(bench))),
    Case("park/resume, acquire_fence", lambda bench, _: answer_acquiring(bench, park(bench))),
    Case("park/resume, fence_if_parked_at", lambda bench, _: answer_if_parked(bench, park(bench))),
    Case("resume alone, unfenced", answer_unfenced, park),
    Case("resume alone, acquire_fence", answer_acquiring, park),
    Case("resume alone, fence_if_parked_at", answer_if_parked, park),
)
# A question once asked: no column of its own, but for a run that names it.
FOR_SHARE: Final = (
    Case("park/resume, fence_if_parked_at, FOR SHARE", CASES[4].work, around=share_locks),
    Case("park/resume, unfenced, FOR SHARE", CASES[2].work, around=share_locks),
)

# What is told as one case's time over another's.
RATIOS: Final = (
    ("execution, fenced", "execution, unfenced"),
    ("park/resume, acquire_fence", "park/resume, unfenced"),
    ("park/resume, fence_if_parked_at", "park/resume, acquire_fence"),
    ("resume alone, acquire_fence", "resume alone, unfenced"),
    ("resume alone, fence_if_parked_at", "resume alone, acquire_fence"),
    ("park/resume, unfenced, FOR SHARE", "park/resume, unfenced"),
    ("park/resume, fence_if_parked_at, FOR SHARE", "park/resume, fence_if_parked_at"),
)
