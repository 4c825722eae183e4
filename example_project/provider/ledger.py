"""The provider's own memory: a file that is only ever appended to, one JSON object a line.

A request stands in it before anything else happens to it, so whoever reads the file knows what the provider
really saw, whatever became of the caller.
"""

from __future__ import annotations

import json
import os
import threading
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

Answered = Literal["", "delivered", "caller gone"]


@dataclass(frozen=True, slots=True)
class Request:
    """One request as the provider saw it.

    Attributes:
        number: its place in the ledger, from 1.
        what: "charge", "refund" or "transfer".
        key: the Idempotency-Key header, as it came.
        booking: the id of the money movement, or "" if the provider refused.
        repeated: the key was known: the old booking was answered again and no money moved.
        answered: what became of the answer; "" while it is not known.
    """

    number: int
    at: str
    what: str
    key: str
    reference: str
    amount: str
    booking: str
    repeated: bool = False
    answered: Answered = ""

    @property
    def booked(self) -> bool:
        """Money moved because of this request."""
        return bool(self.booking) and not self.repeated


class Ledger:
    """The file, as the provider writes it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._requests = read(path) if path.exists() else []
        path.touch()

    def enter(
        self, *, what: str, key: str, reference: str, amount: str, refuse: bool, deduplicate: bool
    ) -> Request:
        """Book a request, or find that its key is known, or refuse it; in each case write it down."""
        with self._lock:
            known = self._known(what, key) if deduplicate and key else None
            number = len(self._requests) + 1
            booking = known.booking if known else "" if refuse else f"{what[:2]}-{number:04d}"
            request = Request(
                number,
                datetime.now(UTC).isoformat(),
                what,
                key,
                reference,
                amount,
                booking,
                known is not None,
            )
            self._requests.append(request)
            self._append({"event": "request", **asdict(request)})
            return request

    def answered(self, request: Request, outcome: Answered) -> None:
        """Note what became of the answer to a request."""
        with self._lock:
            self._append({"event": "answer", "number": request.number, "answered": outcome})

    def _known(self, what: str, key: str) -> Request | None:
        same = [seen for seen in self._requests if seen.what == what and seen.key == key and seen.booking]
        return same[0] if same else None

    def _append(self, line: dict[str, Any]) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
            file.flush()
            os.fsync(file.fileno())


def read(path: Path) -> list[Request]:
    """Everything that the provider has seen, in order."""
    requests: list[Request] = []
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
        if not line.endswith("\n"):
            break  # being written at this moment
        fields = json.loads(line)
        if fields.pop("event") == "request":
            requests.append(Request(**fields))
        else:
            at = fields["number"] - 1
            requests[at] = replace(requests[at], answered=fields["answered"])
    return requests
