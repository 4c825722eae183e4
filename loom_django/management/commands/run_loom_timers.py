"""The timer loop: wakes what is due, and starts what schedules say."""

from __future__ import annotations

import argparse
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

from django.core.management.base import BaseCommand, CommandError

from loom_django import compat, conf
from loom_django.management.options import (
    beat,
    listening,
    logging_to_console,
    positive_float,
    positive_int,
)
from loom_django.runtime import loom
from loom_django.services.dispatch import InlineDispatcher, TasksDispatcher
from loom_django.services.loop import Loop, Service, soonest, stop_on_signals
from loom_django.services.notices import Listener, poll_interval
from loom_django.services.recovery import LEFT_READY, ReadyService, RecoveryService
from loom_django.services.schedules import ScheduleService
from loom_django.services.timers import BATCH, TimerService
from loom_django.stores.base import Store


class Command(BaseCommand):
    help = (
        "Wakes executions whose timers are due: sleeps, timeouts, retries, messages left over, deadlines. "
        "Starts the flows of schedules at their times. Any number of copies may run. With the inline dispatcher "
        "it runs their bodies too; with the tasks dispatcher it recovers what dead processes left, and enqueues "
        "again what was lost."
    )

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--once", action="store_true", help="Serve what is due now, then end.")
        parser.add_argument("--no-schedules", action="store_true", help="Leave schedules to others.")
        parser.add_argument(
            "--interval", type=positive_float, help="Seconds between polls (default: LOOM['POLL_INTERVAL'])."
        )
        parser.add_argument(
            "--limit", type=positive_int, default=BATCH, help="Rows taken at a time (default: %(default)s)."
        )

    @compat.without_pools()
    @logging_to_console
    def handle(self, *args: Any, **options: Any) -> None:
        engine = loom.engine
        service = TimerService(engine, lambda: loom.dispatcher, limit=options["limit"])
        services: list[Service] = [beat("timers"), service]
        schedules = None if options["no_schedules"] else ScheduleService(engine, lambda: loom.dispatcher)
        if schedules is not None:
            services.append(schedules)
        inline = isinstance(loom.dispatcher, InlineDispatcher)
        if inline:
            services.append(ReadyService(loom))
        elif isinstance(loom.dispatcher, TasksDispatcher):
            services.append(RecoveryService(loom))  # beside task workers nothing else of loom's need run
        loop = Loop(
            services,
            interval=lambda: options["interval"] or poll_interval(conf.get_settings(), engine.store),
            after_turn=engine.store.close_old_connections,
            draw=engine.draw,
            next_in=lambda: soonest(
                next_in(engine.store, runs=inline), schedules.next_in() if schedules is not None else None
            ),
        )
        if isinstance(loom.dispatcher, InlineDispatcher):
            loom.dispatcher.stop = loop.stop
        undo = stop_on_signals(loop.request_stop)
        try:
            with nullcontext() if inline else engine.store.grouping():  # for what is woken in batches
                if not options["once"]:
                    self._run(loop)
                elif not loop.run_once():
                    raise CommandError("the timers could not all be served; see the log", returncode=1)
        finally:
            undo()
        self.stdout.write(f"{service.fired} timers fired")

    def _run(self, loop: Loop) -> None:
        with listening(loom.store, loop) as listener:
            loop.after_turn = lambda: self._after_turn(loop, listener)
            loop.run()
        if listener is not None and listener.broken:
            raise CommandError("notices are not heard any more; this process ends", returncode=1)

    def _after_turn(self, loop: Loop, listener: Listener | None) -> None:
        loom.store.close_old_connections()
        if listener is not None and listener.broken:
            loop.request_stop()


def next_in(store: Store, *, runs: bool) -> float | None:
    """In how many seconds a timer is due, or something that this loop ``runs`` has been left ready; or None."""
    upcoming = store.upcoming()
    left = upcoming.ready + timedelta(seconds=LEFT_READY) if runs and upcoming.ready is not None else None
    return soonest(upcoming.seconds_to(upcoming.timer), upcoming.seconds_to(left))
