"""The check before a deploy: what this code would strand, and what else to know, from the rows of what lives."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.db import connection
from django.test.utils import CaptureQueriesContext

from loom_django import FlowContext, StepContext, definitions, flow, tool
from loom_django.runtime import loom
from loom_django.services.deploy_check import survey
from tests.admin.conftest import _clean_slate
from tests.commands.test_acts import refused, run
from tests.crash.kit import on_postgresql
from tests.stores.test_plans import analyze, walks

__all__ = ["_clean_slate"]

pytestmark = pytest.mark.django_db(transaction=True)

# A million and ten thousand make the same plan: 10 ms on PostgreSQL, 25 ms on SQLite.
FINISHED = 20_000
LIVE = 200


@tool(idempotent=True)
def charge(ctx: StepContext) -> None:
    """Declared."""


@tool
def ship(ctx: StepContext) -> None:
    """Undeclared."""


@pytest.fixture(autouse=True)
def own_flows() -> Iterator[None]:
    """Flows of a test do not outlive it."""
    known = set(definitions.registry.highest())
    yield
    for flow_id in set(definitions.registry.highest()) - known:
        definitions.registry.forget(flow_id)


def deploy(flow_id: str, **declared: Any) -> Any:
    """Register another release's version of a flow, beside those that are there."""

    def body(ctx: FlowContext) -> None:
        ctx.suspend("Go")

    return flow(flow_id, **declared)(body)


def replace(flow_id: str, **declared: Any) -> Any:
    """The same, and none of the older versions is kept."""
    definitions.registry.forget(flow_id)
    return deploy(flow_id, **declared)


def findings(flow_id: str) -> list[dict[str, Any]]:
    """What the JSON form says of one flow, where nothing breaks."""
    report = json.loads(run("loom_deploy_check", "--format", "json"))
    assert (report["format"], report["ok"]) == (1, True)
    return [finding for finding in report["findings"] if finding["flow_id"] == flow_id]


def broken(flow_id: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The breaking finding of one flow, and its group; the exit code is 1."""
    out = io.StringIO()
    with pytest.raises(CommandError) as refusal:
        call_command("loom_deploy_check", "--format", "json", stdout=out)
    assert refusal.value.returncode == 1
    report = json.loads(out.getvalue())
    assert report["ok"] is False
    [finding] = [item for item in report["findings"] if item["breaking"]]
    [group] = [item for item in report["live"] if item["flow_id"] == flow_id]
    return finding, group


def test_a_changed_graph_breaks_and_is_told_step_by_step() -> None:
    """With the number of live executions, one of them, and three ways out; what has ended does not count."""
    old = deploy("check.drift", steps=[charge, ship])
    first = old.start()
    loom.cancel(old.start().id)
    changed = replace("check.drift", steps=[charge])
    finding, group = broken("check.drift")
    assert (finding["id"], finding["mismatch"], finding["live"]) == ("flow-code-drift", "structure", 1)
    assert finding["example"] == group["example"] == first.id
    assert finding["differences"] == ["step 'ship' is gone"]
    assert finding["registered"] == changed.flow_hash
    assert (group["live"], group["continued_by"], group["mismatch"]) == (1, None, "structure")
    code, message = refused("loom_deploy_check")
    assert (code, message) == (1, "1 live executions would be left alone")


@pytest.mark.parametrize(
    ("mismatch", "old", "new"),
    [
        ("code", {"code_fingerprint": "a"}, {"code_fingerprint": "b"}),
        ("version", {"version": 2}, {"version": 1}),
        ("flow", {}, None),
    ],
)
def test_whatever_no_code_here_continues_breaks(
    mismatch: str, old: dict[str, Any], new: dict[str, Any] | None
) -> None:
    """Another body, an older release, a flow that is gone."""
    deploy("check.gone", **old).start()
    definitions.registry.forget("check.gone")
    if new is not None:
        deploy("check.gone", **new)
    finding, _ = broken("check.gone")
    assert finding["mismatch"] == mismatch
    if mismatch == "code":
        assert 'compatible_with=["a"]' in finding["message"]


def test_what_is_pinned_or_declared_compatible_passes() -> None:
    """Both versions side by side; a fingerprint that is listed."""
    deploy("check.pinned", version=1, steps=[charge]).start()
    replace("check.pinned", version=1, steps=[charge], pinned=True)
    deploy("check.pinned", version=2)
    assert findings("check.pinned") == []
    deploy("check.compatible", code_fingerprint="a").start()
    replace("check.compatible", code_fingerprint="b", compatible_with=["a"])
    assert findings("check.compatible") == []


def test_a_version_that_was_not_kept_is_advice_unless_its_body_was_compared() -> None:
    """The same steps, another body: nothing stops it, so it is said."""
    deploy("check.kept", version=1).start()
    replace("check.kept", version=2)
    [advice] = findings("check.kept")
    assert (advice["id"], advice["version"], advice["registered"], advice["live"]) == (
        "version-not-kept",
        1,
        "2",
        1,
    )
    deploy("check.same", version=1, code_fingerprint="a").start()
    replace("check.same", version=2, code_fingerprint="a")
    assert findings("check.same") == []


def test_a_pinned_version_that_nobody_needs_and_a_tool_that_says_nothing_are_advice() -> None:
    """The first can be removed; the second is told once, for all versions that list it."""
    deploy("check.drained", version=1, pinned=True, steps=[ship])
    deploy("check.drained", version=2, steps=[charge, ship])
    told = {finding["id"]: finding for finding in findings("check.drained")}
    assert set(told) == {"version-drained", "undeclared-tool"}
    assert told["version-drained"]["version"] == 1
    text = run("loom_deploy_check")
    assert 'advisory undeclared-tool: The tool "ship" of "check.drained"' in text


def add_rows(flow_id: str, count: int, status: str) -> None:
    """Rows of executions behind the store's back."""
    rows = f"generate_series(1, {count}) as n" if on_postgresql() else ""
    if not on_postgresql():
        series = f"select 1 union all select n + 1 from s limit {count}"
        rows = f"(with recursive s(n) as ({series}) select n from s)"
    ended = "created_at" if status == "COMPLETED" else "null"
    skipped = ("id", "chain", "status", "finished_at", "ready_at", "lease_token", "lease_until")
    with connection.cursor() as cursor:
        names = [
            column.name
            for column in connection.introspection.get_table_description(cursor, "loom_execution")
            if column.name not in skipped
        ]
        cursor.execute(
            f"insert into loom_execution (id, chain, status, finished_at, {', '.join(names)}) "
            f"select '{status}-' || n, '{status}-' || n, '{status}', {ended}, {', '.join(names)} "
            f"from (select * from loom_execution where flow_id = '{flow_id}' limit 1) as one, {rows}"
        )


def test_what_has_ended_is_not_looked_at() -> None:
    """However much of it there is: the index by status leads to what lives."""
    deploy("check.many").start()
    add_rows("check.many", FINISHED, "COMPLETED")
    add_rows("check.many", LIVE, "SUSPENDED")
    analyze()
    with CaptureQueriesContext(connection) as sent:
        [group] = survey(definitions.registry, "default")
    if on_postgresql():
        assert walks(lambda: survey(definitions.registry, "default")) == []
    else:
        with connection.cursor() as cursor:
            cursor.execute("explain query plan " + sent.captured_queries[0]["sql"])
            steps = [row[3] for row in cursor.fetchall()]
        assert "SEARCH loom_execution USING INDEX loom_execution_by_status (status=?)" in steps
    assert group.live == LIVE + 1
