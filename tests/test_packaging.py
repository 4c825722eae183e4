"""What a user gets from an index: the whole package and nothing else."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

import loom_django

pytestmark = [pytest.mark.once, pytest.mark.xdist_group("packaging")]

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "loom_django"
SHIPPED = ("migrations", "templates", "static", "locale", "management")


def run(*command: str | Path, cwd: Path) -> str:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A source archive, and the wheel that was built from it and not from the checkout."""
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT, cwd=folder)
    return folder


@pytest.fixture(scope="module")
def wheel(dist: Path) -> Path:
    (wheel,) = dist.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def test_the_wheel_has_every_file_of_the_package(names):
    """Templates, static files, migrations and the typing marker are there, as they stand in the checkout."""
    expected = {
        path.relative_to(ROOT).as_posix()
        for path in PACKAGE.rglob("*")
        if path.is_file() and path.suffix != ".pyc" and path.name != ".DS_Store"
    }

    assert expected <= names
    assert "loom_django/py.typed" in names


def test_the_wheel_has_every_kind_of_file(names):
    """No folder that the package has in the checkout is empty in the wheel."""
    folders = [name for name in SHIPPED if (PACKAGE / name).is_dir()]

    missing = {folder for folder in folders if not any(n.startswith(f"loom_django/{folder}/") for n in names)}

    assert missing == set()


def test_the_wheel_has_nothing_else(names):
    """No tests, no example, no documentation in a user's site-packages."""
    tops = {name.partition("/")[0] for name in names}

    assert {top for top in tops if not top.endswith(".dist-info")} == {"loom_django"}


def test_the_metadata_says_what_is_supported(wheel, names):
    """Version, licence, Python and Django stand where indexes and installers look."""
    (name,) = (name for name in names if name.endswith(".dist-info/METADATA"))
    with zipfile.ZipFile(wheel) as archive:
        metadata = Parser().parsestr(archive.read(name).decode())

    assert metadata["Version"] == loom_django.__version__
    assert metadata["License-Expression"] == "MIT"
    assert metadata["Requires-Python"] == ">=3.11"
    assert {"django>=5.2", "croniter<8,>=7"} <= set(metadata.get_all("Requires-Dist", []))
    assert "Typing :: Typed" in metadata.get_all("Classifier", [])


def test_the_source_archive_can_be_tested(dist):
    """Who packages loom_django for a distribution finds tests, benchmarks and documentation in the source."""
    (archive,) = dist.glob("*.tar.gz")
    with tarfile.open(archive) as source:
        names = {name.partition("/")[2] for name in source.getnames()}

    wanted = {"tests/conftest.py", "benchmarks/__main__.py", "docs/index.md", "LICENSE", "pyproject.toml"}
    assert {*wanted, "manage.py"} <= names


def test_the_wheel_installs_and_imports(wheel, tmp_path):
    """The installed package works away from the checkout."""
    target = tmp_path / "environment"
    venv.create(target, with_pip=False, symlinks=True)
    python = target / "bin" / "python"
    run(
        sys.executable,
        "-m",
        "pip",
        f"--python={python}",
        "install",
        "--no-deps",
        "--no-index",
        wheel,
        cwd=tmp_path,
    )
    # What it depends on is lent by this environment: `make wheel` installs that too, from an index.
    paths = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=tmp_path)
    Path(paths.strip(), "lent.pth").write_text(sysconfig.get_path("purelib"))

    where = run(python, "-c", "import loom_django; print(loom_django.__file__)", cwd=tmp_path)

    assert Path(where.strip()).is_relative_to(target)
