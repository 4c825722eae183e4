"""The benchmarks themselves, in little: each measures something that worked, and the page gets its tables."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from django.db import connection

from benchmarks import __main__ as benchmarks
from benchmarks import page, profile, singles, wholes
from benchmarks.frame import Bench
from benchmarks.peers import __main__ as peers
from loom_django.engine.core import NoKeeper
from loom_django.stores import store_for
from loom_django.stores.memory import MemoryStore

EVERYTHING = {one.name: one for one in singles.SINGLES}
# What each must not exceed, whatever the machine: bytes of a small record's execution, pages of a probe, statements.
MOST = {"bytes_stored_each": 15_000, "poll_pages": 5, "statements": 8}


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("name", EVERYTHING)
def test_what_is_told_by_itself_is_measured(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A few of each: all figures are numbers, and those that are counted are no more than they were."""
    monkeypatch.setattr("benchmarks.singles.BODIES", 2)
    single = EVERYTHING[name]
    told = single.measure(Bench(store_for("default"), keeper=NoKeeper()), 100)
    assert all(isinstance(value, int | float) for value in told.values())
    assert {key: value for key, value in told.items() if value > MOST.get(key, value)} == {}
    if name == "a poll of timers, none due" and connection.vendor == "postgresql":
        assert told["poll_pages"] > 0


@pytest.mark.parametrize("name", [name for name, one in EVERYTHING.items() if "memory" in one.backends])
def test_what_needs_no_database_is_measured_in_memory(name: str) -> None:
    """The same without one."""
    told = EVERYTHING[name].measure(Bench(MemoryStore(), keeper=NoKeeper()), 100)
    assert all(value >= 0 or key.startswith("worker_bytes") for key, value in told.items())


@pytest.mark.parametrize("whole", wholes.WHOLES, ids=lambda whole: whole.name)
def test_each_whole_has_a_bare_loop_beside_it(whole: wholes.Whole) -> None:
    """None writes nothing: there is a ratio for each."""
    shape = wholes.shape_of(Bench(MemoryStore(), keeper=NoKeeper()), whole, 2)
    assert shape
    assert all(shape)


def test_a_profile_says_where_the_time_goes() -> None:
    """Shares of all there is, each function's by who wrote it."""
    told = profile.measure(Bench(MemoryStore(), keeper=NoKeeper()), 5, 3)
    assert sum(told["shares"].values()) == pytest.approx(1)
    assert told["shares"]["loom_django"] > 0
    assert len(told["functions"]) == 3
    assert profile.owner("~", "<built-in method psycopg_binary.x>") == "driver"


def test_who_is_not_there_is_left_out() -> None:
    """A peer that is not installed, and one whose schema is not given, is named in a line; loom runs alone."""
    commands, absent = peers.present(peers.parse([]))
    assert list(commands) == ["loom", "loom, async"]
    assert [line.split()[0] for line in absent] == ["DBOS", "Absurd"]
    _, absent = peers.present(peers.parse(["--python", sys.executable]))
    assert absent == [
        f"DBOS is left out: {sys.executable} has no dbos",
        "Absurd is left out: --absurd-schema names no absurd.sql",
    ]


def test_a_part_of_the_peers_can_be_asked_for() -> None:
    """By the name of the work, by its case, and by how many are at work at a time."""
    options = peers.parse(["--work", "park", "--concurrency", "1,64"])
    assert [(work.name, work.level) for work in options.works] == [
        ("park and resume", 1),
        ("park and resume", 64),
    ]
    assert [work.name for work in peers.parse(["--work", "park-backlog"]).works] == [
        "park and resume, backlog"
    ]
    assert [work.level for work in peers.parse(["--work", "5 steps, backlog"]).works] == [64]


def test_five_pairs_are_the_least_by_default() -> None:
    """A median of fewer says little."""
    parsers: list[Any] = [benchmarks.parse, peers.parse, page.parse]
    assert all(parse([]).runs >= 5 for parse in parsers)


FIGURE = {
    "case": "execution, unfenced",
    "backend": "postgresql",
    "concurrency": 1,
    "per_second": 1000.4,
    "cpu_us": 250.0,
    "times_bare": 2.0,
    "times_bare_cpu": 3.0,
    **{"p50_ms": 1.0, "p99_ms": 2.0, "bare_p50_ms": 0.5, "bare_p99_ms": 0.7},
    **{"events": 4, "commits": 3, "statements": 3, "round_trips": 3, "sent_bytes": 3200},
}
TOLD = {
    "machine": {"cpu": "2 x slow"},
    "backends": {"memory": {}, "postgresql": {"fsync": "on"}},
    "results": [FIGURE],
    "ratios": [],
    "wholes": [],
    "singles": [{"backend": "memory", "case": "running bodies", "running": 64}],
    "peers": [],
    "absent": ["DBOS is left out"],
}


def test_the_page_gets_its_tables() -> None:
    """Each stands in its place, and what is around stays; putting them in twice changes nothing."""
    made = page.tables(TOLD)
    assert list(made) == ["machine", "shape", "figures", "latency", "singles", "peers"]
    before = "".join(f"Of {name}.\n<!-- table: {name} -->\nold\n<!-- end of table -->\n" for name in made)
    once = page.filled(before, made)
    assert "old" not in once
    assert "| execution, unfenced | 1000, 250 us (2.0, 3.0) |" in once
    assert "Of latency.\n<!-- table: latency -->" in once
    assert page.filled(once, made) == once


def test_a_page_without_a_place_for_a_table_is_refused() -> None:
    """Its figures would be lost without a word."""
    with pytest.raises(SystemExit, match="no <!-- table: figures -->"):
        page.filled("<!-- table: shape -->\n<!-- end of table -->", {"shape": "x", "figures": "y"})


def test_the_page_of_this_repository_has_all_places() -> None:
    """docs/explanation/speed.md is filled by one command."""
    text = Path("docs/explanation/speed.md").read_text()
    names = ("machine", "shape", "figures", "latency", "fences", "wholes", "singles", "peers")
    assert page.filled(text, dict.fromkeys(names, "x")).count("\nx\n") == len(names)
