"""The operator's packing policy: set, listed and taken away, with names checked against what is known."""

from __future__ import annotations

from storage.bases import Base, find_base, list_bases
from storage.documents import utc_now
from storage.errors import InvalidName, UnknownBase
from storage.policy import (
    PackingName,
    Policy,
    PolicyDocument,
    clear_policy,
    find_policy,
    put_policy,
    read_policy,
)
from storage.s3 import S3Store
from tasks.lora.base import read_base_config
from tasks.lora.families import FAMILIES


def set_policy(
    store: S3Store,
    packing: PackingName,
    *,
    why: str,
    set_by: str,
    base: str | None = None,
    parameter: str | None = None,
) -> Policy:
    """The policy that is in force from now on, for one base or with None for the whole bucket.

    With `parameter` it changes that one; the others keep what applied to them before.

    Raises:
        UnknownBase: `base` is neither registered nor an alias.
        InvalidName: the base's family (without one: every known family) has no such parameter.
        InvalidDocument, UnknownFamily, InvalidBaseConfig, StoreUnavailable.
    """
    registered = None if base is None else _registered(store, base)
    name = None if registered is None else registered.name
    layout: PackingName | dict[str, PackingName] = packing
    if parameter is not None:
        known = _list_parameters(registered)
        if parameter not in known:
            raise InvalidName("parameter", parameter, f"one of {', '.join(known)}")
        before = read_policy(store, None) if name is None else find_policy(store, name)
        layout = _spell_out(before, known) | {parameter: packing}
    document = PolicyDocument(lora_b_layout=layout, why=why, set_by=set_by, set_at=utc_now())
    policy = Policy(name, document)
    put_policy(store, policy)
    return policy


def drop_policy(store: S3Store, base: str | None) -> bool:
    """Take the policy of a base or of the bucket away; whether there was one.

    Raises:
        UnknownBase: `base` is neither registered nor an alias.
        InvalidDocument, StoreUnavailable.
    """
    return clear_policy(store, None if base is None else _registered(store, base).name)


def list_policies(store: S3Store) -> tuple[Policy, ...]:
    """Every policy in force: the bucket's first, then those of bases by name.

    Raises:
        InvalidDocument, StoreUnavailable, StoreNotTrusted.
    """
    found = (read_policy(store, base) for base in (None, *list_bases(store)))
    return tuple(policy for policy in found if policy is not None)


def _registered(store: S3Store, base: str) -> Base:
    found = find_base(store, base)
    if found is None:
        raise UnknownBase(base, list_bases(store))
    return found


def _list_parameters(base: Base | None) -> tuple[str, ...]:
    """The stacked parameters of a base's family, without one of all families."""
    families = FAMILIES
    if base is not None:
        families = (read_base_config(base.config, label=f"base {base.name}").family,)
    return tuple(sorted({parameter.name for family in families for parameter in family.parameters}))


def _spell_out(policy: Policy | None, parameters: tuple[str, ...]) -> dict[str, PackingName]:
    if policy is None:
        return {}
    layout = policy.document.lora_b_layout
    return dict.fromkeys(parameters, layout) if isinstance(layout, str) else dict(layout)
