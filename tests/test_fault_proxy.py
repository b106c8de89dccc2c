import http.client
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import urlsplit

import pytest
from fault_plans import Fault, Faults, Request
from fault_proxy import FaultKind, FaultPlan, FaultProxy
from loopback_server import LoopbackServer

BODY = bytes(range(256)) * 1001
LIST = "/b?list-type=2&prefix=ledger%2F"


class Upstream(BaseHTTPRequestHandler):
    """A store as far as a proxy can tell: `seen` are the requests it got, `stored` what was put."""

    protocol_version = "HTTP/1.1"
    seen: list[tuple[str, str, str | None, bytes]]
    stored: dict[str, bytes]

    def handle_any(self) -> None:
        sent = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.seen.append((self.command, self.path, self.headers["Host"], sent))
        if self.command == "PUT":
            self.stored[self.path] = sent
        body = " ".join(self.stored).encode() if self.path == LIST else self.stored.get(self.path, b"")
        self.send_response(200 if "list-type" in self.path or self.path in self.stored else 404)
        self.send_header("ETag", f'"{len(body)}"')
        self.send_header("X-Kept", "é+".encode().decode("latin-1"))
        if self.path.endswith("chunked"):
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            for part in (body[:99_999], body[99_999:]):
                self.wfile.write(b"%x\r\n%b\r\n" % (len(part), part))
            self.wfile.write(b"0\r\n\r\n")
            return
        body = b"" if self.command in ("PUT", "DELETE") else body
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_GET = do_HEAD = do_PUT = do_DELETE = handle_any  # noqa: N815

    def log_message(self, format: str, *args: object) -> None:
        pass


class Client:
    """One who asks through the proxy, on a connection of its own each time."""

    def __init__(self, proxy: FaultProxy) -> None:
        self.host = urlsplit(proxy.endpoint).netloc

    def __call__(
        self, method: str, path: str, body: bytes | None = None, **headers: str
    ) -> tuple[int, Any, bytes]:
        with closing(http.client.HTTPConnection(self.host, timeout=0.5)) as line:
            line.request(method, path, body, {name.replace("_", "-"): v for name, v in headers.items()})
            answer = line.getresponse()
            return answer.status, answer.headers, answer.read()


@pytest.fixture
def upstream() -> Iterator[tuple[type[Upstream], str]]:
    handler = type("Handler", (Upstream,), {"seen": [], "stored": {"/b/k": BODY}})
    with LoopbackServer(handler) as server:
        yield handler, server.url


@pytest.fixture
def proxy(upstream: tuple[type[Upstream], str]) -> Iterator[FaultProxy]:
    with FaultProxy(upstream[1], silent_s=0.05, pause_s=0.05) as running:
        yield running


@pytest.fixture
def ask(proxy: FaultProxy) -> Client:
    return Client(proxy)


@pytest.fixture
def store(upstream: tuple[type[Upstream], str]) -> type[Upstream]:
    return upstream[0]


def test_without_faults_everything_passes_as_it_is(proxy: FaultProxy, ask: Client, store: Any) -> None:
    status, headers, body = ask("GET", "/b/k")
    assert (status, body, headers["ETag"], headers["X-Kept"]) == (200, BODY, f'"{len(BODY)}"', "Ã©+")
    assert ask("HEAD", "/b/k")[1]["Content-Length"] == str(len(BODY))
    assert ask("HEAD", "/b/k")[2] == b""
    assert ask("PUT", "/b/%C3%A9%2B?x=1", BODY[:70_001], Expect="100-continue")[0] == 200
    assert ask("DELETE", "/b/gone")[0] == 404
    assert ask("PUT", "/b/chunked", BODY)[0] == 200
    assert ask("GET", "/b/chunked")[2] == BODY
    assert ("PUT", "/b/%C3%A9%2B?x=1", ask.host, BODY[:70_001]) in store.seen, "Host is signed"
    assert not proxy.met

    with closing(http.client.HTTPConnection(ask.host, timeout=1)) as kept:
        started = time.monotonic()
        for _ in range(5):
            kept.request("GET", LIST)
            assert b"/b/k" in kept.getresponse().read()
        assert time.monotonic() - started < 0.15, "no answer waits for an acknowledgement"


@pytest.mark.parametrize(
    ("kind", "status", "code"),
    [
        (FaultKind.UNAVAILABLE, 503, b"ServiceUnavailable"),
        (FaultKind.SLOW_DOWN, 503, b"SlowDown"),
        (FaultKind.REFUSED_CONDITION, 412, b"PreconditionFailed"),
    ],
)
def test_answers_in_the_stores_place(
    proxy: FaultProxy, ask: Client, store: Any, kind: FaultKind, status: int, code: bytes
) -> None:
    proxy.one(kind, method="PUT", key_part="b/é")
    assert ask("PUT", "/b/k2", b"x", If_Match="*")[0] == 200, "another key"
    assert ask("PUT", "/b/%C3%A9", BODY, If_None_Match="*")[::2] == (status, refusal(code))
    assert store.seen[-1][1] == "/b/k2"
    assert ask("PUT", "/b/%C3%A9", BODY, If_None_Match="*")[0] == 200, "one alone"
    assert proxy.met == Counter({kind: 1})


def refusal(code: bytes) -> bytes:
    return (
        b'<?xml version="1.0" encoding="UTF-8"?>\n<Error><Code>%b</Code>'
        b"<Message>%b, says the fault proxy</Message></Error>" % (code, code)
    )


@pytest.mark.parametrize("carried_out", [False, True])
@pytest.mark.parametrize("kind", [FaultKind.TIMEOUT, FaultKind.RESET, FaultKind.REFUSED_CONDITION])
def test_the_store_may_have_done_it_all_the_same(
    proxy: FaultProxy, ask: Client, store: Any, kind: FaultKind, carried_out: bool
) -> None:
    proxy.one(kind, carried_out=carried_out)
    if kind is FaultKind.REFUSED_CONDITION:
        assert ask("PUT", "/b/k", BODY)[0] == 200, "it has no condition"
        assert ask("PUT", "/b/new", b"new", If_None_Match="*")[0] == 412
    else:
        expected = http.client.RemoteDisconnected if kind is FaultKind.TIMEOUT else ConnectionResetError
        with pytest.raises(expected):
            ask("PUT", "/b/new", b"new", If_None_Match="*")
    assert store.stored.get("/b/new") == (b"new" if carried_out else None)
    assert proxy.met == Counter({kind: 1})


@pytest.mark.parametrize("path", ["/b/k", "/b/chunked", LIST])
def test_bodies_are_cut_or_slow(proxy: FaultProxy, ask: Client, path: str) -> None:
    ask("PUT", "/b/chunked", BODY)
    whole = ask("GET", path)[2]
    proxy.one(FaultKind.TRUNCATED)
    with pytest.raises(http.client.IncompleteRead) as cut:
        ask("GET", path)
    assert whole.startswith(cut.value.partial) and len(cut.value.partial) < len(whole)
    proxy.one(FaultKind.TRUNCATED, share=0)
    ask("HEAD", path)
    assert proxy.met[FaultKind.TRUNCATED] == 1, "there is nothing to cut; the next one meets it"
    with pytest.raises(http.client.IncompleteRead):
        ask("GET", path)
    proxy.one(FaultKind.SLOW_BODY)
    started = time.monotonic()
    assert ask("GET", path)[2] == whole
    assert time.monotonic() - started > 0.05
    assert proxy.met == Counter({FaultKind.TRUNCATED: 2, FaultKind.SLOW_BODY: 1})


def test_another_etag_and_an_earlier_listing(proxy: FaultProxy, ask: Client) -> None:
    first = ask("GET", LIST)[2]
    proxy.one(FaultKind.STALE_LISTING)
    assert ask("GET", LIST)[2] == first and not proxy.met, "there is no other one yet"
    ask("PUT", "/b/more", b"")
    ask("GET", LIST + "&delimiter=%2F")
    stale = ask("GET", LIST)[2]
    assert (stale, proxy.met) == (first, Counter({FaultKind.STALE_LISTING: 1}))
    assert ask("GET", LIST)[2] == first + b" /b/more"

    for method in ("GET", "HEAD"):
        proxy.one(FaultKind.WRONG_ETAG)
        ask("GET", LIST)
        assert ask(method, "/b/none")[0] == 404
        wrong, right = ask(method, "/b/k"), ask(method, "/b/k")
        assert wrong[1]["ETag"] != right[1]["ETag"] == f'"{len(BODY)}"'
        assert wrong[2] == right[2]
    assert proxy.met[FaultKind.WRONG_ETAG] == 2


@pytest.mark.parametrize("carried_out", [False, True])
def test_a_body_may_decide_and_whoever_waits_hears_of_it_first(
    proxy: FaultProxy, ask: Client, store: Any, carried_out: bool
) -> None:
    heard: list[tuple[bytes, bytes | None]] = []
    proxy.one(
        FaultKind.RESET,
        method="PUT",
        carried_out=carried_out,
        fits=lambda body: body.endswith(b"!"),
        when_met=lambda body: heard.append((body, store.stored.get("/b/new"))),
    )
    assert ask("GET", "/b/k")[0] == 200
    assert ask("PUT", "/b/other", BODY[:70_001])[0] == 200, "it was read before, and passes whole"
    assert store.stored["/b/other"] == BODY[:70_001] and not heard
    with pytest.raises(ConnectionResetError):
        ask("PUT", "/b/new", BODY + b"!")
    assert heard == [(BODY + b"!", BODY + b"!" if carried_out else None)]
    assert proxy.met == Counter({FaultKind.RESET: 1})


def test_what_the_store_refuses_by_itself_is_not_carried_out(
    proxy: FaultProxy, ask: Client, store: Any
) -> None:
    heard: list[bytes] = []
    proxy.one(FaultKind.RESET, carried_out=True, when_met=heard.append)
    assert ask("GET", "/b/gone")[0] == 404 and not proxy.met and not heard
    with pytest.raises(ConnectionResetError):
        ask("PUT", "/b/new", b"new")
    assert heard == [b""], "nobody had to look into its body"


def test_one_that_is_withdrawn_meets_nobody_even_after_a_miss(proxy: FaultProxy, ask: Client) -> None:
    fault = proxy.one(FaultKind.TRUNCATED)
    assert ask("HEAD", "/b/k")[0] == 200
    proxy.withdraw(fault)
    assert ask("GET", "/b/k")[2] == BODY
    proxy.withdraw(fault)
    assert not proxy.met


@pytest.mark.parametrize("withdrawn", [False, True])
def test_one_that_is_withdrawn_while_a_request_has_it_is_not_given_back(withdrawn: bool) -> None:
    faults, request = Faults(), Request("GET", "/b/k", is_conditional=False)
    fault = Fault(FaultKind.TRUNCATED, carried_out=False, share=0.5)
    faults.add(fault)
    assert faults.choose(request, bytes) is fault
    if withdrawn:
        faults.withdraw(fault)
    faults.is_missed(fault)
    assert faults.choose(request, bytes) is (None if withdrawn else fault)


def test_a_plan_is_seeded_and_bounded(proxy: FaultProxy, ask: Client) -> None:
    def answers(seed: int, limit: int) -> list[int]:
        proxy.met.clear()
        proxy.start_faults(FaultPlan(seed, {FaultKind.UNAVAILABLE: 0.3, FaultKind.SLOW_DOWN: 0.2}, limit))
        return [ask("GET", f"/b/k?n={number % 7}")[0] for number in range(24)]

    first = answers(5, 99)
    assert 5 < first.count(503) < 20 and first.count(503) == proxy.met.total() and len(proxy.met) == 2
    assert answers(5, 99) == first != answers(6, 99)
    answers(5, 3)
    assert proxy.met == Counter({FaultKind.UNAVAILABLE: 3, FaultKind.SLOW_DOWN: 3})
    proxy.start_faults(FaultPlan(5, {FaultKind.UNAVAILABLE: 1}, 99))
    assert ask("GET", "/b/k")[0] == 503
    proxy.one(FaultKind.RESET, key_part="never asked for")
    proxy.stop_faults()
    assert ask("GET", "/b/k")[0] == 200


def test_a_store_that_is_gone_is_a_closed_connection_and_leaving_ends_all(upstream: tuple[Any, str]) -> None:
    with LoopbackServer(upstream[0]) as gone:
        pass
    with FaultProxy(gone.url) as proxy, pytest.raises(ConnectionError):
        Client(proxy)("GET", "/b/k")
    with FaultProxy(upstream[1]) as proxy, pytest.raises(TimeoutError):
        proxy.one(FaultKind.TIMEOUT)
        with closing(http.client.HTTPConnection(Client(proxy).host, timeout=0.05)) as line:
            line.request("GET", "/b/k")
            line.getresponse()
    with pytest.raises(ConnectionRefusedError):
        Client(proxy)("GET", "/b/k")
