"""The world in which things die."""

from __future__ import annotations

from pathlib import Path

import pytest
from sqlalchemy import Engine

from infra.local.seed import seed
from shared.settings import Settings
from tests.crash.world import CRON_SECRET, World
from tests.leaks import leaks_in


@pytest.fixture
def world(engine: Engine, settings: Settings, database_url: str, tmp_path: Path):  # type: ignore[no-untyped-def]
    assert settings.bridge_encryption_key is not None
    environment = {
        "DATABASE_URL": database_url,
        "DATABASE_TLS": "off",
        "BRIDGE_ENCRYPTION_KEY": settings.bridge_encryption_key.get_secret_value(),
        "CRON_SECRET": CRON_SECRET,
    }
    made = World(
        engine, seed(engine, settings, tmp_path / "demo.json"), environment, tmp_path / "functions.log"
    )
    yield made
    if made.log.exists():
        assert leaks_in(made.log.read_text()) == []
