"""What an operator looks at first: what is wrong in words, what waits, and who is at work.

Every look goes by an index and stops at ``MOST_ROWS``: a table of millions is never counted.
"""

from __future__ import annotations

import importlib.resources
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Final, TypeVar

from django.db import connections
from django.db.migrations.recorder import MigrationRecorder
from django.db.models.functions import Coalesce
from django.http import HttpRequest
from django.urls import reverse
from django.utils import timezone
from django.utils.translation import gettext_lazy as _
from django.utils.translation import ngettext

from loom_django import conf, migrations
from loom_django.admin import show
from loom_django.admin.base import bounded_count
from loom_django.models import Execution, Node, ScheduleState, Timer
from loom_django.runtime import loom

NODES: Final = 50


@dataclass(frozen=True, slots=True)
class Banner:
    """Something that is wrong, and what to do."""

    text: Any
    way_out: Any
    shown_by: str = ""  # one of the console's pages, with its query


@dataclass(frozen=True, slots=True)
class Tally:
    """How many there are; ``count`` says itself where there may be more."""

    label: Any
    count: int
    shown_by: str
    kind: str = ""  # of the pill: a status, or "doubt"


@dataclass(frozen=True, slots=True)
class Overview:
    """One look; without tallies and nodes while the tables are not what this release expects."""

    banners: list[Banner]
    tallies: list[Tally] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)


def look() -> Overview:
    """Look at everything."""
    missing = pending_migrations()
    if missing:
        return Overview([_pending(missing)])
    return Overview(_wrong(), tallies(), list(Node.objects.order_by("-seen_at", "pk")[:NODES]))


def banners() -> list[Banner]:
    """What is wrong just now; nothing if all is well."""
    missing = pending_migrations()
    return [_pending(missing)] if missing else _wrong()


def _pending(missing: list[str]) -> Banner:
    text = _("Migrations of loom are pending: %(names)s.") % {"names": ", ".join(missing)}
    return Banner(text, _("Run manage.py migrate."))


def _wrong() -> list[Banner]:
    now = loom.engine.store.now()
    late = now - timedelta(seconds=loom.engine.settings().READY_GRACE)
    return [*_silent(now), *_late(late), *_expired(now)]


def pending_migrations() -> list[str]:
    """The names of loom's migrations that its database has not seen; other looks may need what they bring."""
    connection = connections[conf.get_settings().DATABASE]
    applied = {name for app, name in MigrationRecorder(connection).applied_migrations() if app == "loom"}
    names = (entry.name for entry in importlib.resources.files(migrations).iterdir())
    shipped = sorted(
        name.removesuffix(".py") for name in names if name[:1].isdigit() and name.endswith(".py")
    )
    return [name for name in shipped if name not in applied]


def _patience() -> float:
    """After so many seconds without a sign a loop is not counted on."""
    return 2 * loom.engine.settings().LEASE_TTL


def is_silent(node: Node) -> bool:
    """Whether a process has not been seen for so long that it is dead, stopped or stuck."""
    return (timezone.now() - node.seen_at).total_seconds() > _patience()


def _silent(now: datetime) -> Iterator[Banner]:
    if loom.engine.store.loop_seen(within=_patience()):
        return
    last = Node.objects.order_by("-seen_at").values_list("seen_at", flat=True).first()
    yield Banner(
        _("No worker and no timer loop has been seen for %(span)s: sleeps, timeouts and what is ready wait.")
        % {"span": show.span((now - last).total_seconds())}
        if last is not None
        else _("No worker and no timer loop was ever seen: sleeps, timeouts and what is ready wait."),
        _("Start manage.py run_loom_worker, or run_loom_timers."),
    )


def _late(late: datetime) -> Iterator[Banner]:
    overdue = bounded_count(Execution.objects.filter(ready_at__lt=late))
    if overdue:
        yield Banner(
            ngettext(
                "%(n)s execution has been ready for longer than READY_GRACE.",
                "%(n)s executions have been ready for longer than READY_GRACE.",
                overdue,
            )
            % {"n": overdue},
            _("Start workers. If they run: their log says what they leave alone, and why."),
        )
    timers = Timer.objects.alias(free=Coalesce("not_before", "wake_at")).filter(free__lt=late)
    due = bounded_count(timers.exclude(held_until__gte=late))
    if due:
        yield Banner(
            ngettext(
                "%(n)s timer is overdue by more than READY_GRACE.",
                "%(n)s timers are overdue by more than READY_GRACE.",
                due,
            )
            % {"n": due},
            _("Start a worker or a timer loop. If they run: they do not keep up."),
            "loom_timer_changelist?due=overdue",
        )


def _expired(now: datetime) -> Iterator[Banner]:
    expired = bounded_count(Execution.objects.filter(lease_until__lt=now))
    if expired:
        yield Banner(
            ngettext(
                "%(n)s lease has ended under its holder.",
                "%(n)s leases have ended under their holders.",
                expired,
            )
            % {"n": expired},
            _("Recovery takes them up within two minutes; if it does not: manage.py loom_recover names why."),
            "loom_lease_changelist?lease=expired",
        )


def tallies() -> list[Tally]:
    """What waits for a person, and what lives."""
    rows, now = Execution.objects.all(), loom.engine.store.now()
    failed = rows.failed().filter(finished_at__gt=now - timedelta(days=1))
    begun = rows.ready().filter(ready_at__lte=now)
    paused = ScheduleState.objects.filter(paused_at__isnull=False)
    listed = "loom_execution_changelist"
    return [
        Tally(_("effects in doubt"), bounded_count(rows.in_doubt()), "loom_in_doubt", "doubt"),
        Tally(
            _("stopped by an error or by their code"),
            bounded_count(rows.at_gate()),
            f"{listed}?needs=me",
            "suspended",
        ),
        Tally(_("failed within a day"), bounded_count(failed), f"{listed}?status__exact=FAILED", "failed"),
        Tally(_("ready"), bounded_count(begun), ""),
        Tally(_("held under a lease"), bounded_count(rows.held()), "loom_lease_changelist", "running"),
        Tally(_("parked"), bounded_count(rows.suspended()), f"{listed}?status__exact=SUSPENDED"),
        Tally(
            _("schedules that are paused"),
            bounded_count(paused),
            "loom_schedulestate_changelist",
            "suspended",
        ),
    ]


def address(request: HttpRequest, shown_by: str) -> str:
    """Where a list is on this admin site; '' if this person may not look at it."""
    if not shown_by:
        return ""
    page, _mark, query = shown_by.partition("?")
    model = "execution" if page == "loom_in_doubt" else page.split("_")[1]
    if not request.user.has_perm(f"loom.view_{model}"):
        return ""
    found = reverse(f"admin:{page}", current_app=request.current_app)
    return f"{found}?{query}" if query else found


R = TypeVar("R", Banner, Tally)


def linked(request: HttpRequest, rows: Iterable[R]) -> list[tuple[R, str]]:
    """Rows, each with where this person sees more of it."""
    return [(row, address(request, row.shown_by)) for row in rows]
