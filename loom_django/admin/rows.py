"""Timers and leases, to look at."""

from __future__ import annotations

from typing import Any

from django.contrib import admin
from django.db.models import QuerySet
from django.db.models.functions import Coalesce
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.utils.translation import gettext_lazy as _

from loom_django.admin import show
from loom_django.admin.base import ReadOnlyAdmin, holder, kind_of, shortened
from loom_django.admin.filters import DueFilter, FlowFilter, LeaseFilter
from loom_django.admin.search import ExactSearch


class TimerAdmin(ExactSearch, ReadOnlyAdmin):
    """The wakes that are owed, soonest first."""

    empty = _("No wake is owed: nothing sleeps, and no wait has a timeout.")
    list_display = ("execution", "due", "from_now", "kind", "tries")
    list_display_links = None
    list_filter = (DueFilter,)
    ordering = (Coalesce("not_before", "wake_at"), "pk")
    fields = ("execution_id", "wake_at", "not_before", "held_until", "redrive", "deadline", "tries")
    search_column = "execution_id"

    @admin.display(description=_("execution"))
    def execution(self, timer: Any) -> Any:
        return self.execution_link(timer.execution_id)

    @admin.display(description=_("due"))
    def due(self, timer: Any) -> Any:
        return show.when(timer.due)

    @admin.display(description=_("from now"))
    def from_now(self, timer: Any) -> str:
        return show.ago(timer.due)

    @admin.display(description=_("kind"))
    def kind(self, timer: Any) -> Any:
        return kind_of(timer)


class LeaseAdmin(ExactSearch, ReadOnlyAdmin):
    """Who holds which execution, until when."""

    empty = _("Nobody runs anything just now. What waits holds no lease.")
    list_display = ("execution", "flow", "held_by", "until", "from_now")
    list_display_links = None
    list_filter = (LeaseFilter, FlowFilter)
    ordering = ("lease_until", "pk")
    search_column = "pk"

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        held: QuerySet[Any] = super().get_queryset(request).filter(lease_until__isnull=False)
        return held.only("pk", "flow_id", "version", "lease_owner", "lease_until", "ready_at")

    def change_view(
        self, request: HttpRequest, object_id: str, form_url: str = "", extra_context: Any = None
    ) -> HttpResponse:
        """A lease is columns of its execution; it has no page of its own."""
        return HttpResponseRedirect(self.url("loom_execution_change", object_id))

    @admin.display(description=_("execution"))
    def execution(self, lease: Any) -> Any:
        return self.execution_link(lease.pk)

    @admin.display(description=_("flow"))
    def flow(self, lease: Any) -> str:
        return f"{shortened(lease.flow_id)}@{lease.version}"

    @admin.display(description=_("held by"))
    def held_by(self, lease: Any) -> Any:
        return holder(lease)

    @admin.display(description=_("until"))
    def until(self, lease: Any) -> Any:
        return show.when(lease.lease_until)

    @admin.display(description=_("from now"))
    def from_now(self, lease: Any) -> str:
        return show.ago(lease.lease_until)
