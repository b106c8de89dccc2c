"""The reference scorer: `python -m tasks.bpb.reference MODEL ADAPTER HELDOUT…`, on the trainer's side.

It scores held-out sets with transformers and PEFT, base and adapter, by the rules of `tasks.bpb.measure`, and prints
what `roster submit --reference` takes. The pipeline then knows what the trainer's own program makes of the adapter.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tasks.bpb.errors import BpbError
from tasks.bpb.reference_errors import AdapterNotRead, LibraryMissing
from tasks.bpb.reference_files import ExpertPacking, HeldoutFile, digest_weights, read_heldout_file
from tasks.bpb.reference_scores import ReferencePlan, plan_reference, score_reference

_DONE, _REFUSED, _USAGE, _UNAVAILABLE, _INTERRUPTED = 0, 1, 2, 3, 130
_SECONDS_BETWEEN_LINES = 5.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line; the exit code: 0 done, 1 not this adapter, 2 usage, 3 something is missing here."""
    options = _parse(arguments)
    try:
        _run(options)
    except KeyboardInterrupt:
        _say("stopped; nothing was written")
        return _INTERRUPTED
    except (BpbError, OSError) as error:
        _say(str(error))
        if isinstance(error, LibraryMissing):
            return _UNAVAILABLE
        return _REFUSED if isinstance(error, AdapterNotRead) else _USAGE
    return _DONE


def _run(options: argparse.Namespace) -> None:
    files = [read_heldout_file(argument) for argument in options.heldout]
    if options.out is not None and not options.out.absolute().parent.is_dir():
        raise FileNotFoundError(f"{options.out}: its folder does not exist")
    from tasks.bpb.reference_model import ReferenceModel

    told = _Progress()
    model = ReferenceModel(
        options.model,
        device=options.device,
        dtype=options.dtype,
        max_model_len=None if options.window is None else options.window + 1,
        packing=ExpertPacking(options.packing) if options.packing else None,
        scored=told.count_window,
    )
    plan = plan_reference(model, files, stride=options.stride)
    told.windows = 2 * plan.windows
    _say(_describe(plan, files))
    if options.dry_run:
        return
    digest = digest_weights(options.model, told.report_bytes)
    scores = score_reference(
        model, plan, files, base="base", adapter=str(options.adapter), weights_digest=digest
    )
    for name, one in scores.heldout.items():
        found = f"own {one.own_bpb:.6f}, base {one.base_bpb:.6f} bits per byte"
        _say(f"{name}: {found}, {one.units} units, {one.bytes} bytes")
    text = scores.model_dump_json(indent=2) + "\n"
    if options.out is None:
        sys.stdout.write(text)
    else:
        options.out.write_text(text, encoding="utf-8")
        _say(f"written to {options.out}: roster submit … --reference {options.out}")


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tasks.bpb.reference",
        description="Score held-out sets with transformers and PEFT, for `roster submit --reference`.",
    )
    parser.add_argument("model", type=Path, help="the base's directory: config, tokenizer, weights")
    parser.add_argument("adapter", type=Path, help="the directory that the trainer saved")
    parser.add_argument("heldout", nargs="+", help="AUTHOR/NAME=FILE, or a path ending in AUTHOR/NAME.jsonl")
    parser.add_argument(
        "--window",
        type=_whole,
        help="tokens; the engine's max_model_len less 1 (default: what the model can take)",
    )
    parser.add_argument("--stride", type=_whole, help="tokens between windows (default: half a window)")
    parser.add_argument(
        "--packing", choices=list(ExpertPacking), help="how lora_B lies, whatever the files state"
    )
    parser.add_argument(
        "--device", default="auto", help="cpu, cuda or cuda:1 (default: a GPU if there is one)"
    )
    parser.add_argument("--dtype", default="auto", choices=["auto", "float32", "bfloat16", "float16"])
    parser.add_argument("--out", type=Path, help="where to write the scores (default: stdout)")
    parser.add_argument("--dry-run", action="store_true", help="only say how much there is to score")
    return parser.parse_args(arguments)


def _whole(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of tokens, at least 1, found {text!r}")
    return int(text)


def _describe(plan: ReferencePlan, files: Sequence[HeldoutFile]) -> str:
    units = sum(len(file.heldout.units) for file in files)
    prepared = plan.prepared
    return (
        f"{len(files)} sets, {units} units ({len(prepared.voided)} cannot be scored): {plan.tokens} tokens in "
        f"{plan.windows} windows, scored twice; window {prepared.window}, stride {prepared.stride}, {prepared.bos_rule}"
    )


class _Progress:
    """Lines on stderr about long work, with some seconds between them. windows: in all, of both subjects."""

    def __init__(self) -> None:
        self.windows = 0
        self._done = 0
        self._last = time.monotonic()

    def count_window(self) -> None:
        """One more is scored."""
        self._done += 1
        self._tell(f"scored {self._done} of {self.windows} windows")

    def report_bytes(self, done: int, total: int) -> None:
        """So much of the weights is read."""
        self._tell(f"reading the weights, to know them by digest: {done / 1e9:.1f} of {total / 1e9:.1f} GB")

    def _tell(self, message: str) -> None:
        now = time.monotonic()
        if now - self._last >= _SECONDS_BETWEEN_LINES:
            self._last = now
            _say(message)


def _say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
