"""A deployment that is configured wrongly does not start, and says which variable it was without saying a secret."""

from __future__ import annotations

import base64
from pathlib import Path

import pytest
from pydantic import ValidationError

from shared.crypto import KeyRing
from shared.errors import ConfigurationError
from shared.settings import Settings

URL = "postgresql://dispatch:hunter2@db.example:5433/dispatch"
KEY = base64.b64encode(b"k" * 32).decode()


def read(**variables: str) -> Settings:
    return Settings.from_environment({"DATABASE_URL": URL, **variables})


def refusal(**variables: str) -> str:
    with pytest.raises(ConfigurationError) as refused:
        read(**variables)
    return refused.value.message


def test_the_database_is_all_that_must_be_set() -> None:
    settings = read()
    assert settings.database_url.get_secret_value() == URL
    assert (settings.dispatch_claim_timeout_seconds, settings.dispatch_max_attempts) == (1800, 5)


def test_a_missing_variable_is_named() -> None:
    with pytest.raises(ConfigurationError, match=r"^DATABASE_URL is missing$"):
        Settings.from_environment({})


@pytest.mark.parametrize(
    "name",
    [
        "DATABASE_URI",
        "DISPATCH_TIMEOUT",
        "SWEEP_X",
        "WEBHOOK_SECRET",
        "BRIDGE_KEY",
        "SCHEDULER_X",
        "ORCHESTRATOR_X",
    ],
)
def test_a_misspelt_variable_is_named(name: str) -> None:
    assert f"{name} is not a setting" in refusal(**{name: "1"})


def test_variables_of_others_are_none_of_our_business() -> None:
    assert read(PATH="/bin", PORT="8080", K_SERVICE="webhook", SUPABASE_REGION="eu").log_level == "INFO"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("DISPATCH_MAX_ATTEMPTS", "five"),
        ("DISPATCH_MAX_ATTEMPTS", "0"),
        ("DISPATCH_MAX_ATTEMPTS", "-1"),
        ("DISPATCH_MAX_ATTEMPTS", "101"),
        ("DISPATCH_MAX_ATTEMPTS", "2.5"),
        ("DATABASE_POOL_SIZE", "0"),
        ("DATABASE_TLS", "on"),
        ("SWEEP_BATCH_ROWS", "1e9"),
        ("WEBHOOK_MAX_AGE_SECONDS", "nan"),
        ("LOG_LEVEL", "info"),
        ("SCHEDULER_OIDC_JWKS_URL", "http://keys.example"),
    ],
)
def test_a_malformed_value_is_named_and_shown(name: str, value: str) -> None:
    assert f"{name}={value!r}: " in refusal(**{name: value})


@pytest.mark.parametrize("value", ["", "   "])
def test_an_empty_variable_is_not_taken_for_an_unset_one(value: str) -> None:
    assert refusal(CRON_SECRET=value) == "CRON_SECRET is empty: unset it or give it a value"


def test_all_problems_are_told_at_once() -> None:
    told = refusal(DATABASE_TLS="on", SWEEP_BUDGET_SECONDS="0")
    assert "DATABASE_TLS" in told
    assert "SWEEP_BUDGET_SECONDS" in told


@pytest.mark.parametrize(
    "url",
    [
        "mysql://dispatch:hunter2@db/dispatch",
        "db.example",
        "postgresql://db.example/dispatch",
        "postgresql://dispatch:hunter2@/dispatch",
        "postgresql://dispatch:hunter2@db.example",
        "postgresql://dispatch:hunter2@db.example/",
        "postgresql://dispatch:hunter2@db.example:port/dispatch",
        "postgresql://dispatch:hunter2@db.example:99999/dispatch",
        "postgresql://dispatch:hunter2#x@db.example/dispatch",
        "postgresql://dispatch:hunter2/x@db.example/dispatch",
        "postgresql://dispatch:x?hunter2@db.example/dispatch",
        "postgresql://dispatch:x/y?hunter2@db.example/dispatch",
        "postgresql://dispatch:hunter2@db.example/dispatch?host=/socket",
        "postgresql://dispatch:hunter2@[db.example/dispatch",
    ],
)
def test_a_bad_database_url_is_refused_without_its_password(url: str) -> None:
    told = refusal(DATABASE_URL=url)
    assert told.startswith("DATABASE_URL: ")
    assert "hunter2" not in told


def test_the_short_scheme_and_a_missing_port_are_completed() -> None:
    settings = read(DATABASE_URL="postgres://dispatch:p%40ss@db.example/dispatch")
    assert settings.database_url.get_secret_value() == "postgresql://dispatch:p%40ss@db.example:5432/dispatch"


def test_the_sslmode_that_providers_append_must_say_what_database_tls_says() -> None:
    assert read(DATABASE_URL=f"{URL}?sslmode=require").database_url.get_secret_value() == URL
    assert "sslmode contradicts DATABASE_TLS=verify" in refusal(DATABASE_URL=f"{URL}?sslmode=disable")
    assert "sslmode contradicts DATABASE_TLS=off" in refusal(
        DATABASE_URL=f"{URL}?sslmode=require", DATABASE_TLS="off"
    )


def test_each_key_of_the_ring_is_checked_at_the_start() -> None:
    short = base64.b64encode(b"short").decode()
    assert (
        refusal(BRIDGE_ENCRYPTION_KEY=f"{KEY},{short}")
        == "BRIDGE_ENCRYPTION_KEY: key 2 has 5 bytes, AES-256 needs 32"
    )
    told = refusal(BRIDGE_ENCRYPTION_KEY="hunter2!")
    assert told == "BRIDGE_ENCRYPTION_KEY: key 1 is not base64"


def test_a_deployment_without_keys_says_so_where_they_are_needed() -> None:
    with pytest.raises(ConfigurationError, match=r"^BRIDGE_ENCRYPTION_KEY is missing$"):
        KeyRing.of(read())
    assert repr(KeyRing.of(read(BRIDGE_ENCRYPTION_KEY=f"{KEY},{KEY}"))) == "KeyRing(2 keys)"


def test_a_secret_that_can_be_guessed_is_refused() -> None:
    told = refusal(CRON_SECRET="hunter2")
    assert told == "CRON_SECRET: is shorter than 16 characters, which can be guessed"


def test_the_supabase_settings_come_together_or_not_at_all() -> None:
    told = refusal(SUPABASE_URL="https://x.supabase.co", SUPABASE_ANON_KEY="anon")
    assert told.startswith("SUPABASE_JWT_SECRET missing")
    read(SUPABASE_URL="https://x.supabase.co", SUPABASE_ANON_KEY="anon", SUPABASE_JWT_SECRET="s" * 32)


@pytest.mark.parametrize(
    ("variables", "named"),
    [
        (
            {"DISPATCH_BACKOFF_BASE_SECONDS": "100", "DISPATCH_BACKOFF_CAP_SECONDS": "99"},
            "DISPATCH_BACKOFF_CAP_SECONDS",
        ),
        ({"WEBHOOK_DELIVERY_RETENTION_HOURS": "7"}, "WEBHOOK_MAX_AGE_SECONDS"),
        ({"SCHEDULER_OIDC_EMAIL": "cron@example.org"}, "SCHEDULER_OIDC_AUDIENCE"),
        ({"DATABASE_CA_FILE": "/no/such/file"}, "DATABASE_CA_FILE"),
        ({"DATABASE_CA_FILE": __file__, "DATABASE_TLS": "off"}, "DATABASE_CA_FILE"),
    ],
)
def test_settings_that_contradict_each_other_are_named(variables: dict[str, str], named: str) -> None:
    assert named in refusal(**variables)


def test_the_sweep_must_be_able_to_let_somebody_pass() -> None:
    with pytest.raises(ConfigurationError, match="CRON_SECRET or SCHEDULER_OIDC_AUDIENCE"):
        read().require_scheduler()
    read(CRON_SECRET="0123456789abcdef").require_scheduler()
    read(SCHEDULER_OIDC_AUDIENCE="https://sweep.example").require_scheduler()


def test_secrets_do_not_print_and_settings_do_not_change() -> None:
    secrets = {"CRON_SECRET": "hunter2-hunter2-hunter2", "BRIDGE_ENCRYPTION_KEY": KEY}
    settings = read(**secrets)
    printed = repr(settings) + str(settings) + settings.model_dump_json()
    assert not [value for value in ("hunter2", KEY) if value in printed]
    with pytest.raises(ValidationError):
        settings.log_level = "DEBUG"


def test_a_refusal_drags_no_value_along_in_a_traceback() -> None:
    with pytest.raises(ConfigurationError) as refused:
        read(CRON_SECRET="hunter2")
    assert refused.value.__cause__ is None
    assert refused.value.__suppress_context__


def test_every_setting_has_a_description_and_a_unit_where_it_is_a_number() -> None:
    units = ("_seconds", "_hours", "_rows", "_attempts", "_size", "_waiters")
    for name, field in Settings.model_fields.items():
        assert field.description, name
        assert field.annotation is not int or name.endswith(units), name


def test_nothing_else_reads_the_environment() -> None:
    root = Path(__file__).resolve().parents[2]
    readers = [
        str(path.relative_to(root))
        for folder in ("shared", "functions")
        for path in (root / folder).rglob("*.py")
        if "os.environ" in (text := path.read_text()) or "getenv" in text
    ]
    assert readers == ["shared/settings.py"]
