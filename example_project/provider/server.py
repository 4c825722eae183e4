"""The payment service itself.

    python -m example_project.provider.server --ledger FILE [--port 8100] [--ready-file FILE] [--hold-transfers N]

    POST /charges     takes money from a customer. Knows Idempotency-Key: the same key again is answered with
                      the same charge, and no money moves a second time.
    POST /refunds     gives it back; knows the key too.
    POST /transfers   sends money to a bank account. The bank behind it does not look at keys: whatever is sent
                      twice is paid twice. There are such banks.

It listens on 127.0.0.1 only. Three accounts behave as accounts do on bad days, see ``ACCOUNTS``.
"""

from __future__ import annotations

import argparse
import json
import select
import socket
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from example_project.provider.ledger import Ledger

# What the shop's order form offers.
GOOD_ACCOUNT = "DE02 1203 0000 0000 2020 51"
SILENT_ACCOUNT = "DE02 5001 0517 0137 0750 30"
CLOSED_ACCOUNT = "DE02 7002 0270 0010 1086 69"
ACCOUNTS = {
    GOOD_ACCOUNT: "a bank that answers",
    SILENT_ACCOUNT: "a bank that pays, and whose answer gets lost",
    CLOSED_ACCOUNT: "a bank that refuses: the account is closed",
}

PLURALS = {"/charges": "charge", "/refunds": "refund", "/transfers": "transfer"}

# A held request ends at the latest after so many seconds.
HOLD_LIMIT = 60.0


class Handler(BaseHTTPRequestHandler):
    server: Provider

    def do_POST(self) -> None:
        what = PLURALS.get(self.path)
        if what is None:
            self._answer(404, {"error": f"no such thing as {self.path}"})
            return
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))))
        refused = what == "transfer" and body.get("iban") == CLOSED_ACCOUNT
        request = self.server.ledger.enter(
            what=what,
            key=self.headers.get("Idempotency-Key", ""),
            reference=str(body.get("reference", "")),
            amount=str(body.get("amount", "")),
            refuse=refused,
            deduplicate=what != "transfer",
        )
        if what == "transfer" and self.server.take_hold():
            self._wait_until_caller_is_gone()
        lost = what == "transfer" and body.get("iban") == SILENT_ACCOUNT
        if lost:
            self.close_connection = True
        elif refused:
            self._answer(402, {"error": "the account is closed"})
        else:
            self._answer(201, {"id": request.booking, "repeated": request.repeated})
        self.server.ledger.answered(request, "caller gone" if lost or self._caller_is_gone() else "delivered")

    def _wait_until_caller_is_gone(self) -> None:
        """The money has moved; the answer takes its time. How long does not matter: the caller dies first."""
        select.select([self.connection], [], [], HOLD_LIMIT)

    def _caller_is_gone(self) -> bool:
        """A caller that waits for its answer sends nothing more: readable means closed."""
        readable, _, _ = select.select([self.connection], [], [], 0)
        try:
            return bool(readable) and not self.connection.recv(1, socket.MSG_PEEK)
        except OSError:
            return True

    def _answer(self, status: int, body: dict[str, Any]) -> None:
        if self._caller_is_gone():
            return
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """The ledger says it all."""


class Provider(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, port: int, ledger: Ledger, holds: int) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.ledger = ledger
        self._holds = holds
        self._lock = threading.Lock()

    def take_hold(self) -> bool:
        """True for as many transfers as are to be held."""
        with self._lock:
            self._holds -= 1
            return self._holds >= 0


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="provider")
    parser.add_argument("--ledger", type=Path, required=True)
    parser.add_argument("--port", type=int, default=0, help="another one is taken if it is not free")
    parser.add_argument("--ready-file", type=Path, help="where to write the address, once it listens")
    parser.add_argument("--hold-transfers", type=int, default=0, help="keep the first N callers waiting")
    given = parser.parse_args(arguments)
    book = Ledger(given.ledger)
    try:
        provider = Provider(given.port, book, given.hold_transfers)
    except OSError:
        provider = Provider(0, book, given.hold_transfers)
    address = f"http://127.0.0.1:{provider.server_port}"
    if given.ready_file:
        given.ready_file.write_text(address)
    print(f"the provider listens at {address}", flush=True)
    provider.serve_forever()


if __name__ == "__main__":
    main(sys.argv[1:])
