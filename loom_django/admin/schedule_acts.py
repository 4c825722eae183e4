"""The acts on a schedule as pages: a form, a preview, a confirmation; nothing is written by a safe method.

What is judged is the schedule as it is at the submit. What is refused is an ordinary page that says why.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, Final

from django.http import HttpRequest, HttpResponse, HttpResponseNotAllowed, HttpResponseRedirect
from django.utils.html import format_html
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from loom_django.admin import show
from loom_django.admin.forms import ActForm
from loom_django.errors import InvalidInputError, LoomError, OperatorDeniedError
from loom_django.models import ScheduleState
from loom_django.runtime import loom
from loom_django.services import schedule_acts
from loom_django.services.operators import Act, Operator
from loom_django.services.schedule_acts import ScheduleDone
from loom_django.services.schedule_list import ScheduleView

if TYPE_CHECKING:
    from loom_django.admin.schedules import ScheduleAdmin


class ScheduleActView:
    """The page of one act."""

    act: ClassVar[Act]
    name: ClassVar[str]
    title: ClassVar[Any]
    does: ClassVar[Any]
    call: ClassVar[Callable[..., ScheduleDone]]
    dangerous: ClassVar[bool] = False

    def __init__(self, admin: ScheduleAdmin) -> None:
        self.admin = admin

    @classmethod
    def applies(cls, view: ScheduleView) -> bool:
        """Tell whether the act would find anything to do just now."""
        raise NotImplementedError

    def said(self, done: ScheduleDone) -> str:
        """What will happen, for the preview."""
        raise NotImplementedError

    def nothing(self, done: ScheduleDone) -> Any:
        """Why there is nothing to do."""
        return ""

    # The request.

    def dispatch(self, http: HttpRequest, object_id: str) -> HttpResponse:
        if http.method not in ("GET", "HEAD", "POST"):
            return HttpResponseNotAllowed(["GET", "POST"])
        view = self.admin.view_of(http, object_id)
        operator = Operator.of(http.user)
        try:
            if http.method == "POST":
                schedule_acts.require(operator, self.act, view.id)
                return self._post(http, view, operator)
            if not operator.may(self.act):
                raise OperatorDeniedError(self.act.permission, operator.name, view.id)
            return self._form_page(http, view, ActForm())
        except OperatorDeniedError as exc:
            return self._refused(http, view, 403, permission=exc.permission)
        except LoomError as exc:
            again = exc.retryable
            return self._refused(
                http, view, 503 if again else 409, problem=show.printable(str(exc)), again=again
            )

    def _post(self, http: HttpRequest, view: ScheduleView, operator: Operator) -> HttpResponse:
        stage = http.POST.get("stage")
        if stage == "edit":
            return self._form_page(http, view, ActForm(initial=http.POST.dict()))
        form = ActForm(http.POST)
        if not form.is_valid():
            return self._form_page(http, view, form)
        act = self._confirm if stage == "confirm" else self._preview
        return act(http, view, operator, form)

    def _preview(
        self, http: HttpRequest, view: ScheduleView, operator: Operator, form: ActForm
    ) -> HttpResponse:
        done = self._perform(view, operator, form, dry_run=True)
        if done is None:
            return self._form_page(http, view, form)
        if not done.changed:
            return self._refused(http, view, 409, problem=self.nothing(done))
        return self.admin.page(
            http,
            "schedule_preview.html",
            title=self.title,
            crumbs=self.admin.crumbs_of(view),
            view=self,
            back=self.admin.schedule_url(view.id),
            form=form,
            reason=show.printable(form.cleaned_data["reason"]),
            said=self.said(done),
            done=done,
        )

    def _confirm(
        self, http: HttpRequest, view: ScheduleView, operator: Operator, form: ActForm
    ) -> HttpResponse:
        # The store's own: on SQLite it takes the write lock before it reads, so a rival is waited for.
        with loom.store.transaction():
            done = self._perform(view, operator, form, dry_run=False)
            if done is not None and done.changed:
                row = ScheduleState(pk=view.id)
                where = f" ({done.execution_id})" if done.execution_id else ""
                self.admin.log_change(http, row, f"{self.name}{where}: {form.cleaned_data['reason']}")
        if done is None:
            return self._form_page(http, view, form)
        if not done.changed:
            return self._refused(http, view, 409, problem=self.nothing(done))
        self.admin.message_user(http, self._message(done))
        return HttpResponseRedirect(self.admin.schedule_url(view.id))

    def _perform(
        self, view: ScheduleView, operator: Operator, form: ActForm, *, dry_run: bool
    ) -> ScheduleDone | None:
        """Do it; None if what was typed cannot be recorded, which the form then says."""
        call = type(self).call
        try:
            return call(loom, operator, view.id, reason=form.cleaned_data["reason"], dry_run=dry_run)
        except InvalidInputError as exc:
            form.add_error(None, str(exc))
            return None

    def _message(self, done: ScheduleDone) -> Any:
        if not done.execution_id:
            return format_html("{}: {}", self.title, _("done."))
        who = {
            "here": _("It runs in this web process, after the commit."),
            "worker": _("A worker takes it up."),
            "nobody": "",
        }[done.runs]
        address = self.admin.execution_url(done.execution_id)
        return format_html('{}: <a href="{}">{}</a>. {}', self.title, address, done.execution_id, who)

    def _form_page(self, http: HttpRequest, view: ScheduleView, form: ActForm) -> HttpResponse:
        return self.admin.page(
            http,
            "act_form.html",
            title=self.title,
            crumbs=self.admin.crumbs_of(view),
            view=self,
            form=form,
            back=self.admin.schedule_url(view.id),
        )

    def _refused(self, http: HttpRequest, view: ScheduleView, status: int, **context: Any) -> HttpResponse:
        """Why not, on an ordinary page. Returned, not raised: an exception would undo what was recorded of it."""
        return self.admin.page(
            http,
            "schedule_refused.html",
            title=_("Not done: %(act)s") % {"act": self.title},
            crumbs=self.admin.crumbs_of(view),
            status=status,
            back=self.admin.schedule_url(view.id),
            **context,
        )


class PauseView(ScheduleActView):
    act = Act.PAUSE_SCHEDULE
    name = "pause"
    title = _("Pause")
    does = _("Has the schedule skip what falls due from now on, until it is resumed. What runs goes on.")
    call = schedule_acts.pause
    dangerous = True

    @classmethod
    def applies(cls, view: ScheduleView) -> bool:
        return view.row is None or view.row.paused_at is None

    def said(self, done: ScheduleDone) -> str:
        return gettext("From now on no occurrence of the schedule starts anything.")

    def nothing(self, done: ScheduleDone) -> Any:
        row = done.row
        if row is None or row.paused_at is None:
            return _("It is paused already.")
        about = {"by": row.acted_by or gettext("a program"), "ago": show.ago(row.paused_at)}
        return _("It is paused already, by %(by)s %(ago)s.") % about


class ResumeView(ScheduleActView):
    act = Act.PAUSE_SCHEDULE
    name = "resume"
    title = _("Resume")
    does = _("Has the schedule start what falls due from now on. What fell due until then is skipped.")
    call = schedule_acts.resume

    @classmethod
    def applies(cls, view: ScheduleView) -> bool:
        return view.row is not None and view.row.paused_at is not None

    def said(self, done: ScheduleDone) -> str:
        return gettext("The next occurrence is started again. Those during the pause are not.")

    def nothing(self, done: ScheduleDone) -> Any:
        return _("It is not paused.")


class TriggerView(ScheduleActView):
    act = Act.TRIGGER_SCHEDULE
    name = "trigger"
    title = _("Trigger")
    does = _("Starts the schedule's flow now, beside its occurrences: paused or not.")
    call = schedule_acts.trigger

    @classmethod
    def applies(cls, view: ScheduleView) -> bool:
        return view.schedule is not None

    def said(self, done: ScheduleDone) -> str:
        flow = done.flow
        about = {"flow": flow.id if flow else "", "version": flow.version if flow else 0}
        words = gettext("An execution of %(flow)s version %(version)d is started.") % about
        if done.busy:
            words += " " + gettext("The newest run of the schedule has not ended.")
        return words


VIEWS: Final[tuple[type[ScheduleActView], ...]] = (TriggerView, PauseView, ResumeView)
