"""Alembic's entry: runs inside the transaction that `infra.admin.migrate` has opened and locked."""

from __future__ import annotations

from alembic import context

context.configure(
    connection=context.config.attributes["connection"],
    on_version_apply=lambda ctx, step, heads, run_args: context.config.attributes["applied"].append(step.up_revision_id),
)
context.run_migrations()
