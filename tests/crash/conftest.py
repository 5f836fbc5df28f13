"""A tenant whose Linear workspace, team and machines are complete, so that a webhook can go all the way; and its functions."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import pytest
from sqlalchemy import Engine

from functions.app import App
from infra.local.seed import APP_USER, REPO, TEAM, TEAM_ROUTE
from shared.crypto import KeyRing
from shared.db import OPERATOR, sql, transaction
from shared.ids import new_id
from shared.settings import Settings
from tests.crash.calls import Ask, Call, delivery, in_process
from tests.crash.serving import Functions
from tests.given import Machine, Queued, Tenant, a_machine, a_tenant, work

SECRET = "lin_wh_of-the-crash-tests"
SET_APP_USER = sql("update workspaces set app_user_id = :app_user where org_id = :org_id")


@dataclass(frozen=True)
class Scene:
    """An organization with a workspace, a team's route and two online machines that serve its repository."""

    engine: Engine
    tenant: Tenant
    linear_organization_id: str
    laptop: Machine
    desktop: Machine

    @property
    def machines(self) -> tuple[Machine, Machine]:
        return self.laptop, self.desktop

    def delivery(self) -> Call:
        """Linear's webhook about a new issue of this workspace."""
        return delivery(SECRET, self.linear_organization_id)

    def work(self, machine: Machine | None = None) -> Queued:
        """A session whose row waits for the laptop, or for another machine."""
        return work(self.engine, self.tenant, machine or self.laptop, repo=REPO)


def a_scene(engine: Engine, settings: Settings) -> Scene:
    linear = str(new_id())
    sealed = KeyRing.of(settings).seal(SECRET)
    tenant = a_tenant(engine, linear_organization_id=linear, webhook_secret=sealed)
    with transaction(engine, OPERATOR) as tx:
        tx.run(SET_APP_USER, org_id=tenant.org_id, app_user=APP_USER)
        tx.run(TEAM_ROUTE, org_id=tenant.org_id, workspace_id=tenant.workspace_id, team=TEAM, repo=REPO)
    laptop, desktop = (a_machine(engine, tenant, repos=[REPO], name=name) for name in ("laptop", "desktop"))
    return Scene(engine, tenant, linear, laptop, desktop)


@pytest.fixture
def scene(engine: Engine, settings: Settings) -> Scene:
    return a_scene(engine, settings)


@pytest.fixture
def ask(engine: Engine, settings: Settings) -> Ask:
    """Another instance of the functions, in the test's own process."""
    return in_process(App(settings, engine))


@pytest.fixture
def variables(settings: Settings) -> dict[str, str]:
    """The environment that these settings come from."""
    return environment_of(settings)


def environment_of(settings: Settings) -> dict[str, str]:
    assert settings.bridge_encryption_key is not None
    assert settings.cron_secret is not None
    return {
        "DATABASE_URL": settings.database_url.get_secret_value(),
        "DATABASE_TLS": settings.database_tls,
        "BRIDGE_ENCRYPTION_KEY": settings.bridge_encryption_key.get_secret_value(),
        "CRON_SECRET": settings.cron_secret.get_secret_value(),
    }


class Serve(Protocol):
    def __call__(self, point: str | None = None, **options: Any) -> Functions: ...


@pytest.fixture
def serve(variables: dict[str, str], tmp_path: Path) -> Iterator[Serve]:
    """Starts a server of the functions, which does not outlive the test: `serve("shared.intake:enqueue_dispatch before")`."""
    with ExitStack() as stack:
        made: list[Functions] = []

        def start(point: str | None = None, **options: Any) -> Functions:
            settings = {**variables, **options.pop("settings", {})}
            functions = Functions(settings, fuse=tmp_path / f"fuse-{len(made)}", point=point, **options)
            made.append(stack.enter_context(functions))
            return made[-1]

        yield start
