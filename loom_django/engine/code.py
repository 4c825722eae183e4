"""Which registered code an execution may run on: one rule for starts of bodies, answers, wakes and recovery.

Among the registered versions with the recorded structure: the recorded version, else the highest. Its
fingerprint, where both sides have one, must be the recorded one or be listed as compatible with it.
"""

from __future__ import annotations

from typing import Any

from loom_django.definitions import Flow
from loom_django.engine.core import Engine
from loom_django.errors import FlowCodeMismatchError
from loom_django.kernel.fold import Fold


def flow_for(engine: Engine, fold: Fold) -> Flow[..., Any]:
    """The registered flow for a log.

    Raises:
        FlowCodeMismatchError: none has the recorded structure (``kind`` "structure"), the one that has it has
            another body ("code"), or all are older ("version"), or there is no such flow here
            ("flow"). The message names the ways out.
    """
    versions = engine.registry.versions(fold.flow_id)
    if versions and fold.version > max(versions):
        raise FlowCodeMismatchError(
            fold.execution_id,
            "version",
            str(fold.version),
            str(max(versions)),
            ["a newer release started it"],
        )
    matching = {number: flow for number, flow in versions.items() if flow.flow_hash == fold.flow_hash}
    if not matching:
        raise _structure(fold, versions)
    flow = matching.get(fold.version) or matching[max(matching)]
    if not _same_code(flow, fold.code_hash):
        raise FlowCodeMismatchError(
            fold.execution_id, "code", fold.code_hash, flow.code_hash, ["the flow's body was changed"]
        )
    return flow


def target_of(engine: Engine, fold: Fold) -> Flow[..., Any] | None:
    """The registered flow to move an execution to that no code fits: its own version, else the highest."""
    versions = engine.registry.versions(fold.flow_id)
    return versions.get(fold.version) or (versions[max(versions)] if versions else None)


def _same_code(flow: Flow[..., Any], recorded: str) -> bool:
    if not recorded or not flow.code_hash:
        return True  # without a fingerprint on both sides nothing is claimed
    return recorded == flow.code_hash or recorded in flow.compatible_with


def _structure(fold: Fold, versions: dict[int, Flow[..., Any]]) -> FlowCodeMismatchError:
    nearest = versions.get(fold.version) or (versions[max(versions)] if versions else None)
    if nearest is None:
        return FlowCodeMismatchError(fold.execution_id, "flow", fold.flow_id, "no flow of that id here")
    recorded = {frame.step_id.split("#", 1)[0] for frame in fold.frames.values()}
    gone = [f"step {step!r} is gone" for step in sorted(recorded - set(nearest.steps))]
    return FlowCodeMismatchError(fold.execution_id, "structure", fold.flow_hash, nearest.flow_hash, gone)
