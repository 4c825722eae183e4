"""The kinds of event, and which of them end a park.

The promise kept here: every kernel kind is classified as *answering* (it ends a park) or *ignorable*
(it may follow a park without ending it), and a kind that is not classified stops the import. The rules
are those of ADR 0118, D1.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from json.encoder import encode_basestring_ascii
from typing import Any, Final, Literal

from loom_django.kernel import codec

try:
    import orjson
except ImportError:  # the extra "speed"
    orjson = None  # type: ignore[assignment]


class Kind(enum.StrEnum):
    """The kernel's own kinds. Everything else in a log is an application event."""

    EXECUTION_STARTED = "EXECUTION_STARTED"
    EXECUTION_SUSPENDED = "EXECUTION_SUSPENDED"
    EXECUTION_RESUMED = "EXECUTION_RESUMED"
    EXECUTION_COMPLETED = "EXECUTION_COMPLETED"
    EXECUTION_FAILED = "EXECUTION_FAILED"
    EXECUTION_CANCELLED = "EXECUTION_CANCELLED"
    EXECUTION_CONTINUED = "EXECUTION_CONTINUED"
    EXECUTION_DENIED = "EXECUTION_DENIED"
    EXECUTION_MIGRATED = "EXECUTION_MIGRATED"
    STEP_STARTED = "STEP_STARTED"
    STEP_COMPLETED = "STEP_COMPLETED"
    STEP_FAILED = "STEP_FAILED"
    STEP_RETRYING = "STEP_RETRYING"
    EFFECT_INDOUBT = "EFFECT_INDOUBT"
    EFFECT_RETURNED_LATE = "EFFECT_RETURNED_LATE"
    TIMER_FIRED = "TIMER_FIRED"
    MESSAGE_CONSUMED = "MESSAGE_CONSUMED"
    DECISION_RECORDED = "DECISION_RECORDED"
    CHILD_STARTED = "CHILD_STARTED"
    OUTCOME_RECORDED = "OUTCOME_RECORDED"
    RESOURCE_METERED = "RESOURCE_METERED"


Answer = Literal["answering", "ignorable"]

CLASSIFICATION: Final[Mapping[Kind, Answer]] = {
    Kind.EXECUTION_STARTED: "ignorable",
    Kind.EXECUTION_SUSPENDED: "answering",
    Kind.EXECUTION_RESUMED: "answering",
    Kind.EXECUTION_COMPLETED: "answering",
    Kind.EXECUTION_FAILED: "answering",
    Kind.EXECUTION_CANCELLED: "answering",
    Kind.EXECUTION_CONTINUED: "answering",
    Kind.EXECUTION_DENIED: "ignorable",
    Kind.EXECUTION_MIGRATED: "ignorable",
    Kind.STEP_STARTED: "ignorable",
    Kind.STEP_COMPLETED: "ignorable",
    Kind.STEP_FAILED: "ignorable",
    Kind.STEP_RETRYING: "ignorable",
    Kind.EFFECT_INDOUBT: "ignorable",
    Kind.EFFECT_RETURNED_LATE: "ignorable",
    Kind.TIMER_FIRED: "ignorable",
    Kind.MESSAGE_CONSUMED: "ignorable",
    Kind.DECISION_RECORDED: "ignorable",
    Kind.CHILD_STARTED: "ignorable",
    Kind.OUTCOME_RECORDED: "ignorable",
    Kind.RESOURCE_METERED: "ignorable",
}
if set(CLASSIFICATION) != set(Kind):
    raise TypeError(f"kinds without a classification: {sorted(set(Kind) ^ set(CLASSIFICATION))}")

ANSWERING: Final = frozenset(str(kind) for kind, answer in CLASSIFICATION.items() if answer == "answering")
KERNEL_KINDS: Final = frozenset(str(kind) for kind in Kind)
TERMINAL: Final = frozenset(
    str(kind)
    for kind in (
        Kind.EXECUTION_COMPLETED,
        Kind.EXECUTION_FAILED,
        Kind.EXECUTION_CANCELLED,
        Kind.EXECUTION_CONTINUED,
    )
)
# Notes of others about an execution: anybody may append them, so the fence does not guard them.
AUDIT: Final = frozenset(
    str(kind) for kind in (Kind.EXECUTION_DENIED, Kind.OUTCOME_RECORDED, Kind.EFFECT_RETURNED_LATE)
)


def is_answering(kind: str, is_kernel: bool) -> bool:
    """Tell whether an event of this kind ends a park.

    An unknown kind that carries the kernel's stamp was written by a newer node. It counts as answering:
    at worst a wake is tried again, never a running body fenced out. An unknown kind without the stamp is
    an application event and never answers.
    """
    if kind in KERNEL_KINDS:
        return kind in ANSWERING
    return is_kernel


def may_be_passed_by_owner(kind: str, is_kernel: bool) -> bool:
    """Tell whether the owner of a log may append behind such an event that somebody else wrote.

    Only notes of others qualify: audit kinds and application events. A step's fact or an answer written
    by somebody else means that the execution has another owner.
    """
    return kind in AUDIT or (kind not in KERNEL_KINDS and not is_kernel)


_JSON: Final = json.JSONEncoder(separators=(",", ":"))


class Encoded(str):
    """JSON text that the codec has made; spliced into a payload as it is. ``tree`` is what a reader gets of it."""

    __slots__ = ("_tree",)
    _tree: Any

    @classmethod
    def of(cls, value: Any, *, path: str = "value", limit: int | None = None) -> Encoded:
        """A value in the codec's form; arguments and errors as for :func:`~loom_django.kernel.codec.dumps`."""
        return cls.of_tree(codec.encode(value, path=path), path=path, limit=limit)

    @classmethod
    def of_tree(cls, tree: Any, *, path: str = "value", limit: int | None = None) -> Encoded:
        """The same of what is in that form already, and stays as it is."""
        encoded = cls(codec.text_of(tree, path=path, limit=limit))
        encoded._tree = tree
        return encoded

    @property
    def tree(self) -> Any:
        try:
            return self._tree
        except AttributeError:
            self._tree = parse(str(self))
            return self._tree


def pack(fields: Mapping[str, Any]) -> str:
    """Return the payload text: a JSON object in the order given, ASCII, ``None`` fields left out."""
    return pack_and_parse(fields)[0]


def pack_and_parse(fields: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the payload text and what a reader gets of it; only what may read otherwise is parsed."""
    texts, data = [], {}
    for name, value in fields.items():
        if value is None:
            continue
        kind = type(value)
        if kind is str:
            text = encode_basestring_ascii(value)
            if "\\u" in text:
                value = parse(text)  # two halves of a character that stand side by side are read as one
        elif kind is int:
            text = str(value)
        elif kind is Encoded:
            text, value = value, value.tree
        elif kind is bool:
            text = "true" if value else "false"
        else:
            text = _JSON.encode(value)
            value = parse(text)
        texts.append(f'"{name}":{text}')
        data[name] = value
    return "{" + ",".join(texts) + "}", data


def parse(text: str) -> Any:
    """What a stored JSON text holds."""
    if orjson is not None:
        try:
            return orjson.loads(text)
        except orjson.JSONDecodeError:
            pass  # what it refuses, as an escaped surrogate, the standard library may take
    return json.loads(text)


@dataclass(frozen=True)
class Event:
    """One row of the log.

    ``body`` is the stored JSON object as text; ``data`` is the same, parsed. User values inside it are in
    the codec's form. ``writer`` is a random number drawn per body run or per outside append: it tells a
    lost acknowledgement from a rival's write. ``recorded_at`` is the store's, and None before it landed.
    """

    execution_id: str
    sequence: int
    kind: str
    body: str
    fence: int | None = None
    writer: int = 0
    is_kernel: bool = True
    recorded_at: datetime | None = None

    @classmethod
    def of(
        cls,
        execution_id: str,
        sequence: int,
        kind: str,
        fields: Mapping[str, Any],
        fence: int | None,
        writer: int,
    ) -> Event:
        """A fact in the making: its ``data`` is what a reader of its ``body`` will get."""
        body, data = pack_and_parse(fields)
        event = cls(execution_id, sequence, str(kind), body, fence, writer, kind in KERNEL_KINDS)
        event.__dict__["data"] = data
        return event

    @cached_property
    def data(self) -> dict[str, Any]:
        parsed: dict[str, Any] = parse(self.body)
        return parsed

    @property
    def value(self) -> Any:
        """What ``ctx.emit`` was given, equal and of the same type; None for the kernel's own kinds."""
        return None if self.is_kernel else codec.decode(self.data.get("value"))

    def recorded(self, at: datetime) -> Event:
        """The event as a store has recorded it."""
        return Event(
            self.execution_id,
            self.sequence,
            self.kind,
            self.body,
            self.fence,
            self.writer,
            self.is_kernel,
            at,
        )

    @property
    def payload(self) -> dict[str, Any]:
        """The payload as plain JSON; values of the user's own are in the codec's form."""
        return self.data
