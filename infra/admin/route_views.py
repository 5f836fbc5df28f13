"""What the lists of routes show. Read only, bounded by `limit`."""

from __future__ import annotations

from typing import NamedTuple
from uuid import UUID

from shared.db import Tx, sql


class TeamRoute(NamedTuple):
    """What an issue of a team gets when nothing more specific matches."""

    team_id: str
    team_key: str | None
    default_repo: str | None
    auto_dispatch: bool


TEAM_ROUTES = sql("""
    select team_id, team_key, default_repo, auto_dispatch from team_routes
     where org_id = :org_id and workspace_id = :workspace_id order by team_key, team_id limit :limit
""")


def team_routes(tx: Tx, *, org_id: UUID, workspace_id: UUID, limit: int) -> list[TeamRoute]:
    """The workspace's team routes."""
    return [
        TeamRoute(*row) for row in tx.all(TEAM_ROUTES, org_id=org_id, workspace_id=workspace_id, limit=limit)
    ]


TEAM_ROUTE = sql("""
    select team_id, team_key, default_repo, auto_dispatch from team_routes
     where org_id = :org_id and workspace_id = :workspace_id and team_id = :team_id
""")


def team_route(tx: Tx, *, org_id: UUID, workspace_id: UUID, team_id: str) -> TeamRoute:
    """The route of one team, which has just been set."""
    row = tx.first(TEAM_ROUTE, org_id=org_id, workspace_id=workspace_id, team_id=team_id)
    assert row is not None
    return TeamRoute(*row)


class LabelRoute(NamedTuple):
    """`team_id` is None where `label` is a label's id."""

    label: str
    team_id: str | None
    repo: str


LABEL_ROUTES = sql("""
    select label, nullif(team_id, ''), repo from label_routes
     where org_id = :org_id and workspace_id = :workspace_id order by label, team_id limit :limit
""")


def label_routes(tx: Tx, *, org_id: UUID, workspace_id: UUID, limit: int) -> list[LabelRoute]:
    """The workspace's label routes."""
    return [
        LabelRoute(*row)
        for row in tx.all(LABEL_ROUTES, org_id=org_id, workspace_id=workspace_id, limit=limit)
    ]


class ProjectRoute(NamedTuple):
    """`project` is its id or its name."""

    project: str
    repo: str


PROJECT_ROUTES = sql("""
    select project, repo from project_routes
     where org_id = :org_id and workspace_id = :workspace_id order by project limit :limit
""")


def project_routes(tx: Tx, *, org_id: UUID, workspace_id: UUID, limit: int) -> list[ProjectRoute]:
    """The workspace's project routes."""
    return [
        ProjectRoute(*row)
        for row in tx.all(PROJECT_ROUTES, org_id=org_id, workspace_id=workspace_id, limit=limit)
    ]


class RepoRoute(NamedTuple):
    """Which machine serves a repository. `source`: operator, or machine (its own: replaced when it registers)."""

    repo: str
    machine: str
    source: str


REPO_ROUTES = sql("""
    select r.repo, o.name, r.source
      from repo_routes r
      join orchestrators o on o.org_id = r.org_id and o.id = r.orchestrator_id
     where r.org_id = :org_id
     order by r.repo, o.name
     limit :limit
""")


def repo_routes(tx: Tx, *, org_id: UUID, limit: int) -> list[RepoRoute]:
    """Who serves what in the organization."""
    return [RepoRoute(*row) for row in tx.all(REPO_ROUTES, org_id=org_id, limit=limit)]
