from typing import Any

from django.db import migrations, models

# A claim rewrites all timers of a page within moments: with room for all of them there it touches no index. What lies in
# full pages is rewritten elsewhere, once; the setting is for pages to come.
STORAGE = "ALTER TABLE loom_timer SET (fillfactor = 50)"


def set_storage(apps: Any, schema_editor: Any) -> None:
    """PostgreSQL only; SQLite has nothing of the kind."""
    if schema_editor.connection.vendor == "postgresql":
        schema_editor.execute(STORAGE)


class Migration(migrations.Migration):
    dependencies = [
        ("loom", "0013_snapshot"),
    ]

    operations = [
        migrations.AddField(
            model_name="timer",
            name="held_until",
            field=models.DateTimeField(blank=True, null=True, verbose_name="held until"),
        ),
        migrations.RunPython(set_storage, migrations.RunPython.noop),
    ]
