"""What the console's pages share: nothing is added, changed or deleted by a form of the admin's own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

import django
from django import forms
from django.contrib import admin
from django.contrib.admin.utils import quote
from django.core.paginator import Paginator
from django.http import HttpRequest, HttpResponse
from django.template.response import TemplateResponse
from django.urls import reverse
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.translation import gettext_lazy as _

from loom_django.admin import show
from loom_django.kernel.state import ON_VERDICT
from loom_django.models import Execution, Timer

if TYPE_CHECKING:
    ModelAdmin = admin.ModelAdmin[Any]
    AnyPaginator = Paginator[Any]
else:  # neither takes a subscript while it runs
    ModelAdmin = admin.ModelAdmin
    AnyPaginator = Paginator

PAGE = 50
MOST_ROWS = 1000


class _AtLeast(int):
    """A count that says that there may be more."""

    def __str__(self) -> str:
        return f"{int(self)}+"


def bounded_count(rows: Any) -> int:
    """How many rows there are, or that there are at least so many: a table of millions is never counted."""
    found = len(rows.values_list("pk", flat=True)[: MOST_ROWS + 1])
    return found if found <= MOST_ROWS else _AtLeast(MOST_ROWS)


class BoundedPaginator(AnyPaginator):
    """Looks for at most so many rows, by their index."""

    @cached_property
    def count(self) -> int:
        return bounded_count(self.object_list)


class ReadOnlyAdmin(ModelAdmin):
    """A list of rows that the store alone writes."""

    paginator = BoundedPaginator
    list_per_page = PAGE
    list_max_show_all = 0
    show_full_result_count = False
    show_facets = admin.ShowFacets.NEVER
    actions = None
    change_list_template = "admin/loom/change_list.html"
    empty: Any = ""  # what a list without rows says

    class Media:
        css = {"all": ["loom/console.css"]}

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def url(self, name: str, *args: Any) -> str:
        """The address of one of the console's pages on this admin site."""
        return reverse(f"admin:{name}", args=args, current_app=self.admin_site.name)

    def execution_url(self, execution_id: str, page: str = "change") -> str:
        return self.url(f"loom_execution_{page}", quote(execution_id))

    def execution_link(self, execution_id: str) -> SafeString:
        return execution_link(self.admin_site.name, execution_id)

    def page(
        self,
        request: HttpRequest,
        template: str,
        *,
        title: Any,
        crumbs: Iterable[tuple[str, Any]] = (),
        status: int = 200,
        **context: Any,
    ) -> HttpResponse:
        """One of the console's own pages; ``crumbs`` are (address, text), the title comes last by itself."""
        request.current_app = self.admin_site.name
        return TemplateResponse(
            request,
            f"admin/loom/{template}",
            {
                **self.admin_site.each_context(request),
                "opts": self.opts,
                "title": title,
                "media": forms.Media(css={"all": ["loom/console.css"]}),
                "crumbs": [*self._first_crumbs(), *crumbs],
                "crumbs_are_a_list": django.VERSION >= (6, 1),
                "csp_nonce": _csp_nonce(request),
                **context,
            },
            status=status,
        )

    def _first_crumbs(self) -> list[tuple[str, Any]]:
        app = reverse("admin:app_list", args=[self.opts.app_label], current_app=self.admin_site.name)
        return [
            (reverse("admin:index", current_app=self.admin_site.name), _("Home")),
            (app, self.opts.app_config.verbose_name),
        ]


def _csp_nonce(request: HttpRequest) -> Any:
    """Django's nonce for this response where it has one (6.0); it is false until a base template used it."""
    try:
        from django.middleware.csp import get_nonce
    except ImportError:
        return None
    return get_nonce(request)


def execution_link(site: str, execution_id: str) -> SafeString:
    """A link to an execution's page on that admin site."""
    address = reverse("admin:loom_execution_change", args=[quote(execution_id)], current_app=site)
    return format_html(
        '<a class="loom-id" href="{}" title="{}">{}</a>', address, execution_id, shortened(execution_id)
    )


def shortened(identifier: str, length: int = 36) -> str:
    """An id for a table; its middle gives way."""
    if len(identifier) <= length:
        return identifier
    half = (length - 1) // 2
    return f"{identifier[:half]}…{identifier[-half:]}"


def pill(status: str, label: Any) -> SafeString:
    return format_html('<span class="loom-pill loom-is-{}">{}</span>', status.lower(), label)


def state(execution: Execution) -> SafeString:
    """The status of an execution, and whether an effect of it is in doubt."""
    shown = pill(execution.status, execution.get_status_display())
    if not execution.in_doubt:
        return shown
    return format_html("{} {}", shown, pill("doubt", _("in doubt")))


def flow_of(execution: Execution) -> SafeString:
    name = shortened(execution.flow_id)
    return format_html('<span title="{}">{}@{}</span>', execution.flow_id, name, execution.version)


def doing(execution: Execution) -> Any:
    """What an execution waits for, failed with, or is about, in words."""
    waits = execution.pending_waits
    if waits:
        # What only a person can bring forward stands before what comes by itself.
        first = min(waits, key=lambda wait: wait["on"] != ON_VERDICT)
        words = show.wait_of(first, first["wake_at"])
        more = _(", and %(n)d more") % {"n": len(waits) - 1} if len(waits) > 1 else ""
        return format_html("{}{}", words, more)
    return execution.error_type if execution.error_type else shortened(execution.current_step)


def holder(execution: Execution) -> Any:
    """Who has an execution, or is to have it."""
    if execution.lease_owner:
        host = execution.lease_owner.rpartition(":")[0] or execution.lease_owner
        return format_html(
            '<span class="loom-id" title="{}">{}</span>', execution.lease_owner, shortened(host)
        )
    return _("ready") if execution.ready_at else ""


def kind_of(timer: Timer) -> Any:
    """What a timer is for, in a word or two."""
    if timer.deadline:
        return _("deadline")
    if timer.redrive is not None:
        return _("re-drive, attempt %(n)d") % {"n": timer.redrive}
    return _("put off wake") if timer.kept_until else _("wake")


Context = Mapping[str, Any]
