"""The declared graph of a flow, as far as a log depends on it: what is hashed, recorded and compared.

A step is a mapping of ``id``, ``tool``, ``idempotent``, ``transactional`` and ``fresh_key``. The outline is the
same graph in a few bytes a step: it is recorded with each start, so that a mismatch can be told step by step.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

Step = Mapping[str, Any]

# A graph whose outline is longer is not recorded; its hash is.
MAX_OUTLINE: Final = 4096

_IDEMPOTENT: Final = {True: "i", False: "n", None: ""}
_LABELS: Final = {
    "idempotent": "idempotent={}",
    "transactional": "transactional={}",
    "fresh_key": "a retry policy with fresh_key={}",
}


def outline(steps: Iterable[Step], families: Iterable[str]) -> str | None:
    """The graph as JSON, ``{"steps": {id: marks}, "families": […]}``; None if that would be too long.

    The marks are ``i`` (idempotent=True) or ``n`` (False), ``t`` (transactional), ``f`` (fresh_key), and behind
    a colon the tool's name, where that is not the step's id.
    """
    graph: dict[str, Any] = {"steps": {step["id"]: _marks(step) for step in steps}}
    if given := list(families):
        graph["families"] = given
    text = json.dumps(graph, separators=(",", ":"))
    return text if len(text) <= MAX_OUTLINE else None


def _marks(step: Step) -> str:
    flags = "t" * step["transactional"] + "f" * step["fresh_key"]
    tool = "" if step["tool"] == step["id"] else f":{step['tool']}"
    return f"{_IDEMPOTENT[step['idempotent']]}{flags}{tool}"


def steps_of(recorded: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The steps of an outline that was parsed: what :func:`outline` was given, and nothing less."""
    return [_step(step_id, marks) for step_id, marks in recorded["steps"].items()]


def _step(step_id: str, marks: str) -> dict[str, Any]:
    flags, _, tool = marks.partition(":")
    return {
        "id": step_id,
        "tool": tool or step_id,
        "idempotent": True if "i" in flags else False if "n" in flags else None,
        "transactional": "t" in flags,
        "fresh_key": "f" in flags,
    }


def base_of(step_id: str) -> str:
    """What stands before the ``#`` of an id that was made while a body ran."""
    return step_id.split("#", 1)[0]


def family_admits(family: str, step_id: str) -> bool:
    """Tell whether an id belongs to a family: ``base#suffix`` of its base, or what its ``/regex/`` matches."""
    if len(family) > 2 and family.startswith("/") and family.endswith("/"):
        return re.match(family[1:-1], step_id) is not None
    return base_of(step_id) == family


def differences(
    old: Iterable[Step],
    new: Iterable[Step],
    *,
    old_families: Iterable[str] = (),
    new_families: Iterable[str] = (),
) -> list[str]:
    """What was changed between two graphs, in words; of a step that is known in part what is known is compared."""
    before = {step["id"]: step for step in old}
    after = {step["id"]: step for step in new}
    gone = [step for step_id, step in before.items() if step_id not in after]
    added = {step_id: step for step_id, step in after.items() if step_id not in before}
    found = []
    for step in gone:
        successor = _renamed(step, added)
        if successor is None:
            found.append(f"step {step['id']!r} is gone")
            continue
        del added[successor["id"]]
        found.append(
            f"step {step['id']!r} is gone, {successor['id']!r} is new: "
            f"{_keeps(step, successor)} keeps it if it was renamed"
        )
    found += [f"step {step_id!r} is new" for step_id in added]
    for step_id in before.keys() & after.keys():
        found += _changes(before[step_id], after[step_id])
    lost = [family for family in old_families if family not in set(new_families)]
    more = [family for family in new_families if family not in set(old_families)]
    found += [f"step family {family!r} is gone" for family in lost]
    found += [f"step family {family!r} is new" for family in more]
    return found


def _renamed(step: Step, added: Mapping[str, Step]) -> Step | None:
    """The new step that this one may have been renamed to: declared alike, and alone so or of a similar name."""
    alike = [step_id for step_id, other in added.items() if not list(_unlike(step, other))]
    if len(alike) > 1:
        alike = difflib.get_close_matches(step["id"], alike, n=1, cutoff=0.5)
    return added[alike[0]] if alike else None


def _keeps(step: Step, successor: Step) -> str:
    """The declaration under which the successor has the id that is recorded."""
    if successor["tool"] != successor["id"]:
        return f".named({step['id']!r})"
    return f"@tool(name={step['id']!r})"


def _unlike(step: Step, other: Step) -> Iterable[str]:
    return (name for name in _LABELS if name in step and name in other and step[name] != other[name])


def _changes(before: Step, after: Step) -> Iterable[str]:
    step_id = before["id"]
    if before["tool"] != after["tool"]:
        yield f"step {step_id!r} ran the tool {before['tool']!r}, and runs {after['tool']!r} now"
    for name in _unlike(before, after):
        label = _LABELS[name]
        yield f"step {step_id!r} had {label.format(before[name])}, and has {label.format(after[name])} now"
