"""Indexes for looking executions up by what they are about: their subject, and their attributes."""

from typing import Any

from django.db import migrations, models
from django.db.models import Q

ATTRIBUTES = """
create index loom_execution_attributes on loom_execution using gin (attributes jsonb_path_ops)
where attributes <> '{}'
"""


def index_attributes(apps: Any, schema_editor: Any) -> None:
    """PostgreSQL alone has such an index; who uses no attributes pays nothing for it."""
    if schema_editor.connection.vendor == "postgresql":
        schema_editor.execute(ATTRIBUTES)


def drop_index(apps: Any, schema_editor: Any) -> None:
    if schema_editor.connection.vendor == "postgresql":
        schema_editor.execute("drop index loom_execution_attributes")


class Migration(migrations.Migration):
    dependencies = [
        ("loom", "0009_diverged"),
    ]

    operations = [
        migrations.RemoveIndex(model_name="execution", name="loom_execution_subject"),
        migrations.AddIndex(
            model_name="execution",
            index=models.Index(
                condition=~Q(subject_type=""),
                fields=["subject_type", "subject_id", "-created_at"],
                name="loom_execution_subject",
            ),
        ),
        migrations.RunPython(index_attributes, drop_index),
    ]
