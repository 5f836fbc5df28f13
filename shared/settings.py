"""Every setting there is: the only place that reads the environment.

The attribute is the variable's name in lower case. `docs/configuration.md` is generated from this model.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self
from urllib.parse import parse_qsl, urlsplit

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    SecretStr,
    ValidationError,
    ValidationInfo,
    model_validator,
)

from shared.crypto import KeyRing
from shared.errors import ConfigurationError

OWN_PREFIXES = ("BRIDGE_", "DATABASE_", "DISPATCH_", "ORCHESTRATOR_", "SCHEDULER_", "SWEEP_", "WEBHOOK_")
"""A variable that begins so and is not a setting is a misspelling, and is refused."""

HOUR = 3600
DAY = 24 * HOUR


def _database_url(secret: SecretStr, others: ValidationInfo) -> SecretStr:
    """Normalised to `postgresql://user:password@host:port/database`, without parameters."""
    encode = "a special character in the user or the password must be percent-encoded"
    try:
        url = urlsplit(secret.get_secret_value().strip())
        port = url.port
    except ValueError:
        raise ValueError(f"is not a URL; {encode}") from None
    if url.scheme not in {"postgresql", "postgres"}:
        raise ValueError("must begin with postgresql:// or postgres://")
    if not url.username or not url.hostname:
        raise ValueError("must name a user and a host: postgresql://user:password@host:port/database")
    parameters = dict(parse_qsl(url.query, keep_blank_values=True))
    if (
        url.fragment
        or not re.fullmatch(r"/[^/@]+", url.path)
        or not all(re.fullmatch("[a-z_]+", name) for name in parameters)
    ):
        raise ValueError(f"must end in one database name; {encode}")
    # Providers append sslmode to the URLs that they show. It may stay where it says what DATABASE_TLS says.
    sslmode, tls = parameters.pop("sslmode", None), others.data.get("database_tls")
    if parameters:
        raise ValueError(f"has parameters that are not supported: {', '.join(sorted(parameters))}")
    if sslmode is not None and tls is not None and (sslmode == "disable") != (tls == "off"):
        raise ValueError(f"its sslmode contradicts DATABASE_TLS={tls}")
    return SecretStr(
        f"postgresql://{url.netloc if port is not None else url.netloc.removesuffix(':') + ':5432'}{url.path}"
    )


def _key_ring(secret: SecretStr) -> SecretStr:
    KeyRing.parse(secret.get_secret_value())
    return secret


def _long_enough(secret: SecretStr) -> SecretStr:
    if len(secret.get_secret_value()) < 16:
        raise ValueError("is shorter than 16 characters, which can be guessed")
    return secret


def _https(url: str) -> str:
    """Plain http only to this machine, where there is nobody in between."""
    parts = urlsplit(url)
    if not parts.hostname or not (
        parts.scheme == "https" or (parts.scheme == "http" and parts.hostname in {"localhost", "127.0.0.1"})
    ):
        raise ValueError("must be an https URL")
    return url.rstrip("/")


class Settings(BaseModel):
    """What a deployment can decide. Frozen; secrets do not print."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    database_tls: Literal["verify", "off"] = Field(
        "verify",
        description="`verify` checks the server's certificate and name; `off` is for a database on the same machine or behind a "
        "proxy that encrypts. There is nothing in between: an unverified connection protects nobody.",
    )
    database_url: Annotated[SecretStr, AfterValidator(_database_url)] = Field(
        description="The Postgres to use, `postgresql://user:password@host:port/database`; percent-encode special characters."
    )
    database_listen_url: Annotated[SecretStr, AfterValidator(_database_url)] | None = Field(
        None,
        description="The same database by a direct connection, not through a pooler. With it, and after `listen on`, a poll may wait and "
        "is answered as soon as a row is committed. One connection per function instance.",
    )
    listen_max_waiters: int = Field(
        4,
        ge=1,
        le=1000,
        description="How many requests of one instance may wait at once; others are answered at once. Each holds a thread: the instance "
        "needs more of those.",
    )
    database_ca_file: str | None = Field(
        None,
        description="Path of the certificate authority's PEM file, where the system's own do not vouch for the server.",
    )
    database_pool_size: int = Field(
        4,
        ge=1,
        le=100,
        description="Connections per function instance: as many as requests run in it at once.",
    )
    database_connect_timeout_seconds: int = Field(
        3,
        ge=1,
        le=60,
        description="How long to wait for a connection before answering 503. Linear gives up after 5 s.",
    )
    bridge_encryption_key: Annotated[SecretStr, AfterValidator(_key_ring)] | None = Field(
        None,
        description="Keys of the secrets at rest: base64 of 32 bytes, several separated by commas. The first encrypts, all decrypt. "
        "Only the webhook and the operator's commands need it.",
    )
    cron_secret: Annotated[SecretStr, AfterValidator(_long_enough)] | None = Field(
        None, description="The bearer token that a cron sends to the sweep; at least 16 characters."
    )
    scheduler_oidc_audience: str | None = Field(
        None,
        description="The audience that Google's scheduler puts into its identity token: the sweep's URL.",
    )
    scheduler_oidc_email: str | None = Field(
        None,
        description="The scheduler's service account; without it any Google identity with the right audience may sweep.",
    )
    scheduler_oidc_jwks_url: Annotated[str, AfterValidator(_https)] = Field(
        "https://www.googleapis.com/oauth2/v3/certs",
        description="Where the keys are published that sign those identity tokens.",
    )
    dispatch_claim_timeout_seconds: int = Field(
        1800, ge=1, le=7 * DAY, description="A claim that was not renewed for this long counts as abandoned."
    )
    dispatch_max_attempts: int = Field(
        5, ge=1, le=100, description="After this many failed attempts a row is dropped and its session fails."
    )
    dispatch_backoff_base_seconds: int = Field(
        60,
        ge=1,
        le=HOUR,
        description="Attempt n waits n² times this long before the next one, up to the cap.",
    )
    dispatch_backoff_cap_seconds: int = Field(
        900, ge=1, le=DAY, description="The longest wait between two attempts."
    )
    dispatch_reroute_after_seconds: int = Field(
        300,
        ge=1,
        le=7 * DAY,
        description="Work for a machine that has been offline for this long goes to another one.",
    )
    orchestrator_offline_after_seconds: int = Field(
        90,
        ge=1,
        le=DAY,
        description="A machine without a heartbeat for this long is offline; machines send one every 30 s.",
    )
    webhook_delivery_retention_hours: int = Field(
        72,
        ge=1,
        le=24 * 90,
        description="How long deliveries are remembered, so that a repeated one starts nothing.",
    )
    webhook_max_age_seconds: int = Field(
        28_800,
        ge=60,
        le=7 * DAY,
        description="Deliveries signed longer ago than this are refused. Linear retries for about 7 hours.",
    )
    sweep_budget_seconds: int = Field(
        50,
        ge=1,
        le=840,
        description="The sweep begins no new batch after this; below the function's deadline and the cron's interval.",
    )
    sweep_batch_rows: int = Field(
        500, ge=1, le=10_000, description="How many rows one transaction of the sweep changes at most."
    )
    supabase_url: Annotated[str, AfterValidator(_https)] | None = Field(
        None,
        description="Realtime wake-ups, optional: the project's URL. All three SUPABASE_ settings or none.",
    )
    supabase_anon_key: SecretStr | None = Field(
        None, description="Realtime wake-ups: the project's public (anon) key."
    )
    supabase_jwt_secret: Annotated[SecretStr, AfterValidator(_long_enough)] | None = Field(
        None, description="Realtime wake-ups: the secret that signs the machines' short-lived tokens."
    )
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = Field(
        "INFO", description="The lowest severity that is written."
    )

    @model_validator(mode="after")
    def _agree(self) -> Self:
        """What no single variable can show. Each message names the variables itself."""
        if self.database_ca_file is not None and self.database_tls == "off":
            raise ValueError("DATABASE_CA_FILE is set although DATABASE_TLS is off")
        if self.database_ca_file is not None and not os.access(self.database_ca_file, os.R_OK):
            raise ValueError("DATABASE_CA_FILE names a file that cannot be read")
        if self.scheduler_oidc_email is not None and self.scheduler_oidc_audience is None:
            raise ValueError("SCHEDULER_OIDC_EMAIL needs SCHEDULER_OIDC_AUDIENCE")
        if self.dispatch_backoff_cap_seconds < self.dispatch_backoff_base_seconds:
            raise ValueError("DISPATCH_BACKOFF_CAP_SECONDS is below DISPATCH_BACKOFF_BASE_SECONDS")
        if self.webhook_delivery_retention_hours * HOUR < self.webhook_max_age_seconds:
            raise ValueError(
                "WEBHOOK_DELIVERY_RETENTION_HOURS is shorter than WEBHOOK_MAX_AGE_SECONDS: a replayed delivery would start work again"
            )
        supabase = ("supabase_url", "supabase_anon_key", "supabase_jwt_secret")
        missing = [name.upper() for name in supabase if getattr(self, name) is None]
        if missing and len(missing) < len(supabase):
            raise ValueError(
                f"{', '.join(missing)} missing: the three SUPABASE_ settings are set together or not at all"
            )
        return self

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> Settings:
        """Reads the settings.

        Raises ConfigurationError that names every unknown, missing or malformed variable, never the value of a secret one.
        """
        known = {name.upper(): name for name in cls.model_fields}
        unknown = sorted(name for name in environ if name.startswith(OWN_PREFIXES) and name not in known)
        empty = sorted(name for name in known if name in environ and not environ[name].strip())
        if unknown or empty:
            problems = [f"{name} is not a setting" for name in unknown]
            raise ConfigurationError(
                "; ".join(problems + [f"{name} is empty: unset it or give it a value" for name in empty])
            )
        try:
            return cls.model_validate(
                {field: environ[name] for name, field in known.items() if name in environ}
            )
        except ValidationError as error:
            # `from None`: the chained error would carry the values into every traceback.
            raise ConfigurationError(_explanation(error, environ)) from None

    def require_scheduler(self) -> None:
        """Raises ConfigurationError where the sweep could let nobody pass."""
        if self.cron_secret is None and self.scheduler_oidc_audience is None:
            raise ConfigurationError("CRON_SECRET or SCHEDULER_OIDC_AUDIENCE is missing")


def _explanation(error: ValidationError, environ: Mapping[str, str]) -> str:
    return "; ".join(
        _problem(each, environ) for each in error.errors(include_url=False, include_context=False)
    )


def _problem(error: Any, environ: Mapping[str, str]) -> str:
    reason = str(error["msg"]).removeprefix("Value error, ")
    if not error["loc"]:
        return reason
    field = str(error["loc"][0])
    name = field.upper()
    if error["type"] == "missing":
        return f"{name} is missing"
    is_secret = "SecretStr" in str(Settings.model_fields[field].annotation)
    return f"{name}: {reason}" if is_secret else f"{name}={environ[name][:64]!r}: {reason}"
