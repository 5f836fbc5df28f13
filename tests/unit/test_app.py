"""What an instance holds besides the database: how soon a machine looks again, and who may hear wake-ups."""

from __future__ import annotations

import uuid
from datetime import UTC, datetime, timedelta

import jwt
import pytest

from functions.app import App
from functions.pacing import LONGEST_MS, SHORTEST_MS, Pacing
from shared.db import engine_for
from shared.settings import Settings

ME, OTHER, ORG = (uuid.UUID(int=n) for n in (1, 2, 3))
SECRET = "s" * 32
SUPABASE = {
    "SUPABASE_URL": "https://x.supabase.co/",
    "SUPABASE_ANON_KEY": "anon",
    "SUPABASE_JWT_SECRET": SECRET,
}


def an_app(**variables: str) -> App:
    settings = Settings.from_environment(
        {"DATABASE_URL": "postgresql://u:p@127.0.0.1:9/d", "DATABASE_TLS": "off", **variables}
    )
    return App(settings, engine_for(settings))


def polls(pacing: Pacing, times: int) -> list[int]:
    return [pacing.after_poll(ME, found=False, next_due_ms=None) for _ in range(times)]


def test_a_machine_looks_less_often_while_nothing_waits() -> None:
    assert polls(Pacing(), 7) == [1_000, 2_000, 4_000, 8_000, 16_000, LONGEST_MS, LONGEST_MS]


def test_work_makes_it_look_soon_again() -> None:
    pacing = Pacing()
    polls(pacing, 7)
    assert pacing.after_poll(ME, found=True, next_due_ms=None) == SHORTEST_MS
    assert polls(pacing, 2) == [1_000, 2_000]


def test_machines_do_not_slow_each_other_down() -> None:
    pacing = Pacing()
    polls(pacing, 7)
    assert pacing.after_poll(OTHER, found=False, next_due_ms=None) == SHORTEST_MS


@pytest.mark.parametrize(
    ("due", "hint"), [(12_345, 12_345), (60_000, LONGEST_MS), (0, SHORTEST_MS), (-5, SHORTEST_MS)]
)
def test_a_row_that_becomes_due_is_looked_at_when_it_does(due: int, hint: int) -> None:
    pacing = Pacing()
    polls(pacing, 7)
    assert pacing.after_poll(ME, found=False, next_due_ms=due) == hint


def test_settings_become_the_policy() -> None:
    policy = an_app(DISPATCH_CLAIM_TIMEOUT_SECONDS="7", DISPATCH_MAX_ATTEMPTS="3").policy
    assert (policy.claim_timeout, policy.max_attempts, policy.backoff_base, policy.backoff_cap) == (
        7,
        3,
        60,
        900,
    )
    assert (policy.offline_after, policy.reroute_after) == (90, 300)


def test_without_supabase_there_is_nothing_to_hear() -> None:
    assert an_app().realtime_credentials(ORG, ME) is None


def test_a_machine_may_hear_of_its_own_rows_for_an_hour() -> None:
    told = an_app(**SUPABASE).realtime_credentials(ORG, ME)
    assert told is not None
    claims = jwt.decode(told.pop("jwt"), SECRET, algorithms=["HS256"], options={"require": ["exp"]})
    expires = datetime.fromisoformat(told.pop("expiresAt"))
    assert timedelta(minutes=59) < expires - datetime.now(UTC) <= timedelta(hours=1)
    assert claims.pop("exp") == int(expires.timestamp())
    assert claims == {"sub": str(ME), "role": "authenticated", "orchestrator_id": str(ME), "org_id": str(ORG)}
    assert told == {
        "supabaseUrl": "https://x.supabase.co",
        "anonKey": "anon",
        "channel": f"dispatch:{ME}",
        "table": "dispatch_queue",
    }
