"""What a body must not do, with the call that does it right.

``CALLS`` and ``READS`` name things by their dotted path; the longest path that fits decides, and None allows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Rule:
    """One trap: ``why`` ends a sentence about the code, ``hint`` says what to write."""

    id: str
    why: str
    hint: str


CLOCK: Final = Rule(
    "W101", "a replay reads another time", "Use ctx.now(), which is the same on every replay."
)
PAUSE: Final = Rule(
    "W101", "each replay waits again, and holds a worker meanwhile", "Use ctx.sleep(), which costs a row."
)
UNDECLARED: Final = Rule(
    "W102",
    "the step is not in steps= of the flow, so it is refused when it is reached",
    "List the tool in steps= of @flow.",
)
CHANCE: Final = Rule(
    "W103", "a replay draws another value", "Use ctx.random() or ctx.uuid4(), the same on every replay."
)
WORLD: Final = Rule(
    "W104",
    "a replay does it again and may see something else",
    "Do it in a tool, by ctx.run(), or read the value once: ctx.decide(id, lambda: …).",
)
AT_EACH_PARK: Final = Rule(
    "W105",
    "it runs each time the flow parks inside it, not only at its end",
    "Open and close it inside a tool; undo steps with ctx.on_failure(); catch StepFailed for a failure.",
)
SWALLOWS: Final = Rule(
    "W106",
    "it catches what parks the flow, too",
    "Catch StepFailed, ChildFailed or WaitTimedOut; at the widest, Exception.",
)
DIRECT: Final = Rule(
    "W107",
    "called directly, a tool or a flow is not recorded and is refused",
    "Use ctx.run(tool, …) for a tool, ctx.start_child(flow, …) for a flow.",
)
STARTS: Final = Rule(
    "W107",
    "each replay starts another execution",
    "Use ctx.start_child(flow, …), or start it in a tool with an execution_id.",
)
NO_TOOL: Final = Rule(
    "W107", "only a tool can be a step", "Decorate the function with @tool and list it in steps= of @flow."
)
CONCURRENT: Final = Rule(
    "W108",
    "a ctx belongs to the thread and the task of its body",
    "Use ctx.parallel({name: branch, …}), whose branches have a ctx of their own; slow work goes into a tool.",
)
UNORDERED: Final = Rule(
    "W109", "a set has another order in another process", "Iterate over sorted(…) or over a list."
)

IDS: Final = frozenset(
    rule.id
    for rule in (
        CLOCK,
        UNDECLARED,
        CHANCE,
        WORLD,
        AT_EACH_PARK,
        SWALLOWS,
        DIRECT,
        CONCURRENT,
        UNORDERED,
    )
)

# A decider is run once, and its value is recorded: it may read anything.
FREE_IN_DECIDER: Final = frozenset({CLOCK.id, CHANCE.id, WORLD.id})


def _table(*rows: tuple[Rule | None, str]) -> dict[str, Rule | None]:
    return {path: rule for rule, paths in rows for path in paths.split()}


CALLS: Final = _table(
    (
        CLOCK,
        "datetime.datetime.now datetime.datetime.utcnow datetime.datetime.today datetime.date.today "
        "django.utils.timezone.now django.utils.timezone.localtime django.utils.timezone.localdate "
        "time.time time.time_ns time.monotonic time.monotonic_ns time.perf_counter time.perf_counter_ns "
        "time.localtime time.gmtime time.ctime",
    ),
    (PAUSE, "time.sleep asyncio.sleep"),
    (
        CHANCE,
        "random secrets os.urandom posix.urandom nt.urandom uuid.uuid1 uuid.uuid4 uuid.uuid6 uuid.uuid7 "
        "uuid.uuid8 numpy.random django.utils.crypto.get_random_string",
    ),
    (None, "secrets.compare_digest"),
    (
        WORLD,
        "requests httpx aiohttp urllib3 urllib.request http.client socket subprocess smtplib ftplib boto3 "
        "builtins.open io.open _io.open builtins.input os.getenv os.system os.popen os.listdir os.scandir "
        "pathlib.Path.open pathlib.Path.read_text pathlib.Path.read_bytes pathlib.Path.write_text "
        "pathlib.Path.write_bytes pathlib.Path.exists pathlib.Path.iterdir "
        "django.core.cache django.utils.connection.ConnectionProxy django.db.connection django.core.mail "
        "django.shortcuts.get_object_or_404 django.shortcuts.get_list_or_404",
    ),
    (
        CONCURRENT,
        "asyncio.gather asyncio.wait asyncio.wait_for asyncio.as_completed asyncio.TaskGroup "
        "asyncio.create_task asyncio.ensure_future asyncio.to_thread asyncio.run "
        "threading.Thread threading.Timer concurrent.futures multiprocessing "
        "asgiref.sync.sync_to_async asgiref.sync.SyncToAsync asgiref.sync.async_to_sync "
        "asgiref.sync.AsyncToSync anyio.create_task_group trio.open_nursery",
    ),
    (
        None,
        "requests.exceptions concurrent.futures.wait concurrent.futures.as_completed multiprocessing.cpu_count",
    ),
    (DIRECT, "loom_django.definitions.Tool.func loom_django.definitions.Flow.func"),
    (STARTS, "loom_django.definitions.Flow.start loom_django.definitions.Flow.astart"),
)

READS: Final = _table(
    (WORLD, "os.environ os._Environ django.conf.settings django.conf.LazySettings"),
)

# With an argument they only convert, or draw from a seed.
CONVERTS_ITS_ARGUMENT: Final = frozenset(
    {
        "random.Random",
        "time.localtime",
        "time.gmtime",
        "time.ctime",
        "django.utils.timezone.localtime",
        "django.utils.timezone.localdate",
    }
)

# Entered and left at each park, they leave nothing behind.
HARMLESS_MANAGERS: Final = frozenset(
    {
        "contextlib.suppress",
        "contextlib.nullcontext",
        "decimal.localcontext",
        "django.utils.timezone.override",
        "django.utils.translation.override",
        "pytest.raises",
    }
)


def rule_for(paths: Iterable[str], table: Mapping[str, Rule | None]) -> Rule | None:
    """The rule of the longest path in the table that is one of `paths` or stands above it."""
    found = max((known for path in paths for known in _upwards(path) if known in table), key=len, default="")
    return table.get(found)


def _upwards(path: str) -> Iterable[str]:
    parts = path.split(".")
    return (".".join(parts[:length]) for length in range(len(parts), 0, -1))
