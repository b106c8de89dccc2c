"""Prefect's process worker, but for the command by which it starts a flow run."""

from __future__ import annotations

from typing import Any

from prefect.workers.process import ProcessJobConfiguration, ProcessWorker


def make_worker(command: str, *, pool: str, name: str | None, limit: int) -> ProcessWorker:
    """A process worker of `pool` that starts every flow run by `command`, but those whose deployment names its own.

    The command stays in this process: nothing of it is written to the pool or to a deployment, which workers on other
    machines share. Everything else (queues, limits, Cancel, Retry, heartbeats) is Prefect's own.
    """

    class Configuration(ProcessJobConfiguration):
        def prepare_for_flow_run(self, *told: Any, **more: Any) -> None:
            self.command = self.command or command
            super().prepare_for_flow_run(*told, **more)

    class Worker(ProcessWorker):
        # Of the pool's type, but not in the place of Prefect's own in its list of types.
        job_configuration = Configuration

        @classmethod
        def __dispatch_key__(cls) -> str:
            return "process that forks"

    return Worker(work_pool_name=pool, name=name, limit=limit, create_pool_if_not_found=False)
