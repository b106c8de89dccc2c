"""Signs of health of the embedded services, asked over loopback HTTP without any proxy."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from pathlib import Path

from flows.deploy import POOL
from flows.supervisor import ChildUnfitError
from roster.engine_plugin.settings import CPU_MOE_LOG_LINE, PUBLISHED_LOG_LINE
from roster.serving_engine import EngineInfo

_HTTP_TIMEOUT_S = 1.0


def is_answering(url: str) -> bool:
    """Whether a GET is answered with success."""
    return _get(urllib.request.Request(url, headers={"Accept": "application/json"})) is not None


def is_worker_online(api_url: str, name: str) -> bool:
    """Whether the Prefect server has heard from the worker of this name."""
    answer = _get(
        urllib.request.Request(
            f"{api_url}/work_pools/{POOL}/workers/filter",
            data=b"{}",
            headers={"Content-Type": "application/json"},
        )
    )
    return answer is not None and any(
        worker["name"] == name and worker["status"] == "ONLINE" for worker in json.loads(answer)
    )


def is_engine_ready(health_url: str, log: Path, engine_json: Path) -> bool:
    """Whether the engine answers; its log must then show that our plugins are active in it.

    vLLM itself only logs a plugin's failed import and serves without it.

    Raises:
        ChildUnfitError: it answers without them.
    """
    if not is_answering(health_url):
        return False
    text = log.read_text(errors="replace")
    if PUBLISHED_LOG_LINE not in text:
        raise _unfit("our plugins", PUBLISHED_LOG_LINE)
    on_cpu = EngineInfo.model_validate_json(engine_json.read_bytes()).device == "cpu"
    if on_cpu and CPU_MOE_LOG_LINE not in text:
        raise _unfit("the CPU expert-LoRA plugin", CPU_MOE_LOG_LINE)
    return True


def _unfit(what: str, line: str) -> ChildUnfitError:
    return ChildUnfitError(
        f"it serves, but {what} did not load: its log lacks “{line}”. Look there for “Failed to load "
        "plugin”; `./run setup` installs our distribution into the engine's environment again"
    )


def _get(request: urllib.request.Request) -> bytes | None:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=_HTTP_TIMEOUT_S) as response:
            body: bytes = response.read()
            return body
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return None
