"""The recipe of docs/explanation/scale.md: a log in partitions, one of which is dropped."""

from __future__ import annotations

from pathlib import Path

import pytest
from django.db import DatabaseError, connection, transaction

from loom_django.stores import store_for
from loom_django.stores.base import SequenceOccupied
from loom_django.testing.conformance import Log, held_by

DOCS = Path(__file__).resolve().parents[2] / "docs" / "explanation"

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.skipif(connection.vendor != "postgresql", reason="of PostgreSQL alone"),
]


def run(name: str) -> None:
    """A file of the recipe, in the test's transaction instead of its own."""
    text = (DOCS / name).read_text().removeprefix("begin;").removesuffix("commit;\n")
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute(text)


def test_a_log_in_partitions_and_one_that_is_dropped():
    """Logs move and go on, sequences stay unique, and a month goes as a whole, if all of it has ended."""
    store = store_for("default")
    with transaction.atomic():
        old, new, other = (Log(key, "flow") for key in ("2026-11-03-a", "2026-12-01-b", "elsewhere"))
        for log in (old, other):
            store.append(log.start(held_by()))
        run("partitioned_log.sql")
        store.append(new.start(held_by()))
        for log in (old, new, other):
            late = log.fork()
            store.append(log.commit())
            with pytest.raises(SequenceOccupied):
                store.append(late.commit())
        with connection.cursor() as cursor:
            cursor.execute("select tableoid::regclass::text, count(*) from loom_event group by 1 order by 1")
            assert cursor.fetchall() == [
                ("loom_event_2026_11", 2), ("loom_event_2026_12", 2), ("loom_event_rest", 2),
            ]  # fmt: skip
        with pytest.raises(DatabaseError, match="have not ended"):
            run("pruned_partition.sql")
        store.append(old.end())
        run("pruned_partition.sql")
        assert [len(store.read(log.id)) for log in (old, new, other)] == [0, 2, 2]
        assert store.status(old.id) is None
        transaction.set_rollback(True)
