"""What is asked for while a machine is at work outlives that work."""

from __future__ import annotations

from pathlib import Path

from alembic import op

revision = "0003"
down_revision = "0002"

SQL = Path(__file__).parents[1] / "sql" / "0003_follow_ups.sql"


def upgrade() -> None:
    """Runs the file whole, as one simple query: no parameters, so `%`, `:` and `$$` mean what they mean to Postgres."""
    op.get_bind().exec_driver_sql(SQL.read_text(encoding="utf-8"))
