"""Events as Linear sends them, and events that differ from those in one place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

SAMPLES = Path(__file__).parent / "data" / "linear"
US = "d946757b-a673-4404-8c25-c53811a33e4e"
MIRA = "790a654b-d2dd-4af4-8002-b7a2068d753f"
ISSUE = "3e7ce87e-8578-463f-a890-985b1bb9e4c1"
AGENT_SESSION = "0377e9dc-aa12-433a-91b2-11b7e12111b4"
BUG = "bbea6c2c-685a-486f-8087-1ffb6721d53f"
PROJECT = "d2e40d12-70e5-4659-a08e-3b41391658b8"
STUB = "This thread is for an agent session with coder."
ABSENT = object()

CREATED, ASSIGNED, RELEASED, DELEGATED = (
    "01-issue-create-assigned",
    "02-issue-update-assign",
    "03-issue-update-unassign",
    "04-issue-update-delegate-set",
)
LABELLED, MOVED, REMOVED, TRASHED = (
    "05-issue-label-added",
    "06-issue-moved-team",
    "07-issue-removed-trashed",
    "07b-issue-update-trashed",
)
COMMENT, SESSION, PROMPTED, STOPPED = (
    "08-comment-create",
    "09-agent-session-created",
    "10-agent-session-prompted",
    "11-agent-session-prompted-stop",
)
ASSIGNED_NOTICE = "12-app-user-notification-issueAssignedToYou"
UNASSIGNED_NOTICE = "12b-app-user-notification-issueUnassignedFromYou"
ALL = sorted(path.stem for path in SAMPLES.glob("*.json"))


def sample(name: str, **changes: Any) -> dict[str, Any]:
    """A sample event; `data__delegateId=None` changes what lies at that path, `ABSENT` takes it away."""
    event: dict[str, Any] = json.loads((SAMPLES / f"{name}.json").read_bytes())
    for path, value in changes.items():
        *parents, last = path.split("__")
        place = event
        for parent in parents:
            place = place[parent]
        if value is ABSENT:
            del place[last]
        else:
            place[last] = value
    return event


def a(kind: type[Any], decision: object) -> Any:
    """The decision, which is of this kind."""
    assert isinstance(decision, kind), decision
    return decision
