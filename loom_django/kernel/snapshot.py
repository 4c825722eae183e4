"""The fold of a log as text, so that reading a long log costs its tail: what :func:`write` gave, :func:`read` gives back.

A snapshot is good for the code that wrote it and no other: its format is a digest over the source of everything that
makes or reads a state, so that a change of the fold, however small, leaves no snapshot of before it to be read.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields
from decimal import Decimal
from functools import partial
from types import MappingProxyType, ModuleType
from typing import Any, Final

from loom_django.kernel import codec, events, fold, keys, state
from loom_django.kernel.events import Event, parse
from loom_django.kernel.fold import Fold
from loom_django.kernel.state import Decision, ExecutionState, Frame, FrameStatus, Status, Wait, WaitStatus

try:
    import orjson
except ImportError:  # the extra "speed"
    orjson = None  # type: ignore[assignment]

# What a state hangs on, beside this module.
MODULES: Final = (codec, events, fold, keys, state)


def format_of(modules: Iterable[ModuleType]) -> str:
    """A digest over the source of these modules; "" if that is not there."""
    digest = hashlib.sha256()
    try:
        for module in modules:
            digest.update(inspect.getsource(module).encode())
    except (OSError, TypeError):
        return ""
    return digest.hexdigest()


FORMAT: Final = format_of((*MODULES, sys.modules[__name__]))
"""The format that this code writes and reads; "" where its source cannot be read: then there are no snapshots."""


def seal(execution_id: str, form: str, newest: Event, body: str) -> str:
    """A digest that binds a snapshot to its execution, its format, and the event that it stands behind.

    Another log of that id, and one whose event was replaced, has another event there: the writer in it is random.
    """
    event = [newest.sequence, newest.kind, newest.body, newest.fence, newest.writer, newest.is_kernel]
    head = json.dumps([execution_id, form, *event])
    return hashlib.sha256(f"{head}\n{body}".encode("utf-8", "surrogatepass")).hexdigest()


# What stands in JSON as it is.
_PLAIN: Final = (
    "execution_id", "last_sequence", "flow_id", "version", "input", "flow_hash", "code_hash", "graph", "options",
    "children", "child_ids", "park_sequence", "park_fence", "park_waits", "reason", "result", "error", "started_at",
    "finished_at", "at", "migrated_sequence", "unknown_kinds", "status",
)  # fmt: skip
_STATUSES: Final = {str(status): status for status in FrameStatus}
_STATUS, _ARGS, _LATE = map(Frame._fields.index, ("status", "args", "late"))


class KeptFrame(Frame):
    """A frame as a snapshot keeps it: its arguments are text until somebody looks.

    A body that is run again over thousands of steps asks for each outcome, and for no arguments. To whatever
    iterates over it, compares or changes it, it is a :class:`Frame`.
    """

    __slots__ = ()
    _make = Frame._make  # type: ignore[assignment]  # so that _replace makes one

    @property
    def args(self) -> Any:
        text: Any = self[_ARGS]
        return None if text is None else parse(text)

    def __iter__(self) -> Iterator[Any]:
        row = list(self[:])
        row[_ARGS] = self.args
        return iter(row)

    def __eq__(self, other: object) -> bool:
        return self._make(self) == other

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __repr__(self) -> str:
        return repr(self._make(self))

    def __reduce__(self) -> Any:
        return Frame, tuple(self)


_kept: Final = partial(tuple.__new__, KeptFrame)


def write(of: Fold) -> str:
    """The state of a fold as JSON.

    The frames stand in columns, one for each of their fields: so a reader makes few objects of many frames.
    """
    document = {name: getattr(of, name) for name in _PLAIN}
    document["frames"] = list(zip(*map(_frame_row, of.frames.values()), strict=True))
    document["waits"] = [_row(wait) for wait in of.waits.values()]
    document["decisions"] = {name: _row(decision) for name, decision in of.decisions.items()}
    document["meters"] = {name: str(amount) for name, amount in of.meters.items()}
    document["spent"] = [[*spender, str(amount)] for spender, amount in of.spent.items()]
    document["messages"] = list(of.messages)
    document["noted"] = list(of.noted)
    return _text(document)


def _text(tree: Any) -> str:
    if orjson is not None:
        try:
            return orjson.dumps(tree).decode()
        except TypeError:
            pass  # what it refuses, such as a surrogate, the standard library may take
    return json.dumps(tree, separators=(",", ":"))


def _frame_row(frame: Frame) -> Sequence[Any]:
    row = list(frame[:])
    if type(frame) is not KeptFrame and frame.args is not None:
        row[_ARGS] = _text(frame.args)
    row[_LATE] = row[_LATE] or None
    return row


def _row(value: Wait | Decision) -> list[Any]:
    return [getattr(value, field.name) for field in fields(value)]


def read(text: str) -> ExecutionState:
    """The state that was written.

    Raises:
        ValueError, TypeError, LookupError: the text is no such thing.
    """
    document = parse(text)
    plain = {name: document[name] for name in _PLAIN}
    plain["status"] = Status(plain["status"])
    for name in ("park_waits", "unknown_kinds"):
        plain[name] = tuple(plain[name])
    for name in ("options", "children", "child_ids"):
        plain[name] = MappingProxyType(plain[name])
    return ExecutionState(
        **plain,
        frames=MappingProxyType(_frames(document["frames"])),
        waits=MappingProxyType({row[0]: _wait(*row) for row in document["waits"]}),
        decisions=MappingProxyType({name: _decision(*row) for name, row in document["decisions"].items()}),
        meters=MappingProxyType({name: Decimal(amount) for name, amount in document["meters"].items()}),
        spent=MappingProxyType(
            {(loop, resource): Decimal(amount) for loop, resource, amount in document["spent"]}
        ),
        messages=frozenset(document["messages"]),
        noted=frozenset(document["noted"]),
    )


def _frames(columns: list[Any]) -> dict[str, Frame]:
    if not columns:
        return {}
    if len(columns) != len(Frame._fields):
        raise ValueError(f"frames have {len(Frame._fields)} fields, not {len(columns)}")
    step_ids = columns[0]
    columns[_STATUS] = map(_STATUSES.__getitem__, columns[_STATUS])
    columns[_LATE] = (tuple(late or ()) for late in columns[_LATE])
    return dict(zip(step_ids, map(_kept, zip(*columns, strict=True)), strict=True))


_WAIT: Final = tuple(field.name for field in fields(Wait))


def _wait(*row: Any) -> Wait:
    told = dict(zip(_WAIT, row, strict=True))
    told |= {"status": WaitStatus(told["status"]), "children": tuple(told["children"])}
    return Wait(**told)


def _decision(value: Any, at: int, sequence: int, inner: list[str] | None, since: int) -> Decision:
    return Decision(value, at, sequence, None if inner is None else tuple(inner), since)
