"""The `roster` command: which commands there are, and how a command ends."""

from __future__ import annotations

import signal
import sys
import traceback
from collections.abc import Callable
from functools import partial
from importlib import metadata

from cyclopts import App, Group

from flows.cli import (
    author,
    check,
    convert,
    feeds,
    lifecycle,
    matrix,
    metrics,
    migrate,
    operate,
    plan,
    policy,
    purge,
    qualify,
    query,
    rejudge,
    report,
    retry,
    score,
    sql,
    status,
    submit,
    upkeep,
)
from flows.cli.errors import UNAVAILABLE, explain
from flows.cli.output import emit_json, note

HELP = """Turn freshly trained MoE LoRA adapters into a roster that vLLM can serve, with proof for each one.

A trainer submits an adapter; a flow decides its layout, converts, checks and scores it against the base, a control
and other authors' adapters on the real vLLM; `roster ready` says who is serve-ready and `roster why AUTHOR` tells the
story.

Exit codes: 0 done · 1 the adapter is refused or a check failed · 2 wrong usage · 3 something we need is unavailable.
"""

INTERRUPTED = 130  # what shells report for a command that Ctrl-C ended

HAND_IN = Group.create_ordered("Hand in")
OFFLINE = Group.create_ordered("Look at and convert a directory, without a server")
ASK = Group.create_ordered("Ask")
SERVE = Group.create_ordered("Serve")
OPERATE = Group.create_ordered("Operate")

app = App(
    name="roster",
    help=HELP,
    help_format="markdown",
    version=partial(metadata.version, "adapter-roster"),
    suppress_keyboard_interrupt=False,  # else cyclopts exits by itself, without our word
)
base = App(name="base", help="Register the base models that adapters are trained on.", group=HAND_IN)
heldout = App(
    name="heldout", help="Register held-out text: what an author's adapter has not seen.", group=HAND_IN
)
policies = App(
    name="policy", help="Say how adapters are packed that do not say so themselves.", group=OPERATE
)

base.command(submit.base_add, name="add")
heldout.command(submit.heldout_add, name="add")
policies.command(policy.policy_set, name="set")
policies.command(policy.policy_show, name="show")
policies.command(policy.policy_clear, name="clear")
app.command(base)
app.command(heldout)
app.command(submit.submit, group=HAND_IN)
GROUPED: dict[Group, tuple[Callable[..., int | None], ...]] = {
    OFFLINE: (convert.inspect, convert.convert, check.check, score.score, migrate.migrate),
    ASK: (
        query.ready,
        author.show,
        author.why,
        author.history,
        query.waiting,
        sql.sql,
        report.report,
        status.status,
        metrics.metrics,
    ),
    SERVE: (feeds.export, feeds.push, plan.plan),
    OPERATE: (
        operate.up,
        operate.down,
        qualify.qualify,
        retry.retry,
        retry.recheck,
        rejudge.rejudge,
        operate.sync,
        operate.rebuild,
        matrix.matrix,
        lifecycle.hold,
        lifecycle.release,
        lifecycle.retire,
        lifecycle.pin,
        lifecycle.unpin,
        purge.purge,
        upkeep.gc,
        upkeep.backup,
        upkeep.restore,
    ),
}
for group, commands in GROUPED.items():
    for command in commands:
        app.command(command, group=group)
app.command(policies)


def main() -> None:
    """Entry point of the `roster` command."""
    # Asked to end in whatever way, a command first removes what it has half done.
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, signal.default_int_handler)
    try:
        code = run(sys.argv[1:])
    except Exception:  # noqa: BLE001 - Python's own exit code for it, 1, would say that an adapter is refused
        traceback.print_exc()
        note("roster: this is a fault of roster itself: please report it with the lines above")
        code = UNAVAILABLE
    sys.exit(code)


def run(arguments: list[str]) -> int:
    """Run one command line; returns its exit code. Known errors become one message and never a traceback."""
    try:
        result = app(arguments, exit_on_error=False, print_error=False, result_action="return_value")
    except KeyboardInterrupt:
        note("roster: stopped")
        return INTERRUPTED
    except Exception as error:
        explained = explain(error)
        if explained is None:
            raise
        for message in (explained.message, *explained.others):
            note(f"roster: {message}")
        if "--json" in arguments:
            emit_json(explained.document)
        return explained.exit_code
    return result if isinstance(result, int) else 0
