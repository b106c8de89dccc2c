"""transformers and PEFT as a Scorer: a base on this machine, and one adapter at a time in it, as its trainer has it.

Neither library is a dependency of the pipeline: they are imported when the first of these objects is made.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tasks.bpb.reference_adapter import one_line, put_adapter
from tasks.bpb.reference_errors import LibraryMissing, ModelUnusable
from tasks.bpb.reference_files import ExpertPacking

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

# Positions whose logits are held at once, in float32: 150 MB with a vocabulary of 150,000.
_POSITIONS = 256
_INSTALL = "Install what the trainer has: pip install 'transformers>=5.19,<6' 'peft>=0.19.1'."


class ReferenceModel:
    """A base's directory as transformers reads it, scored with or without an adapter; see `protocol.Scorer`.

    `name` is what the base is asked for by. device: "cpu", "cuda", "cuda:1", "auto" for a GPU if there is one. dtype:
    of the weights, as torch names it, "auto" for the one that they are stored in. packing: how the stacked lora_B of
    every adapter lies, against whatever the adapter states; None for what it states. scored: called after each prompt.
    The weights are read at the first call that needs them.

    Raises:
        LibraryMissing: transformers or PEFT is not installed.
        ModelUnusable: the directory holds no tokenizer, or no config from which the longest window can be told; or the
            device is not there.
    """

    def __init__(
        self,
        directory: Path,
        *,
        name: str = "base",
        device: str = "auto",
        dtype: str = "auto",
        max_model_len: int | None = None,
        packing: ExpertPacking | None = None,
        scored: Callable[[], None] = lambda: None,
    ) -> None:
        self._directory, self._name, self._dtype = directory, name, dtype
        self._packing, self._scored = packing, scored
        try:
            import peft  # noqa: F401 - missing, it should not be missed after minutes of scoring
            from transformers import AutoConfig, AutoTokenizer
        except ImportError as error:
            missing = error.name or "transformers"
            raise LibraryMissing(
                "reference scorer", "transformers and peft", f"no {missing}", _INSTALL
            ) from error
        try:
            config = AutoConfig.from_pretrained(directory, local_files_only=True)
            self._tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
        except (OSError, ValueError, KeyError) as error:
            raise self._unusable("a config.json and a tokenizer that transformers reads", error) from error
        if max_model_len is None:
            max_model_len = getattr(config.get_text_config(), "max_position_embeddings", None)
        if max_model_len is None:
            advice = "Say how long a window is: the engine's max_model_len less 1."
            raise ModelUnusable(f"{directory}/config.json", "max_position_embeddings", "none", advice)
        self._max_model_len = int(max_model_len)
        self._device = _find_device(device)
        self._model: PreTrainedModel | None = None
        self._adapters: dict[str, str] = {}
        self._active: str | None = None
        self._wrapped: PeftModel | None = None

    def tokenize(self, text: str, *, add_special_tokens: bool) -> tuple[int, ...]:
        """The token ids of a whole text, however long."""
        encoded = self._tokenizer(
            text, add_special_tokens=add_special_tokens, truncation=False, verbose=False
        )
        return tuple(encoded["input_ids"])

    def detokenize(self, ids: Sequence[int]) -> str:
        """The text of token ids; bytes that are no whole character become U+FFFD."""
        return str(self._tokenizer.decode(list(ids)))

    def max_model_len(self) -> int:
        """One more than the longest window, in tokens."""
        return self._max_model_len

    def served_models(self) -> tuple[str, ...]:
        """The base's name and those of the loaded adapters."""
        return (self._name, *self._adapters)

    def load(self, name: str, path: str, *, is_3d: bool) -> None:
        """Put the adapter of a directory into the model; `is_3d` says nothing that its files do not say.

        Raises:
            PackingUnstated: its experts are stacked, and neither it nor `packing` says how.
            AdapterNotRead: PEFT does not read it, not all of it, or could mistake rows for columns.
        """
        self._use(None)
        self._adapters[name] = path
        try:
            self._use(name)
        except BaseException:
            del self._adapters[name]
            raise

    def unload(self, name: str) -> None:
        """Take an adapter out of the model again, which is then the base."""
        if self._active == name:
            self._use(None)
        del self._adapters[name]

    def logprobs(self, model: str, prompts: Sequence[Sequence[int]]) -> list[tuple[float | None, ...]]:
        """For each prompt one natural log-probability per token: None at 0, nan where it is not finite."""
        self._use(None if model == self._name else model)
        try:
            return [self._score(prompt) for prompt in prompts]
        except torch.OutOfMemoryError as error:
            longest = f"memory for a window of {max(map(len, prompts))} tokens"
            advice = "Score with a shorter window on both sides, or on another device."
            raise ModelUnusable(str(self._device), longest, one_line(error), advice) from error

    @torch.no_grad()
    def _score(self, ids: Sequence[int]) -> tuple[float | None, ...]:
        """One prompt at a time, alone: nothing is padded, and what else is scored changes no bit."""
        base = self._base()
        prompt = torch.tensor([list(ids)], device=base.device)
        values: list[float | None] = [None]
        for begin, logits in _list_logits(base, prompt):
            targets = prompt[0, begin + 1 : begin + 1 + len(logits)]
            scored = torch.log_softmax(logits[: len(targets)].float(), dim=-1)
            found = scored.gather(1, targets[:, None])[:, 0].tolist()
            values += (value if math.isfinite(value) else math.nan for value in found)
        self._scored()
        return tuple(values)

    def _base(self) -> PreTrainedModel:
        if self._model is None:
            from transformers import AutoModelForCausalLM

            try:
                model: Any = AutoModelForCausalLM.from_pretrained(
                    self._directory, dtype=self._dtype, local_files_only=True
                )
                self._model = model.to(self._device).eval()
            except (OSError, ValueError, KeyError, torch.OutOfMemoryError) as error:
                raise self._unusable("weights that transformers reads", error) from error
        return self._model

    def _unusable(self, expected: str, error: Exception) -> ModelUnusable:
        advice = "Give the base's directory as a model hub holds it: config, tokenizer, weights."
        return ModelUnusable(str(self._directory), expected, one_line(error), advice)

    def _use(self, name: str | None) -> None:
        """Have this adapter in the model and no other; PEFT takes no two that target different parameters."""
        if name == self._active:
            return
        if self._wrapped is not None:
            self._wrapped.unload()
            self._wrapped, self._active = None, None
        if name is not None:
            base = self._base()
            self._model = None  # PEFT may leave it half an adapted one: it is read again then
            self._wrapped = put_adapter(base, Path(self._adapters[name]), self._packing)
            self._model, self._active = base, name


def _find_device(named: str) -> torch.device:
    if named == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(named)
    except RuntimeError as error:
        raise ModelUnusable(named, "a device", one_line(error), "Say cpu, cuda or cuda:1.") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        advice = "Score on the CPU, or install a torch build for this machine's GPU."
        raise ModelUnusable(named, "a GPU that torch can use", "none", advice)
    return device


def _list_logits(model: PreTrainedModel, prompt: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    """(first position, logits `(positions, vocabulary)`) of a prompt `(1, length)`, some positions at a time.

    The layers below the head run once. The model's own forward turns what they give into logits, so that whatever it
    does to those (a cap, a scale) is done here too. A model that cannot give some positions alone gives all at once.
    """
    arguments: dict[str, Any] = {"input_ids": prompt, "use_cache": False}
    layers = model.base_model
    if layers is model or "logits_to_keep" not in inspect.signature(model.forward).parameters:
        yield 0, model(**arguments).logits[0]
        return
    with _runs_once(layers):
        for begin in range(0, prompt.shape[1] - 1, _POSITIONS):
            wanted = torch.arange(begin, min(begin + _POSITIONS, prompt.shape[1] - 1), device=prompt.device)
            yield begin, model(**arguments, logits_to_keep=wanted).logits[0]


@contextmanager
def _runs_once(module: torch.nn.Module) -> Iterator[None]:
    """Have a module give its first result again and again, for as long as the block runs."""
    before, real = vars(module).get("forward"), module.forward
    results: list[Any] = []

    def once(*arguments: Any, **more: Any) -> Any:
        if not results:
            results.append(real(*arguments, **more))
        return results[0]

    module.forward = once
    try:
        yield
    finally:
        del module.forward
        if before is not None:
            module.forward = before
