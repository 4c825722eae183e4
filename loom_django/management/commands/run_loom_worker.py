"""The worker: runs bodies, and carries timers, schedules and recovery."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from pathlib import Path
from typing import Any

from django.core.management.base import BaseCommand, CommandError

from loom_django import compat, conf
from loom_django.engine.core import Engine
from loom_django.management.options import (
    beat,
    listening,
    logging_to_console,
    names,
    positive_float,
    positive_int,
)
from loom_django.runtime import loom
from loom_django.services.dispatch import WorkerDispatcher
from loom_django.services.garbage import rare_collections
from loom_django.services.leases import LeaseKeeper
from loom_django.services.loop import Loop, Service, soonest, stop_on_signals
from loom_django.services.notices import Listener, poll_interval
from loom_django.services.recovery import RecoveryService, hand_back
from loom_django.services.schedules import ScheduleService
from loom_django.services.timers import TimerService
from loom_django.services.worker import WorkerService, next_in

log = logging.getLogger("loom_django.worker")

GRACE = 25.0


class Command(BaseCommand):
    help = (
        "Runs flows that are ready, wakes those whose timers are due, starts those of schedules, and takes up "
        "what dead processes left behind. Any number of copies may run."
    )

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--queues", type=names, metavar="A,B", help="Serve these queues only (default: all of them)."
        )
        parser.add_argument(
            "--concurrency", type=positive_int, help="Plain bodies at a time (default: LOOM['CONCURRENCY'])."
        )
        parser.add_argument(
            "--async-concurrency",
            type=positive_int,
            help="Async bodies at a time (default: LOOM['ASYNC_CONCURRENCY']).",
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

    @compat.without_pools()
    @rare_collections()
    @logging_to_console
    def handle(self, *args: Any, **options: Any) -> None:
        self._check_queues(options["queues"])
        engine = loom.engine
        # What this process wakes or recovers is claimed like anything else, by this or another worker.
        before, loom.dispatcher = loom.dispatcher, WorkerDispatcher(engine.ring)
        try:
            self._work(engine, options)
        finally:
            loom.dispatcher = before

    def _work(self, engine: Engine, options: dict[str, Any]) -> None:
        worker = self._worker(options)
        loop = Loop(
            [beat("worker"), worker, *self._others(options)],
            interval=lambda: options["interval"] or poll_interval(conf.get_settings(), engine.store),
            after_turn=lambda: self._after_turn(worker, loop),
            draw=engine.draw,
            next_in=lambda: self._next_in(worker, timers=not options["no_timers"]),
            ready_file=options["ready_file"],
        )
        worker.on_free = lambda: self._on_free(loop, options)
        log.info(
            "a worker runs, %d bodies at a time, of %s",
            worker.concurrency,
            ", ".join(options["queues"]) if options["queues"] else "all queues",
        )
        log.info("and %d async bodies at a time, in one event loop", worker.tasks)
        undo = stop_on_signals(lambda: self._request_stop(worker, loop))
        try:
            if options["once"]:
                fine = loop.run_once(busy=worker.stirred)
            else:
                with listening(engine.store, loop) as self.listener:
                    fine = loop.run()
            drained = worker.drain(options["grace"])
        finally:
            undo()
        self._end(worker, drained=drained, fine=fine)

    listener: Listener | None = None
    schedules: ScheduleService | None = None

    def _next_in(self, worker: WorkerService, *, timers: bool) -> float | None:
        schedules = self.schedules.next_in() if self.schedules is not None else None
        return soonest(next_in(loom.store, worker, timers=timers), schedules)

    def _check_queues(self, queues: list[str] | None) -> None:
        declared = conf.get_settings().queues
        unknown = [name for name in queues or () if name not in declared]
        if unknown:
            raise CommandError(
                f"--queues: {', '.join(map(repr, unknown))} is not declared; LOOM['QUEUES'] has "
                f"{', '.join(map(repr, declared))}",
                returncode=2,
            )

    def _worker(self, options: dict[str, Any]) -> WorkerService:
        return WorkerService(
            loom.engine,
            concurrency=options["concurrency"] or conf.get_settings().CONCURRENCY,
            tasks=options["async_concurrency"] or conf.get_settings().ASYNC_CONCURRENCY,
            queues=options["queues"],
            max_executions=options["max_executions"],
        )

    def _others(self, options: dict[str, Any]) -> list[Service]:
        services: list[Service] = []
        if not options["no_timers"]:
            services.append(TimerService(loom.engine, lambda: loom.dispatcher))
        if not options["no_schedules"]:
            self.schedules = ScheduleService(loom.engine, lambda: loom.dispatcher)
            services.append(self.schedules)
        if not options["no_recovery"]:
            services.append(RecoveryService(loom))
        return services

    def _on_free(self, loop: Loop, options: dict[str, Any]) -> None:
        loop.wake.set()
        if options["no_timers"]:
            loom.engine.ring()  # a body that has parked may have left a timer for another process's loop

    def _after_turn(self, worker: WorkerService, loop: Loop) -> None:
        loom.store.close_old_connections()
        if self._broken(worker) or (worker.exhausted and not worker.running):
            loop.request_stop()

    def _broken(self, worker: WorkerService) -> str:
        """Why this process cannot go on, or ''."""
        keeper = loom.engine.keeper
        if worker.overrun:
            return "too many calls outlived their timeouts"
        if worker.stuck:
            return "an async body has held up all others for EXECUTE_TIMEOUT"
        if isinstance(keeper, LeaseKeeper) and keeper.broken:
            return "leases are not renewed any more"
        if worker.broken:
            return "a thread that runs bodies broke off"
        if self.listener is not None and self.listener.broken:
            return "notices are not heard any more"
        return ""

    def _request_stop(self, worker: WorkerService, loop: Loop) -> None:
        worker.draining.set()
        loop.request_stop()

    def _end(self, worker: WorkerService, *, drained: bool, fine: bool) -> None:
        self.stdout.write(f"{worker.claimed} executions claimed")
        broken = self._broken(worker)
        if not drained:
            # A thread that is still inside a step cannot be ended but by the process; what it held is handed
            # back before, so that nobody has to wait for its lease.
            self.stderr.write(f"{worker.running} steps outlived the grace time and are handed back")
            handed_back = self._hand_back(worker)
            if broken:
                self.stderr.write(f"{broken}; this process ends")
            sys.stdout.flush()
            os._exit(1 if broken or not handed_back else 0)
        if broken:
            raise CommandError(f"{broken}; this process ends", returncode=1)
        if not fine:
            raise CommandError("not everything could be served; see the log", returncode=1)

    def _hand_back(self, worker: WorkerService) -> bool:
        """Hand back what is held; False if the database is away, for the process ends all the same."""
        try:
            hand_back(loom, worker.held)
        except Exception as exc:
            self.stderr.write(f"it could not be handed back: {exc}. Others take it when its lease has ended")
            return False
        return True
