"""Alembic's entry: runs inside the transaction that `infra.admin.migrate` has opened and locked."""

from __future__ import annotations

from typing import Any

from alembic import context
from alembic.runtime.migration import MigrationInfo


def note(step: MigrationInfo, **_: Any) -> None:
    """Remembers a revision that this run has applied."""
    context.config.attributes["applied"].append(step.up_revision_id)


context.configure(connection=context.config.attributes["connection"], on_version_apply=note)
context.run_migrations()
