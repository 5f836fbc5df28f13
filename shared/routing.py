"""From an event of Linear to a tenant, and from an issue to a repository."""

from __future__ import annotations

from datetime import datetime
from typing import NamedTuple
from uuid import UUID

from shared.db import Tx, sql
from shared.linear_issue import Issue
from shared.orchestrators import CHOOSE_MACHINE


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


class Routed(NamedTuple):
    """Where an issue belongs.

    `repo` is None when nothing matches or when labels name different repositories; `candidates` are then those that could be meant: to
    be asked, never guessed. `orchestrator_id` is None when no machine serves the repo. `stopped`: a stop came before this start.
    """

    repo: str | None
    candidates: list[str]
    auto_dispatch: bool
    orchestrator_id: UUID | None
    stopped: bool


# Everything that a start needs to know, in one round trip: the webhook has to answer soon.
# An agent session that was stopped stays stopped, its id stands for one delegation. An issue may be delegated again later.
ROUTE_ISSUE = sql(f"""
    with matches as (
      select 0 as kind, cast(:directive as text) as repo where cast(:directive as text) is not null
      union
      select 1, repo from label_routes
       where org_id = :org_id and workspace_id = :workspace_id
         and ((team_id = '' and label = any (cast(:label_ids as text[])))
              or (team_id = :team_id and lower(label) = any (cast(:label_names as text[]))))
      union
      select 2, repo from project_routes
       where org_id = :org_id and workspace_id = :workspace_id and project = any (cast(:projects as text[]))
      union
      select 3, default_repo from team_routes
       where org_id = :org_id and workspace_id = :workspace_id and team_id = :team_id and default_repo is not null
    ), first_match as (
      select coalesce(array_agg(repo order by repo), '{{}}') as repos from matches where kind = (select min(kind) from matches)
    )
    select f.repos,
           coalesce((select auto_dispatch from team_routes
                      where org_id = :org_id and workspace_id = :workspace_id and team_id = :team_id), true),
           case when cardinality(f.repos) = 1 then ({CHOOSE_MACHINE.format(repo="f.repos[1]")}) end,
           exists (select from stop_tombstones
                    where org_id = :org_id and workspace_id = :workspace_id
                      and (subject = :agent_session_id or (subject = :issue_id and stopped_at >= :requested_at)))
      from first_match f
""")


def route_issue(
    tx: Tx,
    *,
    org_id: UUID,
    workspace_id: UUID,
    issue: Issue,
    directive: str | None,
    agent_session_id: str | None,
    requested_at: datetime,
    offline_after: int,
    preferred: UUID | None = None,
) -> Routed:
    """The repository that an issue is about, and the machine that the work goes to.

    First match wins: `[repo=owner/name]` in its text, a label (by id, or by name within the team), its project, its team's default. The
    team's auto-dispatch switch gates all of them.

    Args:
        directive: what `[repo=…]` names, if the text has one.
        requested_at: the event's own time.
    """
    row = tx.first(
        ROUTE_ISSUE,
        org_id=org_id,
        workspace_id=workspace_id,
        team_id=issue.team_id,
        directive=directive,
        label_ids=[label.id for label in issue.labels if label.id is not None],
        label_names=[label.name.lower() for label in issue.labels if label.name],
        projects=list(issue.projects),
        agent_session_id=agent_session_id or "",
        issue_id=issue.id,
        requested_at=requested_at,
        offline_after=offline_after,
        preferred=preferred,
    )
    assert row is not None
    repos, auto_dispatch, orchestrator_id, stopped = row
    repo = repos[0] if len(repos) == 1 else None
    return Routed(repo, list(repos), auto_dispatch, orchestrator_id, stopped)


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


# -- the operator's routes ----------------------------------------------------------------------------------------------

SET_TEAM_ROUTE = sql("""
    insert into team_routes as route (org_id, workspace_id, team_id, team_key, default_repo, auto_dispatch)
    values (:org_id, :workspace_id, :team_id, :team_key, :default_repo, coalesce(cast(:auto_dispatch as boolean), true))
    on conflict (org_id, workspace_id, team_id) do update
       set team_key = coalesce(excluded.team_key, route.team_key),
           default_repo = coalesce(excluded.default_repo, route.default_repo),
           auto_dispatch = coalesce(cast(:auto_dispatch as boolean), route.auto_dispatch)
""")


def set_team_route(
    tx: Tx,
    *,
    org_id: UUID,
    workspace_id: UUID,
    team_id: str,
    team_key: str | None,
    default_repo: str | None,
    auto_dispatch: bool | None,
) -> None:
    """Makes or changes a team's default; what is None stays as it is (a new route dispatches automatically)."""
    tx.run(
        SET_TEAM_ROUTE,
        org_id=org_id,
        workspace_id=workspace_id,
        team_id=team_id,
        team_key=team_key,
        default_repo=default_repo,
        auto_dispatch=auto_dispatch,
    )


REMOVE_TEAM_ROUTE = sql(
    "delete from team_routes where org_id = :org_id and workspace_id = :workspace_id and team_id = :team_id"
)


def remove_team_route(tx: Tx, *, org_id: UUID, workspace_id: UUID, team_id: str) -> bool:
    """Forgets a team's default and its switch. False when there is no such route."""
    return tx.run(REMOVE_TEAM_ROUTE, org_id=org_id, workspace_id=workspace_id, team_id=team_id) == 1


SET_LABEL_ROUTE = sql("""
    insert into label_routes (org_id, workspace_id, team_id, label, repo) values (:org_id, :workspace_id, :team_id, :label, :repo)
    on conflict (org_id, workspace_id, team_id, label) do update set repo = excluded.repo
""")


def set_label_route(tx: Tx, *, org_id: UUID, workspace_id: UUID, team_id: str, label: str, repo: str) -> None:
    """Sends a label's issues to a repository.

    Args:
        team_id: `''` when `label` is the label's id; the team's id when it is a name, since names repeat between teams.
    """
    tx.run(SET_LABEL_ROUTE, org_id=org_id, workspace_id=workspace_id, team_id=team_id, label=label, repo=repo)


REMOVE_LABEL_ROUTE = sql("""
    delete from label_routes
     where org_id = :org_id and workspace_id = :workspace_id and team_id = :team_id and label = :label
""")


def remove_label_route(tx: Tx, *, org_id: UUID, workspace_id: UUID, team_id: str, label: str) -> bool:
    """Forgets a label's repository. False when there is no such route."""
    return (
        tx.run(REMOVE_LABEL_ROUTE, org_id=org_id, workspace_id=workspace_id, team_id=team_id, label=label)
        == 1
    )


SET_PROJECT_ROUTE = sql("""
    insert into project_routes (org_id, workspace_id, project, repo) values (:org_id, :workspace_id, :project, :repo)
    on conflict (org_id, workspace_id, project) do update set repo = excluded.repo
""")


def set_project_route(tx: Tx, *, org_id: UUID, workspace_id: UUID, project: str, repo: str) -> None:
    """Sends a project's issues (by the project's id or its name) to a repository."""
    tx.run(SET_PROJECT_ROUTE, org_id=org_id, workspace_id=workspace_id, project=project, repo=repo)


REMOVE_PROJECT_ROUTE = sql("""
    delete from project_routes where org_id = :org_id and workspace_id = :workspace_id and project = :project
""")


def remove_project_route(tx: Tx, *, org_id: UUID, workspace_id: UUID, project: str) -> bool:
    """Forgets a project's repository. False when there is no such route."""
    return tx.run(REMOVE_PROJECT_ROUTE, org_id=org_id, workspace_id=workspace_id, project=project) == 1


# A route that the machine brought becomes the operator's, and outlives a registration that does not name it any more.
SET_REPO_ROUTE = sql("""
    insert into repo_routes (org_id, repo, orchestrator_id, source) values (:org_id, :repo, :orchestrator_id, 'operator')
    on conflict (org_id, repo, orchestrator_id) do update set source = 'operator'
""")


def set_repo_route(tx: Tx, *, org_id: UUID, repo: str, orchestrator_id: UUID) -> None:
    """Says that a machine serves a repository, whatever it registers with."""
    tx.run(SET_REPO_ROUTE, org_id=org_id, repo=repo, orchestrator_id=orchestrator_id)


REMOVE_REPO_ROUTE = sql("""
    delete from repo_routes
     where org_id = :org_id and repo = :repo and orchestrator_id = :orchestrator_id and source = 'operator'
""")


def remove_repo_route(tx: Tx, *, org_id: UUID, repo: str, orchestrator_id: UUID) -> bool:
    """Takes an operator's route back. False when there is none: the machine's own come and go with its registration."""
    return tx.run(REMOVE_REPO_ROUTE, org_id=org_id, repo=repo, orchestrator_id=orchestrator_id) == 1
