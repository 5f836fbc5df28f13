"""One tick of recovery: bounded, safe to run twice at once, and it says what it did. Cron is the loop.

Each machine's batch is its own short transaction: a tick that dies has done some of them, and the next one does the rest.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import Any

from sqlalchemy import Engine
from sqlalchemy.exc import DBAPIError

from shared import deliveries, dispatch_queue
from shared.db import SWEEP, transaction
from shared.dispatch_queue import MachineToSweep, RetryPolicy
from shared.log import log_exception
from shared.one_flight import is_connection_failure


@dataclass(slots=True)
class SweepReport:
    """What a tick did and found. `failed`: machines whose batch the database refused; the next tick tries them again.
    `finished` is False when the time was up before the work was done."""

    released: int = 0
    rerouted: int = 0
    dropped: int = 0
    cancelled: int = 0
    purged: int = 0
    failed: int = 0
    depth: int = 0
    oldest_claimable_age_seconds: float = 0.0
    finished: bool = True

    def as_dict(self) -> dict[str, Any]:
        """The counts by name, for the answer and the log line."""
        return asdict(self)


def sweep_once(
    engine: Engine, *, policy: RetryPolicy, retention_hours: int, batch_rows: int, budget_seconds: float
) -> SweepReport:
    """Releases, re-routes, drops and purges whatever is due, until it is done or the time is up.

    Args:
        batch_rows: how many rows one transaction changes at most.
        budget_seconds: no new batch is begun after this; a batch itself is bounded by the statement timeout.

    Raises OperationalError and its kin when the database cannot be reached: the next tick is the retry.
    """
    # A duration, not a time of day: the database's clock decides which rows are due, this one only when the function must stop.
    deadline = time.monotonic() + budget_seconds
    report = SweepReport()
    with transaction(engine, SWEEP) as tx:
        machines = dispatch_queue.machines_to_sweep(tx, policy=policy)
    for machine in machines:
        try:
            _sweep_machine(
                engine, machine, policy=policy, batch_rows=batch_rows, deadline=deadline, report=report
            )
        except DBAPIError as error:
            if is_connection_failure(error):
                raise
            report.failed += 1
            log_exception("a machine could not be swept", error, orchestrator_id=machine.orchestrator_id)
    while time.monotonic() < deadline:
        with transaction(engine, SWEEP) as tx:
            purged = deliveries.purge(tx, retention_hours=retention_hours, limit=batch_rows)
        report.purged += purged
        if purged < batch_rows:
            break
    else:
        report.finished = False
    with transaction(engine, SWEEP) as tx:
        report.depth, report.oldest_claimable_age_seconds = dispatch_queue.depth(tx)
    return report


def _sweep_machine(
    engine: Engine,
    machine: MachineToSweep,
    *,
    policy: RetryPolicy,
    batch_rows: int,
    deadline: float,
    report: SweepReport,
) -> None:
    org_id, orchestrator_id = machine.org_id, machine.orchestrator_id
    more = machine.has_expired_claims
    while more and time.monotonic() < deadline:
        with transaction(engine, SWEEP) as tx:
            given_up = dispatch_queue.sweep(
                tx, org_id=org_id, orchestrator_id=orchestrator_id, limit=batch_rows, policy=policy
            )
            released = [row.queue_id for row in given_up if row.outcome == "released"]
            moved = released and dispatch_queue.reroute(
                tx,
                org_id=org_id,
                orchestrator_id=orchestrator_id,
                limit=len(released),
                policy=policy,
                queue_ids=released,
            )
        report.released += len(released)
        report.rerouted += len(moved)
        report.dropped += sum(row.outcome == "dropped" for row in given_up)
        report.cancelled += sum(row.outcome == "cancelled" for row in given_up)
        more = len(given_up) == batch_rows
    stranded = machine.has_stranded_rows
    while stranded and time.monotonic() < deadline:
        with transaction(engine, SWEEP) as tx:
            moved = dispatch_queue.reroute(
                tx, org_id=org_id, orchestrator_id=orchestrator_id, limit=batch_rows, policy=policy
            )
        report.rerouted += len(moved)
        stranded = bool(moved)
    report.finished = report.finished and not (more or stranded)
