"""Archives: whole logs as compressed JSON lines in a Django storage, each file with a manifest beside it.

A file is named by its content, and is read back before anybody relies on it. Nothing in a storage is ever written
over or removed here, so a second run beside this one takes nothing away that this one has relied on.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import posixpath
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from datetime import date, datetime
from typing import Any, Final

from django.core.files.base import ContentFile
from django.core.files.storage import Storage, storages

from loom_django.engine.core import Engine, from_micros, to_micros
from loom_django.errors import ArchiveError
from loom_django.kernel.events import Event
from loom_django.kernel.fold import fold
from loom_django.kernel.projection import project
from loom_django.kernel.state import ExecutionState
from loom_django.stores.base import NOBODY, READY, Commit, NewExecution, TimerRow

FOLDER: Final = "loom"
FORMAT: Final = "loom-archive"
VERSION: Final = 1
_DATA: Final = ".jsonl.gz"
_MANIFEST: Final = ".manifest.json"


@dataclass(frozen=True, slots=True)
class Whole:
    """One execution as an archive keeps it: its log, and what its start decided for good."""

    events: tuple[Event, ...]
    decided: NewExecution

    @property
    def id(self) -> str:
        return self.events[0].execution_id

    @property
    def chain(self) -> str:
        return self.decided.chain or self.id


@dataclass(frozen=True, slots=True)
class Manifest:
    """What is in a file: its digest (SHA-256, of the file as it is stored), its counts, and its executions."""

    archive: str
    sha256: str
    events: int
    executions: tuple[dict[str, Any], ...]  # id, chain, flow, version, status, finished_at, events


@dataclass(frozen=True, slots=True)
class Restored:
    """The ids that were put back, and those that were not, each with why."""

    archives: tuple[str, ...]
    restored: tuple[str, ...]
    refused: tuple[tuple[str, str], ...]


def storage_of(alias: str) -> Storage:
    """The storage of an alias in ``STORAGES``."""
    return storages[alias]


# Writing.


def write(storage: Storage, executions: Sequence[Whole], day: date) -> str:
    """Store a file of these executions with its manifest, read both back, and return the file's name.

    What a run that died has left complete is used again.

    Raises:
        ArchiveError: the storage failed, or gave back something else than it was given.
    """
    data = gzip.compress("".join(_lines(executions)).encode(), mtime=0)
    digest = hashlib.sha256(data).hexdigest()
    name = _put(storage, f"{FOLDER}/{day.isoformat()}/{digest[:32]}{_DATA}", data)
    manifest = {
        "format": FORMAT,
        "version": VERSION,
        "archive": name,
        "sha256": digest,
        "bytes": len(data),
        "events": sum(len(one.events) for one in executions),
        "executions": [_listed(one) for one in executions],
    }
    text = json.dumps(manifest, indent=1).encode()
    _put(storage, f"{name.removesuffix(_DATA)}{_MANIFEST}", text)
    return name


def _put(storage: Storage, name: str, data: bytes) -> str:
    try:
        if storage.exists(name) and _bytes(storage, name) == data:
            return name
        saved = storage.save(name, ContentFile(data))
        back = _bytes(storage, saved)
    except Exception as exc:
        raise ArchiveError(name, f"could not be written: {exc}. Nothing of it was deleted.") from exc
    if back != data:
        raise ArchiveError(saved, "was read back as something else. Nothing of it was deleted.")
    return str(saved)


def _bytes(storage: Storage, name: str) -> bytes:
    with storage.open(name, "rb") as file:
        data: bytes = file.read()
        return data


def _lines(executions: Iterable[Whole]) -> Iterator[str]:
    for one in executions:
        head = {"execution": one.id, "events": len(one.events), "decided": _plain(one.decided)}
        yield json.dumps(head) + "\n"
        for event in one.events:
            yield json.dumps(_event_line(event)) + "\n"


def _plain(decided: NewExecution) -> dict[str, Any]:
    return {
        name: to_micros(value) if isinstance(value, datetime) else value
        for name, value in asdict(decided).items()
    }


def _event_line(event: Event) -> dict[str, Any]:
    """``payload`` is the stored text, byte by byte, as a string."""
    return {
        "sequence": event.sequence,
        "kind": str(event.kind),
        "payload": event.body,
        "fence": event.fence,
        "writer": event.writer,
        "kernel": bool(event.is_kernel),
        "recorded_at": None if event.recorded_at is None else to_micros(event.recorded_at),
    }


def _listed(one: Whole) -> dict[str, Any]:
    state = fold(one.events)
    return {
        "id": one.id,
        "chain": one.chain,
        "flow": state.flow_id,
        "version": state.version,
        "status": str(state.status),
        "finished_at": from_micros(state.finished_at).isoformat() if state.finished_at else None,
        "events": len(one.events),
    }


# Reading.


def manifests(storage: Storage, folder: str = FOLDER) -> Iterator[Manifest]:
    """All manifests of a storage that are whole; what is no manifest is passed over."""
    try:
        folders, files = storage.listdir(folder)
    except FileNotFoundError:
        return
    for name in sorted(files):
        if ".manifest" in name and name.endswith(".json"):
            try:
                yield read_manifest(storage, posixpath.join(folder, name))
            except ArchiveError:
                continue  # its run died before it was written whole, and deleted nothing
    for name in sorted(folders):
        yield from manifests(storage, posixpath.join(folder, name))


def read_manifest(storage: Storage, name: str) -> Manifest:
    """The manifest of that name.

    Raises:
        ArchiveError: there is none, or it is none.
    """
    try:
        told = json.loads(_bytes(storage, name))
        if (told["format"], told["version"]) != (FORMAT, VERSION):
            raise ArchiveError(
                name, f"is of the format {told['format']} {told['version']}: update loom_django."
            )
        return Manifest(told["archive"], told["sha256"], told["events"], tuple(told["executions"]))
    except (OSError, ValueError, KeyError, TypeError) as exc:
        raise ArchiveError(name, f"has no manifest that can be read: {exc}") from exc


def read(storage: Storage, manifest: Manifest) -> Iterator[Whole]:
    """The executions of a file, once its digest is right.

    Raises:
        ArchiveError: it is not there, or not what was written.
    """
    try:
        data = _bytes(storage, manifest.archive)
    except OSError as exc:
        raise ArchiveError(manifest.archive, f"cannot be read: {exc}") from exc
    if hashlib.sha256(data).hexdigest() != manifest.sha256:
        raise ArchiveError(manifest.archive, "is not what was written: its SHA-256 is another one.")
    lines = map(json.loads, gzip.decompress(data).splitlines())
    for head in lines:
        key = head["execution"]
        events = tuple(_event(key, next(lines)) for _ in range(head["events"]))
        yield Whole(events, _decided(head["decided"]))


def _event(execution_id: str, line: dict[str, Any]) -> Event:
    return Event(
        execution_id,
        line["sequence"],
        line["kind"],
        line["payload"],
        line["fence"],
        line["writer"],
        line["kernel"],
        None if line["recorded_at"] is None else from_micros(line["recorded_at"]),
    )


_INSTANTS: Final = ("not_before", "deadline", "scheduled_at")


def _decided(told: dict[str, Any]) -> NewExecution:
    known = {field.name for field in fields(NewExecution)}
    instants = {name: from_micros(told[name]) for name in _INSTANTS if told.get(name) is not None}
    return NewExecution(**{name: value for name, value in told.items() if name in known} | instants)


# Putting back.


def restore(engine: Engine, storage: Storage, wanted: str) -> Restored:
    """Put back the executions of a file (named by itself or by its manifest), or those of one execution's chain.

    Each is put back whole or not at all; an id that is there is refused, and the others go on.

    Raises:
        ArchiveError: the file is not there or not what was written, or no archive has such an execution. Nothing
            was put back.
    """
    found, chain = _find(storage, wanted)
    restored: list[str] = []
    refused: list[tuple[str, str]] = []
    for one in list(read(storage, found)):
        if chain is not None and one.chain != chain:
            continue
        if engine.store.restore(_back(engine, one)):
            restored.append(one.id)
        else:
            refused.append((one.id, "there is an execution of this id; it stays as it is"))
    return Restored((found.archive,), tuple(restored), tuple(refused))


def _find(storage: Storage, wanted: str) -> tuple[Manifest, str | None]:
    """The manifest, and of which chain it is wanted; None for all that it has."""
    if wanted.endswith(".json") and ".manifest" in wanted:
        return read_manifest(storage, wanted), None
    if wanted.endswith(_DATA):
        for manifest in manifests(storage, posixpath.dirname(wanted)):
            if manifest.archive == wanted:
                return manifest, None
        raise ArchiveError(wanted, "has no manifest that can be read: nothing says that it is whole.")
    found = [
        (item["finished_at"] or "", item["events"], manifest, item["chain"])
        for manifest in manifests(storage)
        for item in manifest.executions
        if item["id"] == wanted
    ]
    if found:
        # It may be in several: a note came after the first was written, or the id was used again.
        _, _, manifest, chain = max(found, key=lambda one: one[:2])
        return manifest, chain
    raise ArchiveError(wanted, "is not there, and no manifest under loom/ names an execution of that id.")


def _back(engine: Engine, one: Whole) -> Commit:
    state = fold(one.events)
    unowned = state.finished or state.parked
    return Commit(
        execution_id=one.id,
        events=one.events,
        projection=project(state),
        ownership=NOBODY if unowned else READY,
        new=one.decided,
        timers=() if state.finished else _owed(engine, one, state),
    )


def _owed(engine: Engine, one: Whole, state: ExecutionState) -> tuple[TimerRow, ...]:
    """The wakes of what lives: its waits', its deadline, and a look at what has come for it meanwhile."""
    rows = [
        TimerRow(one.id, from_micros(wait.wake_at))
        for wait in state.pending_waits
        if wait.wake_at is not None
    ]
    if one.decided.deadline is not None:
        rows.append(TimerRow(one.id, one.decided.deadline, deadline=True))
    if state.parked:
        rows.append(TimerRow(one.id, engine.store.now(), redrive=0))
    return tuple(rows)
