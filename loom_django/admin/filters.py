"""Filters of the executions list. None of them asks the database for its choices."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django.contrib import admin
from django.db.models import Q
from django.db.models.functions import Now
from django.http import HttpRequest
from django.utils.translation import gettext_lazy as _

from loom_django.definitions import registry
from loom_django.kernel.state import ON_DIVERGED, ON_ERROR, ON_MESSAGE, ON_POISONED, ON_TIMER, ON_VERDICT
from loom_django.querysets import ExecutionQuerySet
from loom_django.services.operators import Act

if TYPE_CHECKING:
    from collections.abc import Iterable


class FlowFilter(admin.SimpleListFilter):
    """By flow: those that this process has registered."""

    title = _("flow")
    parameter_name = "flow"

    def lookups(self, request: HttpRequest, model_admin: Any) -> Iterable[tuple[str, Any]]:
        return [(flow_id, flow_id) for flow_id in sorted(registry.highest())]

    def queryset(self, request: HttpRequest, queryset: Any) -> Any:
        return queryset.of_flow(self.value()) if self.value() else queryset


class SubjectFilter(admin.SimpleListFilter):
    """By the object that the executions are about; shown where a link asked for it."""

    title = _("subject")
    parameter_name = "subject"

    @staticmethod
    def value_of(subject: Any) -> str:
        return f"{subject._meta.label_lower}:{subject.pk}"

    def lookups(self, request: HttpRequest, model_admin: Any) -> Iterable[tuple[str, Any]]:
        asked = request.GET.get(self.parameter_name, "")
        return [(asked, asked.replace(":", " ", 1))] if asked else []

    def queryset(self, request: HttpRequest, queryset: Any) -> Any:
        model, _separator, key = (self.value() or "").partition(":")
        return queryset.filter(subject_type=model, subject_id=key) if self.value() else queryset


class WaitingFilter(admin.SimpleListFilter):
    """By what the execution waits for."""

    title = _("waiting for")
    parameter_name = "waiting"

    KINDS = {"time": ON_TIMER, "message": ON_MESSAGE, "fix": ON_ERROR, "diverged": ON_DIVERGED}

    def lookups(self, request: HttpRequest, model_admin: Any) -> Iterable[tuple[str, Any]]:
        return [
            ("verdict", _("a verdict")),
            ("answer", _("an answer of its own")),
            ("message", _("a message")),
            ("time", _("a point in time")),
            ("fix", _("a fix of its body")),
            ("diverged", _("code that fits its log")),
        ]

    def queryset(self, request: HttpRequest, queryset: Any) -> Any:
        kind = self.value()
        if kind == "verdict":  # of several waits the column has the first only
            return queryset.suspended().in_doubt()
        if kind in self.KINDS:
            return queryset.suspended().filter(waiting_on=self.KINDS[kind])
        if kind == "answer":
            reserved = (
                Q(waiting_on=ON_VERDICT) | Q(waiting_on="CHILD_DONE") | Q(waiting_on__startswith="__loom_")
            )
            return queryset.suspended().exclude(reserved)
        return queryset


class NeedsMeFilter(admin.SimpleListFilter):
    """What this person may bring forward, and nobody else will by itself."""

    title = _("needs")
    parameter_name = "needs"

    def lookups(self, request: HttpRequest, model_admin: Any) -> Iterable[tuple[str, Any]]:
        return [("me", _("me"))]

    def queryset(self, request: HttpRequest, queryset: Any) -> Any:
        return needing(request.user, queryset) if self.value() == "me" else queryset


def needing(user: Any, queryset: ExecutionQuerySet) -> Any:
    """The executions that wait for an act that this person is permitted."""
    wanted = Q(pk__in=[])
    if user.has_perm(Act.RESOLVE_STEP.permission):
        wanted |= Q(in_doubt__gt=0)
    if user.has_perm(Act.RETRY_ERROR.permission):
        wanted |= Q(status="SUSPENDED", waiting_on=ON_ERROR)
    if user.has_perm(Act.RETRY_DIVERGED.permission):
        wanted |= Q(status="SUSPENDED", waiting_on=ON_DIVERGED)
    if user.has_perm(Act.RECOVER_EXECUTION.permission):
        wanted |= Q(status="SUSPENDED", waiting_on=ON_POISONED)
    return queryset.filter(wanted)


class LeaseFilter(admin.SimpleListFilter):
    """Leases that ended, by the database's clock."""

    title = _("lease")
    parameter_name = "lease"

    def lookups(self, request: HttpRequest, model_admin: Any) -> Iterable[tuple[str, Any]]:
        return [("expired", _("expired")), ("alive", _("alive"))]

    def queryset(self, request: HttpRequest, queryset: Any) -> Any:
        if self.value() == "expired":
            return queryset.filter(lease_until__lt=Now())
        return queryset.filter(lease_until__gte=Now()) if self.value() == "alive" else queryset


class DueFilter(admin.SimpleListFilter):
    """Timers by whether their time has come, and re-drives."""

    title = _("due")
    parameter_name = "due"

    def lookups(self, request: HttpRequest, model_admin: Any) -> Iterable[tuple[str, Any]]:
        return [("overdue", _("overdue")), ("later", _("later")), ("redrive", _("re-drives"))]

    def queryset(self, request: HttpRequest, queryset: Any) -> Any:
        match self.value():
            case "overdue":
                return queryset.filter(wake_at__lt=Now()).exclude(
                    Q(not_before__gt=Now()) | Q(held_until__gt=Now())
                )
            case "later":
                return queryset.filter(
                    Q(wake_at__gte=Now()) | Q(not_before__gt=Now()) | Q(held_until__gt=Now())
                )
            case "redrive":
                return queryset.filter(redrive__isnull=False)
        return queryset
