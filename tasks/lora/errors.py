"""The ways an adapter can be wrong, one class each.

Every error carries five facts and says them in one sentence; which outcome code a class stands for is
decided elsewhere, in one table.
"""

from __future__ import annotations

from pathlib import Path


class AdapterError(Exception):
    """An adapter, or the base it names, cannot be read as it stands; retrying will not help.

    adapter: the label, such as "author-17/run-3". where: a file, tensor key or config field.
    expected, found: short phrases. advice: what to do next, one sentence. others: what else is wrong with the adapter,
    where everything was gathered (problems.py).
    """

    ADVICE = ""

    def __init__(self, adapter: str, where: str, expected: str, found: str, advice: str = "") -> None:
        """Keep the facts; without its own advice an error gives its class's."""
        self.adapter = adapter
        self.where = where
        self.expected = expected
        self.found = found
        self.advice = advice or self.ADVICE
        self.others: tuple[AdapterError, ...] = ()
        super().__init__(adapter, where, expected, found, self.advice)

    def __str__(self) -> str:
        text = f"{self.adapter}: {self.where}: found {self.found}; expected {self.expected}."
        return f"{text} {self.advice}".rstrip()


# Files


class MissingConfig(AdapterError):
    """There is no adapter_config.json."""

    ADVICE = "Upload the whole folder that the trainer saved."


class MissingWeights(AdapterError):
    """There is no adapter_model.safetensors, or a file that its index names is not there."""

    ADVICE = "Upload the folder that holds the final adapter, not one above it."


class AmbiguousWeights(AdapterError):
    """There are weights of more than one save, and nothing says which are meant."""

    ADVICE = "Remove the files that are left over from another save, and upload the folder again."


class PickleRefused(AdapterError):
    """The only weights are pickled; pickles are never opened."""

    ADVICE = "Save the adapter again with safe_serialization=True."


class EscapingPath(AdapterError):
    """A file of the adapter is a link to somewhere outside its folder, or no regular file."""

    ADVICE = "Upload real files (cp -L follows links)."


class MisspeltFile(AdapterError):
    """A file has the name of one that is read, in other letters, so that it would be passed over."""

    ADVICE = "Rename the file: these names are read as they are spelt, in small letters."


class UnreadableName(AdapterError):
    """A file's name is no text in UTF-8, so that nothing can be said of it or kept under it."""

    ADVICE = "Rename the file or take it out of the folder."


class CorruptFile(AdapterError):
    """A file is cut short, padded, or not what its name says."""

    ADVICE = "Compare its size with the trainer's copy and upload it again."


class EmptyAdapter(AdapterError):
    """The weight file holds no tensors, or tensors without elements."""

    ADVICE = "The trainer saved before any weights were gathered; save the adapter again."


class UnsupportedDtype(AdapterError):
    """A tensor is stored in a type that cannot be served bit for bit."""

    ADVICE = "Save the adapter in float32, float16 or bfloat16."


# Configs


class InvalidConfig(AdapterError):
    """adapter_config.json is no JSON object, or a field of it has a wrong type or value."""

    ADVICE = "Save the adapter again with the trainer that made it."


class AlphaUndecided(AdapterError):
    """Keys of alpha_pattern that match one module disagree, and which came first in training is lost."""

    ADVICE = "PEFT sorts the keys when it saves: delete those that did not apply in training from the config."


class UnsupportedConfig(AdapterError):
    """The adapter uses a feature whose effect would be lost in serving."""

    ADVICE = "Train without it; taking it out of the config would serve another model than the trained one."


class UnsupportedSourceFormat(AdapterError):
    """The weights are stored in a way that is not read yet."""

    ADVICE = "Save the adapter with PEFT's save_pretrained."


class UnknownFamily(AdapterError):
    """The base model's architecture is not in the table of families."""

    ADVICE = "Check that the right base config was given."


class InvalidBaseConfig(AdapterError):
    """The base model's config.json lacks a size, or contradicts itself."""

    ADVICE = "Register the base again with the config.json that lies beside its weights."


# Names


class MalformedKey(AdapterError):
    """A tensor's name is not that of a saved LoRA factor."""

    ADVICE = "Save the adapter with PEFT's save_pretrained, which writes these names."


class CollidingNames(AdapterError):
    """Two tensors' names mean one and the same factor."""

    ADVICE = "Two adapters or two saves are mixed in the file; save the one that is meant by itself."


class UnexpectedTensor(AdapterError):
    """A tensor's name is well formed but belongs to nothing that this family can serve."""

    ADVICE = "A name the engine does not know is dropped without a word, so it is refused here."


class MissingTensor(AdapterError):
    """A factor that the base config calls for is not there."""

    ADVICE = "Upload an adapter that was trained on every expert layer and saved whole."


class NoExpertKeys(AdapterError):
    """There is no factor for any routed expert."""

    ADVICE = "The experts were never targeted; list them in target_parameters and train again."


class IntentUnmet(AdapterError):
    """A class of tensors that the upload says was to be trained has none."""

    ADVICE = (
        "The trainer's targets did not reach it: list its modules and train again, or correct intended_targets in "
        "training.json if it was not meant."
    )


class MixedForms(AdapterError):
    """The experts are stored in more than one way: stacked, per expert or 3-d."""

    ADVICE = "Two programs' output is mixed in the file; save the adapter again with one of them."


# Layout


class BaseMismatch(AdapterError):
    """The shapes or layer numbers fit another base model."""

    ADVICE = "Was it trained on another base model?"


class ShapeMismatch(AdapterError):
    """A shape contradicts the config or the tensor's own partner."""

    ADVICE = "Upload the config and the weights of one and the same save."


class RankUnsupported(AdapterError):
    """The rank is above what the engine serves, or does not divide the stacked tensor."""

    ADVICE = "Was it trained on another base model, or with another rank than its config says?"


class LayoutConflict(AdapterError):
    """Statements about the layout, or the tensors of different layers, contradict each other."""

    ADVICE = (
        "Find out which program and version trained it; then force that packing with `roster migrate --packing`, and "
        "submit what that writes."
    )


class OrientationUndecided(AdapterError):
    """Both orientations fit every shape that there is."""

    ADVICE = (
        "Train gate_up_proj and down_proj together, whose shapes decide it, or save one tensor per expert."
    )


class RoleUndecided(AdapterError):
    """The experts' only stacked pair fits more than one of their parameters."""

    ADVICE = "Name the trained parameter in target_parameters, or train both."


class PackingUndecided(AdapterError):
    """A statement says that the packing varies, and nothing says how."""

    ADVICE = "Train it again in one process, or force the packing."


# Values


class NonFinite(AdapterError):
    """A tensor holds NaN or infinite values."""

    ADVICE = "The training diverged; train again."


class ExpertsUntrained(AdapterError):
    """No routed expert's delta can be anything but zero."""

    ADVICE = "The experts were attached but never moved; check that the trainer gives them gradients."


class RoundTripMismatch(AdapterError):
    """The converted factors, put back into the source's encoding, are not the source."""

    ADVICE = "This is a fault of the conversion: report it with the adapter."


class DeltaMismatch(AdapterError):
    """The converted adapter would add other deltas than the source."""

    ADVICE = "This is a fault of the conversion: report it with the adapter."


class MergedMismatch(DeltaMismatch):
    """The trainer's merged checkpoint is another model than its base with this adapter as it was read."""

    ADVICE = (
        "Either the merge is of another adapter or another program's reading, or the factors were damaged after the "
        "merge: merge the uploaded files again with the program that trained them, and submit both."
    )


# The engine


class UnresolvedKeys(AdapterError):
    """Keys of the converted adapter lead to no module of the engine, which would drop them without a word."""

    ADVICE = (
        "This vLLM cannot serve those factors of this model: train without those modules, or serve the base with a "
        "class that has them (`architectures` in its config.json)."
    )


# What the trainer gave to compare with


class ReferenceInvalid(AdapterError):
    """The trainer's merged checkpoint, or the base's weights, cannot be trusted: the adapter is not judged by them."""

    ADVICE = (
        "This says nothing against the adapter: merge it again with a program that really merges its experts, or leave "
        "merged_checkpoint out of training.json."
    )


# Our own side


class DestinationExists(Exception):
    """The folder to write is there already and not empty; nothing was touched."""

    def __init__(self, destination: Path) -> None:
        """Keep the folder."""
        self.destination = destination
        super().__init__(destination)

    def __str__(self) -> str:
        return f"{self.destination} exists and is not empty. Remove it or name another folder."


class WeightsIncomparable(Exception):
    """A checkpoint's weights are stored in a way that nothing can be compared with; says nothing of any adapter."""

    def __init__(self, checkpoint: str, where: str, found: str) -> None:
        """Keep the facts."""
        self.checkpoint = checkpoint
        self.where = where
        self.found = found
        super().__init__(checkpoint, where, found)

    def __str__(self) -> str:
        return (
            f"{self.checkpoint}: {self.where}: found {self.found}. Only weights as trained can be compared."
        )


class DeviceMissing(Exception):
    """Deltas are to be materialised on a device that is not there."""

    def __init__(self, device: str) -> None:
        """Keep the device."""
        self.device = device
        super().__init__(device)

    def __str__(self) -> str:
        return f"torch sees no {self.device} device here. Check on another machine, or with --device cpu."
