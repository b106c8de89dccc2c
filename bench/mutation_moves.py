"""Damage that puts numbers where they do not belong: other experts', layers', projections' or adapters'."""

from __future__ import annotations

from random import Random

import torch

from bench.mutation_adapters import Host, is_control_of_packing
from bench.mutation_kinds import EITHER, GATE_UP, Change, Damage, neighbour, pick, pick_gated
from bench.mutation_output import Output, Place
from tasks.lora.names import Factor
from tasks.lora.target import TargetFormat


def _exchange(output: Output, first: Place, second: Place, *factors: Factor) -> None:
    """Exchange factors of two places; both, where none are named."""
    for factor in factors or Factor:
        one, other = output.read(first, factor), output.read(second, factor)
        output.view(first, factor).copy_(other)
        output.view(second, factor).copy_(one)


def _exchange_experts(*factors: Factor) -> Change:
    def change(output: Output, host: Host, rng: Random) -> bool:
        first = pick(output, rng)
        by = rng.randrange(1, output.base.experts)
        for parameter in output.base.family.parameters:
            # Gate and up of a stacked target share A, which must not be exchanged twice.
            for place, projection in enumerate(parameter.projections):
                own = Place(first.layer, first.expert, projection)
                shared = output.format is TargetFormat.STACKED and place > 0
                used = [factor for factor in factors or Factor if not (shared and factor is Factor.A)]
                if used:
                    _exchange(output, own, neighbour(output, own, by=by), *used)
        return True

    return change


def _move_experts(*, everywhere: bool) -> Change:
    """Each expert gets what belongs to the one before it."""

    def change(output: Output, host: Host, rng: Random) -> bool:
        old = output.copy()
        layers = output.layers if everywhere else (rng.choice(output.layers),)
        for place in output.places():
            if place.layer in layers:
                for factor in Factor:
                    output.view(neighbour(output, place), factor).copy_(old.read(place, factor))
        return True

    return change


def _move_layers(*, everywhere: bool) -> Change:
    """Each layer gets what belongs to the one before it, or two exchange theirs."""

    def change(output: Output, host: Host, rng: Random) -> bool:
        layers = output.layers if everywhere else tuple(rng.sample(output.layers, 2))
        if len(layers) < 2:
            return False
        old = output.copy()
        for place in output.places():
            if place.layer in layers:
                source = layers[layers.index(place.layer) - 1]
                for factor in Factor:
                    moved = old.read(Place(source, place.expert, place.projection), factor)
                    output.view(place, factor).copy_(moved)
        return True

    return change


def _exchange_gate_up(*, everywhere: bool) -> Change:
    def change(output: Output, host: Host, rng: Random) -> bool:
        chosen = pick_gated(output, rng)
        if chosen is None:
            return False
        gate, up = chosen
        for place in list(output.places()):
            if place.projection == gate.projection and (everywhere or place == gate):
                other = Place(place.layer, place.expert, up.projection)
                _exchange(output, place, other, Factor.B)
                if output.format is TargetFormat.PER_EXPERT:
                    _exchange(output, place, other, Factor.A)
        return True

    return change


def _gate_for_up(output: Output, host: Host, rng: Random) -> bool:
    chosen = pick_gated(output, rng)
    if chosen is None:
        return False
    gate, up = chosen
    output.view(up, Factor.B).copy_(output.read(gate, Factor.B))
    output.view(up, Factor.A).copy_(output.read(gate, Factor.A))
    return True


def _regroup_rows(output: Output, host: Host, rng: Random) -> bool:
    """Gate and up split by halves where they take turns, or the other way round."""
    done = False
    for parameter in output.base.family.parameters:
        if len(parameter.projections) < 2:
            continue
        done = True
        for layer in output.layers:
            for expert in range(output.base.experts):
                places = [Place(layer, expert, name) for name in parameter.projections]
                parts = [output.read(place, Factor.B) for place in places]
                size = len(parts[0])
                if parameter.interleaved:
                    joined = torch.stack(parts, dim=1).flatten(0, 1)
                    wrong = [joined[:size], joined[size:]]
                else:
                    joined = torch.cat(parts)
                    wrong = [joined[0::2], joined[1::2]]
                for place, part in zip(places, wrong, strict=True):
                    output.view(place, Factor.B).copy_(part)
    return done


def _transpose(output: Output, host: Host, rng: Random) -> bool:
    """The transposed delta, where it fits."""
    fitting = [
        place
        for place in output.places()
        if output.view(place, Factor.A).shape == output.view(place, Factor.B).T.shape
    ]
    if not fitting:
        return False
    place = rng.choice(fitting)
    a, b = output.read(place, Factor.A), output.read(place, Factor.B)
    output.view(place, Factor.A).copy_(b.T)
    output.view(place, Factor.B).copy_(a.T)
    return True


def _transpose_stored(output: Output, host: Host, rng: Random) -> bool:
    """A whole tensor transposed, where it is square."""
    square = [
        name for name, tensor in output.tensors.items() if tensor.ndim == 2 and len({*tensor.shape}) == 1
    ]
    if not square:
        return False
    name = rng.choice(square)
    output.tensors[name] = output.tensors[name].T.contiguous()
    return True


def _copy_expert(*factors: Factor) -> Change:
    """One expert gets what belongs to another, in one projection."""

    def change(output: Output, host: Host, rng: Random) -> bool:
        place = pick(output, rng)
        for factor in factors:
            output.view(place, factor).copy_(output.read(neighbour(output, place), factor))
        return True

    return change


def _take_stranger(*, layers: int | None) -> Change:
    """The numbers of another adapter, in all or in one layer."""

    def change(output: Output, host: Host, rng: Random) -> bool:
        layer = rng.choice(output.layers) if layers else None
        for name, tensor in host.stranger.tensors.items():
            if layer is None or f"layers.{layer}." in name:
                output.tensors[name] = tensor.clone()
        return True

    return change


def _take_control(*, of_packing: bool) -> Change:
    def change(output: Output, host: Host, rng: Random) -> bool:
        if is_control_of_packing(host) is not of_packing:
            return False
        output.tensors = host.control.copy().tensors
        return True

    return change


def _repack_target(output: Output, host: Host, rng: Random) -> bool:
    """A stacked target whose lora_B is laid out by expert."""
    if output.format is not TargetFormat.STACKED:
        return False
    for place in output.places():
        name = output.name_of(place, Factor.B)
        old = host.output.tensors[name]
        output.tensors[name] = old.view(len(old), -1, output.base.experts).transpose(1, 2).reshape(old.shape)
    return True


MOVES = (
    Damage("two experts exchanged", EITHER, _exchange_experts()),
    Damage("A of two experts exchanged", EITHER, _exchange_experts(Factor.A)),
    Damage("B of two experts exchanged", EITHER, _exchange_experts(Factor.B)),
    Damage("off by one expert, everywhere", EITHER, _move_experts(everywhere=True)),
    Damage("off by one expert, in one layer", EITHER, _move_experts(everywhere=False)),
    Damage("off by one layer", EITHER, _move_layers(everywhere=True)),
    Damage("two layers exchanged", EITHER, _move_layers(everywhere=False)),
    Damage("gate and up exchanged in one expert", (GATE_UP, *EITHER), _exchange_gate_up(everywhere=False)),
    Damage("gate and up exchanged everywhere", (GATE_UP, *EITHER), _exchange_gate_up(everywhere=True)),
    Damage("gate in the place of up", (GATE_UP, *EITHER), _gate_for_up),
    Damage("gate and up split by halves for turns, or turns for halves", EITHER, _regroup_rows),
    Damage("one delta transposed", EITHER, _transpose),
    Damage("one square tensor transposed", EITHER, _transpose_stored),
    Damage("the other packing read", EITHER, _take_control(of_packing=True)),
    Damage("each expert displaced by the control", EITHER, _take_control(of_packing=False)),
    Damage("stacked target packed by expert", EITHER, _repack_target),
    Damage("A of another expert", EITHER, _copy_expert(Factor.A)),
    Damage("one expert's pair doubled over another's", EITHER, _copy_expert(*Factor)),
    Damage("stale weights: another adapter's", EITHER, _take_stranger(layers=None)),
    Damage("one layer of another adapter", EITHER, _take_stranger(layers=1)),
)
