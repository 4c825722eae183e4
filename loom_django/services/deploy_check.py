"""Live executions against the code that is registered here: what this code would strand, before it is deployed.

One aggregate over the rows of live executions, which the index by status holds together: what has ended is not
looked at, however much of it there is.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Final, Literal

from django.db.models import Count, Min

from loom_django.definitions import Registry
from loom_django.engine.code import Judged, Mismatch, Recorded, explain, judge
from loom_django.engine.core import Engine
from loom_django.engine.outside import open_journal
from loom_django.models import Execution

FindingId = Literal["flow-code-drift", "version-not-kept", "version-drained", "undeclared-tool"]
BREAKING: Final = frozenset({"flow-code-drift"})

# Of so many drifts the log of an example is read, to tell them step by step.
EXPLAINED: Final = 20


@dataclass(frozen=True, slots=True)
class Group:
    """Live executions that were recorded with the same code.

    ``continues`` is the version that goes on with them; None if none does, and ``mismatch`` says why:
    "flow", "version", "structure" or "code". ``example`` is the id of one of them, ``oldest`` when the
    first of them was started.
    """

    recorded: Recorded
    live: int
    oldest: datetime
    example: str
    judged: Judged

    @property
    def mismatch(self) -> Mismatch:
        return self.judged.mismatch

    @property
    def continues(self) -> int | None:
        return None if self.judged.mismatch or self.judged.flow is None else self.judged.flow.version


@dataclass(frozen=True, slots=True)
class Finding:
    """Something to know before a deploy; ``breaking`` if live executions would be left alone by this code."""

    id: FindingId
    message: str
    way_out: str
    flow_id: str = ""
    version: int | None = None
    live: int = 0
    example: str = ""
    mismatch: Mismatch = ""
    recorded: str = ""
    registered: str = ""
    differences: tuple[str, ...] = ()

    @property
    def breaking(self) -> bool:
        return self.id in BREAKING


def survey(registry: Registry, alias: str, *, flow_id: str | None = None) -> list[Group]:
    """Group the live executions by the code that they remember, each group with what continues it here."""
    rows = Execution.objects.using(alias).live()
    if flow_id is not None:
        rows = rows.of_flow(flow_id)
    counted = (
        rows.order_by("flow_id", "version", "flow_hash", "code_hash")
        .values_list("flow_id", "version", "flow_hash", "code_hash")
        .annotate(Count("pk"), Min("created_at"), Min("pk"))
    )
    groups = []
    for *code, live, oldest, example in counted:
        recorded = Recorded(*code)
        groups.append(Group(recorded, live, oldest, example, judge(registry, recorded)))
    return groups


def deploy_check(engine: Engine, alias: str) -> tuple[list[Group], list[Finding]]:
    """Survey the live executions, and tell what this code would do to them; what breaks stands in front."""
    groups = survey(engine.registry, alias)
    found = [*_drifted(engine, groups), *_not_kept(groups), *_drained(engine, groups), *_undeclared(engine)]
    return groups, found


def _drifted(engine: Engine, groups: list[Group]) -> Iterator[Finding]:
    drifted = [group for group in groups if group.mismatch]
    for number, group in enumerate(drifted):
        recorded, flow = group.recorded, group.judged.flow
        told = _differences(engine, group) if number < EXPLAINED else ()
        why = f": {'; '.join(told)}" if told else ""
        yield Finding(
            "flow-code-drift",
            f"{_live(group)} of {_name(recorded)} would be left alone by this code{why}.",
            "Pin: register that version beside the new one. Migrate: move them with loom_resume_as. Drain: wait "
            "until they have ended, or cancel them.",
            recorded.flow_id,
            recorded.version,
            group.live,
            group.example,
            group.mismatch,
            recorded.code_hash if group.mismatch == "code" else recorded.flow_hash,
            "" if flow is None else flow.code_hash if group.mismatch == "code" else flow.flow_hash,
            told,
        )


def _differences(engine: Engine, group: Group) -> tuple[str, ...]:
    """What was changed since an example of the group was recorded; it may have ended meanwhile."""
    loaded = engine.store.load(group.example)
    return tuple(explain(group.judged, open_journal(engine, loaded).fold)) if loaded.events else ()


def _not_kept(groups: list[Group]) -> Iterator[Finding]:
    """The hash is body-blind: another version with the same steps continues, unless fingerprints were compared."""
    for group in groups:
        recorded, flow = group.recorded, group.judged.flow
        if group.mismatch or flow is None or flow.version == recorded.version:
            continue
        if recorded.code_hash and flow.code_hash:
            continue
        yield Finding(
            "version-not-kept",
            f"{_live(group)} of {_name(recorded)} would run the body of version {flow.version}, which declares the "
            "same steps.",
            f"Keep version {recorded.version} beside it with pinned=True, unless the new body asks for what the logs "
            'hold. code_fingerprint="auto" makes a changed body a mismatch.',
            recorded.flow_id,
            recorded.version,
            group.live,
            group.example,
            registered=str(flow.version),
        )


def _drained(engine: Engine, groups: list[Group]) -> Iterator[Finding]:
    serving = {(group.recorded.flow_id, group.continues) for group in groups}
    for flow in engine.registry.all():
        if flow.pinned and (flow.id, flow.version) not in serving:
            yield Finding(
                "version-drained",
                f'No live execution needs version {flow.version} of "{flow.id}", which is pinned.',
                "It can be removed, once no process of an older release starts executions of it.",
                flow.id,
                flow.version,
            )


def _undeclared(engine: Engine) -> Iterator[Finding]:
    users = {tool.func: (tool, flow) for flow in engine.registry.all() for tool in flow.steps.values()}
    for tool, flow in users.values():
        if tool.idempotent is None and not tool.transactional:
            yield Finding(
                "undeclared-tool",
                f'The tool "{tool.name}" of "{flow.id}" does not say whether it may run twice; after a crash it '
                "does.",
                "Declare idempotent=True, idempotent=False or transactional=True (check loom.W012).",
                flow.id,
            )


def _live(group: Group) -> str:
    return "1 live execution" if group.live == 1 else f"{group.live} live executions"


def _name(recorded: Recorded) -> str:
    return f'"{recorded.flow_id}" version {recorded.version}'
