"""Secrets at rest: AES-256-GCM under a ring of keys, so that a key can be replaced without a moment in which nothing opens."""

from __future__ import annotations

import base64
import binascii
import os
from typing import TYPE_CHECKING, Final, NoReturn, final

from shared.errors import ConfigurationError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    from shared.settings import Settings

KEY_BYTES: Final = 32
IV_BYTES: Final = 12  # what NIST SP 800-38D recommends for GCM, and what the published bridge writes
TAG_BYTES: Final = 16


@final
class KeyRing:
    """One or more AES-256 keys: the first seals, all open.

    To rotate: put the new key in front, seal every stored secret again, then take the old key away.
    """

    __slots__ = ("_keys",)

    def __init__(self, keys: tuple[bytes, ...]) -> None:
        self._keys = keys

    def __repr__(self) -> str:
        return f"KeyRing({len(self._keys)} keys)"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a key ring is not pickled: its keys would be written somewhere")

    @classmethod
    def of(cls, settings: Settings) -> KeyRing:
        """The ring that BRIDGE_ENCRYPTION_KEY holds. Raises ConfigurationError where this deployment was given none."""
        if settings.bridge_encryption_key is None:
            raise ConfigurationError("BRIDGE_ENCRYPTION_KEY is missing")
        return cls.parse(settings.bridge_encryption_key.get_secret_value())

    @classmethod
    def parse(cls, text: str) -> KeyRing:
        """The ring written as comma-separated base64, 32 bytes each.

        Raises ValueError that says which key is wrong by its position, never by its text.
        """
        keys = []
        for position, part in enumerate(text.split(","), start=1):
            try:
                key = base64.b64decode(part.strip(), validate=True)
            except (binascii.Error, ValueError):
                raise ValueError(f"key {position} is not base64") from None
            if len(key) != KEY_BYTES:
                raise ValueError(f"key {position} has {len(key)} bytes, AES-256 needs {KEY_BYTES}")
            keys.append(key)
        return cls(tuple(keys))

    def seal(self, plaintext: str) -> str:
        """Seals `plaintext` as `base64(iv).base64(ciphertext).base64(tag)`, the published bridge's form."""
        iv = os.urandom(IV_BYTES)
        sealed = _cipher(self._keys[0]).encrypt(iv, plaintext.encode(), None)
        parts = (iv, sealed[:-TAG_BYTES], sealed[-TAG_BYTES:])
        return ".".join(base64.b64encode(part).decode() for part in parts)

    def open(self, sealed: str) -> str:
        """Opens what `seal` sealed under any key of the ring.

        Raises ConfigurationError, which tells neither the text nor a key, when the form is wrong or no key fits.
        """
        iv, ciphertext, tag = _parts(sealed)
        for key in self._keys:
            plaintext = _opened(key, iv, ciphertext + tag)
            if plaintext is not None:
                return plaintext.decode()
        raise ConfigurationError(
            "a stored secret was sealed with a key that BRIDGE_ENCRYPTION_KEY does not hold, or was altered"
        )

    def sealed_with_first_key(self, sealed: str) -> bool:
        """Whether `sealed` needs no other key than the first: when that holds for all stored secrets, the others can go."""
        iv, ciphertext, tag = _parts(sealed)
        return _opened(self._keys[0], iv, ciphertext + tag) is not None


def _parts(sealed: str) -> tuple[bytes, bytes, bytes]:
    try:
        iv, ciphertext, tag = (base64.b64decode(part, validate=True) for part in sealed.split("."))
    except (binascii.Error, ValueError):
        raise ConfigurationError("a stored secret is not in the form iv.ciphertext.tag") from None
    if len(iv) != IV_BYTES or len(tag) != TAG_BYTES:
        raise ConfigurationError("a stored secret has an iv or a tag of the wrong length")
    return iv, ciphertext, tag


def _opened(key: bytes, iv: bytes, ciphertext_and_tag: bytes) -> bytes | None:
    from cryptography.exceptions import InvalidTag  # noqa: PLC0415 - 40 ms of import that only the webhook's cold start pays

    try:
        return _cipher(key).decrypt(iv, ciphertext_and_tag, None)
    except InvalidTag:
        return None


def _cipher(key: bytes) -> AESGCM:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM  # noqa: PLC0415 - as above

    return AESGCM(key)
