"""What a page of Django's own, the app's in the admin, tells of executions."""

from __future__ import annotations

from typing import Any

from django import template

from loom_django.admin import overview
from loom_django.admin.base import bounded_count
from loom_django.models import Execution

register = template.Library()


@register.simple_tag
def loom_doubts() -> int:
    """How many executions wait for a verdict; an int that says so where there may be more."""
    return bounded_count(Execution.objects.in_doubt().suspended())


@register.simple_tag(takes_context=True)
def loom_banners(context: Any) -> list[tuple[overview.Banner, str]]:
    """What is wrong just now, each with where it is shown."""
    return overview.linked(context["request"], overview.banners())
