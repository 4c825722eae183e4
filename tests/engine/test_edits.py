"""Random bodies, edited at random while their execution lives, crashes, waits and is answered."""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from loom_django import FlowContext, StepContext, flow, tool
from loom_django.definitions import Divergence
from loom_django.engine.unwind import Unwind, Why
from loom_django.kernel.events import Kind
from loom_django.kernel.state import ON_DIVERGED, FrameStatus, Status
from loom_django.stores.memory import MemoryStore
from tests.engine.conftest import World, world_over

pytestmark = pytest.mark.once

OUTCOMES = (Kind.STEP_COMPLETED, Kind.STEP_FAILED)


@dataclass(frozen=True)
class Op:
    """One thing that a body asks for: a step, a wait, a scope of steps, or a decision of steps."""

    kind: str
    steps: tuple[int, ...]  # a wait's is its number


class Edits(RuleBasedStateMachine):
    """A body is a list of ops that a deploy changes; its execution is "x"."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = ExitStack()
        self.world: World = self.stack.enter_context(world_over(MemoryStore()))
        self.body: list[Op] = []
        self.dropped: list[Op] = []
        self.numbers = 0
        self.edited = False
        self.mode: Divergence = "fail"
        # Of the run that is under way: what the log held when it began, and what the body has asked for since.
        self.held: dict[str, int] = {}
        self.asked: set[str] = set()
        self.broken: list[str] = []

    def teardown(self) -> None:
        self.stack.close()

    # The body and its tool.

    def play(self, ctx: FlowContext) -> None:
        frames = self.world.state("x").frames
        self.held = {id: frame.first_sequence for id, frame in frames.items() if frame.settled}
        self.asked = set()
        for op in self.body:
            self.perform(ctx, op)

    def perform(self, ctx: FlowContext, op: Op) -> None:
        if op.kind == "wait":
            ctx.suspend(f"go-{op.steps[0]}")
        elif op.kind == "decide":
            if f"decision-{op.steps[0]}" in self.world.state("x").decisions:
                self.asked |= {f"work#{number}" for number in op.steps}
            ctx.decide(f"decision-{op.steps[0]}", lambda ctx: [self.step(ctx, n) for n in op.steps])
        elif op.kind == "scope":
            self.asked |= {f"work#{number}" for number in op.steps}
            values = ctx.parallel({f"b{n}": self.work.keyed(n).bind() for n in op.steps})
            self.check_served({f"work#{n}": values[f"b{n}"] for n in op.steps})
        else:
            self.step(ctx, op.steps[0])

    def step(self, ctx: FlowContext, number: int) -> str:
        step_id = f"work#{number}"
        self.asked.add(step_id)
        value = ctx.run(self.work.keyed(number))
        self.check_served({step_id: value})
        return str(value)

    def check_served(self, values: dict[str, str]) -> None:
        """What a step returns is its own outcome, and the recorded one if there is one."""
        for step_id, value in values.items():
            if not value.startswith(f"{step_id} "):
                self.broken.append(f"{step_id} was given {value}")
            frame = self.world.state("x").frames[step_id]
            if frame.settled and frame.output != value:
                self.broken.append(f"{step_id} was given {value}, recorded is {frame.output}")

    def called(self, step_id: str, attempt: int) -> str:
        """The tool: what the log holds now decides if it may be called at all."""
        frame = self.world.state("x").frames[step_id]
        if frame.status is not FrameStatus.RUNNING:
            self.broken.append(f"{step_id} was called and is {frame.status}")
        skipped = {
            id for id, began in self.held.items() if id not in self.asked and began < frame.first_sequence
        }
        if skipped and self.mode == "fail":
            self.broken.append(f"{step_id} was called, and {skipped} skipped")
        return f"{step_id} {attempt}"

    # What happens to it.

    def made(self, kind: str, count: int) -> Op:
        self.numbers += count
        return Op(kind, tuple(range(self.numbers - count, self.numbers)))

    @rule(
        mode=st.sampled_from(["fail", "fail", "warn", "off"]),
        kinds=st.lists(st.sampled_from(["step", "step", "wait", "scope", "decide"]), min_size=2, max_size=6),
    )
    @precondition(lambda self: not self.body)
    def start(self, mode: Divergence, kinds: Sequence[str]) -> None:
        self.mode = mode
        self.body = [self.made(kind, 1 if kind in ("step", "wait") else 2) for kind in kinds]
        called = self.called

        @tool
        def work(ctx: StepContext) -> str:
            return called(ctx.step_id, ctx.attempt)

        self.work = work
        flow("edits", steps=[work], divergence=mode)(self.play)
        self.world.loom.start("edits", execution_id="x")

    def is_at(self, *on: str) -> bool:
        return bool(self.body) and self.world.state("x").parked and bool(self.pending(*on))

    def pending(self, *on: str) -> list[str]:
        return [
            w.on for w in self.world.state("x").pending_waits if w.on in on or (not on and w.on[:3] == "go-")
        ]

    @rule(
        how=st.sampled_from(["insert", "drop", "swap", "restore", "wrap"]),
        kind=st.sampled_from(["step", "wait", "scope", "decide"]),
        seed=st.integers(0, 1_000),
    )
    @precondition(lambda self: bool(self.body))
    def deploy(self, how: str, kind: str, seed: int) -> None:
        chance = random.Random(seed)
        place = chance.randrange(len(self.body))
        self.edited = True
        if how == "insert":
            self.body.insert(place, self.made(kind, 1 if kind in ("step", "wait") else 2))
        elif how == "drop" and len(self.body) > 1:
            self.dropped.append(self.body.pop(place))
        elif how == "swap":
            other = chance.randrange(len(self.body))
            self.body[place], self.body[other] = self.body[other], self.body[place]
        elif how == "restore" and self.dropped:
            self.body.insert(place, self.dropped.pop())
        elif how == "wrap" and self.body[place].kind == "step":
            self.body[place] = Op("scope", self.body[place].steps)

    @rule(data=st.data(), point=st.sampled_from(["before-effect", "after-effect", "after-outcome"]))
    @precondition(lambda self: self.is_at())
    def answer_and_perhaps_crash(self, data: Any, point: str) -> None:
        number = data.draw(st.integers(-1, self.numbers))

        def reached(at: str, execution_id: str, step_id: str) -> None:
            if (at, step_id) == (point, f"work#{number}"):
                self.world.engine.crash_point = None
                raise Unwind(Why.CRASHED)

        self.world.engine.crash_point = reached
        self.world.loom.resume("x", event_type=self.pending()[0])
        self.world.engine.crash_point = None

    @rule()
    @precondition(lambda self: bool(self.body) and self.world.state("x").status is Status.RUNNING)
    def recover(self) -> None:
        self.world.shift(timedelta(hours=1))
        self.world.recover()

    @rule()
    @precondition(lambda self: self.is_at(ON_DIVERGED))
    def retry(self) -> None:
        self.world.loom.retry_diverged("x")

    # What must hold.

    @invariant()
    def holds(self) -> None:
        assert self.broken == []
        if not self.body:
            return
        events = self.world.loom.history("x")
        settled = [event.data["step"] for event in events if event.kind in OUTCOMES]
        assert len(settled) == len(set(settled))
        gates = [
            event
            for event in events
            if event.kind == Kind.EXECUTION_SUSPENDED and event.data["reason"] == "diverged"
        ]
        assert not gates or (self.edited and self.mode == "fail")
        assert self.world.state("x").status is not Status.FAILED


TestEdits = Edits.TestCase
TestEdits.settings = settings(
    max_examples=60,
    stateful_step_count=15,
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
