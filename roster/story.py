"""An author's story in plain sentences: what was uploaded, how it was read and scored, what to do next."""

from collections.abc import Sequence

from roster.rows import AdapterStory, AuthorStory, EvidenceRow, ScoreRow, VerdictRow

_TRAIN = "Train it again, then submit the new adapter"
_RESUBMIT = "Upload the adapter again with `roster submit`"
_AGAIN = "it is tried again by itself, and Retry in the Prefect UI tries at once"

ADVICE = {
    # quarantined
    "corrupt_or_partial": f"{_RESUBMIT}: a file is damaged or was cut short on its way.",
    "empty_adapter": "Save the adapter after training has made steps, and submit it: the files hold no "
    "tensors.",
    "ambiguous_upload": "Submit one directory with one checkpoint: no subfolders, no second set of weights.",
    "unsupported_dtype": "Save the tensors as float32, bfloat16 or float16, and submit them again.",
    "pickle_refused": "Save the weights as safetensors: a pickle can run code, so it is never opened.",
    "unsupported_config": f"{_TRAIN} without the option that the reason names: vLLM cannot serve it.",
    "unknown_family": "Ask for this base model's family to be added: its expert names and shapes are not "
    "known yet.",
    "base_mismatch": "Submit it with --base naming the model it was trained on: the shapes are not this "
    "base's.",
    "malformed_key": "Save it with PEFT's own save_pretrained: a tensor has a name that no trainer writes.",
    "missing_tensor": f"{_RESUBMIT}, whole: a factor that its siblings need is not in the files.",
    "unexpected_tensor": f"{_TRAIN} without the modules that the reason names: they cannot be served.",
    "shape_mismatch": "Look at the tensor that the reason names: its shape fits neither the base nor its "
    "own rank.",
    "non_finite": "It holds NaN or infinity: train again, with a lower learning rate or in float32.",
    "rank_unsupported": f"{_TRAIN} with rank 512 or less.",
    "no_expert_keys": "Set PEFT's target_parameters to the experts and train again: no expert was trained.",
    "experts_untrained": f"{_TRAIN}: every expert's B factor is zero, so no gradient reached the experts.",
    "layout_conflict": "Find out which program and version trained it; if what is stated is false, save it with "
    "`roster migrate --packing`, and submit that.",
    "layout_undecided": "State lora_B_layout, or the trainer and its version, in training.json, or set a "
    "policy (`roster policy set`), and submit again.",
    "delta_mismatch": "Where the reason names the merged checkpoint, merge the uploaded files again; else "
    "report this with the adapter's digest: our conversion did not reproduce it.",
    "unresolved_keys": "Check that the base's served model is the one trained on: the engine has no such "
    "modules.",
    "refused_by_engine": "Look at the engine's message in the reason: the adapter kills or is refused by an "
    "engine that serves others well.",
    "no_effect": f"{_TRAIN}: the served adapter leaves the base exactly as it is.",
    "not_better_than_base": f"{_TRAIN} longer or on more text: it does not predict the held-out text "
    "better than the base.",
    "not_better_than_wrong": "Check that the held-out text and the adapter are of the same author: another "
    "author's adapter predicts it as well.",
    "control_not_worse": "Check the packing: reading the adapter the wrong way does no worse, so the way it "
    "was read is not shown to be right. See the evidence above; a false marker looks like this.",
    "reference_mismatch": "Compare with the trainer's own score: what is served does not score as it did in"
    " training.",
    # inconclusive
    "too_little_text": "Add held-out text with `roster heldout add`: each held-out set needs at least 20 units "
    "and 8 kB.",
    "margin_unclear": "Add held-out text with `roster heldout add`: the difference is too close to the "
    "floor to call.",
    "no_opponent_and_no_control": "Wait for a second author to become ready, then score it again.",
    # waiting
    "incomplete_upload": "Finish the upload: `roster submit` puts _READY.json last.",
    "no_heldout": "Add held-out text with `roster heldout add`; the adapter is then taken up by itself.",
    "unknown_base": "Register the base with `roster base add`; the adapter is then taken up by itself.",
    # stopped
    "store_unavailable": f"Look at the object store; {_AGAIN}.",
    "engine_unavailable": f"Look at the engine (`roster status`); {_AGAIN}.",
    "engine_unverified": f"Let the engine publish its engine.json (our plugin must be loaded in it); "
    f"{_AGAIN}.",
    "engine_unsupported": "Upgrade the engine: it cannot serve LoRA on this model. The adapter is not at "
    "fault.",
    "engine_flag_missing": f"Restart the engine with the flag that the reason names; {_AGAIN}.",
    "engine_drift": f"Look at the engine: the base scored otherwise at the end than at the start; {_AGAIN}.",
    "reference_invalid": "Check what the trainer gave to compare with, its scores or its merged checkpoint: "
    "as the reason says, it cannot judge this adapter.",
    "opponent_gone": "Nothing: the next run chooses other opponents.",
    "source_gone": f"{_RESUBMIT}: its files have left the store.",
    "disk_full": f"Free disk space on the worker; {_AGAIN}.",
    "internal": f"Report this with the flow run's log: it is a fault of ours; {_AGAIN}.",
    # found by the catalog itself
    "bad_number": "Score it again: its verdict holds a figure that is no finite number.",
    "not_staged": "Onboard it again: its ledger has a ready verdict, and no record of what to serve.",
    "not_serveable": "Convert it again: what its ledger records cannot be served.",
    "base_not_registered": "Register the base with `roster base add`.",
    "unreadable": "Look at the object in the store: it is no document of ours.",
}
"""Code → what to do next, in one or two sentences."""


def advise(code: str | None) -> str:
    """Return what to do about `code`; for one without an entry, where to look."""
    return ADVICE.get(code or "", f"Look at the flow run's log for {code or 'the reason'}.")


def tell(story: AuthorStory) -> list[str]:
    """Return an author's story as sentences: the newest adapter first, each ending in what to do next."""
    served = [a for a in story.adapters if a.served]
    count = len(story.adapters)
    lines = [f"{story.author} has uploaded {count} adapter{'s' if count > 1 else ''}."]
    lines += [
        f"{story.author} is served on {a.adapter.base} by adapter "
        f"{a.adapter.adapter_digest[:12]} (run {a.adapter.run})."
        for a in served
    ] or [f"{story.author} is not served."]
    for adapter in story.adapters:
        lines += _upload(adapter) + _layout(adapter) + _checks(adapter)
        lines += _scores(adapter.scores) + _verdict(adapter.verdicts) + _next(adapter)
    return lines


def _sentence(text: str) -> str:
    """Return a text that ends in one full stop, whether its recorded part had one or not."""
    return text.rstrip().rstrip(".") + "."


def _upload(story: AdapterStory) -> list[str]:
    row = story.adapter
    times = f", submitted {row.submissions} times" if row.submissions > 1 else ""
    return [
        f"Adapter {row.adapter_digest[:12]} for base {row.base} was uploaded as run "
        f"{row.run} ({row.submission}{times})."
    ]


_DECIDED = {
    "forced": "because an operator forced it",
    "marker": "as the marker in its adapter_config.json says",
    "training": "as its training.json says",
    "policy": "as the operator's policy says, since it says nothing itself",
    "fingerprint": "as the traces of the program that wrote it show, since nothing states it",
    "tensors": "as the numbers in its tensors show",
    "scores": "because so it scored better on the held-out text: nothing states it, and its tensors do not tell",
    "provisional": "for the time being, since nothing tells it",
}
"""What decided a packing → the rest of the sentence that says so."""


def _layout(story: AdapterStory) -> list[str]:
    if story.layout is None:
        return []
    if not story.evidence:
        return [
            f"Its file is {story.layout.source_format}: no parameter is stacked, so there is no packing to decide."
        ]
    lines = []
    for parameter in dict.fromkeys(row.parameter for row in story.evidence):
        rows = [row for row in story.evidence if row.parameter == parameter]
        why = _DECIDED.get(rows[0].decided_by or "", f"as decided by {rows[0].decided_by}")
        value = "mixed, by layer" if rows[0].value == "mixed" else rows[0].value
        lines.append(f"The packing of {parameter} was read as {value}, {why}.")
        lines += [_evidence(row) for row in rows]
    return lines


def _evidence(row: EvidenceRow) -> str:
    verb = {True: "agrees: it says", False: "disagrees: it says", None: "says"}[row.agrees]
    says = f"{verb} {row.says}" if row.says else "tells nothing"
    return _sentence(f"  {row.source}{f' ({row.strength})' if row.strength else ''} {says}; {row.detail}")


def _checks(story: AdapterStory) -> list[str]:
    if not story.checks:
        return []
    passed = [row for row in story.checks if row.passed]
    lines = [f"{len(passed)} of {len(story.checks)} checks of the converted adapter passed."]
    return lines + [
        _sentence(f"  {row.name} {'passed' if row.passed else 'FAILED'}: {row.detail}")
        for row in story.checks
    ]


_SUBJECTS = {"own": "own adapter", "base": "bare base", "base_again": "bare base again", "control": "control"}


def _scores(scores: Sequence[ScoreRow]) -> list[str]:
    if not scores:
        return []
    own = next((row.bpb for row in scores if row.subject == "own"), None)
    order = {subject: place for place, subject in enumerate(_SUBJECTS)}
    lines = ["Scores on the held-out text, in bits per byte (lower is better):"]
    for row in sorted(scores, key=lambda row: (order.get(row.subject, len(order)), row.subject)):
        name = _SUBJECTS.get(row.subject, row.subject.replace("wrong:", "wrong adapter of "))
        if row.bpb is None:
            lines.append(f"  {name}: no figure ({row.problem}).")
        elif row.subject == "own" or own is None:
            lines.append(f"  {name}: {row.bpb:.4f}.")
        else:
            way = "worse" if row.bpb > own else "better"
            lines.append(f"  {name}: {row.bpb:.4f}, {abs(row.bpb - own):.4f} {way} than own{_bounds(row)}.")
    return lines


def _bounds(row: ScoreRow) -> str:
    if row.difference_lower is None or row.difference_upper is None:
        return ""
    return f" (between {row.difference_lower:+.4f} and {row.difference_upper:+.4f})"


def _verdict(verdicts: Sequence[VerdictRow]) -> list[str]:
    if not verdicts:
        return ["There is no verdict yet."]
    last = verdicts[-1]
    code = f" ({last.code})" if last.code else ""
    lines = [_sentence(f"The verdict is {last.outcome}{code}, of {last.measured_at}: {last.reason}")]
    others = [code for code in last.codes or [] if code != last.code]
    further = (last.messages or [])[1:]
    if further:
        lines += [_sentence(f"  Also: {message}") for message in further]
    elif others:
        lines.append(f"  Also: {', '.join(others)}.")
    if len(verdicts) > 1:
        lines.append(f"  Before that: {', '.join(row.outcome for row in verdicts[:-1])}.")
    return lines


def _next(story: AdapterStory) -> list[str]:
    row = story.adapter
    lines = []
    last = story.steps[-1] if story.steps else None
    if last is not None and story.verdicts and last.position > story.verdicts[-1].position:
        lines.append(f"Since then: {last.kind} is {last.outcome}{f' ({last.code})' if last.code else ''}.")
    elif last is not None and not story.verdicts:
        why = f" ({last.code}): {last.reason}" if last.code else ""
        lines.append(_sentence(f"The last step: {last.kind} is {last.outcome}{why}"))
    if row.stale:
        lines.append(
            "The verdict was made by an older version of the code; a run of onboard for it in Prefect's UI renews it."
        )
    for fault in story.faults:
        lines.append(_sentence(f"It cannot be served all the same: {fault.reason}"))
        lines.append(f"Next: {advise(fault.code)}")
    if row.state in ("quarantined", "inconclusive", "waiting", "stopped"):
        lines.append(f"Next: {advise(row.code)}")
    elif row.state == "in_progress":
        lines.append("Next: nothing; it is being worked on, or the next sweep takes it up.")
    elif not story.faults:
        lines.append(
            "Next: nothing; it is served."
            if story.served
            else "Next: nothing; a newer adapter of the author is served."
        )
    return lines
