"""Search that an index answers: an exact id, or the beginning of one. Payloads are never searched."""

from __future__ import annotations

from typing import Any
from urllib.parse import unquote

from django.db.models import Q
from django.http import HttpRequest
from django.utils.translation import gettext_lazy as _

from loom_django.admin.base import ModelAdmin


class ExactSearch(ModelAdmin):
    """Searches one column of execution ids."""

    search_column = "pk"
    search_fields = ("pk",)  # the box appears for it; what is asked stands below
    search_help_text = _("An execution's id, the beginning of one, or an idempotency key.")

    def get_search_results(self, request: HttpRequest, queryset: Any, search_term: str) -> tuple[Any, bool]:
        term = search_term.strip()
        if not term:
            return queryset, False
        column = self.search_column
        # Ids are compared byte by byte, so a prefix is a range of the index.
        found = Q(**{f"{column}__gte": term, f"{column}__lt": f"{term}\U0010ffff"})
        execution, separator, _rest = term.partition(":")
        if separator:
            # An idempotency key begins with the execution's id, percent-encoded.
            found |= Q(**{column: unquote(execution)})
        return queryset.filter(found), False
