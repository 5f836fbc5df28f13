"""What machines are shown through Supabase Realtime, and what is there of the rights, policies and publication that it takes."""

from __future__ import annotations

from typing import Final, NamedTuple

from shared.db import SCHEMA_REVISION, Tx, sql
from shared.errors import SchemaOutdated

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
POLICY: Final = "a_machine_sees_its_own"
WRITES: Final = [True, True, False, False]
"""Inserts and updates; not deletes, not truncates."""

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
