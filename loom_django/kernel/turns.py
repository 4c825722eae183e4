"""What passes between an agent loop and its model: recorded values, of no provider's own form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, Literal

from loom_django.kernel.codec import register_type

StopReason = Literal["finished", "max_turns"]


@register_type(name="loom_django.ToolCall")
@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that a model asks for.

    Attributes:
        id: the provider's, by which it knows the answer again.
        name: of the tool.
        arguments: the JSON object of the call. What is no object goes back to the model as an error.
    """

    id: str
    name: str
    arguments: Any = field(default_factory=dict)


@register_type(name="loom_django.ModelTurn")
@dataclass(frozen=True, slots=True)
class ModelTurn:
    """What a model's tool returns: what the model said, and the calls that it asks for; without calls it is done.

    Attributes:
        text: what it said.
        tool_calls: in the model's order; they are made side by side.
        extra: what the provider wants to see again with this turn (signatures of hidden thoughts); kept in the
            message of the turn, under the same name.
    """

    text: str = ""
    tool_calls: Sequence[ToolCall] = ()
    extra: Any = None


@register_type(name="loom_django.AgentResult")
@dataclass(frozen=True, slots=True)
class AgentResult:
    """How an agent loop ended.

    Attributes:
        text: of the last turn.
        stop_reason: "finished", or "max_turns": the model still asked for calls, which were not made.
        turns: how many turns the model had.
        messages: the whole conversation, the given messages first.
        used: what the loop has metered, by resource.
    """

    text: str
    stop_reason: StopReason
    turns: int
    messages: list[dict[str, Any]]
    used: Mapping[str, Decimal] = field(default_factory=dict)

    @property
    def finished(self) -> bool:
        """True if the model had nothing more to ask for."""
        return self.stop_reason == "finished"
