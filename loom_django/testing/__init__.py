"""For the tests of projects that use loom_django, and for those who write a store of their own.

``harness()`` drives flows in a test, ``crash_sweep`` crashes them at every point, ``assert_replays`` plays an old log
again, ``run_tool`` runs one tool alone, ``override_loom`` changes settings. pytest has the fixture ``loom_harness``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from loom_django.testing.conformance import (
        EventStoreConformance,
        InboxStoreConformance,
        LeaseStoreConformance,
        RetentionStoreConformance,
        ScheduleStoreConformance,
        TimerStoreConformance,
    )
    from loom_django.testing.crashes import SweepReport, SweptPoint, crash_sweep
    from loom_django.testing.determinism import NonDeterminismError
    from loom_django.testing.harnessing import Call, Doubt, Harness, harness
    from loom_django.testing.replays import assert_replays, replay_live
    from loom_django.testing.settings import override_loom
    from loom_django.testing.tools import arun_tool, run_tool

__all__ = [
    "Call",
    "Doubt",
    "EventStoreConformance",
    "Harness",
    "InboxStoreConformance",
    "LeaseStoreConformance",
    "NonDeterminismError",
    "RetentionStoreConformance",
    "ScheduleStoreConformance",
    "SweepReport",
    "SweptPoint",
    "TimerStoreConformance",
    "arun_tool",
    "assert_replays",
    "crash_sweep",
    "harness",
    "override_loom",
    "replay_live",
    "run_tool",
]

# Loaded when asked for: pytest imports this package at its start, for the fixture, before there are settings.
_PLACES: Final = {
    "conformance": [
        "EventStoreConformance",
        "InboxStoreConformance",
        "LeaseStoreConformance",
        "RetentionStoreConformance",
        "ScheduleStoreConformance",
        "TimerStoreConformance",
    ],
    "crashes": ["SweepReport", "SweptPoint", "crash_sweep"],
    "determinism": ["NonDeterminismError"],
    "harnessing": ["Call", "Doubt", "Harness", "harness"],
    "replays": ["assert_replays", "replay_live"],
    "settings": ["override_loom"],
    "tools": ["arun_tool", "run_tool"],
}


def __getattr__(name: str) -> Any:
    for place, names in _PLACES.items():
        if name in names:
            return getattr(importlib.import_module(f"{__name__}.{place}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
