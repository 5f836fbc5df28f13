"""`org`, `workspace` and `reencrypt`: who is connected, and their secrets."""

from __future__ import annotations

from uuid import UUID

from infra.admin import views
from infra.admin.arguments import Group, linear_id, name, word
from infra.admin.console import Console
from infra.admin.output import counted
from infra.admin.secret_input import only_one_from_standard_input, read_secret
from shared import workspaces
from shared.crypto import KeyRing
from shared.db import OPERATOR, transaction
from shared.errors import Conflict, InvalidRequest


def add_to(commands: Group) -> None:
    """Adds the commands."""
    org = commands.group("org", "organizations: the tenants")
    create = org.command("create", create_organization, "make an organization", of_everything=True)
    create.takes("name", type=name, metavar="NAME")
    org.command("list", list_organizations, "all organizations", of_everything=True).limited()

    workspace = commands.group("workspace", "connected Linear workspaces and their secrets")
    connect = workspace.command(
        "connect", connect_workspace, "connect a Linear workspace; its secrets are stored encrypted"
    )
    connect.takes("name", type=name, metavar="NAME", help="what to call it here")
    connect.takes(
        "--linear-organization-id",
        type=linear_id,
        required=True,
        metavar="ID",
        help="`organizationId` in Linear's events",
    )
    connect.takes(
        "--app-user-id",
        type=linear_id,
        metavar="ID",
        help="the agent's own user; else learnt from the first event",
    )
    connect.secret("secret", "the webhook signing secret", default="-")
    connect.secret("token", "the token for writing to Linear, optional", default=None)
    workspace.command("list", list_workspaces, "the organization's workspaces").limited()
    rotate = workspace.command(
        "rotate-secret", rotate_secret, "replace the webhook secret; the old one stays valid until --finish"
    )
    rotate.takes(
        "name", type=word, nargs="?", metavar="NAME", help="name or id, needed where there are several"
    )
    rotate.takes("--finish", action="store_true", help="end the rotation: the old secret is forgotten")
    rotate.takes("--undo", action="store_true", help="end the rotation: the new secret is forgotten")
    rotate.secret("secret", "the new webhook signing secret", default=None)
    token = workspace.command("set-token", set_token, "replace the token for writing to Linear")
    token.takes(
        "name", type=word, nargs="?", metavar="NAME", help="name or id, needed where there are several"
    )
    token.secret("token", "the token", default="-")

    commands.command(
        "reencrypt",
        reencrypt,
        "seal all stored secrets with the first key of BRIDGE_ENCRYPTION_KEY",
        of_everything=True,
    )


def create_organization(console: Console) -> int:
    """`org create NAME`"""
    wanted = console.options.name
    with transaction(console.engine, OPERATOR) as tx:
        org_id = workspaces.create_organization(tx, name=wanted)
    console.printer.said(f'made organization "{wanted}": {org_id}', id=org_id, name=wanted)
    return 0


def list_organizations(console: Console) -> int:
    """`org list`"""
    with transaction(console.engine, OPERATOR) as tx:
        rows = views.organizations(tx, limit=console.options.limit)
    columns = {
        "organization": "name",
        "id": "id",
        "workspaces": "workspaces",
        "machines": "machines",
        "since": "created_at",
    }
    console.show_list(rows, columns, nothing="no organization yet: make one with `org create NAME`")
    return 0


def connect_workspace(console: Console) -> int:
    """`workspace connect NAME`"""
    options, keys = console.options, KeyRing.of(console.settings)
    only_one_from_standard_input(options.secret_file, options.token_file)
    with transaction(console.engine, OPERATOR) as tx:
        org_id = console.organization(tx)
    # Read outside of any transaction: a person may be typing.
    secret = read_secret(options.secret_file, what="webhook secret", field="--secret-file")
    token = options.token_file and read_secret(options.token_file, what="Linear token", field="--token-file")
    with transaction(console.engine, OPERATOR) as tx:
        workspace_id = workspaces.connect_workspace(
            tx,
            keys,
            org_id=org_id,
            linear_organization_id=options.linear_organization_id,
            name=options.name,
            webhook_secret=secret,
            linear_token=token,
            app_user_id=options.app_user_id,
        )
    console.printer.said(
        f'connected workspace "{options.name}": {workspace_id}',
        id=workspace_id,
        org_id=org_id,
        name=options.name,
    )
    if token is None:
        console.printer.hint(
            "without a Linear token nothing is written back to Linear: `workspace set-token`"
        )
    return 0


def list_workspaces(console: Console) -> int:
    """`workspace list`"""
    with transaction(console.engine, OPERATOR) as tx:
        rows = views.workspaces(tx, org_id=console.organization(tx), limit=console.options.limit)
    columns = {
        "workspace": "name",
        "id": "id",
        "linear organization": "linear_organization_id",
        "status": "status",
        "token": "has_linear_token",
        "rotating": "rotating",
        "app user": "app_user_id",
        "reason": "status_reason",
    }
    console.show_list(rows, columns, nothing="no workspace yet: connect one with `workspace connect NAME`")
    return 0


def rotate_secret(console: Console) -> int:
    """`workspace rotate-secret [NAME]`"""
    options = console.options
    if options.finish or options.undo:
        if (options.finish and options.undo) or options.secret_file:
            raise InvalidRequest("--finish, --undo and --secret-file exclude each other", field="--finish")
        return _end_rotation(console)
    keys = KeyRing.of(console.settings)
    org_id, workspace = _workspace(console)
    if workspace.rotating:
        raise Conflict(f'a rotation of "{workspace.name}" is under way: end it with --finish or --undo first')
    secret = read_secret(options.secret_file or "-", what="new webhook secret", field="--secret-file")
    with transaction(console.engine, OPERATOR) as tx:
        if not workspaces.rotate_secret(
            tx, keys, org_id=org_id, workspace_id=workspace.id, webhook_secret=secret
        ):
            raise Conflict(
                f'a rotation of "{workspace.name}" is under way: end it with --finish or --undo first'
            )
    console.printer.said(
        f'the new secret of "{workspace.name}" is valid, the old one still is: change it in Linear, then run this with --finish',
        id=workspace.id,
        outcome="rotating",
    )
    return 0


def _end_rotation(console: Console) -> int:
    org_id, workspace = _workspace(console)
    finish = console.options.finish
    end = workspaces.finish_rotation if finish else workspaces.undo_rotation
    with transaction(console.engine, OPERATOR) as tx:
        if not end(tx, org_id=org_id, workspace_id=workspace.id):
            raise Conflict(f'no rotation of "{workspace.name}" is under way')
    kept = "new" if finish else "old"
    console.printer.said(
        f'only the {kept} secret of "{workspace.name}" is valid now',
        id=workspace.id,
        outcome="finished" if finish else "undone",
    )
    return 0


def _workspace(console: Console) -> tuple[UUID, views.Workspace]:
    with transaction(console.engine, OPERATOR) as tx:
        org_id = console.organization(tx)
        return org_id, console.workspace(tx, org_id, console.options.name)


def set_token(console: Console) -> int:
    """`workspace set-token [NAME]`"""
    keys = KeyRing.of(console.settings)
    org_id, workspace = _workspace(console)
    token = read_secret(console.options.token_file, what="Linear token", field="--token-file")
    with transaction(console.engine, OPERATOR) as tx:
        workspaces.set_linear_token(tx, keys, org_id=org_id, workspace_id=workspace.id, linear_token=token)
    console.printer.said(f'"{workspace.name}" has a new Linear token', id=workspace.id, status="active")
    return 0


def reencrypt(console: Console) -> int:
    """`reencrypt`: batches of their own transactions; what is done stays done, running it again does the rest."""
    keys = KeyRing.of(console.settings)
    changed, looked_at, last = 0, 0, None
    while True:
        with transaction(console.engine, OPERATOR) as tx:
            batch = workspaces.reencrypt(tx, keys, after=last)
        if batch.last is None:
            break
        changed, looked_at, last = changed + batch.secrets, looked_at + batch.workspaces, batch.last
    console.printer.said(
        f"sealed {counted(changed, 'secret')} anew in {counted(looked_at, 'workspace')}: "
        "only the first key of BRIDGE_ENCRYPTION_KEY is needed now",
        secrets=changed,
        workspaces=looked_at,
    )
    return 0
