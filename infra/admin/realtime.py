"""`realtime`: whether Supabase tells machines of their rows. Not a migration: the roles that it speaks of exist only on Supabase."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from infra.admin.arguments import Group
from infra.admin.console import Console
from infra.admin.realtime_views import BLINDED, EVERYBODY, MACHINES, OURS, POLICY, PUBLICATION, SHOWN, look
from shared.db import OPERATOR, Tx, sql, transaction
from shared.errors import Conflict


def add_to(commands: Group) -> None:
    """Adds the commands."""
    realtime = commands.group("realtime", "whether Supabase Realtime tells machines of their rows")
    realtime.command("on", turn_on, "each machine sees its own rows and nothing else; safe to run again")
    realtime.command("off", turn_off, "machines see nothing and poll")
    realtime.command("status", status, "which of the two, and what is amiss")


# -- on -----------------------------------------------------------------------------------------------------------------

REVOKE = sql(f"revoke all on {', '.join(OURS)} from {MACHINES}, {EVERYBODY}")
# A function, so that a claim of somebody else's tokens that is no UUID is nobody's, and not an error for everybody who is being told.
SAID = sql("""
    create or replace function token_says(name text) returns uuid language sql stable set search_path = '' as $$
      select case when said ~ '^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$' then cast(said as uuid) end
        from (select cast(nullif(current_setting('request.jwt.claims', true), '') as jsonb) ->> name as said) token
    $$
""")
MAY_ASK = sql(f"grant execute on function token_says to {MACHINES}")
# Not FORCE: the owner, as whom the functions work, sees and writes everything as before.
SECURE = {name: sql(f"alter table {name} enable row level security") for name in SHOWN}
FORGET = {name: sql(f"drop policy if exists {POLICY} on {name}") for name in SHOWN}
# The subqueries are asked once per statement, and the index of (org_id, …) is used.
ALLOW = {
    name: sql(f"""
        create policy {POLICY} on {name} for select to {MACHINES}
        using (org_id = (select token_says('org_id')) and orchestrator_id = (select token_says('orchestrator_id')))
    """)
    for name in SHOWN
}
SHOW = {
    name: sql(f"grant select ({', '.join(columns)}) on {name} to {MACHINES}")
    for name, columns in SHOWN.items()
}
CREATE = sql(f"create publication {PUBLICATION}")
# Not deletes: no policy is asked about a row that is gone, so that every machine could hear the keys of everybody's.
PUBLISH = (
    sql(f"alter publication {PUBLICATION} set table {', '.join(SHOWN)}"),
    sql(f"alter publication {PUBLICATION} set (publish = 'insert, update')"),
)
IS_THERE = sql("select 1 from pg_publication where pubname = :publication")


def set_on(tx: Tx) -> bool:
    """Turns it on. Returns whether that changed anything. Raises Conflict where machines would see what is not ours, or not be shown."""
    found = look(tx)
    if found is None:
        raise Conflict(
            f"this database has no roles `{MACHINES}` and `{EVERYBODY}`: it is not one of Supabase's"
        )
    if found.foreign:
        raise Conflict(
            f"{', '.join(found.foreign)}: not ours, and every machine would be shown it; give dispatch a project of its own, or remove it"
        )
    if not found.amiss:
        return False
    if tx.first(IS_THERE, publication=PUBLICATION) is None:
        tx.run(CREATE)
    for statement in (REVOKE, SAID, MAY_ASK):
        tx.run(statement)
    for name in SHOWN:
        for statement in (SECURE[name], FORGET[name], ALLOW[name], SHOW[name]):
            tx.run(statement)
    for statement in PUBLISH:
        tx.run(statement)
    found = look(tx)
    if found is None or found.amiss:
        raise Conflict(f"not done, nothing was changed: {'; '.join(found.amiss if found else [])}")
    return True


def turn_on(console: Console) -> int:
    """`realtime on`"""
    with transaction(console.engine, OPERATOR) as tx:
        changed = set_on(tx)
        blinded: Sequence[str] = [row[0] for row in tx.all(BLINDED, machines=MACHINES, everybody=EVERYBODY)]
    console.printer.said(f"on {'now' if changed else 'already'}", state="on", changed=changed)
    if blinded:
        console.printer.hint(
            f"does not own the tables and finds no rows in them any more: {', '.join(blinded)}"
        )
    if console.settings.supabase_url is None:
        console.printer.hint(
            "no machine is told of it before the function `claim` has the three SUPABASE_ settings"
        )
    return 0


# -- off ----------------------------------------------------------------------------------------------------------------

UNPUBLISH = {name: sql(f"alter publication {PUBLICATION} drop table {name}") for name in SHOWN}
EVERYTHING = sql(f"alter publication {PUBLICATION} set (publish = 'insert, update, delete, truncate')")
EXPOSE = {name: sql(f"alter table {name} disable row level security") for name in SHOWN}
FORGET_CLAIMS = sql("drop function if exists token_says")


def set_off(tx: Tx) -> bool:
    """Turns it off. Returns whether that changed anything. What was revoked stays revoked: without the policies it would be open."""
    found = look(tx)
    if found is None or not found.done:
        return False
    tx.run(REVOKE)
    for name in SHOWN:
        tx.run(FORGET[name])
        tx.run(EXPOSE[name])
        if name in found.published:
            tx.run(UNPUBLISH[name])
    if found.published and not found.foreign:
        tx.run(EVERYTHING)
    tx.run(FORGET_CLAIMS)
    return True


def turn_off(console: Console) -> int:
    """`realtime off`"""
    with transaction(console.engine, OPERATOR) as tx:
        changed = set_off(tx)
    console.printer.said(f"off {'now' if changed else 'already'}", state="off", changed=changed)
    return 0


# -- status -------------------------------------------------------------------------------------------------------------


def status(console: Console) -> int:
    """`realtime status`. Exit code 1 when it is on in part, or when the project's public key opens what it should not."""
    with transaction(console.engine, OPERATOR) as tx:
        found = look(tx)
    if found is None:
        console.printer.said("off: not a database of Supabase's", state="off", amiss=[])
        return 0
    amiss = found.exposed if found.state == "off" else found.amiss
    console.printer.said("; ".join([found.state, *amiss]), state=found.state, amiss=amiss)
    if amiss:
        console.printer.hint(
            "`realtime on` mends what is ours; the rights that it takes away, `realtime off` does not give back"
        )
    return int(bool(amiss))


def judged(tx: Tx, *, told: bool) -> tuple[Literal["ok", "note", "wrong"], str] | None:
    """What the doctor says of it; None where nobody wants it.

    Args:
        told: whether machines are given its address and a token for it.
    """
    found = look(tx)
    state = "off" if found is None else found.state
    if found is not None and (found.exposed or state == "in part"):
        return "wrong", "; ".join(found.exposed if state == "off" else found.amiss)
    if state == "off":
        return (
            ("wrong", "the SUPABASE_ settings are set, but machines are shown nothing: `realtime on`")
            if told
            else None
        )
    return (
        ("ok", "machines are shown their own rows")
        if told
        else ("note", "it is on, and SUPABASE_URL is not set")
    )
