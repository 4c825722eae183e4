"""The tables, for reading: the log and what is derived from it.

Rows are written by the stores alone; ``save``, ``update`` and ``delete`` raise
:class:`~loom_django.errors.ReadOnlyModelError` and name the call to use. Which fields are promised to stay
stands in the reference.
"""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

from django.db import models
from django.db.models import F, Q
from django.db.models.functions import Coalesce, Now
from django.utils.translation import gettext_lazy as _

from loom_django.errors import ReadOnlyModelError
from loom_django.fields import EncodedField, IdField
from loom_django.kernel.state import GATES, TERMINAL_STATUSES
from loom_django.querysets import ExecutionQuerySet, ReadOnlyQuerySet
from loom_django.statuses import ExecutionStatus


class ReadOnlyModel(models.Model):
    """A row that only the store writes."""

    written_by = "loom.start, loom.resume, loom.cancel and the other calls on loom"

    class Meta:
        abstract = True

    def save(self, *args: Any, **kwargs: Any) -> None:
        raise ReadOnlyModelError(self._meta.label, self.written_by)

    def delete(self, *args: Any, **kwargs: Any) -> tuple[int, dict[str, int]]:
        raise ReadOnlyModelError(self._meta.label, self.written_by)


# Plain text, so that the migration names no class of the kernel.
_OWNED = Q(status__in=["PENDING", "RUNNING"])
_LEFT = Q(status__in=["SUSPENDED", "COMPLETED", "FAILED", "CANCELLED", "CONTINUED"])
_READY = Q(ready_at__isnull=False, lease_token__isnull=True, lease_until__isnull=True)
_HELD = Q(ready_at__isnull=True, lease_token__isnull=False, lease_until__isnull=False)
_UNOWNED = Q(ready_at__isnull=True, lease_token__isnull=True, lease_until__isnull=True)


class Execution(ReadOnlyModel):
    """One run of a flow: the projection of its log, and who is to run it.

    Always exactly one of four, kept by a constraint: finished, parked (SUSPENDED), ready, held.
    """

    id = IdField(_("execution id"), primary_key=True)
    flow_id = models.CharField(_("flow"), max_length=255)
    version = models.IntegerField(_("version"), default=1)
    status = models.CharField(_("status"), max_length=16, choices=ExecutionStatus.choices)
    last_sequence = models.BigIntegerField(_("last sequence"))
    flow_hash = models.CharField(_("flow hash"), max_length=80, default="", blank=True)
    code_hash = models.CharField(_("code fingerprint"), max_length=255, default="", blank=True)
    created_at = models.DateTimeField(_("created"))
    updated_at = models.DateTimeField(_("updated"))
    finished_at = models.DateTimeField(_("finished"), null=True, blank=True)
    scheduled_at = models.DateTimeField(_("occurrence"), null=True, blank=True)
    current_step = models.TextField(_("current step"), default="", blank=True)
    in_doubt = models.IntegerField(_("effects in doubt"), default=0)
    waits = EncodedField(_("waits"), default="[]")
    waiting_on = models.CharField(_("waiting on"), max_length=255, default="", blank=True)
    error_type = models.CharField(_("error type"), max_length=255, default="", blank=True)
    error_message = models.TextField(_("error"), default="", blank=True)

    queue = models.CharField(_("queue"), max_length=100, default="default")
    priority = models.IntegerField(_("priority"), default=0)
    not_before = models.DateTimeField(_("not before"), null=True, blank=True)
    deadline = models.DateTimeField(_("deadline"), null=True, blank=True)
    parent_id = IdField(_("parent"), null=True, blank=True)
    chain = IdField(_("chain"), help_text=_("The id of the first execution of a continued chain."))
    subject_type = models.CharField(_("subject type"), max_length=100, default="", blank=True)
    subject_id = models.CharField(_("subject id"), max_length=255, default="", blank=True)
    attributes = models.JSONField(_("attributes"), default=dict)

    ready_at = models.DateTimeField(_("ready since"), null=True, blank=True)
    lease_owner = models.CharField(_("holder"), max_length=255, default="", blank=True)
    lease_token = models.BigIntegerField(_("lease token"), null=True, blank=True)
    lease_until = models.DateTimeField(_("lease until"), null=True, blank=True)

    objects = ExecutionQuerySet.as_manager()

    class Meta:
        db_table = "loom_execution"
        verbose_name = _("execution")
        verbose_name_plural = _("executions")
        default_permissions = ("view",)
        permissions = [
            ("view_payload", "Can see inputs, results and payloads"),
            ("resolve_step", "Can settle an effect in doubt"),
            ("resume_execution", "Can resume an execution"),
            ("cancel_execution", "Can cancel an execution"),
            ("recover_execution", "Can recover an execution"),
            ("retry_error", "Can retry an execution that is parked on an error"),
            ("retry_diverged", "Can retry an execution whose code diverged from its log"),
            ("move_execution", "Can move an execution to other code"),
            ("fork_execution", "Can start an execution over what another one had done"),
            ("rerun_execution", "Can start a failed execution again"),
        ]
        constraints = [
            models.CheckConstraint(
                name="loom_execution_one_of_four",
                condition=(_OWNED & (_READY | _HELD)) | (_LEFT & _UNOWNED),
            ),
        ]
        # Each append rewrites the row and checks each constraint, so there are few of both. No index holds a
        # column that every append changes (updated_at, last_sequence, current_step): on PostgreSQL one would
        # cost each append an entry in every index (no heap-only update).
        indexes = [
            # claim_ready: for each queue and priority the oldest that are ready.
            models.Index(
                fields=["queue", "priority", "ready_at"],
                name="loom_execution_ready",
                condition=Q(ready_at__isnull=False),
            ),
            # expired: leases by their end.
            models.Index(
                fields=["lease_until"], name="loom_execution_lease", condition=Q(lease_until__isnull=False)
            ),
            # Retention: of each status what has ended, longest ago first.
            models.Index(
                fields=["status", "finished_at", "id"],
                name="loom_execution_ended",
                condition=Q(finished_at__isnull=False),
            ),
            # The console's in-doubt queue.
            models.Index(fields=["created_at"], name="loom_execution_in_doubt", condition=Q(in_doubt__gt=0)),
            # What stands at a gate, for the console's overview: few, among all that are parked.
            models.Index(
                fields=["created_at"], name="loom_execution_gate", condition=Q(waiting_on__in=sorted(GATES))
            ),
            # The console's lists: newest first, by status, by flow.
            models.Index(fields=["-created_at", "id"], name="loom_execution_newest"),
            models.Index(fields=["status", "-created_at"], name="loom_execution_by_status"),
            models.Index(fields=["flow_id", "-created_at"], name="loom_execution_by_flow"),
            # Newest first, of one object: its admin page and the list behind it.
            models.Index(
                fields=["subject_type", "subject_id", "-created_at"],
                name="loom_execution_subject",
                condition=~Q(subject_type=""),
            ),
            models.Index(
                fields=["parent_id"], name="loom_execution_parent", condition=Q(parent_id__isnull=False)
            ),
            # Successors only: nearly every chain has one member, and that one is found by its id.
            models.Index(
                fields=["chain", "created_at"], name="loom_execution_chain", condition=~Q(chain=F("id"))
            ),
        ]

    def __str__(self) -> str:
        return str(self.pk)

    @property
    def is_finished(self) -> bool:
        return self.status in TERMINAL_STATUSES

    @property
    def pending_waits(self) -> list[dict[str, Any]]:
        """The waits of the newest park: ``id``, ``on``, ``key``, ``wake_at`` and ``since`` (microseconds)."""
        waits: list[dict[str, Any]] = json.loads(self.waits)
        return waits

    @property
    def in_doubt_steps(self) -> list[str]:
        """The ids of the steps that wait for a verdict."""
        return [wait["key"] for wait in self.pending_waits if wait["id"].startswith("in-doubt:")]


class Lease(Execution):
    """Who holds what: the executions that are under a lease."""

    class Meta:
        proxy = True
        verbose_name = _("lease")
        verbose_name_plural = _("leases")
        default_permissions = ("view",)


class Event(ReadOnlyModel):
    """One row of the log; :meth:`loom.history` gives the same as values."""

    pk = models.CompositePrimaryKey("execution_id", "sequence")
    execution_id = IdField(_("execution id"))
    sequence = models.BigIntegerField(_("sequence"))
    kind = models.CharField(_("kind"), max_length=255)
    payload = EncodedField(_("payload"))
    fence = models.BigIntegerField(_("fence"), null=True, blank=True)
    writer = models.BigIntegerField(_("writer"), default=0)
    is_kernel = models.BooleanField(_("kernel's own"), default=True)
    recorded_at = models.DateTimeField(_("recorded"), db_default=Now())

    objects = ReadOnlyQuerySet.as_manager()

    class Meta:
        db_table = "loom_event"
        verbose_name = _("event")
        verbose_name_plural = _("events")
        default_permissions = ("view",)

    def __str__(self) -> str:
        return f"{self.execution_id} {self.sequence} {self.kind}"


class Fence(ReadOnlyModel):
    """The fencing token of an execution, and the count of wakes sent to it."""

    execution_id = IdField(_("execution id"), primary_key=True)
    token = models.BigIntegerField(_("token"), default=0, db_default=0)
    wakes = models.BigIntegerField(_("wakes"), default=0, db_default=0)
    recoveries = models.IntegerField(_("recoveries"), default=0, db_default=0)
    recovered_sequence = models.BigIntegerField(_("recovered at sequence"), default=0, db_default=0)

    objects = ReadOnlyQuerySet.as_manager()

    class Meta:
        db_table = "loom_fence"
        verbose_name = _("fence")
        verbose_name_plural = _("fences")
        default_permissions = ("view",)

    def __str__(self) -> str:
        return f"{self.execution_id}: {self.token}"


class Timer(ReadOnlyModel):
    """A wake that is owed to an execution; due at ``not_before``, or at ``wake_at`` where that is empty.

    Until ``held_until`` it is in the hands of a timer loop. No index has that column: a claim writes none of them.
    """

    id = models.BigAutoField(primary_key=True)
    execution_id = IdField(_("execution id"))
    wake_at = models.DateTimeField(_("wake at"))
    redrive = models.SmallIntegerField(_("re-drive attempt"), null=True, blank=True)
    deadline = models.BooleanField(_("is a deadline"), default=False, db_default=False)
    not_before = models.DateTimeField(_("not before"), null=True, blank=True)
    held_until = models.DateTimeField(_("held until"), null=True, blank=True)
    tries = models.IntegerField(_("tries"), default=0, db_default=0)

    objects = ReadOnlyQuerySet.as_manager()

    class Meta:
        db_table = "loom_timer"
        verbose_name = _("timer")
        verbose_name_plural = _("timers")
        default_permissions = ("view",)
        permissions = [("wake_timer", "Can have a wake that is due tried now")]
        constraints = [
            models.UniqueConstraint(fields=["execution_id", "wake_at"], name="loom_timer_execution_wake")
        ]
        indexes = [models.Index(Coalesce("not_before", "wake_at"), name="loom_timer_due")]

    def __str__(self) -> str:
        return f"{self.execution_id} at {self.wake_at.isoformat()}"

    @property
    def kept_until(self) -> datetime | None:
        """Until when it was put off, or is held, after its time had come."""
        return self.held_until or self.not_before

    @property
    def due(self) -> datetime:
        """From when on a loop may take it."""
        return self.kept_until or self.wake_at


class Message(ReadOnlyModel):
    """One message of an inbox; addressed to the chain, taken by a commit of its receiver."""

    written_by = "loom.send"

    number = models.BigAutoField(primary_key=True)
    execution_id = IdField(_("chain"))
    name = models.CharField(_("name"), max_length=255)
    message_id = models.CharField(_("message id"), max_length=255)
    payload = EncodedField(_("payload"))
    sent_at = models.DateTimeField(_("sent"), db_default=Now())
    taken = models.BooleanField(_("taken"), default=False, db_default=False)
    wait = models.CharField(_("wait"), max_length=255, default="", db_default="", blank=True)
    principal = models.CharField(_("sent by"), max_length=255, default="", db_default="", blank=True)
    reason = models.TextField(_("reason"), default="", db_default="", blank=True)

    objects = ReadOnlyQuerySet.as_manager()

    class Meta:
        db_table = "loom_message"
        verbose_name = _("message")
        verbose_name_plural = _("messages")
        default_permissions = ("view",)
        permissions = [("send_message", "Can send a message to an execution")]
        constraints = [
            models.UniqueConstraint(fields=["execution_id", "message_id"], name="loom_message_once")
        ]
        indexes = [
            models.Index(
                fields=["execution_id", "name", "number"],
                name="loom_message_untaken",
                condition=Q(taken=False),
            )
        ]

    def __str__(self) -> str:
        return f"{self.execution_id} {self.name} {self.message_id}"


class ScheduleState(ReadOnlyModel):
    """What has been decided of a schedule; the schedule itself stands in code.

    Everything up to ``decided_until`` was started or skipped. ``flow_id``, ``cron`` and ``time_zone`` tell how it
    was declared when a service last looked.
    """

    written_by = "loom.pause_schedule, loom.resume_schedule, loom.trigger_schedule and the services"

    id = IdField(_("schedule"), primary_key=True)
    flow_id = models.CharField(_("flow"), max_length=255)
    cron = models.CharField(_("cron"), max_length=255)
    time_zone = models.CharField(_("time zone"), max_length=255)
    decided_until = models.DateTimeField(_("decided until"))
    revision = models.BigIntegerField(_("revision"), default=0, db_default=0)
    paused_at = models.DateTimeField(_("paused"), null=True, blank=True)
    last_execution_id = IdField(_("last run"), default="", db_default="", blank=True)
    skipped_at = models.DateTimeField(_("last skipped"), null=True, blank=True)
    skipped_why = models.CharField(_("why skipped"), max_length=32, default="", db_default="", blank=True)
    last_act = models.CharField(_("last act"), max_length=32, default="", db_default="", blank=True)
    acted_at = models.DateTimeField(_("acted"), null=True, blank=True)
    acted_by = models.CharField(_("acted by"), max_length=255, default="", db_default="", blank=True)
    act_reason = models.TextField(_("reason"), default="", db_default="", blank=True)

    objects = ReadOnlyQuerySet.as_manager()

    class Meta:
        db_table = "loom_schedule"
        verbose_name = _("schedule")
        verbose_name_plural = _("schedules")
        default_permissions = ("view",)
        permissions = [
            ("pause_schedule", "Can pause and resume a schedule"),
            ("trigger_schedule", "Can start a schedule's flow now"),
        ]

    def __str__(self) -> str:
        return str(self.pk)


class Node(ReadOnlyModel):
    """A loop that said it was alive: a hint for whom to hand work to, and for whoever looks for one."""

    written_by = "run_loom_worker and run_loom_timers"

    name = models.CharField(_("name"), max_length=255, primary_key=True)
    kind = models.CharField(_("kind"), max_length=32)
    seen_at = models.DateTimeField(_("last seen"))

    class Meta:
        db_table = "loom_node"
        verbose_name = _("node")
        verbose_name_plural = _("nodes")
        default_permissions = ("view",)

    def __str__(self) -> str:
        return f"{self.kind} {self.name}"


class Queue(ReadOnlyModel):
    """A queue with limits; claims of it meet here."""

    written_by = "run_loom_worker"

    name = models.CharField(_("name"), max_length=100, primary_key=True)
    next_at = models.DateTimeField(
        _("rate spent until"),
        null=True,
        blank=True,
        help_text=_("From when on the queue may begin a whole second's worth at once again."),
    )

    class Meta:
        db_table = "loom_queue"
        verbose_name = _("queue")
        verbose_name_plural = _("queues")
        default_permissions = ()

    def __str__(self) -> str:
        return self.name


class Snapshot(ReadOnlyModel):
    """The fold of a long log at one of its events, kept so that a resume reads only what came after.

    It may go at any time: what is not there, or does not fit, is read from the log. ``format`` tells the code that
    wrote it, ``seal`` binds it to the log.
    """

    written_by = "the engine"

    pk = models.CompositePrimaryKey("execution_id", "format")
    execution_id = IdField(_("execution id"))
    format = models.CharField(_("format"), max_length=64)
    sequence = models.BigIntegerField(_("sequence"))
    seal = models.CharField(_("seal"), max_length=64)
    body = models.TextField(_("state"))
    taken_at = models.DateTimeField(_("taken"), db_default=Now())

    class Meta:
        db_table = "loom_snapshot"
        verbose_name = _("snapshot")
        verbose_name_plural = _("snapshots")
        default_permissions = ()

    def __str__(self) -> str:
        return f"{self.execution_id} {self.sequence}"


class Marker(ReadOnlyModel):
    """How far a piece of work has come that is done once for all rows, such as a backfill."""

    written_by = "the command that does the work"

    name = models.CharField(_("name"), max_length=64, primary_key=True)
    position = IdField(_("position"), default="", db_default="", blank=True)
    done_at = models.DateTimeField(_("done"), null=True, blank=True)

    class Meta:
        db_table = "loom_marker"
        verbose_name = _("marker")
        verbose_name_plural = _("markers")
        default_permissions = ()

    def __str__(self) -> str:
        return self.name
