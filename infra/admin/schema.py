"""`migrate`: the one command that brings a database to the schema that this code needs."""

from __future__ import annotations

from infra.admin.arguments import Group
from infra.admin.console import Console


def add_to(commands: Group) -> None:
    """Adds the command."""
    commands.command(
        "migrate",
        run,
        "apply the migrations that are missing; safe to run again, and twice at once",
        of_everything=True,
    )


def run(console: Console) -> int:
    """`migrate`"""
    from infra.admin.migrate import migrate  # noqa: PLC0415 - Alembic is 250 ms of import, of 600, that no other command needs

    settings = console.settings
    applied = migrate(
        settings.database_url.get_secret_value(), tls=settings.database_tls, ca_file=settings.database_ca_file
    )
    console.printer.said(
        f"applied {', '.join(applied)}" if applied else "nothing to do: the schema is up to date",
        applied=applied,
    )
    return 0
