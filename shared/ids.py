"""Identifiers: UUIDs on every row, opaque bearer tokens for machines."""

from __future__ import annotations

import hashlib
import os
import secrets
import time
import uuid

from shared.errors import NotFound

TOKEN_PREFIX = "dp_orch_"  # noqa: S105 - the part of every token that is no secret


def new_id() -> uuid.UUID:
    """A version 7 UUID (RFC 9562): rows made together land side by side in every index.

    The millisecond in front only improves locality; lists that show "newest first" lean on it, and no decision does.
    """
    raw = bytearray(int(time.time() * 1000).to_bytes(6, "big") + os.urandom(10))
    raw[6] = 0x70 | raw[6] & 0x0F
    raw[8] = 0x80 | raw[8] & 0x3F
    return uuid.UUID(bytes=bytes(raw))


def parse_id(text: str, what: str = "row") -> uuid.UUID:
    """The UUID written in `text`.

    Raises NotFound for anything else: an id that cannot exist is answered like one that does not.
    """
    try:
        return uuid.UUID(text)
    except (ValueError, AttributeError):
        raise NotFound(f"no such {what}: {text[:64]!r}") from None


def new_token() -> str:
    """A fresh machine token, `dp_orch_` and 32 random bytes in base64url."""
    return TOKEN_PREFIX + secrets.token_urlsafe(32)


def token_hash(token: str) -> str:
    """SHA-256 of the token in hex; the only form in which a token is stored.

    No salt and no slow hash: the token has 256 random bits, so there is nothing to guess.
    """
    return hashlib.sha256(token.encode()).hexdigest()
