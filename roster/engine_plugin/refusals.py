"""Why a request for an author is not answered. Each has the HTTP status of its answer, and a message for the client."""

from http import HTTPStatus


class Refusal(Exception):
    """Base of the reasons; `status` is that of the answer."""

    status = HTTPStatus.SERVICE_UNAVAILABLE


class NotServed(Refusal):
    """The roster does not name this author for this base, and no version of that name is stored."""

    status = HTTPStatus.NOT_FOUND

    def __init__(self, name: str, base: str, found: str) -> None:
        super().__init__(name, base, found)
        self.name, self.base, self.found = name, base, found

    def __str__(self) -> str:
        return (
            f"The model `{self.name}` is not served on {self.base}: {self.found}. An author is served once an adapter "
            f"is ready, and unless held or retired; `roster why {self.name.partition('@')[0]}` tells."
        )


class NoRosterYet(Refusal):
    """Neither the store nor the disk has given this server a roster."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(name, reason)
        self.name, self.reason = name, reason

    def __str__(self) -> str:
        return (
            f"The model `{self.name}` cannot be looked up: this server has no roster yet ({self.reason}). "
            "Try again when the object store answers."
        )


class NotFetched(Refusal):
    """An adapter that should be served could not be brought here: the store, the disk or the room for it failed."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(name, reason)
        self.name, self.reason = name, reason

    def __str__(self) -> str:
        return f"The model `{self.name}` could not be fetched: {self.reason}. Try again later."


class NotIntact(Refusal):
    """What the store has of an adapter is not what the roster promises."""

    status = HTTPStatus.BAD_GATEWAY

    def __init__(self, name: str, file: str, expected: str, found: str) -> None:
        super().__init__(name, file, expected, found)
        self.name, self.file, self.expected, self.found = name, file, expected, found

    def __str__(self) -> str:
        return (
            f"The model `{self.name}` is damaged in the store: {self.file} should have {self.expected}, found "
            f"{self.found}. It is not loaded; have its author onboarded again."
        )


class OfAnotherBase(Refusal):
    """An adapter that was asked for by version belongs to another base than this server's."""

    status = HTTPStatus.NOT_FOUND

    def __init__(self, name: str, expected: str, found: str) -> None:
        super().__init__(name, expected, found)
        self.name, self.expected, self.found = name, expected, found

    def __str__(self) -> str:
        return f"The model `{self.name}` is an adapter of {self.found}; this server serves {self.expected}."


class ServerLacks(Refusal):
    """An adapter asks for a setting that this server was not started with; vLLM would refuse it without a reason."""

    status = HTTPStatus.BAD_REQUEST

    def __init__(self, name: str, setting: str, found: str) -> None:
        super().__init__(name, setting, found)
        self.name, self.setting, self.found = name, setting, found

    def __str__(self) -> str:
        return (
            f"The model `{self.name}` needs a server that was started with {self.setting}, and this one was started "
            f"{self.found}. Restart it so: `roster export --format vllm-args` prints all that its authors need."
        )
