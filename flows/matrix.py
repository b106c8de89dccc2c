"""The matrix of a base: its served adapters on each other's held-out text, with a heatmap on the run's page."""

from __future__ import annotations

import re

from prefect import flow, get_run_logger
from prefect.artifacts import create_markdown_artifact
from prefect.client.schemas.objects import State
from prefect.states import Completed, Failed

from flows.connect import job_limits, open_store
from flows.settings import load_settings
from tasks.errors import MatrixDrift, NobodyServed, NotServed
from tasks.matrix import fill_matrix
from tasks.matrix_generation import Generation, describe_generation
from tasks.matrix_plan import plan_matrix
from tasks.matrix_report import matrix_lines, render_matrix, say_share
from tasks.outcomes import RULED, rule


@flow(name="matrix", flow_run_name="{base}", persist_result=False)
def matrix(
    base: str,
    authors: list[str] | None = None,
    sample: int | None = None,
    fresh: bool = False,
    generate: int = 0,
) -> State:
    """Measure what is still missing of a base's matrix, and put what all of it says on this run's page.

    `authors`: only these; `sample`: so many others on each text; `fresh`: use nothing measured before; `generate`: have
    each adapter write with so many seeds, and attribute that too. What a run that stopped has measured stays: Retry
    goes on from there.
    """
    log = get_run_logger()
    settings = load_settings()
    store = open_store(settings)
    limits = job_limits(settings)
    told, of = 0, 0

    def say(line: str) -> None:
        log.info("%s", line)

    def report(done: int, total: int) -> None:
        """One log line for each tenth of the tokens."""
        nonlocal told, of
        if total != of:
            told, of = 0, total
        if (tenth := 10 * done // total) > told:
            told = tenth
            log.info("%d of %d tokens", done, total)

    try:
        plan = plan_matrix(store, base, limits, authors=authors or (), sample=sample, fresh=fresh)
        generation = Generation(generate) if generate else None
        log.info("%s", plan.describe_cost())
        if generation is not None:
            log.info("%s", describe_generation(plan, generation))
        document = fill_matrix(store, plan, limits, generation=generation, say=say, progress=report)
    except RULED as error:
        log.warning("%s", error)
        return Failed(name=f"Stopped: {rule(error).code.value}", message=str(error))
    except MatrixDrift as drift:
        log.warning("%s", drift)
        return Failed(name="Stopped: engine_drift", message=str(drift))
    except (NobodyServed, NotServed) as nobody:
        log.warning("%s", nobody)
        return Failed(name="Refused", message=str(nobody))
    for line in matrix_lines(document):
        log.info("%s", line)
    key = re.sub(r"[^a-z0-9]+", "-", f"matrix-{base}").strip("-")
    create_markdown_artifact(render_matrix(document), key=key)
    message = f"held-out sets: {say_share(document.sets)}; units: {say_share(document.units)}"
    return Completed(name="Measured", message=message)
