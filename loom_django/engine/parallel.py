"""Parallel branches of one body: side by side, each with names of its own, and one park for all that wait.

A branch is a bound step or a function of a context. What it asks for is named by its scope's path, never by
who came first, so a replay finds the same answers whatever the order. When a branch waits, its siblings run on;
when none runs, the scope parks on everything that is waited for. When a branch fails, its siblings do nothing new,
what their tools have done is kept, and the failure is the scope's.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from loom_django.definitions import Outcome as BranchOutcome
from loom_django.definitions import Step
from loom_django.engine.body import UNANSWERED, Body, BranchBody, Parked
from loom_django.engine.drive import CutOff, Driver, Enter, Join, Land, Landing, Outcome, Steps, carried_out
from loom_django.engine.drive_async import AsyncDriver
from loom_django.engine.unwind import Unwind, Why, late_call
from loom_django.errors import ContextMisuseError, DuplicateBranchError, InvalidInputError, LoomError
from loom_django.kernel import codec, keys
from loom_django.kernel.events import Encoded, Kind
from loom_django.kernel.state import Decision, Wait

_DECISION: Final = "__loom_scope__:"


def parallel(body: Body, branches: Mapping[str, Any], settle: bool) -> Steps[dict[str, Any]]:
    """Run branches side by side; their values by name, or with ``settle`` how each of them ended."""
    yield Enter(partial(body.enter, "parallel"))
    _check(body, branches)
    if not branches:
        return {}
    return (yield from in_scope(body, branches, settle))


@dataclass(frozen=True, slots=True)
class Inner:
    """A branch of the engine's own, made by that call of the context: what it asks for on the branch's body."""

    name: str
    steps: Callable[[Body], Steps[Any]]


def in_scope(body: Body, branches: Mapping[str, Any], settle: bool) -> Steps[dict[str, Any]]:
    """Run branches in the next scope of a body; like the public form, without its checks."""
    number = body.count("parallel")
    path = f"{body.path}.{number}" if body.path else str(number)
    scope = _Scope(body, path, branches, settle)
    try:
        return (yield from scope.run())
    finally:
        scope.branches, scope.failed = [], []  # each of them holds the scope


def _check(body: Body, branches: object) -> None:
    if not isinstance(branches, Mapping):
        body.refuse(InvalidInputError("ctx.parallel takes a dict of branches by name"))
    by_code: dict[Any, list[tuple[str, Any]]] = {}
    for name, what in branches.items():
        body.checked(partial(keys.check_id, name, "name of a branch"))
        if isinstance(what, Step):
            continue
        if not callable(what):
            body.refuse(
                InvalidInputError(
                    f"branch {name!r} is {what!r}: give a bound step, ship.bind(sku), or a function of a ctx"
                )
            )
        plain = what.func if isinstance(what, functools.partial) else what
        if inspect.iscoroutinefunction(plain) != body.flow.is_async:
            kind = "async def" if body.flow.is_async else "plain def"
            body.refuse(InvalidInputError(f"branch {name!r} must be a {kind}, as its flow is"))
        code = getattr(what, "__code__", None)
        for other, earlier in by_code.setdefault(code, []) if code is not None else ():
            if _same_variables(what, earlier):
                body.refuse(DuplicateBranchError(other, name))
        if code is not None:
            by_code[code].append((name, what))


def _same_variables(one: Any, other: Any) -> bool:
    first, second = _variables(one), _variables(other)
    alike = len(first) == len(second) and all(a is b for a, b in zip(first, second, strict=True))
    return alike and one.__defaults__ == other.__defaults__ and one.__kwdefaults__ == other.__kwdefaults__


def _variables(function: Any) -> list[Any]:
    return [_content(cell) for cell in function.__closure__ or ()]


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return cell


class _Branch:
    """One branch on its way; a new one for each time that it is run."""

    def __init__(self, scope: _Scope, name: str, what: Any) -> None:
        self.scope = scope
        self.name = name
        self.what = what
        self.path = keys.branch_path(scope.path, name)
        self.body: BranchBody | None = None
        self.value: Any = None
        self.error: BaseException | None = None
        self.waiting = False
        self.step_id = ""  # of a bound step that was asked for

    def enter(self, driver: Driver) -> Callable[[], Any]:
        from loom_django.engine.context import AsyncFlowContext, FlowContext

        body = self.body or self._made(driver)
        body.driver, body.thread = driver, threading.get_ident()
        context: Any = AsyncFlowContext(body) if isinstance(driver, AsyncDriver) else FlowContext(body)
        if isinstance(self.what, Step):
            name, asked = "run", self._perform(body, self.what)
        elif isinstance(self.what, Inner):
            name, asked = self.what.name, self.what.steps(body)
        else:
            return lambda: self.what(context)
        named = (name,) if isinstance(driver, AsyncDriver) else ()
        return lambda: context._do(*named, asked)

    def ask(self) -> Outcome | None:
        """Ask for a bound step where the rules run; its outcome, unless it is to be performed."""
        body = self._made(self.scope.body.driver)
        try:
            self.step_id, answer = body.ask_to_run(self.what.tool)
        except (Exception, Unwind) as exc:
            return Outcome(error=exc)
        return None if answer is UNANSWERED else Outcome(answer)

    def _made(self, driver: Driver) -> BranchBody:
        body = self.body = self.scope.body.branch(self.path, driver)
        body.closed = self.scope.closed
        if isinstance(self.what, Step | Inner):
            body.bound_at = body.place = self.scope.place
        return body

    def _perform(self, body: Body, step: Step[Any]) -> Steps[Any]:
        yield Enter(partial(body.enter, "run"))
        return (yield from body.perform(self.step_id, step.tool, step.args, step.kwargs))

    def end(self, outcome: Outcome) -> Landing[None]:
        body = self.body
        if body is not None:
            body.shared.bodies.remove(body)
            yield from self._land(body)
            if (late := late_call(outcome.error)) is not None:
                outcome = Outcome(error=_refused(body, late))
            if outcome.error is None and body.unawaited:
                forgotten = ", ".join(sorted(set(body.unawaited.values())))
                problem = f"ctx.{forgotten} was not awaited before branch {self.name!r} ended: write await"
                outcome = Outcome(error=_refused(body, ContextMisuseError(problem)))
            if body.sealed is not None:  # goes before what the branch made of it, as it does for a body
                outcome = Outcome(error=body.sealed)
        self.value, self.error = outcome.value, outcome.error
        if isinstance(self.error, Unwind):
            self.waiting = self.error.why is Why.WAITING
        elif isinstance(self.error, Exception):
            self.scope.has_failed(self)

    def _land(self, body: BranchBody) -> Landing[None]:
        """The last outcome of a branch does not wait for a boundary of its siblings."""
        if body.journal.kept and not body.may_defer() and body.parent.sealed is None:
            with contextlib.suppress(Unwind, LoomError):  # the body is sealed then, and the scope says so
                yield from body.landing()

    def outcome(self) -> BranchOutcome:
        if isinstance(self.error, Exception):
            return BranchOutcome(ok=False, error=self.error)
        return BranchOutcome(ok=True, value=self.value)


def _refused(body: Body, error: LoomError) -> LoomError:
    try:
        body.refuse(error)
    except LoomError as refused:
        return refused


class _Scope:
    """The branches of one call of ``ctx.parallel``."""

    def __init__(self, body: Body, path: str, branches: Mapping[str, Any], settle: bool) -> None:
        self.body = body
        self.path = path
        self.settle = settle
        self.branches = [_Branch(self, name, what) for name, what in branches.items()]
        self.place = body.place
        self.known = body.journal.fold.decisions.get(_DECISION + path)
        self.closed = self.known is not None
        self.failed: list[_Branch] = []

    def run(self) -> Steps[dict[str, Any]]:
        body, left = self.body, self.branches
        while True:
            if left := (yield from self._ask(left)):
                body.joined = True
                try:
                    yield Join(left, self._interrupted)
                finally:
                    body.joined = False
            self._raise_what_stops()
            if (before := self._failed_before()) is not None:
                yield from body.before_reopening(self.path, before)
                if left := self._reopen():
                    continue
            if self.failed and not self.settle:
                self._fail()
            waiting = [branch for branch in self.branches if branch.waiting]
            if not waiting:
                if any(isinstance(branch.error, Unwind) for branch in self.branches):
                    body.begin_live()  # stopped by a failure in a scope around this one
                yield from body.after_scope(self.path)
                return self._values()
            yield from body.before_park(self._waits(waiting))
            # A wake that came since a branch has looked refuses the park: those that wait look again.
            yield Land(partial(self._park, waiting))
            left = self._run_again(waiting)

    def _ask(self, branches: list[_Branch]) -> Steps[list[_Branch]]:
        """Ask for the bound steps here, so that no thread or task is made for what the log holds; the others."""
        left = []
        for branch in branches:
            if not isinstance(branch.what, Step) or (outcome := branch.ask()) is None:
                left.append(branch)
            elif self.body.journal.kept:
                yield Land(partial(branch.end, outcome))
            else:
                carried_out(branch.end(outcome))
        return left

    def _interrupted(self, error: BaseException) -> None:
        self.body.seal(Why.INTERRUPTED, error)

    def has_failed(self, branch: _Branch) -> None:
        """Have the siblings do nothing new. What they did before they ask for again, so that on a replay too a
        compensation is registered for it."""
        self.failed.append(branch)
        if self.settle:
            return
        self.closed = True
        for sibling in self.branches:
            if sibling.body is not None:
                sibling.body.closed = True

    def _raise_what_stops(self) -> None:
        if self.body.sealed is not None:
            raise self.body.sealed
        for branch in self.branches:
            error = branch.error
            if isinstance(error, CutOff) or (error is not None and not isinstance(error, Exception | Unwind)):
                raise error

    def _failed_before(self) -> str | None:
        """The branch that has failed by the log and does not fail now: its code was mended; None if it fails again."""
        if self.known is None:
            return None
        name = self._recorded(self.known)
        again = not self.settle and any(branch.name == name for branch in self.failed)
        return None if again else name

    def _reopen(self) -> list[_Branch]:
        """Let the recorded failure go; whom it stopped is to run on."""
        self.known = None
        self.closed = bool(self.failed) and not self.settle
        return self._run_again([branch for branch in self.branches if isinstance(branch.error, Unwind)])

    def _fail(self) -> None:
        """Raise the failure of the branch that failed first; which one it was is recorded."""
        if self.body.shared.watch is not None:
            self.body.shared.watch.scope_failed(self.path)
        if self.known is not None:
            name = self._recorded(self.known)
            failed = next(branch for branch in self.failed if branch.name == name)
            self.body.served(self.known.at)
        else:
            failed = self.failed[0]
            value = Encoded.of({"failed": failed.name})
            fields = {"decision": _DECISION + self.path, "value": value}
            event = self.body.journal.record(Kind.DECISION_RECORDED, fields)
            self.body.did(event.data["at"])
        if failed.error is None:
            raise AssertionError("a branch that failed has its error")
        raise failed.error

    def _values(self) -> dict[str, Any]:
        for branch in self.branches:
            if branch.body is not None:
                self.body.clock = max(self.body.clock, branch.body.clock)
        if self.settle:
            return {branch.name: branch.outcome() for branch in self.branches}
        return {branch.name: branch.value for branch in self.branches}

    @staticmethod
    def _recorded(known: Decision) -> str:
        """The name of the branch that failed first, by the log."""
        name: str = codec.decode(known.value)["failed"]
        return name

    def _park(self, waiting: list[_Branch]) -> Landing[None]:
        parked = self._parked(waiting)
        reasons = {park.reason for park in parked}
        seen = [park.wakes for park in parked if park.wakes is not None]
        reason = reasons.pop() if len(reasons) == 1 else "waiting"
        yield from self.body.park(reason, self._waits(waiting), wakes=min(seen, default=None))

    def _parked(self, waiting: list[_Branch]) -> list[Parked]:
        return [branch.body.parked for branch in waiting if branch.body and branch.body.parked]

    def _waits(self, waiting: list[_Branch]) -> list[Wait]:
        # Branches may wait for one and the same thing: a budget that they share.
        return list({wait.id: wait for park in self._parked(waiting) for wait in park.waits}.values())

    def _run_again(self, waiting: list[_Branch]) -> list[_Branch]:
        asked = self.body.shared.asked
        again = {branch.name: _Branch(self, branch.name, branch.what) for branch in waiting}
        for branch in again.values():
            for step_id in [key for key, (*_, path) in asked.items() if _is_within(path, branch.path)]:
                del asked[step_id]
        self.branches = [again.get(branch.name, branch) for branch in self.branches]
        return list(again.values())


def _is_within(path: str, scope: str) -> bool:
    return path == scope or path.startswith(scope + ".")
