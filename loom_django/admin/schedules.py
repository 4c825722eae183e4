"""Schedules: the list, and the page of one: when it is due, what it did, and what a person may do to it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from django.contrib import admin
from django.contrib.admin.models import LogEntry
from django.contrib.admin.utils import quote, unquote
from django.core.exceptions import PermissionDenied
from django.db.models import OuterRef, QuerySet, Subquery
from django.http import Http404, HttpRequest, HttpResponse
from django.urls import URLPattern, path
from django.utils.decorators import method_decorator
from django.utils.html import format_html
from django.utils.text import capfirst
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _
from django.views.decorators.http import require_safe

from loom_django.admin import show
from loom_django.admin.base import ReadOnlyAdmin, pill, shortened
from loom_django.admin.cron_words import in_words
from loom_django.admin.schedule_acts import VIEWS
from loom_django.admin.show import Payload, Viewer
from loom_django.engine.core import from_micros
from loom_django.errors import LoomError
from loom_django.kernel import codec, cron
from loom_django.models import Execution, ScheduleState
from loom_django.runtime import loom
from loom_django.scheduling import Schedule
from loom_django.scheduling import schedules as declared
from loom_django.services.operators import Operator
from loom_django.services.schedule_list import ScheduleView, State, view_of
from loom_django.services.schedules import Why
from loom_django.statuses import ExecutionStatus

VIEW_EXECUTION: Final = "loom.view_execution"

RUNS: Final = 10

_STATES: Final[dict[State, Any]] = {
    "active": _("active"),
    "paused": _("paused"),
    "not declared": _("not declared in this code"),
    "not seen yet": _("not seen by any service yet"),
}
_PILLS: Final[dict[State, str]] = {
    "active": "running",
    "paused": "suspended",
    "not declared": "failed",
    "not seen yet": "pending",
}
_ACTS: Final = {"pause": _("paused"), "resume": _("resumed"), "trigger": _("triggered")}
_WHYS: Final[dict[Why, Any]] = {
    "missed": _("missed"),
    "paused": _("while it was paused"),
    "overlap": _("the run before it had not ended"),
    "catch-up-limit": _("more were missed than may be caught up"),
}
_CATCH_UP: Final = {
    "skip": _("what was missed is left out"),
    "latest": _("of what was missed the newest is started"),
    "all": _("what was missed is started"),
}
_OVERLAP: Final = {
    "allow": _("starts while the run before it has not ended"),
    "skip": _("left out while the newest run has not ended"),
}


class PausedFilter(admin.SimpleListFilter):
    """Paused, or not."""

    title = _("state")
    parameter_name = "state"

    def lookups(self, request: HttpRequest, model_admin: Any) -> Iterable[tuple[str, Any]]:
        return [("active", _("active")), ("paused", _("paused"))]

    def queryset(self, request: HttpRequest, queryset: Any) -> Any:
        if self.value() in ("active", "paused"):
            return queryset.filter(paused_at__isnull=self.value() == "active")
        return queryset


@dataclass(frozen=True, slots=True)
class Occurrence:
    """One occurrence to come: on the schedule's wall clock, in UTC, and what the clocks do about it."""

    local: str
    utc: str
    wait: str
    notes: tuple[str, ...]


class ScheduleAdmin(ReadOnlyAdmin):
    """What has been decided of each schedule, and what comes next."""

    list_display = ("schedule", "state", "flow", "expression", "next_run", "last_run", "last_act_of")
    list_display_links = None
    list_filter = (PausedFilter,)
    ordering = ("pk",)
    empty = _("No schedule matches, or no worker or timer loop has looked at one yet.")
    change_list_template = "admin/loom/schedule_list.html"

    # Addresses.

    def get_urls(self) -> list[URLPattern]:
        wrap = self.admin_site.admin_view
        own = [
            path(
                f"<path:object_id>/{view.name}/", wrap(view(self).dispatch), name=f"loom_schedule_{view.name}"
            )
            for view in VIEWS
        ]
        return [*own, *super().get_urls()]

    def schedule_url(self, schedule_id: str, page: str = "loom_schedulestate_change") -> str:
        return self.url(page, quote(schedule_id))

    # The list.

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        status = Execution.objects.filter(pk=OuterRef("last_execution_id")).values("status")[:1]
        rows: QuerySet[Any] = super().get_queryset(request).annotate(last_status=Subquery(status))
        return rows

    def changelist_view(self, request: HttpRequest, extra_context: Any = None) -> HttpResponse:
        """The rows, and those that are declared here and have none yet."""
        if not self.has_view_permission(request):
            raise PermissionDenied
        known = set(ScheduleState.objects.values_list("pk", flat=True))
        unseen = [
            (schedule.id, self.schedule_url(schedule.id))
            for schedule in declared.all()
            if schedule.id not in known
        ]
        return super().changelist_view(request, {"unseen": unseen, **(extra_context or {})})

    @admin.display(description=_("schedule"), ordering="pk")
    def schedule(self, row: ScheduleState) -> Any:
        return format_html(
            '<a class="loom-id" href="{}" title="{}">{}</a>',
            self.schedule_url(row.pk),
            row.pk,
            shortened(row.pk),
        )

    @admin.display(description=_("state"))
    def state(self, row: ScheduleState) -> Any:
        if declared.get(row.pk) is None:
            return self._pill("not declared")
        return self._pill("active" if row.paused_at is None else "paused")

    @staticmethod
    def _pill(state: State) -> Any:
        return pill(_PILLS[state], _STATES[state])

    @admin.display(description=_("flow"))
    def flow(self, row: ScheduleState) -> Any:
        found = declared.get(row.pk)
        return shortened(found.flow_id if found else row.flow_id)

    @admin.display(description=_("when"))
    def expression(self, row: ScheduleState) -> Any:
        found = declared.get(row.pk)
        told = (found.cron, found.time_zone) if found else (row.cron, row.time_zone)
        return format_html('<span title="{}">{}</span> <span class="quiet">{}</span>', _words(told[0]), *told)

    @admin.display(description=_("next"))
    def next_run(self, row: ScheduleState) -> Any:
        found = declared.get(row.pk)
        if found is None or row.paused_at is not None:
            return ""
        following = found.following(max(_now(), row.decided_until))
        return show.when_short(following[0]) if following else ""

    @admin.display(description=_("last run"))
    def last_run(self, row: Any) -> Any:
        if not row.last_status:
            return ""
        shown = pill(row.last_status, ExecutionStatus(row.last_status).label)
        return format_html('<a href="{}">{}</a>', self.execution_url(row.last_execution_id), shown)

    @admin.display(description=_("last act"))
    def last_act_of(self, row: ScheduleState) -> Any:
        if not row.last_act:
            return ""
        about = (_ACTS.get(row.last_act, row.last_act), row.acted_by or _("a program"))
        return format_html('<span title="{}">{} · {}</span>', show.printable(row.act_reason), *about)

    # One schedule.

    @method_decorator(require_safe)
    def change_view(
        self, request: HttpRequest, object_id: str, form_url: str = "", extra_context: Any = None
    ) -> HttpResponse:
        """One schedule, whole."""
        view = self.view_of(request, object_id)
        row, operator = view.row, Operator.of(request.user)
        sees_runs = bool(request.user.has_perm(VIEW_EXECUTION))
        return self.page(
            request,
            "schedule.html",
            title=shortened(view.id, 60),
            crumbs=self.list_crumbs(),
            schedule=view,
            pill=self._pill(view.state),
            words=_words(view.cron),
            problem=_problem(view.schedule),
            catch_up=_catch_up(view.schedule),
            overlap=_OVERLAP[view.schedule.overlap] if view.schedule else "",
            queue=_queue(view.schedule),
            input=_input(view.schedule, Viewer(request)),
            decided=show.when(row.decided_until) if row else "",
            paused=show.when(row.paused_at) if row else "",
            skipped=show.when(row.skipped_at) if row else "",
            skipped_why=_WHYS.get(row.skipped_why, "") if row else "",  # type: ignore[call-overload]
            acted=show.when(row.acted_at) if row else "",
            act=_ACTS.get(row.last_act, row.last_act) if row else "",
            reason=show.printable(row.act_reason) if row else "",
            occurrences=_occurrences(view),
            runs=[self._run(run) for run in self._runs(view.id)] if sees_runs else None,
            acts=[
                (one.title, self.schedule_url(view.id, f"loom_schedule_{one.name}"))
                for one in VIEWS
                if operator.may(one.act) and one.applies(view)
            ],
            history_url=self.schedule_url(view.id, "loom_schedulestate_history") if row else "",
            entries=LogEntry.objects.filter(
                object_id=view.id, content_type__app_label="loom", content_type__model="schedulestate"
            ).select_related("user")[:20],
        )

    def _runs(self, schedule_id: str) -> list[Execution]:
        """The newest runs: ids begin with the schedule's, and end in a time of always thirteen digits."""
        # "A" is the character behind "@": the executions of the schedule are a range of the primary key.
        found = Execution.objects.filter(pk__gte=f"{schedule_id}@", pk__lt=f"{schedule_id}A")
        rows = found.defer("attributes", "error_message").order_by("-pk")[: 5 * RUNS]
        own = re.compile(rf"{re.escape(schedule_id)}@[0-9]+")
        return [row for row in rows if own.fullmatch(row.pk)][:RUNS]

    def _run(self, run: Execution) -> dict[str, Any]:
        ended = run.finished_at
        return {
            "link": self.execution_link(run.pk),
            "pill": pill(run.status, run.get_status_display()),
            "occurrence": show.when_short(run.scheduled_at) or _("triggered"),
            "started": show.when_short(run.created_at),
            "took": show.span((ended - run.created_at).total_seconds()) if ended else "",
        }

    # Shared with the acts.

    def view_of(self, request: HttpRequest, object_id: str) -> ScheduleView:
        """A schedule.

        Raises:
            Http404: there is none. PermissionDenied: this person may not look at schedules.
        """
        if not self.has_view_permission(request):
            raise PermissionDenied
        view = view_of(loom.engine, unquote(object_id))
        if view is None:
            raise Http404(gettext("There is no schedule %(id)s.") % {"id": unquote(object_id)})
        return view

    def list_crumbs(self) -> list[tuple[str, Any]]:
        return [(self.url("loom_schedulestate_changelist"), capfirst(self.opts.verbose_name_plural))]

    def crumbs_of(self, view: ScheduleView) -> list[tuple[str, Any]]:
        return [*self.list_crumbs(), (self.schedule_url(view.id), shortened(view.id))]


def _now() -> datetime:
    """The store's clock as this process knows it: no query."""
    return from_micros(loom.engine.now())


def _words(expression: str) -> str:
    try:
        return in_words(cron.parse(expression))
    except cron.CronError:  # a row of another release, that took more
        return expression


def _problem(schedule: Schedule | None) -> str:
    """Why it could not start its flow just now."""
    if schedule is None:
        return ""
    try:
        schedule.bound(schedule.flow())
    except LoomError as exc:
        return show.printable(str(exc))
    return ""


def _queue(schedule: Schedule | None) -> str:
    """The queue of its runs; '' where that is not known here."""
    try:
        return "" if schedule is None else schedule.flow().options.queue or "default"
    except LoomError:
        return ""


def _input(schedule: Schedule | None, viewer: Viewer) -> Payload | None:
    """What its flow is started with; None if there is nothing, or it cannot be started."""
    try:
        given = {} if schedule is None else schedule.bound(schedule.flow())
    except LoomError:
        return None
    return viewer.payload(codec.encode(given), "input") if given else None


def _catch_up(schedule: Schedule | None) -> Any:
    if schedule is None:
        return ""
    if schedule.catch_up != "all":
        return _CATCH_UP[schedule.catch_up]
    words = gettext("%(what)s, at most the newest %(n)d")
    return words % {"what": _CATCH_UP["all"], "n": schedule.catch_up_limit}


def _occurrences(view: ScheduleView) -> list[Occurrence]:
    """The next occurrences, each with what differs from the one before."""
    if view.schedule is None:
        return []
    told = []
    zone, offset = view.schedule.zone, _now().astimezone(view.schedule.zone).utcoffset()
    for moment in view.next:
        local = moment.astimezone(zone)
        told.append(
            Occurrence(
                local=local.strftime("%a %Y-%m-%d %H:%M %Z (%z)"),
                utc=moment.astimezone(UTC).strftime("%Y-%m-%d %H:%M UTC"),
                wait=show.ago(moment),
                notes=tuple(_notes(view.schedule, local, local.utcoffset() != offset)),
            )
        )
        offset = local.utcoffset()
    return told


def _notes(schedule: Schedule, local: datetime, changed: bool) -> Sequence[str]:
    notes = []
    if changed:
        notes.append(gettext("the offset from UTC has changed before it"))
    wall = local.replace(tzinfo=None)
    if not _admits(schedule, wall):
        notes.append(gettext("its wall time is skipped on that day, so it is shifted by the gap"))
    if local.replace(fold=1).utcoffset() != local.utcoffset():
        notes.append(gettext("its wall time comes twice; this is the first time"))
    return notes


def _admits(schedule: Schedule, wall: datetime) -> bool:
    parsed = schedule.parsed
    return wall.minute in parsed.minutes and wall.hour in parsed.hours and parsed.admits(wall.date())
