"""Serving authors by name inside vLLM's API server: the resolver it asks, and what runs beside the requests.

Imported by the API server's process alone, once `resolver` has checked that vLLM is the one this was written for.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any

from vllm.entrypoints.serve.engine.protocol import ModelCard, ModelPermission
from vllm.exceptions import GracefulHTTPError, VLLMNotFoundError
from vllm.lora.request import LoRARequest
from vllm.lora.resolver import LoRAResolver

from roster.engine_plugin import slots
from roster.engine_plugin.author_serving import AuthorServing, ServerLimits
from roster.engine_plugin.cache import AdapterCache
from roster.engine_plugin.errors import ResolverSettingsError, RosterUnattendedError
from roster.engine_plugin.fetching import Fetcher
from roster.engine_plugin.popularity import Popularity
from roster.engine_plugin.refusals import Refusal
from roster.engine_plugin.roster_source import RosterSource
from roster.engine_plugin.settings import SERVING_LOG_LINE, PluginSettings
from roster.engine_plugin.store import open_store
from roster.engine_plugin.versions import parse_version, roster_version
from roster.serving import Roster

_LOG = logging.getLogger("vllm.adapter_roster")


class RosterServing(LoRAResolver):  # type: ignore[misc]
    """What a server's `OpenAIServingModels` holds of us: the resolver it asks, and the authors it serves."""

    def __init__(self, models: Any, authors: AuthorServing, refresh_s: float) -> None:
        self.authors = authors
        self._models, self._refresh_s = models, refresh_s
        self._carded: Roster | None = None
        self._cards: list[ModelCard] = []
        self._following = asyncio.get_running_loop().create_task(self._follow(), name="adapter-roster")
        self._following.add_done_callback(_log_end)

    async def prepare(self, name: str, request: object) -> str:
        """See `AuthorServing.prepare`. Raises RosterUnattendedError when the roster is not followed any more."""
        if self._following.done():
            raise RosterUnattendedError(_reason(self._following))
        return await self.authors.prepare(name, request)

    async def resolve_lora(self, base_model_name: str, lora_name: str) -> LoRARequest | None:
        """What vLLM has to load under a name; None where the name means no adapter that anybody has.

        Raises author_serving's refusals.
        """
        version = parse_version(lora_name)
        wanted = None if version is None else await self.authors.fetch(version)
        if version is None or wanted is None:
            return None
        request = LoRARequest(
            lora_name=lora_name,
            lora_int_id=1,  # vLLM sets its own
            lora_path=self.authors.path_of(version),
            is_3d_lora_weight=wanted.manifest.is_3d_lora_weight,
        )
        self.authors.note_loading(version, request)
        return request

    def list_cards(self) -> list[ModelCard]:
        """A card for each author that may be asked for; its root is the version that would answer now."""
        roster = self.authors.source.roster
        if roster is not self._carded:  # ten thousand take half a second, in which all requests wait
            self._carded = roster
            parent, permission = self._models.base_model_paths[0].name, [ModelPermission()]
            self._cards = [
                ModelCard(
                    id=author,
                    root=roster_version(author, served.output_digest).name,
                    parent=parent,
                    permission=permission,
                )
                for author, served in sorted(self.authors.source.authors().items())
                if not self._models.is_base_model(author)
            ]
        return self._cards

    @contextmanager
    def as_answers(self) -> Iterator[None]:
        """Refusals leave as vLLM's own errors, which its server answers with their status."""
        try:
            yield
        except Refusal as refusal:
            if refusal.status == HTTPStatus.NOT_FOUND:
                raise VLLMNotFoundError(str(refusal)) from refusal
            raise GracefulHTTPError(str(refusal), refusal.status) from refusal

    async def _follow(self) -> None:
        async with (
            asyncio.TaskGroup() as both
        ):  # side by side: a hold does not wait until the busiest are loaded
            both.create_task(self._repeat(self.authors.refresh))
            both.create_task(self._repeat(lambda: self.authors.keep_up(self._models.resolve_lora)))

    async def _repeat(self, act: Callable[[], Awaitable[None]]) -> None:
        while True:
            await act()
            await asyncio.sleep(self._refresh_s)


def follow_roster(models: Any, settings: PluginSettings) -> RosterServing:
    """Have an `OpenAIServingModels` serve authors from now on; called in the event loop that will serve.

    Raises ResolverSettingsError when the server has no LoRA, or other resolvers, which might answer for an author;
    OSError when the cache's folder cannot be made.
    """
    lora = models.engine_client.vllm_config.lora_config
    if lora is None:
        raise ResolverSettingsError("start the server with --enable-lora")
    if models.lora_resolvers:
        others = ", ".join(type(resolver).__name__ for resolver in models.lora_resolvers)
        raise ResolverSettingsError(
            f"unset what registers other resolvers ({others}), which might answer for authors"
        )
    folder, base = settings.cache_dir, settings.engine_base
    bucket, region = settings.store_bucket, settings.store_region
    if folder is None or base is None or bucket is None or region is None:
        raise ResolverSettingsError("its other settings were unset meanwhile")
    cache = AdapterCache(folder)
    store = open_store(bucket, region, settings, hurried=True)  # requests wait for it
    authors = AuthorServing(
        RosterSource(store, base, folder / f"roster-{base}.json"),
        cache,
        Fetcher(store, cache, base),
        Popularity(folder / f"requests-{base}.json"),
        models.lora_requests,
        models.engine_client.remove_lora,
        limits=ServerLimits(
            lora.max_lora_rank,
            bool(lora.enable_mixed_moe_lora_format),
            str(lora.lora_dtype).removeprefix("torch.") if slots.is_active() else None,
        ),
        limit_bytes=settings.cache_bytes,
        candidates=settings.candidates,
        warm=settings.warm,
    )
    authors.source.refresh()
    serving = RosterServing(models, authors, settings.refresh_s)
    models.lora_resolvers.append(serving)
    # A warning, so that it is in the log whatever vLLM's level.
    _LOG.warning("%s: %d of base %s", SERVING_LOG_LINE, len(authors.source.authors()), base)
    return serving


def _log_end(task: asyncio.Task[None]) -> None:
    if not task.cancelled():
        _LOG.error("%s", RosterUnattendedError(_reason(task)), exc_info=task.exception())


def _reason(task: asyncio.Task[None]) -> str:
    if task.cancelled():
        return "it was cancelled"
    return repr(task.exception())
