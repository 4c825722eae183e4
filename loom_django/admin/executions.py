"""Executions: the list, the page of one, the queue of effects in doubt, and the acts on them."""

from __future__ import annotations

import json
import re
from typing import Any, Final, NoReturn
from urllib.parse import urlencode

from django.apps import apps
from django.contrib import admin
from django.contrib.admin.models import LogEntry
from django.contrib.admin.utils import quote, unquote
from django.core.exceptions import PermissionDenied
from django.db.models import Q, QuerySet
from django.http import Http404, HttpRequest, HttpResponse
from django.urls import URLPattern, path
from django.utils import timezone
from django.utils.decorators import method_decorator
from django.utils.text import capfirst
from django.utils.translation import gettext_lazy as _
from django.views.decorators.http import require_safe

from loom_django import conf
from loom_django.admin import overview, queue, show
from loom_django.admin.acts import VIEWS, GateView, OutcomeView, ResumeView, SendView, VerdictView
from loom_django.admin.base import ReadOnlyAdmin, doing, flow_of, holder, kind_of, shortened, state
from loom_django.admin.execution_page import ExecutionPage, WaitRow
from loom_django.admin.filters import FlowFilter, NeedsMeFilter, SubjectFilter, WaitingFilter
from loom_django.admin.search import ExactSearch, attribute_is
from loom_django.admin.show import VIEW_PAYLOAD, Viewer
from loom_django.definitions import registry
from loom_django.engine.code import Recorded, flow_for
from loom_django.errors import ExecutionNotFoundError, FlowCodeMismatchError, OperatorDeniedError
from loom_django.kernel import codec
from loom_django.kernel.events import Event
from loom_django.kernel.fold import Fold
from loom_django.models import Execution, Fence, Timer
from loom_django.runtime import loom
from loom_django.services import operators
from loom_django.services.deploy_check import survey
from loom_django.services.operators import Act, Operator

# The log stands on its execution's page: a model with a composite key has no admin of its own.
VIEW_EVENT: Final = "loom.view_event"
VIEW_SCHEDULE: Final = "loom.view_schedulestate"
CHILDREN: Final = 20


class ExecutionAdmin(ExactSearch, ReadOnlyAdmin):
    """The console: every execution, and what a person may do about it."""

    list_display = ("execution", "state", "flow", "doing", "started", "updated", "held_by")
    list_display_links = None
    list_filter = (NeedsMeFilter, "status", FlowFilter, WaitingFilter, SubjectFilter)
    ordering = ("-created_at", "pk")
    search_column = "pk"
    search_help_text = _(
        "An execution's id, the beginning of one, an idempotency key, or an attribute such as country=DE."
    )

    # Addresses.

    def get_urls(self) -> list[URLPattern]:
        wrap = self.admin_site.admin_view
        own = [
            path("overview/", wrap(self.overview_view), name="loom_overview"),
            path("in-doubt/", wrap(self.in_doubt_view), name="loom_in_doubt"),
            path("versions/", wrap(self.versions_view), name="loom_versions"),
            path("<path:object_id>/log/", wrap(self.log_view), name="loom_execution_log"),
            *(
                path(
                    f"<path:object_id>/{view.suffix.replace('_', '-')}/",
                    wrap(view(self).dispatch),
                    name=f"loom_execution_{view.suffix}",
                )
                for view in VIEWS
            ),
        ]
        return [*own, *super().get_urls()]

    # The list.

    def looked_for(self, term: str, using: str) -> Q:
        return super().looked_for(term, using) | attribute_is(term, using)

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        return super().get_queryset(request).defer("attributes", "error_message")

    @admin.display(description=_("execution"))
    def execution(self, execution: Execution) -> Any:
        return self.execution_link(execution.pk)

    @admin.display(description=_("status"), ordering="status")
    def state(self, execution: Execution) -> Any:
        return state(execution)

    @admin.display(description=_("flow"))
    def flow(self, execution: Execution) -> Any:
        return flow_of(execution)

    @admin.display(description=_("step or wait"))
    def doing(self, execution: Execution) -> Any:
        return doing(execution)

    @admin.display(description=_("started"), ordering="-created_at")
    def started(self, execution: Execution) -> Any:
        return show.when_short(execution.created_at)

    @admin.display(description=_("updated"))
    def updated(self, execution: Execution) -> Any:
        return show.ago(execution.updated_at)

    @admin.display(description=_("held by"))
    def held_by(self, execution: Execution) -> Any:
        return holder(execution)

    # What is wrong, and what waits.

    @method_decorator(require_safe)
    def overview_view(self, request: HttpRequest) -> HttpResponse:
        """What an operator looks at first."""
        self._check_look(request)
        request.current_app = self.admin_site.name
        seen = overview.look()
        return self.page(
            request,
            "overview.html",
            title=_("Overview"),
            banners=overview.linked(request, seen.banners),
            tallies=overview.linked(request, seen.tallies),
            nodes=[(node, show.ago(node.seen_at), overview.is_silent(node)) for node in seen.nodes],
        )

    # The queue.

    @method_decorator(require_safe)
    def in_doubt_view(self, request: HttpRequest) -> HttpResponse:
        """Effects of which nobody knows whether they happened, oldest first."""
        self._check_look(request)
        flow = request.GET.get("flow", "")
        rows, following = queue.doubts(flow=flow, after=request.GET.get("after", ""))
        return self.page(
            request,
            "in_doubt.html",
            title=_("Effects in doubt"),
            rows=[
                {
                    "doubt": row,
                    "link": self.execution_link(row.execution.pk),
                    "verdict": self._verdict_url(row.execution.pk, row.step),
                    "outcome": self._outcome_url(row.execution.pk, row.step),
                    "since": show.when_short(row.since),
                    "age": show.ago(row.since),
                    "cause": show.printable(str(show.redacted(row.cause, "cause"))),
                }
                for row in rows
            ],
            flow=flow,
            following=following,
            may_act=Operator.of(request.user).may(Act.RESOLVE_STEP),
            executions=self.url("loom_execution_changelist"),
        )

    def _verdict_url(self, execution_id: str, step_id: str) -> str:
        return f"{self.execution_url(execution_id, VerdictView.suffix)}?{urlencode({'step': step_id})}"

    def _outcome_url(self, execution_id: str, step_id: str) -> str:
        return f"{self.execution_url(execution_id, OutcomeView.suffix)}?{urlencode({'step': step_id})}"

    # The code of what lives.

    @method_decorator(require_safe)
    def versions_view(self, request: HttpRequest) -> HttpResponse:
        """Which code live executions remember, and which code of this process goes on with them."""
        self._check_look(request)
        groups = survey(registry, conf.get_settings().DATABASE)
        in_use = {(group.recorded.flow_id, group.continues) for group in groups}
        return self.page(
            request,
            "versions.html",
            title=_("Versions and drift"),
            rows=[(group, self._live_url(group.recorded), show.when_short(group.oldest)) for group in groups],
            drifted=sum(group.live for group in groups if group.mismatch),
            registered=[  # a template would call a flow
                (flow.id, flow.version, flow.flow_hash, flow.pinned, (flow.id, flow.version) in in_use)
                for flow in registry.all()
            ],
        )

    def _live_url(self, recorded: Recorded) -> str:
        """The list of the live executions that remember just this code."""
        wanted = {
            "flow_id__exact": recorded.flow_id,
            "version__exact": recorded.version,
            "flow_hash__exact": recorded.flow_hash,
            "code_hash__exact": recorded.code_hash,
            "status__in": "PENDING,RUNNING,SUSPENDED",
        }
        return f"{self.url('loom_execution_changelist')}?{urlencode(wanted)}"

    # One execution.

    @method_decorator(require_safe)
    def change_view(
        self, request: HttpRequest, object_id: str, form_url: str = "", extra_context: Any = None
    ) -> HttpResponse:
        """One execution, whole."""
        self._check_look(request)
        execution = self.execution_of(request, object_id)
        page = self.read(request, execution)
        operator = Operator.of(request.user)
        return self.page(
            request,
            "execution.html",
            title=shortened(execution.pk, 60),
            crumbs=[(self.url("loom_execution_changelist"), capfirst(self.opts.verbose_name_plural))],
            execution=execution,
            page=page,
            pill=self.state(execution),
            created=show.when(execution.created_at),
            updated=show.when(execution.updated_at),
            finished=show.when(execution.finished_at),
            deadline=show.when(execution.deadline),
            lease_until=show.when(execution.lease_until),
            lease_left=show.ago(execution.lease_until),
            ready_at=show.when(execution.ready_at),
            held_by=self.held_by(execution),
            fence=Fence.objects.filter(pk=execution.pk).first(),
            is_later=execution.ready_at is not None and execution.ready_at > timezone.now(),
            occurrence=show.when(execution.scheduled_at),
            schedule_url=self._schedule_url(request, execution),
            source=self.execution_link(page.forked_from["execution"]) if page.forked_from else "",
            parent=self.execution_link(execution.parent_id) if execution.parent_id else "",
            subject_url=self._subject_url(request, execution),
            children=self._children(page),
            children_url=self._children_url(execution),
            chain=[
                (label, self.execution_link(execution_id))
                for label, execution_id in page.chain
                if execution_id is not None
            ],
            timers=[self._timer(timer, page) for timer in page.timers],
            left_alone="" if page.state.finished else _left_alone(page),
            versions_url=self.url("loom_versions"),
            acts=[
                (view.title, self.execution_url(execution.pk, view.suffix))
                for view in self._acts(page, operator)
            ],
            waits=[(wait, *self._answer_to(wait, execution, operator)) for wait in page.waits],
            log=page.log(_sequence(request.GET.get("after")), request.GET.get("kind", ""))
            if request.user.has_perm(VIEW_EVENT)
            else None,
            log_url=self.execution_url(execution.pk, "log"),
            history_url=self.execution_url(execution.pk, "history"),
            entries=LogEntry.objects.filter(
                object_id=execution.pk, content_type__app_label="loom", content_type__model="execution"
            ).select_related("user")[:20],
        )

    def _acts(self, page: ExecutionPage, operator: Operator) -> list[Any]:
        return [view for view in VIEWS if operator.may(view.act) and view.applies(page, page.row)]

    def _answer_to(self, wait: WaitRow, execution: Execution, operator: Operator) -> tuple[str, Any]:
        """Where this person answers a wait, and what the link says; '' if it is not theirs to answer."""
        if wait.step:
            address = self._verdict_url(execution.pk, wait.step) if operator.may(Act.RESOLVE_STEP) else ""
            return address, _("Give a verdict")
        if wait.is_own and operator.may(Act.RESUME_EXECUTION):
            address = self.execution_url(execution.pk, ResumeView.suffix)
            return f"{address}?{urlencode({'wait': wait.id})}", _("Answer")
        if wait.message and operator.may(Act.SEND_MESSAGE):
            address = self.execution_url(execution.pk, SendView.suffix)
            return f"{address}?{urlencode({'name': wait.message})}", _("Send")
        for view in VIEWS:
            if issubclass(view, GateView) and view.gate == wait.on and operator.may(view.act):
                return self.execution_url(execution.pk, view.suffix), view.title
        return "", ""

    def _schedule_url(self, request: HttpRequest, execution: Execution) -> str:
        if execution.scheduled_at is None or not request.user.has_perm(VIEW_SCHEDULE):
            return ""
        return self.url("loom_schedulestate_change", quote(execution.pk.rpartition("@")[0]))

    def _subject_url(self, request: HttpRequest, execution: Execution) -> str:
        """The subject's own page on this admin site, for those who may look at it."""
        try:
            model: Any = apps.get_model(execution.subject_type)
        except (LookupError, ValueError):  # none, or one that is no more
            return ""
        if not self.admin_site.is_registered(model):
            return ""
        if not self.admin_site.get_model_admin(model).has_view_permission(request):
            return ""
        name = f"{model._meta.app_label}_{model._meta.model_name}_change"
        return self.url(name, quote(execution.subject_id))

    def _children(self, page: ExecutionPage) -> list[tuple[Any, ...]]:
        """The newest children: a link, status, flow, and what each waits for or is about."""
        newest = page.children[: -CHILDREN - 1 : -1]
        rows = Execution.objects.defer("attributes", "error_message").in_bulk(newest) if newest else {}
        return [
            (self.execution_link(id), state(rows[id]), flow_of(rows[id]), doing(rows[id]))
            if id in rows
            else (show.printable(id), _("removed"), "", "")
            for id in newest
        ]

    def _children_url(self, execution: Execution) -> str:
        return f"{self.url('loom_execution_changelist')}?{urlencode({'parent_id__exact': execution.pk})}"

    def _timer(self, timer: Timer, page: ExecutionPage) -> dict[str, Any]:
        ends = page.waits_until(timer.wake_at)
        return {
            "due": show.when(timer.due),
            "from_now": show.ago(timer.due),
            "what": ends or kind_of(timer),
            "tries": timer.tries,
        }

    @method_decorator(require_safe)
    def log_view(self, request: HttpRequest, object_id: str) -> HttpResponse:
        """The whole log as JSON lines, for those who may see payloads, as the redaction hook leaves them."""
        self._check_look(request)
        if not request.user.has_perms([VIEW_EVENT, VIEW_PAYLOAD]):
            raise PermissionDenied
        execution = self.execution_of(request, object_id)
        lines = (json.dumps(_exported(event)) for event in self._events(execution))
        name = re.sub(r"[^A-Za-z0-9._-]", "_", execution.pk)[:100]
        return HttpResponse(
            "".join(f"{line}\n" for line in lines),
            content_type="application/jsonl",
            headers={"Content-Disposition": f'attachment; filename="{name}.jsonl"'},
        )

    # Shared with the acts.

    def _check_look(self, request: HttpRequest) -> None:
        if not self.has_view_permission(request):
            raise PermissionDenied

    def execution_of(self, request: HttpRequest, object_id: str) -> Execution:
        """The row of an execution.

        Raises:
            Http404: there is none. PermissionDenied: this person may not look at executions.
        """
        if not self.has_view_permission(request):
            raise PermissionDenied
        execution: Execution | None = Execution.objects.filter(pk=unquote(object_id)).first()
        if execution is None:
            self._not_found(unquote(object_id))
        return execution

    def _not_found(self, execution_id: str) -> NoReturn:
        raise Http404(str(ExecutionNotFoundError(execution_id)))

    def read(self, request: HttpRequest, execution: Execution) -> ExecutionPage:
        """The log of an execution, read once for a page."""
        return ExecutionPage(self._events(execution), Viewer(request), execution)

    def _events(self, execution: Execution) -> list[Event]:
        try:
            return loom.history(execution.pk)
        except ExecutionNotFoundError:
            self._not_found(execution.pk)

    def crumbs_of(self, execution: Execution) -> list[tuple[str, Any]]:
        return [
            (self.url("loom_execution_changelist"), capfirst(self.opts.verbose_name_plural)),
            (self.execution_url(execution.pk), shortened(execution.pk)),
        ]

    def denied(
        self, request: HttpRequest, execution: Execution, title: Any, error: OperatorDeniedError
    ) -> HttpResponse:
        """A 403 that is returned, not raised: under ATOMIC_REQUESTS an exception would undo the record of it."""
        return self.page(
            request,
            "denied.html",
            title=_("Not permitted: %(act)s") % {"act": title},
            crumbs=self.crumbs_of(execution),
            status=403,
            execution=execution,
            permission=error.permission,
        )


def _left_alone(page: ExecutionPage) -> str:
    """Why no code of this process goes on with an execution; '' if one does."""
    try:
        flow_for(loom.engine, Fold(page.state))
    except FlowCodeMismatchError as exc:
        return show.printable(str(exc))
    return ""


def _sequence(text: str | None) -> int | None:
    return int(text) if text is not None and text.isascii() and text.isdigit() and len(text) < 19 else None


def _exported(event: Event) -> dict[str, Any]:
    payload: Any = event.data
    if conf.get_settings().REDACT is not None:
        payload = codec.encode(show.redacted(payload, f"event:{event.kind}"))
    return operators.exported(event, payload)
