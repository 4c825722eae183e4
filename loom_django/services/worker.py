"""A worker: claims ready executions in batches and runs their bodies in threads.

Any number of copies may run. A waiting execution is a row; it holds no thread here. When the process is told to
end, nothing more is claimed, each body is stopped at its next step and handed back, and steps in flight may
finish within a grace time.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final

from loom_django.engine.core import Engine, random_token
from loom_django.engine.drive import abandoned
from loom_django.engine.run import run_execution
from loom_django.services.dispatch import run_logged
from loom_django.stores.base import Claimed

log = logging.getLogger("loom_django.worker")

BATCH: Final = 50

# Threads whose tool outlived its timeout; above this a worker ends, since they can only be ended with it.
MAX_ABANDONED: Final = 32


class WorkerService:
    """Claims what is ready and has it run."""

    name = "worker"

    def __init__(
        self,
        engine: Engine,
        *,
        concurrency: int,
        queues: Sequence[str] | None = None,
        max_executions: int | None = None,
        on_free: Callable[[], None] = lambda: None,
    ) -> None:
        self.engine = engine
        self.concurrency = concurrency
        self.queues = queues
        self.max_executions = max_executions
        self.on_free = on_free
        self.draining = threading.Event()
        self.claimed = 0
        self._asked_at = 0
        # By claim, not by execution: a body that hangs may lose its execution to another thread of this worker.
        self._held: set[Claimed] = set()
        self._condition = threading.Condition()
        self._claims: queue.SimpleQueue[Claimed | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []

    @property
    def running(self) -> int:
        """How many bodies are running now."""
        with self._condition:
            return len(self._held)

    @property
    def held(self) -> set[str]:
        """The ids of the executions whose bodies are running now."""
        with self._condition:
            return {claim.execution_id for claim in self._held}

    def stirred(self) -> bool:
        """True if bodies are running, or some were claimed since this was asked: they may have left more to do."""
        with self._condition:
            stirred = bool(self._held) or self.claimed != self._asked_at
            self._asked_at = self.claimed
            return stirred

    @property
    def exhausted(self) -> bool:
        """True when as many executions were claimed as were asked for."""
        return self.max_executions is not None and self.claimed >= self.max_executions

    @property
    def overrun(self) -> bool:
        """True when too many threads were left behind by timeouts."""
        return abandoned.count > MAX_ABANDONED

    def tick(self) -> bool:
        """Claim as many as there is room for; True if the queue may hold more."""
        room = min(BATCH, self.concurrency - self.running)
        if self.max_executions is not None:
            room = min(room, self.max_executions - self.claimed)
        if room <= 0 or self.draining.is_set():
            return False
        token = random_token()
        claims = self.engine.store.claim_ready(
            owner=self.engine.identity.name,
            token=token,
            ttl=self.engine.settings().LEASE_TTL,
            limit=room,
            known=self.engine.known(),
            queues=self.queues,
        )
        for claim in claims:
            self._submit(claim)
        return len(claims) >= room and self.running < self.concurrency

    def _submit(self, claim: Claimed) -> None:
        with self._condition:
            self._held.add(claim)
            self.claimed += 1
            short = len(self._held) > len(self._threads)
        # Kept from here on: on a busy machine the body may be entered late, and its lease is not to run out.
        self.engine.keeper.hold(claim.execution_id, claim.token, _not_entered)
        self._claims.put(claim)
        if short:
            thread = threading.Thread(target=self._serve, name=f"loom-body-{len(self._threads)}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _serve(self) -> None:
        """Run bodies one after the other; the thread's connection is kept between them and closed at its end."""
        try:
            while (claim := self._claims.get()) is not None:
                self._run(claim)
        finally:
            self.engine.store.close_connections()

    def _run(self, claim: Claimed) -> None:
        store = self.engine.store
        try:
            store.close_old_connections()
            run_logged(
                lambda: run_execution(
                    self.engine,
                    claim.execution_id,
                    token=claim.token,
                    fence=claim.fence or None,
                    stop=self.draining,
                ),
                claim.execution_id,
            )
        except BaseException:
            log.exception("a body's thread broke off", extra={"execution_id": claim.execution_id})
        finally:
            store.leave_transaction()  # whatever left it: the thread's next body is not to find it
            store.close_old_connections()
            self.engine.keeper.drop(claim.execution_id, claim.token)
            with self._condition:
                self._held.discard(claim)
                self._condition.notify_all()
            self.on_free()

    def drain(self, grace: float) -> bool:
        """Claim nothing more and wait for the steps in flight; False if some outlived the grace time."""
        self.draining.set()
        deadline = time.monotonic() + grace
        with self._condition:
            while self._held:
                left = deadline - time.monotonic()
                if left <= 0:
                    return False
                self._condition.wait(left)
        for _ in self._threads:
            self._claims.put(None)
        for thread in self._threads:
            thread.join()
        return True


def _not_entered() -> None:
    """A lease that is lost before its body is entered is noticed at the body's first append."""
