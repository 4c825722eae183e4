"""The timer loop: wakes what is due, and starts what schedules say."""

from __future__ import annotations

import argparse
from typing import Any

from django.core.management.base import BaseCommand, CommandError

from loom_django import conf
from loom_django.management.options import beat, log_to_console, positive_float, positive_int
from loom_django.runtime import loom
from loom_django.services.dispatch import InlineDispatcher, TasksDispatcher
from loom_django.services.loop import Loop, Service, stop_on_signals
from loom_django.services.recovery import ReadyService, RecoveryService
from loom_django.services.schedules import ScheduleService
from loom_django.services.timers import BATCH, TimerService


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

    def handle(self, *args: Any, **options: Any) -> None:
        log_to_console(self, options["verbosity"])
        engine = loom.engine
        service = TimerService(engine, lambda: loom.dispatcher, limit=options["limit"])
        services: list[Service] = [beat("timers"), service]
        if not options["no_schedules"]:
            services.append(ScheduleService(engine, lambda: loom.dispatcher))
        if isinstance(loom.dispatcher, InlineDispatcher):
            services.append(ReadyService(loom))
        elif isinstance(loom.dispatcher, TasksDispatcher):
            services.append(RecoveryService(loom))  # beside task workers nothing else of loom's need run
        loop = Loop(
            services,
            interval=lambda: options["interval"] or conf.get_settings().POLL_INTERVAL,
            after_turn=engine.store.close_old_connections,
            draw=engine.draw,
        )
        if isinstance(loom.dispatcher, InlineDispatcher):
            loom.dispatcher.stop = loop.stop
        undo = stop_on_signals(loop.request_stop)
        try:
            if not options["once"]:
                loop.run()
            elif not loop.run_once():
                raise CommandError("the timers could not all be served; see the log", returncode=1)
        finally:
            undo()
        self.stdout.write(f"{service.fired} timers fired")
