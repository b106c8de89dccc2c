"""The `roster` command: which commands there are, and what each kind of error means for the exit code."""

from __future__ import annotations

import json
import sys

from cyclopts import App, CycloptsError

from flows.cli import convert, operate, query, submit
from flows.cli.output import note
from flows.settings import SettingsIncomplete

HELP = """Turn freshly trained MoE LoRA adapters into a roster that vLLM can serve, with proof for each one.

A trainer submits an adapter; a flow decides its layout, converts, checks and scores it against the base, a control
and other authors' adapters on the real vLLM; `roster ready` says who is serve-ready and `roster why AUTHOR` tells the
story.

Exit codes: 0 done · 1 the adapter is refused or a check failed · 2 wrong usage · 3 something we need is unavailable.
"""

app = App(name="roster", help=HELP, help_format="markdown")

base = App(name="base", help="Base models that adapters were trained on.")
heldout = App(name="heldout", help="Held-out text: what an author's adapter has not seen.")
base.command(submit.base_add, name="add")
heldout.command(submit.heldout_add, name="add")

app.command(submit.submit)
app.command(base)
app.command(heldout)
app.command(convert.inspect)
app.command(convert.convert)
app.command(convert.check)
app.command(query.ready)
app.command(query.show)
app.command(query.why)
app.command(query.sql)
app.command(query.status)
app.command(operate.sync)
app.command(operate.rebuild)
app.command(operate.up)
app.command(operate.down)


def main() -> None:
    """Entry point of the `roster` command."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """Run one command line; returns its exit code. Known errors become one message and never a traceback."""
    try:
        result = app(arguments, exit_on_error=False, print_error=True, result_action="return_value")
    except CycloptsError:
        return 2
    except KeyboardInterrupt:
        note("stopped")
        return 130
    except SettingsIncomplete as error:
        note(f"roster: {error}")
        return 3
    except Exception as error:
        code = _explain(error, as_json="--json" in arguments)
        if code is None:
            raise
        return code
    return result if isinstance(result, int) else 0


def _explain(error: Exception, *, as_json: bool) -> int | None:
    """Print a known error and return its exit code; None for one that nobody foresaw."""
    # Imported here: the table of errors needs everything below, which `roster --help` should not wait for.
    from storage.ledger import Outcome
    from tasks.outcomes import MISUSE, NOT_THERE, RULED, refused_document, rule

    if isinstance(error, MISUSE):
        code = 2
    elif isinstance(error, NOT_THERE):
        code = 3
    elif isinstance(error, RULED):
        code = 1 if rule(error).outcome in {Outcome.QUARANTINED, Outcome.INCONCLUSIVE} else 3
        if as_json:
            sys.stdout.write(json.dumps(refused_document(error), ensure_ascii=False) + "\n")
    else:
        return None
    note(f"roster: {error}")
    return code
