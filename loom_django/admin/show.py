"""Values, times and waits as an operator reads them; whatever a payload holds, it is text and nothing else.

Payloads are shown to those who may see them, and only as ``LOOM["REDACT"]`` leaves them. A hook that fails hides
the value: it never shows it.
"""

from __future__ import annotations

import json
import logging
import pprint
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from django.http import HttpRequest
from django.utils import timezone
from django.utils.html import format_html
from django.utils.module_loading import import_string
from django.utils.safestring import SafeString
from django.utils.translation import gettext, ngettext, pgettext

from loom_django import conf
from loom_django.engine.core import from_micros
from loom_django.kernel import codec
from loom_django.kernel.state import (
    ON_BUDGET,
    ON_CHILD,
    ON_DIVERGED,
    ON_ERROR,
    ON_MESSAGE,
    ON_POISONED,
    ON_RETRY,
    ON_TIMER,
    ON_VERDICT,
)

log = logging.getLogger("loom_django.admin")

VIEW_PAYLOAD: Final = "loom.view_payload"
# A value of more characters is folded away until it is asked for.
FOLD_ABOVE: Final = 120


@dataclass(frozen=True, slots=True)
class Payload:
    """A value as text. ``hidden`` if the viewer may not see it; then there is no text."""

    text: str = ""
    hidden: bool = False

    @property
    def size(self) -> int:
        return len(self.text)

    @property
    def is_long(self) -> bool:
        return self.size > FOLD_ABOVE or "\n" in self.text


HIDDEN: Final = Payload(hidden=True)


class Viewer:
    """What one person may see of payloads."""

    def __init__(self, request: HttpRequest) -> None:
        self.sees = bool(request.user.has_perm(VIEW_PAYLOAD))

    def payload(self, tree: Any, place: str) -> Payload:
        """A value in the codec's form; ``place`` tells the redaction hook where it stands."""
        return Payload(to_text(redacted(tree, place))) if self.sees else HIDDEN

    def text(self, tree: Any, place: str) -> str:
        """The same as plain text; '' if the viewer may not see it."""
        if not self.sees:
            return ""
        value = redacted(tree, place)
        return printable(value) if isinstance(value, str) else to_text(value)


def redacted(tree: Any, place: str) -> Any:
    """The value of a stored form, as the project lets it be seen."""
    try:
        value = codec.decode(tree)
    except Exception:  # a type that is not registered here, or that refuses its own old fields
        value = tree
    path = conf.get_settings().REDACT
    if path is None:
        return value
    try:
        return import_string(path)(value, place)
    except Exception:
        log.exception("LOOM['REDACT'] failed; the value is hidden", extra={"place": place})
        return gettext("hidden: the redaction hook failed")


def to_text(value: Any) -> str:
    """JSON if JSON can say it, as an operator would type it; else as Python writes it."""
    try:
        if _is_json(value):
            text = json.dumps(value, ensure_ascii=False)
            if len(text) > FOLD_ABOVE:
                text = json.dumps(value, indent=2, ensure_ascii=False)
        else:
            text = pprint.pformat(value, width=100, sort_dicts=False)
    except Exception:  # digits without end, or a class whose repr fails
        return gettext("a value that cannot be shown")
    return printable(text)


def _is_json(value: Any) -> bool:
    kind = type(value)
    if kind is dict:
        return all(type(key) is str and _is_json(item) for key, item in value.items())
    if kind is list:
        return all(map(_is_json, value))
    return kind in (str, int, float, bool, type(None))


def printable(text: str) -> str:
    """Text in which nothing is invisible and nothing turns the writing round."""
    if text.isprintable():
        return text
    return "".join(
        char
        if char.isprintable() or char in "\n\t"
        else char.encode("unicode_escape", "backslashreplace").decode("ascii")
        for char in text
    )


# Times.


def when(moment: datetime | None) -> SafeString | str:
    """A time: local with its zone, and UTC in the title."""
    if moment is None:
        return ""
    local = timezone.localtime(moment)
    return format_html(
        '<time datetime="{}" title="{}">{}</time>',
        moment.astimezone(UTC).isoformat(),
        moment.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S.%f UTC"),
        local.strftime("%Y-%m-%d %H:%M:%S %Z"),
    )


def when_short(moment: datetime | None) -> SafeString | str:
    """The same for a column: to the minute."""
    if moment is None:
        return ""
    local = timezone.localtime(moment)
    return format_html(
        '<time datetime="{}" title="{}">{}</time>',
        moment.astimezone(UTC).isoformat(),
        local.strftime("%Y-%m-%d %H:%M:%S %Z"),
        local.strftime("%Y-%m-%d %H:%M"),
    )


def when_micros(micros: int | None) -> SafeString | str:
    return when(from_micros(micros)) if micros else ""


_UNITS: Final = ((86_400, "d"), (3_600, "h"), (60, "min"), (1, "s"))


def span(seconds: float) -> str:
    """A length of time in at most two units."""
    if seconds < 1:
        return gettext("%(n)d ms") % {"n": max(0, round(seconds * 1000))}
    names = {
        "d": pgettext("days", "d"),
        "h": pgettext("hours", "h"),
        "min": pgettext("minutes", "min"),
        "s": pgettext("seconds", "s"),
    }
    left = round(seconds)
    parts: list[str] = []
    for size, unit in _UNITS:
        count, left = divmod(left, size)
        if count or parts:
            parts.append(f"{count} {names[unit]}")
    return " ".join([part for part in parts[:2] if not part.startswith("0 ")] or parts[:1])


def ago(moment: datetime | None) -> str:
    """How long ago, or in how long."""
    if moment is None:
        return ""
    seconds = (timezone.now() - moment).total_seconds()
    if seconds >= 0:
        return gettext("%(span)s ago") % {"span": span(seconds)}
    return gettext("in %(span)s") % {"span": span(-seconds)}


# Waits.


def wait_of(item: Mapping[str, Any], wake_at: int | None = None) -> str:
    """A wait as a park and the projection have it, as a person would say it."""
    children = item.get("children", 0)  # the projection has how many, a park has which
    count = children if isinstance(children, int) else len(children)
    return wait_in_words(item["on"], item.get("key"), wake_at, item.get("budget"), count)


def wait_in_words(
    on: str,
    key: str | None,
    wake_at: int | None,
    budget: Mapping[str, str] | None = None,
    children: int = 0,
) -> str:
    """What an execution waits for, as a person would say it; ``children`` is how many are waited for together."""
    until = "" if wake_at is None else _until(wake_at)
    match on:
        case _ if on == ON_VERDICT:
            return gettext("a verdict on %(step)s") % {"step": key}
        case _ if on == ON_TIMER:
            return gettext("sleeping%(until)s") % {"until": until}
        case _ if on == ON_RETRY:
            return gettext("the next try of %(step)s%(until)s") % {"step": key or "", "until": until}
        case _ if on == ON_MESSAGE:
            return gettext("the message “%(name)s”%(until)s") % {"name": key, "until": until}
        case _ if on == ON_ERROR:
            return gettext("a fix of an error of its body")
        case _ if on == ON_POISONED:
            return gettext("an operator: it was taken over too often without progress")
        case _ if on == ON_DIVERGED:
            return gettext("an operator: its code diverged from its log")
        case _ if on == ON_BUDGET and budget:
            return gettext("a higher limit of %(resource)s: %(used)s of %(limit)s is used") % {
                **budget,
                "resource": key,
            }
        case _ if on == ON_CHILD and key is None:
            told = ngettext("%(n)d child%(until)s", "%(n)d children%(until)s", children)
            return told % {"n": children, "until": until}
        case _ if on == ON_CHILD:
            return gettext("the child %(child)s%(until)s") % {"child": key, "until": until}
    named = f"{on} ({key})" if key else on
    return gettext("%(name)s%(until)s") % {"name": named, "until": until}


def _until(micros: int) -> str:
    local = timezone.localtime(from_micros(micros))
    return gettext(" until %(time)s") % {"time": local.strftime("%Y-%m-%d %H:%M:%S %Z")}
