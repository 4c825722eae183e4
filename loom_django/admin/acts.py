"""The acts of an operator as pages: a form, a preview of what will be appended, a confirmation.

Nothing is written by a safe method. Each POST checks the permission anew and is judged against the log as it is
then; what is refused is an ordinary page that says why, and who was first. A done act stands in the log with the
person and the reason, and in Django's own history of the object, in one transaction where both share a database.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final, cast

from django.http import Http404, HttpRequest, HttpResponse, HttpResponseNotAllowed, HttpResponseRedirect
from django.utils import timezone
from django.utils.html import format_html
from django.utils.translation import gettext, ngettext
from django.utils.translation import gettext_lazy as _

from loom_django.admin import show
from loom_django.admin.execution_page import ExecutionPage, StepRow
from loom_django.admin.forms import (
    ActForm,
    CopyForm,
    ForkForm,
    GateForm,
    MoveForm,
    OutcomeForm,
    ResumeForm,
    SendForm,
    VerdictForm,
)
from loom_django.admin.show import Viewer
from loom_django.definitions import Flow, registry
from loom_django.engine import moves
from loom_django.engine.core import from_micros
from loom_django.errors import (
    ExecutionNotFoundError,
    InvalidInputError,
    LoomError,
    OperatorDeniedError,
    PayloadTooLargeError,
    ResumeRefusedError,
    UnencodableValueError,
    VerdictRefusedError,
)
from loom_django.kernel import codec
from loom_django.kernel.events import Event
from loom_django.kernel.fold import Fold
from loom_django.kernel.state import (
    ON_BUDGET,
    ON_DIVERGED,
    ON_ERROR,
    ON_MESSAGE,
    ON_POISONED,
    Frame,
    Status,
    is_reserved,
)
from loom_django.runtime import loom
from loom_django.services import operators
from loom_django.services.operators import Act, Done, Operator
from loom_django.stores.base import AppendRefused

if TYPE_CHECKING:
    from loom_django.admin.executions import ExecutionAdmin
    from loom_django.models import Execution

# What was typed cannot be recorded: shown at the form, not as a refusal.
SLIPS: Final = (InvalidInputError, UnencodableValueError, PayloadTooLargeError)


@dataclass(frozen=True, slots=True)
class Planned:
    """One event of a preview."""

    sequence: int
    kind: str
    body: str

    @classmethod
    def of(cls, event: Event) -> Planned:
        return cls(event.sequence, event.kind, show.to_text(codec.decode(json.loads(event.body))))


@dataclass(frozen=True, slots=True)
class Request:
    """One call of an act's page."""

    http: HttpRequest
    execution: Execution
    operator: Operator
    page: ExecutionPage

    @property
    def execution_id(self) -> str:
        return str(self.execution.pk)


class ActView:
    """The page of one act. Subclasses say what is asked, and which call does it."""

    act: ClassVar[Act]
    suffix: ClassVar[str]
    title: ClassVar[Any]
    does: ClassVar[Any]  # what it means, in a sentence
    template: ClassVar[str] = "act_form.html"
    form_class: ClassVar[type[ActForm]] = ActForm
    dangerous: ClassVar[bool] = False

    def __init__(self, admin: ExecutionAdmin) -> None:
        self.admin = admin

    @classmethod
    def applies(cls, page: ExecutionPage, execution: Execution) -> bool:
        """Tell whether the act would find anything to do just now."""
        raise NotImplementedError

    def form(self, request: Request, data: Any = None, initial: Any = None) -> ActForm:
        """The form of the act."""
        return self.form_class(data, initial=initial)

    def perform(self, request: Request, form: ActForm, *, dry_run: bool) -> Done:
        """Do it, or with ``dry_run`` say what would be appended."""
        raise NotImplementedError

    def context(self, request: Request) -> dict[str, Any]:
        """What the form shows beside its fields."""
        return {}

    def foretell(self, done: Done) -> str:
        """What the act will do beside appending, for the preview."""
        return ""

    # The request.

    def dispatch(self, http: HttpRequest, object_id: str) -> HttpResponse:
        if http.method not in ("GET", "HEAD", "POST"):
            return HttpResponseNotAllowed(["GET", "POST"])
        execution = self.admin.execution_of(http, object_id)
        operator = Operator.of(http.user)
        try:
            self._admit(http, operator, execution)
            request = Request(http, execution, operator, self.admin.read(http, execution))
            return self._post(request) if http.method == "POST" else self._get(request)
        except OperatorDeniedError as exc:
            return self.admin.denied(http, execution, self.title, exc)
        except ExecutionNotFoundError as exc:
            raise Http404(str(exc)) from exc
        except (LoomError, AppendRefused) as exc:
            return self._refused(http, execution, exc)

    def _admit(self, http: HttpRequest, operator: Operator, execution: Execution) -> None:
        """Nothing is recorded of a look; an attempt at the act is."""
        if http.method == "POST":
            operators.require(loom, operator, self.act, execution.pk)
        elif not operator.may(self.act):
            raise OperatorDeniedError(self.act.permission, operator.name, execution.pk)

    def _get(self, request: Request) -> HttpResponse:
        return self._form_page(request, self.form(request))

    def _post(self, request: Request) -> HttpResponse:
        data = request.http.POST
        stage = data.get("stage")
        if stage == "edit":
            return self._form_page(request, self.form(request, initial=data.dict()))
        form = self.form(request, data)
        if not form.is_valid():
            return self._form_page(request, form)
        act = self._confirm if stage == "confirm" else self._preview
        try:
            return act(request, form)
        except SLIPS as exc:
            form.add_error(None, str(exc))
            return self._form_page(request, form)

    def _preview(self, request: Request, form: ActForm) -> HttpResponse:
        done = self.perform(request, form, dry_run=True)
        if form.errors:
            return self._form_page(request, form)
        return self.admin.page(
            request.http,
            "act_preview.html",
            title=self.title,
            crumbs=self.admin.crumbs_of(request.execution),
            execution=request.execution,
            view=self,
            form=form,
            said=self._said(form),
            planned=[Planned.of(event) for event in done.events],
            done=done,
            foretold=self.foretell(done),
            old_key=self._old_key(request, form),
        )

    def _said(self, form: ActForm) -> list[tuple[Any, str]]:
        """What was filled in, to be read once more."""
        said = []
        for field in form:
            value = form.cleaned_data.get(field.name)
            if field.is_hidden or value in (None, ""):
                continue
            choices = dict(getattr(field.field, "choices", ()))
            said.append((field.label, show.printable(str(choices.get(value, value)))))
        return said

    def _old_key(self, request: Request, form: ActForm) -> str:
        return ""

    def _confirm(self, request: Request, form: ActForm) -> HttpResponse:
        # The store's own: on SQLite it takes the write lock before it reads, so a rival is waited for.
        with loom.store.transaction():
            done = self.perform(request, form, dry_run=False)
            if not form.errors:
                self.admin.log_change(request.http, request.execution, self._for_history(form, done))
        if form.errors:
            return self._form_page(request, form)
        self.admin.message_user(request.http, self._message(request, done))
        return HttpResponseRedirect(self.admin.execution_url(request.execution_id))

    def _for_history(self, form: ActForm, done: Done) -> str:
        """The line in Django's history of the object."""
        what = self.act.value.replace("_", " ")
        where = f" (event {done.sequence})" if done.sequence else ""
        return f"{what}{self._about(form)}{where}: {form.cleaned_data['reason']}"

    def _about(self, form: ActForm) -> str:
        return ""

    def _message(self, request: Request, done: Done) -> Any:
        who = {
            "here": _("The flow goes on in this web process, after the commit."),
            "worker": _("A worker takes it up."),
            "nobody": "",
        }[done.runs]
        if done.kept:
            return _("The answer is kept: the flow is running, and takes it when it comes to this wait.")
        if done.sequence is None:
            return format_html("{} {}", self._nothing_appended(done), who)
        address = f"{self.admin.execution_url(request.execution_id)}?after={done.sequence - 1}#log"
        link = format_html('<a href="{}">{}</a>', address, gettext("event %(n)d") % {"n": done.sequence})
        return format_html("{}: {}. {}", self.title, link, who)

    def _nothing_appended(self, done: Done) -> Any:
        """What is said of an act that appended nothing to the log."""
        return _("There was nothing to do; nothing was appended.")

    def _form_page(self, request: Request, form: ActForm) -> HttpResponse:
        return self.admin.page(
            request.http,
            self.template,
            title=self.title,
            crumbs=self.admin.crumbs_of(request.execution),
            execution=request.execution,
            view=self,
            form=form,
            back=self.admin.execution_url(request.execution_id),
            **self.context(request),
        )

    def _refused(self, http: HttpRequest, execution: Execution, exc: Exception) -> HttpResponse:
        """Why not, on an ordinary page: 409, or 503 for what may be tried again."""
        again = getattr(exc, "retryable", False) or isinstance(exc, AppendRefused)
        answered = exc if isinstance(exc, VerdictRefusedError) else None
        page = self.admin.read(http, execution)
        return self.admin.page(
            http,
            "refused.html",
            title=_("Not done: %(act)s") % {"act": self.title},
            crumbs=self.admin.crumbs_of(execution),
            status=503 if again else 409,
            execution=execution,
            page=page,
            problem=show.printable(str(exc)),
            again=again,
            answered=answered,
            answered_at=show.when(answered.answered_at) if answered else "",
            answered_ago=show.ago(answered.answered_at) if answered else "",
        )


class VerdictView(ActView):
    """Settles an effect in doubt."""

    act = Act.RESOLVE_STEP
    suffix = "verdict"
    title = _("Verdict")
    does = _("Says what became of an effect of which nobody knows whether it happened.")
    template = "verdict_form.html"
    form_class = VerdictForm

    @classmethod
    def applies(cls, page: ExecutionPage, execution: Execution) -> bool:
        return False  # linked at each step in doubt, not at the execution

    def form(self, request: Request, data: Any = None, initial: Any = None) -> ActForm:
        if data is None and initial is None:
            frame = self._asked(request)
            initial = {"step": frame.step_id, "question": frame.in_doubt_sequence}
        step = str((data or initial).get("step", ""))
        return VerdictForm(data, initial=initial, expects=_expects(request, step))

    def _asked(self, request: Request) -> Frame:
        """The frame in doubt that the address names, or the only one.

        Raises:
            VerdictRefusedError: it is not in doubt.
        """
        open_ = {wait.correlation_key for wait in request.page.state.pending_waits}
        frames = [frame for frame in request.page.state.in_doubt if frame.step_id in open_]
        step = request.http.GET.get("step") or (frames[0].step_id if len(frames) == 1 else "")
        for frame in frames:
            if frame.step_id == step:
                return frame
        # Judged as a verdict would be, so that the page says who was first.
        operators.resolve_step(
            loom, request.operator, request.execution_id, step, "retry-fresh", reason="-", dry_run=True
        )
        raise ResumeRefusedError(request.execution_id, "no-such-wait")

    def context(self, request: Request) -> dict[str, Any]:
        step = request.http.POST.get("step") or request.http.GET.get("step")
        found = [
            row for row in request.page.steps if row.frame.step_id == step or (not step and row.in_doubt)
        ]
        if not found:
            return {}
        row = found[0]
        cause = show.printable(str(show.redacted(row.frame.cause, "cause")))
        return {"row": row, "cause": cause, "late": _late(row, request.page.viewer)}

    def perform(self, request: Request, form: ActForm, *, dry_run: bool) -> Done:
        given = form.cleaned_data
        options: dict[str, Any] = {}
        if given["resolution"] == "completed-with-result":
            try:
                options["output"] = operators.read_output(
                    loom, request.execution_id, given["step"], given["output"]
                )
            except SLIPS as exc:
                form.add_error("output", str(exc))
                return Done(self.act, request.execution_id, (), "nobody")
        elif given["error"]:
            options["error"] = given["error"]
        return operators.resolve_step(
            loom,
            request.operator,
            request.execution_id,
            given["step"],
            given["resolution"],
            question=given["question"],
            reason=given["reason"],
            dry_run=dry_run,
            **options,
        )

    def _about(self, form: ActForm) -> str:
        return f" {form.cleaned_data['step']} as {form.cleaned_data['resolution']}"

    def _old_key(self, request: Request, form: ActForm) -> str:
        frame = request.page.state.frames.get(form.cleaned_data["step"])
        return frame.idempotency_key(request.execution_id) if frame else ""


def _expects(request: Request, step_id: str) -> str:
    """What the step's tool returns, in words for the form."""
    tool = operators.tool_of(loom, Fold(request.page.state), step_id)
    if tool is None:
        return ""
    if tool.parse_output is not None:
        return gettext("what parse_output of %(tool)s takes") % {"tool": tool.name}
    kind = operators.returns(tool)
    if kind is Any:
        return ""
    return "null" if kind is type(None) else getattr(kind, "__name__", "") or str(kind)


def _late(row: StepRow, viewer: Viewer) -> list[dict[str, Any]]:
    """What abandoned calls returned after all, for the person who is asked what happened."""
    return [
        {
            "took": show.span(late.get("elapsed_ms", 0) / 1000),
            "at": show.when_micros(late.get("at")),
            "output": viewer.payload(late["output"], "late") if "output" in late else None,
            "error": str((late.get("error") or {}).get("type", "")),
        }
        for late in row.frame.late
    ]


class ResumeView(ActView):
    """Answers a wait of the flow's own."""

    act = Act.RESUME_EXECUTION
    suffix = "resume"
    title = _("Resume")
    does = _("Answers what the flow waits for.")
    form_class = ResumeForm

    @classmethod
    def applies(cls, page: ExecutionPage, execution: Execution) -> bool:
        return any(not is_reserved(wait.on) for wait in page.state.pending_waits)

    def form(self, request: Request, data: Any = None, initial: Any = None) -> ActForm:
        waits = _own_waits(request)
        if data is None and initial is None:
            first = request.http.GET.get("wait") or (waits[0][0] if waits else "")
            if first not in dict(waits):
                self._refuse(request)
            initial = {"question": first}
        asked = (data or initial).get("question")
        wait = request.page.state.waits.get(asked)
        budget = wait is not None and wait.on == ON_BUDGET
        return ResumeForm(data, initial=initial, waits=waits, budget=budget)

    def _refuse(self, request: Request) -> None:
        state = request.page.state
        why: Any = "terminal" if state.finished else "no-such-wait" if state.parked else "not-suspended"
        raise ResumeRefusedError(request.execution_id, why, _last_answer(request.page))

    def perform(self, request: Request, form: ActForm, *, dry_run: bool) -> Done:
        given = form.cleaned_data
        wait = request.page.state.waits.get(given["question"])
        return operators.resume_execution(
            loom,
            request.operator,
            request.execution_id,
            wait.on if wait else given["question"],
            correlation_key=wait.correlation_key if wait else None,
            question=given["question"],
            payload=cast(ResumeForm, form).value,
            reason=given["reason"],
            dry_run=dry_run,
        )


def _last_answer(page: ExecutionPage) -> str:
    answered = [wait for wait in page.state.waits.values() if wait.answered and not is_reserved(wait.on)]
    if not answered:
        return ""
    last = answered[-1]
    by = f" by {last.answered_by}" if last.answered_by else ""
    moment = from_micros(last.answered_at)
    return f"{last.on!r} was {last.status.value}{by} {show.ago(moment)} (sequence {last.answered_sequence})."


class GateView(ActView):
    """An act that opens a gate: there is nothing to fill in but the reason."""

    form_class = GateForm
    gate: ClassVar[str]
    opens: ClassVar[Callable[..., Done]]

    @classmethod
    def applies(cls, page: ExecutionPage, execution: Execution) -> bool:
        return any(wait.on == cls.gate for wait in page.state.pending_waits)

    def form(self, request: Request, data: Any = None, initial: Any = None) -> ActForm:
        if data is None and initial is None:
            waits = [wait.id for wait in request.page.state.pending_waits if wait.on == self.gate]
            initial = {"question": waits[0] if waits else ""}
        return GateForm(data, initial=initial)

    def perform(self, request: Request, form: ActForm, *, dry_run: bool) -> Done:
        return self.opens(
            loom,
            request.operator,
            request.execution_id,
            reason=form.cleaned_data["reason"],
            question=form.cleaned_data["question"] or None,
            dry_run=dry_run,
        )


class RetryErrorView(GateView):
    """Runs an execution again that is parked on an error of its body."""

    act = Act.RETRY_ERROR
    suffix = "retry_error"
    title = _("Retry after an error")
    does = _("Runs the body again, after its code was fixed. Finished steps are not repeated.")
    gate = ON_ERROR
    opens = staticmethod(operators.retry_error)


class RetryDivergedView(GateView):
    """Runs an execution again that is parked because its body skipped recorded steps."""

    act = Act.RETRY_DIVERGED
    suffix = "retry_diverged"
    title = _("Retry after a divergence")
    does = _(
        "Runs the body again, after its code asks for the recorded steps again. Finished steps are not repeated; if "
        "it still skips any, it parks here again before anything is done."
    )
    gate = ON_DIVERGED
    opens = staticmethod(operators.retry_diverged)


class MoveView(ActView):
    """Moves an execution to other code."""

    act = Act.MOVE_EXECUTION
    suffix = "move"
    title = _("Move to other code")
    does = _(
        "Has the execution go on with another version of its flow, or with another flow. What is recorded stays as "
        "it is; the new code runs from its top and is served from it."
    )
    template = "move_form.html"
    form_class = MoveForm

    @classmethod
    def applies(cls, page: ExecutionPage, execution: Execution) -> bool:
        return not page.state.finished and execution.lease_token is None

    def form(self, request: Request, data: Any = None, initial: Any = None) -> ActForm:
        state = request.page.state
        own = loom.engine.registry.versions(state.flow_id)
        others = [flow for flow in loom.engine.registry.all() if flow.id != state.flow_id]
        targets = [_target(flow) for flow in (*sorted(own.values(), key=lambda flow: -flow.version), *others)]
        if data is None and initial is None:
            startable = [_target(flow) for flow in own.values() if not flow.pinned]
            initial = {
                "target": request.http.GET.get("target", startable[-1] if startable else ""),
                "strategy": "replay-check",
                "question": "",
                "park": state.park_sequence,
            }
        return MoveForm(data, initial=initial, targets=targets, waits=_own_waits(request))

    def context(self, request: Request) -> dict[str, Any]:
        """The replay check of each version of its flow, and of another target that was asked about."""
        state = request.page.state
        versions = loom.engine.registry.versions(state.flow_id)
        names = dict.fromkeys(_target(flow) for flow in reversed(versions.values()))
        asked = request.http.POST.get("target") or request.http.GET.get("target")
        for flow in loom.engine.registry.all():
            if asked == _target(flow):
                names[asked] = None
        reports = [
            (name, moves.report(Fold(state), moves.target(registry, *_parsed(name)))) for name in names
        ]
        return {"reports": reports, "state": state}

    def perform(self, request: Request, form: ActForm, *, dry_run: bool) -> Done:
        given = form.cleaned_data
        flow_id, version = _parsed(given["target"])
        wait = request.page.state.waits.get(given["question"])
        answer: dict[str, Any] = {}
        if given["question"]:
            answer = {
                "event_type": wait.on if wait else given["question"],
                "correlation_key": wait.correlation_key if wait else None,
                "question": given["question"],
                "payload": cast(MoveForm, form).value,
            }
        return operators.move_execution(
            loom,
            request.operator,
            request.execution_id,
            flow_id,
            version=version,
            strategy=given["strategy"],
            park_sequence=given["park"],
            reason=given["reason"],
            dry_run=dry_run,
            **answer,
        )

    def _about(self, form: ActForm) -> str:
        return f" to {form.cleaned_data['target']} by {form.cleaned_data['strategy']}"


def _target(flow: Flow[..., Any]) -> str:
    return f"{flow.id}@{flow.version}"


def _parsed(target: str) -> tuple[str, int]:
    flow_id, _mark, version = target.rpartition("@")
    return flow_id, int(version)


def _own_waits(request: Request) -> list[tuple[str, str]]:
    """The waits of the flow's own, each in words."""
    return [
        (wait.id, show.wait_in_words(wait.on, wait.correlation_key, wait.wake_at, wait.budget))
        for wait in request.page.state.pending_waits
        if not is_reserved(wait.on)
    ]


class CancelView(ActView):
    """Ends an execution."""

    act = Act.CANCEL_EXECUTION
    suffix = "cancel"
    title = _("Cancel")
    does = _(
        "Ends the execution for good. A step that is running may still have its effect; nothing more of it is "
        "recorded, and compensations do not run."
    )
    dangerous = True

    @classmethod
    def applies(cls, page: ExecutionPage, execution: Execution) -> bool:
        return not page.state.finished

    def perform(self, request: Request, form: ActForm, *, dry_run: bool) -> Done:
        return operators.cancel_execution(
            loom,
            request.operator,
            request.execution_id,
            reason=form.cleaned_data["reason"],
            dry_run=dry_run,
        )

    def _nothing_appended(self, done: Done) -> Any:
        return _("It was cancelled already; nothing was appended.")


class SendView(ActView):
    """Sends a message to the flow."""

    act = Act.SEND_MESSAGE
    suffix = "send"
    title = _("Send a message")
    does = _("Puts a message into the inbox of the flow, which takes it when it receives one of that name.")
    form_class = SendForm

    @classmethod
    def applies(cls, page: ExecutionPage, execution: Execution) -> bool:
        return not page.state.finished

    def form(self, request: Request, data: Any = None, initial: Any = None) -> ActForm:
        if data is None and initial is None:
            wanted = [w.correlation_key for w in request.page.state.pending_waits if w.on == ON_MESSAGE]
            name = request.http.GET.get("name", wanted[0] if wanted else "")
            initial = {"name": name, "message_id": f"operator-{uuid.uuid4()}"}
        return SendForm(data, initial=initial)

    def perform(self, request: Request, form: ActForm, *, dry_run: bool) -> Done:
        given = form.cleaned_data
        return operators.send_message(
            loom,
            request.operator,
            request.execution_id,
            given["name"],
            cast(SendForm, form).value,
            message_id=given["message_id"],
            reason=given["reason"],
            dry_run=dry_run,
        )

    def foretell(self, done: Done) -> str:
        if done.message == "taken":
            return gettext("The flow waits for a message of this name, and takes it.")
        if done.message == "kept":
            return gettext("The flow does not wait for a message of this name now: it is kept until it does.")
        return gettext("This message was sent already. Nothing more is done.")

    def _nothing_appended(self, done: Done) -> Any:
        if done.message == "known":
            return _("This message was sent already; nothing more was done.")
        return _("The message is in the inbox of the flow.")

    def _about(self, form: ActForm) -> str:
        return f" {form.cleaned_data['name']}"


class CopyView(ActView):
    """An act that makes a new execution over what this one had done."""

    form_class = CopyForm

    def foretell(self, done: Done) -> str:
        copy = done.started
        if copy is None or not copy.created:
            return gettext("This very copy was made already. Nothing more is done.")
        about = {
            "id": copy.execution_id,
            "flow": f"{copy.flow_id}@{copy.version}",
            "steps": ", ".join(copy.steps) or gettext("none"),
        }
        words = gettext("The execution %(id)s of %(flow)s is started. Steps that are kept: %(steps)s.")
        return show.printable(words % about)

    def _nothing_appended(self, done: Done) -> Any:
        if done.started is None:
            return ""
        link = self.admin.execution_link(done.started.execution_id)
        if not done.started.created:
            return format_html("{} {}.", _("This very copy was made already:"), link)
        return format_html("{}: {}.", self.title, link)

    def _about(self, form: ActForm) -> str:
        return f" as {form.cleaned_data['new_id']}"

    def form(self, request: Request, data: Any = None, initial: Any = None) -> ActForm:
        if data is None and initial is None:
            initial = {"new_id": str(uuid.uuid4())}
        return self.form_class(data, initial=initial, **self._choices(request))

    def _choices(self, request: Request) -> dict[str, Any]:
        return {}


class ForkView(CopyView):
    """Starts a new execution from a step on."""

    act = Act.FORK_EXECUTION
    suffix = "fork"
    title = _("Fork from a step")
    does = _(
        "Starts a new execution over what this one had done before a step. The rest is done anew, under the new "
        "id and so under new idempotency keys: effects of this execution from that step on happen once more."
    )
    form_class = ForkForm

    @classmethod
    def applies(cls, page: ExecutionPage, execution: Execution) -> bool:
        return bool(page.state.frames)

    def _choices(self, request: Request) -> dict[str, Any]:
        versions = loom.engine.registry.versions(request.execution.flow_id)
        return {
            "steps": request.page.state.frames,
            "versions": [number for number, flow in versions.items() if not flow.pinned],
        }

    def perform(self, request: Request, form: ActForm, *, dry_run: bool) -> Done:
        given = form.cleaned_data
        return operators.fork_execution(
            loom,
            request.operator,
            request.execution_id,
            given["from_step"],
            new_execution_id=given["new_id"],
            version=given["version"],
            reason=given["reason"],
            dry_run=dry_run,
        )

    def _about(self, form: ActForm) -> str:
        return f" from {form.cleaned_data['from_step']}{super()._about(form)}"


class RerunView(CopyView):
    """Starts a failed execution again."""

    act = Act.RERUN_EXECUTION
    suffix = "rerun"
    title = _("Rerun")
    does = _(
        "Starts this failed execution again as a new one, from the step that it failed with. What was done before "
        "is kept."
    )

    @classmethod
    def applies(cls, page: ExecutionPage, execution: Execution) -> bool:
        return page.state.status == Status.FAILED

    def perform(self, request: Request, form: ActForm, *, dry_run: bool) -> Done:
        return operators.rerun_execution(
            loom,
            request.operator,
            request.execution_id,
            new_execution_id=form.cleaned_data["new_id"],
            reason=form.cleaned_data["reason"],
            dry_run=dry_run,
        )


class WakeView(ActView):
    """Has wakes that are due tried now."""

    act = Act.WAKE_TIMER
    suffix = "wake"
    title = _("Wake now")
    does = _(
        "Tries the wakes of this execution now that are due, and were put off since they could not be served. "
        "What sleeps until a later time goes on sleeping."
    )

    @classmethod
    def applies(cls, page: ExecutionPage, execution: Execution) -> bool:
        return not page.state.finished and any(timer.wake_at <= timezone.now() for timer in page.timers)

    def perform(self, request: Request, form: ActForm, *, dry_run: bool) -> Done:
        return operators.wake_timer(
            loom,
            request.operator,
            request.execution_id,
            reason=form.cleaned_data["reason"],
            dry_run=dry_run,
        )

    def foretell(self, done: Done) -> str:
        return ngettext("%(n)d wake is tried.", "%(n)d wakes are tried.", done.wakes) % {"n": done.wakes}

    def _nothing_appended(self, done: Done) -> Any:
        return _("The wake is tried now; the log tells what comes of it.")


class OutcomeView(ActView):
    """Notes something about what has ended."""

    act = Act.RECORD_OUTCOME
    suffix = "outcome"
    title = _("Record an outcome")
    does = _(
        "Notes what was learnt after the end, such as what became of an effect that was in doubt. It changes "
        "nothing else; of a step in doubt it says that nobody need look any more."
    )
    form_class = OutcomeForm

    @classmethod
    def applies(cls, page: ExecutionPage, execution: Execution) -> bool:
        return page.state.finished

    def form(self, request: Request, data: Any = None, initial: Any = None) -> ActForm:
        steps = [frame.step_id for frame in request.page.state.in_doubt]
        if data is None and initial is None:
            initial = {"step": request.http.GET.get("step", steps[0] if steps else "")}
        return OutcomeForm(data, initial=initial, steps=steps)

    def perform(self, request: Request, form: ActForm, *, dry_run: bool) -> Done:
        given = form.cleaned_data
        return operators.record_outcome(
            loom,
            request.operator,
            request.execution_id,
            given["outcome"],
            cast(OutcomeForm, form).value,
            step_id=given["step"] or None,
            reason=given["reason"],
            dry_run=dry_run,
        )

    def _about(self, form: ActForm) -> str:
        step = form.cleaned_data["step"]
        return f" {form.cleaned_data['outcome']}" + (f" of {step}" if step else "")


class RecoverView(GateView):
    """Takes an execution over from its holder."""

    act = Act.RECOVER_EXECUTION
    suffix = "recover"
    title = _("Recover")
    does = _(
        "Takes the execution from whoever holds it, whatever its lease says. A holder that is alive can record "
        "nothing more; a step that must not run twice is put in doubt."
    )
    gate = ON_POISONED

    @classmethod
    def applies(cls, page: ExecutionPage, execution: Execution) -> bool:
        return execution.lease_token is not None or super().applies(page, execution)

    def perform(self, request: Request, form: ActForm, *, dry_run: bool) -> Done:
        return operators.recover_execution(
            loom,
            request.operator,
            request.execution_id,
            reason=form.cleaned_data["reason"],
            dry_run=dry_run,
        )

    def _nothing_appended(self, done: Done) -> Any:
        return _("It is taken over from its holder; the log tells how it goes on.")


VIEWS: Final[tuple[type[ActView], ...]] = (
    VerdictView,
    ResumeView,
    RetryErrorView,
    RetryDivergedView,
    SendView,
    WakeView,
    MoveView,
    RecoverView,
    RerunView,
    ForkView,
    OutcomeView,
    CancelView,
)
