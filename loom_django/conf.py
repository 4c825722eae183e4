"""The ``LOOM`` setting as one frozen object, read when it is asked for and dropped when settings change."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from datetime import timedelta
from typing import Any, Final, Literal

from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.core.signals import setting_changed

from loom_django.errors import InvalidInputError
from loom_django.kernel.durations import seconds

Dispatcher = Literal["inline", "worker", "tasks"]

_DAY: Final = 86_400


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
    READY_GRACE: float = 30.0
    MISFIRE_GRACE: float = 60.0
    CONCURRENCY: int = 16
    IN_PROCESS_RETRY_LIMIT: float = 5.0
    POLL_INTERVAL: float = 0.25
    DURABILITY: Literal["boundary", "deferred"] = "boundary"
    REDACT: str | None = None
    unknown: tuple[str, ...] = field(default=())


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
    {"MAX_PAYLOAD_BYTES", "MAX_TRACEBACK_BYTES", "MAX_RECOVERIES", "CONCURRENCY"}
)
CHOICES: Final[Mapping[str, tuple[str, ...]]] = {
    "DISPATCHER": ("inline", "worker", "tasks"),
    "DURABILITY": ("boundary", "deferred"),
}
KEYS: Final = tuple(item.name for item in fields(LoomSettings) if item.name != "unknown")


def problem_of(key: str, value: Any) -> str | None:
    """Say what is wrong with a key's value; None if nothing is. Unknown keys are the caller's affair."""
    if key in DURATIONS:
        return _duration_problem(value)
    if key in POSITIVE_INTS:
        fits = isinstance(value, int) and not isinstance(value, bool) and value > 0
        return None if fits else f"must be an int above 0, not {value!r}"
    if key in CHOICES:
        choices = CHOICES[key]
        return None if value in choices else f"must be one of {', '.join(map(repr, choices))}, not {value!r}"
    if key == "REDACT":
        return None if value is None or isinstance(value, str) else "must be a dotted path or None"
    return None if isinstance(value, str) and value else f"must be a non-empty string, not {value!r}"


def _duration_problem(value: Any) -> str | None:
    try:
        length = seconds(value, "duration")
    except InvalidInputError:
        return f"must be seconds or a timedelta, not {value!r}"
    return None if length > 0 else f"must be above 0, not {value!r}"


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
        known[key] = seconds(value, key) if isinstance(value, timedelta) or key in DURATIONS else value
    return LoomSettings(**known, unknown=tuple(str(key) for key in raw if key not in KEYS))


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
