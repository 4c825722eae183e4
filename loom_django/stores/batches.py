"""Which commits may ride in one statement, and which of them are one commit to the server."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from loom_django.stores.base import Commit


@dataclass(slots=True)
class Seat:
    """A commit on its way: the places that it has among those handed in, and its batch."""

    places: list[int]
    commit: Commit
    batch: int = 0


class Batches:
    """Commits in groups that one statement may carry; each execution's commits keep their order.

    No two of a group touch one execution, but for wakes of the same one.
    """

    def __init__(self, commits: Iterable[tuple[int, Commit]]) -> None:
        self._batches: list[list[Seat]] = []
        self._newest: dict[str, Seat] = {}  # per execution that is written to
        self._woken: dict[str, int] = {}  # per execution that is woken: the newest batch that does it
        for place, commit in commits:
            if not self._ride(place, commit):
                self._seat(Seat([place], commit))

    def __iter__(self) -> Iterator[list[Seat]]:
        return iter(self._batches)

    def _ride(self, place: int, commit: Commit) -> bool:
        """Join the commit before it, if that one only adds events, so that one refusal is true of both."""
        seat = self._newest.get(commit.execution_id)
        if seat is None or self._woken.get(commit.execution_id, -1) >= seat.batch:
            return False
        earlier = seat.commit
        alike = _identity(earlier) == _identity(commit)
        follows = earlier.events[-1].sequence + 1 == commit.first_sequence
        if (
            not (alike and follows and _only_adds(earlier))
            or commit.also
            or commit.wake
            or commit.wakes is not None
        ):
            return False
        seat.places.append(place)
        seat.commit = replace(commit, events=(*earlier.events, *commit.events))
        return True

    def _seat(self, seat: Seat) -> None:
        own: set[str] = set()
        woken: set[str] = set()
        for one in (seat.commit, *seat.commit.also):
            own.add(one.execution_id)
            own.add(one.wakes_of or one.execution_id)
            woken.update(one.wake)
        for key in own | woken:
            if key in self._newest:
                seat.batch = max(seat.batch, self._newest[key].batch + 1)
        for key in own:
            if key in self._woken:
                seat.batch = max(seat.batch, self._woken[key] + 1)
        self._newest.update(dict.fromkeys(own, seat))
        self._woken.update(dict.fromkeys(woken, seat.batch))
        if seat.batch == len(self._batches):
            self._batches.append([])
        self._batches[seat.batch].append(seat)


def _identity(commit: Commit) -> tuple[Any, ...]:
    return commit.execution_id, commit.events[0].writer, commit.fence, commit.unguarded


def _only_adds(commit: Commit) -> bool:
    more = (commit.also, commit.wake, commit.timers, commit.timers_off, commit.messages)
    return commit.ownership.mode == "keep" and commit.wakes is None and not any(more)
