"""What a page of Django's own, the app's in the admin, tells of executions."""

from __future__ import annotations

from django import template

from loom_django.admin.base import BoundedPaginator
from loom_django.models import Execution

register = template.Library()


@register.simple_tag
def loom_doubts() -> int:
    """How many executions wait for a verdict; an int that says so where there may be more."""
    waiting = Execution.objects.in_doubt().suspended().order_by("created_at")
    return BoundedPaginator(waiting, 1).count
