"""The site as a process, on any free port or on a wished one.

    python -m example_project.stage.web --ready-file FILE [--port 8000]

Django's own development server, told where to write the address that it got: picking a free port beforehand
would be a guess.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from django.core.servers.basehttp import ThreadedWSGIServer, WSGIRequestHandler
from django.core.wsgi import get_wsgi_application


class QuietHandler(WSGIRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        """The log is for errors."""


def make_server(port: int) -> ThreadedWSGIServer:
    try:
        server = ThreadedWSGIServer(("127.0.0.1", port), QuietHandler)
    except OSError:
        if not port:
            raise
        server = ThreadedWSGIServer(("127.0.0.1", 0), QuietHandler)
    server.daemon_threads = True
    return server


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="web")
    parser.add_argument("--port", type=int, default=0, help="another one is taken if it is not free")
    parser.add_argument("--ready-file", type=Path, required=True, help="where to write the address")
    given = parser.parse_args(arguments)
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "example_project.settings")
    application = get_wsgi_application()
    from django.contrib.staticfiles.handlers import StaticFilesHandler  # needs the settings

    server = make_server(given.port)
    server.set_app(StaticFilesHandler(application))
    given.ready_file.write_text(f"http://127.0.0.1:{server.server_port}")
    server.serve_forever()


if __name__ == "__main__":
    main(sys.argv[1:])
