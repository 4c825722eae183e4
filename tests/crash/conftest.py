from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.crash.kit import Lab, Zygote


@pytest.fixture(scope="session")
def zygotes() -> Iterator[dict[str, Zygote]]:
    """The process that forks for the tests, by the environment that it was started in."""
    started: dict[str, Zygote] = {}
    yield started
    for zygote in started.values():
        zygote.close()


@pytest.fixture
def make_lab(
    transactional_db: None,
    child_env: Callable[..., dict[str, str]],
    zygotes: dict[str, Zygote],
    tmp_path: Path,
) -> Iterator[Callable[..., Lab]]:
    """Makes the test's lab, with more in the environment of its processes."""
    labs: list[Lab] = []

    def make(**more: str) -> Lab:
        env = {**child_env(), "DJANGO_SETTINGS_MODULE": "tests.crash.settings", **more}
        env.pop("PYTEST_CURRENT_TEST", None)  # else each test would be an environment of its own
        key = json.dumps(sorted(env.items()))
        if key not in zygotes:
            zygotes[key] = Zygote(env)
        labs.append(Lab(tmp_path, env, zygotes[key]))
        return labs[-1]

    yield make
    for made in labs:
        made.close()


@pytest.fixture
def lab(make_lab: Callable[..., Lab]) -> Lab:
    """Processes on the test's database, with a ledger of their own."""
    return make_lab()
