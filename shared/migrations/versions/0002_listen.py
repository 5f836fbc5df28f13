"""Listen: a commit can name the machine that has something to look at. Off until the operator turns it on."""

from __future__ import annotations

from pathlib import Path

from alembic import op

revision = "0002"
down_revision = "0001"

SQL = Path(__file__).parents[1] / "sql" / "0002_listen.sql"


def upgrade() -> None:
    """Runs the file whole, as one simple query: no parameters, so `%`, `:` and `$$` mean what they mean to Postgres."""
    op.get_bind().exec_driver_sql(SQL.read_text(encoding="utf-8"))
