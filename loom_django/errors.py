"""Every refusal of loom_django is one of these classes: it has a stable `code`, carries its ids as
attributes, survives pickling, and its message names the value, the rule and the way out.

Names without the suffix "Error" are outcomes: a flow may catch them (`StepFailed`, `ChildFailed`,
`WaitTimedOut`) or a tool may raise them (`EffectInDoubt`). Everything else tells a caller or an operator
that something was refused.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import Any, ClassVar, Final, Literal, get_args

# This module of Django needs no settings and no app registry, so the import is safe before apps are ready.
from django.core.exceptions import PermissionDenied

RefusalReason = Literal[
    "not-suspended", "no-such-wait", "ambiguous-wait", "stale-park", "reserved-wait", "terminal", "not-due"
]
MAX_LISTED = 20
MAX_SHOWN = 80


def class_name(cls: type) -> str:
    """The name by which classes are recorded, failures matched and types registered."""
    return f"{cls.__module__}.{cls.__qualname__}"


def shown(value: object) -> str:
    """The value as messages show it, in few characters and whatever its own repr does."""
    try:
        text = repr(value)
    except Exception:  # Python itself refuses to write an int of many digits
        text = f"a {type(value).__name__}"
    return text if len(text) <= MAX_SHOWN else text[:MAX_SHOWN] + "…"


def _rebuild(cls: type[LoomError], args: tuple[Any, ...], state: dict[str, Any]) -> LoomError:
    error = cls.__new__(cls)
    error.args = args
    error.__dict__.update(state)
    return error


def _listed(names: Iterable[str]) -> str:
    shown = list(names)
    if len(shown) > MAX_LISTED:
        shown = [*shown[:MAX_LISTED], "…"]
    return ", ".join(shown) or "none"


def _with_detail(message: str, detail: str) -> str:
    return f"{message} {detail}" if detail else message


class LoomError(Exception):
    """The base of every error of loom_django."""

    code: ClassVar[str] = "loom-error"
    retryable: ClassVar[bool] = False

    def __reduce__(self) -> tuple[Any, ...]:
        # Exception's own way calls the class with its message again, which loses the attributes.
        return _rebuild, (type(self), self.args, dict(self.__dict__))


# Outcomes: what a flow catches, or what a tool raises.


class StepFailed(LoomError):
    """A step ended in a failure; the same error is raised live and on every replay."""

    code = "step-failed"

    def __init__(
        self, step_id: str, error_type: str, message: str, bases: Iterable[str] = (), traceback: str = ""
    ) -> None:
        self.step_id = step_id
        self.error_type = error_type
        self.message = message
        self.bases = tuple(bases)
        self.traceback = traceback
        super().__init__(f'step "{step_id}" failed with {error_type}: {message}')

    def matches(self, exception: type[BaseException] | str) -> bool:
        """Tell if the failure was of this class or of a subclass, by the names that were recorded.

        A class may be given, or its name as "module.QualName"; a name without a module is a built-in one.
        """
        if not isinstance(exception, str):
            name = class_name(exception)
        else:
            name = exception if "." in exception else f"builtins.{exception}"
        return name == self.error_type or name in self.bases


class ChildFailed(LoomError):
    """An awaited child ended without a result."""

    code = "child-failed"

    def __init__(self, child_id: str, status: str, error_type: str = "", message: str = "") -> None:
        self.child_id = child_id
        self.status = status
        self.error_type = error_type
        self.message = message
        why = ": ".join(part for part in (error_type, message) if part)
        super().__init__(f'child "{child_id}" ended as {status}' + (f" with {why}" if why else ""))


class WaitTimedOut(LoomError):
    """Nobody answered a wait before its timeout."""

    code = "wait-timed-out"

    def __init__(self, on: str, correlation_key: str | None, timed_out_at: datetime) -> None:
        self.on = on
        self.correlation_key = correlation_key
        self.timed_out_at = timed_out_at
        which = f'"{on}"' if correlation_key is None else f'"{on}" ({correlation_key})'
        super().__init__(f"nobody answered the wait for {which} before {timed_out_at.isoformat()}")


class EffectInDoubt(LoomError):
    """Raised by a non-idempotent tool that cannot tell if its effect happened: a person decides."""

    code = "effect-in-doubt"

    def __init__(self, message: str = "it is not known whether the effect happened") -> None:
        self.message = message
        super().__init__(message)


# Definitions.


class DefinitionError(LoomError):
    """A flow, a tool or a registered type is declared in a way that cannot work."""

    code = "definition"

    def __init__(
        self,
        flow_id: str | None = None,
        problem: str = "cannot be used as declared",
        *,
        tool: str | None = None,
    ) -> None:
        self.flow_id = flow_id
        self.tool = tool
        self.problem = problem
        owners = [f'flow "{flow_id}"'] if flow_id is not None else []
        owners += [f'tool "{tool}"'] if tool is not None else []
        super().__init__(f"{', '.join(owners)}: {problem}" if owners else problem)


class ScheduleDefinitionError(DefinitionError):
    """A schedule is declared with a value that cannot work."""

    code = "schedule-definition"

    def __init__(self, schedule_id: str, field: str, value: object, problem: str = "is not valid") -> None:
        super().__init__(None, f'schedule "{schedule_id}": {field}={shown(value)} {problem}')
        self.schedule_id = schedule_id
        self.field = field
        self.value = shown(value)


# Input.


class InvalidInputError(LoomError, TypeError):
    """Arguments do not fit what was called."""

    code = "invalid-input"

    def __init__(self, problem: str, flow_id: str | None = None) -> None:
        self.problem = problem
        self.flow_id = flow_id
        super().__init__(problem if flow_id is None else f'flow "{flow_id}": {problem}')


class UnencodableValueError(LoomError):
    """A value cannot be recorded; the message names the place in it and what to pass instead."""

    code = "unencodable-value"

    def __init__(self, path: str, type_name: str, instead: str) -> None:
        self.path = path
        self.type_name = type_name
        self.instead = instead
        super().__init__(f"{path} is a {type_name}, which cannot be recorded. {instead}")


class UnreadableValueError(LoomError):
    """A recorded value cannot be read by this code, for want of a registered type or a matching one."""

    code = "unreadable-value"

    def __init__(self, problem: str, tag: str = "") -> None:
        self.problem = problem
        self.tag = tag
        super().__init__(problem)


class PayloadTooLargeError(LoomError):
    """A value is above the size that one record may have."""

    code = "payload-too-large"

    def __init__(self, size: int, limit: int, what: str = "payload") -> None:
        self.size = size
        self.limit = limit
        self.what = what
        super().__init__(
            f"{what} takes {size} bytes, more than the {limit} allowed. Store the data elsewhere and pass "
            'its key, or raise LOOM["MAX_PAYLOAD_BYTES"].'
        )


class InvalidIdError(LoomError):
    """An id is not text of 1 to 255 printable characters, or it ends in what is reserved."""

    code = "invalid-id"

    def __init__(
        self, value: object, what: str = "id", rule: str = "must be text of 1 to 255 printable characters"
    ) -> None:
        self.value = shown(value)
        self.what = what
        self.rule = rule
        super().__init__(f"{what} {self.value} {rule}.")


# Inside a flow.


class UndeclaredStepError(LoomError):
    """A flow asked for a step that its steps= does not declare."""

    code = "undeclared-step"

    def __init__(self, step_id: str, flow_id: str, declared: Iterable[str] = (), instead: str = "") -> None:
        self.step_id = step_id
        self.flow_id = flow_id
        self.declared = tuple(declared)
        self.instead = instead or f"Add {step_id} to steps=, with a new version if executions are live."
        super().__init__(
            f'flow "{flow_id}" does not declare "{step_id}" (declared: {_listed(self.declared)}). '
            f"{self.instead}"
        )


class DuplicateStepError(LoomError):
    """One run of a body asked for the same step id twice."""

    code = "duplicate-step"

    def __init__(self, step_id: str, first_line: str, second_line: str) -> None:
        self.step_id = step_id
        self.first_line = first_line
        self.second_line = second_line
        super().__init__(
            f'step "{step_id}" was asked for twice in this run ({first_line}, {second_line}). '
            "Key both calls: ctx.run(tool.keyed(key), …)."
        )


class DuplicateBranchError(LoomError):
    """Two parallel branches are the same function over the same variables."""

    code = "duplicate-branch"

    def __init__(self, first_branch: str, second_branch: str) -> None:
        self.first_branch = first_branch
        self.second_branch = second_branch
        super().__init__(
            f'branches "{first_branch}" and "{second_branch}" are the same function over the same variable: '
            "each would see its last value. Use tool.bind(…) or functools.partial."
        )


class ContextMisuseError(LoomError):
    """A context was used where or when it must not be; the execution goes no further in this run."""

    code = "context-misuse"

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(reason)


class HistoryLimitError(LoomError):
    """A flow asked for something new, and its log is as long as ``LOOM["HISTORY_MAX_EVENTS"]`` lets it be."""

    code = "history-limit"

    def __init__(self, execution_id: str, events: int, limit: int) -> None:
        self.execution_id = execution_id
        self.events = events
        self.limit = limit
        super().__init__(
            f'the log of execution "{execution_id}" has {events} events, and LOOM["HISTORY_MAX_EVENTS"] is {limit}: '
            f"it takes no new step and no new wait. Have the flow end its log now and then by "
            f"ctx.continue_as_new; one that catches this error can do so still"
        )


class DirectCallError(LoomError, TypeError):
    """A tool or a flow was called like a function, which would run it unrecorded."""

    code = "direct-call"

    def __init__(self, name: str, kind: Literal["tool", "flow"] = "tool") -> None:
        self.name = name
        self.kind = kind
        ways = f"ctx.run({name}, …) in a flow" if kind == "tool" else f"{name}.start(…) starts an execution"
        super().__init__(
            f"{name} is a {kind}, not a function to call: {ways}, {name}.func(ctx, …) in a unit test."
        )


class OpenTransactionError(LoomError):
    """A call that must stand outside of a transaction was made inside one."""

    code = "open-transaction"

    def __init__(
        self,
        call: str,
        why: str = "a rollback would undo what the log says was done",
        instead: str = "Move the ORM work into a @tool(transactional=True).",
    ) -> None:
        self.call = call
        self.why = why
        self.instead = instead
        super().__init__(f"{call} inside transaction.atomic(): {why}. {instead}")


# Look-ups.


class FlowNotFoundError(LoomError):
    """No flow of this id, or of this version, is registered in this process."""

    code = "flow-not-found"

    def __init__(self, flow_id: str, known: Iterable[str] = (), version: int | None = None) -> None:
        self.flow_id = flow_id
        self.known = tuple(known)
        self.version = version
        which = f'flow "{flow_id}"' if version is None else f'version {version} of flow "{flow_id}"'
        super().__init__(
            f"{which} is not registered here (known: {_listed(self.known)}). "
            "Declare it with @flow in the flows module of an installed app."
        )


class ScheduleNotFoundError(LoomError):
    """No schedule of that id is declared here."""

    code = "schedule-not-found"

    def __init__(self, schedule_id: str, known: Iterable[str] = ()) -> None:
        self.schedule_id = schedule_id
        self.known = tuple(known)
        super().__init__(
            f'schedule "{schedule_id}" is not declared (known: {_listed(self.known)}). Declare it by '
            "schedule(…) in the flows module of an installed app."
        )


class ExecutionNotFoundError(LoomError):
    """There is no execution of this id."""

    code = "execution-not-found"

    def __init__(self, execution_id: str) -> None:
        self.execution_id = execution_id
        super().__init__(
            f'there is no execution "{execution_id}": it was never started, its start was rolled back, '
            "or it was removed by retention. Start it, or look for its id in the admin."
        )


# Conflicts and refusals.


class ExecutionConflictError(LoomError):
    """An execution of this id exists with another flow or another input."""

    code = "execution-conflict"

    def __init__(self, execution_id: str, differs: str) -> None:
        self.execution_id = execution_id
        self.differs = differs
        super().__init__(
            f'execution "{execution_id}" exists already with another {differs}; one id is one piece of work. '
            "Start this one under an id of its own."
        )


_REFUSALS: dict[str, str] = {
    "not-suspended": "is not waiting for anything now. Look at its status: it runs, or it goes on by itself.",
    "no-such-wait": "has no pending wait of that name. handle.waits lists what it waits for.",
    "ambiguous-wait": "has several pending waits of that name. Say which one with correlation_key=.",
    "stale-park": "has moved on since that park was read. Read it again and decide on what it asks now.",
    "reserved-wait": "waits for something that a plain resume must not answer. "
    "Use the verdict form or loom.resolve, or the act made for that wait.",
    "terminal": "has ended; nothing can answer it any more.",
    "not-due": "has no wake that is due. What sleeps wakes at its time; no act brings that forward.",
}


class ResumeRefusedError(LoomError):
    """An answer was refused and nothing was written; `reason` tells why."""

    code = "resume-refused"

    def __init__(self, execution_id: str, reason: RefusalReason, detail: str = "") -> None:
        if reason not in get_args(RefusalReason):
            raise ValueError(f"reason {reason!r} is none of {', '.join(get_args(RefusalReason))}")
        self.execution_id = execution_id
        self.reason: RefusalReason = reason
        self.detail = detail
        super().__init__(_with_detail(f'"{execution_id}" {_REFUSALS[reason]}', detail))


class VerdictRefusedError(ResumeRefusedError):
    """A verdict on an effect in doubt was refused; where another one stands, it tells whose."""

    code = "verdict-refused"

    def __init__(
        self,
        execution_id: str,
        reason: RefusalReason,
        step_id: str,
        answered_by: str | None = None,
        answered_at: datetime | None = None,
        sequence: int | None = None,
        detail: str = "",
    ) -> None:
        self.step_id = step_id
        self.answered_by = answered_by
        self.answered_at = answered_at
        self.sequence = sequence
        super().__init__(execution_id, reason, _with_detail(self._verdict(), detail))

    def _verdict(self) -> str:
        if self.answered_at is None and self.answered_by is None and self.sequence is None:
            return f'The verdict on step "{self.step_id}" was not recorded.'
        by = f" by {self.answered_by}" if self.answered_by is not None else ""
        at = f" at {self.answered_at.isoformat()}" if self.answered_at is not None else ""
        where = f" (sequence {self.sequence})" if self.sequence is not None else ""
        return f'Step "{self.step_id}" was answered{by}{at}{where}.'


class ExecutionClosedError(LoomError):
    """The execution has ended and takes no more messages or acts."""

    code = "execution-closed"

    def __init__(self, execution_id: str, status: str) -> None:
        self.execution_id = execution_id
        self.status = status
        super().__init__(
            f'execution "{execution_id}" has ended as {status} and takes nothing more. '
            "loom.record_outcome can add a note; new work needs a new execution."
        )


class OperatorDeniedError(LoomError, PermissionDenied):
    """A person without the permission for an act tried it."""

    code = "operator-denied"

    def __init__(self, permission: str, principal: str = "", execution_id: str | None = None) -> None:
        self.permission = permission
        self.principal = principal
        self.execution_id = execution_id
        on = f' on execution "{execution_id}"' if execution_id is not None else ""
        super().__init__(
            f"{principal or 'this user'} lacks the permission {permission} for this act{on}. "
            "An administrator can grant it in the admin, to the user or to a group."
        )


# Worth another try.


class ResumeContendedError(LoomError):
    """Others kept taking the execution's fence; nothing was refused, the same call may be made again."""

    code = "resume-contended"
    retryable = True

    def __init__(self, execution_id: str, attempts: int) -> None:
        self.execution_id = execution_id
        self.attempts = attempts
        super().__init__(
            f'execution "{execution_id}" was contended in {attempts} attempts; nothing was written. '
            "Try again."
        )


class RedriveExhaustedError(LoomError):
    """The quick tries to wake an execution are used up; slow ones go on."""

    code = "redrive-exhausted"
    retryable = True

    def __init__(self, execution_id: str, attempts: int) -> None:
        self.execution_id = execution_id
        self.attempts = attempts
        super().__init__(
            f'execution "{execution_id}" could not be woken in {attempts} attempts. '
            "Its row stays and is tried again at longer intervals; "
            "look for a process that keeps taking its fence."
        )


class StoreUnavailableError(LoomError):
    """The database was away for longer than the retries lasted; the same call may be made again."""

    code = "store-unavailable"
    retryable = True

    def __init__(
        self, problem: str = "the database could not be reached", attempts: int | None = None
    ) -> None:
        self.problem = problem
        self.attempts = attempts
        tried = "" if attempts is None else f" in {attempts} attempts"
        super().__init__(f"{problem}{tried}. Try again when the database answers.")


class ArchiveError(LoomError):
    """An archive could not be written, or is not what was written; nothing was deleted, or put back, by it."""

    code = "archive"

    def __init__(self, name: str, problem: str) -> None:
        self.name = name
        self.problem = problem
        super().__init__(f"the archive {name!r} {problem}")


# Fencing and code.


class StaleFenceError(LoomError):
    """A writer was overtaken: its fence is older than the execution's, so nothing was written."""

    code = "stale-fence"

    def __init__(self, execution_id: str, fence: int | None, current: int | None) -> None:
        self.execution_id = execution_id
        self.fence = fence
        self.current = current
        held = "no fence" if fence is None else f"fence {fence}"
        now = "another" if current is None else str(current)
        super().__init__(
            f'execution "{execution_id}" was taken over: this writer holds {held}, the current one is {now}. '
            "Nothing was written; stop this run, the new holder goes on."
        )


class FlowCodeMismatchError(LoomError):
    """The registered code is not the one that the execution was started with."""

    code = "flow-code-mismatch"

    def __init__(
        self,
        execution_id: str,
        kind: str,
        recorded: str,
        registered: str,
        differences: Iterable[str] = (),
    ) -> None:
        self.execution_id = execution_id
        self.kind = kind
        self.recorded = recorded
        self.registered = registered
        self.differences = tuple(differences)
        if kind == "replay-check":
            super().__init__(
                f'execution "{execution_id}" cannot go on from {recorded} with {registered}: '
                f"{'; '.join(self.differences)}. Declare what is missing (step_families= admits ids that are made "
                'while a flow runs), or vouch for the move with strategy="operator-ack".'
            )
            return
        changed = f" ({'; '.join(self.differences)})" if self.differences else ""
        super().__init__(
            f'execution "{execution_id}" was recorded with {kind} {recorded}, the registered flow has '
            f"{registered}{changed}. Pin: register the old version beside the new one. "
            "Migrate: move it to the new code with loom.resume_as (loom_resume_as at a shell), which proves first "
            "that the new code has every recorded step. "
            "Drain: cancel it and start it anew, or leave it to processes of the old release."
        )


# Of more steps a message gives the number.
MAX_NAMED_STEPS: Final = 20


class FlowDivergenceError(LoomError):
    """A body that is run again has not asked for steps whose outcome its log holds: its code was changed.

    Attributes:
        execution_id: of the execution.
        expected: the ids of the recorded steps that it skipped, in the order of the log.
        seen: what it was about to do instead, in words.
        source_line: where, as ``file:line``.
    """

    code = "flow-divergence"

    def __init__(self, execution_id: str, expected: Iterable[str], seen: str, source_line: str = "") -> None:
        self.execution_id = execution_id
        self.expected = tuple(expected)
        self.seen = seen
        self.source_line = source_line
        at = f" at {source_line}" if source_line else ""
        named = ", ".join(map(repr, self.expected[:MAX_NAMED_STEPS]))
        more = len(self.expected) - MAX_NAMED_STEPS
        super().__init__(
            f'execution "{execution_id}" diverged{at}: its log holds an outcome of {named}'
            f"{f' and {more} more steps' if more > 0 else ''}, which the body did not ask for before {seen}. "
            "Fix the code so that it asks for them again; or pin: register the original version beside the new one; "
            "where a fingerprint refuses the fixed body, list the recorded one in compatible_with; or move the "
            "execution with loom.resume_as. If it is parked, loom.retry_diverged then runs it again."
        )


# Results.


class ExecutionFailedError(LoomError):
    """The execution whose result was asked for has failed."""

    code = "execution-failed"

    def __init__(self, execution_id: str, error_type: str, message: str) -> None:
        self.execution_id = execution_id
        self.error_type = error_type
        self.message = message
        super().__init__(f'execution "{execution_id}" failed with {error_type}: {message}')


class ExecutionCancelledError(LoomError):
    """The execution whose result was asked for was cancelled."""

    code = "execution-cancelled"

    def __init__(self, execution_id: str, reason: str = "") -> None:
        self.execution_id = execution_id
        self.reason = reason
        super().__init__(f'execution "{execution_id}" was cancelled' + (f": {reason}" if reason else ""))


class ResultTimeoutError(LoomError, TimeoutError):
    """The result did not come within the time that the caller wanted to wait; the execution goes on."""

    code = "result-timeout"

    def __init__(self, execution_id: str, timeout: float) -> None:
        self.execution_id = execution_id
        self.timeout = timeout
        super().__init__(
            f'execution "{execution_id}" has no result after {timeout} seconds. It goes on; '
            "read handle.status later."
        )


# Models.


class ReadOnlyModelError(LoomError):
    """A row that only the log may change was written through the ORM."""

    code = "read-only-model"

    def __init__(self, model: str, instead: str) -> None:
        self.model = model
        self.instead = instead
        super().__init__(
            f"rows of {model} are written by loom only, the log would no longer be the truth. {instead}"
        )
