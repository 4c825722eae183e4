"""The worker: runs bodies, and carries timers, schedules and recovery."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from django.core.management.base import BaseCommand, CommandError

from loom_django import conf
from loom_django.management.options import beat, log_to_console, positive_float, positive_int
from loom_django.runtime import loom
from loom_django.services.dispatch import WorkerDispatcher
from loom_django.services.leases import LeaseKeeper
from loom_django.services.loop import Loop, Service, stop_on_signals
from loom_django.services.recovery import RecoveryService, hand_back
from loom_django.services.schedules import ScheduleService
from loom_django.services.timers import TimerService
from loom_django.services.worker import WorkerService

GRACE = 25.0


class Command(BaseCommand):
    help = (
        "Runs flows that are ready, wakes those whose timers are due, starts those of schedules, and takes up "
        "what dead processes left behind. Any number of copies may run."
    )

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--concurrency", type=positive_int, help="Bodies at a time (default: LOOM['CONCURRENCY'])."
        )
        parser.add_argument(
            "--interval", type=positive_float, help="Seconds between polls (default: LOOM['POLL_INTERVAL'])."
        )
        parser.add_argument("--once", action="store_true", help="Run what is ready or due now, then end.")
        parser.add_argument("--max-executions", type=positive_int, help="End after claiming so many.")
        parser.add_argument("--no-timers", action="store_true", help="Leave timers to others.")
        parser.add_argument("--no-schedules", action="store_true", help="Leave schedules to others.")
        parser.add_argument("--no-recovery", action="store_true", help="Leave recovery to others.")
        parser.add_argument(
            "--ready-file", type=Path, help="A file that says, as JSON, when the loop last made progress."
        )
        parser.add_argument(
            "--grace",
            type=positive_float,
            default=GRACE,
            help="Seconds that steps in flight may take to end when the worker is told to stop "
            "(default: %(default)s).",
        )

    def handle(self, *args: Any, **options: Any) -> None:
        log_to_console(self, options["verbosity"])
        # What this process wakes or recovers is claimed like anything else, by this or another worker.
        loom.dispatcher = WorkerDispatcher()
        worker = self._worker(options)
        loop = Loop(
            [beat("worker"), worker, *self._others(options)],
            interval=lambda: options["interval"] or conf.get_settings().POLL_INTERVAL,
            after_turn=lambda: self._after_turn(worker, loop),
            draw=loom.engine.draw,
            ready_file=options["ready_file"],
        )
        worker.on_free = loop.wake.set
        undo = stop_on_signals(lambda: self._request_stop(worker, loop))
        try:
            fine = loop.run_once(busy=worker.stirred) if options["once"] else loop.run()
            drained = worker.drain(options["grace"])
        finally:
            undo()
        self._end(worker, drained=drained, fine=fine)

    def _worker(self, options: dict[str, Any]) -> WorkerService:
        return WorkerService(
            loom.engine,
            concurrency=options["concurrency"] or conf.get_settings().CONCURRENCY,
            max_executions=options["max_executions"],
        )

    def _others(self, options: dict[str, Any]) -> list[Service]:
        services: list[Service] = []
        if not options["no_timers"]:
            services.append(TimerService(loom.engine, lambda: loom.dispatcher))
        if not options["no_schedules"]:
            services.append(ScheduleService(loom.engine, lambda: loom.dispatcher))
        if not options["no_recovery"]:
            services.append(RecoveryService(loom))
        return services

    def _after_turn(self, worker: WorkerService, loop: Loop) -> None:
        loom.store.close_old_connections()
        if worker.overrun or self._keeper_broken() or (worker.exhausted and not worker.running):
            loop.request_stop()

    def _keeper_broken(self) -> bool:
        keeper = loom.engine.keeper
        return isinstance(keeper, LeaseKeeper) and keeper.broken

    def _request_stop(self, worker: WorkerService, loop: Loop) -> None:
        worker.draining.set()
        loop.request_stop()

    def _end(self, worker: WorkerService, *, drained: bool, fine: bool) -> None:
        self.stdout.write(f"{worker.claimed} executions claimed")
        if not drained:
            # A thread that is still inside a step cannot be ended but by the process; what it held is handed
            # back before, so that nobody has to wait for its lease.
            self.stderr.write(f"{worker.running} steps outlived the grace time and are handed back")
            hand_back(loom, worker.held)
            sys.stdout.flush()
            os._exit(0)
        if worker.overrun:
            raise CommandError("too many calls outlived their timeouts; this process ends", returncode=1)
        if self._keeper_broken():
            raise CommandError("leases are not renewed any more; this process ends", returncode=1)
        if not fine:
            raise CommandError("not everything could be served; see the log", returncode=1)
