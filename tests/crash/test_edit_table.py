"""The table of docs/explanation/versioning.md, cell by cell: flows are edited under executions that live."""

from __future__ import annotations

import csv
import re
from pathlib import Path

from loom_django.kernel.state import ON_DIVERGED, Status
from tests.crash.edits import EDITS, GUARDS, STATES, execution_id
from tests.crash.kit import Child, Lab, state

TABLE = Path(__file__).parents[2] / "docs" / "explanation" / "edit_table.csv"


def published() -> list[dict[str, str]]:
    with TABLE.open(newline="") as file:
        return list(csv.DictReader(file))


def cell(lab: Lab, child: Child, warned: set[str], id: str) -> str:
    """What became of an execution after the deploy, and which tools were called since then."""
    found = state(id)
    if found.status is Status.COMPLETED:
        ran = [line["step"] for line in lab.effects(id) if line["pid"] == child.pid]
        return f"goes on{', warned' if id in warned else ''}: {' '.join(ran)}"
    assert id not in warned
    assert [line for line in lab.effects(id) if line["pid"] == child.pid] == []
    return "parks" if [wait.on for wait in found.pending_waits] == [ON_DIVERGED] else "refused"


def test_the_published_table_is_what_happens(lab: Lab) -> None:
    """Each cell: begun in a process that has the old module of flows, gone on with in one that has the new one."""
    inline = {"DISPATCHER": "inline"}
    before = lab.run("begin_edited", loom=inline)
    lab.pass_time(7200)
    child = lab.spawn("deploy_edited", loom=inline)
    assert child.wait() == 0, child.log
    after = child.value
    warned = set(re.findall(r'^WARNING loom_django.run: execution "([^"]+)" diverged', child.log, re.M))
    seen = [
        {
            "edit": edit,
            "hash": "same" if before[edit][0] == after[edit][0] else "changed",
            "fingerprint": "same" if before[edit][1] == after[edit][1] else "changed",
            "guard": guard,
            **{name: cell(lab, child, warned, execution_id(edit, guard, name)) for name in STATES},
        }
        for edit in EDITS
        for guard in GUARDS
    ]
    assert seen == published()
