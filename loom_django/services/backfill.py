"""Fence rows for parks that this app did not write: logs that were imported, or restored without their fences.

A park makes its row by itself, so that whoever answers it and whoever acquires its fence meet there. Without
the row the first answer and the first acquire can both succeed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from django.db import models

from loom_django.engine.core import Engine
from loom_django.models import Marker

PARK_FENCES: Final = "park-fences"


@dataclass(frozen=True, slots=True)
class Walk:
    """How far a walk over the parks has come.

    ``begun_after`` and ``position`` are ids: behind which one this run began, and which one was looked at last
    ("" for none). ``parked`` and ``made`` are counts of this run: unanswered parks, and rows made for them.
    """

    begun_after: str
    position: str
    parked: int = 0
    made: int = 0
    done_at: datetime | None = None
    done_before: bool = False


def backfill_park_fences(
    engine: Engine,
    alias: str,
    *,
    batch_size: int = 1000,
    again: bool = False,
    report: Callable[[Walk], None] = lambda walk: None,
) -> Walk:
    """Give every execution that is parked and unanswered, by its log, its fence row.

    A batch at a time, behind which the position is kept, so that a run that was killed goes on where it was.
    Once done it is not done a second time unless ``again`` says so. ``report`` is called after each batch.
    """
    marker = None if again else _marker(alias)
    if marker is not None and marker.done_at is not None:
        return Walk(marker.position, marker.position, done_at=marker.done_at, done_before=True)
    begun_after = "" if marker is None else marker.position
    walk = Walk(begun_after, begun_after)
    _keep(alias, walk)
    with engine.store.walking_parks():
        while True:
            batch = engine.store.ensure_park_fences(after=walk.position, limit=batch_size)
            if batch.position is None:
                break
            walk = Walk(begun_after, batch.position, walk.parked + batch.parked, walk.made + batch.made)
            _keep(alias, walk)
            report(walk)
    done = Walk(begun_after, walk.position, walk.parked, walk.made, done_at=engine.store.now())
    _keep(alias, done)
    return done


def _markers(alias: str) -> models.QuerySet[Any]:
    return models.QuerySet(Marker).using(alias)


def _marker(alias: str) -> Any:
    return _markers(alias).filter(pk=PARK_FENCES).first()


def _keep(alias: str, walk: Walk) -> None:
    _markers(alias).bulk_create(
        [Marker(name=PARK_FENCES, position=walk.position, done_at=walk.done_at)],
        update_conflicts=True,
        unique_fields=["name"],
        update_fields=["position", "done_at"],
    )
