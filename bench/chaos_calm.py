"""The undisturbed run of the chaos bench: the same adapters, each once, and nothing goes wrong."""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from bench.chaos_adapters import SECOND_RUN, TRAINED
from bench.chaos_engine import ScriptedEngine, script_uploads
from bench.chaos_judge import Ending, read_endings
from bench.chaos_world import World
from bench.prefect_runs import ask, has_ended, has_onboards_left
from bench.tiny_world import kept_with_tests, living
from flows.settings import base_environment, take_environment
from storage.keys import engine_key
from storage.s3 import S3Store

_ADAPTER_S = 60.0  # of patience for each
_POLL_S = 1.0


def scripted_engine() -> ScriptedEngine:
    """The engine of both runs, not yet started; what it says is decided by names and texts alone."""
    return ScriptedEngine(
        script_uploads(kept_with_tests("refuse_builders"), kept_with_tests("pipeline_builders"))
    )


def play_undisturbed(
    disturbed: World, variables: Mapping[str, str], say: Callable[[str], None]
) -> dict[str, Ending]:
    """How each of the uploads of a world ends where nothing disturbs it, by its label; only vLLM is the same.

    Raises:
        TimeoutError: some had not ended after a minute for each.
    """
    sent = list(disturbed.sent)
    with (
        _restored_environment(),
        tempfile.TemporaryDirectory(prefix="calm-") as folder,
        scripted_engine() as engine,
        living(warm=True, say=say, variables=variables) as calm,
    ):
        kept_with_tests("refuse_builders").prepare(calm.store, engine.url)
        world = World(Path(folder), None, None, calm.store, engine, random.Random(0), calm.settings)
        if disturbed.trained is not None:
            share_vllm(disturbed, calm.store)
        for second in (False, True):
            for one in sent:
                if (one.run == SECOND_RUN) is not second:
                    continue
                if one.kind == TRAINED and disturbed.trained is not None:
                    authors = [adapter.author for adapter in disturbed.trained.adapters]
                    world.put_trained(disturbed.trained, authors.index(one.author))
                else:
                    world.put(one.kind, one.number, run=one.run)
            wait_until_settled(world, within_s=_ADAPTER_S * len(sent))
        return read_endings(calm.store, sent)


def wait_until_settled(world: World, *, within_s: float, turn: Callable[[], None] = lambda: None) -> None:
    """Return when every adapter has its ending, after a sync too; `turn` is called again and again meanwhile.

    Raises:
        TimeoutError: some have not.
    """
    deadline = time.monotonic() + within_s

    def wait(condition: Callable[[], bool], what: Callable[[], str]) -> None:
        while not condition():
            if time.monotonic() > deadline:
                raise TimeoutError(f"{what()} after {within_s:.0f} s")
            turn()
            time.sleep(_POLL_S)

    def is_through() -> bool:
        return not world.open_adapters() and not has_onboards_left(pending=False)

    def name_open() -> str:
        return f"no verdict for {', '.join(one.label for one in world.open_adapters())}"

    while True:
        wait(is_through, name_open)
        # A sync may have some scored again, who met nobody at first.
        wait(partial(has_ended, ask("sync/sync")), lambda: "no sync ended")
        world.look_again()
        if is_through():
            return


def share_vllm(disturbed: World, store: S3Store) -> None:
    """Register the base that vLLM serves in another store too, with what it says of itself and its qualification."""
    from bench.chaos_cpu import engine_url, register

    assert disturbed.trained is not None
    base = disturbed.trained.base
    register(store, disturbed.trained, engine_url(disturbed.topology))
    for prefix in (engine_key(base), f"qualified/{base}/"):
        for found in disturbed.store.list_objects(prefix):
            store.put(found.key, disturbed.store.get(found.key).body)


@contextmanager
def _restored_environment() -> Iterator[None]:
    """Embedded services put their addresses into the environment of this process."""
    before = base_environment()
    take_environment({name: text for name, text in before.items() if not name.startswith("PREFECT_API_")})
    try:
        yield
    finally:
        take_environment(before)
