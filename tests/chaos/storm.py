"""Everything is due at once: thousands of timers and hundreds of expired leases, before a small fleet.

What is claimed: each is served once; no process runs more bodies at a time than it was told; connections are
bounded by the fleet's size; and when all is done the fleet is idle.
"""

from __future__ import annotations

import subprocess
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from django.db import connection

from loom_django import loom
from loom_django.kernel.state import TERMINAL_STATUSES, Status
from loom_django.models import Execution
from loom_django.services.dispatch import InlineDispatcher
from loom_django.stores.base import ANY_FLOW
from tests.chaos.flows import abandoned, sleeper
from tests.chaos.site import Site, eventually
from tests.crash.kit import check_history

# A worker's connections beside those of its bodies: the loop's, the renewal's, those of notices, that of shared appends.
OWN_CONNECTIONS = 5
IDLE = 5.0


@dataclass
class Plan:
    timers: int = 5000
    leases: int = 500
    workers: int = 4
    concurrency: int = 4


@dataclass
class Storm:
    site: Site
    plan: Plan
    fleet: list[subprocess.Popen[bytes]] = field(default_factory=list)
    most_connections: int = 0

    def run(self) -> dict[str, Any]:
        self._prepare()
        began = time.monotonic()
        limit = str(self.plan.concurrency)
        self.fleet = [self.site.start_worker("--concurrency", limit) for _ in range(self.plan.workers)]
        eventually(self._all_ended, "all have ended", instead=self._standing)
        took = time.monotonic() - began
        self._check()
        idle = self._watch_idle()
        self.site.stop_workers(self.fleet)
        return {
            "timers": self.plan.timers,
            "leases": self.plan.leases,
            "seconds": round(took, 1),
            "connections": self.most_connections,
            "at a time": dict(self._most_at_a_time()),
            **idle,
        }

    def _prepare(self) -> None:
        """Executions that sleep until now, and others whose holder died before it had begun."""
        for number in range(self.plan.leases):
            abandoned.using(execution_id=f"lease-{number}").start()
        taken = 0
        while taken < self.plan.leases:
            claims = loom.store.claim_ready(owner="gone", token=7, ttl=0.0, limit=50, known=ANY_FLOW)
            taken += len(claims)
        loom.dispatcher = InlineDispatcher(loom.engine)
        for number in range(self.plan.timers):
            sleeper.using(execution_id=f"timer-{number}").start(0.05)

    def _all_ended(self) -> bool:
        self.most_connections = max(self.most_connections, self._connections())
        for worker in self.fleet:
            assert worker.poll() is None, self.site.log_of(worker)[-4000:]
        ended = [str(status) for status in TERMINAL_STATUSES]
        return not Execution.objects.exclude(status__in=ended).exists()

    def _standing(self) -> object:
        return Counter(Execution.objects.values_list("status", flat=True))

    def _connections(self) -> int:
        if connection.vendor != "postgresql":
            return 0
        with connection.cursor() as cursor:
            cursor.execute(
                "select count(*) from pg_stat_activity where datname = current_database() "
                "and pid <> pg_backend_pid() and backend_type = 'client backend'"
            )
            return int(cursor.fetchone()[0])

    def _most_at_a_time(self) -> dict[int, int]:
        """By process, from what the tools wrote when they began and ended."""
        running: defaultdict[int, int] = defaultdict(int)
        most: defaultdict[int, int] = defaultdict(int)
        for line in sorted(self.site.ledger("serve"), key=lambda line: (line["at"], line["by"])):
            running[line["pid"]] += line["by"]
            most[line["pid"]] = max(most[line["pid"]], running[line["pid"]])
        return most

    def _check(self) -> None:
        served = Counter(line["execution"] for line in self.site.ledger("serve") if line["by"] > 0)
        every = {f"timer-{number}" for number in range(self.plan.timers)}
        every |= {f"lease-{number}" for number in range(self.plan.leases)}
        assert set(served) == every, set(served) ^ every
        twice = {execution_id: count for execution_id, count in served.items() if count != 1}
        assert not twice, twice
        assert set(Execution.objects.values_list("status", flat=True)) == {str(Status.COMPLETED)}
        for execution_id in sorted(every)[:: max(1, len(every) // 200)]:
            check_history(execution_id)
        most = self._most_at_a_time()
        assert max(most.values()) <= self.plan.concurrency, dict(most)
        bound = self.plan.workers * (self.plan.concurrency + OWN_CONNECTIONS)
        assert self.most_connections <= bound, (self.most_connections, bound)

    def _watch_idle(self) -> dict[str, Any]:
        """What an idle fleet costs: a share of one core for each worker, and transactions per second for all."""
        eventually(lambda: self._cpu(1.0) < 0.5, "the fleet comes to rest")
        before = self._transactions()
        share = self._cpu(IDLE) / self.plan.workers
        rate = (self._transactions() - before) / IDLE
        assert share < 0.15, f"an idle worker takes {share:.0%} of a core"
        return {"idle share of a core": round(share, 3), "idle transactions per second": round(rate, 1)}

    def _cpu(self, seconds: float) -> float:
        """Cores that the fleet uses, measured over that time."""
        before = self._ticks()
        time.sleep(seconds)
        return (self._ticks() - before) / 100 / seconds

    def _ticks(self) -> int:
        total = 0
        for worker in self.fleet:
            fields = Path(f"/proc/{worker.pid}/stat").read_text().rpartition(")")[2].split()
            total += int(fields[11]) + int(fields[12])
        return total

    def _transactions(self) -> int:
        if connection.vendor != "postgresql":
            return 0
        with connection.cursor() as cursor:
            cursor.execute(
                "select xact_commit + xact_rollback from pg_stat_database where datname = current_database()"
            )
            return int(cursor.fetchone()[0])
