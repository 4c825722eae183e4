"""Search that an index answers: an exact id, or the beginning of one. Payloads are never searched."""

from __future__ import annotations

import json
from contextlib import suppress
from functools import reduce
from operator import or_
from typing import Any
from urllib.parse import unquote

from django.db import connections
from django.db.models import Q
from django.db.models.fields.json import KeyTransform
from django.http import HttpRequest
from django.utils.translation import gettext_lazy as _

from loom_django.admin.base import ModelAdmin
from loom_django.models import Execution


class ExactSearch(ModelAdmin):
    """Searches one column of execution ids."""

    search_column = "pk"
    search_fields = ("pk",)  # the box appears for it; what is asked stands below
    search_help_text = _("An execution's id, the beginning of one, or an idempotency key.")

    def get_search_results(self, request: HttpRequest, queryset: Any, search_term: str) -> tuple[Any, bool]:
        term = search_term.strip()
        return (queryset.filter(self.looked_for(term, queryset.db)) if term else queryset), False

    def looked_for(self, term: str, using: str) -> Q:
        """What a term may mean."""
        column = self.search_column
        # Ids are compared byte by byte, so a prefix is a range of the index.
        found = Q(**{f"{column}__gte": term, f"{column}__lt": f"{term}\U0010ffff"})
        execution, separator, _rest = term.partition(":")
        if separator:
            # An idempotency key begins with the execution's id, percent-encoded.
            found |= Q(**{column: unquote(execution)})
        return found


def attribute_is(term: str, using: str) -> Q:
    """The executions with an attribute as it is typed: ``country=DE``, or ``size=17`` for the number or the text."""
    name, separator, text = (part.strip() for part in term.partition("="))
    if not separator:
        return Q(pk__in=[])
    values: list[Any] = [text]
    with suppress(ValueError):
        values.append(json.loads(text))
    if connections[using].vendor == "postgresql":
        held = reduce(or_, (Q(attributes__contains={name: value}) for value in values))
        return held & ~Q(attributes={})  # which the index leaves out
    by_name = Execution.objects.using(using).annotate(_value=KeyTransform(name, "attributes"))
    return Q(pk__in=by_name.filter(_value__in=values).values("pk"))
