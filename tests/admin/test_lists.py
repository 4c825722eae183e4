"""Lists cost a fixed number of queries and no count, whatever they hold."""

from __future__ import annotations

import re
from datetime import UTC, datetime

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from loom_django.admin.base import MOST_ROWS, BoundedPaginator
from loom_django.models import Execution
from loom_django.runtime import loom
from tests.admin import flows
from tests.admin.conftest import client_of, diverged, in_doubt, make_user, put_off, question, url, verdict

pytestmark = pytest.mark.django_db(transaction=True)

# Session and user, and the user's and the groups' permissions.
LOGGED_IN = 4


def statements(client, address) -> list[str]:
    with CaptureQueriesContext(
        connection,
    ) as caught:
        assert client.get(address).status_code == 200
    return [query["sql"] for query in caught]


def fill(count: int) -> None:
    for number in range(count):
        in_doubt(f"doubt-{number:03}")
        flows.nap.using(execution_id=f"nap-{number:03}").start()


@pytest.mark.parametrize(
    ("address", "own"),
    [
        ("execution_changelist", 2),  # the bounded look for pages, the rows
        ("timer_changelist", 2),
        ("lease_changelist", 2),
        ("in_doubt", 2),  # the rows, the ends of their logs
    ],
)
def test_a_list_costs_as_much_with_many_rows_as_with_few(console, address, own, django_assert_num_queries):
    """One query for the rows and one beside it."""
    fill(1)
    console.get(url(address))
    with django_assert_num_queries(LOGGED_IN + own):
        console.get(url(address))
    fill(8)
    with django_assert_num_queries(LOGGED_IN + own):
        console.get(url(address))


@pytest.mark.parametrize(
    ("name", "query"),
    [
        ("execution_changelist", {}),
        ("execution_changelist", {"q": "doubt"}),
        ("execution_changelist", {"status__exact": "SUSPENDED"}),
        ("execution_changelist", {"needs": "me"}),
        ("execution_changelist", {"waiting": "answer"}),
        ("timer_changelist", {"due": "overdue"}),
        ("lease_changelist", {"lease": "expired"}),
        ("in_doubt", {"flow": "pay"}),
    ],
)
def test_no_list_counts_a_table_or_searches_text(console, name, query):
    """A table of millions is never counted; the first look is bounded; no log is read beyond its end."""
    fill(2)
    own = [sql for sql in statements(console, url(name, **query)) if '"loom_' in sql]
    assert " LIMIT " in own[0]
    for sql in own:
        assert "COUNT(" not in sql.upper()
        assert not re.search(r"LIKE\W+%", sql)
        if '"loom_event"' in sql:
            assert '"sequence" >' in sql


def test_the_page_of_an_execution_costs_the_same_for_a_long_log(console, django_assert_num_queries):
    """The row, its log, fence, timers and history."""
    in_doubt("short")
    flows.ask.using(execution_id="long").start(rounds=5)
    for _ in range(4):
        loom.resume("long", event_type="Approval")
    console.get(url("execution_change", "short"))
    for name in ("short", "long"):
        with django_assert_num_queries(LOGGED_IN + 6):
            console.get(url("execution_change", name))


def shown(client, **query) -> list[str]:
    page = client.get(url("execution_changelist", **query))
    assert page.status_code == 200
    return sorted(row.pk for row in page.context["cl"].result_list)


def test_search_finds_ids_prefixes_and_keys(console):
    """By the index alone: the exact id, the beginning of one, or the key that a provider has seen."""
    for name in ("order-1", "order-10", "order-2", "a:b", "Order-1"):
        in_doubt(name)
    assert shown(console, q="order-1") == ["order-1", "order-10"]
    assert shown(console, q="order-10") == ["order-10"]
    assert shown(console, q="order-2:transfer:r1") == ["order-2"]
    assert shown(console, q="a%3Ab:transfer") == ["a:b"]
    assert shown(console, q="rder") == []
    assert shown(console, q="%") == []


def test_filters_say_what_executions_do(console):
    """By status, flow and what they wait for."""
    in_doubt("doubt")
    flows.nap.using(execution_id="nap").start()
    flows.ask.using(execution_id="ask").start()
    flows.bugs.append(ValueError("bug"))
    flows.buggy.using(execution_id="bug").start()
    flows.broken.using(execution_id="broken").start("x")
    assert shown(console, status__exact="FAILED") == ["broken"]
    assert shown(console, flow="nap") == ["nap"]
    assert shown(console, waiting="verdict") == ["doubt"]
    assert shown(console, waiting="time") == ["nap"]
    assert shown(console, waiting="answer") == ["ask"]
    assert shown(console, waiting="fix") == ["bug"]
    assert shown(console, waiting="message") == []


def test_a_doubt_among_several_waits_is_found_and_told_first(console):
    """Whatever a sibling branch waits for: nobody else will bring it forward."""
    flows.split.using(execution_id="split").start()
    assert shown(console, waiting="verdict") == ["split"]
    assert (
        "a verdict on transfer#1.pay, and 2 more" in console.get(url("execution_changelist")).content.decode()
    )


def test_needs_me_goes_by_permission(db):
    """What somebody may not settle is not shown as theirs."""
    in_doubt("doubt")
    flows.bugs.append(ValueError("bug"))
    flows.buggy.using(execution_id="bug").start()
    judge = client_of(make_user("judge", "view_execution", "resolve_step"))
    fixer = client_of(make_user("fixer", "view_execution", "retry_error"))
    diverged("shifted")
    deployer = client_of(make_user("deployer", "view_execution", "retry_diverged"))
    guest = client_of(make_user("guest", "view_execution"))
    assert [shown(client, needs="me") for client in (judge, fixer, deployer, guest)] == [
        ["doubt"],
        ["bug"],
        ["shifted"],
        [],
    ]


def test_a_list_says_when_it_shows_the_newest_only(monkeypatch, console):
    """Beyond the bound the count says so, and the pages end there."""
    for number in range(7):
        flows.nap.using(execution_id=f"n{number}").start()
    assert MOST_ROWS == 1000
    monkeypatch.setattr("loom_django.admin.base.MOST_ROWS", 5)
    paginator = BoundedPaginator(Execution.objects.order_by("pk"), 2)
    assert (paginator.count, str(paginator.count), paginator.num_pages) == (5, "5+", 3)
    assert "5+" in console.get(url("execution_changelist")).content.decode()


def test_the_queue_has_the_oldest_question_first_and_pages_by_key(console, monkeypatch):
    """Each page begins where the last one ended, also when rows have gone meanwhile."""
    monkeypatch.setattr("loom_django.admin.queue.PAGE", 2)
    for number in range(5):
        in_doubt(f"d{number}")
    seen = []
    address = url("in_doubt")
    while address:
        page = console.get(address)
        seen += [row["doubt"].execution.pk for row in page.context["rows"]]
        if seen == ["d0", "d1"]:
            console.post(url("execution_verdict", "d0"), verdict(question("d0")))
        following = page.context["following"]
        address = url("in_doubt", after=following) if following else ""
    assert seen == ["d0", "d1", "d2", "d3", "d4"]
    assert [row["doubt"].execution.pk for row in console.get(url("in_doubt")).context["rows"]] == ["d1", "d2"]


def test_the_queue_can_be_narrowed_to_a_flow(console):
    """The flow's id in the address."""
    in_doubt("a")
    flows.receipts.using(execution_id="b").start("even")
    rows = console.get(url("in_doubt", flow="receipts")).context["rows"]
    assert [(row["doubt"].execution.pk, row["doubt"].step) for row in rows] == [("b", "even")]


def test_an_effect_of_a_cancelled_execution_stays_in_the_queue(console):
    """It is shown as one that no verdict can settle any more."""
    in_doubt("x")
    loom.cancel("x", reason="r")
    page = console.get(url("in_doubt"))
    [row] = page.context["rows"]
    assert (row["doubt"].step, row["doubt"].settled) == ("transfer", True)
    assert url("execution_verdict", "x", step="transfer") not in page.content.decode()


def test_an_empty_queue_says_so(console):
    """No table without rows."""
    assert "Nothing is in doubt." in console.get(url("in_doubt")).content.decode()


def test_the_queue_is_the_home_of_the_app(console):
    """The first link of the app's page, and on top of the list of executions."""
    from django.urls import reverse

    for address in (reverse("admin:app_list", args=["loom"]), url("execution_changelist")):
        assert f'href="{url("in_doubt")}"' in console.get(address).content.decode()


def test_the_home_tells_how_many_wait_for_a_verdict(console, monkeypatch):
    """Those that no verdict can settle any more are not counted; of many it says so."""
    from django.urls import reverse

    home = reverse("admin:app_list", args=["loom"])
    assert "There are none now." in console.get(home).content.decode()
    for name in ("a", "b", "c"):
        in_doubt(name)
    loom.cancel("c", reason="r")
    assert "2 executions" in console.get(home).content.decode()
    monkeypatch.setattr("loom_django.admin.base.MOST_ROWS", 1)
    assert "1+ execution" in console.get(home).content.decode()


def test_a_list_without_rows_says_why(console):
    """A stranger learns what would stand there."""
    assert "What waits holds no lease." in console.get(url("lease_changelist")).content.decode()
    assert "No wake is owed" in console.get(url("timer_changelist")).content.decode()
    flows.nap.using(execution_id="nap").start()
    assert "No wake is owed" not in console.get(url("timer_changelist")).content.decode()


def test_timers_are_listed_soonest_first(console):
    """With what they are and the link to their execution."""
    flows.nap.using(execution_id="late").start(5)
    flows.nap.using(execution_id="soon").start(1)
    page = console.get(url("timer_changelist"))
    assert [timer.execution_id for timer in page.context["cl"].result_list] == ["soon", "late"]
    assert url("execution_change", "soon") in page.content.decode()
    put_off("held")
    for due, ids in (("overdue", []), ("later", ["held", "soon", "late"])):
        rows = console.get(url("timer_changelist", due=due)).context["cl"].result_list
        assert [timer.execution_id for timer in rows] == ids


def test_leases_are_listed_with_their_holder(console):
    """An execution under a lease, and a way to its page."""
    from loom_django.services.dispatch import WorkerDispatcher

    loom.dispatcher = WorkerDispatcher()
    try:
        flows.ask.using(execution_id="x").start()
    finally:
        loom.dispatcher = None
    assert loom.store.claim("x", owner="host:1:abc", token=7, ttl=60)
    page = console.get(url("lease_changelist")).content.decode()
    assert "host:1" in page
    assert url("execution_change", "x") in page
    assert console.get(url("lease_change", "x")).url == url("execution_change", "x")
    assert re.search(r"in (\d+ s|1 min)", page)


def test_times_are_local_with_utc_in_the_title(console, settings):
    """An operator reads the clock on the wall; what is compared with other logs is UTC."""
    from django.utils import timezone

    from loom_django.admin import show

    moment = datetime(2026, 1, 31, 23, 30, 5, 123456, tzinfo=UTC)
    with timezone.override("Europe/Berlin"):
        text = str(show.when(moment))
    assert ">2026-02-01 00:30:05 CET<" in text
    assert 'title="2026-01-31 23:30:05.123456 UTC"' in text
