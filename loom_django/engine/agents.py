"""The agent loop: a model's turns and the calls that it asks for, each a step of its own.

What the model is told is rebuilt from the log on every run; a turn's step keeps the new messages only. Whatever
depends on the code of the day (is there such a tool, do its arguments fit) is decided once and recorded. So a
loop goes on after any crash where it was, under the keys it had.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final, TypeGuard

from loom_django.definitions import Outcome, Tool
from loom_django.engine import budgets, steps
from loom_django.engine.body import Body
from loom_django.engine.drive import Enter, Steps
from loom_django.engine.parallel import Inner, in_scope
from loom_django.engine.steps import InLoop
from loom_django.errors import InvalidInputError, LoomError, StepFailed, class_name, shown
from loom_django.kernel import codec, keys
from loom_django.kernel.events import Encoded, Kind
from loom_django.kernel.failures import bounded
from loom_django.kernel.state import Wait
from loom_django.kernel.tool_schema import arguments_of
from loom_django.kernel.turns import AgentResult, ModelTurn, StopReason, ToolCall

# A decision under this name and a step's id is why that turn or call is not made; with ":last" behind a turn's,
# why none of its calls is.
_REFUSED: Final = "__loom_refused__:"

# What a message of a call that was not made has as its error_type.
UNKNOWN_TOOL: Final = "UnknownTool"
INVALID_ARGUMENTS: Final = "InvalidArguments"
MAX_TURNS: Final = "MaxTurns"

# What a model is told of its arguments, in bytes at most; it has chosen their names.
MAX_WHY_BYTES: Final = 2000

# Why something is not made: an error_type, and a text.
_Problem = tuple[str, str]

# Of a digest, so many hexadecimal digits stand in a key.
_DIGITS: Final = 32


def agent_loop(
    body: Body,
    loop_id: str,
    model: Tool[..., Any],
    tools: Sequence[Tool[..., Any]],
    messages: Sequence[Mapping[str, Any]],
    max_turns: int,
    budget: Mapping[str, Any] | None,
) -> Steps[AgentResult]:
    """Let a model speak and make the calls that it asks for, until it asks for none or its turns are over."""
    yield Enter(partial(body.enter, "agent_loop"))
    loop: _Loop = body.checked(lambda: _Loop(body, loop_id, model, tools, messages, max_turns, budget))
    return (yield from loop.run())


class _Loop:
    """One loop of one body run."""

    def __init__(
        self,
        body: Body,
        loop_id: str,
        model: Tool[..., Any],
        tools: Sequence[Tool[..., Any]],
        messages: Sequence[Mapping[str, Any]],
        max_turns: int,
        budget: Mapping[str, Any] | None,
    ) -> None:
        self.body = body
        self.loop_id = keys.check_step_name(loop_id, "id of an agent loop")
        if not body.flow.in_family(f"{loop_id}#turn:1"):
            body.undeclared(loop_id, f"List it in step_families=[{loop_id!r}]: the loop makes its steps.")
        self.name = keys.repeated_id(loop_id, body.path, 1)
        self.model = _declared(body, model)
        self.tools = _by_name(body, tools)
        self.schemas = [tool.schema for tool in self.tools.values()]
        _check_model(self.model)
        self.max_turns = keys.check_whole(max_turns, "max_turns", 1, 1_000_000)
        self.limits = budgets.checked(budget)
        self.news: list[Any] = _checked_messages(messages)
        self.told: list[str] = []  # what the model was told before, turn by turn, as the log keeps it
        self.digest = self.model.name

    def run(self) -> Steps[AgentResult]:
        for resource in self.limits:
            for wait in budgets.raised(self.body.journal.fold, self.name, resource):
                self.body.served(wait.answered_at)
        number = 0
        while True:
            number += 1
            turn = yield from self._ask_model(number)
            self.news.append(_said(turn))
            if not turn.tool_calls:
                return self._result(turn, number, "finished")
            if (last := self._why_last(number, turn)) is not None:
                self.news += [_refused(call, *last) for call in turn.tool_calls]
                return self._result(turn, number, "max_turns")
            self.news += yield from self._make_calls(number, turn.tool_calls)

    def _result(self, turn: ModelTurn, number: int, why: StopReason) -> AgentResult:
        fold = self.body.journal.fold
        spent = {resource: amount for (loop, resource), amount in fold.spent.items() if loop == self.name}
        return AgentResult(turn.text, why, number, [*self._rebuilt(), *self._copied(self.news)], spent)

    # What the model is told.

    def _ask_model(self, number: int) -> Steps[ModelTurn]:
        body = self.body
        step_id = keys.turn_id(self.loop_id, body.path, number)
        body.ask(step_id, f"by turn {number} of agent loop {self.loop_id!r}")
        news = self.news
        if number > 1 and (problem := self._why_not(step_id, partial(self._too_much, step_id))) is not None:
            raise StepFailed(step_id, *problem)
        self.digest = _digest(self.digest, news)
        text = codec.dumps(news)

        def rebuilt() -> tuple[Any, ...]:
            return [*self._rebuilt(), *codec.loads(text)], self._copied(self.schemas)

        yield from self._within_budget(body, step_id)
        within = InLoop(self.name, self.digest, rebuilt)
        turn = yield from body.perform(step_id, self.model, (news,), {}, within)
        if not _is_turn(turn):
            body.refuse(
                InvalidInputError(
                    f"{self.model.name} is the model of {self.loop_id!r}: it returns a ModelTurn of "
                    f"ToolCalls, not {shown(turn)}"
                )
            )
        self.told.append(text)
        self.news = []
        return turn

    def _too_much(self, step_id: str) -> _Problem | None:
        """Why the model cannot be told what came of its calls: its own words and results, and no misuse of the flow's."""
        try:
            steps.arguments_text(self.body, step_id, (self.news,), {})
        except LoomError as exc:
            return class_name(type(exc)), str(exc)
        return None

    def _rebuilt(self) -> list[Any]:
        return [message for text in self.told for message in codec.loads(text)]

    @staticmethod
    def _copied(value: Any) -> Any:
        return codec.loads(codec.dumps(value))

    # What the model asks for.

    def _make_calls(self, turn: int, calls: Sequence[ToolCall]) -> Steps[list[dict[str, Any]]]:
        """Make the calls of one turn side by side; the message that answers each, in the order of the calls."""
        answers: dict[int, dict[str, Any]] = {}
        branches: dict[str, Inner] = {}
        for number, call in enumerate(calls, 1):
            step_id = keys.turn_id(self.loop_id, self.body.path, turn, number)
            problem = self._why_not(step_id, partial(self._problem, call))
            if problem is not None:
                answers[number] = _refused(call, *problem)
                continue
            branches[str(number)] = Inner("agent_loop", partial(self._call, step_id, call))
        if branches:
            outcomes = yield from in_scope(self.body, branches, settle=True)
            for name, outcome in outcomes.items():
                answers[int(name)] = _answer(calls[int(name) - 1], outcome)
        return [answers[number] for number in sorted(answers)]

    def _why_not(self, step_id: str, problem: Callable[[], _Problem | None]) -> _Problem | None:
        """Why a turn or a call is not made; None if it is, or was begun. Decided once, and recorded."""
        body = self.body
        if step_id in body.journal.fold.frames:
            return None
        known = body.journal.fold.decisions.get(_REFUSED + step_id)
        if known is not None:
            body.served(known.at)
            error_type, why = body.decode(known.value)
            return error_type, why
        found = problem()
        if found is None:
            return None
        body.begin_live()
        fields = {"decision": _REFUSED + step_id, "value": Encoded.of(list(found))}
        event = body.journal.record(Kind.DECISION_RECORDED, fields)
        body.did(event.data["at"])
        return found

    def _why_last(self, number: int, turn: ModelTurn) -> _Problem | None:
        """Why the calls of a turn are not made, and no turn follows; None if they are, or any of that was begun."""
        fold, path = self.body.journal.fold, self.body.path
        turn_id = partial(keys.turn_id, self.loop_id, path)

        def problem() -> _Problem | None:
            if number < self.max_turns:
                return None
            calls = (turn_id(number, place) for place, _ in enumerate(turn.tool_calls, 1))
            if any(
                step in fold.frames or _REFUSED + step in fold.decisions
                for step in (turn_id(number + 1), *calls)
            ):
                return None
            return MAX_TURNS, f"not called: this was the last of {number} turns"

        return self._why_not(f"{turn_id(number)}:last", problem)

    def _problem(self, call: ToolCall) -> _Problem | None:
        name: object = call.name
        tool = self.tools.get(name) if isinstance(name, str) else None
        if tool is None:
            return UNKNOWN_TOOL, f"there is no tool {shown(name)}; the tools are {', '.join(self.tools)}"
        try:
            self._arguments(tool, call)
        except InvalidInputError as exc:
            return INVALID_ARGUMENTS, bounded(str(exc), MAX_WHY_BYTES)
        return None

    @staticmethod
    def _arguments(tool: Tool[..., Any], call: ToolCall) -> dict[str, Any]:
        return arguments_of(tool.declared_id, tool.func, tool.signature, call.arguments)

    def _call(self, step_id: str, call: ToolCall, body: Body) -> Steps[Any]:
        """Make one call in its branch."""
        yield Enter(partial(body.enter, "agent_loop"))
        body.ask(step_id, f"by agent loop {self.loop_id!r}")
        yield from self._within_budget(body, step_id)
        frame = body.journal.fold.frames.get(step_id)
        if frame is not None and frame.settled:  # no tool is needed: today's flow may have none of that name
            return body.serve(frame)
        if frame is None:
            tool = self.tools[call.name]
            arguments = self._arguments(tool, call)
        else:  # what was begun goes on as it was begun, whatever the code of today makes of the call
            tool = self.tools.get(call.name) or _tool_named(body, frame.tool)
            arguments = body.decode(frame.args)["kwargs"]
        within = InLoop(self.name, _digest(call.name, call.arguments))
        return (yield from body.perform(step_id, tool, (), arguments, within))

    def _exhausted(self) -> Wait | None:
        return budgets.exhausted(self.body.journal.fold, self.name, self.body.path, self.limits)

    def _within_budget(self, body: Body, step_id: str) -> Steps[None]:
        """Wait while a limit is reached. A step that was begun has passed here."""
        if step_id in body.journal.fold.frames:
            return
        while (wait := self._exhausted()) is not None:
            answered = yield from body.wait_again(wait, budgets.REASON)
            body.did(answered.answered_at)


# What is handed in.


def _declared(body: Body, tool: object) -> Tool[..., Any]:
    if not isinstance(tool, Tool):
        name = getattr(tool, "__name__", repr(tool))
        body.undeclared(name, "decorate it with @tool and list it in steps=")
    if tool.is_keyed:
        raise InvalidInputError(
            f"{tool.declared_id!r} is keyed: a loop names its steps itself, pass {tool.name}"
        )
    if tool.declared_id not in body.flow.steps and not body.flow.step_ids_of(tool):
        body.undeclared(tool.declared_id)
    return tool


def _by_name(body: Body, tools: object) -> dict[str, Tool[..., Any]]:
    if isinstance(tools, str) or not isinstance(tools, Sequence):
        raise InvalidInputError(f"tools={shown(tools)} must be a list of tools")
    found: dict[str, Tool[..., Any]] = {}
    for tool in [_declared(body, tool) for tool in tools]:
        if tool.declared_id in found:
            raise InvalidInputError(
                f"two tools of the loop are named {tool.declared_id!r}: give one another name by .named()"
            )
        found[tool.declared_id] = tool
    return found


def _tool_named(body: Body, name: str) -> Tool[..., Any]:
    """A tool that the loop is not given any more, and the flow still declares."""
    for tool in body.flow.steps.values():
        if tool.name == name:
            return tool
    body.undeclared(name)


def _is_turn(value: object) -> TypeGuard[ModelTurn]:
    if not isinstance(value, ModelTurn) or not isinstance(value.tool_calls, list | tuple):
        return False
    return all(isinstance(call, ToolCall) for call in value.tool_calls)


def _check_model(model: Tool[..., Any]) -> None:
    try:
        model.signature.bind([], [])
    except TypeError as exc:
        raise InvalidInputError(
            f"{model.name} cannot be a model ({exc}): it takes (ctx, messages, tools)"
        ) from exc


def _checked_messages(messages: object) -> list[Any]:
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence):
        raise InvalidInputError(f"messages={shown(messages)} must be a list of dicts")
    for place, message in enumerate(messages):
        if not isinstance(message, dict):
            raise InvalidInputError(f"messages[{place}]={shown(message)} must be a dict")
    copied: list[Any] = codec.loads(codec.dumps(list(messages), path="messages"))
    return copied


def _digest(before: str, content: Any) -> str:
    text = codec.canonical([before, content])
    return hashlib.sha256(text.encode()).hexdigest()[:_DIGITS]


# Messages.


def _said(turn: ModelTurn) -> dict[str, Any]:
    calls = [{"id": call.id, "name": call.name, "arguments": call.arguments} for call in turn.tool_calls]
    extra = {} if turn.extra is None else {"extra": turn.extra}
    return {"role": "assistant", "content": turn.text, "tool_calls": calls, **extra}


def _answer(call: ToolCall, outcome: Outcome) -> dict[str, Any]:
    if isinstance(outcome.error, StepFailed):
        return _refused(call, outcome.error.error_type, outcome.error.message)
    if outcome.error is not None:
        raise outcome.error
    return {**_to(call), "is_error": False, "content": outcome.value}


def _refused(call: ToolCall, error_type: str, why: str) -> dict[str, Any]:
    return {**_to(call), "is_error": True, "error_type": error_type, "content": why}


def _to(call: ToolCall) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call.id, "name": call.name}
