"""Which layers of a model have a kind, by the fields that transformers and vLLM read it from.

A layer's number counts from 0. A field without which upstream takes a default has none here, but where no field means
that nothing is special. Sources: transformers 5.24 and vLLM 0.32.
"""

from __future__ import annotations

from dataclasses import dataclass

from tasks.lora.family import ConfigFields, LayerRule

_EVERY = -1


@dataclass(frozen=True, slots=True)
class EveryLayer:
    """All of them."""

    def __str__(self) -> str:
        return "num_hidden_layers"

    def list_layers(self, fields: ConfigFields, layers: int) -> tuple[int, ...]:
        """Return every number."""
        return tuple(range(layers))


@dataclass(frozen=True, slots=True)
class SteppedLayers:
    """The last of every `step` layers, but for those that a list names; every layer without either field.

    Source: transformers models/qwen3_moe/modeling_qwen3_moe.py, Qwen3MoeDecoderLayer; alike in qwen2_moe, qwen3_next
    and qwen3_vl_moe.
    """

    step_field: str
    dense_field: str

    def __str__(self) -> str:
        return f"{self.step_field} and {self.dense_field}"

    def list_layers(self, fields: ConfigFields, layers: int) -> tuple[int, ...]:
        """Return them. Raises InvalidBaseConfig."""
        step = _step(fields, self.step_field)
        dense = set(fields.optional_numbers(self.dense_field) or ())
        return tuple(layer for layer in range(layers) if layer not in dense and (layer + 1) % step == 0)


@dataclass(frozen=True, slots=True)
class AfterDenseLayers:
    """The layers from the first that is not dense on; of these those that a frequency or a list of flags picks.

    Source: transformers models/deepseek_v3/modeling_deepseek_v3.py, DeepseekV3DecoderLayer, alike in deepseek_v2 and
    glm4_moe, for the first; vLLM models/deepseek_v2.py, DeepseekV2DecoderLayer, for the frequency, which transformers
    ignores there; transformers models/dots3_note/configuration_dots3_note.py for the list.
    """

    first_field: str
    freq_field: str

    def __str__(self) -> str:
        return f"{self.first_field} and {self.freq_field}"

    def list_layers(self, fields: ConfigFields, layers: int) -> tuple[int, ...]:
        """Return them. Raises InvalidBaseConfig, also without the first."""
        after = range(_first(fields, self.first_field), layers)
        if fields.is_list(self.freq_field):
            flags = fields.optional_numbers(self.freq_field) or ()
            if len(flags) != layers:
                raise fields.invalid(self.freq_field, f"a flag for each of {layers} layers", f"{len(flags)}")
            return tuple(layer for layer in after if flags[layer])
        freq = _step(fields, self.freq_field)
        return tuple(layer for layer in after if layer % freq == 0)


@dataclass(frozen=True, slots=True)
class ListedLayers:
    """The layers of a list; without one, the last of every `step`.

    Source: transformers models/llama4/configuration_llama4.py, Llama4TextConfig.
    """

    list_field: str
    step_field: str

    def __str__(self) -> str:
        return f"{self.list_field} and {self.step_field}"

    def list_layers(self, fields: ConfigFields, layers: int) -> tuple[int, ...]:
        """Return them. Raises InvalidBaseConfig, also for a layer of the list that is not there."""
        listed = fields.optional_numbers(self.list_field)
        if listed is None:
            step = _step(fields, self.step_field)
            return tuple(range(step - 1, layers, step))
        if not set(listed) <= set(range(layers)):
            raise fields.invalid(self.list_field, f"layers 0 to {layers - 1}", listed)
        return tuple(sorted(set(listed)))


@dataclass(frozen=True, slots=True)
class RangedLayers:
    """The last of every `interval` layers, from a first to a last, which is the model's last where it is -1 or absent.

    Source: transformers models/ernie4_5_moe/{configuration,modeling}_ernie4_5_moe.py; vLLM models/ernie45_vl_moe.py
    for lists, whose first entry is the text's.
    """

    first_field: str
    last_field: str
    interval_field: str

    def __str__(self) -> str:
        return f"{self.first_field}, {self.last_field} and {self.interval_field}"

    def list_layers(self, fields: ConfigFields, layers: int) -> tuple[int, ...]:
        """Return them. Raises InvalidBaseConfig, also without the first."""
        first, last = _first(fields, self.first_field), fields.optional_whole(self.last_field)
        interval = _step(fields, self.interval_field)
        end = layers if last is None or last == _EVERY else min(last + 1, layers)
        return tuple(layer for layer in range(first, end) if (layer + 1) % interval == 0)


@dataclass(frozen=True, slots=True)
class WordLayers:
    """The layers of certain words in a list, or letters in a text, with one for each layer.

    names: where the list or text stands, the newest first. words: words and letters alike.
    interval_field: of older configs, which have a number instead: the last of every so many layers has the kind, or
    where `others` is set all but those.
    Source: transformers models/nemotron_h/configuration_nemotron_h.py, NemotronHConfig, for lists and letters;
    models/qwen3_next/configuration_qwen3_next.py, Qwen3NextConfig, for the interval.
    """

    names: tuple[str, ...]
    words: tuple[str, ...]
    interval_field: str | None = None
    others: bool = False

    def __str__(self) -> str:
        return " or ".join(self.names)

    def list_layers(self, fields: ConfigFields, layers: int) -> tuple[int, ...]:
        """Return them. Raises InvalidBaseConfig, also where no field tells."""
        for name in self.names:
            found = fields.optional_words(name)
            if found is not None:
                if len(found) != layers:
                    raise fields.invalid(name, f"one for each of {layers} layers", f"{len(found)}")
                return tuple(layer for layer, word in enumerate(found) if word in self.words)
        if self.interval_field is None:
            raise fields.invalid(str(self), "a word for each layer", "nothing")
        interval = fields.whole(self.interval_field)
        if interval < 1:
            raise fields.invalid(self.interval_field, "a whole number above zero", interval)
        return tuple(layer for layer in range(layers) if ((layer + 1) % interval == 0) is not self.others)


@dataclass(frozen=True, slots=True)
class FlaggedLayers:
    """The layers of another rule where a field is true, or where it is not, as `value` says; else none.

    Source: transformers models/gemma4/modeling_gemma4.py, Gemma4TextAttention.
    """

    field: str
    value: bool
    rule: LayerRule

    def __str__(self) -> str:
        return f"{self.rule} and {self.field}"

    def list_layers(self, fields: ConfigFields, layers: int) -> tuple[int, ...]:
        """Return them. Raises InvalidBaseConfig."""
        return self.rule.list_layers(fields, layers) if fields.is_true(self.field) is self.value else ()


@dataclass(frozen=True, slots=True)
class UnsharedLayers:
    """The layers of another rule, but for the last of the model, whose keys and values are those of earlier ones.

    Source: transformers models/gemma4/configuration_gemma4.py, Gemma4TextConfig.kv_sharing_modes; vLLM
    models/gemma4.py, Gemma4Attention.
    """

    count_field: str
    rule: LayerRule

    def __str__(self) -> str:
        return f"{self.rule} and {self.count_field}"

    def list_layers(self, fields: ConfigFields, layers: int) -> tuple[int, ...]:
        """Return them. Raises InvalidBaseConfig, also for more layers that share than there are."""
        count = fields.optional_whole(self.count_field) or 0
        if not 0 <= count <= layers:
            raise fields.invalid(self.count_field, f"at most {layers}, as there are layers", count)
        return tuple(layer for layer in self.rule.list_layers(fields, layers) if layer < layers - count)


@dataclass(frozen=True, slots=True)
class ListedDenseLayers:
    """The layers that another rule leaves out, where a list names any of them; without the list, none.

    Source: vLLM models/qwen3_moe.py, Qwen3MoeForCausalLM: packed_modules_mapping has gate_up_proj only then.
    """

    list_field: str
    rule: LayerRule

    def __str__(self) -> str:
        return f"{self.list_field} and {self.rule}"

    def list_layers(self, fields: ConfigFields, layers: int) -> tuple[int, ...]:
        """Return them. Raises InvalidBaseConfig."""
        if not fields.optional_numbers(self.list_field):
            return ()
        others = set(self.rule.list_layers(fields, layers))
        return tuple(layer for layer in range(layers) if layer not in others)


@dataclass(frozen=True, slots=True)
class GivenLayers:
    """Every layer where a field gives a number, or where it does not, as `given` says; else none.

    Source: transformers models/deepseek_v3/modeling_deepseek_v3.py, DeepseekV3Attention, alike in deepseek_v2 and in
    vLLM models/deepseek_v2.py.
    """

    field: str
    given: bool

    def __str__(self) -> str:
        return self.field

    def list_layers(self, fields: ConfigFields, layers: int) -> tuple[int, ...]:
        """Return them. Raises InvalidBaseConfig."""
        return tuple(range(layers)) if (fields.optional_whole(self.field) is not None) is self.given else ()


def _first(fields: ConfigFields, name: str) -> int:
    first = fields.whole(name)
    if first < 0:
        raise fields.invalid(name, "a layer's number", first)
    return first


def _step(fields: ConfigFields, name: str) -> int:
    """Return a number of layers; 1, which is every layer, without one."""
    step = fields.optional_whole(name)
    if step is None:
        return 1
    if step < 1:
        raise fields.invalid(name, "a whole number above zero", step)
    return step
