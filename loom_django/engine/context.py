"""What a tool and a flow get as their first argument.

The flow's contexts are thin: each method hands one of the body's questions to a driver. ``FlowContext`` is for
plain functions, ``AsyncFlowContext`` for ``async def``; the names are the same, awaited.
"""

from __future__ import annotations

import itertools
import logging
import random as random_module
from collections.abc import Awaitable, Callable, Generator, Mapping, MutableMapping, Sequence
from copy import deepcopy
from datetime import datetime
from decimal import Decimal
from functools import cached_property, partial
from typing import Any, Generic, Literal, NoReturn, ParamSpec, TypeVar, overload
from uuid import UUID

from loom_django.definitions import AwaitMode, Child, Flow, Outcome, Step, Tool
from loom_django.engine.agents import agent_loop
from loom_django.engine.body import UNANSWERED, Body, metered
from loom_django.engine.children import await_child, await_children, start_child
from loom_django.engine.continuing import continue_as_new
from loom_django.engine.core import from_micros
from loom_django.engine.drive import Command, CutOff, Steps
from loom_django.engine.drive_async import AsyncDriver
from loom_django.engine.drive_sync import SyncDriver
from loom_django.engine.parallel import parallel
from loom_django.errors import ContextMisuseError
from loom_django.kernel.durations import Duration
from loom_django.kernel.turns import AgentResult, ModelTurn

P = ParamSpec("P")
R = TypeVar("R")

_numbers = itertools.count()

_FLOW_ONLY = frozenset(
    {
        "run", "run_step", "suspend", "receive", "sleep", "sleep_until", "emit", "decide", "parallel",
        "start_child", "await_child", "await_children", "agent_loop", "continue_as_new",
    }
)  # fmt: skip


class StepContext:
    """What a tool knows of the step it is run for.

    Attributes:
        execution_id, flow_id, step_id: where the step stands.
        idempotency_key: the same for every attempt of one logical step; hand it to the provider.
        attempt: 1 for the first; crash re-runs count.
        deadline: when this attempt times out (aware UTC), or None.
        logger: a logger whose records carry the ids.
    """

    def __init__(
        self,
        *,
        execution_id: str,
        flow_id: str,
        step_id: str,
        idempotency_key: str,
        attempt: int,
        deadline: datetime | None = None,
    ) -> None:
        self.execution_id = execution_id
        self.flow_id = flow_id
        self.step_id = step_id
        self.idempotency_key = idempotency_key
        self.attempt = attempt
        self.deadline = deadline
        self.metered: list[dict[str, Any]] = []

    @cached_property
    def logger(self) -> logging.LoggerAdapter[logging.Logger]:
        about = {"execution_id": self.execution_id, "flow_id": self.flow_id, "step_id": self.step_id}
        return _StepLogger(logging.getLogger("loom_django.step"), about)

    def meter(self, resource: str, amount: Any) -> None:
        """Record a use of a resource with this attempt's outcome, failed attempts included.

        Raises:
            InvalidInputError: no name, or no finite number of 0 or more.
        """
        self.metered.append(metered(resource, amount))

    def __getattr__(self, name: str) -> NoReturn:
        if name in _FLOW_ONLY:
            raise AttributeError(
                f"StepContext has no {name}(): that is the flow's context, in the flow's body"
            )
        raise AttributeError(f"StepContext has no attribute {name!r}")


class _StepLogger(logging.LoggerAdapter[logging.Logger]):
    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        kwargs["extra"] = {**(self.extra or {}), **(kwargs.get("extra") or {})}
        return msg, kwargs


class _FlowLogger(_StepLogger):
    """Silent while the body replays what it has done before."""

    def __init__(self, logger: logging.Logger, extra: Mapping[str, Any], body: Body) -> None:
        super().__init__(logger, dict(extra))
        self._body = body

    def isEnabledFor(self, level: int) -> bool:
        return not self._body.is_replaying and super().isEnabledFor(level)


class _Context:
    """What both flow contexts have without waiting."""

    def __init__(self, body: Body) -> None:
        self._body = body

    @cached_property
    def logger(self) -> logging.LoggerAdapter[logging.Logger]:
        """Silent while the body replays; its records carry the ids."""
        about = {"execution_id": self.execution_id, "flow_id": self.flow_id}
        return _FlowLogger(logging.getLogger("loom_django.flow"), about, self._body)

    @property
    def execution_id(self) -> str:
        return self._body.execution_id

    @property
    def flow_id(self) -> str:
        return self._body.flow.id

    @property
    def version(self) -> int:
        """The version that the execution was started under."""
        return self._body.journal.fold.version

    @property
    def scheduled_at(self) -> datetime | None:
        """The occurrence that a schedule started this execution for; None otherwise."""
        at = self._body.journal.fold.options.get("scheduled_at")
        return None if at is None else from_micros(at)

    @property
    def subject_ref(self) -> tuple[str, str] | None:
        """``(model label, primary key)`` of the subject, both as text; None without one."""
        subject = self._body.journal.fold.options.get("subject")
        return None if subject is None else (subject[0], subject[1])

    @property
    def attributes(self) -> dict[str, Any]:
        # Plain JSON, not the codec's form: a key that begins with "$" is a key.
        attributes: dict[str, Any] = deepcopy(self._body.journal.fold.options.get("attributes", {}))
        return attributes

    @property
    def is_replaying(self) -> bool:
        """True while the log answers what the body asks for."""
        return self._body.is_replaying

    def now(self) -> datetime:
        """The time of the last fact that the body has consumed; the same on every replay. Aware, UTC."""
        return self._body.now()

    def uuid4(self) -> UUID:
        """A random UUID that is the same on every replay."""
        return self._body.uuid4()

    def random(self) -> random_module.Random:
        """A seeded generator, new at each call and the same on every replay."""
        return self._body.random()

    def emit(self, kind: str, payload: Any = None) -> None:
        """Add an application event to the log.

        Raises:
            InvalidInputError: a kind of the kernel's own. UnencodableValueError, PayloadTooLargeError.
        """
        self._body.emit(kind, payload)

    def on_failure(self, tool: Tool[P, Any], /, *args: P.args, **kwargs: P.kwargs) -> None:
        """Have a tool run as a step if this flow fails: the newest first, each as durable as any step.

        Not run when the execution is cancelled or its deadline passes, after misuse of the context, nor for a
        flow with ``on_error="park"``.
        """
        self._body.on_failure(tool, args, kwargs)

    def meter(self, resource: str, amount: Any) -> None:
        """Record a use of a resource, once however often the body is run again."""
        self._body.meter(resource, amount)


class FlowContext(_Context):
    """What a plain flow asks the world through."""

    def _do(self, steps: Steps[R]) -> R:
        driver = self._body.driver
        if not isinstance(driver, SyncDriver):
            raise TypeError("a FlowContext is driven synchronously")
        return driver.drive(steps)

    def run(self, tool: Tool[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run a tool as a step and return its result, after the codec; from the log if it has one.

        Raises:
            StepFailed: the step failed, now or when it was recorded.
            UndeclaredStepError, DuplicateStepError, UnencodableValueError: misuse; ends the body.
        """
        body = self._body
        body.enter("run")
        step_id, answer = body.driver.exclusively(partial(body.ask_to_run, tool))
        result: R = self._do(body.perform(step_id, tool, args, kwargs)) if answer is UNANSWERED else answer
        return result

    def run_step(self, step_id: str, /, *args: Any, **kwargs: Any) -> Any:
        """:meth:`run` by the step's id; untyped."""
        body = self._body
        body.enter("run_step")
        tool, answer = body.driver.exclusively(partial(body.ask_to_run_step, step_id))
        return self._do(body.perform(step_id, tool, args, kwargs)) if answer is UNANSWERED else answer

    def suspend(
        self, on: str, /, *, correlation_key: str | None = None, timeout: Duration | None = None
    ) -> Any:
        """Park until ``loom.resume(..., event_type=on)`` answers; return its payload.

        Raises:
            WaitTimedOut: nobody answered within ``timeout`` (seconds or timedelta).
        """
        return self._do(self._body.suspend(on, correlation_key, timeout))

    def receive(self, name: str, /, *, timeout: Duration | None = None) -> Any:
        """Take the oldest message of that name, or park until one is sent; return its payload.

        Raises:
            WaitTimedOut: none came within ``timeout`` (seconds or timedelta).
        """
        return self._do(self._body.receive(name, timeout))

    def sleep(self, duration: Duration, /) -> None:
        """Park for a duration (seconds or timedelta); the wake time is recorded once."""
        self._do(self._body.sleep(duration))

    def sleep_until(self, when: datetime, /) -> None:
        """Park until an aware point in time."""
        self._do(self._body.sleep_until(when))

    def parallel(
        self,
        branches: Mapping[str, Step[Any] | Callable[[FlowContext], Any]],
        /,
        *,
        settle: bool = False,
    ) -> dict[str, Any]:
        """Run branches side by side: bound steps (``ship.bind(sku)``) and functions of a context of their own.

        Returns their values by name; with ``settle`` an :class:`~loom_django.Outcome` for each.

        Raises:
            StepFailed, WaitTimedOut, …: what the branch raised that failed first. Its siblings begin nothing
                new; what their steps have done is kept. Not with ``settle``.
            DuplicateBranchError: two branches are one function over one variable; misuse.
        """
        return self._do(parallel(self._body, branches, settle))

    def start_child(self, flow: Flow[P, R] | str, /, *args: Any, **kwargs: Any) -> Child[R]:
        """Start another execution that knows this one as its parent; options by ``flow.using(…)``.

        It begins beside this body (with the inline dispatcher: when this body parks or ends). When this
        execution ends, it is cancelled, unless it was started with ``on_parent_close="abandon"``.

        Raises:
            InvalidInputError, FlowNotFoundError, ExecutionConflictError, UnencodableValueError: misuse.
        """
        return self._do(start_child(self._body, flow, args, kwargs))

    def await_child(self, child: Child[R], /) -> R:
        """Park until a child has ended; return its result.

        Raises:
            ChildFailed: it ended otherwise, or nothing is left of it.
        """
        result: R = self._do(await_child(self._body, child))
        return result

    @overload
    def await_children(
        self,
        children: Sequence[Child[R]],
        /,
        *,
        mode: Literal["all"] = "all",
        timeout: Duration | None = None,
    ) -> list[R]: ...
    @overload
    def await_children(
        self,
        children: Sequence[Child[Any]],
        /,
        *,
        mode: Literal["settled"],
        timeout: Duration | None = None,
    ) -> list[Outcome]: ...
    @overload
    def await_children(
        self, children: Sequence[Child[Any]], /, *, mode: Literal["any"], timeout: Duration | None = None
    ) -> Outcome: ...
    def await_children(
        self, children: Sequence[Child[Any]], /, *, mode: AwaitMode = "all", timeout: Duration | None = None
    ) -> Any:
        """Park until children have ended: all of them, or with ``"any"`` the first.

        Returns:
            ``"all"``: their results in the order given. ``"settled"``: an :class:`~loom_django.Outcome` for
            each. ``"any"``: the Outcome of the first that was seen to have ended.

        Raises:
            ChildFailed: with ``"all"``, of the first in order that did not complete; after all have ended.
            WaitTimedOut: not within ``timeout`` (seconds or timedelta).
        """
        return self._do(await_children(self._body, children, mode, timeout))

    @overload
    def continue_as_new(self, flow: Flow[P, Any], /, *args: P.args, **kwargs: P.kwargs) -> NoReturn: ...
    @overload
    def continue_as_new(self, flow: str, /, *args: Any, **kwargs: Any) -> NoReturn: ...
    def continue_as_new(self, flow: Flow[..., Any] | str, /, *args: Any, **kwargs: Any) -> NoReturn:
        """End this log and go on with a fresh one, of the same flow or of another: for loops without an end.

        The successor runs on the code that is registered now. It has the id ``{first id}~2``, ``~3`` and so on;
        to whoever sends, waits, cancels or asks by the first id the chain is one execution. Subject, attributes,
        queue, priority, deadline, parent and unread messages go along; children that are to end with this
        execution end with the chain. What :meth:`on_failure` has registered is let go.

        Raises:
            InvalidInputError, FlowNotFoundError, UnencodableValueError, ContextMisuseError: misuse; nothing was
                written, and this execution fails.
        """
        self._do(continue_as_new(self._body, flow, args, kwargs))
        raise AssertionError("a body does not come back from its end")

    def decide(self, decision_id: str, decider: Callable[[], R] | Callable[[FlowContext], R], /) -> R:
        """Compute a value once and record it: for a flag, a setting, a read that may change.

        A decider that takes an argument is given this context, and may run steps; the decision and the steps
        are one record, and the decider is not run again.
        """
        body = self._body
        body.enter("decide")
        answer = body.driver.exclusively(partial(body.ask_to_decide, decision_id, decider))
        if answer is UNANSWERED:
            answer = self._do(body.make_decision(decision_id, decider, self))
        result: R = answer
        return result

    def agent_loop(
        self,
        loop_id: str,
        /,
        *,
        model: Tool[..., ModelTurn],
        tools: Sequence[Tool[..., Any]],
        messages: Sequence[dict[str, Any]],
        max_turns: int = 20,
        budget: Mapping[str, int | Decimal] | None = None,
    ) -> AgentResult:
        """Let a model speak and make the calls that it asks for, until it asks for none or its turns are over.

        Each turn and each call is a step: ``<loop>#turn:<n>`` and ``<loop>#turn:<n>:tool:<j>``. The calls of one
        turn are made side by side. A call that fails, names no tool or does not fit the tool's schema goes back
        to the model as a message.

        Args:
            model: a tool of ``(ctx, messages, tools)`` that returns a :class:`~loom_django.ModelTurn`.
            tools: those that the model may ask for; like ``model`` they are listed in ``steps=``, and the loop's
                id in ``step_families=``.
            messages: dicts of any form that the model's tool understands.
            max_turns: the calls of the last turn are not made.
            budget: limits by metered resource. Where one is reached, the execution parks on ``BudgetExhausted``
                before the next turn or call, until it is answered with ``{"limit": …}``.

        Raises:
            StepFailed: a turn of the model failed.
            UndeclaredStepError, UnencodableValueError, InvalidInputError: misuse; ends the body.
        """
        return self._do(agent_loop(self._body, loop_id, model, tools, messages, max_turns, budget))


class Operation(Generic[R]):
    """A call of an async context that is to be awaited; one that is not is found out at the next call."""

    def __init__(self, body: Body, name: str, steps: Steps[R]) -> None:
        self._body = body
        self._name = name
        self._steps = steps
        self._number = next(_numbers)
        self._awaited = False
        body.unawaited[self._number] = name

    def __await__(self) -> Generator[Any, Any, R]:
        body = self._body
        body.check_task(self._name)
        if self._awaited:
            body.refuse(
                ContextMisuseError(f"ctx.{self._name} was awaited twice: keep the result, or call it again")
            )
        self._awaited = True
        body.unawaited.pop(self._number, None)
        if not isinstance(body.driver, AsyncDriver):
            raise TypeError("an AsyncFlowContext is driven by a loop")
        try:
            command = body.driver.begin(self._steps)
        except StopIteration as stop:
            result: R = stop.value
            return result
        return (yield from self._driven(body.driver, command).__await__())

    async def _driven(self, driver: AsyncDriver, command: Command | None) -> R:
        try:
            return await driver.drive(self._steps, command)
        except CutOff:
            pass
        if self._body.sealed is not None:
            raise self._body.sealed
        self._body.refuse(
            ContextMisuseError(
                f"the flow cancelled itself while it waited for ctx.{self._name} (asyncio.timeout, a task group): "
                f"a step cannot be cut off by the flow. Give the tool a timeout="
            )
        )


class AsyncFlowContext(_Context):
    """What an async flow asks the world through: the names of :class:`FlowContext`, awaited."""

    def _do(self, name: str, steps: Steps[R]) -> Awaitable[R]:
        self._body.check_task(name)
        return Operation(self._body, name, steps)

    def run(self, tool: Tool[P, R], /, *args: P.args, **kwargs: P.kwargs) -> Awaitable[R]:
        """See :meth:`FlowContext.run`."""
        return self._do("run", self._body.run(tool, args, kwargs))

    def run_step(self, step_id: str, /, *args: Any, **kwargs: Any) -> Awaitable[Any]:
        """See :meth:`FlowContext.run_step`."""
        return self._do("run_step", self._body.run_step(step_id, args, kwargs))

    def suspend(
        self, on: str, /, *, correlation_key: str | None = None, timeout: Duration | None = None
    ) -> Awaitable[Any]:
        """See :meth:`FlowContext.suspend`."""
        return self._do("suspend", self._body.suspend(on, correlation_key, timeout))

    def receive(self, name: str, /, *, timeout: Duration | None = None) -> Awaitable[Any]:
        """See :meth:`FlowContext.receive`."""
        return self._do("receive", self._body.receive(name, timeout))

    def sleep(self, duration: Duration, /) -> Awaitable[None]:
        """See :meth:`FlowContext.sleep`."""
        return self._do("sleep", self._body.sleep(duration))

    def sleep_until(self, when: datetime, /) -> Awaitable[None]:
        """See :meth:`FlowContext.sleep_until`."""
        return self._do("sleep_until", self._body.sleep_until(when))

    def parallel(
        self,
        branches: Mapping[str, Step[Any] | Callable[[AsyncFlowContext], Awaitable[Any]]],
        /,
        *,
        settle: bool = False,
    ) -> Awaitable[dict[str, Any]]:
        """See :meth:`FlowContext.parallel`; function branches are ``async def``."""
        return self._do("parallel", parallel(self._body, branches, settle))

    def start_child(self, flow: Flow[P, R] | str, /, *args: Any, **kwargs: Any) -> Awaitable[Child[R]]:
        """See :meth:`FlowContext.start_child`."""
        return self._do("start_child", start_child(self._body, flow, args, kwargs))

    def await_child(self, child: Child[R], /) -> Awaitable[R]:
        """See :meth:`FlowContext.await_child`."""
        return self._do("await_child", await_child(self._body, child))

    def await_children(
        self, children: Sequence[Child[Any]], /, *, mode: AwaitMode = "all", timeout: Duration | None = None
    ) -> Awaitable[Any]:
        """See :meth:`FlowContext.await_children`."""
        return self._do("await_children", await_children(self._body, children, mode, timeout))

    @overload
    def continue_as_new(
        self, flow: Flow[P, Any], /, *args: P.args, **kwargs: P.kwargs
    ) -> Awaitable[NoReturn]: ...
    @overload
    def continue_as_new(self, flow: str, /, *args: Any, **kwargs: Any) -> Awaitable[NoReturn]: ...
    def continue_as_new(
        self, flow: Flow[..., Any] | str, /, *args: Any, **kwargs: Any
    ) -> Awaitable[NoReturn]:
        """See :meth:`FlowContext.continue_as_new`."""
        return self._do("continue_as_new", continue_as_new(self._body, flow, args, kwargs))

    def decide(
        self, decision_id: str, decider: Callable[[], Any] | Callable[[AsyncFlowContext], Any], /
    ) -> Awaitable[Any]:
        """See :meth:`FlowContext.decide`; the decider may be async."""
        return self._do("decide", self._body.decide(decision_id, decider, self))

    def agent_loop(
        self,
        loop_id: str,
        /,
        *,
        model: Tool[..., ModelTurn],
        tools: Sequence[Tool[..., Any]],
        messages: Sequence[dict[str, Any]],
        max_turns: int = 20,
        budget: Mapping[str, int | Decimal] | None = None,
    ) -> Awaitable[AgentResult]:
        """See :meth:`FlowContext.agent_loop`."""
        steps = agent_loop(self._body, loop_id, model, tools, messages, max_turns, budget)
        return self._do("agent_loop", steps)
