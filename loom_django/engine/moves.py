"""Moving an execution to other code: what can be proven of it beforehand, and the fact that re-points it.

The proof is one of membership: each step that the log holds is declared by the target, or belongs to one of its
families, and each parameter that the target needs has a value. What the new body does with them is for whoever
wrote it to know.
"""

from __future__ import annotations

import inspect
from collections import Counter
from dataclasses import dataclass
from typing import Any, Final, Literal, get_args

from loom_django.definitions import Flow, Registry
from loom_django.engine.code import changes, graph_of
from loom_django.engine.journal import Journal
from loom_django.errors import FlowCodeMismatchError, FlowNotFoundError, InvalidInputError, shown
from loom_django.kernel.events import Kind
from loom_django.kernel.fold import Fold
from loom_django.kernel.state import Frame
from loom_django.kernel.structure import base_of, family_admits

Strategy = Literal["replay-check", "operator-ack"]
STRATEGIES: Final = get_args(Strategy)


@dataclass(frozen=True, slots=True)
class MoveReport:
    """What is known of a move before it is made.

    Attributes:
        execution_id: of the execution.
        from_flow, from_version, from_hash, from_code: what its log was recorded with.
        to_flow, to_version, to_hash, to_code: what it would be recorded with.
        frames: how many recorded steps were looked at.
        vanished: steps, or whole families, that the log holds and the target does not declare, each with its
            number of recorded steps.
        unbound: parameters of the target without a recorded value and without a default.
        differences: what the target declares differently, in words; they do not stand in the way.
        park_sequence: of the park that was looked at, for ``fence_if_parked_at=``; None if it is not parked.
    """

    execution_id: str
    from_flow: str
    from_version: int
    from_hash: str
    from_code: str
    to_flow: str
    to_version: int
    to_hash: str
    to_code: str
    frames: int
    vanished: tuple[tuple[str, int], ...]
    unbound: tuple[str, ...]
    differences: tuple[str, ...]
    park_sequence: int | None

    @property
    def ok(self) -> bool:
        """True if the replay check passes."""
        return not self.vanished and not self.unbound

    @property
    def problems(self) -> tuple[str, ...]:
        """What stands in the way, in words."""
        return (
            *(f"step {step!r} ({_counted(count)}) is not declared" for step, count in self.vanished),
            *(f"parameter {name!r} has no recorded value and no default" for name in self.unbound),
        )

    def check(self) -> None:
        """Refuse a move that the replay check does not pass.

        Raises:
            FlowCodeMismatchError: of the kind "replay-check", with the problems as its differences.
        """
        if not self.ok:
            raise FlowCodeMismatchError(
                self.execution_id,
                "replay-check",
                f"{self.from_flow} version {self.from_version} ({self.from_hash})",
                f"{self.to_flow} version {self.to_version} ({self.to_hash})",
                self.problems,
            )


def _counted(count: int) -> str:
    return "1 recorded step" if count == 1 else f"{count} recorded steps"


def check_strategy(strategy: object) -> None:
    """Refuse what is no strategy.

    Raises:
        InvalidInputError: it names those that are.
    """
    if strategy not in STRATEGIES:
        raise InvalidInputError(
            f'strategy={shown(strategy)} must be one of {", ".join(map(repr, STRATEGIES))}: "replay-check" proves '
            'that the new code has every recorded step, by "operator-ack" you vouch for it'
        )


def target(registry: Registry, flow: str | Flow[..., Any], version: int | None = None) -> Flow[..., Any]:
    """The registered flow to move to: a Flow's own version, or of an id the version, else the current one.

    Raises:
        FlowNotFoundError: it is not registered here, so nobody could go on with it.
        InvalidInputError: a Flow and another version were given.
    """
    if isinstance(flow, str):
        return registry.current(flow, version)
    if version not in (None, flow.version):
        raise InvalidInputError(f"version={version} and a Flow of version {flow.version}: give one of them")
    registered = registry.versions(flow.id).get(flow.version)
    if registered is None or registered.flow_hash != flow.flow_hash:
        raise FlowNotFoundError(flow.id, sorted(registry.highest()), flow.version)
    return registered


def report(fold: Fold, target: Flow[..., Any]) -> MoveReport:
    """Look at what a log holds with the eyes of another flow."""
    vanished = Counter(step for frame in fold.frames.values() if (step := _missing(fold, frame, target)))
    return MoveReport(
        execution_id=fold.execution_id,
        from_flow=fold.flow_id,
        from_version=fold.version,
        from_hash=fold.flow_hash,
        from_code=fold.code_hash,
        to_flow=target.id,
        to_version=target.version,
        to_hash=target.flow_hash,
        to_code=target.code_hash,
        frames=len(fold.frames),
        vanished=tuple(vanished.items()),
        unbound=tuple(_unbound(fold, target)),
        differences=() if target.has_structure(fold.flow_hash) else tuple(changes(fold, target)),
        park_sequence=fold.park_sequence,
    )


def _missing(fold: Fold, frame: Frame, target: Flow[..., Any]) -> str:
    """What a recorded step needs and the target does not declare; "" if there is nothing."""
    if not target.in_family(frame.step_id):
        return _family_of(fold, frame.step_id)
    # A model's call that is under way goes on with its tool, whose name the id does not tell. A call is made by
    # keywords; a turn is not, and goes on with the model that the loop has then.
    goes_on = frame.loop and not frame.settled and not frame.args["args"]
    return frame.tool if goes_on and frame.tool not in {tool.name for tool in target.steps.values()} else ""


def _family_of(fold: Fold, step_id: str) -> str:
    """The family that an id was recorded under, or its base: a vanished one is told once."""
    families = (fold.graph or {}).get("families", ())
    return next((family for family in families if family_admits(family, step_id)), base_of(step_id))


def _unbound(fold: Fold, target: Flow[..., Any]) -> list[str]:
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [
        name
        for name, parameter in target.signature.parameters.items()
        if parameter.default is parameter.empty
        and parameter.kind not in optional
        and name not in (fold.input or {})
    ]


def record(
    journal: Journal, target: Flow[..., Any], strategy: Strategy, principal: str | None, reason: str = ""
) -> None:
    """Record that an execution goes on with other code: its hash and fingerprint are the target's from here on."""
    fold = journal.fold
    fields: dict[str, Any] = {
        "strategy": strategy,
        "from_flow": fold.flow_id,
        "from_version": fold.version,
        "from_hash": fold.flow_hash,
        "from_code": fold.code_hash or None,
        "to_flow": target.id,
        "to_version": target.version,
        "to_hash": target.flow_hash,
        "to_code": target.code_hash,
        "to_graph": graph_of(target),
        "principal": principal,
        "reason": reason or None,
    }
    journal.record(Kind.EXECUTION_MIGRATED, fields)
