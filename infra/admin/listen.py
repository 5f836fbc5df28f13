"""`listen`: whether a commit names the machine that has something to look at, so that a waiting poll is answered at once."""

from __future__ import annotations

from functools import partial

from infra.admin.arguments import Group
from infra.admin.console import Console
from shared.db import OPERATOR, SCHEMA_REVISION, Tx, sql, transaction
from shared.errors import SchemaOutdated


def add_to(commands: Group) -> None:
    """Adds the commands."""
    listen = commands.group("listen", "whether commits wake the polls that wait")
    for name, run, about in (
        ("on", partial(turn, wanted=True), "they do; every transaction that queues work pays for it"),
        ("off", partial(turn, wanted=False), "they do not: waiting polls end with their time"),
        ("status", status, "which of the two"),
    ):
        listen.command(name, run, about, of_everything=True)


STATES = sql("""
    select count(*) = 2, coalesce(bool_and(tgenabled <> 'D'), false)
      from pg_trigger
     where tgrelid = to_regclass('dispatch_queue') and tgname like 'machine\\_is\\_told\\_of\\_%'
""")
# Waits for the transactions that are writing, as any change of a table, and those that come after wait for it: not for longer than the
# operator's limit for locks.
ON = sql("""
    alter table dispatch_queue enable trigger machine_is_told_of_a_new_row, enable trigger machine_is_told_of_a_change
""")
OFF = sql("""
    alter table dispatch_queue disable trigger machine_is_told_of_a_new_row, disable trigger machine_is_told_of_a_change
""")


def is_on(tx: Tx) -> bool:
    """Whether commits name their machines. Raises SchemaOutdated where they could not."""
    row = tx.first(STATES)
    if row is None or not row[0]:
        raise SchemaOutdated(f"this needs migration {SCHEMA_REVISION}: run `migrate`")
    return bool(row[1])


def set_to(tx: Tx, *, wanted: bool) -> bool:
    """Turns it on or off. Returns whether that changed anything."""
    if is_on(tx) == wanted:
        return False
    tx.run(ON if wanted else OFF)
    return True


def turn(console: Console, *, wanted: bool) -> int:
    """`listen on`, `listen off`"""
    with transaction(console.engine, OPERATOR) as tx:
        changed = set_to(tx, wanted=wanted)
    word = "on" if wanted else "off"
    console.printer.said(f"{word} {'now' if changed else 'already'}", state=word, changed=changed)
    if wanted and console.settings.database_listen_url is None:
        console.printer.hint("nobody hears it before the function `claim` is given DATABASE_LISTEN_URL")
    return 0


def status(console: Console) -> int:
    """`listen status`"""
    with transaction(console.engine, OPERATOR) as tx:
        word = "on" if is_on(tx) else "off"
    console.printer.said(word, state=word)
    return 0
