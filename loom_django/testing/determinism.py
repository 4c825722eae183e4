"""A log is played again against its body, and the body must ask for what the log holds.

Every resume runs a body again from its top, so a body that reads a clock, chance, a setting or a row asks for
other steps, or with other arguments, than those recorded. The harness finds that out at the first park of the
first test. Nothing is written and no tool is called.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NoReturn

from loom_django.definitions import Flow, Tool
from loom_django.engine import steps
from loom_django.engine.body import UNANSWERED, Body, BranchBody, Deciding, Parked, takes_arguments
from loom_django.engine.code import flow_for
from loom_django.engine.compensation import compensated
from loom_django.engine.context import AsyncFlowContext, FlowContext
from loom_django.engine.core import Engine
from loom_django.engine.drive import Driver, Landing, Steps, inside_body
from loom_django.engine.drive_async import AsyncDriver
from loom_django.engine.drive_sync import SyncDriver
from loom_django.engine.journal import Journal
from loom_django.engine.unwind import Unwind, Why
from loom_django.errors import FlowCodeMismatchError, HistoryLimitError
from loom_django.kernel import codec
from loom_django.kernel.events import Event, Kind
from loom_django.kernel.fold import Fold
from loom_django.kernel.state import HISTORY_DECISION, Frame, Wait

WAY_OUT = (
    "A body must ask for the same each time it is run: read clocks, chance, settings and rows in a tool, or by "
    "ctx.now(), ctx.random(), ctx.uuid4() and ctx.decide()."
)


class NonDeterminismError(AssertionError):
    """A replay of an execution does not ask for what its log holds.

    Attributes:
        execution_id, flow_id: of the execution.
        step_id: the step that differs; None if it is a wait, a decision or the end that does.
        recorded, replayed: what the log holds and what the replay asked for, as text.
    """

    def __init__(
        self, execution_id: str, flow_id: str, step_id: str | None, recorded: str, replayed: str
    ) -> None:
        self.execution_id = execution_id
        self.flow_id = flow_id
        self.step_id = step_id
        self.recorded = recorded
        self.replayed = replayed
        super().__init__(
            f"execution {execution_id!r} of flow {flow_id!r} does not replay.\n"
            f"  recorded: {recorded}\n"
            f"  replayed: {replayed}\n"
            f"{WAY_OUT}"
        )


def check_replay(engine: Engine, execution_id: str) -> None:
    """Play the log of an execution whose body has just parked or ended against that body.

    Raises:
        NonDeterminismError: the body asks for something else than the log holds.
    """
    try:
        replay(engine, engine.store.read(execution_id))
    except FlowCodeMismatchError:
        return  # a body that does not run here has nothing to be checked


def replay(engine: Engine, log: Sequence[Event], flow: Flow[..., Any] | None = None) -> bool:
    """Play a log against its flow, or the given one; False if no body has parked or ended in it.

    What was recorded before the log was moved to other code need not be asked for by that code.

    Raises:
        NonDeterminismError: the body asks for something else than the log holds.
        FlowCodeMismatchError: without ``flow``: no registered flow has the recorded code.
    """
    events = _until_last_stop(log)
    if not events:
        return False
    fold = Fold()
    for event in events:
        fold.apply(event)
    target = flow or flow_for(engine, fold)
    body = _Replay(engine, Journal(engine, fold, fence=None, writer=0), target, events[-1])
    body.report.moved = fold.migrated_sequence
    body.play()
    return True


def _until_last_stop(events: Sequence[Event]) -> Sequence[Event]:
    """The log up to where a body last stopped: a park, or the end."""
    stops = (
        Kind.EXECUTION_SUSPENDED, Kind.EXECUTION_COMPLETED, Kind.EXECUTION_FAILED, Kind.EXECUTION_CONTINUED,
    )  # fmt: skip
    last = max((place for place, event in enumerate(events) if event.kind in stops), default=-1)
    return events[: last + 1]


_FULL: Final = f"{HistoryLimitError.__module__}.{HistoryLimitError.__qualname__}"


class _Report:
    """What a replay is compared with, and where it differs."""

    def __init__(self, stop: Event) -> None:
        parked = stop.kind == Kind.EXECUTION_SUSPENDED and stop.data.get("reason") != "error"
        self.stop = stop
        # A body that is parked on that, for its log to be let grow.
        self.is_full = (stop.data.get("error") or {}).get("type") == _FULL
        self.continues = stop.kind == Kind.EXECUTION_CONTINUED
        self.expected: list[Mapping[str, Any]] = stop.data["waits"] if parked else []
        self.divergence: NonDeterminismError | None = None
        self.asked: set[str] = set()
        self.moved = 0  # the sequence of the newest move to other code


class _FromLog(Body):
    """A body, or a branch of one, that is served from the log alone and writes nothing."""

    report: _Report

    def branch(self, path: str, driver: Driver) -> BranchBody:
        return _ReplayBranch(self, path, driver)

    @property
    def is_replaying(self) -> bool:
        return True

    # What a body asks for.

    def answer(self, step_id: str, tool: Tool[..., Any]) -> Any:
        return UNANSWERED  # by perform(), which looks at the arguments too

    def perform(
        self,
        step_id: str,
        tool: Tool[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        within: steps.InLoop | None = None,
    ) -> Steps[Any]:
        given = json.loads(steps.encode_arguments(self, step_id, tool, args, kwargs, within))
        frame = self.journal.fold.frames.get(step_id)
        self.report.asked.add(step_id)
        if frame is None:
            self._leave(step_id, self._not_asked_yet(), f"{_shown(step_id, given)} at {self.where()}")
        if frame.first_sequence > self.report.moved and json.dumps(frame.args) != json.dumps(given):
            self._leave(step_id, _shown(step_id, frame.args), f"{_shown(step_id, given)} at {self.where()}")
        if not frame.settled:
            self._stop_at(step_id, f"step {step_id!r}", lambda wait: wait["key"] == step_id)
        return (yield from steps.perform(self, step_id, tool, args, kwargs, within))

    def serve(self, frame: Frame) -> Any:
        self.report.asked.add(frame.step_id)
        return super().serve(frame)

    def _not_asked_yet(self) -> str:
        left = [
            _shown(name, frame.args)
            for name, frame in self.journal.fold.frames.items()
            if name not in self.report.asked and frame.first_sequence > self.report.moved
        ]
        return left[0] if left else f"no step, but {self._last()}"

    def _last(self) -> str:
        expected = self.report.expected
        if self.report.continues:
            return "continue_as_new"
        return f"a wait for {_waits(expected)}" if expected else "the end of the flow"

    def ask_to_decide(self, decision_id: str, decider: Callable[..., Any]) -> Any:
        known = self.journal.fold.decisions.get(decision_id)
        if known is not None:
            self.report.asked.update(known.inner_steps or ())
        return super().ask_to_decide(decision_id, decider)

    def make_decision(self, decision_id: str, decider: Callable[..., Any], context: Any) -> Steps[Any]:
        line = self.where()
        if takes_arguments(decider):
            yield from self._decide_with_steps(
                decider, context, Deciding(self.path)
            )  # it may have parked inside
        self._leave(None, "no such decision", f"decision {decision_id!r} at {line}")

    def _note(self, kind: str, note: str, fields: Mapping[str, Any]) -> None:
        if note not in self.journal.fold.noted:
            self._leave(None, "no such event", f"{kind} at {self.where()}")

    def check_length(self) -> None:
        """Where a log was full is known by the log."""

    def begin_child(self, child_id: str) -> None:
        self._leave(None, "no such child", f"child {child_id!r} at {self.where()}")

    def begin_continuing(self) -> Steps[None]:
        yield from ()
        if not self.report.continues:
            self._leave(None, self._last(), f"continue_as_new at {self.where()}")
        raise self._parks()

    def ends_of(self, ids: Sequence[str]) -> dict[str, Event | None]:
        return dict.fromkeys(ids)  # they may have ended since the park

    def _take_message(self, wait_id: str, name: str) -> bool:
        return False  # one may have come since the park

    def _take_kept(self, wait: Wait) -> bool:
        return False

    def park(self, reason: str, waits: list[Wait], **how: Any) -> Landing[None]:
        yield from ()  # nothing is written
        for wait in waits:
            on = f"a wait for {wait.correlation_key or wait.on}"
            self._expect(None, on, lambda expected: expected["id"] == wait.id)  # noqa: B023
        raise self._parks()

    # Ways out.

    def _parks(self) -> Unwind:
        return self.seal(Why.PARKED)

    def _expect(self, step_id: str | None, what: str, fits: Callable[[Mapping[str, Any]], bool]) -> None:
        if not any(fits(wait) for wait in self.report.expected):
            self._leave(step_id, self._last(), f"{what} at {self.where()}")

    def _stop_at(self, step_id: str | None, what: str, fits: Callable[[Mapping[str, Any]], bool]) -> NoReturn:
        self._expect(step_id, what, fits)
        raise self._parks()

    def _leave(self, step_id: str | None, recorded: str, replayed: str) -> NoReturn:
        self.begin_live()  # a branch of a scope that failed goes as far as the log
        if self.report.is_full or HISTORY_DECISION in self.journal.fold.decisions:
            length = self.journal.fold.last_sequence
            raise HistoryLimitError(self.execution_id, length, self.settings.HISTORY_MAX_EVENTS)
        self._differs(step_id, recorded, replayed)
        raise self.seal(Why.LOST, self.report.divergence)

    def _differs(self, step_id: str | None, recorded: str, replayed: str) -> None:
        if self.report.divergence is None:
            self.report.divergence = NonDeterminismError(
                self.execution_id, self.flow.id, step_id, recorded, replayed
            )


class _ReplayBranch(_FromLog, BranchBody):
    def __init__(self, parent: _FromLog, path: str, driver: Driver) -> None:
        super().__init__(parent, path, driver)
        self.report = parent.report

    def _parks(self) -> Unwind:
        self.parked = Parked("waiting", [], None)
        return self.stop(Why.WAITING)


class _Replay(_FromLog):
    """A body run that is served from the log alone and writes nothing."""

    def __init__(self, engine: Engine, journal: Journal, flow: Flow[..., Any], stop: Event) -> None:
        kind: type[Driver] = AsyncDriver if flow.is_async else SyncDriver
        super().__init__(engine, journal, flow, kind(one_thread=True))
        self.report = _Report(stop)

    def play(self) -> None:
        raised = self._body_ends()
        parked = self.sealed is not None and self.sealed.why is Why.PARKED
        if self.report.divergence is None and not parked:
            self._check_end(self.misuse or raised)
        if self.report.divergence is None:
            self._check_nothing_left()
        if self.report.divergence is not None:
            raise self.report.divergence

    def _body_ends(self) -> BaseException | None:
        context: Any = AsyncFlowContext(self) if self.flow.is_async else FlowContext(self)
        args, kwargs = self.flow.unbind(codec.decode(self.journal.fold.input))
        driver: Any = self.driver
        try:
            with inside_body():
                driver.run_body(compensated(self, lambda: self.flow.func(context, *args, **kwargs)))
        except BaseException as exc:
            if isinstance(exc, KeyboardInterrupt):
                raise
            return exc
        return None

    def _check_end(self, raised: BaseException | None) -> None:
        ended = "the end of the flow" if raised is None else f"{type(raised).__name__}: {raised}"
        if self.report.expected or self.report.continues:
            self._differs(None, self._last(), ended)
        elif raised is not None and self.report.stop.kind == Kind.EXECUTION_COMPLETED:
            self._differs(None, "the end of the flow", ended)

    def _check_nothing_left(self) -> None:
        for step_id, frame in self.journal.fold.frames.items():
            if step_id not in self.report.asked and frame.first_sequence > self.report.moved:
                self._differs(step_id, _shown(step_id, frame.args), "the step is not asked for")
                return


def _waits(waits: list[Mapping[str, Any]]) -> str:
    return ", ".join(str(wait.get("key") or wait["on"]) for wait in waits)


def _shown(step_id: str, tree: Any) -> str:
    """A step with its arguments, as it would be called."""
    given = codec.decode(tree)
    arguments = [repr(value) for value in given["args"]]
    arguments += [f"{name}={value!r}" for name, value in given["kwargs"].items()]
    return f"step {step_id}({', '.join(arguments)})"
