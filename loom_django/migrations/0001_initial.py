"""The tables of the log and of what is derived from it."""

from typing import Any

import django.db.models.functions.comparison
import django.db.models.functions.datetime
from django.db import migrations, models

import loom_django.fields

# Rows of an execution and of its fence are rewritten in place: room in the page keeps their indexes untouched.
# Timers come and go: dead ones must leave the index of what is due, or each look for the next walks over them.
STORAGE = [
    "ALTER TABLE loom_execution SET (fillfactor = 70)",
    "ALTER TABLE loom_fence SET (fillfactor = 70)",
    "ALTER TABLE loom_timer SET (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000, "
    "vacuum_index_cleanup = on)",
]


def set_storage(apps: Any, schema_editor: Any) -> None:
    """PostgreSQL only; SQLite has nothing of the kind."""
    if schema_editor.connection.vendor == "postgresql":
        for statement in STORAGE:
            schema_editor.execute(statement)


class Migration(migrations.Migration):
    initial = True

    dependencies = []

    operations = [
        migrations.CreateModel(
            name="Event",
            fields=[
                (
                    "pk",
                    models.CompositePrimaryKey(
                        "execution_id",
                        "sequence",
                        blank=True,
                        editable=False,
                        primary_key=True,
                        serialize=False,
                    ),
                ),
                ("execution_id", loom_django.fields.IdField(max_length=255, verbose_name="execution id")),
                ("sequence", models.BigIntegerField(verbose_name="sequence")),
                ("kind", models.CharField(max_length=255, verbose_name="kind")),
                ("payload", loom_django.fields.EncodedField(verbose_name="payload")),
                ("fence", models.BigIntegerField(blank=True, null=True, verbose_name="fence")),
                ("writer", models.BigIntegerField(default=0, verbose_name="writer")),
                ("is_kernel", models.BooleanField(default=True, verbose_name="kernel's own")),
                (
                    "recorded_at",
                    models.DateTimeField(
                        db_default=django.db.models.functions.datetime.Now(), verbose_name="recorded"
                    ),
                ),
            ],
            options={
                "verbose_name": "event",
                "verbose_name_plural": "events",
                "db_table": "loom_event",
                "default_permissions": ("view",),
            },
        ),
        migrations.CreateModel(
            name="Fence",
            fields=[
                (
                    "execution_id",
                    loom_django.fields.IdField(
                        max_length=255, primary_key=True, serialize=False, verbose_name="execution id"
                    ),
                ),
                ("token", models.BigIntegerField(db_default=0, default=0, verbose_name="token")),
                ("wakes", models.BigIntegerField(db_default=0, default=0, verbose_name="wakes")),
                ("recoveries", models.IntegerField(db_default=0, default=0, verbose_name="recoveries")),
                (
                    "recovered_sequence",
                    models.BigIntegerField(db_default=0, default=0, verbose_name="recovered at sequence"),
                ),
            ],
            options={
                "verbose_name": "fence",
                "verbose_name_plural": "fences",
                "db_table": "loom_fence",
                "default_permissions": ("view",),
            },
        ),
        migrations.CreateModel(
            name="Execution",
            fields=[
                (
                    "id",
                    loom_django.fields.IdField(
                        max_length=255, primary_key=True, serialize=False, verbose_name="execution id"
                    ),
                ),
                ("flow_id", models.CharField(max_length=255, verbose_name="flow")),
                ("version", models.IntegerField(default=1, verbose_name="version")),
                (
                    "status",
                    models.CharField(
                        choices=[
                            ("PENDING", "Pending"),
                            ("RUNNING", "Running"),
                            ("SUSPENDED", "Suspended"),
                            ("COMPLETED", "Completed"),
                            ("FAILED", "Failed"),
                            ("CANCELLED", "Cancelled"),
                            ("CONTINUED", "Continued"),
                        ],
                        max_length=16,
                        verbose_name="status",
                    ),
                ),
                ("last_sequence", models.BigIntegerField(verbose_name="last sequence")),
                (
                    "flow_hash",
                    models.CharField(blank=True, default="", max_length=80, verbose_name="flow hash"),
                ),
                (
                    "code_hash",
                    models.CharField(blank=True, default="", max_length=255, verbose_name="code fingerprint"),
                ),
                ("created_at", models.DateTimeField(verbose_name="created")),
                ("updated_at", models.DateTimeField(verbose_name="updated")),
                ("finished_at", models.DateTimeField(blank=True, null=True, verbose_name="finished")),
                ("scheduled_at", models.DateTimeField(blank=True, null=True, verbose_name="occurrence")),
                ("current_step", models.TextField(blank=True, default="", verbose_name="current step")),
                ("in_doubt", models.IntegerField(default=0, verbose_name="effects in doubt")),
                ("waits", loom_django.fields.EncodedField(default="[]", verbose_name="waits")),
                (
                    "waiting_on",
                    models.CharField(blank=True, default="", max_length=255, verbose_name="waiting on"),
                ),
                (
                    "error_type",
                    models.CharField(blank=True, default="", max_length=255, verbose_name="error type"),
                ),
                ("error_message", models.TextField(blank=True, default="", verbose_name="error")),
                ("queue", models.CharField(default="default", max_length=100, verbose_name="queue")),
                ("priority", models.IntegerField(default=0, verbose_name="priority")),
                ("not_before", models.DateTimeField(blank=True, null=True, verbose_name="not before")),
                ("deadline", models.DateTimeField(blank=True, null=True, verbose_name="deadline")),
                (
                    "parent_id",
                    loom_django.fields.IdField(blank=True, max_length=255, null=True, verbose_name="parent"),
                ),
                (
                    "chain",
                    loom_django.fields.IdField(
                        help_text="The id of the first execution of a continued chain.",
                        max_length=255,
                        verbose_name="chain",
                    ),
                ),
                (
                    "subject_type",
                    models.CharField(blank=True, default="", max_length=100, verbose_name="subject type"),
                ),
                (
                    "subject_id",
                    models.CharField(blank=True, default="", max_length=255, verbose_name="subject id"),
                ),
                ("attributes", models.JSONField(default=dict, verbose_name="attributes")),
                ("ready_at", models.DateTimeField(blank=True, null=True, verbose_name="ready since")),
                (
                    "lease_owner",
                    models.CharField(blank=True, default="", max_length=255, verbose_name="holder"),
                ),
                ("lease_token", models.BigIntegerField(blank=True, null=True, verbose_name="lease token")),
                ("lease_until", models.DateTimeField(blank=True, null=True, verbose_name="lease until")),
            ],
            options={
                "verbose_name": "execution",
                "verbose_name_plural": "executions",
                "db_table": "loom_execution",
                "permissions": [
                    ("view_payload", "Can see inputs, results and payloads"),
                    ("resolve_step", "Can settle an effect in doubt"),
                    ("resume_execution", "Can resume an execution"),
                    ("cancel_execution", "Can cancel an execution"),
                    ("recover_execution", "Can recover an execution"),
                    ("retry_error", "Can retry an execution that is parked on an error"),
                ],
                "default_permissions": ("view",),
                "indexes": [
                    models.Index(
                        condition=models.Q(("ready_at__isnull", False)),
                        fields=["priority", "ready_at", "queue"],
                        name="loom_execution_ready",
                    ),
                    models.Index(
                        condition=models.Q(("lease_until__isnull", False)),
                        fields=["lease_until"],
                        name="loom_execution_lease",
                    ),
                    models.Index(
                        condition=models.Q(("in_doubt__gt", 0)),
                        fields=["created_at"],
                        name="loom_execution_in_doubt",
                    ),
                    models.Index(fields=["-created_at", "id"], name="loom_execution_newest"),
                    models.Index(fields=["status", "-created_at"], name="loom_execution_by_status"),
                    models.Index(fields=["flow_id", "-created_at"], name="loom_execution_by_flow"),
                    models.Index(
                        condition=models.Q(("subject_type", ""), _negated=True),
                        fields=["subject_type", "subject_id"],
                        name="loom_execution_subject",
                    ),
                    models.Index(
                        condition=models.Q(("parent_id__isnull", False)),
                        fields=["parent_id"],
                        name="loom_execution_parent",
                    ),
                    models.Index(
                        condition=models.Q(("chain", models.F("id")), _negated=True),
                        fields=["chain"],
                        name="loom_execution_chain",
                    ),
                ],
                "constraints": [
                    models.CheckConstraint(
                        condition=models.Q(
                            models.Q(
                                ("status__in", ["PENDING", "RUNNING"]),
                                models.Q(
                                    models.Q(
                                        ("lease_token__isnull", True),
                                        ("lease_until__isnull", True),
                                        ("ready_at__isnull", False),
                                    ),
                                    models.Q(
                                        ("lease_token__isnull", False),
                                        ("lease_until__isnull", False),
                                        ("ready_at__isnull", True),
                                    ),
                                    _connector="OR",
                                ),
                            ),
                            models.Q(
                                (
                                    "status__in",
                                    ["SUSPENDED", "COMPLETED", "FAILED", "CANCELLED", "CONTINUED"],
                                ),
                                ("lease_token__isnull", True),
                                ("lease_until__isnull", True),
                                ("ready_at__isnull", True),
                            ),
                            _connector="OR",
                        ),
                        name="loom_execution_one_of_four",
                    )
                ],
            },
        ),
        migrations.CreateModel(
            name="Lease",
            fields=[],
            options={
                "verbose_name": "lease",
                "verbose_name_plural": "leases",
                "proxy": True,
                "default_permissions": ("view",),
                "indexes": [],
                "constraints": [],
            },
            bases=("loom.execution",),
        ),
        migrations.CreateModel(
            name="Message",
            fields=[
                ("number", models.BigAutoField(primary_key=True, serialize=False)),
                ("execution_id", loom_django.fields.IdField(max_length=255, verbose_name="chain")),
                ("name", models.CharField(max_length=255, verbose_name="name")),
                ("message_id", models.CharField(max_length=255, verbose_name="message id")),
                ("payload", loom_django.fields.EncodedField(verbose_name="payload")),
                (
                    "sent_at",
                    models.DateTimeField(
                        db_default=django.db.models.functions.datetime.Now(), verbose_name="sent"
                    ),
                ),
                ("taken", models.BooleanField(db_default=False, default=False, verbose_name="taken")),
                (
                    "wait",
                    models.CharField(
                        blank=True, db_default="", default="", max_length=255, verbose_name="wait"
                    ),
                ),
            ],
            options={
                "verbose_name": "message",
                "verbose_name_plural": "messages",
                "db_table": "loom_message",
                "default_permissions": ("view",),
                "indexes": [
                    models.Index(
                        condition=models.Q(("taken", False)),
                        fields=["execution_id", "name", "number"],
                        name="loom_message_untaken",
                    )
                ],
                "constraints": [
                    models.UniqueConstraint(fields=("execution_id", "message_id"), name="loom_message_once")
                ],
            },
        ),
        migrations.CreateModel(
            name="Timer",
            fields=[
                ("id", models.BigAutoField(primary_key=True, serialize=False)),
                ("execution_id", loom_django.fields.IdField(max_length=255, verbose_name="execution id")),
                ("wake_at", models.DateTimeField(verbose_name="wake at")),
                ("redrive", models.SmallIntegerField(blank=True, null=True, verbose_name="re-drive attempt")),
                (
                    "deadline",
                    models.BooleanField(db_default=False, default=False, verbose_name="is a deadline"),
                ),
                ("not_before", models.DateTimeField(blank=True, null=True, verbose_name="not before")),
                ("tries", models.IntegerField(db_default=0, default=0, verbose_name="tries")),
            ],
            options={
                "verbose_name": "timer",
                "verbose_name_plural": "timers",
                "db_table": "loom_timer",
                "default_permissions": ("view",),
                "indexes": [
                    models.Index(
                        django.db.models.functions.comparison.Coalesce("not_before", "wake_at"),
                        name="loom_timer_due",
                    )
                ],
                "constraints": [
                    models.UniqueConstraint(
                        fields=("execution_id", "wake_at"), name="loom_timer_execution_wake"
                    )
                ],
            },
        ),
        migrations.RunPython(set_storage, migrations.RunPython.noop),
    ]
