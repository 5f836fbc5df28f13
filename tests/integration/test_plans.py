"""The hot statements read the rows that they are about, however many others stand beside them. Plans are asserted, times are not."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from sqlalchemy import Engine

from shared import dispatch_queue, orchestrators, sessions
from shared.db import OPERATOR, Statement, sql, transaction
from shared.ids import new_id, token_hash
from tests.given import Machine, Tenant, a_machine, a_tenant

MANY, MINE = 20_000, 50
FILL = sql("""
    with s as (
      insert into dispatch_sessions (org_id, id, workspace_id, orchestrator_id, linear_issue_id, linear_identifier, team_id, title, status)
      select :org_id, gen_random_uuid(), :workspace_id, :orchestrator_id, gen_random_uuid()::text, 'PAY-1', 'team', 't', :status
        from generate_series(1, :rows)
      returning org_id, id, orchestrator_id
    )
    insert into dispatch_queue (org_id, id, orchestrator_id, session_id, payload, claimed_at, claimed_by, attempts)
    select org_id, gen_random_uuid(), orchestrator_id, id, '{}', case when :status = 'dispatched' then now() - interval '1 day' end,
           orchestrator_id, case when :status = 'dispatched' then 1 else 0 end
      from s
""")
ONE_ROW = sql(
    "select id, session_id from dispatch_queue where orchestrator_id = :id and claimed_at is null limit 1"
)


def fill(engine: Engine, tenant: Tenant, machine: Machine, rows: int, status: str = "pending") -> None:
    with engine.connect() as connection:
        connection.exec_driver_sql("set local session_replication_role = replica")
        connection.execute(
            FILL,
            {
                "org_id": tenant.org_id,
                "workspace_id": tenant.workspace_id,
                "orchestrator_id": machine.id,
                "rows": rows,
                "status": status,
            },
        )
        connection.commit()


@pytest.fixture
def crowd(engine: Engine) -> tuple[Tenant, Machine]:
    """A machine with a few waiting and expired rows, beside many of another tenant and of another machine of its own."""
    stranger, tenant = a_tenant(engine), a_tenant(engine)
    fill(engine, stranger, a_machine(engine, stranger), MANY)
    fill(engine, tenant, a_machine(engine, tenant), MANY)
    with engine.connect() as connection:
        connection.exec_driver_sql("analyze")
        connection.commit()
    # After the statistics: the planner has never heard of this machine, as it has not of a tenant that came today.
    mine = a_machine(engine, tenant)
    fill(engine, tenant, mine, MINE)
    fill(engine, tenant, mine, 20, "dispatched")
    return tenant, mine


def scanned(engine: Engine, statement: Statement, binds: dict[str, Any]) -> tuple[float, set[str]]:
    """Rows that the plan's scans of the large tables read or threw away, and the large tables that were read from end to end."""
    explain = sql(f"explain (analyze, costs off, timing off, summary off, format json) {statement}")
    with engine.connect() as connection:
        # Planned as every execution is: with the values unknown neither more nor less than with them.
        plan = connection.execute(explain, binds).scalar_one()
        connection.rollback()
    read, whole = 0.0, set[str]()
    todo = [(plan if isinstance(plan, list) else json.loads(plan))[0]["Plan"]]
    while todo:
        node = todo.pop()
        todo.extend(node.get("Plans", []))
        if (
            node.get("Relation Name") in ("dispatch_queue", "dispatch_sessions", "session_events")
            and "Scan" in node["Node Type"]
        ):
            read += (node["Actual Rows"] + node.get("Rows Removed by Filter", 0)) * node["Actual Loops"]
            if node["Node Type"] == "Seq Scan":
                whole.add(node["Relation Name"])
    return read, whole


STATEMENTS = {
    "poll": dispatch_queue.POLL,
    "claim": dispatch_queue.CLAIM,
    "claim several": dispatch_queue.CLAIM_MANY,
    "renew": dispatch_queue.RENEW_ROW,
    "report": dispatch_queue.RENEW_SESSION,
    "settle": dispatch_queue.SETTLE,
    "close": sessions.CLOSE,
    "cancel": dispatch_queue.CANCEL,
    "release": dispatch_queue.RELEASE,
    "sweep": dispatch_queue.SWEEP,
    "route": orchestrators.ROUTE,
    "open": sessions.OPEN,
}


def reads(engine: Engine, crowd: tuple[Tenant, Machine], name: str) -> tuple[float, set[str]]:
    """What the statement reads when it is about one row of this machine."""
    tenant, machine = crowd
    with transaction(engine, OPERATOR) as tx:
        row = tx.first(ONE_ROW, id=machine.id)
    assert row is not None
    binds: dict[str, Any] = {
        "org_id": tenant.org_id,
        "workspace_id": tenant.workspace_id,
        "orchestrator_id": machine.id,
        "queue_id": row.id,
        "session_id": row.session_id if name != "open" else new_id(),
        "id": row.session_id if name == "report" else row.id,
        "token_hash": token_hash(machine.token),
        "limit": 10,
        "concurrency_limit": 64,
        "attempt": None,
        "claim_timeout": 1800,
        "error": "claim expired",
        "reason": "stopped",
        "backoff_base": 60,
        "backoff_cap": 900,
        "max_attempts": 5,
        "offline_after": 90,
        "preferred": None,
        "repo": "acme/api",
        "linear_issue_id": "new",
        "linear_identifier": "PAY-2",
        "team_id": "team",
        "title": "t",
        "repo_was_said": False,
        "ended": False,
        "facts": "{}",
        "status": "complete" if name == "close" else "pending",
    }
    names = set(re.findall(r"(?<!:):(\w+)", str(STATEMENTS[name])))
    return scanned(engine, STATEMENTS[name], {bind: binds.get(bind) for bind in names})


# All that belongs to the machine is 70 rows; a count to 65 for each of three machines is the most that routing reads.
MOST = 70 + 3 * 65


@pytest.mark.parametrize("name", STATEMENTS)
def test_a_hot_statement_reads_its_own_rows_and_no_others(
    engine: Engine, crowd: tuple[Tenant, Machine], name: str
) -> None:
    read, whole = reads(engine, crowd, name)
    assert whole == set()
    assert read <= MOST, f"{name} read {read:g} rows"


@pytest.fixture
def newcomers(engine: Engine) -> tuple[Tenant, Machine]:
    """The same in a database of one small tenant, of which the planner has never had any statistics."""
    tenant = a_tenant(engine)
    fill(engine, tenant, a_machine(engine, tenant), 500)
    mine = a_machine(engine, tenant)
    fill(engine, tenant, mine, MINE)
    fill(engine, tenant, mine, 20, "dispatched")
    return tenant, mine


# Those about several rows may be planned as a walk over the tenant's rows for as long as these fill a few pages.
ABOUT_ONE_ROW = [name for name in STATEMENTS if name not in ("claim several", "sweep")]


@pytest.mark.parametrize("name", ABOUT_ONE_ROW)
def test_a_hot_statement_reads_its_own_rows_before_the_first_statistics(
    engine: Engine, newcomers: tuple[Tenant, Machine], name: str
) -> None:
    read, _ = reads(engine, newcomers, name)
    assert read <= MOST, f"{name} read {read:g} rows"


def test_looking_for_machines_to_sweep_probes_each_machine_and_reads_no_queue(
    engine: Engine, crowd: tuple[Tenant, Machine]
) -> None:
    read, whole = scanned(
        engine, dispatch_queue.MACHINES_TO_SWEEP, {"claim_timeout": 1800, "reroute_after": 300}
    )
    assert whole == set()
    assert read <= 64, "a machine holds no more claims than that"
