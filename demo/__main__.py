"""`./run demo`: train a tiny base and its authors, then send every adapter through the real pipeline."""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import sys
import threading
import time
from pathlib import Path
from types import FrameType

from rich.console import Console

from demo.material import Material, MaterialError, build_material
from demo.play import DemoFailedError, Played, Say, play, show
from flows.embedded import EmbeddedFailedError, run_embedded, start_detached, stop_embedded
from flows.embedded_config import EmbeddedConfig
from flows.services import Services
from flows.settings import base_environment, connect_prefect, load_settings, use_home
from flows.supervisor import ChildFailedError
from flows.up import embedded_config, register_served_base

CACHE = Path(__file__).resolve().parent.parent / ".demo"
# The engine's context: longer than most of the demo's texts, so that some are scored in windows.
_CONTEXT = 256
_SLOTS = 2
_MAX_RANK = 8


def main() -> int:
    """Run the demo; returns 0 when exactly the liar is quarantined and everyone else is ready."""
    options = _options()
    started = time.monotonic()
    console = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)

    def say(line: str) -> None:
        console.print(f"[{time.monotonic() - started:4.0f} s] {line}")

    signal.signal(signal.SIGTERM, _as_ctrl_c)
    try:
        material = build_material(CACHE, say)
        config = _fresh_home(material)
        played = _keep_up(config, material, say) if options.keep else _play_and_stop(config, material, say)
    except (MaterialError, DemoFailedError, ChildFailedError, EmbeddedFailedError) as error:
        say(f"the demo failed: {error}")
        return 1
    except KeyboardInterrupt:
        say("stopped; nothing is left running")
        return 130
    if options.json:
        sys.stdout.write(json.dumps(played.document()) + "\n")
    else:
        show(played)
    say(f"{len(played.ready)} ready, {len(played.quarantined)} quarantined")
    return 0 if played.as_expected() else 1


def _as_ctrl_c(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="./run demo", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout at the end")
    parser.add_argument(
        "--keep", action="store_true", help="leave the services up to look at (./run down stops them)"
    )
    return parser.parse_args()


def _fresh_home(material: Material) -> EmbeddedConfig:
    """The services' configuration, on a home that holds nothing of an earlier demo."""
    use_home(CACHE / "home")
    settings = load_settings()
    stop_embedded(settings.home, timeout_s=90)
    shutil.rmtree(settings.home, ignore_errors=True)
    settings.home.mkdir(parents=True)
    return embedded_config(
        settings,
        base=material.base_name,
        weights=material.base_dir,
        max_model_len=_CONTEXT,
        max_loras=_SLOTS,
        max_lora_rank=_MAX_RANK,
    )


def _play(services: Services, material: Material, say: Say, stop: threading.Event) -> Played:
    settings = load_settings()
    connect_prefect(settings)
    register_served_base(settings, services, material.base_name, material.base_dir)
    say(f"watch it at {services.prefect.ui_url}")
    return play(settings, material, say, stop)


def _keep_up(config: EmbeddedConfig, material: Material, say: Say) -> Played:
    services = start_detached(config, environment=base_environment(), announce=say)
    played = _play(services, material, say, threading.Event())
    say(f"left running: {', '.join(services.addresses)}")
    say(
        f"look: ROSTER_HOME={config.home} .venv/bin/roster ready    stop: ROSTER_HOME={config.home} ./run down"
    )
    return played


def _play_and_stop(config: EmbeddedConfig, material: Material, say: Say) -> Played:
    """Supervise the services from this process while a thread plays; whatever happens, they end with it."""
    stop = threading.Event()
    outcome: list[Played | BaseException] = []

    def interrupt(number: int, frame: FrameType | None) -> None:
        outcome.append(KeyboardInterrupt())
        stop.set()

    def run(services: Services) -> None:
        try:
            outcome.append(_play(services, material, say, stop))
        except BaseException as error:  # noqa: BLE001 - the main thread raises it again
            outcome.append(error)
        finally:
            stop.set()

    def begin(services: Services) -> None:
        threading.Thread(target=run, args=(services,), name="play", daemon=True).start()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, interrupt)
    run_embedded(config, stop, environment=base_environment(), announce=say, on_ready=begin)
    if isinstance(outcome[0], BaseException):
        raise outcome[0]
    return outcome[0]


if __name__ == "__main__":
    sys.exit(main())
