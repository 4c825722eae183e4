"""Queues with limits, served by several workers at a time."""

from __future__ import annotations

from collections import Counter
from typing import Any

from loom_django.kernel.state import Status
from loom_django.runtime import loom
from tests.crash.kit import Lab, check_history, eventually, finished, state

QUEUES = {"bank": {"concurrency": 3}, "slow": {"rate": 10}, "wide": {"worker_concurrency": 2}}
SETTINGS = {"QUEUES": QUEUES, "POLL_INTERVAL": 0.05}
# Seconds that each of two steps takes, with a sleep between them.
WORK = 0.05


def spans(lab: Lab) -> list[tuple[float, float, str]]:
    lines = (lab.folder / "spans").read_text().splitlines()
    return [(float(began), float(ended), id) for began, ended, id in map(str.split, lines)]


def most_at_once(lab: Lab) -> int:
    moments = sorted((at, step) for began, ended, _ in spans(lab) for at, step in ((began, 1), (ended, -1)))
    most = now = 0
    for _, step in moments:
        now += step
        most = max(most, now)
    return most


def serve(lab: Lab, ids: list[str], *, workers: int, queue: str, **settings: Any) -> None:
    lab.run("start", "spans", *ids, args=[WORK], queue=queue, loom=SETTINGS)
    crew = [
        lab.spawn("command", "run_loom_worker", "--concurrency", "8", loom={**SETTINGS, **settings})
        for _ in range(workers)
    ]
    eventually(lambda: all(map(finished, ids)), "all are served")
    for worker in crew:
        assert not worker.over, worker.log
        worker.kill()
    # Each step once, before the sleep and after it: what was kept back was neither lost nor doubled.
    assert Counter(id for _, _, id in spans(lab)) == dict.fromkeys(ids, 2)
    for id in ids:
        assert state(id).status is Status.COMPLETED
        check_history(id)


def test_a_queue_never_has_more_at_work_than_it_may(lab: Lab):
    """Three workers with room for 24, a queue for 3, and executions that park and come back to it."""
    serve(lab, [f"x-{number}" for number in range(20)], workers=3, queue="bank")
    assert most_at_once(lab) == 3


def test_a_rate_is_kept_by_all_workers_together(lab: Lab):
    """Ten a second, and ten that a second of rest has saved: 24 begun bodies take 1.4 s, and not much more."""
    serve(lab, [f"x-{number}" for number in range(12)], workers=2, queue="slow")
    began = sorted(began for began, _, _ in spans(lab))
    assert began[-1] - began[0] > (24 - 10) / 10 - WORK - 0.2


def test_each_worker_runs_so_many_of_a_queue(lab: Lab):
    """Two workers, two each."""
    serve(lab, [f"x-{number}" for number in range(12)], workers=2, queue="wide")
    assert most_at_once(lab) <= 4


def test_a_dead_worker_s_place_in_a_queue_is_free_after_its_lease(lab: Lab):
    """What it held counts until it is taken over, and no longer."""
    short = {**SETTINGS, "LEASE_TTL": 0.5, "LEASE_RENEW_INTERVAL": 0.1}
    ids = ["x-1", "x-2", "x-3", "x-4"]
    lab.run("start", "gate", *ids, queue="bank", loom=short)
    worker = lab.spawn("command", "run_loom_worker", loom=short)
    eventually(lambda: len(lab.effects()) == 3, "its places are taken")
    worker.kill()
    held = [id for id in ids if loom.store.held(id)]
    assert len(held) == 3
    for id in ids:
        lab.open_gate(id)
    lab.spawn("command", "run_loom_worker", loom=short)
    eventually(lambda: all(map(finished, ids)), "another worker has taken them over")
    assert Counter(line["execution"] for line in lab.effects(step="gated")) == {
        id: 2 if id in held else 1 for id in ids
    }
