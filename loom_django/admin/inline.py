"""The executions of an object on that object's own admin page: the newest few, to look at."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlencode

from django import forms
from django.contrib import admin
from django.forms import BaseFormSet, formset_factory
from django.http import HttpRequest
from django.urls import reverse
from django.utils.translation import gettext_lazy as _

from loom_django.admin import show
from loom_django.admin.base import ModelAdmin, doing, execution_link, flow_of, state
from loom_django.admin.filters import SubjectFilter
from loom_django.models import Execution

if TYPE_CHECKING:
    Inline = admin.options.InlineModelAdmin[Any, Any]
    FormSet = BaseFormSet[Any]
else:  # neither takes a subscript while it runs
    Inline = admin.options.InlineModelAdmin
    FormSet = BaseFormSet

ROWS: Final = 10


class _Rows(FormSet):
    """Stands where an admin page wants a formset: it has rows and no forms, and nothing that is posted changes it."""

    site: admin.AdminSite

    def __init__(self, *args: Any, instance: Any = None, prefix: Any = None, **kwargs: Any) -> None:
        super().__init__(prefix=prefix)
        self.instance = instance
        self.new_objects: list[Any] = []
        self.changed_objects: list[Any] = []
        self.deleted_objects: list[Any] = []

    @classmethod
    def get_default_prefix(cls) -> str:
        return "loom_executions"

    def get_queryset(self) -> list[Any]:
        return []

    def is_valid(self) -> bool:
        return True

    def save(self, commit: bool = True) -> list[Any]:
        return []

    @cached_property
    def _found(self) -> list[Execution]:
        own = Execution.objects.for_subject(self.instance).order_by("-created_at")
        return list(own.defer("attributes", "error_message")[: ROWS + 1])

    @property
    def rows(self) -> list[dict[str, Any]]:
        return [
            {
                "execution": self._named(execution.pk),
                "state": state(execution),
                "flow": flow_of(execution),
                "doing": doing(execution),
                "started": show.when_short(execution.created_at),
            }
            for execution in self._found[:ROWS]
        ]

    def _named(self, execution_id: str) -> Any:
        return execution_link(self.site.name, execution_id) if self._has_console else execution_id

    @property
    def all_of_them(self) -> str:
        """The address of the list of all, if there are more than are shown."""
        if len(self._found) <= ROWS or not self._has_console:
            return ""
        address = reverse("admin:loom_execution_changelist", current_app=self.site.name)
        return f"{address}?{urlencode({SubjectFilter.parameter_name: SubjectFilter.value_of(self.instance)})}"

    @property
    def _has_console(self) -> bool:
        return self.site.is_registered(Execution)


class _Executions(Inline):
    model = Execution
    template = "admin/loom/executions_inline.html"
    verbose_name_plural = _("executions")

    class Media:
        css = {"all": ["loom/console.css"]}

    def get_formset(self, request: HttpRequest, obj: Any = None, **kwargs: Any) -> Any:
        made: Any = formset_factory(forms.Form, formset=_Rows, extra=0, max_num=0)
        made.site = self.admin_site
        return made

    def has_add_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False


class ExecutionsInlineMixin(ModelAdmin):
    """For a ModelAdmin of your own: shows the newest executions that were started with ``subject=`` the object.

    To those with the permission ``loom.view_execution``. One query, ten rows, a link to the others.
    """

    def get_inlines(self, request: HttpRequest, obj: Any) -> Any:
        inlines = super().get_inlines(request, obj)
        return inlines if obj is None else [*inlines, _Executions]
