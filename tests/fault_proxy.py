"""A proxy before an S3 endpoint that spoils some of what the real server answers: seeded, counted and bounded."""

from __future__ import annotations

import http.client
import io
import os
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import closing, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Self
from urllib.parse import urlsplit

from fault_plans import ANSWERED, MAY_BE_CARRIED_OUT, Fault, FaultKind, FaultPlan, Faults, Request

__all__ = ["FaultKind", "FaultPlan", "FaultProxy"]

_PIECE = 1 << 16
_UPSTREAM_S = 120
_POLL_S = 0.02
_OF_A_CONNECTION = frozenset({"connection", "keep-alive", "transfer-encoding", "upgrade", "expect"})
_OTHER_ETAG = f'"{"f0" * 16}"'
_ERROR = """<?xml version="1.0" encoding="UTF-8"?>
<Error><Code>{code}</Code><Message>{code}, says the fault proxy</Message></Error>"""


class _Handler(BaseHTTPRequestHandler):
    """One connection of a client; each request goes to the store on a connection of its own."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: _Server

    def setup(self) -> None:
        super().setup()
        with self.server.lock:
            self.server.open.add(self.connection)

    def finish(self) -> None:
        with self.server.lock:
            self.server.open.discard(self.connection)
        with suppress(ConnectionError):
            super().finish()

    def handle(self) -> None:
        with suppress(ConnectionError):
            super().handle()

    def log_message(self, format: str, *args: object) -> None:
        """Nothing is written of what is asked."""

    def _pass(self) -> None:
        self._ahead, self._unread = b"", int(self.headers.get("Content-Length", 0))
        if "Transfer-Encoding" in self.headers:
            raise NotImplementedError("a request whose body has no length")
        conditional = "If-Match" in self.headers or "If-None-Match" in self.headers
        request = Request(self.command, self.path, conditional)
        try:
            fault = self.server.faults.choose(request, self._whole_body)
            with closing(http.client.HTTPConnection(*self.server.store, timeout=_UPSTREAM_S)) as upstream:
                if fault is not None and (fault.kind in ANSWERED or fault.kind in MAY_BE_CARRIED_OUT):
                    self._meet(upstream, request, fault)
                else:
                    self._relay(self._ask(upstream), request, fault)
        except (OSError, http.client.HTTPException):
            self._hang_up()  # the store is gone, or the client is

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _pass  # noqa: N815

    def _meet(self, upstream: http.client.HTTPConnection, request: Request, fault: Fault) -> None:
        """Answer something else, or nothing, whether or not the store is asked."""
        body = self._ahead
        if fault.carried_out:
            answer = self._ask(upstream)
            if fault.when_met is not None and answer.status >= 300:
                self.server.faults.is_missed(fault)  # the store did not do what was asked
                return self._relay(answer, request, None)
        elif fault.kind is not FaultKind.RESET:
            while self._body():
                pass
        if fault.when_met is not None:
            fault.when_met(body)
        self.server.faults.is_met(fault)
        if fault.kind is FaultKind.TIMEOUT:
            self._wait()
            self.close_connection = True
        elif fault.kind is FaultKind.RESET:
            self._hang_up(reset=True)
        else:
            status, code = ANSWERED[fault.kind]
            body = _ERROR.format(code=code).encode()
            headers = [("Content-Type", "application/xml"), ("Content-Length", str(len(body)))]
            self._head(status, code, headers)
            if self.command != "HEAD":
                self.wfile.write(body)

    def _ask(self, upstream: http.client.HTTPConnection) -> http.client.HTTPResponse:
        upstream.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
        for name, value in self.headers.items():
            if name.lower() not in _OF_A_CONNECTION:
                upstream.putheader(name, value)  # Host among them: it is signed
        upstream.endheaders()
        while piece := self._body():
            upstream.send(piece)
        return upstream.getresponse()

    def _whole_body(self) -> bytes:
        """The body, read before the store is asked; it is passed on all the same."""
        pieces = [self._ahead]
        while self._unread:
            pieces.append(self._read())
        self._ahead = b"".join(pieces)
        return self._ahead

    def _body(self) -> bytes:
        """The next piece of the body, none at its end."""
        ahead, self._ahead = self._ahead, b""
        return ahead or self._read()

    def _read(self) -> bytes:
        piece = self.rfile.read(min(_PIECE, self._unread))
        if self._unread and not piece:
            raise ConnectionResetError("the client left in the middle of its body")
        self._unread -= len(piece)
        return piece

    def _relay(self, answer: http.client.HTTPResponse, request: Request, fault: Fault | None) -> None:
        faults = self.server.faults
        headers = [(name, v) for name, v in answer.getheaders() if name.lower() not in _OF_A_CONNECTION]
        length = answer.length  # None: the store sends it in chunks
        read: Callable[[int], bytes] = answer.read
        has_body = request.method != "HEAD" and length != 0
        happens = fault is not None and fault.kind in (FaultKind.TRUNCATED, FaultKind.SLOW_BODY) and has_body
        if request.is_listing and answer.status == 200:
            body = answer.read()
            earlier = faults.earlier_listing(request, body)
            if fault is not None and fault.kind is FaultKind.STALE_LISTING and earlier is not None:
                happens, body = True, earlier
            headers = [(name, value) for name, value in headers if name.lower() != "content-length"]
            headers.append(("Content-Length", str(len(body))))
            length, read = len(body), io.BytesIO(body).read
        tagged = answer.status in (200, 206) and "ETag" in answer.headers
        if fault is not None and fault.kind is FaultKind.WRONG_ETAG and tagged:
            happens = True
            headers = [(name, _OTHER_ETAG if name.lower() == "etag" else value) for name, value in headers]
        if fault is not None:
            (faults.is_met if happens else faults.is_missed)(fault)
        if has_body and length is None:
            headers.append(("Transfer-Encoding", "chunked"))
        self._head(answer.status, answer.reason, headers)
        if has_body:
            self._send(read, length, fault if happens else None)

    def _send(self, read: Callable[[int], bytes], length: int | None, fault: Fault | None) -> None:
        """Pass a body on in pieces; one in chunks is cut or held up after the first piece."""
        sent = 0
        comes = 1 if length is None or fault is None else int(length * fault.share)
        while True:
            if fault is not None and sent >= comes:
                if fault.kind is FaultKind.TRUNCATED:
                    return self._hang_up()
                if fault.kind is FaultKind.SLOW_BODY:
                    self.server.ended.wait(self.server.pause_s)
                fault = None
            piece = read(_PIECE if fault is None or length is None else min(_PIECE, comes - sent))
            if not piece:
                break
            sent += len(piece)
            self.wfile.write(piece if length is not None else b"%x\r\n%b\r\n" % (len(piece), piece))
        if length is None:
            self.wfile.write(b"0\r\n\r\n")
        elif sent < length:
            self._hang_up()  # the store broke off by itself

    def _head(self, status: int, reason: str, headers: list[tuple[str, str]]) -> None:
        self.send_response_only(status, reason)
        for name, value in headers:
            self.send_header(name, value)
        self.end_headers()

    def _wait(self) -> None:
        """Say nothing until the client goes, the proxy ends or `silent_s` have passed."""
        deadline = time.monotonic() + self.server.silent_s
        while not self.server.ended.wait(_POLL_S) and time.monotonic() < deadline:
            with suppress(BlockingIOError):
                if not self.connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT):
                    return

    def _hang_up(self, *, reset: bool = False) -> None:
        self.close_connection = True
        with suppress(OSError):
            if not reset:
                self.connection.shutdown(socket.SHUT_RDWR)
                return
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            os.close(self.connection.detach())


class _Server(ThreadingHTTPServer):
    daemon_threads = False  # they are waited for
    request_queue_size = 128

    def __init__(self, store: str, silent_s: float, pause_s: float) -> None:
        parts = urlsplit(store)
        if parts.hostname is None or parts.port is None:
            raise ValueError(f"{store}: expected http://host:port")
        self.store = (parts.hostname, parts.port)
        self.silent_s, self.pause_s = silent_s, pause_s
        self.faults = Faults()
        self.ended = threading.Event()
        self.lock = threading.Lock()
        self.open: set[socket.socket] = set()
        super().__init__(("127.0.0.1", 0), _Handler)


class FaultProxy:
    """A store's endpoint at `endpoint`, while entered as a context manager; named fake: it only spoils answers.

    `met` counts the faults that really happened. Bodies pass in pieces; a store that is gone is a connection that
    is closed. `silent_s`: how long a client that waits longer is left without an answer; `pause_s`: the pause in the
    middle of a slow body.
    """

    def __init__(self, store: str, *, silent_s: float = 120, pause_s: float = 2) -> None:
        self._server = _Server(store, silent_s, pause_s)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(_POLL_S,), daemon=True)
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"
        self.met = self._server.faults.met

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._server.ended.set()
        self._server.shutdown()
        self._thread.join()
        with self._server.lock:
            for client in self._server.open:
                with suppress(OSError):
                    client.shutdown(socket.SHUT_RDWR)
        self._server.server_close()

    def start_faults(self, plan: FaultPlan) -> None:
        """Let requests meet faults by this plan; its limits count from now."""
        self._server.faults.begin(plan)

    def stop_faults(self) -> None:
        """Let every request pass from now on, those too that `one` had meant."""
        self._server.faults.end()

    def one(
        self,
        kind: FaultKind,
        *,
        method: str | None = None,
        key_part: str = "",
        carried_out: bool = False,
        share: float = 0.5,
        fits: Callable[[bytes], bool] | None = None,
        when_met: Callable[[bytes], None] | None = None,
    ) -> Fault:
        """Let the next request that matches meet this fault; `withdraw` takes it back.

        `key_part`: a part of its path with the query. `carried_out`: the store does what is asked before no answer, a
        reset or a refusal comes back. `share`: how much of a body comes at once. `fits`: whether the request's body,
        which it gets whole, is one that is meant; called by threads. `when_met` is called when the fault is met, with
        the body if `fits` has looked at it, before the client hears of it: with `carried_out` after the store did what
        was asked, else before it has heard of it. A request that the store refuses by itself does not count then.
        """
        fault = Fault(kind, carried_out, share, method, key_part, fits=fits, when_met=when_met)
        self._server.faults.add(fault)
        return fault

    def withdraw(self, fault: Fault) -> None:
        """Let no request meet this fault any more that `one` returned."""
        self._server.faults.withdraw(fault)
