"""Several processes that write one SQLite file: nobody hears "database is locked"."""

from __future__ import annotations

import os
import sqlite3
from contextlib import closing
from typing import Any

import pytest
from django.db import connection

from tests.crash.kit import Lab, check_history, eventually, finished, lines_with, rows_of, state

if os.environ.get("LOOM_TEST_DATABASE") == "postgresql":
    pytest.skip("of SQLite alone", allow_module_level=True)

WORKERS = 4
# Started by two web processes; five hundred in all in the fault that this is about.
STARTS = 40
# As Django has it when nobody says anything: no WAL, a timeout of five seconds.
PLAIN: dict[str, Any] = {"OPTIONS": {}}


@pytest.mark.xdist_group("long")
def test_workers_web_writes_and_a_long_reader(lab: Lab):
    """Default settings, four workers, two writers with transactions of their own, a reader that never ends."""
    settings = {"POLL_INTERVAL": 0.02, "CONCURRENCY": 4}
    with closing(sqlite3.connect(connection.settings_dict["NAME"], isolation_level=None)) as reader:
        reader.execute("begin")
        reader.execute("select count(*) from loom_event").fetchone()
        workers = [
            lab.spawn("command", "run_loom_worker", loom=settings, database=PLAIN) for _ in range(WORKERS)
        ]
        web = [lab.spawn("write_orders", STARTS, prefix, database=PLAIN) for prefix in ("a", "b")]
        for child in web:
            assert child.wait() == 0, child.log
        ids = [f"{prefix}-{number}" for prefix in ("a", "b") for number in range(STARTS)]
        for id in ids:
            eventually(lambda: state(id).status == "SUSPENDED" or finished(id), f"{id} parks")  # noqa: B023
        reader.execute("rollback")
    for worker in workers:
        assert not worker.over, worker.log
        assert lines_with(worker.log, "locked") == []
    for worker in workers:
        worker.kill()
    for id in ids:
        assert rows_of(id) == 1
        assert len(lab.effects(id)) == 4
        assert not any("locked" in event.body for event in check_history(id))
