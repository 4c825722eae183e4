"""Effects whose fate nobody knows: how they are found in a log, recorded, and waited for.

One place for the rule of ADR 0021: a frame that was begun and did not end, of a tool that must not run twice,
is never run again by itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from loom_django.engine.journal import Journal
from loom_django.kernel.events import Kind
from loom_django.kernel.fold import Fold
from loom_django.kernel.state import ON_VERDICT, Frame, FrameStatus, Wait

LOST: Final = "the process ended while the effect may have been under way"
CANCELLED: Final = "the execution was cancelled while the effect may have been under way"
EXPIRED: Final = "the execution's deadline passed while the effect may have been under way"


def open_doubts(fold: Fold) -> list[Frame]:
    """Frames that were begun and did not end, of tools declared ``idempotent=False``."""
    return [
        frame
        for frame in fold.frames.values()
        if frame.status is FrameStatus.RUNNING and frame.idempotent is False
    ]


def record_doubts(journal: Journal, doubts: list[Frame], cause: str) -> None:
    """Record EFFECT_INDOUBT for frames, with the key that the provider may have seen."""
    for frame in doubts:
        key = frame.idempotency_key(journal.execution_id)
        journal.record(Kind.EFFECT_INDOUBT, {"step": frame.step_id, "cause": cause, "key": key})


def record_park_in_doubt(journal: Journal, doubts: list[Frame], cause: str) -> None:
    """Record the doubts and the park that waits for their verdicts, and for those that are open already."""
    record_doubts(journal, doubts, cause)
    waits = with_open_doubts(journal.fold, doubt_waits(doubts))
    journal.record(Kind.EXECUTION_SUSPENDED, park_fields("effect-indoubt", waits))


def with_open_doubts(fold: Fold, waits: list[Wait]) -> list[Wait]:
    """The waits of a park: an effect in doubt can be settled whatever else the execution waits for."""
    held = {wait.id for wait in waits}
    doubts = doubt_waits([fold.frames[step_id] for step_id in fold.doubtful])
    return [*waits, *(wait for wait in doubts if wait.id not in held)]


def doubt_wait_id(frame: Frame) -> str:
    """The identity of a doubt: an attempt of a step. A later attempt's doubt is another question."""
    return f"in-doubt:{frame.step_id}:{frame.attempts}"


def doubt_waits(frames: list[Frame]) -> list[Wait]:
    return [Wait(doubt_wait_id(frame), ON_VERDICT, frame.step_id) for frame in frames]


def park_fields(reason: str, waits: list[Wait], error: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The payload of EXECUTION_SUSPENDED."""
    return {"reason": reason, "waits": [_item(wait) for wait in waits], "error": error}


def _item(wait: Wait) -> dict[str, Any]:
    item: dict[str, Any] = {
        "id": wait.id,
        "on": wait.on,
        "key": wait.correlation_key,
        "wake_at": wait.wake_at,
    }
    if wait.children:
        item |= {"children": list(wait.children), "mode": wait.mode}
    return {**item, "budget": dict(wait.budget)} if wait.budget else item
