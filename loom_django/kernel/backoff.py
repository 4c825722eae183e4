"""Whether a failure is tried again, and after which delay: the answer follows from the arguments alone.

Chance is handed in as `draw`, a number from 0 up to but without 1. Full jitter: the delay lies anywhere
between nothing and the whole interval, so that many failures of one moment do not come back in one moment.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from loom_django.errors import DefinitionError, InvalidInputError, shown
from loom_django.kernel.durations import Duration, seconds

REDRIVE_FIRST = 0.2
REDRIVE_MAX = 30.0

ErrorClasses = type[BaseException] | tuple[type[BaseException], ...]


@dataclass(frozen=True, init=False)
class RetryPolicy:
    """How often and how soon a failed step is tried again.

    `max_attempts` counts the first attempt too. `retry_on` and `non_retryable` are an exception class or a
    tuple of them; `non_retryable` wins. `fresh_key` gives each retry an idempotency key of its own.
    """

    max_attempts: int
    initial_interval: float
    backoff: float
    max_interval: float
    jitter: bool
    retry_on: tuple[type[BaseException], ...]
    non_retryable: tuple[type[BaseException], ...]
    fresh_key: bool

    # Written out, because more is accepted than is kept: durations become seconds, a class becomes a tuple.
    def __init__(
        self,
        *,
        max_attempts: int = 3,
        initial_interval: Duration = 1,
        backoff: float = 2.0,
        max_interval: Duration = 3600,
        jitter: bool = True,
        retry_on: ErrorClasses = (Exception,),
        non_retryable: ErrorClasses = (),
        fresh_key: bool = False,
    ) -> None:
        # A frozen dataclass cannot be assigned to.
        vars(self).update(
            max_attempts=max_attempts,
            initial_interval=_interval(initial_interval, "initial_interval"),
            backoff=backoff,
            max_interval=_interval(max_interval, "max_interval"),
            jitter=jitter,
            retry_on=_classes(retry_on, "retry_on"),
            non_retryable=_classes(non_retryable, "non_retryable"),
            fresh_key=fresh_key,
        )
        self._check()

    def _check(self) -> None:
        counted = type(self.max_attempts) is int and self.max_attempts >= 1
        growing = type(self.backoff) in (int, float) and 1 <= self.backoff < math.inf
        rules = [
            ("max_attempts", counted, "an int of 1 or more"),
            ("backoff", growing, "a number of 1 or more"),
            ("initial_interval", self.initial_interval <= self.max_interval, "at most max_interval"),
            ("jitter", type(self.jitter) is bool, "True or False"),
            ("fresh_key", type(self.fresh_key) is bool, "True or False"),
        ]
        for name, holds, rule in rules:
            if not holds:
                raise _problem(name, getattr(self, name), rule)


def _problem(name: str, value: object, rule: str) -> DefinitionError:
    return DefinitionError(problem=f"RetryPolicy({name}={shown(value)}): {name} must be {rule}.")


def _interval(value: Duration, name: str) -> float:
    try:
        return seconds(value, name)
    except InvalidInputError as error:
        raise DefinitionError(problem=f"RetryPolicy: {error}") from error


def _classes(value: ErrorClasses, name: str) -> tuple[type[BaseException], ...]:
    classes = value if isinstance(value, tuple) else (value,)
    if not all(_is_exception_class(cls) for cls in classes):
        raise _problem(name, value, "an exception class or a tuple of them")
    return classes


def _is_exception_class(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, BaseException)


def retries(policy: RetryPolicy, error: BaseException, failures: int) -> bool:
    """Tell if a step that has now failed `failures` times, last with `error`, is tried again."""
    if failures >= policy.max_attempts or isinstance(error, policy.non_retryable):
        return False
    return isinstance(error, policy.retry_on)


def delay(policy: RetryPolicy, failures: int, draw: float) -> float:
    """Return the seconds to wait after the failure of that number, counted from 1."""
    interval = _growing(policy.initial_interval, policy.backoff, failures, policy.max_interval)
    return interval * draw if policy.jitter else interval


def redrive_delay(attempt: int, draw: float) -> float:
    """Return the seconds before a contended wake is tried again after the attempt of that number, from 1."""
    return _growing(REDRIVE_FIRST, 2.0, attempt, REDRIVE_MAX) * draw


def _growing(first: float, factor: float, number: int, limit: float) -> float:
    try:
        return min(first * factor ** (number - 1), limit)
    except OverflowError:  # a power beyond any float is beyond the limit too
        return limit
