"""What a program declares of time: schedules, each a flow with its arguments at the times of a cron expression.

A declaration is checked when it is made: a wrong expression, zone or argument is refused at import and names
itself. What a schedule has decided so far is a row of the database; nothing here touches one.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final, Literal, NoReturn
from zoneinfo import ZoneInfo

from loom_django.definitions import Flow, registry
from loom_django.errors import (
    InvalidIdError,
    InvalidInputError,
    LoomError,
    ScheduleDefinitionError,
    ScheduleNotFoundError,
    shown,
)
from loom_django.kernel import codec, cron, keys
from loom_django.kernel.cron import Cron, CronError

CatchUp = Literal["skip", "latest", "all"]
Overlap = Literal["allow", "skip"]

# "@" and the milliseconds of any date fit behind it in an execution's id.
MAX_ID: Final = 200

# One look starts no more than this.
MAX_CATCH_UP: Final = 1000


class _Default(str):
    """A text that was not given but stands in its place."""

    __slots__ = ()


_UTC: Final = _Default("UTC")


@dataclass(frozen=True, eq=False)
class Schedule:
    """A flow that is started at the times of a cron expression. Made by :func:`schedule`.

    Attributes:
        id: of the schedule; the executions are called ``{id}@{milliseconds since the epoch}``.
        flow_id: of the flow. cron, time_zone: as declared.
        catch_up, catch_up_limit, overlap: its policies. queue: of its runs; None leaves it to the flow.
    """

    id: str
    flow_id: str
    cron: str
    time_zone: str
    catch_up: CatchUp
    catch_up_limit: int
    overlap: Overlap
    queue: str | None
    zone_was_given: bool = field(repr=False)
    _flow: Flow[..., Any] | None = field(repr=False)
    _given: tuple[str, str] = field(repr=False)  # args and kwargs, in the codec's form
    _parsed: Cron = field(repr=False)
    _zone: ZoneInfo = field(repr=False)

    @property
    def zone(self) -> ZoneInfo:
        """The zone on whose wall clock the expression is read."""
        return self._zone

    @property
    def parsed(self) -> Cron:
        """What each field of the expression admits."""
        return self._parsed

    def occurrences(self, after: datetime, until: datetime) -> list[datetime]:
        """The occurrences after ``after``, up to and with ``until``, in order; aware UTC.

        Both are aware datetimes.

        Raises:
            InvalidInputError: one of them is naive, or no datetime.
        """
        return cron.occurrences(self._parsed, self._zone, _aware(after, "after"), _aware(until, "until"))

    def newest(self, after: datetime, until: datetime, limit: int) -> list[datetime]:
        """The last ``limit`` of :meth:`occurrences`, however long ago ``after`` is."""
        return cron.newest(self._parsed, self._zone, after, until, limit)

    def following(self, after: datetime, count: int = 1) -> list[datetime]:
        """The next ``count`` occurrences; fewer only where the calendar ends."""
        return cron.following(self._parsed, self._zone, after, count)

    def flow(self) -> Flow[..., Any]:
        """The flow to start now, with its options: the declared one, else the version that a start by id takes.

        Raises:
            FlowNotFoundError: no such flow is registered here.
        """
        flow = self._flow if self._flow is not None else registry.current(self.flow_id)
        return flow if self.queue is None else flow.using(queue=self.queue)

    def bound(self, flow: Flow[..., Any]) -> dict[str, Any]:
        """The declared arguments by parameter name; values of the caller's own.

        Raises:
            InvalidInputError: they do not fit the flow.
        """
        args, kwargs = map(codec.loads, self._given)
        return flow.bind_input(args, kwargs)

    @property
    def content(self) -> dict[str, Any]:
        """What makes two declarations the same, by the names of what is declared."""
        args, kwargs = (codec.canonical(codec.loads(text)) for text in self._given)
        return {
            "flow": self.flow_id,
            "version": None if self._flow is None else self._flow.version,
            "cron": self.cron,
            "time_zone": self.time_zone,
            "args": args,
            "kwargs": kwargs,
            "catch_up": self.catch_up,
            "catch_up_limit": self.catch_up_limit,
            "overlap": self.overlap,
            "queue": self.queue,
        }


def schedule(
    id: str,
    /,
    *,
    flow: str | Flow[..., Any],
    cron: str,
    time_zone: str = _UTC,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    catch_up: CatchUp = "skip",
    catch_up_limit: int = 100,
    overlap: Overlap = "allow",
    queue: str | None = None,
) -> Schedule:
    """Declare a schedule: the flow is started at each time that the expression names on the zone's wall clock.

    Args:
        flow: the flow or its id; a flow also fixes the version, an id takes the highest that is not pinned.
        cron: five fields: minute, hour, day of month, month, day of week.
        time_zone: an IANA name. Each wall time runs once per day that it matches: one that a change of the clocks
            skips is shifted by the gap, of one that occurs twice the first counts. Keep schedules of a fixed
            interval in UTC, or they are silent for the repeated hour.
        args: positional arguments of the flow.
        kwargs: arguments of the flow by name.
        catch_up: what becomes of occurrences that no service looked at in time: ``"skip"`` starts none of them,
            ``"latest"`` the newest one, ``"all"`` each, up to ``catch_up_limit``.
        catch_up_limit: the most that ``"all"`` starts at a time, the newest; an int from 1 to 1000.
        overlap: ``"skip"`` leaves an occurrence out while the newest run of the schedule has not ended.
        queue: one of ``LOOM["QUEUES"]``, for its runs.

    Raises:
        ScheduleDefinitionError: with the field that cannot work, or an id that is taken by another schedule.
        InvalidIdError: the id cannot be used.
    """
    _check_id(id)
    parsed, zone = _parsed(id, cron), _zone(id, time_zone)
    made = Schedule(
        id=str.__str__(id),
        flow_id=_flow_id(id, flow),
        cron=parsed.text,
        time_zone=zone.key,
        catch_up=_one_of(id, "catch_up", catch_up, ("skip", "latest", "all")),
        catch_up_limit=_limit(id, catch_up_limit),
        overlap=_one_of(id, "overlap", overlap, ("allow", "skip")),
        queue=_queue(id, queue),
        zone_was_given=not isinstance(time_zone, _Default),
        _flow=flow if isinstance(flow, Flow) else None,
        _given=_encoded(id, args, kwargs),
        _parsed=parsed,
        _zone=zone,
    )
    if isinstance(flow, Flow):
        try:
            made.bound(flow)
        except InvalidInputError as exc:
            raise ScheduleDefinitionError(
                id, "kwargs" if kwargs else "args", kwargs or args, str(exc)
            ) from exc
    schedules.register(made)
    return made


def _check_id(id: object) -> None:
    checked = keys.check_id(id, "schedule id")
    if len(checked) > MAX_ID:
        raise InvalidIdError(id, "schedule id", f"has {len(checked)} characters, {MAX_ID} are allowed")


def _flow_id(id: str, flow: object) -> str:
    if isinstance(flow, Flow):
        _check_options(id, flow)
        return flow.id
    try:
        return keys.check_id(flow, "flow id")
    except InvalidIdError as exc:
        raise ScheduleDefinitionError(id, "flow", flow, "is neither a flow nor a flow's id") from exc


def _check_options(id: str, flow: Flow[..., Any]) -> None:
    """Refuse what can be meant for one execution only."""
    options = flow.options
    once = {"execution_id": options.execution_id, "start_at": options.start_at}
    if isinstance(options.deadline, datetime):
        once["deadline"] = options.deadline
    for name, value in once.items():
        if value is not None:
            raise ScheduleDefinitionError(
                id,
                "flow",
                value,
                f"is given as {name}= of using(), but each occurrence has its own: leave it out",
            )


def _queue(id: str, name: object) -> str | None:
    try:
        return None if name is None else keys.check_text(name, "queue", keys.MAX_QUEUE_NAME)
    except InvalidInputError as exc:
        raise ScheduleDefinitionError(id, "queue", name, "is no name of a queue") from exc


def _parsed(id: str, text: object) -> Cron:
    if not isinstance(text, str):
        raise ScheduleDefinitionError(id, "cron", text, 'must be text, as "30 3 * * *"')
    try:
        return cron.parse(text)
    except CronError as exc:
        problem = exc.problem
        if exc.field != "cron":
            problem = f"has the {exc.field} field {shown(exc.value)}, which {problem}"
        raise ScheduleDefinitionError(id, "cron", text, problem) from exc


def _zone(id: str, name: object) -> ZoneInfo:
    try:
        return cron.zone_of(name if isinstance(name, str) else "")
    except CronError as exc:
        raise ScheduleDefinitionError(id, "time_zone", name, exc.problem) from exc


def _one_of(id: str, name: str, value: Any, allowed: Sequence[str]) -> Any:
    if value not in allowed:
        raise ScheduleDefinitionError(id, name, value, f"must be one of {', '.join(map(repr, allowed))}")
    return value


def _limit(id: str, value: object) -> int:
    try:
        return keys.check_whole(value, "catch_up_limit", 1, MAX_CATCH_UP)
    except InvalidInputError as exc:
        raise ScheduleDefinitionError(
            id, "catch_up_limit", value, f"must be an int from 1 to {MAX_CATCH_UP}"
        ) from exc


def _encoded(id: str, args: object, kwargs: object) -> tuple[str, str]:
    """The arguments as they would be recorded, so that what cannot be is refused at the declaration."""
    if isinstance(args, str | bytes) or not isinstance(args, Iterable):
        raise ScheduleDefinitionError(id, "args", args, "must be a tuple or a list of arguments")
    named = {} if kwargs is None else kwargs
    if not isinstance(named, Mapping) or not all(isinstance(name, str) for name in named):
        raise ScheduleDefinitionError(id, "kwargs", kwargs, "must be a mapping of names to arguments")
    return _recorded(id, "args", tuple(args)), _recorded(id, "kwargs", dict(named))


def _recorded(id: str, name: str, value: Any) -> str:
    try:
        return codec.dumps(value, path=name)
    except LoomError as exc:
        raise ScheduleDefinitionError(id, name, value, f"cannot be recorded: {exc}") from exc


def _aware(moment: object, name: str) -> datetime:
    if not isinstance(moment, datetime) or moment.utcoffset() is None:
        raise InvalidInputError(f"{name}={shown(moment)} must be an aware datetime: give it a time zone")
    return moment


class Schedules:
    """The schedules of this process, by id."""

    def __init__(self) -> None:
        self._schedules: dict[str, Schedule] = {}
        self._lock = threading.Lock()

    def register(self, made: Schedule) -> None:
        """Add a schedule. The same content again is quiet (reloads); other content is an error."""
        with self._lock:
            known = self._schedules.get(made.id)
            if known is not None and known.content != made.content:
                _refuse_twice(known, made)
            self._schedules[made.id] = made

    def forget(self, schedule_id: str) -> None:
        """Drop a schedule, for tests."""
        with self._lock:
            self._schedules.pop(schedule_id, None)

    def get(self, schedule_id: str) -> Schedule | None:
        return self._schedules.get(schedule_id)

    def find(self, schedule_id: str) -> Schedule:
        """The schedule of that id.

        Raises:
            ScheduleNotFoundError: none is declared here.
        """
        found = self._schedules.get(schedule_id)
        if found is None:
            raise ScheduleNotFoundError(schedule_id, sorted(self._schedules))
        return found

    def all(self) -> list[Schedule]:
        return [self._schedules[schedule_id] for schedule_id in sorted(self._schedules)]


def _refuse_twice(known: Schedule, made: Schedule) -> NoReturn:
    before, after = known.content, made.content
    name, old, new = next((name, before[name], after[name]) for name in before if before[name] != after[name])
    raise ScheduleDefinitionError(
        made.id,
        name,
        new,
        f"is not what another schedule of this id has ({shown(old)}): give one of them another id",
    )


schedules = Schedules()
