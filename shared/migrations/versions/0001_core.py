"""Core: the tenant, its machines, sessions, the dispatch queue, and what makes the guarantee hold."""

from __future__ import annotations

from pathlib import Path

from alembic import op

revision = "0001"
down_revision = None

SQL = Path(__file__).parents[1] / "sql" / "0001_core.sql"


def upgrade() -> None:
    """Runs the file whole, as one simple query: no parameters, so `%`, `:` and `$$` mean what they mean to Postgres."""
    op.get_bind().exec_driver_sql(SQL.read_text(encoding="utf-8"))
