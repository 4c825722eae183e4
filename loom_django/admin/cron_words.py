"""A cron expression as a sentence. It says no more than the expression: what has no short name is listed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from django.utils.dates import MONTHS, WEEKDAYS
from django.utils.translation import gettext, ngettext

from loom_django.kernel.cron import Cron

# So many clock times are named one by one.
_TIMES: Final = 6


def in_words(cron: Cron) -> str:
    """The expression as a person would say it, without its zone."""
    parts = {"time": _time(cron), "date": _date(cron)}
    return gettext("%(time)s, %(date)s") % parts


# The time of day.


def _time(cron: Cron) -> str:
    every_hour = len(cron.hours) == 24
    if not every_hour and len(cron.hours) * len(cron.minutes) <= _TIMES:
        times = [f"{hour:02}:{minute:02}" for hour in cron.hours for minute in cron.minutes]
        return gettext("At %(times)s") % {"times": _joined(times)}
    minutes = _minutes(cron.minutes)
    if every_hour:
        return minutes
    if _is_run(cron.hours):
        span = {"minutes": minutes, "first": f"{cron.hours[0]:02}:00", "last": f"{cron.hours[-1]:02}:59"}
        return gettext("%(minutes)s, from %(first)s to %(last)s") % span
    hours = _joined([f"{hour:02}" for hour in cron.hours])
    return gettext("%(minutes)s, in the hours %(hours)s") % {"minutes": minutes, "hours": hours}


def _minutes(minutes: Sequence[int]) -> str:
    step = 60 // len(minutes)
    if tuple(minutes) == tuple(range(0, 60, step)):
        if step == 60:
            return gettext("Every hour on the hour")
        return ngettext("Every minute", "Every %(n)d minutes", step) % {"n": step}
    listed = _listed(minutes, str)
    return ngettext(
        "At minute %(minutes)s of each hour", "At minutes %(minutes)s of each hour", len(minutes)
    ) % {"minutes": listed}


# The date.


def _date(cron: Cron) -> str:
    any_day, any_weekday = len(cron.days) == 31, len(cron.weekdays) == 7
    weekdays = _weekdays(cron.weekdays)
    days = ngettext("on day %(days)s", "on days %(days)s", len(cron.days)) % {"days": _listed(cron.days, str)}
    if any_day and any_weekday:
        which = gettext("every day")
    elif any_day or any_weekday:
        which = days if any_weekday else gettext("on %(weekdays)s") % {"weekdays": weekdays}
        if any_weekday and len(cron.months) == 12:
            which = gettext("%(days)s of each month") % {"days": days}
    elif cron.either_day:
        which = gettext("%(days)s of the month and on every %(weekdays)s")
        which = which % {"days": days, "weekdays": weekdays}
    else:
        which = gettext("%(days)s of the month if that is a %(weekdays)s")
        which = which % {"days": days, "weekdays": weekdays}
    if len(cron.months) == 12:
        return which
    months = _listed(cron.months, lambda month: str(MONTHS[month]))
    return gettext("%(days)s in %(months)s") % {"days": which, "months": months}


def _weekdays(weekdays: Sequence[int]) -> str:
    # A week begins on Monday for whoever reads "Friday to Sunday".
    from_monday = sorted((day - 1) % 7 for day in weekdays)
    return _listed(from_monday, lambda day: str(WEEKDAYS[day]))


# Lists.


def _is_run(values: Sequence[int]) -> bool:
    return len(values) > 1 and values[-1] - values[0] == len(values) - 1


def _listed(values: Sequence[int], name: Callable[[int], str]) -> str:
    """Values by name; three or more in a row are a span."""
    rows: list[list[int]] = []
    for value in values:
        if rows and rows[-1][-1] == value - 1:
            rows[-1].append(value)
        else:
            rows.append([value])
    parts: list[str] = []
    for row in rows:
        if len(row) < 3:
            parts += [name(value) for value in row]
        else:
            parts.append(gettext("%(first)s to %(last)s") % {"first": name(row[0]), "last": name(row[-1])})
    return _joined(parts)


def _joined(parts: Sequence[str]) -> str:
    if len(parts) == 1:
        return parts[0]
    return gettext("%(most)s and %(last)s") % {"most": ", ".join(parts[:-1]), "last": parts[-1]}
