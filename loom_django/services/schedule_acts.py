"""What a person does to a schedule: permission, reason, rehearsal, and the act with its name.

A schedule has no log: its row tells the last act, and the admin's history all those of the admin. A person without
the permission is refused, with a line in the log.
"""

from __future__ import annotations

import logging
import typing
from dataclasses import dataclass
from typing import Literal

from loom_django.definitions import Flow
from loom_django.errors import OperatorDeniedError
from loom_django.scheduling import schedules as declared
from loom_django.services import schedules
from loom_django.services.operators import Act, Host, Operator, check_reason, hand_over
from loom_django.stores.base import ScheduleRow

log = logging.getLogger("loom_django.operators")


@dataclass(frozen=True, slots=True)
class ScheduleDone:
    """What an act on a schedule did, or with ``dry_run`` would do.

    ``changed`` is False if there was nothing to do. ``row`` is the schedule's as the act met it, None for one that no
    service has seen yet. ``execution_id`` is of the run that a trigger started, ``flow`` what it starts, ``busy``
    tells whether the newest run had not ended by then. ``runs`` tells who goes on with it.
    """

    name: Literal["pause", "resume", "trigger"]
    schedule_id: str
    changed: bool
    row: ScheduleRow | None = None
    flow: Flow[..., typing.Any] | None = None
    execution_id: str = ""
    busy: bool = False
    runs: Literal["here", "worker", "nobody"] = "nobody"


def require(operator: Operator, act: Act, schedule_id: str) -> None:
    """Refuse a person without the permission for an act.

    Raises:
        OperatorDeniedError: with the permission that is missing.
    """
    if operator.may(act):
        return
    log.warning("an act was denied", extra=_about(operator, act.value, schedule_id))
    raise OperatorDeniedError(act.permission, operator.name, schedule_id)


def pause(
    loom: Host, operator: Operator, schedule_id: str, *, reason: str, dry_run: bool = False
) -> ScheduleDone:
    """Have a schedule skip what falls due from now on.

    Raises:
        OperatorDeniedError: no permission. InvalidInputError: no reason. ScheduleNotFoundError: no such schedule.
    """
    return _switch(loom, operator, "pause", schedule_id, reason, dry_run)


def resume(
    loom: Host, operator: Operator, schedule_id: str, *, reason: str, dry_run: bool = False
) -> ScheduleDone:
    """Have a paused schedule start what falls due from now on; what fell due until then is skipped.

    Raises:
        OperatorDeniedError: no permission. InvalidInputError: no reason. ScheduleNotFoundError: no such schedule.
    """
    return _switch(loom, operator, "resume", schedule_id, reason, dry_run)


def _switch(
    loom: Host,
    operator: Operator,
    name: Literal["pause", "resume"],
    schedule_id: str,
    reason: str,
    dry_run: bool,
) -> ScheduleDone:
    require(operator, Act.PAUSE_SCHEDULE, schedule_id)
    check_reason(reason)
    engine = loom.engine
    row = _row(loom, schedule_id)
    if dry_run:
        paused = row is not None and row.paused_at is not None
        return ScheduleDone(name, schedule_id, paused == (name == "resume"), row)
    engine.store.check_caller(f"the act {name}_schedule")
    act = schedules.pause if name == "pause" else schedules.resume
    changed = act(engine, schedule_id, reason=reason.strip(), principal=operator.name)
    if changed:
        _announce(operator, name, schedule_id, reason)
    return ScheduleDone(name, schedule_id, changed, row)


def trigger(
    loom: Host, operator: Operator, schedule_id: str, *, reason: str, dry_run: bool = False
) -> ScheduleDone:
    """Start a schedule's flow now.

    Raises:
        OperatorDeniedError: no permission. InvalidInputError: no reason; or the flow is pinned, or takes other
            arguments. ScheduleNotFoundError, FlowNotFoundError: not declared here.
    """
    require(operator, Act.TRIGGER_SCHEDULE, schedule_id)
    check_reason(reason)
    engine = loom.engine
    flow, _ = schedules.startable(declared.find(schedule_id))
    row = _row(loom, schedule_id)
    busy = row is not None and bool(row.last_execution_id) and engine.store.chain_runs(row.last_execution_id)
    over = hand_over(loom)
    execution_id = ""
    if not dry_run:
        engine.store.check_caller("the act trigger_schedule")
        started = schedules.trigger(
            engine, over.dispatcher, schedule_id, reason=reason.strip(), principal=operator.name
        )
        execution_id = started.execution_id
        _announce(operator, "trigger", schedule_id, reason)
    return ScheduleDone("trigger", schedule_id, True, row, flow, execution_id, busy, over.runs)


def _row(loom: Host, schedule_id: str) -> ScheduleRow | None:
    """The row as it is; a look writes none. ScheduleNotFoundError if it is not declared here either."""
    row = loom.engine.store.schedule_row(schedule_id)
    if row is None:
        declared.find(schedule_id)
    return row


def _announce(operator: Operator, name: str, schedule_id: str, reason: str) -> None:
    about = {**_about(operator, f"{name}_schedule", schedule_id), "reason": reason.strip()}
    log.info("an operator acted", extra=about)


def _about(operator: Operator, act: str, schedule_id: str) -> dict[str, str]:
    return {"principal": operator.name, "act": act, "schedule_id": schedule_id}
