"""Schedules: what there is, and what a person may do to one."""

from __future__ import annotations

import argparse
import json
from typing import Any

from django.core.management.base import BaseCommand

from loom_django.management.base import act_errors, add_act_options, operator_named
from loom_django.management.options import add_format
from loom_django.runtime import loom
from loom_django.services import schedule_acts
from loom_django.services.operators import Operator
from loom_django.services.schedule_acts import ScheduleDone
from loom_django.services.schedule_list import ScheduleView, all_schedules

ACTS = {
    "pause": (schedule_acts.pause, "Skip what falls due from now on."),
    "resume": (
        schedule_acts.resume,
        "Start what falls due from now on; what fell due until then is skipped.",
    ),
    "trigger": (schedule_acts.trigger, "Start the flow now, beside the occurrences, paused or not."),
}


class Command(BaseCommand):
    help = "Lists schedules; pauses, resumes or triggers one."

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        acts = parser.add_subparsers(dest="act", metavar="{list,pause,resume,trigger}", required=True)
        listing = acts.add_parser("list", help="All schedules, with their next occurrences.")
        add_format(listing)
        for name, (_, what) in ACTS.items():
            one = acts.add_parser(name, help=what, description=what)
            one.add_argument("schedule_id", metavar="ID", help="The schedule's id.")
            add_act_options(one, rehearsal="Say what would be done; change nothing.")

    def handle(self, *args: Any, **options: Any) -> None:
        if options["act"] == "list":
            self._list(all_schedules(loom.engine), options["format"])
            return
        operator = operator_named(options["user"])
        act, _ = ACTS[options["act"]]
        with act_errors():
            done = act(
                loom, operator, options["schedule_id"], reason=options["reason"], dry_run=options["dry_run"]
            )
        self._print(done, operator, options)

    def _list(self, views: list[ScheduleView], form: str) -> None:
        if form == "json":
            self.stdout.write(json.dumps([_described(view) for view in views]))
            return
        for view in views:
            self.stdout.write(
                f"{view.id}: {view.cron} ({view.time_zone}) starts {view.flow_id}, {view.state}"
            )
            if view.next:
                local = view.next[0].astimezone(view.zone) if view.zone else view.next[0]
                self.stdout.write(f"    next {local.isoformat()} ({view.next[0].isoformat()})")
            if view.row is not None and view.row.last_act:
                row = view.row
                at = row.acted_at.isoformat() if row.acted_at else ""
                self.stdout.write(
                    f"    last act: {row.last_act} by {row.acted_by or 'a program'} at {at}: {row.act_reason}"
                )
        if not views:
            self.stdout.write("there are no schedules")

    def _print(self, done: ScheduleDone, operator: Operator, options: dict[str, Any]) -> None:
        if options["format"] == "json":
            about = {
                "act": f"{done.name}_schedule",
                "schedule_id": done.schedule_id,
                "principal": operator.name,
                "dry_run": options["dry_run"],
                "changed": done.changed,
                "execution_id": done.execution_id or None,
                "runs": done.runs,
            }
            self.stdout.write(json.dumps(about))
            return
        self.stdout.write(_told(done, dry_run=options["dry_run"]))
        if done.runs == "worker":
            self.stdout.write("a worker takes it up")


def _told(done: ScheduleDone, *, dry_run: bool) -> str:
    if not done.changed:
        state = "is paused already" if done.name == "pause" else "is not paused"
        return f"{done.schedule_id} {state}; nothing was changed"
    if done.name == "trigger":
        which = f"{done.flow.id} version {done.flow.version}" if done.flow is not None else ""
        busy = "; its newest run has not ended" if done.busy else ""
        return f"would start {which}{busy}" if dry_run else f"started {which} as {done.execution_id}{busy}"
    verb = {"pause": "paused", "resume": "resumed"}[done.name]
    return f"would have {done.schedule_id} {verb}" if dry_run else f"{done.schedule_id} is {verb}"


def _described(view: ScheduleView) -> dict[str, Any]:
    row = view.row
    return {
        "id": view.id,
        "flow": view.flow_id,
        "cron": view.cron,
        "time_zone": view.time_zone,
        "state": view.state,
        "declared": view.schedule is not None,
        "next": [occurrence.isoformat() for occurrence in view.next],
        "decided_until": row.decided_until.isoformat() if row else None,
        "paused_at": row.paused_at.isoformat() if row and row.paused_at else None,
        "last_execution_id": (row.last_execution_id or None) if row else None,
        "last_act": (row.last_act or None) if row else None,
        "acted_by": (row.acted_by or None) if row else None,
        "reason": (row.act_reason or None) if row else None,
    }
