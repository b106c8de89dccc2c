"""docker-compose.yml: what it promises, that its settings exist, that .env.example and docs/deploy.md say the same."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import tomllib
from collections.abc import Iterator
from importlib import import_module, resources
from pathlib import Path
from typing import Any

import pytest
import yaml
from prefect.settings.models.root import Settings as PrefectSettings
from pydantic import AliasChoices
from pydantic_settings import BaseSettings

from flows.settings import Settings
from roster.engine_plugin.settings import PluginSettings
from roster.serving_engine import engine_command, engine_environment

ROOT = Path(__file__).parents[1]
COMPOSE = ROOT / "docker-compose.yml"
TEXT = COMPOSE.read_text("utf-8")
DOC = (ROOT / "docs" / "deploy.md").read_text("utf-8")
FILE: dict[str, Any] = yaml.load(TEXT, yaml.CSafeLoader)
SERVICES: dict[str, dict[str, Any]] = FILE["services"]
ONE_SHOTS = {"migrate", "deploy", "qualify"}
ENVIRONMENT = {name: value for one in SERVICES.values() for name, value in one["environment"].items()}
# ${NAME}, ${NAME:-default}, ${NAME:?what to do}
VARIABLES = re.findall(r"\$\{(\w+)(?::([-?])([^}]*))?\}", TEXT)


def section(title: str) -> str:
    return DOC.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def names_of(model: type[BaseSettings]) -> Iterator[str]:
    """Every variable that a class of settings reads, in capitals."""
    prefix = str(model.model_config.get("env_prefix", ""))
    for name, field in model.model_fields.items():
        nested = field.annotation
        if isinstance(nested, type) and issubclass(nested, BaseSettings):
            yield from names_of(nested)
            continue
        yield (prefix + name).upper()
        if isinstance(field.validation_alias, AliasChoices):
            yield from (one.upper() for one in field.validation_alias.choices if isinstance(one, str))


def test_the_manual_names_the_same_services_and_ports() -> None:
    rows = re.findall(r"^\| `([\w-]+)` \| [^|]+ \| (\d*) ?\|", section("What there is"), re.MULTILINE)
    published = {
        name: "".join(port.rpartition(":")[2] for port in one.get("ports", ()))
        for name, one in SERVICES.items()
    }
    assert dict(rows) == published and len(rows) == len(published)
    for name in ONE_SHOTS:
        assert re.search(rf"^\| `{name}` \| [^|]+; ends \|", DOC, re.MULTILINE)


def test_the_manual_names_the_same_settings() -> None:
    told = re.findall(r"`([A-Z][A-Z0-9_]+)`", "".join(re.findall(r"(?m)^\| (`[^|]+)\|", section("Settings"))))
    assert sorted(told) == sorted(ENVIRONMENT)


def test_every_setting_exists() -> None:
    known = {*names_of(PrefectSettings), *names_of(Settings), *names_of(PluginSettings)}
    ours = {name for name in ENVIRONMENT if name.startswith(("PREFECT_", "ROSTER_", "ADAPTER_ROSTER_"))}
    of_redis = {name for name in ours if name.startswith("PREFECT_REDIS_")}
    assert len(ours - of_redis) > 30 and of_redis
    assert ours - of_redis <= known
    modules = {value for value in ENVIRONMENT.values() if str(value).startswith("prefect_redis.")}
    assert len(modules) == 4
    assert {"PREFECT_API_URL", "PREFECT_MESSAGING_CACHE", "ROSTER_HOME"} <= known, "the reading sees names"
    assert "PREFECT_NO_SUCH_SETTING" not in known


def test_every_variable_stands_in_the_example_with_its_default() -> None:
    lines = re.findall(r"^(#?)([A-Z]\w+)=(.*)$", (ROOT / ".env.example").read_text("utf-8"), re.MULTILINE)
    example = {name: default if optional else None for optional, name, default in lines}
    used = {name: text if mark == "-" else None for name, mark, text in VARIABLES}
    assert example == used
    assert all(not default for optional, _, default in lines if not optional)
    # No variable has one default here and another there.
    assert len({(name, mark, text) for name, mark, text in VARIABLES}) == len(used)


def test_no_secret_has_a_default() -> None:
    required = {name for name, mark, _ in VARIABLES if mark == "?"}
    assert required == {
        *("POSTGRES_PASSWORD", "REDIS_PASSWORD", "PREFECT_API_AUTH_STRING"),
        *("ROSTER_STORE_ACCESS_KEY", "ROSTER_STORE_SECRET_KEY"),
    }
    assert all(mark in "-?" and mark for _, mark, _ in VARIABLES)
    secret = re.compile(r"PASSWORD|_KEY(_ID)?$|AUTH|SECRET")
    secrets = {name: value for name, value in ENVIRONMENT.items() if secret.search(name)}
    assert len(secrets) > 8
    for name, value in secrets.items():
        assert re.fullmatch(r"\$\{\w+:\?[^}]+\}", value), name
    for name, value in ENVIRONMENT.items():
        if "://" in value and "@" in value:
            assert re.search(r":\$\{\w+:\?[^}]+\}@", value), name


def test_the_command_that_makes_up_the_secrets_fills_what_is_empty_and_nothing_else(tmp_path: Path) -> None:
    [block] = [text for text in re.findall(r"^```sh\n(.*?)^```", DOC, re.M | re.S) if "openssl" in text]
    shutil.copy(ROOT / ".env.example", tmp_path)
    (tmp_path / "openssl").write_text("#!/bin/sh\necho made-up-$$\n")
    (tmp_path / "openssl").chmod(0o755)
    subprocess.run(["sh", "-c", block], cwd=tmp_path, env={"PATH": f"{tmp_path}:/usr/bin:/bin"}, check=True)
    before, after = ((tmp_path / name).read_text().splitlines() for name in (".env.example", ".env"))
    changed = [(old, new) for old, new in zip(before, after, strict=True) if old != new]
    assert len(changed) == 5 and len({new.partition("=")[2] for _, new in changed}) == 5
    assert all(new.startswith(f"{old}made-up-") for old, new in changed)
    assert (tmp_path / ".env").stat().st_mode & 0o077 == 0


def test_everything_that_is_published_is_on_loopback() -> None:
    ports = {port for one in SERVICES.values() for port in one.get("ports", ())}
    assert ports == {"127.0.0.1:4200:4200", "127.0.0.1:8333:8333", "127.0.0.1:8000:8000"}
    assert not [name for name, one in SERVICES.items() if "network_mode" in one]


def test_databases_are_reached_by_prefects_server_alone() -> None:
    inside = {name for name, one in SERVICES.items() if "backend" in one["networks"]}
    assert FILE["networks"]["backend"] == {"internal": True}
    assert inside == {"postgres", "redis", "migrate", "prefect", "services"}
    assert SERVICES["postgres"]["networks"] == SERVICES["redis"]["networks"] == ["backend"]


def test_images_are_pinned() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["version"]
    for name, one in SERVICES.items():
        repository, _, tag = one["image"].rpartition(":")
        if "build" in one:
            assert tag == version and one["pull_policy"] == "build", name
            text = (ROOT / one["build"].get("dockerfile", "Dockerfile")).read_text("utf-8")
            [start] = re.findall(r"^FROM (\S+)$", text, re.MULTILINE)
            assert re.search(r":v?\d+\.\d+\.\d+", start), start
        else:
            assert re.match(r"\d+\.\d+", tag) and repository, name


def test_what_runs_for_long_has_a_health_check_and_time_to_stop() -> None:
    assert set(SERVICES) > ONE_SHOTS
    for name, one in SERVICES.items():
        if name in ONE_SHOTS:
            assert not {"healthcheck", "restart", "ports"} & set(one), name
            continue
        assert {"interval", "timeout", "retries"} <= set(one["healthcheck"]), name
        assert one["healthcheck"]["test"][0] in {"CMD", "CMD-SHELL"}, name
        assert one["stop_grace_period"] in {"30s", "60s"} and one["restart"] == "unless-stopped", name
        assert one["init"] is True and one["logging"] == {"driver": "local"}, name


# https://github.com/PrefectHQ/prefect/issues/19550
def test_everything_waits_for_what_it_needs_to_be_healthy() -> None:
    needs = {
        name: {other: how["condition"] for other, how in one.get("depends_on", {}).items()}
        for name, one in SERVICES.items()
    }
    for conditions in needs.values():
        for other, condition in conditions.items():
            ends = other in ONE_SHOTS
            assert condition == ("service_completed_successfully" if ends else "service_healthy")
    reached = {"postgres", "redis", "store", "engine", "engine-cpu"}
    assert all(not needs[name] for name in reached)
    for name in ("migrate", "prefect", "services", "deploy", "worker", "qualify"):
        assert needs[name] and set(needs[name]) <= reached, "in this order"
        reached.add(name)
    assert {"migrate", "redis"} <= set(needs["prefect"]) & set(needs["services"])


def test_profiles() -> None:
    assert {name: one["profiles"] for name, one in SERVICES.items() if "profiles" in one} == {
        "engine": ["gpu"],
        "engine-cpu": ["cpu"],
        "qualify": ["gpu", "cpu"],
    }
    assert SERVICES["engine-cpu"]["networks"] == {"roster": {"aliases": ["engine"]}}
    optional = SERVICES["qualify"]["depends_on"]
    assert optional["engine"]["required"] is optional["engine-cpu"]["required"] is False
    [device] = SERVICES["engine"]["deploy"]["resources"]["reservations"]["devices"]
    assert device == {"driver": "nvidia", "count": 1, "capabilities": ["gpu"]}


def test_engines_are_started_as_the_supervisor_starts_them() -> None:
    sizes = {"max_model_len": 1, "max_loras": 1, "max_lora_rank": 8, "max_cpu_loras": 1}
    supervised = engine_command(
        Path("python3"), Path("/models/base"), "base", 8000, kv_cache_memory_bytes=1, **sizes
    )
    for name in ("engine", "engine-cpu"):
        command = SERVICES[name]["command"]
        assert tuple(command[:3]) == supervised[:3]
        flags = {word.partition("=")[0] for word in command[3:]}
        assert flags <= set(supervised)
        assert {"--enable-lora", "--no-enable-prefix-caching", "--max-cpu-loras"} <= flags
        variables = engine_environment(threads=1, engine_json=Path("engine.json"))
        del variables["ADAPTER_ROSTER_ENGINE_JSON"]  # the store has it
        shared = {key: value for key, value in variables.items() if key in SERVICES[name]["environment"]}
        if name == "engine-cpu":
            assert set(shared) == set(variables)
            shared.pop("OMP_NUM_THREADS")
        assert shared == {key: SERVICES[name]["environment"][key] for key in shared} and len(shared) > 3


def test_worker_and_engine_see_one_home() -> None:
    home = {
        name: volume
        for name, one in SERVICES.items()
        for volume in one.get("volumes", ())
        if volume.startswith("home:")
    }
    assert home == {
        "worker": "home:/var/lib/roster",
        "qualify": "home:/var/lib/roster",
        "engine": "home:/var/lib/roster:ro",
        "engine-cpu": "home:/var/lib/roster:ro",
    }
    assert SERVICES["worker"]["environment"]["ROSTER_HOME"] == "/var/lib/roster"


def test_one_password_and_one_redis_for_all() -> None:
    """A half of the server with another broker than the other would never see its events."""
    servers = [SERVICES[name]["environment"] for name in ("prefect", "services", "migrate")]
    assert servers[0] == servers[1] == servers[2]
    address = "redis://:${REDIS_PASSWORD:?see .env.example}@redis:6379"
    assert servers[0]["PREFECT_SERVER_DOCKET_URL"] == f"{address}/1"
    assert servers[0]["PREFECT_REDIS_WORKER_CLEANUP_QUEUE_URL"] == f"{address}/0"
    password = servers[0]["PREFECT_SERVER_API_AUTH_STRING"]
    for name in ("worker", "deploy", "qualify"):
        assert SERVICES[name]["environment"]["PREFECT_API_AUTH_STRING"] == password


def test_compose_commands_of_the_manual_name_services_and_profiles() -> None:
    lines = re.findall(r"docker compose [^`\n]+", DOC)
    assert len(lines) > 15
    for line in lines:
        words = shlex.split(line.rstrip(".,;:"))[2:]
        assert {words[at + 1] for at, word in enumerate(words) if word == "--profile"} <= {"gpu", "cpu"}
        scaled = [words[at + 1].partition("=")[0] for at, word in enumerate(words) if word == "--scale"]
        verb = next((at for at, word in enumerate(words) if word in {"run", "exec", "stop", "logs"}), None)
        named = [] if verb is None else [word for word in words[verb:] if word in SERVICES][:1]
        assert verb is None or named, line
        assert set(scaled) <= set(SERVICES), line


def test_the_pods_template_fits_prefects_own() -> None:
    """Each placeholder is a variable of the template that Prefect ships for its Kubernetes worker."""
    [block] = re.findall(r"^```json\n(.*?)^```", DOC, re.MULTILINE | re.DOTALL)
    template = json.loads(block)
    views = resources.files("prefect.server.api.collections_data") / "views"
    shipped = json.loads((views / "aggregate-worker-metadata.json").read_text("utf-8"))
    default = shipped["prefect-kubernetes"]["kubernetes"]["default_base_job_configuration"]
    placeholders = set(re.findall(r"{{ (\w+) }}", block))
    assert {"image", "command", "env"} <= placeholders <= set(default["variables"]["properties"])
    pod = default["job_configuration"]["job_manifest"]["spec"]["template"]["spec"]
    assert pod["containers"][0]["name"] == template["spec"]["containers"][0]["name"]
    mounted = {one["name"] for one in template["spec"]["containers"][0]["volumeMounts"]}
    assert mounted == {one["name"] for one in template["spec"]["volumes"]}
    policy = yaml.safe_load(re.findall(r"^```yaml\n(apiVersion.*?)^```", DOC, re.M | re.S)[0])
    [rule] = policy["spec"]["ingress"]
    assert rule["from"][0]["podSelector"]["matchLabels"] == template["metadata"]["labels"]


@pytest.mark.real
def test_dclint_has_nothing_to_say() -> None:
    if shutil.which("npx") is None:
        pytest.skip("npx is not installed")
    ran = subprocess.run(
        ["npx", "--yes", "dclint", str(COMPOSE)],
        check=False,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert (ran.returncode, ran.stdout.strip()) == (0, ""), ran.stdout + ran.stderr


@pytest.mark.real
def test_the_settings_of_prefect_redis_exist() -> None:
    from prefect_redis.cleanup_queue import RedisWorkerCleanupQueueSettings
    from prefect_redis.client import RedisMessagingSettings

    known = {*names_of(RedisMessagingSettings), *names_of(RedisWorkerCleanupQueueSettings)}
    used = {name for name in ENVIRONMENT if name.startswith("PREFECT_REDIS_")}
    assert len(used) == 5 and used <= known
    for value in ENVIRONMENT.values():
        if value.startswith("prefect_redis."):
            import_module(value)


@pytest.mark.real
def test_every_command_of_the_programs_parses(tmp_path: Path) -> None:
    """Those of the compose file, of the units and of the manual's text."""
    from prefect.cli._app import _app as prefect

    from flows.cli.app import app as roster

    programs = {"prefect": prefect, "roster": roster}
    plain = re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", TEXT)
    commands = [one["command"] for one in yaml.safe_load(plain)["services"].values() if "command" in one]
    commands += [shlex.split(line) for line in re.findall(r"^ExecStart=(.*)$", DOC, re.MULTILINE)]
    for line in [*re.findall(r"`([^`\n]+)`", DOC), *re.findall(r"^(?!ExecStart)(.*)$", DOC, re.MULTILINE)]:
        inner = re.fullmatch(
            r"(?:docker compose .* (?:worker|qualify) )?((?:roster|prefect) .*)", line.strip()
        )
        if inner:
            commands.append(shlex.split(inner[1]))
    met = set()
    for command in commands:
        name = Path(command[0]).name
        if name not in programs:
            continue
        words = [re.sub("(?:/models/base|/backup|DIR)$", str(tmp_path), word) for word in command[1:]]
        chain, _, rest = programs[name].parse_commands(words)
        assert chain, command
        if rest:
            programs[name].parse_args(words, exit_on_error=False, print_error=False)
        met.add((name, chain[0]))
    assert {("prefect", "server"), ("prefect", "work-pool"), ("roster", "qualify"), ("roster", "base")} <= met
