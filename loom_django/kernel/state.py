"""What the log says of an execution: frozen values, made by :mod:`loom_django.kernel.fold` alone.

Times are integers, microseconds since the epoch in UTC: facts that the log carries, never a clock read here.
Values of the user's own are kept in the codec's JSON form and decoded by whoever serves them.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from loom_django.kernel.keys import idempotency_key, successor_id


class Status(enum.StrEnum):
    """Where an execution stands; a fact of the fold. Ready and held are not statuses."""

    PENDING = "PENDING"
    RUNNING = "RUNNING"
    SUSPENDED = "SUSPENDED"
    COMPLETED = "COMPLETED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"
    CONTINUED = "CONTINUED"


TERMINAL_STATUSES: Final = frozenset({Status.COMPLETED, Status.FAILED, Status.CANCELLED, Status.CONTINUED})


class FrameStatus(enum.StrEnum):
    RUNNING = "running"
    RETRYING = "retrying"
    IN_DOUBT = "in-doubt"
    FRESH = "fresh"  # a verdict asked for a new logical attempt that has not begun
    COMPLETED = "completed"
    FAILED = "failed"
    NOTED = "noted"  # in doubt when the execution ended; an operator recorded what became of it


SETTLED: Final = frozenset({FrameStatus.COMPLETED, FrameStatus.FAILED})


# Waits that only their own call may answer. Programs cannot wait on these names.
ON_VERDICT: Final = "EffectInDoubtResolved"
ON_TIMER: Final = "__loom_timer__"
ON_RETRY: Final = "__loom_retry__"
ON_MESSAGE: Final = "__loom_message__"
ON_DIVERGED: Final = "__loom_diverged__"
ON_ERROR: Final = "__loom_error__"
ON_POISONED: Final = "__loom_poisoned__"
ON_CHILD: Final = "CHILD_DONE"
# Of an agent loop that has used up a resource: answered by a plain resume, whose payload is judged.
ON_BUDGET: Final = "BudgetExhausted"


# Waits that stand for a flow that cannot go on: what the flow itself waits for is not touched by them.
GATES: Final = frozenset({ON_DIVERGED, ON_ERROR, ON_POISONED})


# A decision under this name says that the body was told that its log is full.
HISTORY_DECISION: Final = "__loom_history__"

# A decision under this name and a child's id is how that child ended, as its parent has seen it.
CHILD_DECISION: Final = "__loom_child__:"


def chain_of(options: Mapping[str, Any], execution_id: str) -> str:
    """The chain of an execution, by the options that its start has recorded."""
    return str(options.get("chain", execution_id))


def is_reserved(on: str) -> bool:
    return on in (ON_VERDICT, ON_CHILD) or on.startswith("__loom_")


class Frame(NamedTuple):
    """What is known of one step. A tuple, since a long log makes many thousands of them at each resume."""

    step_id: str
    tool: str
    status: FrameStatus
    attempts: int = 0  # STEP_STARTED events, crash re-runs included
    failures: int = 0  # failed attempts that were retried (STEP_RETRYING)
    generation: int = 0  # suffix of the idempotency key; moved by durable facts only
    idempotent: bool | None = None
    scope: str = ""
    args: Any = None
    output: Any = None
    error: Mapping[str, Any] | None = None
    started_sequence: int = 0
    first_sequence: int = 0
    finished_sequence: int = 0
    in_doubt_sequence: int = 0
    cause: str = ""
    started_at: int = 0
    finished_at: int = 0
    next_at: int = 0
    loop: str = ""  # the agent loop that it belongs to
    content: str = ""  # of a loop's step: a digest of what it is asked, and a part of its key
    late: tuple[Mapping[str, Any], ...] = ()

    @property
    def settled(self) -> bool:
        return self.status in SETTLED

    def idempotency_key(self, execution_id: str) -> str:
        """The key of its newest logical attempt."""
        return idempotency_key(execution_id, self.step_id, self.generation, self.content)


class WaitStatus(enum.StrEnum):
    PENDING = "pending"
    ANSWERED = "answered"
    TIMED_OUT = "timed-out"
    WITHDRAWN = "withdrawn"  # the newest park does not hold it any more; a later one may


@dataclass(frozen=True, slots=True)
class Wait:
    """One thing that an execution waits for; its identity survives a re-park."""

    id: str
    on: str
    correlation_key: str | None = None
    wake_at: int | None = None
    status: WaitStatus = WaitStatus.PENDING
    answer: Any = None
    answered_by: str = ""
    answered_at: int = 0
    answered_sequence: int = 0
    since: int = 0  # when it was first parked on
    children: tuple[str, ...] = ()  # of a wait for children: which
    mode: str = ""  # "all" or "any" of them
    budget: Mapping[str, Any] = field(
        default_factory=dict
    )  # of one for a budget: loop, used and limit, as text

    @property
    def pending(self) -> bool:
        return self.status == WaitStatus.PENDING

    @property
    def answered(self) -> bool:
        return self.status in (WaitStatus.ANSWERED, WaitStatus.TIMED_OUT)


@dataclass(frozen=True, slots=True)
class Decision:
    value: Any
    at: int
    sequence: int = 0
    inner_steps: tuple[str, ...] | None = None  # the steps that its decider asked for
    inner_since: int = 0  # where those are too many to be named: when the first of them was begun


@dataclass(frozen=True, slots=True)
class ExecutionState:
    """The fold of a log. Mappings are read-only views, in the order of the log."""

    execution_id: str = ""
    status: Status = Status.PENDING
    last_sequence: int = 0
    flow_id: str = ""
    version: int = 1
    input: Any = None
    flow_hash: str = ""
    code_hash: str = ""
    graph: Mapping[str, Any] | None = (
        None  # the declared steps, as the start or the newest move recorded them
    )
    options: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    frames: Mapping[str, Frame] = field(default_factory=lambda: MappingProxyType({}))
    waits: Mapping[str, Wait] = field(default_factory=lambda: MappingProxyType({}))
    decisions: Mapping[str, Decision] = field(default_factory=lambda: MappingProxyType({}))
    # Children that were started and whose end the body has not seen, each with what its parent's end means to it.
    children: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    child_ids: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))  # all, by their notes
    meters: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    # What the steps of each agent loop have metered, by loop and resource.
    spent: Mapping[tuple[str, str], Decimal] = field(default_factory=lambda: MappingProxyType({}))
    messages: frozenset[int] = frozenset()  # numbers of the messages that the log has taken
    noted: frozenset[str] = frozenset()  # emits and meters of the body: a replay does not repeat them
    park_sequence: int | None = None  # of the newest park while it is unanswered
    park_fence: int = 0
    park_waits: tuple[str, ...] = ()  # the ids of the waits that the newest park holds
    reason: str = ""
    result: Any = None
    error: Mapping[str, Any] | None = None
    started_at: int = 0
    finished_at: int = 0
    at: int = 0  # the newest fact's time; no later fact is stamped earlier
    migrated_sequence: int = 0  # of the newest EXECUTION_MIGRATED
    unknown_kinds: tuple[str, ...] = ()

    @property
    def finished(self) -> bool:
        return self.status in TERMINAL_STATUSES

    @property
    def chain(self) -> str:
        """The id of the first execution of its chain: its own, unless it continues another one."""
        return chain_of(self.options, self.execution_id)

    @property
    def predecessor(self) -> str | None:
        """The id of the execution that this one continues."""
        link = self.options.get("link", 1)
        return None if link == 1 else successor_id(self.chain, link - 1)

    @property
    def successor(self) -> str | None:
        """The id of the execution that continues this one."""
        return self.result if self.status == Status.CONTINUED else None

    @property
    def parked(self) -> bool:
        return self.status == Status.SUSPENDED

    @property
    def pending_waits(self) -> tuple[Wait, ...]:
        """The waits that the newest park holds and nobody has answered."""
        held = (self.waits[wait_id] for wait_id in self.park_waits) if self.parked else ()
        return tuple(wait for wait in held if wait.pending)

    @property
    def in_doubt(self) -> tuple[Frame, ...]:
        return tuple(frame for frame in self.frames.values() if frame.status == FrameStatus.IN_DOUBT)
