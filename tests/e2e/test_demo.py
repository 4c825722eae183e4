"""The demo: what a newcomer runs first. It must end well, must not be able to lie, and must leave nothing behind."""

from __future__ import annotations

import contextlib
import http.client
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
from django.conf import settings

from example_project.provider import ledger
from example_project.provider.ledger import Ledger, Request
from example_project.provider.server import CLOSED_ACCOUNT, GOOD_ACCOUNT, SILENT_ACCOUNT, Provider
from example_project.stage.promises import Evidence, Fact, check
from tests import postgres

ROOT = Path(__file__).resolve().parent.parent.parent

# The demo gives up after 60 seconds; beside a test run on every processor it may take longer.
DEADLINE = "200"


@pytest.fixture
def bare_environment(tmp_path: Path) -> dict[str, str]:
    """What a new user has: no settings, no database; temporary files where the test can look."""
    kept = {name: os.environ[name] for name in ("PATH", "LANG", "PYTHONDEVMODE") if name in os.environ}
    return {**kept, "HOME": str(tmp_path), "TMPDIR": str(tmp_path)}


@pytest.fixture
def environment(bare_environment: dict[str, str]) -> Iterator[dict[str, str]]:
    """The same on the database of this pass: SQLite is the demo's own choice, PostgreSQL a URL."""
    if settings.DATABASES["default"]["ENGINE"].endswith("sqlite3"):
        yield bare_environment
        return
    import psycopg

    server = postgres.url_for_this_process()
    name = f"demo_{secrets.token_hex(4)}"
    with closing(psycopg.connect(server, autocommit=True)) as connection:
        connection.execute(f'CREATE DATABASE "{name}"')
        yield {**bare_environment, "DATABASE_URL": postgres.url_with(server, database=name)}
        connection.execute(f'DROP DATABASE "{name}" WITH (FORCE)')


def heed_interrupts() -> None:
    """A shell that puts its work into the background has its children ignore Ctrl-C; a person's has not."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def start(environment: dict[str, str], *options: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, ROOT / "manage.py", "demo", "--deadline", DEADLINE, *options],
        cwd=environment["TMPDIR"],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=heed_interrupts,
    )


def play(environment: dict[str, str], *options: str) -> tuple[int, str]:
    with start(environment, *options) as process:
        said, _ = process.communicate(timeout=240)
    return process.returncode, said


def children(folder: Path) -> list[str]:
    """Processes whose command names the demo's folder; each of its servers and workers does."""
    proc = Path("/proc/self/cmdline")
    if not proc.exists():
        listed = subprocess.run(["ps", "-eww", "-o", "pid,args"], capture_output=True, text=True, check=True)
        return [line for line in listed.stdout.splitlines() if str(folder) in line]
    found = []
    for cmdline in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            found.append(cmdline.read_bytes().replace(b"\0", b" ").decode(errors="replace"))
    return [line for line in found if str(folder) in line]


def gone(folder: Path) -> bool:
    for _ in range(100):
        if not children(folder):
            return True
        time.sleep(0.1)
    return False


def test_the_demo_plays_the_main_job_to_its_end(environment, tmp_path):
    """Exit 0, all promises kept, in words; no process and no file is left."""
    code, said = play(environment)

    assert code == 0, said
    assert said.count("   kept  ") == len(check(EVIDENCE))
    assert "BROKEN" not in said
    assert "make serve" in said
    assert gone(tmp_path)
    assert list(tmp_path.glob("loom-demo-*")) == []


@pytest.mark.once
def test_a_broken_promise_is_noticed_and_fails_the_demo(bare_environment):
    """A second transfer behind the demo's back: exit 1, and the line that says which promise broke."""
    code, said = play(bare_environment, "--sabotage", "transfer-twice")

    assert code == 1, said
    assert "BROKEN  The transfer was sent to the bank once, and never again" in said
    assert "the bank saw 2 requests and moved money 2 times" in said


@pytest.mark.once
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_child_outlives_the_demo(bare_environment, tmp_path, number):
    """However it is ended in the middle, its processes go with it."""
    with start(bare_environment) as process:
        assert process.stdout is not None
        before = takewhile(lambda line: not line.startswith("3."), process.stdout)
        told = list(before)
        assert children(tmp_path), "".join(told)
        process.send_signal(number)
        process.communicate(timeout=60)

    assert process.returncode != 0
    assert gone(tmp_path)
    if number != signal.SIGKILL:
        assert list(tmp_path.glob("loom-demo-*")) == []


# Each promise by itself: evidence that breaks it is found, and blamed on it.

NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
CHARGE = Request(1, "", "charge", "order-1:charge", "order 1", "249.00", "ch-0001", False, "delivered")
TRANSFER = Request(
    2, "", "transfer", "order-1:wire_transfer", "order 1", "249.00", "tr-0002", False, "caller gone"
)
KINDS = (
    ("EXECUTION_STARTED", "", "", ""),
    ("STEP_STARTED", "charge", "", ""),
    ("STEP_COMPLETED", "charge", "", ""),
    ("STEP_STARTED", "wire_transfer", "", ""),
    ("EFFECT_INDOUBT", "wire_transfer", "", ""),
    ("EXECUTION_SUSPENDED", "", "", ""),
    ("EXECUTION_RESUMED", "", "EffectInDoubtResolved", "olga"),
    ("STEP_STARTED", "mark_paid", "", ""),
    ("STEP_COMPLETED", "mark_paid", "", ""),
    ("EXECUTION_SUSPENDED", "", "", ""),
    ("TIMER_FIRED", "", "", ""),
    ("EXECUTION_RESUMED", "", "TimerFired", ""),
    ("STEP_STARTED", "close_order", "", ""),
    ("STEP_COMPLETED", "close_order", "", ""),
    ("EXECUTION_COMPLETED", "", "", ""),
)
FACTS = tuple(Fact(number, *fact) for number, fact in enumerate(KINDS, 1))
EVIDENCE = Evidence(
    requests=(CHARGE, TRANSFER),
    facts=FACTS,
    status="COMPLETED",
    orders_made=1,
    executions_made=1,
    worker_exit=-signal.SIGKILL,
    operator="olga",
    order_paid=True,
    order_transfer="tr-0002",
    bookings=1,
    held_while_asleep=False,
    still_asleep=True,
    sleep_until=NOW,
    woken_at=NOW + timedelta(milliseconds=90),
    verify_exit=0,
    verify_said="0 problems",
)


def without(kind: str, step: str = "") -> tuple[Fact, ...]:
    """The log without such an event, numbered anew."""
    kept = [fact for fact in FACTS if fact.kind != kind or step not in ("", fact.step)]
    return tuple(replace(fact, sequence=number) for number, fact in enumerate(kept, 1))


def with_more(**fact: Any) -> tuple[Fact, ...]:
    """The log with one more event at its end."""
    return (*FACTS, Fact(len(FACTS) + 1, **fact))


def by(name: str) -> tuple[Fact, ...]:
    return tuple(replace(fact, by=name if fact.by else "") for fact in FACTS)


@pytest.mark.once
def test_kept_promises_are_found_kept():
    assert [promise.fault for promise in check(EVIDENCE) if not promise.kept] == []


@pytest.mark.once
def test_a_charge_that_was_asked_twice_under_one_key_is_fine():
    """The provider deduplicated it: no money moved again."""
    again = replace(CHARGE, number=3, repeated=True)

    assert all(promise.kept for promise in check(replace(EVIDENCE, requests=(CHARGE, TRANSFER, again))))


@pytest.mark.once
@pytest.mark.parametrize(
    ("broken", "blamed"),
    [
        ({"orders_made": 2}, "A purchase that is rolled back"),
        ({"executions_made": 2}, "A purchase that is rolled back"),
        ({"worker_exit": 0}, "The worker was really killed"),
        ({"requests": (CHARGE, replace(TRANSFER, answered="delivered"))}, "The worker was really killed"),
        ({"requests": (CHARGE, replace(CHARGE, key="other"), TRANSFER)}, "The customer was charged once"),
        (
            {"requests": (CHARGE, replace(CHARGE, key="x", repeated=True), TRANSFER)},
            "The customer was charged",
        ),
        ({"requests": (TRANSFER,)}, "The customer was charged once"),
        (
            {"requests": (CHARGE, TRANSFER, replace(TRANSFER, booking=""))},
            "The transfer was sent to the bank once",
        ),
        ({"facts": without("EFFECT_INDOUBT")}, "The doubt was noticed and recorded once"),
        (
            {"facts": with_more(kind="EFFECT_INDOUBT", step="charge")},
            "The doubt was noticed and recorded once",
        ),
        ({"facts": with_more(kind="STEP_STARTED", step="wire_transfer")}, "The doubt was noticed"),
        (
            {"facts": with_more(kind="EXECUTION_RESUMED", event="EffectInDoubtResolved", by="olga")},
            "One verdict",
        ),
        ({"facts": by("mallory")}, "One verdict settled it"),
        ({"facts": by("")}, "One verdict settled it"),
        ({"order_transfer": "tr-0009"}, "The flow went on with the transfer id"),
        ({"order_paid": False}, "The order is paid"),
        ({"bookings": 2}, "The order is paid"),
        ({"bookings": 0}, "The order is paid"),
        ({"held_while_asleep": True}, "No process waited during the sleep"),
        ({"still_asleep": False}, "No process waited during the sleep"),
        ({"facts": without("TIMER_FIRED")}, "No process waited during the sleep"),
        ({"woken_at": NOW - timedelta(milliseconds=1)}, "No process waited during the sleep"),
        ({"facts": with_more(kind="STEP_COMPLETED", step="charge")}, "No step of the flow was done twice"),
        ({"facts": without("STEP_COMPLETED", "close_order")}, "No step of the flow was done twice"),
        ({"status": "SUSPENDED"}, "The flow came to its end once"),
        ({"facts": with_more(kind="EXECUTION_COMPLETED")}, "The flow came to its end once"),
        ({"facts": FACTS[:9] + FACTS[10:]}, "The flow came to its end once"),
        ({"verify_exit": 1}, "loom_verify finds"),
    ],
)
def test_evidence_of_a_broken_promise_is_found(broken: dict[str, Any], blamed: str):
    (found,) = [promise for promise in check(replace(EVIDENCE, **broken)) if not promise.kept]

    assert found.words.startswith(blamed)
    assert found.fault


# The witness itself: a ledger that forgot or invented something would make the demo worthless.


@pytest.fixture
def provider(tmp_path: Path) -> Iterator[Callable[..., tuple[int, str]]]:
    """A provider; the fixture is a function that posts to it: (status, body), or (0, "") without an answer."""
    server = Provider(0, Ledger(tmp_path / "ledger"), holds=0)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()

    def post(path: str, key: str, iban: str = GOOD_ACCOUNT) -> tuple[int, str]:
        with closing(http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=10)) as connection:
            connection.request("POST", path, f'{{"iban": "{iban}"}}', {"Idempotency-Key": key})
            try:
                answer = connection.getresponse()
            except http.client.RemoteDisconnected:
                return 0, ""
            return answer.status, answer.read().decode()

    yield post
    server.shutdown()
    thread.join()
    server.server_close()


def seen(folder: Path) -> list[tuple[str, str, bool]]:
    return [(request.what, request.key, request.booked) for request in ledger.read(folder / "ledger")]


@pytest.mark.once
def test_the_provider_charges_once_per_key(provider, tmp_path):
    first, second, other = provider("/charges", "a"), provider("/charges", "a"), provider("/charges", "b")

    assert (first[0], second[0], other[0]) == (201, 201, 201)
    assert '"id": "ch-0001", "repeated": false' in first[1]
    assert '"id": "ch-0001", "repeated": true' in second[1]
    assert seen(tmp_path) == [("charge", "a", True), ("charge", "a", False), ("charge", "b", True)]


@pytest.mark.once
def test_the_bank_pays_whatever_it_is_sent(provider, tmp_path):
    """It does not look at keys; an answer that gets lost has moved money, a refusal has not."""
    codes = [provider("/transfers", "a", iban)[0] for iban in (GOOD_ACCOUNT, GOOD_ACCOUNT, SILENT_ACCOUNT)]
    codes.append(provider("/transfers", "b", CLOSED_ACCOUNT)[0])

    assert codes == [201, 201, 0, 402]
    assert [booked for _, _, booked in seen(tmp_path)] == [True, True, True, False]


@pytest.mark.once
def test_the_ledger_outlives_the_provider(tmp_path):
    """A provider that is started again knows the keys it has seen."""
    entry: dict[str, Any] = {"what": "charge", "key": "a", "reference": "", "amount": "1"}
    entry |= {"refuse": False, "deduplicate": True}
    first = Ledger(tmp_path / "ledger").enter(**entry)
    second = Ledger(tmp_path / "ledger").enter(**entry)

    assert (second.booking, second.repeated, second.number) == (first.booking, True, 2)
