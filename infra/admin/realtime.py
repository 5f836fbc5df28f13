"""`realtime`: whether Supabase tells machines of their rows. Not a migration: the roles that it speaks of exist only on Supabase."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from infra.admin.arguments import Group
from infra.admin.console import Console
from shared.db import OPERATOR, SCHEMA_REVISION, Tx, sql, transaction
from shared.errors import Conflict, SchemaOutdated

MACHINES: Final = "authenticated"
"""The role in a machine's token; as whom Supabase asks the database what that machine may see."""
EVERYBODY: Final = "anon"
"""The role of whoever has the project's public key, as every machine does."""
PUBLICATION: Final = "supabase_realtime"
SHOWN: Final = {
    "dispatch_queue": (
        "org_id",
        "id",
        "orchestrator_id",
        "available_at",
        "claimed_at",
        "cancel_requested_at",
    ),
    "dispatch_sessions": ("org_id", "id", "orchestrator_id", "status"),
}
"""What a machine sees of its own rows: enough for "look now". The key has to be in it, and the column that is filtered by."""
OURS: Final = (
    *SHOWN, "alembic_version", "dispatch_invariants", "dispatch_ledger", "joined_agent_sessions", "label_routes", "orchestrator_tokens",
    "orchestrators", "organizations", "project_routes", "repo_routes", "session_events", "stop_tombstones", "team_routes",
    "webhook_deliveries", "workspaces",
)  # fmt: skip
"""Everything that the migrations make. Supabase gives each new table of the schema `public` to both roles, to read and to write."""


def add_to(commands: Group) -> None:
    """Adds the commands."""
    realtime = commands.group("realtime", "whether Supabase Realtime tells machines of their rows")
    realtime.command("on", turn_on, "each machine sees its own rows and nothing else; safe to run again")
    realtime.command("off", turn_off, "machines see nothing and poll")
    realtime.command("status", status, "which of the two, and what is amiss")


# -- what is there ------------------------------------------------------------------------------------------------------

ROLES = sql("select rolname from pg_roles where rolname in (:machines, :everybody)")
TABLES = sql("""
    select c.relname, c.relrowsecurity, array(select p.polname from pg_policy p where p.polrelid = c.oid order by p.polname),
           array(select a.attname from pg_attribute a
                  where a.attrelid = c.oid and a.attnum > 0 and not a.attisdropped
                    and has_column_privilege(cast(:machines as name), c.oid, a.attnum, 'select'))
      from pg_class c
     where c.oid in (to_regclass('dispatch_queue'), to_regclass('dispatch_sessions'))
     order by c.relname
""")
# The rights to the columns that are shown are not meant here; has_table_privilege does not count them.
EXPOSED = sql("""
    select r.rolname || ' has rights to ' || c.relname
      from pg_class c, pg_roles r
     where c.relnamespace = (select relnamespace from pg_class where oid = to_regclass('dispatch_queue'))
       and c.relname = any(:ours) and r.rolname in (:machines, :everybody)
       and (has_table_privilege(r.oid, c.oid, 'select, insert, update, delete, truncate, references, trigger')
            or has_any_column_privilege(r.oid, c.oid, 'insert, update, references')
            or (has_any_column_privilege(r.oid, c.oid, 'select') and not (r.rolname = :machines and c.relname = any(:shown))))
     order by 1
""")
PUBLISHED = sql("""
    select (select array[pubinsert, pubupdate, pubdelete, pubtruncate] from pg_publication where pubname = :publication),
           array(select case when to_regclass(format('%I.%I', t.schemaname, t.tablename))
                                  in (to_regclass('dispatch_queue'), to_regclass('dispatch_sessions'))
                             then t.tablename else t.schemaname || '.' || t.tablename end
                   from pg_publication_tables t where t.pubname = :publication order by 1)
""")
# Row-level security hides all rows from whoever neither owns the table nor is above it. Nothing would fail: it would only find nothing.
BLINDED = sql("""
    select distinct r.rolname
      from pg_class c, aclexplode(c.relacl) given join pg_roles r on r.oid = given.grantee
     where c.oid in (to_regclass('dispatch_queue'), to_regclass('dispatch_sessions')) and r.rolname not in (:machines, :everybody)
       and not r.rolbypassrls and not r.rolsuper and not pg_has_role(r.oid, c.relowner, 'usage')
     order by 1
""")


class Found(NamedTuple):
    """What there is of it.

    Attributes:
        missing: what `on` has yet to do.
        done: what `off` would undo.
        exposed: who has rights that nobody should have, whether it is on or off.
        foreign: what others have put there, which neither of the two touches.
        published: our tables in the publication.
    """

    missing: list[str]
    done: list[str]
    exposed: list[str]
    foreign: list[str]
    published: list[str]

    @property
    def amiss(self) -> list[str]:
        """All that keeps it from being on."""
        return [*(f"missing: {each}" for each in self.missing), *self.exposed, *self.foreign]

    @property
    def state(self) -> str:
        """on, off, or in part."""
        if self.done:
            return "in part" if self.amiss else "on"
        return "off"


def look(tx: Tx) -> Found | None:
    """What there is of it; None in a database that has no such roles. Raises SchemaOutdated."""
    if len(tx.all(ROLES, machines=MACHINES, everybody=EVERYBODY)) < 2:
        return None
    missing, done, foreign = list[str](), list[str](), list[str]()
    tables = tx.all(TABLES, machines=MACHINES)
    if len(tables) < len(SHOWN):
        raise SchemaOutdated(f"this needs migration {SCHEMA_REVISION}: run `migrate`")
    exposed = [
        row[0]
        for row in tx.all(EXPOSED, machines=MACHINES, everybody=EVERYBODY, ours=list(OURS), shown=list(SHOWN))
    ]
    for name, secured, policies, columns in tables:
        if not secured:
            missing.append(f"row-level security of {name}")
            exposed += [f"{MACHINES} sees every row of {name}"] if columns else []
        (done if POLICY in policies else missing).append(f"the policy of {name}")
        foreign += [f"the policy {other} of {name}" for other in policies if other != POLICY]
        if set(columns) != set(SHOWN[name]):
            missing.append(f"the columns of {name}")
    row = tx.first(PUBLISHED, publication=PUBLICATION)
    assert row is not None
    events, published = row
    for name in SHOWN:
        (done if name in published else missing).append(f"{name} in the publication")
    if events != WRITES:
        missing.append("the publication's events")
    foreign += [f"{name} in the publication {PUBLICATION}" for name in published if name not in SHOWN]
    return Found(missing, done, exposed, foreign, [name for name in published if name in SHOWN])


# -- on -----------------------------------------------------------------------------------------------------------------

POLICY: Final = "a_machine_sees_its_own"
WRITES: Final = [True, True, False, False]

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
