"""The fold: the pure function from events to state, and the only definition of what an execution is.

``fold(events)`` and ``apply(state, event)`` are the pure forms. :class:`Fold` is the same rules over an
accumulator that it owns, so that a long log costs O(1) an event; both use one table of rules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from decimal import MAX_EMAX, MIN_EMIN, ROUND_UP, Context, Decimal
from types import MappingProxyType
from typing import Any, Final

from loom_django.kernel import codec
from loom_django.kernel.events import Event, Kind
from loom_django.kernel.state import (
    CHILD_DECISION,
    GATES,
    ON_VERDICT,
    Decision,
    ExecutionState,
    Frame,
    FrameStatus,
    Status,
    Wait,
    WaitStatus,
    chain_of,
)

# Plain dicts: a copy of a read-only view costs ten times as much, and each start makes some.
_EMPTY: Final = ExecutionState(
    options={}, frames={}, waits={}, decisions={}, children={}, child_ids={}, meters={}, spent={}
)

_STATUS, _OUTPUT, _ERROR, _FINISHED_AT, _FINISHED_SEQUENCE = map(
    Frame._fields.index, ("status", "output", "error", "finished_at", "finished_sequence")
)

# Sums of what was metered are the same in every process, whatever its own context; they are rounded up, and no
# amount makes a log unreadable.
_SUMS: Final = Context(prec=60, rounding=ROUND_UP, Emin=MIN_EMIN, Emax=MAX_EMAX, traps=[])


class Fold:
    """An execution's state while its log is read or written."""

    def __init__(self, state: ExecutionState | None = None) -> None:
        state = state or _EMPTY
        self.execution_id = state.execution_id
        self.status = state.status
        self.last_sequence = state.last_sequence
        self.flow_id = state.flow_id
        self.version = state.version
        self.input = state.input
        self.flow_hash = state.flow_hash
        self.code_hash = state.code_hash
        self.graph = state.graph
        self.options: dict[str, Any] = dict(state.options)
        self.frames: dict[str, Frame] = dict(state.frames)
        self.waits: dict[str, Wait] = dict(state.waits)
        self.decisions: dict[str, Decision] = dict(state.decisions)
        self.children: dict[str, str] = dict(state.children)
        self.child_ids: dict[str, str] = dict(state.child_ids)
        self.meters: dict[str, Any] = dict(state.meters)
        self.spent: dict[tuple[str, str], Decimal] = dict(state.spent)
        self.messages: set[int] = set(state.messages)
        self.noted: set[str] = set(state.noted)
        self.park_sequence = state.park_sequence
        self.park_fence = state.park_fence
        self.park_waits = state.park_waits
        self.reason = state.reason
        self.result = state.result
        self.error = state.error
        self.started_at = state.started_at
        self.finished_at = state.finished_at
        self.at = state.at
        self.migrated_sequence = state.migrated_sequence
        self.unknown_kinds: list[str] = list(state.unknown_kinds)
        # What is open now, beside what ever was: so that neither a park nor a projection walks the whole log.
        self.open_waits = {wait.id: None for wait in self.waits.values() if wait.pending}
        self.doubtful = {frame.step_id: None for frame in state.in_doubt}

    def apply(self, event: Event) -> None:
        """Fold one event.

        Raises:
            ValueError: the event does not follow the last one; a log has no gaps.
        """
        if event.sequence != self.last_sequence + 1:
            raise ValueError(
                f"event {event.sequence} of {event.execution_id!r} cannot follow event {self.last_sequence}: "
                f"a log has no gaps"
            )
        self.execution_id = event.execution_id
        self.last_sequence = event.sequence
        rule = _RULES.get(event.kind)
        if rule is not None:
            data = event.data
            rule(self, event, data)
            if (at := data.get("at", 0)) > self.at:
                self.at = at
        elif event.is_kernel:
            self.unknown_kinds.append(event.kind)
        else:
            self._application_event(event)

    def state(self) -> ExecutionState:
        """A frozen copy of what has been folded so far."""
        return ExecutionState(
            execution_id=self.execution_id,
            status=self.status,
            last_sequence=self.last_sequence,
            flow_id=self.flow_id,
            version=self.version,
            input=self.input,
            flow_hash=self.flow_hash,
            code_hash=self.code_hash,
            graph=self.graph,
            options=MappingProxyType(dict(self.options)),
            frames=MappingProxyType(dict(self.frames)),
            waits=MappingProxyType(dict(self.waits)),
            decisions=MappingProxyType(dict(self.decisions)),
            children=MappingProxyType(dict(self.children)),
            child_ids=MappingProxyType(dict(self.child_ids)),
            meters=MappingProxyType(dict(self.meters)),
            spent=MappingProxyType(dict(self.spent)),
            messages=frozenset(self.messages),
            noted=frozenset(self.noted),
            park_sequence=self.park_sequence,
            park_fence=self.park_fence,
            park_waits=self.park_waits,
            reason=self.reason,
            result=self.result,
            error=self.error,
            started_at=self.started_at,
            finished_at=self.finished_at,
            at=self.at,
            migrated_sequence=self.migrated_sequence,
            unknown_kinds=tuple(self.unknown_kinds),
        )

    @property
    def chain(self) -> str:
        """As :attr:`~loom_django.kernel.state.ExecutionState.chain`."""
        return chain_of(self.options, self.execution_id)

    def pending_waits(self) -> tuple[Wait, ...]:
        if self.status != Status.SUSPENDED:
            return ()
        return tuple(self.waits[wait_id] for wait_id in self.park_waits if wait_id in self.open_waits)

    def _put(self, frame: Frame) -> None:
        self.frames[frame.step_id] = frame
        if frame.status == FrameStatus.IN_DOUBT:
            self.doubtful[frame.step_id] = None
        else:
            self.doubtful.pop(frame.step_id, None)

    def _put_wait(self, wait: Wait) -> None:
        self.waits[wait.id] = wait
        if wait.pending:
            self.open_waits[wait.id] = None
        else:
            self.open_waits.pop(wait.id, None)

    # The rules, one per kind.

    def _started(self, event: Event, data: Mapping[str, Any]) -> None:
        self.flow_id = data["flow"]
        self.version = data["version"]
        self.input = data.get("input")
        self.flow_hash = data.get("hash", "")
        self.code_hash = data.get("code", "")
        self.graph = data.get("graph")
        self.started_at = data["at"]
        self.options = dict(data.get("options") or {})
        # Those of its predecessor that are still to end with their parent.
        self.children = dict.fromkeys(self.options.get("children", ()), "cancel")

    def _suspended(self, event: Event, data: Mapping[str, Any]) -> None:
        self.status = Status.SUSPENDED
        self.reason = data.get("reason", "")
        self.park_sequence = event.sequence
        self.park_fence = event.fence or 0
        self.park_waits = tuple(item["id"] for item in data["waits"])
        gate = any(item["on"] in GATES for item in data["waits"])
        for wait_id in self.open_waits.keys() - set(self.park_waits):
            if not gate or self.waits[wait_id].on in GATES:
                self._put_wait(replace(self.waits[wait_id], status=WaitStatus.WITHDRAWN))
        for item in data["waits"]:
            known = self.waits.get(item["id"])
            if known is not None and known.answered:
                continue
            self._put_wait(
                Wait(
                    id=item["id"],
                    on=item["on"],
                    correlation_key=item.get("key"),
                    wake_at=item.get("wake_at"),
                    since=known.since if known else data["at"],
                    children=tuple(item.get("children", ())),
                    mode=item.get("mode", ""),
                    budget=item.get("budget", {}),
                )
            )

    def _resumed(self, event: Event, data: Mapping[str, Any]) -> None:
        self._unpark()
        wait = self.waits.get(data.get("wait", ""))
        if wait is None or not wait.pending:
            return
        if wait.on == ON_VERDICT:
            self._verdict(event, data["payload"])
        self._put_wait(
            replace(
                wait,
                status=WaitStatus.ANSWERED,
                answer=data.get("payload"),
                answered_by=data.get("principal", ""),
                answered_at=data["at"],
                answered_sequence=event.sequence,
            )
        )

    def _unpark(self) -> None:
        self.status = Status.RUNNING
        self.park_sequence = None
        self.park_waits = ()
        self.reason = ""

    def _verdict(self, event: Event, verdict: Mapping[str, Any]) -> None:
        frame = self.frames[verdict["step_id"]]
        match verdict["resolution"]:
            case "completed-with-result":
                change: dict[str, Any] = {"status": FrameStatus.COMPLETED, "output": verdict["output"]}
            case "retry-fresh":
                change = {"status": FrameStatus.FRESH, "generation": frame.generation + 1}
            case _:
                change = {"status": FrameStatus.FAILED, "error": verdict["error"]}
        if change["status"] != FrameStatus.FRESH:
            change |= {"finished_at": event.data["at"], "finished_sequence": event.sequence}
        self._put(frame._replace(**change))

    def _timer_fired(self, event: Event, data: Mapping[str, Any]) -> None:
        wait = self.waits.get(data["wait"])
        if wait is None or not wait.pending:
            return
        self._put_wait(
            replace(
                wait,
                status=WaitStatus.TIMED_OUT,
                answered_at=data["at"],
                answered_sequence=event.sequence,
            )
        )

    def _message(self, event: Event, data: Mapping[str, Any]) -> None:
        self.messages.add(data["number"])
        known = self.waits.get(data["wait"])
        if known is not None and known.on == ON_VERDICT and not known.answered:
            self._verdict(event, data["payload"])
        self._put_wait(
            Wait(
                id=data["wait"],
                on=known.on if known else data["on"],
                correlation_key=known.correlation_key if known else data["name"],
                wake_at=known.wake_at if known else None,
                status=WaitStatus.ANSWERED,
                answer=data.get("payload"),
                answered_by=data.get("principal", ""),
                answered_at=data["at"],
                answered_sequence=event.sequence,
                since=known.since if known else data["at"],
            )
        )

    def _completed(self, event: Event, data: Mapping[str, Any]) -> None:
        self._finish(Status.COMPLETED, data)
        self.result = data.get("result")

    def _failed(self, event: Event, data: Mapping[str, Any]) -> None:
        self._finish(Status.FAILED, data)
        self.error = data["error"]

    def _cancelled(self, event: Event, data: Mapping[str, Any]) -> None:
        self._finish(Status.CANCELLED, data)
        self.reason = data.get("reason", "")

    def _continued(self, event: Event, data: Mapping[str, Any]) -> None:
        self._finish(Status.CONTINUED, data)
        self.result = data.get("successor")

    def _finish(self, status: Status, data: Mapping[str, Any]) -> None:
        self._unpark()
        self.status = status
        self.finished_at = data["at"]

    def _migrated(self, event: Event, data: Mapping[str, Any]) -> None:
        self.migrated_sequence = event.sequence
        self.flow_id = data.get("to_flow", self.flow_id)
        self.version = data.get("to_version", self.version)
        self.flow_hash = data.get("to_hash", self.flow_hash)
        self.code_hash = data.get("to_code", self.code_hash)
        self.graph = data.get("to_graph")

    def _step_started(self, event: Event, data: Mapping[str, Any]) -> None:
        if self.status == Status.PENDING:
            self.status = Status.RUNNING
        step_id = data["step"]
        known = self.frames.get(step_id)
        self._put(
            Frame(
                step_id=step_id,
                tool=data["tool"],
                status=FrameStatus.RUNNING,
                attempts=(known.attempts if known else 0) + 1,
                failures=known.failures if known else 0,
                generation=known.generation if known else 0,
                idempotent=data.get("idempotent"),
                scope=data.get("scope", ""),
                args=data.get("args"),
                loop=data.get("loop", ""),
                content=data.get("content", ""),
                error=known.error if known else None,
                started_sequence=event.sequence,
                first_sequence=known.first_sequence if known else event.sequence,
                started_at=data["at"],
            )
        )

    def _step_completed(self, event: Event, data: Mapping[str, Any]) -> None:
        self._settle(event, data, FrameStatus.COMPLETED, data.get("output"), None)

    def _step_failed(self, event: Event, data: Mapping[str, Any]) -> None:
        self._settle(event, data, FrameStatus.FAILED, None, data["error"])

    def _settle(
        self,
        event: Event,
        data: Mapping[str, Any],
        status: FrameStatus,
        output: Any,
        error: Mapping[str, Any] | None,
    ) -> None:
        frame = self.frames[data["step"]]
        # As _replace, at a third of its cost: half of a long log are such events.
        settled: list[Any] = list(frame)
        settled[_STATUS], settled[_OUTPUT], settled[_ERROR] = status, output, error
        settled[_FINISHED_AT], settled[_FINISHED_SEQUENCE] = data["at"], event.sequence
        self._put(Frame._make(settled))

    def _step_retrying(self, event: Event, data: Mapping[str, Any]) -> None:
        frame = self.frames[data["step"]]
        self._put(
            frame._replace(
                status=FrameStatus.RETRYING,
                failures=frame.failures + 1,
                generation=frame.generation + (1 if data.get("fresh_key") else 0),
                error=data["error"],
                next_at=data.get("next_at", 0),
            )
        )

    def _in_doubt(self, event: Event, data: Mapping[str, Any]) -> None:
        frame = self.frames[data["step"]]
        self._put(
            frame._replace(
                status=FrameStatus.IN_DOUBT,
                in_doubt_sequence=event.sequence,
                cause=data.get("cause", ""),
            )
        )

    def _returned_late(self, event: Event, data: Mapping[str, Any]) -> None:
        frame = self.frames.get(data["step"])
        # What an earlier attempt returned says nothing of this one.
        if frame is not None and data.get("attempt", frame.attempts) == frame.attempts:
            self._put(frame._replace(late=(*frame.late, data)))

    def _decided(self, event: Event, data: Mapping[str, Any]) -> None:
        if self.status == Status.PENDING:
            self.status = Status.RUNNING
        if data["decision"].startswith(CHILD_DECISION):
            self.children.pop(data["decision"].removeprefix(CHILD_DECISION), None)
        inner = data.get("inner_steps")
        self.decisions[data["decision"]] = Decision(
            value=data.get("value"),
            at=data["at"],
            sequence=event.sequence,
            inner_steps=None if inner is None else tuple(inner),
            inner_since=data.get("inner_since", 0),
        )

    def _child_started(self, event: Event, data: Mapping[str, Any]) -> None:
        if self.status == Status.PENDING:
            self.status = Status.RUNNING
        if "child" in data:
            self.children[data["child"]] = data.get("on_parent_close", "cancel")
            self.child_ids[data.get("note", data["child"])] = data["child"]

    def _metered(self, event: Event, data: Mapping[str, Any]) -> None:
        amount = codec.decode(data["amount"])
        if "note" in data:
            self.noted.add(data["note"])
        self.meters[data["resource"]] = _SUMS.add(self.meters.get(data["resource"], Decimal(0)), amount)
        frame = self.frames.get(data.get("step", ""))
        if frame is not None and frame.loop:
            spender = (frame.loop, data["resource"])
            self.spent[spender] = _SUMS.add(self.spent.get(spender, Decimal(0)), amount)

    def _outcome(self, event: Event, data: Mapping[str, Any]) -> None:
        frame = self.frames.get(data.get("step", ""))
        if frame is not None and frame.status is FrameStatus.IN_DOUBT:
            self._put(frame._replace(status=FrameStatus.NOTED, finished_at=data["at"]))

    def _application_event(self, event: Event) -> None:
        note = event.data.get("note")
        if note is not None:
            self.noted.add(note)

    def _noted(self, event: Event, data: Mapping[str, Any]) -> None:
        """A note that changes no state."""


_Rule = Callable[[Fold, Event, Mapping[str, Any]], None]

_RULES: Final[Mapping[str, _Rule]] = {
    Kind.EXECUTION_STARTED: Fold._started,
    Kind.EXECUTION_SUSPENDED: Fold._suspended,
    Kind.EXECUTION_RESUMED: Fold._resumed,
    Kind.EXECUTION_COMPLETED: Fold._completed,
    Kind.EXECUTION_FAILED: Fold._failed,
    Kind.EXECUTION_CANCELLED: Fold._cancelled,
    Kind.EXECUTION_CONTINUED: Fold._continued,
    Kind.EXECUTION_DENIED: Fold._noted,
    Kind.EXECUTION_MIGRATED: Fold._migrated,
    Kind.STEP_STARTED: Fold._step_started,
    Kind.STEP_COMPLETED: Fold._step_completed,
    Kind.STEP_FAILED: Fold._step_failed,
    Kind.STEP_RETRYING: Fold._step_retrying,
    Kind.EFFECT_INDOUBT: Fold._in_doubt,
    Kind.EFFECT_RETURNED_LATE: Fold._returned_late,
    Kind.TIMER_FIRED: Fold._timer_fired,
    Kind.MESSAGE_CONSUMED: Fold._message,
    Kind.DECISION_RECORDED: Fold._decided,
    Kind.CHILD_STARTED: Fold._child_started,
    Kind.OUTCOME_RECORDED: Fold._outcome,
    Kind.RESOURCE_METERED: Fold._metered,
}
if set(_RULES) != set(Kind):
    raise TypeError(f"kinds without a rule in the fold: {sorted(set(Kind) ^ set(_RULES))}")


def apply(state: ExecutionState, event: Event) -> ExecutionState:
    """Return the state after one more event; the given state is left as it was."""
    fold_ = Fold(state)
    fold_.apply(event)
    return fold_.state()


def fold(events: Iterable[Event]) -> ExecutionState:
    """Return the state that a log (or a prefix of one) stands for."""
    fold_ = Fold()
    for event in events:
        fold_.apply(event)
    return fold_.state()
