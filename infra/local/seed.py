"""The demo organization: a connected workspace, a team with a default repository, and tokens for its machines."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from uuid import UUID

from sqlalchemy import Engine

from shared import orchestrators
from shared.crypto import KeyRing
from shared.db import OPERATOR, Tx, sql, transaction
from shared.ids import new_id, token_hash
from shared.settings import Settings

LINEAR_ORGANIZATION = "9d62b5b1-b138-49e2-882f-8c502d869d12"
APP_USER = "d946757b-a673-4404-8c25-c53811a33e4e"
TEAM = "6b180ba8-0946-4485-8132-fa1450d6d5ef"
REPO = "quartz/payments"


@dataclass(frozen=True)
class Demo:
    """What is needed to play Linear and a machine against the stack. The secrets are of the demo only."""

    org_id: str
    webhook_secret: str
    tokens: dict[str, str]


SECRET = sql("""
    select webhook_secret from workspaces where org_id = cast(:org_id as uuid) and linear_organization_id = :linear
""")
VALID = sql("""
    select exists (select from orchestrator_tokens
                    where org_id = cast(:org_id as uuid) and token_hash = :token_hash and revoked_at is null
                      and (expires_at is null or expires_at > now()))
""")
ORGANIZATION = sql("insert into organizations (id, name) values (:org_id, 'Quartzworks (demo)')")
WORKSPACE = sql("""
    insert into workspaces (org_id, id, linear_organization_id, name, app_user_id, webhook_secret)
    values (:org_id, :workspace_id, :linear, 'quartzworks', :app_user, :secret)
""")
TEAM_ROUTE = sql("""
    insert into team_routes (org_id, workspace_id, team_id, team_key, default_repo)
    values (:org_id, :workspace_id, :team, 'PAY', :repo)
""")


def seed(engine: Engine, settings: Settings, kept: Path, *, say: Callable[[str], None] = print) -> Demo:
    """Makes the demo organization once; later starts find it, and its secrets in the file `kept` (mode 0600).

    What the operator has revoked or rotated since is replaced in that file: what it holds is valid.
    """
    keys = KeyRing.of(settings)
    with transaction(engine, OPERATOR) as tx:
        if kept.exists():
            demo = Demo(**json.loads(kept.read_text()))
            row = tx.first(SECRET, org_id=demo.org_id, linear=LINEAR_ORGANIZATION)
            if row is not None:
                demo = replace(
                    demo, webhook_secret=keys.open(row[0]), tokens=_valid(tx, demo.org_id, demo.tokens, say)
                )
                _keep(demo, kept)
                return demo
        org_id, workspace_id, webhook_secret = new_id(), new_id(), "lin_wh_" + secrets.token_urlsafe(24)
        tx.run(ORGANIZATION, org_id=org_id)
        tx.run(
            WORKSPACE,
            org_id=org_id,
            workspace_id=workspace_id,
            linear=LINEAR_ORGANIZATION,
            app_user=APP_USER,
            secret=keys.seal(webhook_secret),
        )
        tx.run(TEAM_ROUTE, org_id=org_id, workspace_id=workspace_id, team=TEAM, repo=REPO)
        tokens = {
            name: orchestrators.mint_token(tx, org_id=org_id, label=name)[1] for name in ("laptop", "desktop")
        }
        demo = Demo(str(org_id), webhook_secret, tokens)
        _keep(demo, kept)
    return demo


def _valid(tx: Tx, org_id: str, tokens: dict[str, str], say: Callable[[str], None]) -> dict[str, str]:
    """The machines' tokens, with a new one for each that has been revoked."""
    valid = {}
    for name, token in tokens.items():
        row = tx.first(VALID, org_id=org_id, token_hash=token_hash(token))
        if row is not None and row[0]:
            valid[name] = token
        else:
            _, valid[name] = orchestrators.mint_token(tx, org_id=UUID(org_id), label=name)
            say(f"demo: the token of {name} was not valid any more; here is a new one")
    return valid


def _keep(demo: Demo, kept: Path) -> None:
    kept.touch(mode=0o600)
    kept.write_text(json.dumps(asdict(demo)))
