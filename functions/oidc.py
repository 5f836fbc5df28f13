"""The identity token of Google's scheduler: who called, as signed by the platform."""

from __future__ import annotations

from functools import lru_cache

import jwt

from shared.errors import DatabaseUnavailable, Unauthenticated
from shared.settings import Settings

ISSUERS = ("https://accounts.google.com", "accounts.google.com")


@lru_cache(maxsize=2)
def _keys(url: str) -> jwt.PyJWKClient:
    """Google's signing keys, fetched once per instance and hour: fetching them on every tick would make a tick depend on the network."""
    return jwt.PyJWKClient(url, cache_keys=True, lifespan=3600, timeout=3)


def verify_scheduler_token(token: str, settings: Settings) -> None:
    """Accepts an unexpired token that Google signed for our audience and, where one is named, our scheduler's service account.

    Raises Unauthenticated, with a reason that names the claim that is wrong.
    """
    try:
        key = _keys(settings.scheduler_oidc_jwks_url).get_signing_key_from_jwt(token)
        claims = jwt.decode(
            token,
            key,
            algorithms=["RS256"],
            audience=settings.scheduler_oidc_audience,
            options={"require": ["exp", "iat", "iss", "aud"]},
        )
    except jwt.PyJWKClientConnectionError:
        raise DatabaseUnavailable("the scheduler's signing keys cannot be fetched, try again") from None
    except jwt.PyJWTError as error:
        raise Unauthenticated(
            f"the scheduler's identity token is not valid: {type(error).__name__}"
        ) from None
    if claims["iss"] not in ISSUERS:
        raise Unauthenticated("the identity token's issuer is not Google")
    expected = settings.scheduler_oidc_email
    if expected is not None and (claims.get("email") != expected or claims.get("email_verified") is not True):
        raise Unauthenticated("the identity token belongs to another service account")
