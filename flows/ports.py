"""Free loopback ports, the same ones as last time where that is still possible."""

from __future__ import annotations

import random
import socket
from collections.abc import Mapping, Sequence

LOOPBACK = "127.0.0.1"
# SeaweedFS serves gRPC 10,000 above each HTTP port; its own parts expect it there, whatever the flags say.
GRPC_OFFSET = 10_000
# Both halves lie below the range that outgoing connections take their ports from (32768 on), so that none can
# take a port between our look and the child's bind, or between two starts.
_FIRST, _LAST = 18_000, 22_767
_ATTEMPTS = 2_000


class NoFreePortError(Exception):
    """No loopback port in our range is free."""

    def __init__(self, name: str) -> None:
        """Keep what the port was for."""
        self.name = name
        super().__init__(name)

    def __str__(self) -> str:
        """Say where we looked and what to do."""
        return (
            f"no free port for {self.name}: {_ATTEMPTS} tries between {_FIRST} and {_LAST} on {LOOPBACK}, "
            f"each with the port {GRPC_OFFSET} above it, found none. Stop what holds them (see `ss -ltnp`)."
        )


def pick_ports(names: Sequence[str], previous: Mapping[str, int]) -> dict[str, int]:
    """One free port per name; `port + GRPC_OFFSET` is free too. A name's previous port is kept if it is free.

    Raises:
        NoFreePortError: nothing is free in the range.
    """
    picked: dict[str, int] = {}
    kept = {name: previous[name] for name in names if name in previous}
    for name in names:
        taken = set(picked.values()) | set(kept.values())
        port = kept.get(name)
        picked[name] = port if port is not None and _is_free_pair(port) else _find(name, taken)
    return picked


def _find(name: str, taken: set[int]) -> int:
    for _ in range(_ATTEMPTS):
        port = random.randint(_FIRST, _LAST)
        if port not in taken and _is_free_pair(port):
            return port
    raise NoFreePortError(name)


def _is_free_pair(port: int) -> bool:
    return is_free(port) and is_free(port + GRPC_OFFSET)


def is_free(port: int) -> bool:
    """Whether a server could listen on the loopback port now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # Like the servers themselves: connections of the last run that still close must not cost us the port.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
            probe.listen(1)
        except OSError:
            return False
    return True
