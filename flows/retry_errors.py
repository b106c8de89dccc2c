"""What keeps an operator's retry from being done. Imports nothing, so that the command line can tell them at once."""

from __future__ import annotations

from difflib import get_close_matches

_SHOWN = 5


class PrefectNeeded(Exception):
    """Runs are asked for at a Prefect server with our deployments, and there is none that answers."""

    def __init__(self, found: str, advice: str) -> None:
        """Keep what was found instead, and what to do."""
        self.found = found
        self.advice = advice
        super().__init__(found, advice)

    def __str__(self) -> str:
        """Say both."""
        return f"expected a Prefect server with our deployments, found: {self.found}. {self.advice}"


class UnknownUpload(Exception):
    """There is no such upload."""

    def __init__(self, target: str, known: tuple[str, ...]) -> None:
        """Keep what was asked for, an author or `<author>/<run>`, and what there is in its place."""
        self.target = target
        self.known = known
        super().__init__(target, known)

    def __str__(self) -> str:
        """Name what was asked for, and the nearest that there is."""
        near = get_close_matches(self.target.casefold(), self.known, n=_SHOWN, cutoff=0)
        there = ", ".join(near) or "no upload at all"
        return f"expected the name of an upload, found {self.target}; in the store there is {there}"


class CatalogBehind(Exception):
    """The catalog was last synced by code whose steps have other versions: what is stale cannot be told from it."""

    def __init__(self, differing: tuple[str, ...]) -> None:
        """Keep the kinds of steps, each with both versions."""
        self.differing = differing
        super().__init__(differing)

    def __str__(self) -> str:
        """Name them, and the command that mends it."""
        return (
            f"the catalog was last synced by other code ({', '.join(self.differing)}): expected the versions of the "
            "code here. Run `roster sync`, then this again."
        )
