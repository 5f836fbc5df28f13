"""What makes a Postgres one of Supabase's, as far as it concerns us: two roles, and rights for both of them to everything."""

from __future__ import annotations

from sqlalchemy import Engine

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
