"""Counting executions by what they are doing; what is unwatched is told apart from what is orphaned."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from django.db.models import Count, Q

from loom_django.engine.core import Engine
from loom_django.kernel.state import Status
from loom_django.models import Execution


def census(
    engine: Engine, alias: str, *, flow_id: str | None = None, by_version: bool = False
) -> dict[str, Any]:
    """Return counts: by status, and by ownership.

    ``never_leased`` are started executions that no process has taken up yet; they are not orphaned, they are
    unwatched. ``overdue`` of all that are ready have been so for longer than ``READY_GRACE``.
    """
    rows = Execution.objects.using(alias)
    if flow_id is not None:
        rows = rows.of_flow(flow_id)
    counted: dict[str, Any] = {"by_status": {str(status): 0 for status in Status}}
    for status, count in rows.values_list("status").annotate(Count("pk")).order_by("status"):
        counted["by_status"][status] = count
    now = engine.store.now()
    grace = timedelta(seconds=engine.settings().READY_GRACE)
    counted["ownership"] = rows.aggregate(
        held=Count("pk", filter=Q(lease_token__isnull=False)),
        expired=Count("pk", filter=Q(lease_until__lt=now)),
        ready=Count("pk", filter=Q(ready_at__isnull=False)),
        overdue=Count("pk", filter=Q(ready_at__lt=now - grace)),
        never_leased=Count("pk", filter=Q(ready_at__isnull=False, status=Status.PENDING)),
        in_doubt=Count("pk", filter=Q(in_doubt__gt=0)),
    )
    if by_version:
        grouped = rows.values("flow_id", "version", "status").annotate(count=Count("pk"))
        counted["by_version"] = list(grouped.order_by("flow_id", "version", "status"))
    return counted
