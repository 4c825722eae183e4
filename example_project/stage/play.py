"""The play: one order, one killed worker, one doubt, one verdict, and the checks at the end."""

from __future__ import annotations

import json
import secrets
import textwrap
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Any

from django.conf import settings
from django.contrib.auth.models import Permission, User
from django.core.management import call_command
from django.db import connection
from django.urls import reverse
from django.utils import timezone

from example_project.provider import client, ledger, server
from example_project.provider.ledger import Request
from example_project.shop.models import Booking, Order, Product
from example_project.stage.browser import Browser, Page
from example_project.stage.processes import Child, Patience, StageError, Troupe
from example_project.stage.promises import Evidence, Fact, Promise, check
from loom_django import loom
from loom_django.models import Event, Execution

OPERATOR = "olga"
# What settling a doubt needs, and nothing more.
PERMISSIONS = ("view_execution", "resolve_step")
LEASE = {"LOOM_LEASE_TTL": "2", "LOOM_LEASE_RENEW_INTERVAL": "0.5"}
NAP = timedelta(seconds=2)
OVERSLEEP = timedelta(seconds=0.5)
WIDTH = 100

# The words of the admin's link to the form.
VERDICT = "Give a verdict"

SABOTAGES = ("transfer-twice", "charge-twice", "row-twice")


class Play:
    def __init__(self, troupe: Troupe, patience: Patience, say: Callable[[str], Any], sabotage: str) -> None:
        self.troupe = troupe
        self.patience = patience
        self._say = say
        self._sabotage = sabotage
        self._number = 0
        self.password = secrets.token_urlsafe(9)
        self.ledger = troupe.folder / "provider-ledger.jsonl"

    def act(self) -> list[Promise]:
        """Play it all, and judge.

        Raises:
            StageError: it could not be played to its end.
        """
        self.get_ready()
        self.buy()
        self.kill_the_worker()
        self.recover()
        self.settle()
        self.sleep_and_wake()
        return self.judge()

    # Telling.

    def title(self, text: str) -> None:
        self._number += 1
        self._say(f"\n{self._number}. {text}")

    def tell(self, text: str) -> None:
        self._say(textwrap.fill(text, WIDTH, initial_indent="   ", subsequent_indent="   "))

    def table(self, heads: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> None:
        widths = [max(len(cell) for cell in column) for column in zip(heads, *rows, strict=True)]
        rule = tuple("-" * width for width in widths)
        for row in (heads, rule, *rows):
            cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
            self._say("      " + "  ".join(cells).rstrip())

    def quote(self, row: dict[str, str]) -> None:
        """A row of one of the admin's tables, cell under cell."""
        self._say("")
        for head, cell in row.items():
            if head and cell:
                indent = f"      {head + ':':<18} "
                self._say(
                    textwrap.fill(cell, WIDTH, initial_indent=indent, subsequent_indent=" " * len(indent))
                )
        self._say("")

    # The acts.

    def get_ready(self) -> None:
        self.title("Getting ready")
        call_command("migrate", verbosity=0)
        self._make_operator()
        self.product, _ = Product.objects.update_or_create(
            name="Table loom", defaults={"price": Decimal("249.00"), "stock": 1}
        )
        provider = self.troupe.folder / "provider.address"
        site = self.troupe.folder / "web.address"
        self.troupe.start(
            "provider",
            *("-m", "example_project.provider.server", "--hold-transfers", "1"),
            *("--ledger", str(self.ledger), "--ready-file", str(provider)),
        )
        address = self.patience.wait_for_file("the provider", provider)
        self.troupe.environment["SHOP_PROVIDER_URL"] = settings.SHOP_PROVIDER_URL = address
        self.troupe.start("web", "-m", "example_project.stage.web", "--ready-file", str(site))
        self.site = self.patience.wait_for_file("the web server", site)
        self.tell(f"The database: {_database()}. All of the shop's tables and loom_django's are in it.")
        self.tell(f"The shop and its admin: {self.site}, a process of its own.")
        self.tell(
            "The payment provider: another process. It keeps a ledger file of every request that it really saw; "
            "that file is the witness in all that follows."
        )
        self.tell(
            f"The operator: {OPERATOR}, who may look at executions and settle doubts, and nothing else."
        )

    def _make_operator(self) -> None:
        user, _ = User.objects.get_or_create(username=OPERATOR)
        user.is_staff, user.is_superuser = True, False
        user.set_password(self.password)
        user.save()
        wanted = Permission.objects.filter(content_type__app_label="loom", codename__in=PERMISSIONS)
        user.user_permissions.set(wanted)

    def buy(self) -> None:
        self.title("Two customers want the last table loom")
        before = (Order.objects.count(), Execution.objects.count())
        bought, refused = self._purchase("Ada"), self._purchase("Bob")
        if bought.status != 200 or refused.status != 409:
            raise StageError(f"the shop answered {bought.status} and {refused.status}: {refused.text[:600]}")
        self.orders_made = Order.objects.count() - before[0]
        self.executions_made = Execution.objects.count() - before[1]
        self.order = Order.objects.get(pk=int(bought.url.rstrip("/").rpartition("/")[2]))
        self.execution_id = self.order.execution_id
        self.tell(
            "The shop's view does three things in one database transaction: it makes the order, it starts a flow for "
            "it, and it takes the piece out of stock. (A flow is a plain Python function, here in "
            "example_project/shop/flows.py. Whatever it has done is written down, row by row, in the shop's own "
            "database, so that any process can go on where another one stopped.)"
        )
        self.tell(f"Ada buys it: {self.order}, execution {self.execution_id}, {self.order.amount} EUR.")
        self.tell(
            "Bob is too late. His order and his flow were already written when the stock said no, so all of it was "
            f"rolled back. Made by both purchases together: {_count(self.orders_made, 'order')}, "
            f"{_count(self.executions_made, 'execution')}."
        )

    def _purchase(self, customer: str) -> Page:
        browser = Browser(self.site)
        home = browser.open(reverse("shop:home"))
        return browser.submit(
            home, home.form("customer", "iban"), {"customer": customer, "iban": server.GOOD_ACCOUNT}
        )

    def kill_the_worker(self) -> None:
        self.title("A worker takes the order up, and is killed at the worst moment")
        worker = self._start_worker("worker 1")
        self.tell(
            f"Worker 1 (process {worker.pid}) runs the flow. It charges Ada's card. Then it tells the bank to pay the "
            "seller. This bank has no way of recognising a repeated request: sent twice is paid twice."
        )
        request = self.patience.wait_for("the transfer to reach the bank", self._transfer)
        self.tell(
            f"The bank has the request in its ledger, and it has moved the money ({request.booking}). Its answer is "
            "not out yet. The worker is killed now, with SIGKILL: it can neither tidy up nor write anything down."
        )
        self.worker_exit = worker.kill()
        self.tell(f"Worker 1 is gone (exit code {self.worker_exit}).")

    def _start_worker(self, name: str) -> Child:
        ready = self.troupe.folder / f"{name.replace(' ', '-')}.ready"
        worker = self.troupe.manage(
            name, "run_loom_worker", "--no-timers", "--interval", "0.1", "--ready-file", str(ready)
        )
        self.patience.wait_for_file(name, ready)
        return worker

    def _transfer(self) -> Request | None:
        return next((seen for seen in self._requests() if seen.what == "transfer"), None)

    def _requests(self) -> list[Request]:
        """What the provider saw for this order."""
        if not self.ledger.exists():
            return []
        return [seen for seen in ledger.read(self.ledger) if seen.reference == f"order {self.order.pk}"]

    def recover(self) -> None:
        self.title("Another worker finds what the dead one left")
        self.tell("This is all that is written of the execution:")
        self._show_log([_fact(event) for event in loom.history(self.execution_id)])
        self.tell(
            "The last row was written before the bank was called. How that call ended stands nowhere. Sending again "
            "might pay the seller twice; not sending might never pay him. No program can know which, so none must guess."
        )
        worker = self._start_worker("worker 2")
        execution = self.patience.wait_for("the execution to be parked in doubt", self._in_doubt)
        self.tell(
            f"Worker 2 (process {worker.pid}) waited until the dead worker's lease was over ({LEASE['LOOM_LEASE_TTL']} s "
            "without a sign of life), took the execution, saw that the step must not be repeated, and parked it: "
            f"{execution.get_status_display().lower()}, step {execution.in_doubt_steps[0]} in doubt."
        )

    def _execution(self) -> Execution:
        return Execution.objects.get(pk=self.execution_id)

    def _in_doubt(self) -> Execution | None:
        execution = self._execution()
        return execution if execution.in_doubt else None

    def settle(self) -> None:
        self.title("A person decides")
        browser = self._log_in()
        queue = browser.open(reverse("admin:loom_in_doubt"))
        row = queue.row(self.execution_id)
        self.tell(f"{OPERATOR} logs in to the admin and opens the queue of doubts. It says:")
        self.quote({head: cell.replace(VERDICT, "") for head, cell in row.items()})
        request = self._transfer()
        if request is None:
            raise StageError("the transfer is gone from the provider's ledger")
        self.tell(
            f"She asks the bank, with the key {request.key}. The bank's ledger has it: the money was moved, under the "
            f"id {request.booking}. So her verdict is: it was done, and this was its result."
        )
        self._post_verdict(browser, queue, request.booking)

    def _log_in(self) -> Browser:
        browser = Browser(self.site)
        page = browser.open(reverse("admin:login"))
        page = browser.submit(
            page, page.form("username", "password"), {"username": OPERATOR, "password": self.password}
        )
        if page.status != 200 or any("password" in form.names for form in page.forms):
            raise StageError(f"the admin did not let {OPERATOR} in: {page.text[:600]}")
        return browser

    def _post_verdict(self, browser: Browser, queue: Page, transfer_id: str) -> None:
        """Form, preview, confirmation: what a person does with three clicks."""
        page = browser.open(queue.link(f"/{self.execution_id}/", VERDICT))
        answers = {
            "resolution": "completed-with-result",
            "output": json.dumps(transfer_id),
            "reason": "seen in the bank's ledger",
        }
        preview = browser.submit(page, page.form(*answers), answers)
        self.tell(
            "Before anything is written, the admin shows the one row that her verdict will add to the log:"
        )
        self.quote(preview.row("EXECUTION_RESUMED"))
        done = browser.submit(preview, preview.form("stage", *answers), {"stage": "confirm"})
        if done.status != 200 or not self._settled():
            raise StageError(f"the verdict was not taken ({done.status}): {done.text[:600]}")
        self.tell("She confirms. Her name and her reason stand in the log from now on.")

    def _settled(self) -> bool:
        return not self._execution().in_doubt

    def sleep_and_wake(self) -> None:
        self.title("The flow goes on")
        self.patience.wait_for("the order to be paid", lambda: self._reload().is_paid)
        self.tell(
            f"Worker 2 runs the function again from its top. What was done before is not done again, it is read from "
            f"the log; and the transfer has a result now. The next step marks the order as paid ({self.order.transfer_id}) "
            "and writes the shop's books, in the same transaction as the note that it is done."
        )
        self._disturb()
        self.sleep_until = self.patience.wait_for("the flow to sleep", lambda: _wake_time(self.execution_id))
        asleep = self._execution()
        self.held_while_asleep = bool(asleep.lease_owner or asleep.lease_token)
        self.tell(
            f"Then it sleeps for {NAP.seconds} seconds, until the return period is over (two weeks in real life). The "
            "sleep is a row in the database; no process holds it."
        )
        overdue = self.sleep_until + OVERSLEEP
        self.patience.wait_for("the sleep to be over", lambda: timezone.now() > overdue)
        self.still_asleep = _wake_time(self.execution_id) is not None
        self.tell(
            "Its time is over, and it sleeps on: a worker wakes what is due, but this one was started with "
            "--no-timers, so that you see who does it. Now the timer loop is started: manage.py run_loom_timers."
        )
        timers = self.troupe.manage("timer loop", "run_loom_timers", "--interval", "0.1")
        self.patience.wait_for("the flow to end", lambda: self._execution().is_finished)
        self._reload()
        self.tell(
            f"The timer loop (process {timers.pid}) woke it, worker 2 ran the last step, and the flow "
            f"came to its end: {self._execution().get_status_display().lower()}. The order is "
            f"{self.order.get_state_display()}."
        )

    def _reload(self) -> Order:
        self.order.refresh_from_db()
        return self.order

    # Judging.

    def judge(self) -> list[Promise]:
        code, said = self.troupe.run("loom_verify", "loom_verify")
        evidence = self._evidence(code, said)
        self.title("What the provider really saw")
        self._show_requests(evidence)
        self.title("What the log says")
        self._show_log(evidence.facts)
        self.title("What was promised")
        promises = check(evidence)
        for promise in promises:
            self._say(f"   {'kept  ' if promise.kept else 'BROKEN'}  {promise.words}")
            if not promise.kept:
                self._say(f"           {promise.fault}")
        return promises

    def _show_log(self, facts: Sequence[Fact]) -> None:
        self.table(("no.", "event", "about"), [_line(fact) for fact in facts])

    def _show_requests(self, evidence: Evidence) -> None:
        asked = Counter((seen.what, seen.key) for seen in evidence.requests)
        booked = Counter((seen.what, seen.key) for seen in evidence.requests if seen.booked)
        rows = [(what, key, str(times), str(booked[what, key])) for (what, key), times in asked.items()]
        self.table(("request", "idempotency key", "times asked", "times money moved"), rows)

    def _evidence(self, verify_exit: int, verify_said: str) -> Evidence:
        facts = [_fact(event) for event in loom.history(self.execution_id)]
        fired = Event.objects.filter(execution_id=self.execution_id, kind="TIMER_FIRED").first()
        return Evidence(
            requests=self._requests(),
            facts=facts,
            status=str(loom.handle(self.execution_id).status),
            orders_made=self.orders_made,
            executions_made=self.executions_made,
            worker_exit=self.worker_exit,
            operator=OPERATOR,
            order_paid=self._reload().is_paid,
            order_transfer=self.order.transfer_id,
            bookings=Booking.objects.filter(order=self.order).count(),
            held_while_asleep=self.held_while_asleep,
            still_asleep=self.still_asleep,
            sleep_until=self.sleep_until,
            woken_at=fired.recorded_at if fired else None,
            verify_exit=verify_exit,
            verify_said=verify_said,
        )

    def _disturb(self) -> None:
        """Break a promise if that was asked for, so that the tests can see the demo notice it."""
        reference, amount = f"order {self.order.pk}", self.order.amount
        if self._sabotage == "transfer-twice":
            client.transfer(reference, self.order.iban, amount, key="sabotage")
        elif self._sabotage == "charge-twice":
            client.charge(reference, amount, key="sabotage")
        elif self._sabotage == "row-twice":
            Booking.objects.create(order=self.order, amount=amount, text="sabotage")


def _database() -> str:
    name = connection.settings_dict["NAME"]
    return f"{connection.vendor}, {name}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _wake_time(execution_id: str) -> datetime | None:
    """Until when an execution sleeps; None if it does not."""
    times = [wait.wake_at for wait in loom.handle(execution_id).waits if wait.wake_at is not None]
    return min(times, default=None)


def _fact(event: Any) -> Fact:
    data = event.payload
    return Fact(
        event.sequence,
        event.kind,
        step=str(data.get("step", "")),
        event=str(data.get("event", "")),
        by=str(data.get("principal") or ""),
    )


def _line(fact: Fact) -> tuple[str, str, str]:
    about = fact.step or fact.event
    return str(fact.sequence), fact.kind, f"{about} by {fact.by}" if fact.by else about
