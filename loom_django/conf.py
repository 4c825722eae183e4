"""The ``LOOM`` setting as one frozen object, read when it is asked for and dropped when settings change."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Final, Literal

from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.core.signals import setting_changed

from loom_django.errors import InvalidInputError, shown
from loom_django.kernel.durations import seconds
from loom_django.kernel.keys import MAX_QUEUE_NAME

Dispatcher = Literal["inline", "worker", "tasks"]

_DAY: Final = 86_400

DEFAULT_QUEUE: Final = "default"


@dataclass(frozen=True, slots=True)
class Queue:
    """What ``LOOM["QUEUES"]`` says of one queue; None is no limit.

    ``concurrency`` is for the whole cluster, ``worker_concurrency`` for each worker, ``rate`` is per second over
    the cluster. A queue of higher ``priority`` is served first.
    """

    concurrency: int | None = None
    worker_concurrency: int | None = None
    rate: float | None = None
    priority: int = 0


@dataclass(frozen=True, slots=True)
class LoomSettings:
    """All keys of ``LOOM`` with their defaults. Durations are seconds (a timedelta will do in the setting)."""

    DATABASE: str = "default"
    DISPATCHER: Dispatcher = "inline"
    TASKS_BACKEND: str = "default"
    TASKS_QUEUE: str = "default"
    MAX_PAYLOAD_BYTES: int = 1_048_576
    MAX_TRACEBACK_BYTES: int = 16_384
    LEASE_TTL: float = 60.0
    LEASE_RENEW_INTERVAL: float = 15.0
    EXECUTE_TIMEOUT: float = 3600.0
    MAX_RECOVERIES: int = 10
    HISTORY_WARN_EVENTS: int = 10_000
    HISTORY_MAX_EVENTS: int = 50_000
    SNAPSHOT_EVENTS: int | None = 1_000
    READY_GRACE: float = 30.0
    MISFIRE_GRACE: float = 60.0
    QUEUES: Mapping[str, Mapping[str, Any]] = field(default_factory=lambda: {DEFAULT_QUEUE: {}})
    CONCURRENCY: int = 16
    ASYNC_CONCURRENCY: int = 64
    IN_PROCESS_RETRY_LIMIT: float = 5.0
    POLL_INTERVAL: float | None = None
    NOTIFY: bool = True
    DURABILITY: Literal["boundary", "deferred"] = "boundary"
    DIVERGENCE: Literal["warn", "fail", "off"] = "warn"
    REDACT: str | None = None
    RETENTION: Mapping[str, float | None] = field(
        default_factory=lambda: {"COMPLETED": 90 * _DAY, "CANCELLED": 90 * _DAY, "FAILED": None}
    )
    ARCHIVE_STORAGE: str | None = None
    unknown: tuple[str, ...] = field(default=())

    @property
    def queues(self) -> dict[str, Queue]:
        """The declared queues; the default one is always among them."""
        declared = {DEFAULT_QUEUE: {}, **self.QUEUES}
        return {name: Queue(**about) for name, about in declared.items()}


DURATIONS: Final = frozenset(
    {
        "LEASE_TTL",
        "LEASE_RENEW_INTERVAL",
        "EXECUTE_TIMEOUT",
        "READY_GRACE",
        "MISFIRE_GRACE",
        "IN_PROCESS_RETRY_LIMIT",
        "POLL_INTERVAL",
    }
)
POSITIVE_INTS: Final = frozenset(
    {
        "MAX_PAYLOAD_BYTES",
        "MAX_TRACEBACK_BYTES",
        "MAX_RECOVERIES",
        "HISTORY_WARN_EVENTS",
        "HISTORY_MAX_EVENTS",
        "SNAPSHOT_EVENTS",
        "CONCURRENCY",
        "ASYNC_CONCURRENCY",
    }
)
OPTIONAL: Final = frozenset({"POLL_INTERVAL", "SNAPSHOT_EVENTS", "REDACT", "ARCHIVE_STORAGE"})
# How a log can end. One that was continued goes with its chain, if not by an age of its own before.
ENDS: Final = ("COMPLETED", "CANCELLED", "FAILED", "CONTINUED")
QUEUE_KEYS: Final = tuple(item.name for item in fields(Queue))
# Beyond it a limit is none; the time between two of them would be less than a database's clock tells.
MAX_RATE: Final = 100_000
CHOICES: Final[Mapping[str, tuple[str, ...]]] = {
    "DISPATCHER": ("inline", "worker", "tasks"),
    "DURABILITY": ("boundary", "deferred"),
    "DIVERGENCE": ("warn", "fail", "off"),
}
KEYS: Final = tuple(item.name for item in fields(LoomSettings) if item.name != "unknown")


def problem_of(key: str, value: Any) -> str | None:
    """Say what is wrong with a key's value; None if nothing is. Unknown keys are the caller's affair."""
    if key in OPTIONAL and value is None:
        return None
    if key in DURATIONS:
        return _duration_problem(value)
    if key in POSITIVE_INTS:
        fits = isinstance(value, int) and not isinstance(value, bool) and value > 0
        return None if fits else f"must be an int above 0, not {value!r}"
    if key in CHOICES:
        choices = CHOICES[key]
        return None if value in choices else f"must be one of {', '.join(map(repr, choices))}, not {value!r}"
    if key == "QUEUES":
        return _queues_problem(value)
    if key == "RETENTION":
        return _retention_problem(value)
    if key == "ARCHIVE_STORAGE":
        aliases = ", ".join(map(repr, settings.STORAGES))
        return (
            None
            if value in list(settings.STORAGES)
            else f"must be an alias in STORAGES ({aliases}), not {shown(value)}"
        )
    if key == "NOTIFY":
        return None if isinstance(value, bool) else f"must be True or False, not {value!r}"
    if key == "REDACT":
        return None if isinstance(value, str) else "must be a dotted path or None"
    return None if isinstance(value, str) and value else f"must be a non-empty string, not {value!r}"


def _duration_problem(value: Any) -> str | None:
    try:
        length = seconds(value, "duration")
    except InvalidInputError:
        return f"must be seconds or a timedelta, not {value!r}"
    return None if length > 0 else f"must be above 0, not {value!r}"


def _retention_problem(value: Any) -> str | None:
    if not isinstance(value, Mapping):
        return f"must be a dict of statuses to ages, not {shown(value)}"
    for status, age in value.items():
        if status not in ENDS:
            return f"has {shown(status)}, which is no way to end; those are {', '.join(ENDS)}"
        if age is not None and (problem := _duration_problem(age)):
            return f"has an age for {status} that {problem}, or None to keep them"
    return None


def _queues_problem(value: Any) -> str | None:
    if not isinstance(value, Mapping):
        return f"must be a dict of names to dicts, not {shown(value)}"
    for name, about in value.items():
        if not isinstance(name, str) or not name.isprintable() or not 0 < len(name) <= MAX_QUEUE_NAME:
            return f"has a queue {shown(name)}; a name is 1 to {MAX_QUEUE_NAME} printable characters"
        if not isinstance(about, Mapping):
            return f"must have a dict for the queue {name!r}, not {shown(about)}: {{}} if it has no limits"
        for key, given in about.items():
            if problem := _queue_problem(key, given):
                return f"has {key!r} of the queue {name!r}, which {problem}"
    return None


def _queue_problem(key: Any, value: Any) -> str | None:
    if key not in QUEUE_KEYS:
        return f"is no key of a queue; they are {', '.join(QUEUE_KEYS)}"
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if key == "priority":
        fits = number and isinstance(value, int) and abs(value) < 2**31
        return None if fits else f"must be an int of 32 bits, not {shown(value)}"
    if value is None:
        return None
    if key == "rate":
        fits = number and 0 < value <= MAX_RATE
        return None if fits else f"must be a number per second above 0, or None, not {shown(value)}"
    fits = number and isinstance(value, int) and value > 0
    return None if fits else f"must be an int above 0, or None, not {shown(value)}"


def suggestion(key: str) -> str:
    """The known key that an unknown one may have meant, or ''."""
    close = difflib.get_close_matches(str(key), KEYS, n=1)
    return close[0] if close else ""


def read(raw: Any) -> LoomSettings:
    """Make settings of a ``LOOM`` dict.

    Raises:
        ImproperlyConfigured: a key has a value that cannot be used. Unknown keys are left to the checks.
    """
    if not isinstance(raw, Mapping):
        raise ImproperlyConfigured(f"LOOM must be a dict, not {type(raw).__name__}")
    known: dict[str, Any] = {}
    for key, value in raw.items():
        if key not in KEYS:
            continue
        problem = problem_of(key, value)
        if problem:
            raise ImproperlyConfigured(f"LOOM[{key!r}] {problem}")
        known[key] = _read(key, value)
    return LoomSettings(**known, unknown=tuple(str(key) for key in raw if key not in KEYS))


def _read(key: str, value: Any) -> Any:
    if key in DURATIONS and value is not None:
        return seconds(value, key)
    if key == "RETENTION":
        return {status: None if age is None else seconds(age, key) for status, age in value.items()}
    return value


_cached: LoomSettings | None = None
_listeners: list[Callable[[], None]] = []


def get_settings() -> LoomSettings:
    """The settings in force."""
    global _cached
    if _cached is None:
        _cached = read(getattr(settings, "LOOM", {}))
    return _cached


def on_change(callback: Callable[[], None]) -> None:
    """Call back when ``LOOM`` or ``DATABASES`` changes (tests do that)."""
    _listeners.append(callback)


def _changed(*, setting: str, **kwargs: Any) -> None:
    global _cached
    if setting in ("LOOM", "DATABASES"):
        _cached = None
        for callback in _listeners:
            callback()


setting_changed.connect(_changed, dispatch_uid="loom_django.conf")
