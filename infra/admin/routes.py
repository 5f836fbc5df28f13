"""`team-route`, `label-route`, `project-route`, `repo-route`: which repository an issue is about, and which machine serves it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any
from uuid import UUID

from infra.admin import route_views
from infra.admin.arguments import Command, Group, linear_id, name, repo, word
from infra.admin.console import Console
from shared import routing
from shared.db import OPERATOR, Tx, transaction
from shared.errors import InvalidRequest, NotFound
from shared.ids import parse_id

Facts = Mapping[str, Any]
Change = Callable[[Console, Tx, UUID, UUID], tuple[str, Facts]]
Read = Callable[..., Sequence[Any]]


def add_to(commands: Group) -> None:
    """Adds the commands."""
    team = commands.group("team-route", "a team's default repository, and its auto-dispatch switch")
    _team(
        team.command("set", _in_workspace(_set_team), "make or change it; what is not named stays as it is")
    )
    _team(team.command("remove", _in_workspace(_remove_team), "forget it"), change=False)
    columns = {
        "team id": "team_id",
        "key": "team_key",
        "default repo": "default_repo",
        "auto-dispatch": "auto_dispatch",
    }
    team.command(
        "list", _lister(route_views.team_routes, columns), "the workspace's"
    ).limited().in_workspace()

    label = commands.group("label-route", "a label's repository")
    _label(label.command("set", _in_workspace(_set_label), "make or change it")).takes(
        "--repo", type=repo, required=True, metavar="OWNER/NAME"
    )
    _label(label.command("remove", _in_workspace(_remove_label), "forget it"))
    columns = {"label": "label", "team id": "team_id", "repo": "repo"}
    label.command(
        "list", _lister(route_views.label_routes, columns), "the workspace's"
    ).limited().in_workspace()

    project = commands.group("project-route", "a project's repository")
    for action, change, about in (
        ("set", _set_project, "make or change it"),
        ("remove", _remove_project, "forget it"),
    ):
        command = project.command(action, _in_workspace(change), about).in_workspace()
        command.takes("project", type=word, metavar="PROJECT", help="the project's id or name in Linear")
        if change is _set_project:
            command.takes("--repo", type=repo, required=True, metavar="OWNER/NAME")
    columns = {"project": "project", "repo": "repo"}
    project.command(
        "list", _lister(route_views.project_routes, columns), "the workspace's"
    ).limited().in_workspace()

    serves = commands.group(
        "repo-route", "which machine serves a repository, besides what machines say themselves"
    )
    _serves(serves.command("set", set_repo_route, "a machine serves it, whatever it registers with"))
    _serves(serves.command("remove", remove_repo_route, "take that back"))
    serves.command(
        "list", list_repo_routes, "who serves what; source: the machine itself, or the operator"
    ).limited()


def _team(command: Command, *, change: bool = True) -> None:
    command.takes("team_id", type=linear_id, metavar="TEAM_ID", help="the team's id in Linear").in_workspace()
    if change:
        command.takes(
            "--key", type=name, metavar="KEY", help="what its issues begin with, e.g. PAY; shown only"
        )
        command.takes(
            "--repo",
            type=repo,
            metavar="OWNER/NAME",
            help="where its issues go when nothing more specific matches",
        )
        command.switch(
            "auto-dispatch", on="its issues start work (the default)", off="nothing of this team starts work"
        )


def _label(command: Command) -> Command:
    command.takes(
        "label", type=name, metavar="LABEL", help="the label's id, or with --team its name"
    ).in_workspace()
    return command.takes(
        "--team", type=linear_id, metavar="TEAM_ID", help="the team's id in Linear, for a label's name"
    )


def _serves(command: Command) -> None:
    command.takes("repo", type=repo, metavar="OWNER/NAME")
    command.takes("--machine", type=word, required=True, metavar="NAME", help="the orchestrator's name or id")


def _in_workspace(change: Change) -> Callable[[Console], int]:
    """A command that changes one route of a workspace; `change` returns the sentence that says so, and what holds now."""

    def run(console: Console) -> int:
        with transaction(console.engine, OPERATOR) as tx:
            org_id = console.organization(tx)
            workspace = console.workspace(tx, org_id, console.options.workspace)
            sentence, facts = change(console, tx, org_id, workspace.id)
        console.printer.said(
            f"{workspace.name}: {sentence}", workspace_id=workspace.id, outcome=sentence, **facts
        )
        return 0

    return run


def _lister(read: Read, columns: Mapping[str, str]) -> Callable[[Console], int]:
    def run(console: Console) -> int:
        with transaction(console.engine, OPERATOR) as tx:
            org_id = console.organization(tx)
            workspace = console.workspace(tx, org_id, console.options.workspace)
            rows = read(tx, org_id=org_id, workspace_id=workspace.id, limit=console.options.limit)
        console.show_list(rows, columns, nothing=f'workspace "{workspace.name}" has none')
        return 0

    return run


def _set_team(console: Console, tx: Tx, org_id: UUID, workspace_id: UUID) -> tuple[str, Facts]:
    options = console.options
    routing.set_team_route(
        tx,
        org_id=org_id,
        workspace_id=workspace_id,
        team_id=options.team_id,
        team_key=options.key,
        default_repo=options.repo,
        auto_dispatch=options.auto_dispatch,
    )
    route = route_views.team_route(tx, org_id=org_id, workspace_id=workspace_id, team_id=options.team_id)
    sentence = (
        f"team {route.team_id} ({route.team_key or 'no key'}): default repo {route.default_repo or 'none'}, "
        f"auto-dispatch {'on' if route.auto_dispatch else 'off'}"
    )
    return sentence, route._asdict()


def _remove_team(console: Console, tx: Tx, org_id: UUID, workspace_id: UUID) -> tuple[str, Facts]:
    team_id = console.options.team_id
    if not routing.remove_team_route(tx, org_id=org_id, workspace_id=workspace_id, team_id=team_id):
        known = [
            row.team_id
            for row in route_views.team_routes(tx, org_id=org_id, workspace_id=workspace_id, limit=50)
        ]
        raise _no_route(f"team {team_id}", known)
    return f"route of team {team_id} removed", {"team_id": team_id}


def _label_key(console: Console) -> dict[str, str]:
    label, team = console.options.label, console.options.team
    if team is None:
        try:
            parse_id(label)
        except NotFound:
            raise InvalidRequest(
                f"\"{label}\" is no label's id; for a label's name give --team TEAM_ID too: names repeat between teams",
                field="--team",
            ) from None
    return {"label": label, "team_id": team or ""}


def _set_label(console: Console, tx: Tx, org_id: UUID, workspace_id: UUID) -> tuple[str, Facts]:
    key, to = _label_key(console), console.options.repo
    routing.set_label_route(tx, org_id=org_id, workspace_id=workspace_id, repo=to, **key)
    return f"{_called(key)} goes to {to}", {**key, "team_id": key["team_id"] or None, "repo": to}


def _called(key: Mapping[str, str]) -> str:
    return f"label {key['label']}" + (f" of team {key['team_id']}" if key["team_id"] else "")


def _remove_label(console: Console, tx: Tx, org_id: UUID, workspace_id: UUID) -> tuple[str, Facts]:
    key = _label_key(console)
    if not routing.remove_label_route(tx, org_id=org_id, workspace_id=workspace_id, **key):
        known = [
            row.label
            for row in route_views.label_routes(tx, org_id=org_id, workspace_id=workspace_id, limit=50)
        ]
        raise _no_route(_called(key), known)
    return f"route of {_called(key)} removed", {**key, "team_id": key["team_id"] or None}


def _set_project(console: Console, tx: Tx, org_id: UUID, workspace_id: UUID) -> tuple[str, Facts]:
    project, to = console.options.project, console.options.repo
    routing.set_project_route(tx, org_id=org_id, workspace_id=workspace_id, project=project, repo=to)
    return f"project {project} goes to {to}", {"project": project, "repo": to}


def _remove_project(console: Console, tx: Tx, org_id: UUID, workspace_id: UUID) -> tuple[str, Facts]:
    project = console.options.project
    if not routing.remove_project_route(tx, org_id=org_id, workspace_id=workspace_id, project=project):
        known = [
            row.project
            for row in route_views.project_routes(tx, org_id=org_id, workspace_id=workspace_id, limit=50)
        ]
        raise _no_route(f"project {project}", known)
    return f"route of project {project} removed", {"project": project}


def _no_route(what: str, known: Sequence[str]) -> NotFound:
    return NotFound(
        f"no route of {what}; " + (f"there are: {', '.join(known)}" if known else "there is none")
    )


def set_repo_route(console: Console) -> int:
    """`repo-route set OWNER/NAME --machine NAME`"""
    served = console.options.repo
    with transaction(console.engine, OPERATOR) as tx:
        org_id = console.organization(tx)
        machine = console.machine(tx, org_id, console.options.machine)
        routing.set_repo_route(tx, org_id=org_id, repo=served, orchestrator_id=machine.id)
    console.printer.said(
        f"{machine.name} serves {served}", repo=served, orchestrator_id=machine.id, source="operator"
    )
    return 0


def remove_repo_route(console: Console) -> int:
    """`repo-route remove OWNER/NAME --machine NAME`"""
    served = console.options.repo
    with transaction(console.engine, OPERATOR) as tx:
        org_id = console.organization(tx)
        machine = console.machine(tx, org_id, console.options.machine)
        if not routing.remove_repo_route(tx, org_id=org_id, repo=served, orchestrator_id=machine.id):
            own = served in machine.repos
            raise NotFound(
                f"{machine.name} brings {served} itself, with each registration: take it out of that machine's configuration"
                if own
                else f"{machine.name} does not serve {served}; it serves: {', '.join(machine.repos) or 'nothing'}"
            )
    console.printer.said(
        f"{machine.name} serves {served} no more on our word",
        repo=served,
        orchestrator_id=machine.id,
        outcome="removed",
    )
    return 0


def list_repo_routes(console: Console) -> int:
    """`repo-route list`"""
    with transaction(console.engine, OPERATOR) as tx:
        rows = route_views.repo_routes(tx, org_id=console.organization(tx), limit=console.options.limit)
    nothing = "no machine serves any repository: register one, or add a route"
    console.show_list(rows, {"repo": "repo", "machine": "machine", "source": "source"}, nothing=nothing)
    return 0
