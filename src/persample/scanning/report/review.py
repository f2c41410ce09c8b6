"""Serves the page of a scan on this machine, so that decisions are kept in the folder of the scan."""

from __future__ import annotations

import hmac
import json
import secrets
import threading
from contextlib import ExitStack
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from persample.scanning.decisions import Decisions, parse_decision
from persample.scanning.errors import ScanError
from persample.scanning.report.page import Page
from persample.scanning.report.triage import pack_decisions, pack_preview

HOST = "127.0.0.1"
_MAX_BODY = 10_000  # bytes of a decision


class ReviewServer(ThreadingHTTPServer):
    """Answers on the loopback interface, below a path with a secret token: `address` is the whole address.

    `GET` gives the page and previews of single examples, which are read then; `POST decisions` stores one decision.
    """

    daemon_threads = True

    def __init__(self, page: Page, html: str, port: int = 0) -> None:
        self.token, self.html, self.page = secrets.token_urlsafe(24), html.encode(), page
        self.stack = ExitStack()  # keeps the scanned weights loaded
        self.decisions, self.lock = Decisions(page.scan.store), threading.Lock()
        super().__init__((HOST, port), _Answers)

    def server_close(self) -> None:
        """Stop listening, and give the model its own weights back."""
        super().server_close()
        self.stack.close()

    @property
    def address(self) -> str:
        return f"http://{HOST}:{self.server_port}/{self.token}/"


class _Answers(BaseHTTPRequestHandler):
    server: ReviewServer

    def do_GET(self) -> None:
        match self._find_path():
            case []:
                self._answer(HTTPStatus.OK, self.server.html, "text/html; charset=utf-8")
            case ["preview", number] if number.isdecimal() and int(number) < len(self.server.page.scan):
                with self.server.lock:  # datasets and models are not made for threads
                    packed = pack_preview(self.server.page.make_preview(int(number)))
                self._answer(HTTPStatus.OK, json.dumps(packed).encode(), "application/json")
            case ["decisions"]:
                packed = pack_decisions(self.server.decisions)
                self._answer(HTTPStatus.OK, json.dumps(packed).encode(), "application/json")
            case _:
                self._refuse(HTTPStatus.NOT_FOUND, "There is no such page.")

    def do_POST(self) -> None:
        size = self.headers.get("Content-Length", "")
        if self._find_path() != ["decisions"]:
            return self._refuse(HTTPStatus.NOT_FOUND, "There is no such page.")
        if not size.isdecimal() or int(size) > _MAX_BODY:
            return self._refuse(HTTPStatus.BAD_REQUEST, "A decision is too long.")
        try:
            i, decision = parse_decision(json.loads(self.rfile.read(int(size))))
            if i >= len(self.server.page.scan):
                raise ScanError(f"There is no example {i}.")
            with self.server.lock:
                self.server.decisions.add(i, decision)
        except (ValueError, ScanError) as error:
            return self._refuse(HTTPStatus.BAD_REQUEST, str(error))
        self._answer(HTTPStatus.NO_CONTENT)

    def _find_path(self) -> list[str] | None:
        """The parts of the path behind the token; None if the token is wrong, or the page of another host asks."""
        token, _, rest = self.path.removeprefix("/").partition("/")
        own = f"{HOST}:{self.server.server_port}"
        is_own = self.headers.get("Host") == own and self.headers.get("Origin", f"http://{own}") == f"http://{own}"
        if not is_own or not hmac.compare_digest(token.encode(), self.server.token.encode()):
            return None
        return rest.split("/") if rest else []

    def _refuse(self, status: HTTPStatus, text: str) -> None:
        self._answer(status, text.encode(), "text/plain; charset=utf-8")

    def _answer(self, status: HTTPStatus, content: bytes = b"", kind: str = "") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        if kind:
            self.send_header("Content-Type", kind)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Write nothing: the address with the token does not belong into a log."""
