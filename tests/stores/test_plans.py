"""What a look for work costs: index probes, however much lies behind, beside or ahead of what is wanted."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import pytest
from django.db import connection, models, transaction
from django.test.utils import CaptureQueriesContext

from loom_django.kernel.state import Status
from loom_django.models import Execution
from loom_django.stores import store_for
from loom_django.stores.base import Ended, Known, Ownership, QueueLimits
from loom_django.testing.conformance import StoreConformance
from tests.crash.kit import on_postgresql

pytestmark = pytest.mark.django_db(transaction=True)

# Ten million in the fault that this is about; what an index makes of them is the same.
TIMERS = 200_000
READY = 3_000
DUE = 5_000
BATCH = 1_000
# Pages that a look may touch: a few for each probe of an index, and those of the catalogue.
MOST_PAGES = 60


def add_timers(count: int, *, ahead: int) -> None:
    """Timer rows a millisecond apart, the first one so many seconds from now."""
    now, rows = "now()", f"generate_series(1, {count}) as n"
    at = f"{now} + interval '{ahead} seconds' + n * interval '1 millisecond'"
    name = "'sleeper-' || n"
    if not on_postgresql():
        rows = (
            f"(with recursive s(n) as (select 1 union all select n + 1 from s limit {count}) select n from s)"
        )
        at = f"strftime('%Y-%m-%d %H:%M:%f', 'now', '{ahead} seconds', (n * 0.001) || ' seconds')"
    with connection.cursor() as cursor:
        cursor.execute(
            "insert into loom_timer (execution_id, wake_at, deadline, tries) "
            f"select {name}, {at}, {'false, 0' if on_postgresql() else '0, 0'} from {rows}"
        )
    analyze()


def analyze() -> None:
    with connection.cursor() as cursor:
        cursor.execute("vacuum analyze loom_timer" if on_postgresql() else "analyze")
        if on_postgresql():
            cursor.execute("vacuum analyze loom_execution")


def walks(look: Callable[[], Any]) -> list[str]:
    """Where the statements of a look walk over a whole table; on PostgreSQL the pages are counted as well."""
    with CaptureQueriesContext(connection) as sent:
        look()
    found: list[str] = []
    for sql in [
        query["sql"] for query in sent.captured_queries if re.search("(?i)select|update", query["sql"])
    ]:
        found += _walks_on_postgresql(sql) if on_postgresql() else _walks_on_sqlite(sql)
    return found


def _walks_on_postgresql(sql: str) -> list[str]:
    with connection.cursor() as cursor:
        cursor.execute("begin")
        try:
            cursor.execute(f"explain (analyze, buffers, format json) {sql}")
            plan = cursor.fetchone()[0]
        finally:
            cursor.execute("rollback")
    (top,) = plan if isinstance(plan, list) else json.loads(plan)
    pages = top["Plan"]["Shared Hit Blocks"] + top["Plan"]["Shared Read Blocks"]
    found = [node["Relation Name"] for node in _nodes(top["Plan"]) if _is_walk(node)]
    return found + ([f"{pages} pages: {sql}"] if pages > MOST_PAGES else [])


def seq_scans() -> int:
    """Walks over a whole table of timers or executions, so far in this transaction."""
    with connection.cursor() as cursor:
        cursor.execute(
            "select sum(seq_scan) from pg_stat_xact_user_tables where relname in ('loom_timer', 'loom_execution')"
        )
        return int(cursor.fetchone()[0])


def _nodes(node: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield node
    for below in node.get("Plans", ()):
        yield from _nodes(below)


def _is_walk(node: dict[str, Any]) -> bool:
    """True where a whole table is read that has more than a page or two of rows."""
    read = (node["Actual Rows"] + node.get("Rows Removed by Filter", 0)) * node["Actual Loops"]
    return node["Node Type"] == "Seq Scan" and node["Relation Name"].startswith("loom_") and read > 100


def _walks_on_sqlite(sql: str) -> list[str]:
    with connection.cursor() as cursor:
        cursor.execute("explain query plan " + sql.replace("%", "%%"))
        steps = [row[3] for row in cursor.fetchall()]
    sorted_rows = "TEMP B-TREE" if "lanes" not in sql else "lanes are sorted, and they are few"
    return [step for step in steps if re.match(r"SCAN (?:x|t|loom_\w+)$", step) or sorted_rows in step]


class TestPlans(StoreConformance):
    def make_store(self) -> Any:
        return store_for("default")

    def due(self, limit: int = 50, **options: Any) -> int:
        known = Known({"f": 1})
        return len(self.store.claim_due(limit=limit, hold=60, known=known, redrive=True, **options))

    def claim(self, **options: Any) -> int:
        lease: dict[str, Any] = {"owner": "me", "token": 7, "ttl": 60, "known": self.known}
        return len(self.store.claim_ready(**{**lease, "limit": 10, **options}))

    def test_a_poll_with_nothing_due_is_a_probe(self) -> None:
        """However many timers are ahead; so is the look for the one that comes next."""
        add_timers(TIMERS, ahead=3600)
        self.store.upcoming()
        assert walks(self.due) == []
        assert walks(self.store.upcoming) == []
        assert self.due() == 0

    def test_a_batch_of_due_timers_costs_what_the_batch_costs(self) -> None:
        """Counted in statements: each batch one look (on SQLite, one transaction with a second one), each row once."""
        add_timers(DUE, ahead=-3600)
        with CaptureQueriesContext(connection) as sent:
            batches = [self.due(BATCH) for _ in range(DUE // BATCH + 1)]
        assert batches == [BATCH] * (DUE // BATCH) + [0]
        looks = [query for query in sent.captured_queries if "coalesce(t.not_before" in query["sql"]]
        assert len(looks) == len(batches)
        assert len(sent.captured_queries) <= (len(batches) if on_postgresql() else 1 + 4 * len(batches))

    @pytest.mark.skipif("not on_postgresql()", reason="of PostgreSQL alone")
    def test_a_claim_is_planned_once_and_writes_no_index(self) -> None:
        """However much is due, once the server has looked at a few; and the rows are rewritten in their pages."""
        connection.close()  # with what it has planned
        add_timers(DUE, ahead=-3600)
        with transaction.atomic(), connection.cursor() as cursor:
            assert [self.due(10) for _ in range(20)] == [10] * 20
            cursor.execute(
                "select n_tup_upd, n_tup_hot_upd from pg_stat_xact_user_tables where relname = 'loom_timer'"
            )
            updated, in_place = cursor.fetchone()
            assert updated == 200
            assert in_place > 170
            cursor.execute(
                "select generic_plans from pg_prepared_statements where statement like '%update loom_timer set held%'"
            )
            assert cursor.fetchone() == (15,)

    def test_a_large_batch_walks_over_no_table(self) -> None:
        """Its rows are reached by the index and by their places, however many others there are."""
        add_timers(DUE, ahead=-3600)
        add_ended(DUE, name="sleeper")
        if on_postgresql():  # nor where the server has planned it for any limit, and any instant
            with transaction.atomic(), connection.cursor() as cursor:
                cursor.execute("set local plan_cache_mode = force_generic_plan")
                before = seq_scans()
                assert self.due(BATCH) == BATCH
                assert seq_scans() == before
        add_timers(TIMERS, ahead=3600)
        assert [walk for walk in walks(partial(self.due, BATCH)) if " pages: " not in walk] == []
        since = self.store.now() - timedelta(seconds=3598)
        assert [walk for walk in walks(partial(self.due, BATCH, since=since)) if " pages: " not in walk] == []

    def test_a_claim_looks_at_nothing_that_it_may_not_take(self) -> None:
        """Neither a long queue that others serve, nor one at its limit, nor what is to be ready some day."""
        later = self.store.now() + timedelta(days=1)
        logs = [self.log() for _ in range(READY)]
        ownerships = [Ownership("ready", at=None if number % 2 else later) for number in range(READY)]
        commits = [
            log.start(ownership, queue="long", priority=number % 3)
            for number, (log, ownership) in enumerate(zip(logs, ownerships, strict=True))
        ]
        assert self.store.append_many(commits) == [None] * READY
        self.started(Ownership("held", owner="o", token=1, ttl=60), queue="full")
        self.started(queue="full")
        analyze()
        full: dict[str, Any] = {"owner": "me", "token": 7, "ttl": 60, "limit": 10, "known": self.known}
        self.store.claim_limited("none", QueueLimits(rate=1.0), **full)
        assert walks(lambda: self.claim(queues=["mine"])) == []
        assert walks(lambda: self.claim(besides=["long", "full"])) == []
        assert walks(lambda: self.store.claim_limited("full", QueueLimits(concurrency=1), **full)) == []
        assert walks(lambda: self.store.upcoming(queues=["mine"])) == []
        assert walks(self.store.upcoming) == []
        assert self.claim(queues=["long"]) == 10

    @pytest.mark.skipif(not on_postgresql(), reason="SQLite keeps no plans")
    def test_a_claim_that_was_planned_over_a_small_table_walks_over_no_large_one(self) -> None:
        """Its rows are reached by the key: of a list of places, or of a join, the planner takes the whole of a small table."""
        logs = [self.log() for _ in range(2 * 10)]
        self.store.append_many([log.start(queue="mine") for log in logs])
        analyze()
        with connection.cursor() as cursor:
            cursor.execute("set plan_cache_mode = force_generic_plan")
            try:
                assert self.claim() == 10
                add_ended(DUE, analyzed=False)
                before = seq_scans()
                assert self.claim() == 10
                assert seq_scans() == before
            finally:
                cursor.execute("reset plan_cache_mode")

    @pytest.mark.skipif(not on_postgresql(), reason="SQLite keeps no plans")
    def test_a_claim_that_was_planned_for_any_limit_walks_over_no_table(self) -> None:
        """Its rows are reached by the key: a join of many would rather read the whole of a table of thousands."""
        add_ended(DUE)
        self.store.append_many([self.log().start(queue="mine") for _ in range(READY)])
        analyze()
        with transaction.atomic(), connection.cursor() as cursor:
            cursor.execute("set local plan_cache_mode = force_generic_plan")
            before = seq_scans()
            assert self.claim() == 10
            assert seq_scans() == before

    def test_a_page_of_what_ended_is_a_probe(self) -> None:
        """The first one, and one from the middle, however many ended and however many live."""
        add_ended(5_000)
        until = datetime(2026, 1, 2, tzinfo=UTC)

        def page(number: int = 0) -> list[Ended]:
            after = (datetime(2026, 1, 1, tzinfo=UTC) + timedelta(seconds=number), f"ended-{number}")
            return self.store.ended_before(Status.COMPLETED, until, after=after, limit=20)

        assert walks(lambda: page(2_500)) == []
        assert walks(lambda: self.store.ended_before(Status.FAILED, until, limit=20)) == []
        assert [row.id for row in page(2_500)][:2] == ["ended-2501", "ended-2502"]

    def test_the_newest_of_a_chain_is_a_probe(self) -> None:
        """By any member, however long the chain, and however many others there are."""
        add_ended(5_000)
        add_ended(5_000, name="member", chain="first")
        add_ended(1, name="first", status="CONTINUED")
        for key in ("first-0", "member-7"):
            found = self.store.newest(key)
            assert found is not None
            assert found.id == "member-4999"
            assert walks(partial(self.store.newest, key)) == []
        assert walks(lambda: self.store.newest("ended-7")) == []


def add_ended(
    count: int,
    *,
    name: str = "ended",
    chain: str | None = None,
    status: str = "COMPLETED",
    analyzed: bool = True,
) -> None:
    """Rows of executions that ended, a second apart; ``chain`` names the one whose first they continue."""
    at = datetime(2026, 1, 1, tzinfo=UTC)
    rows: models.QuerySet[Any] = models.QuerySet(Execution)
    rows.bulk_create(
        Execution(
            id=f"{name}-{number}",
            chain=f"{chain}-0" if chain else f"{name}-{number}",
            flow_id="f",
            status=status,
            last_sequence=1,
            created_at=at + timedelta(seconds=number if chain else 0),
            updated_at=at,
            finished_at=at + timedelta(seconds=number),
        )
        for number in range(count)
    )
    if analyzed:
        analyze()
