"""What a person fills in for an act. Text that was typed is kept as typed: digits are never rounded on the way."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from django import forms
from django.utils.translation import gettext_lazy as _

from loom_django.errors import LoomError
from loom_django.services import typed_json
from loom_django.services.operators import MAX_REASON

_JSON = {"rows": 4, "class": "loom-code", "spellcheck": "false", "autocomplete": "off"}


class ActForm(forms.Form):
    """Every act has a reason."""

    reason = forms.CharField(
        label=_("Reason"),
        max_length=MAX_REASON,
        widget=forms.Textarea(attrs={"rows": 2}),
        help_text=_("Why, for whoever reads the log later. It is recorded with your name."),
    )

    field_order: list[str] | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"label_suffix": "", **kwargs})

    def clean_reason(self) -> str:
        return str(self.cleaned_data["reason"]).replace("\r\n", "\n")


class GateForm(ActForm):
    """An act that answers one question: the wait that was looked at travels along."""

    question = forms.CharField(required=False, widget=forms.HiddenInput)


class VerdictForm(ActForm):
    """Settles an effect in doubt."""

    step = forms.CharField(widget=forms.HiddenInput)
    question = forms.IntegerField(widget=forms.HiddenInput)
    resolution = forms.ChoiceField(
        label=_("What happened?"),
        widget=forms.RadioSelect,
        choices=[
            ("completed-with-result", _("It happened: I give its result below.")),
            ("retry-fresh", _("It did not happen: run the step again, with a fresh key.")),
            ("fail", _("It failed for good: the flow is to go on with a failure.")),
        ],
    )
    output = forms.CharField(
        label=_("Result"),
        required=False,
        strip=False,
        widget=forms.Textarea(attrs=_JSON),
        help_text=_("As JSON, for “It happened”; null if the step has no result."),
    )
    error = forms.CharField(
        label=_("Error"),
        required=False,
        max_length=MAX_REASON,
        help_text=_("The message of the failure, for “It failed for good”."),
    )

    field_order = ["resolution", "output", "error", "reason"]

    def __init__(self, *args: Any, expects: str = "", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if expects:
            self.fields["output"].help_text = _(
                "As JSON, for “It happened”; null if the step has no result. The step returns: %(kind)s."
            ) % {"kind": expects}

    def clean(self) -> dict[str, Any]:
        cleaned: dict[str, Any] = super().clean() or self.cleaned_data
        resolution = cleaned.get("resolution")
        given = (cleaned.get("output") or "").strip()
        if resolution == "completed-with-result" and not given:
            self.add_error("output", _("Give the result as JSON; null if the step has none."))
        if resolution in ("retry-fresh", "fail") and given:
            self.add_error("output", _("A result goes with “It happened” only."))
        if resolution in ("retry-fresh", "completed-with-result") and cleaned.get("error"):
            self.add_error("error", _("An error goes with “It failed for good” only."))
        return cleaned


class PayloadForm(ActForm):
    """An act with a value, typed as JSON."""

    payload = forms.CharField(
        label=_("Payload"),
        required=False,
        strip=False,
        widget=forms.Textarea(attrs=_JSON),
        help_text=_("What the flow gets, as JSON; empty for null."),
    )

    def clean_payload(self) -> str:
        text = str(self.cleaned_data["payload"])
        if text.strip():
            try:
                typed_json.read(text)
            except LoomError as exc:
                raise forms.ValidationError(str(exc)) from exc
        return text

    @property
    def value(self) -> Any:
        """The payload that was typed."""
        text = self.cleaned_data["payload"]
        return typed_json.read(text) if text.strip() else None


class ResumeForm(PayloadForm):
    """Answers a wait of the flow's own."""

    question = forms.ChoiceField(label=_("Answer to"), widget=forms.RadioSelect)

    field_order = ["question", "payload", "reason"]

    def __init__(
        self, *args: Any, waits: Iterable[tuple[str, str]] = (), budget: bool = False, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        if budget:
            self.fields["payload"].help_text = _('The new limit, as JSON: {"limit": 2.5}, more than is used.')
        field: Any = self.fields["question"]
        field.choices = list(waits)
        # A wait that is over is no slip of the pen: the act says who answered it.
        field.validate = lambda value: None


class MoveForm(PayloadForm):
    """Moves an execution to other code, and may answer what its flow waits for."""

    target = forms.ChoiceField(label=_("Move to"))
    strategy = forms.ChoiceField(
        label=_("How do you know that the code fits?"),
        widget=forms.RadioSelect,
        choices=[
            ("replay-check", _("By the replay check: it has a place for every recorded step.")),
            ("operator-ack", _("I vouch for it, whatever the replay check says.")),
        ],
    )
    question = forms.ChoiceField(label=_("Answer to"), required=False, widget=forms.RadioSelect)
    park = forms.IntegerField(required=False, widget=forms.HiddenInput)

    field_order = ["target", "strategy", "question", "payload", "reason"]

    def __init__(
        self,
        *args: Any,
        targets: Iterable[str] = (),
        waits: Iterable[tuple[str, str]] = (),
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        target: Any = self.fields["target"]
        target.choices = [(name, name) for name in targets]
        question: Any = self.fields["question"]
        question.choices = [("", _("nothing: it goes on waiting")), *waits]
        # A wait that is over is no slip of the pen: the act says who answered it.
        question.validate = lambda value: None

    def clean(self) -> dict[str, Any]:
        cleaned: dict[str, Any] = super().clean() or self.cleaned_data
        if cleaned.get("payload", "").strip() and not cleaned.get("question"):
            self.add_error("payload", _("A payload goes with an answer only."))
        return cleaned


class SendForm(PayloadForm):
    """Sends a message. Its id travels along, so that a form that is sent twice is one message."""

    name = forms.CharField(
        label=_("Name"), max_length=255, help_text=_("What the flow gives to ctx.receive, exactly.")
    )
    message_id = forms.CharField(widget=forms.HiddenInput)

    field_order = ["name", "payload", "reason"]


class OutcomeForm(PayloadForm):
    """Notes something about what has ended."""

    step = forms.ChoiceField(label=_("About"), required=False, widget=forms.RadioSelect)
    outcome = forms.CharField(
        label=_("What happened"),
        max_length=255,
        help_text=_("In a few words, such as “paid” or “never sent”."),
    )

    field_order = ["step", "outcome", "payload", "reason"]

    def __init__(self, *args: Any, steps: Iterable[str] = (), **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.fields["payload"].help_text = _("More about it, as JSON; empty for none.")
        field: Any = self.fields["step"]
        field.choices = [("", _("the execution")), *((step, step) for step in steps)]
        # A step that is settled by now is no slip of the pen: the act says so.
        field.validate = lambda value: None


class CopyForm(ActForm):
    """Makes a new execution. Its id travels along, so that a form that is sent twice makes one."""

    new_id = forms.CharField(
        label=_("Id of the new execution"),
        max_length=255,
        help_text=_("One that nothing has; its idempotency keys begin with it."),
    )

    field_order = ["new_id", "reason"]


class ForkForm(CopyForm):
    """Makes a new execution from a step on."""

    from_step = forms.ChoiceField(
        label=_("From step"),
        help_text=_("What was done before it is kept. It, and what comes after it, is done anew."),
    )
    version = forms.TypedChoiceField(label=_("Code"), required=False, coerce=int, empty_value=None)

    field_order = ["from_step", "version", "new_id", "reason"]

    def __init__(
        self, *args: Any, steps: Iterable[str] = (), versions: Iterable[int] = (), **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        step: Any = self.fields["from_step"]
        step.choices = [(name, name) for name in steps]
        version: Any = self.fields["version"]
        version.choices = [
            ("", _("the version that was recorded")),
            *((number, _("version %(n)d") % {"n": number}) for number in versions),
        ]
