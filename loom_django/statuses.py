"""The statuses of an execution, with their names for people."""

from __future__ import annotations

from django.db import models
from django.utils.translation import pgettext_lazy

from loom_django.kernel.state import Status


class ExecutionStatus(models.TextChoices):
    """The statuses of an execution, as the fold knows them."""

    PENDING = Status.PENDING, pgettext_lazy("execution status", "Pending")
    RUNNING = Status.RUNNING, pgettext_lazy("execution status", "Running")
    SUSPENDED = Status.SUSPENDED, pgettext_lazy("execution status", "Suspended")
    COMPLETED = Status.COMPLETED, pgettext_lazy("execution status", "Completed")
    FAILED = Status.FAILED, pgettext_lazy("execution status", "Failed")
    CANCELLED = Status.CANCELLED, pgettext_lazy("execution status", "Cancelled")
    CONTINUED = Status.CONTINUED, pgettext_lazy("execution status", "Continued")
