"""The processes that these tests start, kill and stop.

    python -m tests.crash.child         forks one process for each job on its standard input
    python -m tests.crash.child JOB     is one such process itself, started afresh

A forked one costs a hundredth of a fresh one. It is as good: whoever forks has loaded Django, and has never had
a connection, a thread or a lease. Jobs are JSON objects; see :class:`tests.crash.kit.Lab`.
"""

from __future__ import annotations

import json
import logging
import os
import select
import signal
import sys
import traceback
from pathlib import Path
from typing import Any


def perform(job: dict[str, Any]) -> int:
    """Do a job and return the exit code."""
    log = os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.update(job.get("env", {}))
    try:
        _prepare(job)
        from tests.crash.acts import ACTS

        value = [ACTS[name](*args, **kwargs) for name, args, kwargs in job["acts"]]
        Path(job["out"]).write_text(json.dumps(value[-1], default=str))
        code: Any = 0
    except SystemExit as exc:
        code = exc.code
    except BaseException as exc:
        traceback.print_exc()
        code = getattr(exc, "returncode", 70)
    finally:
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
    return code if isinstance(code, int) else 0 if code is None else 1


def _prepare(job: dict[str, Any]) -> None:
    from datetime import timedelta

    from django.conf import settings
    from django.db import connections

    from loom_django import conf, loom
    from loom_django.engine import steps
    from tests.crash.stage import stage

    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
    logger = logging.getLogger("loom_django")
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)

    configured: Any = settings
    configured.LOOM = {**configured.LOOM, **job.get("loom", {})}
    conf._cached = None
    for alias in connections:
        connections.settings[alias].update(job.get("database", {}))
    for point, step, times, act in job.get("points", ()):
        stage.arm(point, step, times=times, act=act)
    loom.engine.crash_point = stage.engine_reached
    _watch_appends(loom.store, stage)
    _say_when_draining()
    if job.get("statement"):
        stage.watch_statements(*job["statement"])
    if job.get("carry"):
        steps.CARRY_LIMIT = job["carry"]  # type: ignore[misc]
    if job.get("shift"):
        loom.store.shift_clock(timedelta(seconds=job["shift"]))


def _watch_appends(store: Any, stage: Any) -> None:
    """Before each append the point "append" is reached, by the kind of its last event."""
    from tests.pipes import watch_pipes

    append, append_shared = store.append, store.append_shared

    def watched(commit: Any) -> None:
        stage.reached("append", str(commit.events[-1].kind))
        append(commit)

    def watched_shared(commits: Any) -> Any:
        reached(commits)
        return append_shared(commits)

    def reached(commits: Any) -> None:
        for commit in commits:
            stage.reached("append", str(commit.events[-1].kind))

    store.append, store.append_shared = watched, watched_shared
    watch_pipes(store, before=reached)


def _say_when_draining() -> None:
    """A test must know when a signal has been heard."""
    from loom_django.services.worker import WorkerService

    drain = WorkerService.drain

    def told(self: Any, grace: float) -> bool:
        print("draining", flush=True)
        return drain(self, grace)

    WorkerService.drain = told  # type: ignore[method-assign]


def serve() -> None:
    """Fork a process per job; say when it began and how it ended."""
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    unread = b""
    while True:
        readable, _, _ = select.select([0, woken], [], [])
        if woken in readable:
            os.read(woken, 4096)
            _reap()
        if 0 in readable:
            came = os.read(0, 1 << 16)
            if not came:
                return
            *jobs, unread = (unread + came).split(b"\n")
            for job in jobs:
                _fork(json.loads(job), woken, wake)


def _fork(job: dict[str, Any], *inherited: int) -> None:
    pid = os.fork()
    if pid:
        _say({"job": job["number"], "pid": pid})
        return
    code = 70
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for fd in inherited:
            os.close(fd)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        code = perform(job)
    finally:
        os._exit(code)


def _reap() -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG | os.WUNTRACED)
        except ChildProcessError:
            return
        if not pid:
            return
        if os.WIFSTOPPED(status):
            _say({"pid": pid, "stopped": True})
        else:
            _say({"pid": pid, "code": os.waitstatus_to_exitcode(status)})


def _say(what: dict[str, Any]) -> None:
    os.write(1, (json.dumps(what) + "\n").encode())


def main() -> int:
    import django

    django.setup()
    if len(sys.argv) > 1:
        return perform(json.loads(sys.argv[1]))
    from tests.crash import acts, flows  # noqa: F401  loaded once, for all that are forked

    serve()
    return 0


if __name__ == "__main__":
    sys.exit(main())
