"""docker-compose.yml as plain facts: what each service is told, what it waits for, and where it is found."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from flows.ports import LOOPBACK

COMPOSE = Path(__file__).resolve().parents[1] / "docker-compose.yml"
HEALTHY, COMPLETED = "service_healthy", "service_completed_successfully"
_VARIABLE = re.compile(r"\$\{(?P<name>\w+)(?:(?P<mark>:?[-?])(?P<rest>[^${}]*))?\}")
_OWN = re.compile(r"\b(?:127\.0\.0\.1|localhost)[: ](\d+)\b")
_HERE = ("127.0.0.1", "0.0.0.0", "localhost")
_UNITS_S = {"h": 3600, "m": 60, "s": 1, "ms": 0.001}


@dataclass(frozen=True, slots=True)
class Service:
    """One service. after: service → condition; volumes: path in the container → where it comes from."""

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str]
    after: Mapping[str, str]
    health: tuple[str, ...]
    volumes: Mapping[str, str]
    aliases: tuple[str, ...]
    restart: str
    stop_signal: str | None
    stop_grace_s: float

    @property
    def texts(self) -> tuple[str, ...]:
        """Everything that may name another service."""
        return (*self.command, *self.environment.values(), *self.health)


def read_services(
    variable: Callable[[str], str | None], *, profiles: Iterable[str] = (), file: Path = COMPOSE
) -> dict[str, Service]:
    """The services of these profiles and those without any, in the file's order.

    `variable`: what the environment of `docker compose` has, None where a variable is not set.
    """
    document = yaml.safe_load(file.read_text("utf-8"))
    chosen = {
        name: body
        for name, body in document["services"].items()
        if "profiles" not in body or set(body["profiles"]) & set(profiles)
    }
    return {name: _read(name, body, set(chosen), variable) for name, body in chosen.items()}


def _read(
    name: str, body: dict[str, Any], chosen: set[str], variable: Callable[[str], str | None]
) -> Service:
    def text(value: object) -> str:
        return fill_in("" if value is None else str(value), variable)

    networks = body.get("networks", {})
    health = body.get("healthcheck", {}).get("test", [])
    if health:
        kind, *words = health
        health = words if kind == "CMD" else ["sh", "-c", *words]
    return Service(
        name=name,
        command=tuple(map(text, body.get("command", ()))),
        environment={key: text(value) for key, value in body.get("environment", {}).items()},
        after={
            other: how["condition"]
            for other, how in body.get("depends_on", {}).items()
            if other in chosen or how.get("required", True)
        },
        health=tuple(map(text, health)),
        volumes=dict(map(_read_volume, map(text, body.get("volumes", ())))),
        aliases=tuple(networks["roster"].get("aliases", ()))
        if isinstance(networks, dict) and networks
        else (),
        restart=str(body.get("restart", "no")),
        stop_signal=body.get("stop_signal"),
        stop_grace_s=parse_duration(body.get("stop_grace_period", "10s")),
    )


def _read_volume(text: str) -> tuple[str, str]:
    source, target, *_ = text.split(":")
    return target, source


def fill_in(text: str, variable: Callable[[str], str | None]) -> str:
    """The text with every `${NAME}`, `${NAME:-default}` and `${NAME:?message}` filled in, the inner ones first.

    Raises:
        KeyError: a variable that must be set is not; its message is the error's.
    """

    def replace(match: re.Match[str]) -> str:
        value, mark = variable(match["name"]), match["mark"] or ""
        if value is None or (value == "" and mark.startswith(":")):
            if mark.endswith("?"):
                raise KeyError(match["name"], match["rest"])
            return match["rest"] or ""
        return value

    while _VARIABLE.search(text):
        text = _VARIABLE.sub(replace, text)
    return text.replace("$$", "$")


def parse_duration(text: str) -> float:
    """Seconds, from `1m30s` and the like."""
    return sum(float(number) * _UNITS_S[unit] for number, unit in re.findall(r"([\d.]+)(ms|[hms])", text))


def find_addresses(services: Mapping[str, Service]) -> set[tuple[str, int]]:
    """Every (service, port) that some service calls, or that its own health check or settings name."""
    names = name_hosts(services)
    found = set()
    for service in services.values():
        for text in service.texts:
            found |= {(names[host], int(port)) for host, port in _calls(names).findall(text)}
            found |= {(service.name, int(port)) for port in _OWN.findall(text)}
        found |= {(names.get(host, service.name), port) for _, host, port in _pairs(service, names)}
    return found


def name_hosts(services: Mapping[str, Service]) -> dict[str, str]:
    """Host name on the services' network → service."""
    return {alias: name for name, one in services.items() for alias in (name, *one.aliases)}


def move_text(text: str, service: str, names: Mapping[str, str], ports: Mapping[tuple[str, int], int]) -> str:
    """What a service is told, with every address as it is on this machine: loopback, and `ports`."""

    def called(match: re.Match[str]) -> str:
        return f"{LOOPBACK}:{ports[names[match[1]], int(match[2])]}"

    def own(match: re.Match[str]) -> str:
        return match[0].replace(match[1], str(ports[service, int(match[1])]))

    # Its own first: what it calls is put on loopback too.
    return _calls(names).sub(called, _OWN.sub(own, text)).replace("0.0.0.0", LOOPBACK)


def move_environment(
    service: Service, names: Mapping[str, str], ports: Mapping[tuple[str, int], int]
) -> dict[str, str]:
    """The service's environment with every address as it is on this machine."""
    moved = {key: move_text(value, service.name, names, ports) for key, value in service.environment.items()}
    for key, host, port in _pairs(service, names):
        moved[f"{key}_HOST"] = LOOPBACK
        moved[f"{key}_PORT"] = str(ports[names.get(host, service.name), port])
    return moved


def _pairs(service: Service, names: Iterable[str]) -> Iterator[tuple[str, str, int]]:
    """The settings X_HOST and X_PORT that say where another service is, or where it listens itself: X, host, port."""
    for key, port in service.environment.items():
        name = key.removesuffix("_PORT")
        host = service.environment.get(f"{name}_HOST")
        if name != key and host is not None and host in (*names, *_HERE):
            yield name, host, int(port)


def _calls(names: Iterable[str]) -> re.Pattern[str]:
    # Not the user and password of an address, nor a name's end.
    return re.compile(rf"(?<![\w.-])({'|'.join(map(re.escape, names))}):(\d+)\b(?!@)")
