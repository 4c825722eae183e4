"""Querysets that name the states of executions; read-only, as their models are."""

from __future__ import annotations

from typing import Any

from django.db import models
from django.db.models.functions import Now
from django.db.models.lookups import In

from loom_django.errors import ReadOnlyModelError
from loom_django.kernel.state import GATES, ON_DIVERGED, TERMINAL_STATUSES, Status


class _InFew(In):
    """``IN`` where few rows are meant: SQLite's statistics tell no value from another, and it would read all rows."""

    def as_sqlite(self, compiler: Any, connection: Any) -> Any:
        sql, params = self.as_sql(compiler, connection)
        return f"likelihood({sql}, 0.001)", params


class ReadOnlyQuerySet(models.QuerySet[Any]):
    """Refuses every write, naming the way to do it."""

    def _refuse(self) -> ReadOnlyModelError:
        return ReadOnlyModelError(
            self.model._meta.label, getattr(self.model, "written_by", "the calls on loom")
        )

    def create(self, **kwargs: Any) -> Any:
        raise self._refuse()

    def update(self, **kwargs: Any) -> int:
        raise self._refuse()

    def delete(self) -> tuple[int, dict[str, int]]:
        raise self._refuse()

    def bulk_create(self, *args: Any, **kwargs: Any) -> list[Any]:
        raise self._refuse()

    def bulk_update(self, *args: Any, **kwargs: Any) -> int:
        raise self._refuse()


class ExecutionQuerySet(ReadOnlyQuerySet):
    """Executions by what they are doing."""

    def running(self) -> ExecutionQuerySet:
        return self.filter(status=Status.RUNNING)

    def suspended(self) -> ExecutionQuerySet:
        return self.filter(status=Status.SUSPENDED)

    def failed(self) -> ExecutionQuerySet:
        return self.filter(status=Status.FAILED)

    def live(self) -> ExecutionQuerySet:
        """Not finished. By the statuses that are wanted: the index by status finds them among what has ended."""
        alive = [str(status) for status in Status if status not in TERMINAL_STATUSES]
        return self.filter(_InFew(models.F("status"), alive))

    def held(self) -> ExecutionQuerySet:
        """Under a lease, expired or not."""
        return self.filter(lease_token__isnull=False)

    def expired(self) -> ExecutionQuerySet:
        """Under a lease that ended by the database's clock."""
        return self.filter(lease_until__lt=Now())

    def ready(self) -> ExecutionQuerySet:
        """Nobody runs it, somebody should."""
        return self.filter(ready_at__isnull=False)

    def in_doubt(self) -> ExecutionQuerySet:
        """An effect of it waits for a verdict."""
        return self.filter(in_doubt__gt=0)

    def diverged(self) -> ExecutionQuerySet:
        """Parked because their bodies did not ask for what their logs hold."""
        return self.suspended().filter(waiting_on=ON_DIVERGED)

    def at_gate(self) -> ExecutionQuerySet:
        """Parked because its flow cannot go on: changed code, an error of the body, or too many recoveries."""
        return self.filter(waiting_on__in=sorted(GATES))

    def of_flow(self, flow_id: str) -> ExecutionQuerySet:
        return self.filter(flow_id=flow_id)

    def for_subject(self, subject: models.Model) -> ExecutionQuerySet:
        """The executions that were started with ``subject=`` this object; none, if it is not saved."""
        if subject.pk is None:
            return self.none()
        return self.filter(subject_type=subject._meta.label_lower, subject_id=str(subject.pk))
