"""The migration makes what the stores rely on, on both databases, forwards and back."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from django.apps import apps
from django.core.management import call_command
from django.db import IntegrityError, connection, transaction
from django.db.migrations.executor import MigrationExecutor

from loom_django.models import Event, Execution, Fence, Message, Timer
from loom_django.stores import store_for
from loom_django.testing.conformance import StoreConformance, held_by

TABLES = {model._meta.db_table for model in (Event, Execution, Fence, Message, Timer)}


def test_models_and_migrations_agree(db, capsys):
    """makemigrations finds nothing to do."""
    call_command("makemigrations", "loom", check=True, dry_run=True)
    assert "No changes" in capsys.readouterr().out


@pytest.mark.django_db(transaction=True)
def test_it_goes_back_and_forth():
    """Backwards all tables are gone, forwards they are there and a store works on them."""
    leaf = MigrationExecutor(connection).loader.graph.leaf_nodes("loom")
    try:
        MigrationExecutor(connection).migrate([("loom", None)])
        assert not TABLES & set(connection.introspection.table_names())
    finally:
        MigrationExecutor(connection).migrate(leaf)
        # Permissions and content types went with the tables.
        call_command("migrate", verbosity=0)
    assert set(connection.introspection.table_names()) >= TABLES
    kit = StoreConformance()
    kit.make_store = lambda: store_for("default")
    kit.setup_method()
    assert kit.owner(kit.running()) == "held"


@pytest.mark.parametrize(
    "model", list(apps.get_app_config("loom").get_models()), ids=lambda model: model.__name__
)
def test_every_constraint_and_index_has_a_name_of_ours(model):
    """Names are the same on every database, so that an error or a plan names them."""
    for one in (*model._meta.indexes, *model._meta.constraints):
        assert one.name.startswith("loom_")


@pytest.mark.django_db
class TestConstraints:
    def insert(self, **columns):
        at = datetime(2026, 1, 1, tzinfo=UTC)
        row = Execution(
            id="e", flow_id="f", status="RUNNING", last_sequence=1, created_at=at, updated_at=at, chain="e"
        )
        for name, value in columns.items():
            setattr(row, name, value)
        with transaction.atomic():
            row.save_base(force_insert=True)

    @pytest.mark.parametrize(
        "columns",
        [
            {},  # runs, and nobody is to run it
            {"ready_at": True, "lease_until": True, "lease_token": 1},  # both ready and held
            {"lease_until": True},  # a lease without a token
            {"lease_token": 1},  # a token without an end
            {"status": "SUSPENDED", "ready_at": True},  # parked and ready
            {"status": "COMPLETED", "lease_until": True, "lease_token": 1},  # over and held
            {"status": "PENDING"},  # started, and nobody is to run it
            {"status": "ANYTHING"},  # no status at all
        ],
    )
    def test_none_or_two_of_four_is_refused(self, columns):
        """The database itself keeps exactly one of finished, parked, ready, held."""
        at = datetime(2026, 1, 1, tzinfo=UTC)
        with pytest.raises(IntegrityError, match="loom_execution_one_of_four"):
            self.insert(**{name: at if value is True else value for name, value in columns.items()})

    @pytest.mark.parametrize(
        "columns",
        [
            {"ready_at": True},
            {"lease_until": True, "lease_token": 1},
            {"status": "SUSPENDED"},
            {"status": "CONTINUED"},
        ],
    )
    def test_each_of_four_is_taken(self, columns):
        """Ready, held, parked, finished."""
        at = datetime(2026, 1, 1, tzinfo=UTC)
        self.insert(**{name: at if value is True else value for name, value in columns.items()})

    def test_a_sequence_is_unique_in_the_database(self):
        """The last backstop, below everything that a store does."""
        statement = (
            "insert into loom_event (execution_id, sequence, kind, payload, writer, is_kernel)"
            " values ('e', 1, 'X', '{}', 1, %s)"
        )
        with connection.cursor() as cursor:
            cursor.execute(statement, [True])
            with pytest.raises(IntegrityError), transaction.atomic():
                cursor.execute(statement, [True])

    def test_an_event_is_stamped_by_the_database(self):
        """A row without recorded_at gets the database's clock."""
        with connection.cursor() as cursor:
            cursor.execute(
                "insert into loom_event (execution_id, sequence, kind, payload, writer, is_kernel)"
                " values ('e', 1, 'X', '{}', 1, %s)",
                [True],
            )
        recorded = Event.objects.get(execution_id="e").recorded_at
        assert abs(recorded - datetime.now(UTC)) < timedelta(minutes=5)


@pytest.mark.django_db(transaction=True)
class TestRowsThroughModels(StoreConformance):
    """What a store writes, Django's models read."""

    def make_store(self):
        return store_for("default")

    def test_instants_and_texts_are_the_same(self):
        """Times, encoded columns and defaults come back through the ORM as the store wrote them."""
        at = datetime(2026, 5, 6, 7, 8, 9, 123456, tzinfo=UTC)
        log = self.log()
        start = log.start(
            held_by("me", 7),
            queue="q",
            priority=3,
            deadline=at,
            attributes='{"a": [1]}',
            subject_type="shop.order",
        )
        self.store.append(start)
        row = Execution.objects.get(pk=log.id)
        assert (row.queue, row.priority, row.deadline, row.attributes) == ("q", 3, at, {"a": [1]})
        assert (row.subject_type, row.chain, row.flow_id, row.version) == (
            "shop.order",
            log.id,
            self.flow_id,
            1,
        )
        assert (row.lease_owner, row.lease_token, row.ready_at) == ("me", 7, None)
        lease = self.store.held(log.id)
        assert lease is not None
        assert row.lease_until == lease.until
        assert row.created_at == datetime(2023, 11, 14, 22, 13, 20, 1, tzinfo=UTC)
        event = Event.objects.get(execution_id=log.id, sequence=1)
        assert event.payload == start.events[0].body
        assert event.recorded_at == self.store.read(log.id)[0].recorded_at

    def test_filters_find_them(self):
        """Django's comparisons with its own idea of an instant agree with the store's."""
        log = self.started(held_by())
        before = self.store.held(log.id)
        assert before is not None
        assert Execution.objects.filter(lease_until=before.until).exists()
        assert Execution.objects.filter(lease_until__lt=before.until + timedelta(microseconds=1)).exists()
        assert not Execution.objects.filter(lease_until__lt=before.until).exists()
        assert not Execution.objects.expired().exists()
        assert Execution.objects.held().count() == 1


@pytest.mark.django_db
class TestPostgres:
    @pytest.fixture(autouse=True)
    def _postgres_alone(self):
        if connection.vendor != "postgresql":
            pytest.skip("of PostgreSQL alone")

    def rows(self, sql):
        with connection.cursor() as cursor:
            cursor.execute(sql)
            return cursor.fetchall()

    def test_ids_compare_byte_by_byte(self):
        """Whatever the database's collation is, the order of locks is the same everywhere."""
        found = self.rows(
            "select table_name, column_name from information_schema.columns"
            " where table_name like 'loom_%%' and collation_name = 'C'"
        )
        assert {(table, column) for table, column in found} >= {
            ("loom_event", "execution_id"),
            ("loom_execution", "id"),
            ("loom_execution", "chain"),
            ("loom_execution", "parent_id"),
            ("loom_fence", "execution_id"),
            ("loom_message", "execution_id"),
            ("loom_timer", "execution_id"),
        }

    def test_the_log_has_one_index(self):
        """Each event costs one entry; Django's index for LIKE is not there."""
        assert self.rows(
            "select indexname from pg_indexes where tablename in ('loom_event', 'loom_fence')"
        ) == [
            ("loom_event_pkey",),
            ("loom_fence_pkey",),
        ]

    def test_payloads_keep_their_order(self):
        """json, not jsonb."""
        found = self.rows("select data_type from information_schema.columns where column_name = 'payload'")
        assert set(found) == {("json",)}

    def test_no_index_holds_what_every_append_changes(self):
        """A step's append is a heap-only update of its execution's row."""
        definitions = [
            row[0] for row in self.rows("select indexdef from pg_indexes where tablename = 'loom_execution'")
        ]
        assert len(definitions) > 5
        for column in ("updated_at", "last_sequence", "current_step"):
            assert not [text for text in definitions if column in text]

    def test_pages_have_room(self):
        """For rows that are rewritten in place, and timers are vacuumed by number and not by share."""
        options = dict(
            self.rows(
                "select relname, reloptions from pg_class"
                " where relname in ('loom_execution', 'loom_fence', 'loom_timer')"
            )
        )
        assert options["loom_execution"] == ["fillfactor=70"]
        assert options["loom_fence"] == ["fillfactor=70"]
        assert {"autovacuum_vacuum_scale_factor=0", "fillfactor=50"} < set(options["loom_timer"])
