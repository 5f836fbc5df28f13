"""`migrate`: the one command that brings a database to the schema that this code needs."""

from __future__ import annotations

from infra.admin.arguments import Group
from infra.admin.console import Console
from infra.admin.migrate import migrate


def add_to(commands: Group) -> None:
    """Adds the command."""
    commands.command(
        "migrate", run, "apply the migrations that are missing; safe to run again, and twice at once"
    )


def run(console: Console) -> int:
    """`migrate`"""
    settings = console.settings
    applied = migrate(
        settings.database_url.get_secret_value(), tls=settings.database_tls, ca_file=settings.database_ca_file
    )
    console.printer.said(
        f"applied {', '.join(applied)}" if applied else "nothing to do: the schema is up to date",
        applied=applied,
    )
    return 0
