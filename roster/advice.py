"""What to do about each code that an adapter, or the catalog, can end with."""

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
    "author_retired": "Its author is retired: `roster release AUTHOR` takes the uploads up again.",
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
    "check_failed": "Onboard it again: its conversion failed the check that came last, so its scores prove nothing.",
    "not_staged": "Onboard it again: its ledger has a ready verdict, and no record of what to serve.",
    "not_serveable": "Convert it again: what its ledger records cannot be served.",
    "base_not_registered": "Register the base with `roster base add`.",
    "stale": "Have it judged anew (`roster recheck --stale`): verdicts of earlier code are not served here "
    "(ROSTER_SERVE_STALE).",
    "pin_not_ready": "Pin an adapter that is ready (`roster pin AUTHOR DIGEST`), or `roster unpin AUTHOR`.",
    "unreadable": "Look at the object in the store: it is no document of ours.",
}
"""Code → what to do next, in one or two sentences."""


def advise(code: str | None) -> str:
    """Return what to do about `code`; for one without an entry, where to look."""
    return ADVICE.get(code or "", f"Look at the flow run's log for {code or 'the reason'}.")
