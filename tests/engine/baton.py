"""Threads that go on one store call at a time, in an order that a test says, and may die at any of them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any, Final

from loom_django.stores.base import Commit

# The calls of whoever answers a park.
ANSWER: Final = ("load", "append")


class Died(BaseException):
    """The process ended here; no handler of the engine's takes it for an error."""


class Baton:
    """A thread that goes on for one step at a time, each up to its next store call, or dies there.

    It waits between store calls only, so it never holds a lock while another one runs.
    """

    def __init__(self) -> None:
        self._go = threading.Semaphore(0)
        self._stands = threading.Semaphore(0)
        self._dead = False
        self.over = False

    def wait(self) -> None:
        """The thread has come to a store call."""
        self._stands.release()
        self._go.acquire()
        if self._dead:
            raise Died

    def leave(self) -> None:
        """The thread is through."""
        self.over = True
        self._stands.release()

    def await_stand(self) -> None:
        assert self._stands.acquire(timeout=60), "a step does not end"

    def step(self) -> None:
        """Let it make its store call, and go on to the next one."""
        if not self.over:
            self._go.release()
            self.await_stand()

    def die(self) -> None:
        self._dead = True
        self.step()
        assert self.over


def _pass(_: str) -> None:
    """Nothing to do at this call."""


class Stepped:
    """A store as one party has it, with somebody who waits, meddles or dies before and after its calls."""

    def __init__(
        self,
        store: Any,
        *,
        before: Callable[[str], None] = _pass,
        after: Callable[[str], None] = _pass,
        conditional: bool = True,
        calls: Collection[str] = ANSWER,
    ) -> None:
        self._store = store
        self._calls = calls
        self._before = before
        self._after = after
        self._conditional = conditional

    def __getattr__(self, name: str) -> Any:
        honest = getattr(self._store, name)
        if name not in self._calls:
            return honest
        if name == "append" and not self._conditional:
            honest = self._append_anyhow

        def stepped(*args: Any, **kwargs: Any) -> Any:
            self._before(name)
            result = honest(*args, **kwargs)
            self._after(name)
            return result

        return stepped

    def _append_anyhow(self, commit: Commit) -> None:
        """What a store would do that gives the token to whoever asks, whatever it and the log say."""
        if commit.takes is not None:
            taken = self._store.acquire_fence(commit.execution_id)
            events = tuple(replace(event, fence=taken) for event in commit.events)
            commit = replace(commit, events=events, fence=taken, takes=None)
        self._store.append(commit)
