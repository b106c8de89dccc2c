"""The operator's rule for adapters that do not say themselves how their experts are packed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from flows.cli.output import AsJson, emit, note, table

if TYPE_CHECKING:
    from storage.policy import Policy

Packing = Literal["rank_major", "grouped_by_expert"]


def policy_set(
    packing: Packing,
    /,
    *,
    why: Annotated[str, Parameter(validator=lambda _, why: _check_why(why))],
    base: str | None = None,
    parameter: str | None = None,
    json: AsJson = False,
) -> None:
    """Say how adapters are packed that do not say so themselves.

    For when you know what writes your adapters and they carry no marker. A marker in an adapter's config and its
    training.json go before the policy. The tensors are always asked too: an adapter whose tensors contradict the
    policy is quarantined (layout_conflict), never read against them.

    The policy counts from the next run of an adapter on. One that was quarantined before is taken again when it is
    submitted again. What is served stays.

    ```
    roster policy set grouped_by_expert --base tiny --why "our trainer pins unsloth_zoo 2026.8"
    ```

    Parameters
    ----------
    packing:
        rank_major: column j of lora_B is expert j mod E's (PEFT, unsloth_zoo from 2026.9.6 on). grouped_by_expert:
        expert j // r's (unsloth_zoo before that, Megatron-Bridge).
    why:
        Your reason. It is kept with the policy, and `roster policy show` tells it.
    base:
        Only for adapters of this base; it goes before the policy of the whole bucket.
    parameter:
        Only for this stacked parameter, such as gate_up_proj; the others keep what applied to them before.
    """
    from flows.connect import open_store, operator_name
    from flows.settings import load_settings
    from tasks.policy import set_policy

    store = open_store(load_settings())
    policy = set_policy(store, packing, why=why, set_by=operator_name(), base=base, parameter=parameter)
    emit(_document(policy), as_json=json, show=lambda: note(f"{_scope(policy.base)}: {_said(policy)}"))


def policy_show(*, json: AsJson = False) -> None:
    """List the policies in force, who set them, when and why. A base's own goes before the bucket's."""
    from flows.connect import open_store
    from flows.settings import load_settings
    from tasks.policy import list_policies

    policies = list_policies(open_store(load_settings()))

    def show() -> None:
        rows = [
            (
                _scope(one.base),
                _said(one),
                one.document.set_by,
                f"{one.document.set_at:%Y-%m-%d %H:%M}",
                one.document.why,
            )
            for one in policies
        ]
        empty = "no policy is set: adapters that do not say how they are packed are decided by their tensors and scores"
        table(["for", "packing", "set by", "at (UTC)", "why"], rows, empty=empty)

    emit({"policies": [_document(one) for one in policies]}, as_json=json, show=show)


def policy_clear(*, base: str | None = None, json: AsJson = False) -> None:
    """Take a policy away: that of the whole bucket, or with --base that of one base.

    ```
    roster policy clear --base tiny
    ```

    Parameters
    ----------
    base:
        Take away this base's own policy; the bucket's, if there is one, applies to it again.
    """
    from flows.connect import open_store
    from flows.settings import load_settings
    from tasks.policy import drop_policy

    cleared = drop_policy(open_store(load_settings()), base)
    said = "its policy is taken away" if cleared else "there was no policy"
    emit({"base": base, "cleared": cleared}, as_json=json, show=lambda: note(f"{_scope(base)}: {said}"))


def _check_why(why: str) -> None:
    if not why.strip():
        raise ValueError("expected a reason that tells others later why this policy was set")


def _scope(base: str | None) -> str:
    return "every base" if base is None else f"base {base}"


def _said(policy: Policy) -> str:
    said = policy.document.lora_b_layout
    return said if isinstance(said, str) else ", ".join(f"{name} {packing}" for name, packing in said.items())


def _document(policy: Policy) -> dict[str, Any]:
    return {"base": policy.base} | policy.document.model_dump(mode="json", by_alias=True)
