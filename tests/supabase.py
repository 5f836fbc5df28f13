"""What makes a Postgres one of Supabase's: two roles that may do everything until somebody says otherwise, and who is shown a change."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, Final

import pg8000.native
from sqlalchemy import Engine
from sqlalchemy.engine import make_url

from shared.db import OPERATOR, sql, transaction

# Roles belong to the whole server, which other tests use at the same time: made once and left there, with no rights of their own.
ROLE = """
    do $$ begin
      create role {} nologin;
    exception when duplicate_object or unique_violation then null;
    end $$
"""
# https://supabase.com/docs/guides/database/postgres/roles: what each new table of the schema `public` starts with.
AS_SUPABASE = (
    ROLE.format("anon"),
    ROLE.format("authenticated"),
    "grant usage on schema public to anon, authenticated",
    "grant all on all tables in schema public to anon, authenticated",
    "grant all on all sequences in schema public to anon, authenticated",
    "alter default privileges in schema public grant all on tables to anon, authenticated",
    "create publication supabase_realtime",
)


def becomes_supabase(engine: Engine) -> None:
    """Makes the database, which has our tables already, one of Supabase's."""
    with transaction(engine, OPERATOR) as tx:
        for statement in AS_SUPABASE:
            tx.run(sql(statement))


Wanted = dict[str, Any]
"""What a client subscribes to: `event`, `schema`, `table`, `filter`, and the `id` that the server has given it."""

SUBSCRIBABLE: Final = """
    select has_column_privilege(cast(:role as name), to_regclass(format('%I.%I', schemaname, tablename)), :column, 'select')
      from pg_publication_tables where pubname = 'supabase_realtime' and schemaname = :schema and tablename = :table
"""
PUBLISHED: Final = """
    select case :action when 'INSERT' then pubinsert when 'UPDATE' then pubupdate else pubdelete end
      from pg_publication p join pg_publication_tables t using (pubname)
     where pubname = 'supabase_realtime' and t.schemaname = 'public' and t.tablename = :table
"""
COLUMNS: Final = """
    select a.attname, t.typname from pg_attribute a join pg_type t on t.oid = a.atttypid
     where a.attrelid = to_regclass(:table) and a.attnum > 0 and not a.attisdropped
       and has_column_privilege(cast(:role as name), a.attrelid, a.attnum, 'select')
     order by a.attnum
"""


class Changes:
    """Decides who is shown a change of a table, by the real publication, rights and policies.

    As the functions realtime.apply_rls, realtime.list_changes and realtime.subscription_check_filters of github.com/supabase/realtime do.
    """

    def __init__(self, database_url: str) -> None:
        url = make_url(database_url)
        self._database = pg8000.native.Connection(
            url.username or "",
            host=url.host or "",
            port=url.port or 5432,
            password=url.password,
            database=url.database,
            ssl_context=False,
        )

    def close(self) -> None:
        """Ends it."""
        self._database.close()

    def may_be_asked_for(self, wanted: Wanted, role: str) -> bool:
        """Whether the table is published, and the role may see the column of the filter."""
        column = wanted["filter"].partition("=")[0]
        table = {"schema": wanted["schema"], "table": wanted["table"]}
        return bool(self._database.run(SUBSCRIBABLE, role=role, column=column, **table) == [[True]])

    def shown(
        self,
        action: str,
        table: str,
        key: dict[str, str],
        wanted: Sequence[Wanted],
        claims: dict[str, Any],
    ) -> tuple[list[int], dict[str, Any]]:
        """The ids of what was wanted and is shown, none for nothing; and the change as the role sees it."""
        if self._database.run(PUBLISHED, action=action, table=table) != [[True]]:
            return [], {}
        where = " and ".join(f"{name} = cast(:{name} as uuid)" for name in key)
        row = self._database.run(f"select to_jsonb(t) from public.{table} t where {where}", **key)[0][0]
        ids = [each["id"] for each in wanted if _matches(each, action, table, row)]
        if not ids or not self._sees(claims, f"select 1 from public.{table} where {where}", key):
            return [], {}
        columns = self._database.run(COLUMNS, table=table, role=claims["role"])
        return ids, {
            "schema": "public",
            "table": table,
            "type": action,
            "commit_timestamp": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "errors": None,
            "columns": [{"name": name, "type": kind} for name, kind in columns],
            "record": {name: row[name] for name, _ in columns},
        }

    def _sees(self, claims: dict[str, Any], query: str, key: dict[str, str]) -> bool:
        self._database.run("begin")
        try:
            self._database.run(
                "select set_config('role', :role, true), set_config('request.jwt.claims', :claims, true)",
                role=claims["role"],
                claims=json.dumps(claims),
            )
            return bool(self._database.run(query, **key))
        finally:
            self._database.run("rollback")


def _matches(wanted: Wanted, action: str, table: str, row: dict[str, Any]) -> bool:
    column, _, value = wanted["filter"].partition("=eq.")
    return (
        wanted["event"] in ("*", action)
        and (wanted["schema"], wanted["table"]) == ("public", table)
        and str(row[column]) == value
    )
