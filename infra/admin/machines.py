"""`token` and `orchestrators`: the machines and what they identify themselves with."""

from __future__ import annotations

from collections.abc import Sequence

from infra.admin import queue_views, views
from infra.admin.arguments import Group, between, name, word
from infra.admin.console import Console
from infra.admin.output import cell, counted
from shared import orchestrators
from shared.db import OPERATOR, transaction
from shared.errors import Conflict, InvalidRequest, NotFound
from shared.ids import TOKEN_PREFIX
from shared.orchestrators import Burden


def add_to(commands: Group) -> None:
    """Adds the commands."""
    token = commands.group("token", "what machines identify themselves with")
    mint = token.command("mint", mint_token, "make a token; it is shown this once")
    mint.takes("--label", type=name, metavar="TEXT", help="what it is for, e.g. the machine's name")
    mint.takes(
        "--expires-days",
        type=between(1, 3_650),
        metavar="N",
        help="it ends by itself after N days (default: never)",
    )
    token.command("list", list_tokens, "the organization's tokens, without the tokens themselves").limited()
    revoke = token.command("revoke", revoke_token, "end a token at once")
    revoke.takes(
        "token",
        type=word,
        metavar="TOKEN",
        help="its id, or its first characters (`token list` shows 12) as far as they name only one",
    )

    machine = commands.group("orchestrators", "the registered machines")
    machine.command("list", list_machines, "who is online, and who has how much to do").limited()
    remove = machine.command("remove", remove_machine, "remove a machine with its tokens and routes")
    remove.takes("machine", type=word, metavar="NAME", help="its name or id")


def mint_token(console: Console) -> int:
    """`token mint`"""
    options = console.options
    with transaction(console.engine, OPERATOR) as tx:
        org_id = console.organization(tx)
        token_id, token = orchestrators.mint_token(
            tx, org_id=org_id, label=options.label, days=options.expires_days
        )
        expires_at = views.expiry_of_token(tx, org_id=org_id, token_id=token_id)
    # The token alone on standard output, so that it can go straight into a file or another program.
    console.printer.said(
        token,
        id=token_id,
        token=token,
        label=options.label,
        expires_days=options.expires_days,
        expires_at=expires_at,
    )
    until = f"it expires {cell(expires_at)} UTC" if expires_at else "it does not expire"
    console.printer.hint(f"this is the only time that it is shown; its id is {token_id}; {until}")
    return 0


def list_tokens(console: Console) -> int:
    """`token list`"""
    with transaction(console.engine, OPERATOR) as tx:
        rows = views.tokens(tx, org_id=console.organization(tx), limit=console.options.limit)
    columns = {
        "begins with": "prefix",
        "id": "id",
        "status": "status",
        "machine": "machine",
        "made": "created_at",
        "expires": "expires_at",
        "last used": "last_used_at",
        "label": "label",
    }
    console.show_list(rows, columns, nothing="no token yet: make one with `token mint`")
    return 0


def revoke_token(console: Console) -> int:
    """`token revoke TOKEN`"""
    wanted: str = console.options.token
    if wanted.startswith(TOKEN_PREFIX) and len(wanted) > orchestrators.TOKEN_PREFIX_LENGTH:
        raise InvalidRequest("that is a token itself; give its id or its first 12 characters", field="TOKEN")
    with transaction(console.engine, OPERATOR) as tx:
        org_id = console.organization(tx)
        token = _the_token(views.tokens(tx, org_id=org_id, limit=10_000), wanted)
        revoked = orchestrators.revoke_token(tx, org_id=org_id, token_id=token.id)
    sentence = "is revoked: its next request is refused" if revoked else "was revoked before"
    console.printer.said(f"token {_named(token)} {sentence}", id=token.id, status="revoked")
    return 0


def _the_token(known: Sequence[views.Token], wanted: str) -> views.Token:
    begins = wanted.startswith(TOKEN_PREFIX) and wanted != TOKEN_PREFIX
    found = [each for each in known if wanted == str(each.id) or (begins and each.prefix.startswith(wanted))]
    if len(found) == 1:
        return found[0]
    listed = "; ".join(f"{_named(each)} {each.status}" for each in (found or known)[:20])
    if found:
        raise Conflict(f'several tokens begin with "{wanted}", give the id of one: {listed}')
    if wanted == TOKEN_PREFIX:
        raise InvalidRequest(
            f'every token begins with "{wanted}", give the id of one: {listed or "there is none"}',
            field="TOKEN",
        )
    raise NotFound(f'no token "{wanted}"; ' + (f"there are: {listed}" if listed else "there is none"))


def _named(token: views.Token) -> str:
    whose = token.machine or token.label
    return f"{token.prefix} {token.id}" + (f" ({whose})" if whose else "")


def list_machines(console: Console) -> int:
    """`orchestrators list`"""
    offline_after = console.settings.orchestrator_offline_after_seconds
    with transaction(console.engine, OPERATOR) as tx:
        rows = views.machines(
            tx, org_id=console.organization(tx), limit=console.options.limit, offline_after=offline_after
        )
    columns = {
        "machine": "name",
        "id": "id",
        "online": "online",
        "limit": "max_concurrent_jobs",
        "held": "held",
        "waiting": "waiting",
        "last heartbeat": "heartbeat_age_seconds",
        "repos": "repos",
    }
    console.show_list(
        rows,
        columns,
        nothing="no machine has registered yet: `token mint`, then start an orchestrator with it",
    )
    return 0


def _why_it_stays(machine: views.Machine, burden: Burden, unserved: Sequence[str], reroute_after: int) -> str:
    waits = f"{burden.waiting} {'waits' if burden.waiting == 1 else 'wait'} for it"
    until = "Once" if not machine.online else "Stop its program: once"
    alone = (
        f" No other machine serves {', '.join(unserved)}: that work stays here until one does "
        "(`repo-route set OWNER/NAME --machine ANOTHER`)."
        if unserved
        else ""
    )
    return (
        f"{machine.name} holds {counted(burden.held, 'row')} and {waits}: nothing was removed. {until} it has been silent for "
        f"{reroute_after} s, the sweep hands what waits to machines that are online and serve the same repository; what it holds "
        f"waits again when its claim has expired.{alone} Or end the work: `queue list --machine {machine.id}` shows it, "
        "`cancel SESSION` ends it"
    )


def remove_machine(console: Console) -> int:
    """`orchestrators remove NAME`"""
    with transaction(console.engine, OPERATOR) as tx:
        org_id = console.organization(tx)
        machine = console.machine(tx, org_id, console.options.machine)
        burden = orchestrators.remove(tx, org_id=org_id, orchestrator_id=machine.id)
        unserved = queue_views.served_by_nobody_else(tx, org_id=org_id, orchestrator_id=machine.id)
    if burden is not None:
        raise Conflict(
            _why_it_stays(machine, burden, unserved, console.settings.dispatch_reroute_after_seconds)
        )
    console.printer.said(
        f"removed {machine.name} with its tokens and routes",
        id=machine.id,
        name=machine.name,
        outcome="removed",
    )
    return 0
