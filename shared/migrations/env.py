"""Alembic's entry: runs inside the transaction that `infra.admin.migrate` has opened and locked."""

from __future__ import annotations

from alembic import context

context.configure(connection=context.config.attributes["connection"])
context.run_migrations()
