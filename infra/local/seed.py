"""The demo organization: a connected workspace, a team with a default repository, and tokens for its machines."""

from __future__ import annotations

import json
import secrets
from dataclasses import asdict, dataclass
from pathlib import Path

from sqlalchemy import Engine

from shared import orchestrators
from shared.crypto import KeyRing
from shared.db import OPERATOR, sql, transaction
from shared.ids import new_id
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


KNOWN = sql("select exists (select from organizations where id = cast(:org_id as uuid))")
ORGANIZATION = sql("insert into organizations (id, name) values (:org_id, 'Quartzworks (demo)')")
WORKSPACE = sql("""
    insert into workspaces (org_id, id, linear_organization_id, name, app_user_id, webhook_secret)
    values (:org_id, :workspace_id, :linear, 'quartzworks', :app_user, :secret)
""")
TEAM_ROUTE = sql("""
    insert into team_routes (org_id, workspace_id, team_id, team_key, default_repo)
    values (:org_id, :workspace_id, :team, 'PAY', :repo)
""")


def seed(engine: Engine, settings: Settings, kept: Path) -> Demo:
    """Makes the demo organization once; later starts find it, and its secrets in the file `kept` (mode 0600)."""
    with transaction(engine, OPERATOR) as tx:
        if kept.exists():
            demo = Demo(**json.loads(kept.read_text()))
            row = tx.first(KNOWN, org_id=demo.org_id)
            if row is not None and row[0]:
                return demo
        org_id, workspace_id, webhook_secret = new_id(), new_id(), "lin_wh_" + secrets.token_urlsafe(24)
        tx.run(ORGANIZATION, org_id=org_id)
        tx.run(
            WORKSPACE,
            org_id=org_id,
            workspace_id=workspace_id,
            linear=LINEAR_ORGANIZATION,
            app_user=APP_USER,
            secret=KeyRing.of(settings).seal(webhook_secret),
        )
        tx.run(TEAM_ROUTE, org_id=org_id, workspace_id=workspace_id, team=TEAM, repo=REPO)
        tokens = {
            name: orchestrators.mint_token(tx, org_id=org_id, label=name)[1] for name in ("laptop", "desktop")
        }
        demo = Demo(str(org_id), webhook_secret, tokens)
        kept.touch(mode=0o600)
        kept.write_text(json.dumps(asdict(demo)))
    return demo
