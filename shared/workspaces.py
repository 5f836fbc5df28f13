"""The tenant as the operator makes it: organizations, their connected Linear workspaces, and the secrets of those.

Secrets arrive here sealed or are sealed here; nothing in this module returns one that is open.
"""

from __future__ import annotations

from contextlib import suppress
from typing import NamedTuple
from uuid import UUID

from shared.crypto import KeyRing
from shared.db import Tx, sql
from shared.errors import ConfigurationError, Conflict
from shared.ids import new_id

NEW_ORGANIZATION = sql("""
    insert into organizations (id, name) values (:id, :name) on conflict (name) do nothing returning id
""")


def create_organization(tx: Tx, *, name: str) -> UUID:
    """Makes a tenant. Raises Conflict when one has that name."""
    row = tx.first(NEW_ORGANIZATION, id=new_id(), name=name)
    if row is None:
        raise Conflict(f'there is an organization "{name}" already')
    organization_id: UUID = row[0]
    return organization_id


CONNECT = sql("""
    insert into workspaces (org_id, id, linear_organization_id, name, app_user_id, webhook_secret, linear_token)
    values (:org_id, :id, :linear_organization_id, :name, :app_user_id, :webhook_secret, :linear_token)
    on conflict (org_id, linear_organization_id) do nothing
    returning id
""")


def connect_workspace(
    tx: Tx,
    keys: KeyRing,
    *,
    org_id: UUID,
    linear_organization_id: str,
    name: str,
    webhook_secret: str,
    linear_token: str | None = None,
    app_user_id: str | None = None,
) -> UUID:
    """Connects a Linear workspace; its secrets are stored sealed.

    Args:
        keys: the first key seals.
        webhook_secret: what Linear signs its events with, as Linear shows it.
        linear_token: without it nothing can be synced back.
        app_user_id: the agent's own user in Linear; None: the first verified event addressed to it names it.

    Raises Conflict when the organization has connected it already.
    """
    row = tx.first(
        CONNECT,
        org_id=org_id,
        id=new_id(),
        linear_organization_id=linear_organization_id,
        name=name,
        app_user_id=app_user_id,
        webhook_secret=keys.seal(webhook_secret),
        linear_token=None if linear_token is None else keys.seal(linear_token),
    )
    if row is None:
        raise Conflict(
            f"this organization has connected the Linear organization {linear_organization_id} already: "
            "replace its secret with `workspace rotate-secret`, its token with `workspace set-token`"
        )
    workspace_id: UUID = row[0]
    return workspace_id


# Granted anew, so whatever Linear had said of the old access is over.
SET_TOKEN = sql("""
    update workspaces set linear_token = :linear_token, status = 'active', status_reason = null
     where org_id = :org_id and id = :workspace_id
""")


def set_linear_token(tx: Tx, keys: KeyRing, *, org_id: UUID, workspace_id: UUID, linear_token: str) -> None:
    """Replaces the token that is used to write to Linear; a workspace that was marked revoked is active again."""
    tx.run(SET_TOKEN, org_id=org_id, workspace_id=workspace_id, linear_token=keys.seal(linear_token))


CURRENT = sql(
    "select webhook_secret from workspaces where org_id = :org_id and id = :workspace_id for update"
)
# The guard refuses a second rotation on top of the first: it would forget the secret that Linear may still sign with.
ROTATE = sql("""
    update workspaces set webhook_secret_previous = webhook_secret, webhook_secret = :webhook_secret
     where org_id = :org_id and id = :workspace_id and webhook_secret_previous is null
""")


def rotate_secret(tx: Tx, keys: KeyRing, *, org_id: UUID, workspace_id: UUID, webhook_secret: str) -> bool:
    """Begins a rotation: the new secret and the old one both verify. False when one is under way already: nothing changes.

    Raises Conflict when the new secret is the old one: `finish` would then end nothing.
    """
    row = tx.first(CURRENT, org_id=org_id, workspace_id=workspace_id)
    with suppress(ConfigurationError):  # one that no key opens is no reason to keep it
        if row is not None and keys.open(row[0]) == webhook_secret:
            raise Conflict("that is the secret which is valid already: make a new one in Linear first")
    sealed = keys.seal(webhook_secret)
    return tx.run(ROTATE, org_id=org_id, workspace_id=workspace_id, webhook_secret=sealed) == 1


FINISH_ROTATION = sql("""
    update workspaces set webhook_secret_previous = null
     where org_id = :org_id and id = :workspace_id and webhook_secret_previous is not null
""")


def finish_rotation(tx: Tx, *, org_id: UUID, workspace_id: UUID) -> bool:
    """Ends a rotation: only the new secret verifies from now on. False when none is under way."""
    return tx.run(FINISH_ROTATION, org_id=org_id, workspace_id=workspace_id) == 1


UNDO_ROTATION = sql("""
    update workspaces set webhook_secret = webhook_secret_previous, webhook_secret_previous = null
     where org_id = :org_id and id = :workspace_id and webhook_secret_previous is not null
""")


def undo_rotation(tx: Tx, *, org_id: UUID, workspace_id: UUID) -> bool:
    """Takes a rotation back, e.g. because the new secret was mistyped. False when none is under way."""
    return tx.run(UNDO_ROTATION, org_id=org_id, workspace_id=workspace_id) == 1


class Sealed(NamedTuple):
    """A workspace's secrets as they are stored."""

    org_id: UUID
    workspace_id: UUID
    webhook_secret: str
    webhook_secret_previous: str | None
    linear_token: str | None


# Locked, so that a rotation which is going on at this moment is neither lost nor left under the old key.
SECRETS = sql("""
    select org_id, id, webhook_secret, webhook_secret_previous, linear_token
      from workspaces
     where cast(:after_org as uuid) is null or (org_id, id) > (cast(:after_org as uuid), cast(:after_id as uuid))
     order by org_id, id
     limit :limit
       for update
""")
RESEAL = sql("""
    update workspaces
       set webhook_secret = :webhook_secret, webhook_secret_previous = :webhook_secret_previous, linear_token = :linear_token
     where org_id = :org_id and id = :workspace_id
""")


class Reencrypted(NamedTuple):
    """One batch: how many secrets were sealed anew, how many workspaces were looked at, and where to go on."""

    secrets: int
    workspaces: int
    last: tuple[UUID, UUID] | None


def reencrypt(
    tx: Tx, keys: KeyRing, *, after: tuple[UUID, UUID] | None = None, limit: int = 200
) -> Reencrypted:
    """Seals with the ring's first key what needs another one, in up to `limit` workspaces of all organizations.

    Args:
        after: `last` of the batch before.

    Raises ConfigurationError when a secret opens with no key of the ring: nothing of the batch is changed then.
    """
    after_org, after_id = after or (None, None)
    rows = [Sealed(*row) for row in tx.all(SECRETS, after_org=after_org, after_id=after_id, limit=limit)]
    changed = 0
    for row in rows:
        old = (row.webhook_secret, row.webhook_secret_previous, row.linear_token)
        stale = [secret is not None and not keys.sealed_with_first_key(secret) for secret in old]
        if any(stale):
            new = [
                keys.seal(keys.open(secret)) if secret and is_stale else secret
                for secret, is_stale in zip(old, stale, strict=True)
            ]
            tx.run(
                RESEAL,
                org_id=row.org_id,
                workspace_id=row.workspace_id,
                webhook_secret=new[0],
                webhook_secret_previous=new[1],
                linear_token=new[2],
            )
            changed += sum(stale)
    return Reencrypted(changed, len(rows), (rows[-1].org_id, rows[-1].workspace_id) if rows else None)
