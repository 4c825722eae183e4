"""Chaos and storms, on a database of their own.

    python -m tests.chaos chaos --database postgresql --seconds 600 --seed 7
    python -m tests.chaos storm --database sqlite

Prints what happened as JSON; fails where a promise was broken.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import typing
from pathlib import Path
from typing import Any

from tests.chaos.site import site


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("what", choices=["chaos", "storm"])
    parser.add_argument("--database", choices=["sqlite", "postgresql"], default="postgresql")
    names = ("seconds", "flows", "workers", "every", "seed", "timers", "leases", "concurrency")
    for name in names:
        parser.add_argument(f"--{name}", type=float)
    given = vars(parser.parse_args())
    with (
        tempfile.TemporaryDirectory(prefix="loom-chaos-") as folder,
        site(Path(folder), given["database"]) as made,
    ):
        print(json.dumps(_play(made, given["what"], {name: given[name] for name in names if given[name]})))


def _play(made: Any, what: str, given: dict[str, float]) -> dict[str, Any]:
    from tests.chaos import chaos, storm

    module = chaos if what == "chaos" else storm
    kinds = typing.get_type_hints(module.Plan)
    plan = module.Plan(**{name: kinds[name](value) for name, value in given.items()})
    return (chaos.Chaos(made, plan) if what == "chaos" else storm.Storm(made, plan)).run()  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
