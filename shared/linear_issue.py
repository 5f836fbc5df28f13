"""A Linear issue as dispatch keeps it: read from an event, asked for its repository, put into a message."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from shared.linear_fields import ident, link, name, record, records, text

TEXT_LIMIT: Final = 200_000
"""Characters of a description or a prompt context: every poll reads the row until it is claimed."""

GUIDANCE_LIMIT: Final = 50_000
LABEL_LIMIT: Final = 100
TITLE_LIMIT: Final = 1_000


class Label(NamedTuple):
    """A label of an issue: the id is None where Linear gives only names, the name empty where only ids."""

    id: str | None
    name: str


class Input(NamedTuple):
    """What a person said to the agent. The id tells two equal texts from one text that is delivered twice."""

    activity_id: str
    body: str

    def as_dict(self) -> dict[str, str]:
        """The form in a message's `prompts` and in a session's history."""
        return {"activityId": self.activity_id, "body": self.body}


@dataclass(frozen=True, slots=True)
class Issue:
    """What is known of an issue. `id` is Linear's UUID; `identifier` and `url` change with its team.

    `projects`: the project's id and name, whichever are known.
    """

    id: str
    identifier: str
    title: str
    team_id: str
    url: str | None = None
    description: str | None = None
    priority: int | None = None
    labels: tuple[Label, ...] = ()
    projects: tuple[str, ...] = ()


class Incomplete(NamedTuple):
    """An issue of which nothing can be dispatched, and what it lacks."""

    missing: tuple[str, ...]


def read_issue(data: Mapping[str, object], prompt_context: str | None = None) -> Issue | Incomplete:
    """The issue in an event, or what is missing for one.

    Args:
        data: `data` of an Issue event, or the shorter `issue` of an agent session, which has neither labels
            nor project.
        prompt_context: where the labels and the project of an agent session's issue are named.
    """
    issue_id, identifier = ident(data.get("id")), ident(data.get("identifier"))
    title, team_id = text(data.get("title"), TITLE_LIMIT), reference(data, "team")
    if issue_id is None or identifier is None or title is None or team_id is None:
        parts = {"id": issue_id, "identifier": identifier, "title": title, "team": team_id}
        return Incomplete(tuple(part for part, value in parts.items() if value is None))
    description = text(data.get("description"), TEXT_LIMIT)
    labels = _labels(data)
    projects = [reference(data, "project"), name(record(data.get("project")).get("name"))]
    if prompt_context is not None:
        names, named_projects = _named_in(prompt_context, title, description)
        labels = labels or [Label(None, label) for label in names]
        projects += named_projects
    return Issue(
        id=issue_id,
        identifier=identifier,
        title=title,
        team_id=team_id,
        url=link(data.get("url")),
        description=description,
        priority=_priority(data.get("priority")),
        labels=tuple(labels[:LABEL_LIMIT]),
        projects=tuple(dict.fromkeys(project for project in projects if project is not None)),
    )


def reference(data: Mapping[str, object], field: str) -> str | None:
    """The id that a field refers to: from `<field>Id`, or from the object under `<field>`."""
    return ident(data.get(f"{field}Id")) or ident(record(data.get(field)).get("id"))


def _priority(value: object) -> int | None:
    # A Float in Linear's schema; 0 is "no priority". True equals 1 in Python, but is not a priority.
    return (
        next((level for level in range(5) if level == value), None) if not isinstance(value, bool) else None
    )


def _labels(data: Mapping[str, object]) -> list[Label]:
    labels = [
        Label(ident(label.get("id")), name(label.get("name")) or "")
        for label in records(data.get("labels"))[:LABEL_LIMIT]
    ]
    named = {label.id for label in labels}
    ids = data.get("labelIds")
    bare = [ident(value) for value in ids[:LABEL_LIMIT]] if isinstance(ids, list) else []
    labels += [Label(value, "") for value in bare if value is not None and value not in named]
    return [label for label in labels if label.id or label.name]


# `[^<>]` keeps the search linear: with `[^>]` a text of many "<label" and no ">" would be scanned once for
# each of them.
_TAG = re.compile(r"<(/?)(issue|title|description|label|project|parent-issue)(?=[\s/>])([^<>]*)>")
_NAME_ATTRIBUTE = re.compile(r'\bname="([^"]*)"')


def _named_in(context: str, title: str, description: str | None) -> tuple[list[str], list[str]]:
    """Names of labels and projects in the `<issue>` element of a prompt context, outside users' own text.

    Linear is not known to escape a user's text there, so the title and the description are taken out as a
    whole first, and elements with prose in them are skipped. Whoever still smuggles in a label gains nothing:
    the same person can write `[repo=owner/name]` into the description, which comes before every label.
    """
    for element, prose in (("title", title), ("description", description or "")):
        for form in (prose, html.escape(prose, quote=False)):
            context = context.replace(f"<{element}>{form}</{element}>", "", 1)
    labels: list[str] = []
    projects: list[str] = []
    label_from = None
    for tag in _tags_of_issue(context):
        closing, element, attributes = tag.groups()
        if element == "label":
            if closing and label_from is not None:
                labels.append(context[label_from : tag.start()])
            label_from = None if closing else tag.end()
        elif element == "project" and (named := _NAME_ATTRIBUTE.search(attributes)):
            projects.append(named[1])
    return _unescaped(labels), _unescaped(projects)


def _tags_of_issue(context: str) -> Iterator[re.Match[str]]:
    within, prose = False, None
    for tag in _TAG.finditer(context):
        closing, element, attributes = tag.groups()
        if prose is not None:
            prose = None if closing and element == prose else prose
        elif element == "issue":
            if closing:
                return
            within = True
        elif within:
            yield tag
            if element != "label" and not closing and not attributes.endswith("/"):
                prose = element


def _unescaped(names: list[str]) -> list[str]:
    return [shown for raw in names if (shown := name(html.unescape(raw)))]


# Linear's editor may store the brackets and underscores of a description as `\[`, `\]` and `\_`.
_DIRECTIVE = re.compile(r"\[repo=([\w.\\-]{1,120}/[\w.\\-]{1,120})\]", re.ASCII)


def repo_directive(written: str | None) -> str | None:
    """The repository that a text asks for with `[repo=owner/name]`: the first of that shape, case kept."""
    for directive in _DIRECTIVE.finditer(written or ""):
        repo = directive[1].replace("\\", "")
        # `owner/..` would leave the directory of whoever makes a path of it.
        if all(part.strip(".") for part in repo.split("/")):
            return repo
    return None


def read_guidance(value: object) -> str | None:
    """The rules for agents that a workspace and its teams have set, as one text in Linear's order."""
    rules = [text(rule.get("body"), GUIDANCE_LIMIT) for rule in records(value)]
    return text("\n\n".join(rule for rule in rules if rule is not None), GUIDANCE_LIMIT)


def issue_message(
    issue: Issue,
    *,
    workspace_id: str,
    repo: str,
    agent_session_id: str | None = None,
    prompt_context: str | None = None,
    guidance: str | None = None,
    prompts: Sequence[Input] = (),
) -> dict[str, Any]:
    """The issue's part of the message to a machine; ids of the row and the machine are added when it is read.

    Optional fields are absent, never null: the published client refuses null.
    """
    message: dict[str, Any] = {
        "workspaceId": workspace_id,
        "repo": repo,
        "linearIssueId": issue.id,
        "linearIdentifier": issue.identifier,
        "title": issue.title,
        "teamId": issue.team_id,
    }
    optional = {
        "url": issue.url,
        "description": issue.description,
        "priority": issue.priority,
        "labels": [label.name for label in issue.labels if label.name] or None,
        "agentSessionId": agent_session_id,
        "promptContext": prompt_context,
        "guidance": guidance,
        "prompts": [said.as_dict() for said in prompts] or None,
    }
    return message | {field: value for field, value in optional.items() if value is not None}
