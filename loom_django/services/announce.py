"""From events that have landed to Django signals, and to the log what nobody should have to look for."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, Final

from django.dispatch import Signal

from loom_django import signals
from loom_django.definitions import registry
from loom_django.errors import FlowDivergenceError
from loom_django.kernel import codec
from loom_django.kernel.events import Event, Kind
from loom_django.kernel.state import ON_VERDICT
from loom_django.stores.base import Due, EventStore

log = logging.getLogger("loom_django.signals")
facts = logging.getLogger("loom_django.executions")

_Sent = tuple[Signal, dict[str, Any]]


# What may need a person: a line in the log for each.
_NOTED: Final = frozenset({Kind.EFFECT_INDOUBT, Kind.EXECUTION_FAILED})


def _started(data: Mapping[str, Any]) -> list[_Sent]:
    subject = (data.get("options") or {}).get("subject")
    return [(signals.execution_started, {"subject": tuple(subject) if subject else None})]


def _suspended(data: Mapping[str, Any]) -> list[_Sent]:
    return [(signals.execution_suspended, {"waits": data["waits"], "reason": data.get("reason", "")})]


def _resumed(data: Mapping[str, Any]) -> list[_Sent]:
    principal = data.get("principal")
    sent: list[_Sent] = [
        (signals.execution_resumed, {"event_type": data.get("event"), "principal": principal})
    ]
    return [*sent, *_verdict(data)]


def _verdict(data: Mapping[str, Any]) -> list[_Sent]:
    """Of the event that brings a verdict: an answer to the park, or one that was kept while the body ran."""
    if data.get("event") != ON_VERDICT or "payload" not in data:
        return []
    verdict = codec.decode(data["payload"])
    about = {
        "step_id": verdict["step_id"],
        "resolution": verdict["resolution"],
        "principal": data.get("principal"),
        "reason": data.get("reason", ""),
    }
    return [(signals.verdict_given, about)]


def _completed(data: Mapping[str, Any]) -> list[_Sent]:
    return [(signals.execution_completed, {"result": codec.decode(data.get("result"))})]


def _failed(data: Mapping[str, Any]) -> list[_Sent]:
    error = data["error"]
    about = {"error_type": error.get("type", ""), "message": codec.decode(error.get("message", ""))}
    return [(signals.execution_failed, about)]


def _cancelled(data: Mapping[str, Any]) -> list[_Sent]:
    about = {"reason": data.get("reason", ""), "principal": data.get("principal")}
    return [(signals.execution_cancelled, about)]


def _in_doubt(data: Mapping[str, Any]) -> list[_Sent]:
    about = {"step_id": data["step"], "idempotency_key": data["key"], "cause": data["cause"]}
    return [(signals.effect_in_doubt, about)]


# By kind: the signals that are sent, and what tells them of an event; asked only if somebody listens.
_TELLS: Final[Mapping[str, tuple[tuple[Signal, ...], Callable[[Mapping[str, Any]], list[_Sent]]]]] = {
    Kind.EXECUTION_STARTED: ((signals.execution_started,), _started),
    Kind.EXECUTION_SUSPENDED: ((signals.execution_suspended,), _suspended),
    Kind.EXECUTION_RESUMED: ((signals.execution_resumed, signals.verdict_given), _resumed),
    Kind.MESSAGE_CONSUMED: ((signals.verdict_given,), _verdict),
    Kind.EXECUTION_COMPLETED: ((signals.execution_completed,), _completed),
    Kind.EXECUTION_FAILED: ((signals.execution_failed,), _failed),
    Kind.EXECUTION_CANCELLED: ((signals.execution_cancelled,), _cancelled),
    Kind.EFFECT_INDOUBT: ((signals.effect_in_doubt,), _in_doubt),
}


def tells(events: tuple[Event, ...]) -> bool:
    """False if :func:`announce` has nothing to do for these events."""
    for event in events:
        told = _TELLS.get(event.kind)
        if told is not None and (event.kind in _NOTED or any(signal.receivers for signal in told[0])):
            return True
    return False


def announce(flow_id: str, version: int, events: tuple[Event, ...]) -> None:
    """Send what the events tell; a receiver that fails is logged and stops nothing."""
    for event in events:
        told = _TELLS.get(event.kind)
        if told is None:
            continue
        _note(flow_id, event)
        sent, tell = told
        if not any(signal.receivers for signal in sent):
            continue
        for signal, about in tell(event.data):
            if signal.has_listeners():
                _send(signal, flow_id, version, event.execution_id, event.sequence, about)


def _note(flow_id: str, event: Event) -> None:
    """A line for what may need a person. Never a value: messages of errors may hold some."""
    if event.kind not in _NOTED:
        return
    about = {"execution_id": event.execution_id, "flow_id": flow_id}
    if event.kind == Kind.EFFECT_INDOUBT:
        step_id = event.data["step"]
        facts.warning("an effect is in doubt", extra={**about, "step_id": step_id})
    else:
        facts.warning("an execution has failed: %s", event.data["error"].get("type", ""), extra=about)


def execution_recovered(flow_id: str, version: int, newest: Event, previous_owner: str) -> None:
    """Tell that an execution was taken from its holder."""
    if signals.execution_recovered.has_listeners():
        about = {"previous_owner": previous_owner}
        _send(signals.execution_recovered, flow_id, version, newest.execution_id, newest.sequence, about)


def flow_diverged(flow_id: str, version: int, sequence: int, error: FlowDivergenceError) -> None:
    """Tell that a body did not ask for what its log holds."""
    if signals.flow_diverged.has_listeners():
        about = {"expected": error.expected, "seen": error.seen}
        _send(signals.flow_diverged, flow_id, version, error.execution_id, sequence, about)


def redrive_exhausted(store: EventStore, due: Due, attempts: int) -> None:
    """Tell that the quick tries to wake an execution are used up."""
    if signals.redrive_exhausted.has_listeners():
        id, about = due.row.execution_id, {"attempts": attempts}
        for newest in store.read(id)[-1:]:  # none, if it was deleted meanwhile
            _send(signals.redrive_exhausted, due.flow_id, due.version, id, newest.sequence, about)


def _send(
    signal: Signal, flow_id: str, version: int, execution_id: str, sequence: int, about: dict[str, Any]
) -> None:
    ids = {"execution_id": execution_id, "flow_id": flow_id, "version": version, "sequence": sequence}
    for receiver, outcome in signal.send_robust(_sender(flow_id, version), **ids, **about):
        if isinstance(outcome, Exception):
            log.error("a receiver failed: %r", receiver, exc_info=outcome, extra=ids)


def _sender(flow_id: str, version: int) -> Any:
    flow = registry.versions(flow_id).get(version)
    if flow is not None:
        return flow
    from loom_django.models import Execution

    return Execution
