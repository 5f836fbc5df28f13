"""The composition root: what one function instance holds, built once per cold start."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from typing import Any
from uuid import UUID

from sqlalchemy import Engine

from functions import realtime
from functions.listening import Listening
from functions.pacing import Pacing
from shared.crypto import KeyRing
from shared.db import engine_for, listener_for
from shared.dispatch_queue import RetryPolicy
from shared.log import log_from
from shared.settings import Settings


@dataclass(frozen=True)
class App:
    """Settings, the engine, and what follows from them. Safe to share between the threads of an instance."""

    settings: Settings
    engine: Engine
    pacing: Pacing = field(default_factory=Pacing)
    listening: Listening = field(init=False)

    def __post_init__(self) -> None:
        settings = self.settings
        connect = None if settings.database_listen_url is None else partial(listener_for, settings)
        object.__setattr__(self, "listening", Listening(connect, settings.listen_max_waiters))

    @cached_property
    def policy(self) -> RetryPolicy:
        """When a claim counts as abandoned, and what happens then."""
        return RetryPolicy.of(self.settings)

    @cached_property
    def keys(self) -> KeyRing:
        """The keys of the secrets at rest. Raises ConfigurationError where this deployment was given none."""
        return KeyRing.of(self.settings)

    def realtime_credentials(self, org_id: UUID, orchestrator_id: UUID) -> dict[str, Any] | None:
        """What a machine needs to hear wake-ups; None where Supabase is not configured, and the machine polls."""
        return realtime.credentials(self.settings, org_id=org_id, orchestrator_id=orchestrator_id)


@cache
def app() -> App:
    """This instance's App. Opens no connection yet.

    Raises ConfigurationError, which names the variable.
    """
    settings = Settings.from_environment()
    log_from(settings.log_level)
    return App(settings, engine_for(settings))
