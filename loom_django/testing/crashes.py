"""A scenario with a crash at every point that it passes: does anything happen twice, or end otherwise?

The scenario is run without a crash first, to learn the points; then once for each of them, from a clean state,
with the process dying there and recovery taking over.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

from django.core import mail
from django.core.management import call_command
from django.db import connections
from django.db.transaction import Atomic, set_rollback

from loom_django import compat
from loom_django.conf import get_settings
from loom_django.errors import ContextMisuseError, OpenTransactionError
from loom_django.kernel import codec
from loom_django.kernel.state import TERMINAL_STATUSES, ExecutionState, Status
from loom_django.runtime import loom
from loom_django.testing.determinism import NonDeterminismError
from loom_django.testing.harnessing import POINTS, Call, Harness, Passage, check_point, harness

Scenario = Callable[[Harness], object]

# Between these points nobody can know whether the effect happened, so a step that must not run twice parks.
_DOUBTFUL: Final = ("before-effect", "in-effect", "after-effect")


@dataclass(frozen=True, slots=True)
class SweptPoint:
    """What came of a crash at one point.

    Attributes:
        execution_id, flow_id, step_id, point: where the process died; ``number`` counts from 1 how often this
            step had come to this point.
        ended: how each execution ended, by its id.
        logs: the kinds of each log, by the execution's id.
        twice: the steps whose tool was called more than once, with how often.
        problems: what is wrong; empty if all is well.
    """

    execution_id: str
    flow_id: str
    step_id: str
    point: str
    number: int
    ended: Mapping[str, str]
    logs: Mapping[str, tuple[str, ...]]
    twice: Mapping[str, int]
    problems: tuple[str, ...]

    @property
    def ok(self) -> bool:
        return not self.problems

    def __str__(self) -> str:
        again = f" (time {self.number})" if self.number > 1 else ""
        ends = ", ".join(f"{name} {end}" for name, end in self.ended.items())
        lines = [
            f"{'ok  ' if self.ok else 'FAIL'} {self.flow_id}: {self.step_id} {self.point}{again}: {ends}"
        ]
        lines += [f"       {problem}" for problem in self.problems]
        lines += [f"       ran {times} times: {step}" for step, times in self.twice.items()]
        lines += [f"       log of {name}: {' '.join(kinds)}" for name, kinds in self.logs.items()]
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class SweepReport:
    """What came of a sweep; ``print`` shows each point, the logs, and what ran twice."""

    points: tuple[SweptPoint, ...]

    @property
    def ok(self) -> bool:
        """True if no point has a problem."""
        return not self.failures

    @property
    def failures(self) -> tuple[SweptPoint, ...]:
        """The points with problems."""
        return tuple(point for point in self.points if not point.ok)

    def __str__(self) -> str:
        head = f"crash sweep: {len(self.points)} points, {len(self.failures)} of them with problems"
        return "\n".join([head, *map(str, self.points)])


def crash_sweep(scenario: Scenario, *, points: Iterable[str] | None = None) -> SweepReport:
    """Run a scenario with a crash at each point that each of its steps passes, and recover.

    A point has a problem if a tool that is not declared ``idempotent=True`` was called again without a
    verdict, a transactional step took effect more than once, attempts of one step had different keys, the
    scenario raised, or an execution ended otherwise than without a crash. A park in doubt is right where an
    ``idempotent=False`` tool may or may not have had its effect; what the scenario raises after it is no
    problem, since a person would have to decide first.

    In a TestCase each run is a savepoint that is rolled back. Elsewhere all tables are truncated before each
    run and at the end, so the scenario itself must make what it needs.

    Args:
        scenario: called with a fresh harness for each run; it stubs, starts, runs and answers.
        points: the names of the points to crash at; all of them if left out.

    Raises:
        AssertionError: the scenario comes to no such point.
        InvalidInputError: no such point. OpenTransactionError: inside ``atomic()``.
        ContextMisuseError: outside of a test, where tables would be truncated that are needed.
    """
    wanted = _checked(points)
    _check_place()
    reference = _play(scenario, None)
    # What differs between two runs without a crash (a random id, a time) is no fault of a crash.
    again = _play(scenario, None)
    passages = [passage for passage in reference.passages if passage.point in wanted]
    if not passages:
        raise AssertionError(f"the scenario comes to none of {', '.join(wanted)}: does it call h.run()?")
    expected = _Expected(reference, again)
    return SweepReport(tuple(_swept(scenario, passage, expected) for passage in passages))


def _checked(points: Iterable[str] | None) -> tuple[str, ...]:
    wanted = POINTS if points is None else tuple(points)
    for point in wanted:
        check_point(point)
    return wanted


def _check_place() -> None:
    connection = connections[get_settings().DATABASE]
    if compat.in_transaction(connection):
        raise OpenTransactionError(
            "crash_sweep()", "its runs could not commit", "Call it after the block; TestCase's own is fine."
        )
    if not compat.in_testcase(connection) and not hasattr(mail, "outbox"):
        raise ContextMisuseError("crash_sweep() truncates all tables: call it in a test, on a test database")


# One run.


@dataclass(frozen=True, slots=True)
class _Made:
    """A call with what its step is declared to be; the execution counted from 0."""

    call: Call
    execution: int
    idempotent: bool | None
    transactional: bool


@dataclass
class _Run:
    """What one run of the scenario did."""

    passages: list[Passage] = field(default_factory=list)
    calls: list[_Made] = field(default_factory=list)
    states: list[ExecutionState] = field(default_factory=list)
    logs: dict[str, tuple[str, ...]] = field(default_factory=dict)
    error: Exception | None = None
    died: bool = False


def _play(scenario: Scenario, crash: Passage | None) -> _Run:
    """Run the scenario from a clean state, with a crash at a passage or without one."""
    run = _Run()
    with _clean_state(), harness() as h:
        h._recovers_at_once = True
        armed = crash.__eq__
        if crash is not None:
            h._armed.append(armed)
        try:
            scenario(h)
        except Exception as exc:
            if crash is None:
                raise
            run.error = exc
        run.died = armed not in h._armed
        run.passages = list(h._passages)
        for execution_id in h._entered:
            run.states.append(loom.state(execution_id))
            run.logs[execution_id] = tuple(h.events(execution_id))
        run.calls = list(_declared(h, run.states))
    return run


def _declared(h: Harness, states: Sequence[ExecutionState]) -> Iterator[_Made]:
    tools = {(passage.execution_id, passage.step_id): passage.tool for passage in h._passages}
    for call, _ in h._made:
        place = h._entered.index(call.execution_id)
        tool = tools[call.execution_id, call.step_id]
        frame = states[place].frames.get(call.step_id)
        yield _Made(
            call,
            place,
            frame.idempotent if frame is not None else None,
            tool.transactional,
        )


@contextmanager
def _clean_state() -> Iterator[None]:
    """Leave nothing of a run behind: a savepoint in a TestCase, else truncated tables."""
    alias = get_settings().DATABASE
    if not compat.in_testcase(connections[alias]):
        _truncate(alias)
        try:
            yield
        finally:
            _truncate(alias)
        return
    with ExitStack() as savepoints:
        for name in connections:
            if compat.in_testcase(connections[name]):
                savepoints.enter_context(_savepoint(name))
        yield


@contextmanager
def _savepoint(alias: str) -> Iterator[None]:
    block: Any = Atomic(using=alias, savepoint=True, durable=False)
    block._from_testcase = True  # as TestCase marks its own, so that it counts for no caller's transaction
    with block:
        try:
            yield
        finally:
            set_rollback(True, using=alias)


def _truncate(alias: str) -> None:
    for name in sorted({alias, "default"}):
        call_command("flush", verbosity=0, interactive=False, database=name, allow_cascade=False)


# What a run without a crash promises of one with a crash.


class _Expected:
    """How the scenario goes without a crash."""

    def __init__(self, reference: _Run, again: _Run) -> None:
        self.states = reference.states
        results = [_end(state) for state in again.states]
        self.stable = [
            place < len(results) and results[place] == _end(state) for place, state in enumerate(self.states)
        ]
        self.calls: dict[tuple[int, str], int] = {}  # of each step, the most under one key
        for (place, step_id, _), times in _under_one_key(reference).items():
            self.calls[place, step_id] = max(times, self.calls.get((place, step_id), 0))
        self.keys = _keys(reference)
        self.outcomes = _outcomes(reference)


def _step_of(made: _Made) -> tuple[int, str]:
    return made.execution, made.call.step_id


def _end(state: ExecutionState) -> str:
    """Status with result or error, as text that can be compared and shown."""
    if state.status is Status.COMPLETED:
        return f"{state.status} with {codec.decode(state.result)!r}"
    if state.status is Status.FAILED:
        return f"{state.status} by {(state.error or {}).get('type', '')}"
    if state.parked:
        waits = ", ".join(f"{wait.on} {wait.correlation_key or ''}".strip() for wait in state.pending_waits)
        return f"{state.status} on {waits}"
    return str(state.status)


def _under_one_key(run: _Run) -> Counter[tuple[int, str, str]]:
    """How often each step was called under each of its keys."""
    return Counter((made.execution, made.call.step_id, made.call.idempotency_key) for made in run.calls)


def _keys(run: _Run) -> dict[tuple[int, str], int]:
    """How many different keys each step used."""
    keys: dict[tuple[int, str], set[str]] = {}
    for made in run.calls:
        keys.setdefault(_step_of(made), set()).add(made.call.idempotency_key)
    return {step: len(used) for step, used in keys.items()}


def _outcomes(run: _Run) -> Counter[tuple[int, str]]:
    """How often each step came to an outcome that was recorded."""
    return Counter(
        (passage.execution, passage.step_id) for passage in run.passages if passage.point == "after-outcome"
    )


# The judgement of one crash.


def _swept(scenario: Scenario, crash: Passage, expected: _Expected) -> SweptPoint:
    run = _play(scenario, crash)
    states = {state.execution_id: state for state in run.states}
    calls = Counter(map(_step_of, run.calls))
    return SweptPoint(
        execution_id=crash.execution_id,
        flow_id=crash.flow_id,
        step_id=crash.step_id,
        point=crash.point,
        number=crash.number,
        ended={name: _end(state) for name, state in states.items()},
        logs=run.logs,
        twice={
            f"{step_id} of {run.states[place].execution_id}": times
            for (place, step_id), times in calls.items()
            if times > 1
        },
        problems=tuple(_problems(run, crash, expected)),
    )


def _problems(run: _Run, crash: Passage, expected: _Expected) -> Iterator[str]:
    if not run.died:
        yield "this time the scenario did not come to the point: it must do the same each time it is run"
        return
    yield from _doubled(run, expected)
    yield from _changed_keys(run, expected)
    in_doubt = _rightly_in_doubt(run, crash)
    if run.error is not None and (not in_doubt or isinstance(run.error, NonDeterminismError)):
        yield f"the scenario raised {type(run.error).__name__}: {run.error}"
    yield from _other_ends(run, expected, in_doubt)


def _doubled(run: _Run, expected: _Expected) -> Iterator[str]:
    """Calls that should not have been made, and transactions that took effect again."""
    steps = {_step_of(made): made for made in run.calls}
    for (place, step_id, key), times in _under_one_key(run).items():
        made = steps[place, step_id]
        if (
            made.transactional
            or made.idempotent is True
            or times <= max(1, expected.calls.get((place, step_id), 1))
        ):
            continue
        declared = (
            "declared idempotent=False"
            if made.idempotent is False
            else "not declared: say idempotent=True if a repetition does no harm, else idempotent=False"
        )
        yield f"{step_id} was called {times} times with the key {key} and without a verdict; it is {declared}"
    for step, times in _outcomes(run).items():
        if step in steps and steps[step].transactional and times > max(1, expected.outcomes[step]):
            yield f"{step[1]} is transactional and took effect {times} times"


def _changed_keys(run: _Run, expected: _Expected) -> Iterator[str]:
    for step, used in _keys(run).items():
        if used > max(1, expected.keys.get(step, 1)):
            keys = sorted({made.call.idempotency_key for made in run.calls if _step_of(made) == step})
            yield f"{step[1]} had different keys in its attempts: {', '.join(keys)}"


def _rightly_in_doubt(run: _Run, crash: Passage) -> bool:
    """True if the crash left its step in doubt where nobody can know; only what must not run twice can be."""
    if crash.point not in _DOUBTFUL or crash.execution >= len(run.states):
        return False
    frame = run.states[crash.execution].frames.get(crash.step_id)
    return frame is not None and frame in run.states[crash.execution].in_doubt


def _other_ends(run: _Run, expected: _Expected, in_doubt: bool) -> Iterator[str]:
    for place, wanted in enumerate(expected.states):
        if place >= len(run.states):
            if not in_doubt:
                yield f"execution {wanted.execution_id} of flow {wanted.flow_id} was not run"
            continue
        state = run.states[place]
        if in_doubt and state.status not in TERMINAL_STATUSES:
            continue  # it is parked in doubt, or waits for what the scenario did not come to
        same = _end(state) == _end(wanted) if expected.stable[place] else state.status == wanted.status
        if not same:
            yield f"{state.execution_id} is {_end(state)}; without a crash it is {_end(wanted)}"
