"""What every command works with, and how it finds what its words name."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, NoReturn, TypeVar
from uuid import UUID

from sqlalchemy import Engine

from infra.admin import views
from infra.admin.output import Printer, counted, duration
from shared import session_history
from shared.db import Tx
from shared.errors import Conflict, InvalidRequest, NotFound
from shared.session_history import Listed, Session
from shared.settings import Settings

Named = TypeVar("Named", views.Organization, views.Workspace, views.Machine)


CANDIDATES: Final = 20  # as many as are named when it could be several


class Meant(NamedTuple):
    """Which of an issue's sessions a command is about, e.g. `what="open session"`."""

    what: str
    is_this: Callable[[Listed], bool]


@dataclass(frozen=True)
class Console:
    """One command under way: its words (`options`), the deployment's settings, the database, and where its result goes."""

    options: argparse.Namespace
    settings: Settings
    engine: Engine
    printer: Printer

    def show_list(self, rows: Sequence[Any], columns: Mapping[str, str], *, nothing: str) -> None:
        """A list that `--limit` has bounded; says so when it may have cut it."""
        self.printer.rows(rows, columns, nothing=nothing)
        if len(rows) == self.options.limit:
            self.printer.hint(f"shown: {counted(len(rows), 'row')}; --limit shows more")

    def organization(self, tx: Tx) -> UUID:
        """The organization that `--org` names by name or id; the only one where it is not given.

        Raises NotFound (lists those that exist), InvalidRequest when there are several and none is named.
        """
        return _one_of(views.organizations(tx, limit=1000), self.options.org, "organization", "--org").id

    def workspace(self, tx: Tx, org_id: UUID, wanted: str | None) -> views.Workspace:
        """A workspace by name, id or Linear's id; the only one where none is named. Raises as `organization`."""
        known = views.workspaces(tx, org_id=org_id, limit=1000)
        return _one_of(known, wanted, "workspace", "--workspace")

    def machine(self, tx: Tx, org_id: UUID, wanted: str) -> views.Machine:
        """A machine by name or id. Raises NotFound, which lists those that exist."""
        known = views.machines(
            tx, org_id=org_id, limit=1000, offline_after=self.settings.orchestrator_offline_after_seconds
        )
        return _one_of(known, wanted, "orchestrator", "--machine")

    def session(self, tx: Tx, wanted: str, *, meant: Meant | None = None) -> Session:
        """A session by its id, of whichever organization unless `--org` names one; or one of an issue by the issue's identifier.

        Args:
            meant: which of an issue's sessions the command is about; None: the newest.

        Raises NotFound (names the newest that exist), Conflict that lists the sessions when it could be several.
        """
        session_id = _uuid(wanted)
        org_id = self._organization_of(tx, session_id)
        if session_id is None:
            session_id = _one_of_its_sessions(tx, org_id, wanted, meant)
        session = session_id and session_history.get_session(tx, org_id=org_id, session_id=session_id)
        if not session:
            newest = session_history.listed(tx, org_id=org_id, limit=5)
            _nothing(
                "session",
                wanted,
                [each.linear_identifier for each in newest],
                introduction="the newest are",
                none="this organization has none",
            )
        return session

    def _organization_of(self, tx: Tx, session_id: UUID | None) -> UUID:
        if session_id is not None and self.options.org is None:
            owners = views.organizations_of_session(tx, session_id=session_id)
            if len(owners) == 1:
                return owners[0]
        return self.organization(tx)


def _one_of_its_sessions(tx: Tx, org_id: UUID, identifier: str, meant: Meant | None) -> UUID | None:
    known = session_history.listed(tx, org_id=org_id, identifier=identifier, limit=1000)
    if meant is None:
        rows = [
            session_history.get_session(tx, org_id=org_id, session_id=each.id) for each in known[:CANDIDATES]
        ]
        if len({row.workspace_id for row in rows if row is not None}) > 1:
            raise Conflict(
                f"several workspaces have an issue {identifier}; name the session: {_listed(known)}"
            )
        return known[0].id if known else None
    found = [each for each in known if meant.is_this(each)] or known
    if len(found) > 1:
        what = f"{'no' if found is known else 'more than one'} {meant.what}"
        raise Conflict(f"{identifier} has {what}; name the session: {_listed(found)}")
    return found[0].id if found else None


def _listed(sessions: Sequence[Listed]) -> str:
    some = [f"{each.id} ({each.status}, {duration(each.age_seconds)} old)" for each in sessions[:CANDIDATES]]
    return ", ".join(some) + (" and older ones" if len(sessions) > CANDIDATES else "")


def _one_of(known: Sequence[Named], wanted: str | None, kind: str, option: str) -> Named:
    names = [each.name for each in known]
    if wanted is None:
        if len(known) == 1:
            return known[0]
        if not known:
            raise NotFound(f"there is no {kind} yet")
        raise InvalidRequest(
            f"there are several {kind}s, name one with {option}: {', '.join(names)}", field=option
        )
    wanted_id = _uuid(wanted)
    found = [each for each in known if wanted in each.names() or each.id == wanted_id]
    if len(found) > 1:
        raise Conflict(
            f'several {kind}s are called "{wanted}"; give the id: {", ".join(str(each.id) for each in found)}'
        )
    if not found:
        _nothing(kind, wanted, names)
    return found[0]


def _nothing(
    kind: str,
    wanted: str,
    known: Iterable[str],
    *,
    introduction: str = "there are",
    none: str = "there is none",
) -> NoReturn:
    listed = ", ".join(dict.fromkeys(known))
    rest = f"{introduction}: {listed}" if listed else none
    raise NotFound(f'no {kind} "{wanted}"; {rest}')


def _uuid(text: str) -> UUID | None:
    try:
        return UUID(text)
    except ValueError:
        return None


def names_of(tx: Tx, org_id: UUID) -> dict[Any, str]:
    """The machines' names by id; a removed machine has none."""
    return {row.id: row.name for row in views.machine_names(tx, org_id=org_id)}
