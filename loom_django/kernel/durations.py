"""A duration is a timedelta or a number of seconds, from 0 to 1000 years, everywhere in loom_django."""

from __future__ import annotations

from datetime import timedelta

from loom_django.errors import InvalidInputError, shown

Duration = timedelta | int | float

# Far beyond any use, and near enough for a date to be reached by adding it.
LONGEST = timedelta(days=365_250)


def seconds(duration: Duration, what: str) -> float:
    """Return the duration in seconds, or refuse it under the name `what`."""
    given: object = duration  # settings and callers without types hand in anything
    if isinstance(given, timedelta):
        length = given.total_seconds()
    elif isinstance(given, int | float) and not isinstance(given, bool):
        length = given
    else:
        raise InvalidInputError(f"{what}={shown(given)} is not a duration: pass a timedelta or seconds.")
    # NaN fails every comparison, so it is refused too.
    if not 0 <= length <= LONGEST.total_seconds():
        raise InvalidInputError(f"{what}={shown(given)} must be a duration from 0 to {LONGEST.days} days.")
    return float(length)
