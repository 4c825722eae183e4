"""Which registered code an execution may run on: one rule for starts of bodies, answers, wakes and recovery.

Among the registered versions with the recorded structure: the recorded version, else the highest. Its
fingerprint, where both sides have one, must be the recorded one or be listed as compatible with it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal

from loom_django.definitions import Flow, Registry
from loom_django.engine.core import Engine
from loom_django.errors import FlowCodeMismatchError
from loom_django.kernel import hashing, structure
from loom_django.kernel.events import Encoded
from loom_django.kernel.fold import Fold

# Why no registered flow continues an execution; "" if one does.
Mismatch = Literal["", "flow", "version", "structure", "code"]

_NO_FLOW: Final = "no flow of that id here"


@dataclass(frozen=True, slots=True)
class Recorded:
    """What an execution remembers of its code."""

    flow_id: str
    version: int
    flow_hash: str
    code_hash: str

    @classmethod
    def by(cls, fold: Fold) -> Recorded:
        return cls(fold.flow_id, fold.version, fold.flow_hash, fold.code_hash)


@dataclass(frozen=True, slots=True)
class Judged:
    """The flow that continues an execution, or what stands against it and the flow that comes nearest."""

    mismatch: Mismatch
    flow: Flow[..., Any] | None


def judge(registry: Registry, recorded: Recorded) -> Judged:
    """Find the code that continues what was recorded."""
    versions = registry.versions(recorded.flow_id)
    if not versions:
        return Judged("flow", None)
    own = versions.get(recorded.version)
    if own is not None and own.has_structure(recorded.flow_hash):
        return Judged("" if _same_code(own, recorded.code_hash) else "code", own)
    nearest = own or versions[max(versions)]
    if recorded.version > max(versions):
        return Judged("version", nearest)
    matching = {number: flow for number, flow in versions.items() if flow.has_structure(recorded.flow_hash)}
    if not matching:
        return Judged("structure", nearest)
    flow = matching[max(matching)]
    return Judged("" if _same_code(flow, recorded.code_hash) else "code", flow)


def flow_for(engine: Engine, fold: Fold) -> Flow[..., Any]:
    """The registered flow for a log.

    Raises:
        FlowCodeMismatchError: none has the recorded structure (``kind`` "structure"), the one that has it has
            another body ("code"), or all are older ("version"), or there is no such flow here
            ("flow"). The message names the ways out.
    """
    recorded = Recorded.by(fold)
    judged = judge(engine.registry, recorded)
    if judged.flow is None:
        raise FlowCodeMismatchError(fold.execution_id, "flow", fold.flow_id, _NO_FLOW)
    if judged.mismatch:
        before, now = _sides(judged.mismatch, recorded, judged.flow)
        differences = explain(judged, fold)
        raise FlowCodeMismatchError(fold.execution_id, judged.mismatch, before, now, differences)
    return judged.flow


def target_of(engine: Engine, fold: Fold) -> Flow[..., Any] | None:
    """The registered flow to move an execution to that no code fits: its own version, else the highest."""
    versions = engine.registry.versions(fold.flow_id)
    return versions.get(fold.version) or (versions[max(versions)] if versions else None)


def graph_of(flow: Flow[..., Any]) -> Encoded | None:
    """A flow's declared graph as a start or a move records it."""
    return None if flow.outline is None else Encoded(flow.outline)


def explain(judged: Judged, fold: Fold) -> list[str]:
    """What was changed since an execution was recorded, in words."""
    flow = judged.flow
    if flow is None or judged.mismatch == "flow":
        return [_NO_FLOW]
    if judged.mismatch == "version":
        return ["a newer release started it"]
    if judged.mismatch == "code":
        return [
            "the flow's body was changed; if it asks for what the log holds, list the recorded fingerprint: "
            f'compatible_with=["{fold.code_hash}"]'
        ]
    return changes(fold, flow)


def changes(fold: Fold, flow: Flow[..., Any]) -> list[str]:
    """What a flow declares differently from a log's graph; where none was recorded, from the steps begun."""
    facts = flow.step_facts()
    if (graph := fold.graph) is not None:
        families = graph.get("families", ())
        return structure.differences(
            structure.steps_of(graph), facts, old_families=families, new_families=flow.step_families
        )
    begun = _begun(fold, flow)
    found = structure.differences(begun.values(), [step for step in facts if step["id"] in begun])
    return found or ["it was declared with other steps"]


def _begun(fold: Fold, flow: Flow[..., Any]) -> dict[str, dict[str, Any]]:
    """What a log without a graph tells of the steps that it was declared with: those that were begun."""
    begun = {}
    for frame in fold.frames.values():
        base = structure.base_of(frame.step_id)
        if base in flow.steps or not flow.in_family(frame.step_id):
            begun[base] = {"id": base, "tool": frame.tool, "idempotent": frame.idempotent}
    return begun


def _sides(mismatch: Mismatch, recorded: Recorded, flow: Flow[..., Any]) -> tuple[str, str]:
    """The recorded and the registered value of what does not fit."""
    if mismatch == "version":
        return str(recorded.version), str(flow.version)
    if mismatch == "code":
        return recorded.code_hash, flow.code_hash
    return recorded.flow_hash, _in_form_of(recorded.flow_hash, flow)


def _in_form_of(recorded_hash: str, flow: Flow[..., Any]) -> str:
    if recorded_hash.startswith(hashing.LEGACY_PREFIX):
        return hashing.legacy_hash(flow.step_facts(), flow.step_families)
    return flow.flow_hash


def _same_code(flow: Flow[..., Any], recorded: str) -> bool:
    if not recorded or not flow.code_hash:
        return True  # without a fingerprint on both sides nothing is claimed
    return recorded == flow.code_hash or recorded in flow.compatible_with
