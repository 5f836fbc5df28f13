"""From an event of Linear to a tenant, and from an issue to a repository."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple
from uuid import UUID

from shared.db import Tx, sql


class Workspace(NamedTuple):
    """A connected Linear workspace. The secrets are still encrypted; `has_linear_token`: whether anything can be synced back."""

    org_id: UUID
    id: UUID
    app_user_id: str | None
    webhook_secret: str
    webhook_secret_previous: str | None
    has_linear_token: bool


WORKSPACES_OF = sql("""
    select org_id, id, app_user_id, webhook_secret, webhook_secret_previous, linear_token is not null
      from workspaces
     where linear_organization_id = :linear_organization_id
     order by created_at, id
     limit 32
""")


def workspaces_of(tx: Tx, *, linear_organization_id: str) -> list[Workspace]:
    """The workspaces that an event may belong to: the tenant is the one whose secret verifies it, nothing else."""
    return [Workspace(*row) for row in tx.all(WORKSPACES_OF, linear_organization_id=linear_organization_id)]


class Label(NamedTuple):
    """A label of an issue; the id is None where Linear gives only names."""

    id: str | None
    name: str


class Routed(NamedTuple):
    """Where an issue belongs. `repo` is None when nothing matches, or when labels or projects name different repositories;
    then `candidates` are those that could be meant, to be asked rather than guessed."""

    repo: str | None
    candidates: list[str]
    auto_dispatch: bool


# All the routes that could match, in one statement; the first kind that matches wins (1 label, 2 project, 3 team default).
ROUTES = sql("""
    select 0 as kind, null as repo, auto_dispatch, null as matched from team_routes
     where org_id = :org_id and workspace_id = :workspace_id and team_id = :team_id
    union all
    select 1, repo, null, label from label_routes
     where org_id = :org_id and workspace_id = :workspace_id
       and ((team_id = '' and label = any (cast(:label_ids as text[])))
            or (team_id = :team_id and lower(label) = any (cast(:label_names as text[]))))
    union all
    select 2, repo, null, project from project_routes
     where org_id = :org_id and workspace_id = :workspace_id and project = any (cast(:projects as text[]))
    union all
    select 3, default_repo, null, null from team_routes
     where org_id = :org_id and workspace_id = :workspace_id and team_id = :team_id and default_repo is not null
     order by kind, repo
""")


def route_issue(
    tx: Tx,
    *,
    org_id: UUID,
    workspace_id: UUID,
    team_id: str,
    directive: str | None,
    labels: Sequence[Label],
    projects: Sequence[str],
) -> Routed:
    """The repository that an issue is about.

    First match wins: `[repo=owner/name]` in its text, a label, its project, its team's default. The team's switch gates all of them.

    Args:
        directive: what `[repo=…]` names, if the text has one.
        projects: the project's id and name, whichever are known.
    """
    rows = tx.all(
        ROUTES,
        org_id=org_id,
        workspace_id=workspace_id,
        team_id=team_id,
        label_ids=[label.id for label in labels if label.id is not None],
        label_names=[label.name.lower() for label in labels],
        projects=list(projects),
    )
    auto_dispatch = all(row.auto_dispatch for row in rows if row.kind == 0)
    if directive is not None:
        return Routed(directive, [], auto_dispatch)
    for kind in (1, 2, 3):
        repos = sorted({row.repo for row in rows if row.kind == kind})
        if len(repos) == 1:
            return Routed(repos[0], [], auto_dispatch)
        if repos:
            return Routed(None, repos, auto_dispatch)
    return Routed(None, [], auto_dispatch)


REPOS_SERVED = sql("select distinct repo from repo_routes where org_id = :org_id order by repo limit 25")


def repos_served(tx: Tx, *, org_id: UUID) -> list[str]:
    """The repositories that some machine of the organization serves, 25 at most: what to offer when an issue matches none."""
    return [row[0] for row in tx.all(REPOS_SERVED, org_id=org_id)]


REVOKE = sql("""
    update workspaces set status = 'revoked', status_reason = :reason where org_id = :org_id and id = :workspace_id
""")


def mark_revoked(tx: Tx, *, org_id: UUID, workspace_id: UUID, reason: str) -> None:
    """Notes that Linear has taken the app's access away; shown to the operator, refuses nothing."""
    tx.run(REVOKE, org_id=org_id, workspace_id=workspace_id, reason=reason)


LEARN_APP_USER = sql("""
    update workspaces set app_user_id = :app_user_id where org_id = :org_id and id = :workspace_id and app_user_id is null
""")


def learn_app_user(tx: Tx, *, org_id: UUID, workspace_id: UUID, app_user_id: str) -> None:
    """Notes the agent's own user in Linear, which the first verified event addressed to it names."""
    tx.run(LEARN_APP_USER, org_id=org_id, workspace_id=workspace_id, app_user_id=app_user_id)
