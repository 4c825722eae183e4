"""Ways to watch what an event loop lands by itself, and to have it land by a thread instead."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from loom_django.stores.base import Commit, Told


class WatchedPipe:
    """A pipe, with calls before commits are sent and when their answer has come."""

    def __init__(
        self,
        pipe: Any,
        before: Callable[[Sequence[Commit]], None],
        after: Callable[[Sequence[Commit], Sequence[bool]], None],
    ) -> None:
        self._pipe, self._before, self._after = pipe, before, after

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pipe, name)

    def send(self, commits: Sequence[Commit], tell: Told) -> bool:
        def told(landed: Sequence[bool]) -> None:
            self._after(commits, landed)
            tell(landed)

        self._before(commits)
        return bool(self._pipe.send(commits, told))


def watch_pipes(
    store: Any,
    before: Callable[[Sequence[Commit]], None] = lambda commits: None,
    after: Callable[[Sequence[Commit], Sequence[bool]], None] = lambda commits, landed: None,
) -> None:
    """Watch all pipes that the store opens from now on."""
    plain = store.pipe

    def pipe(loop: Any) -> Any:
        made = plain(loop)
        return None if made is None else WatchedPipe(made, before, after)

    store.pipe = pipe


def by_thread(store: Any) -> None:
    """Have event loops land by a thread, whose calls a test may watch, refuse or hold up."""
    store.pipe = lambda loop: None
