"""Secrets at rest open under any key of the ring, and a failure tells nothing about them."""

from __future__ import annotations

import base64
import pickle
import subprocess
import sys

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from shared.crypto import KeyRing
from shared.errors import ConfigurationError

OLD, NEW = b"o" * 32, b"n" * 32


def ring(*keys: bytes) -> KeyRing:
    return KeyRing.parse(" , ".join(base64.b64encode(key).decode() for key in keys))


@pytest.mark.parametrize("text", ["", "lin_wh_secret", "ключ 🔑", "x" * 10_000])
def test_what_is_sealed_opens_again(text: str) -> None:
    assert ring(NEW).open(ring(NEW).seal(text)) == text


def test_the_form_is_the_published_bridges() -> None:
    iv, ciphertext, tag = (base64.b64decode(part) for part in ring(NEW).seal("secret").split("."))
    assert (len(iv), len(ciphertext), len(tag)) == (12, 6, 16)
    assert AESGCM(NEW).decrypt(iv, ciphertext + tag, None) == b"secret"


def test_sealing_twice_gives_two_texts() -> None:
    assert ring(NEW).seal("secret") != ring(NEW).seal("secret")


def test_keys_rotate_without_a_moment_in_which_nothing_opens() -> None:
    before = ring(OLD).seal("secret")
    during = ring(NEW, OLD)
    assert during.open(before) == "secret"
    assert not during.sealed_with_first_key(before)
    after = during.seal("secret")
    assert during.sealed_with_first_key(after)
    assert ring(NEW).open(after) == "secret"


@pytest.mark.parametrize("part", [0, 1, 2])
def test_one_changed_byte_is_noticed(part: int) -> None:
    parts = [bytearray(base64.b64decode(each)) for each in ring(NEW).seal("secret").split(".")]
    parts[part][0] ^= 1
    with pytest.raises(ConfigurationError, match="BRIDGE_ENCRYPTION_KEY"):
        ring(NEW).open(".".join(base64.b64encode(each).decode() for each in parts))


@pytest.mark.parametrize(
    "text", ["", "hunter2", "a.b", "a.b.c.d", "!!.!!.!!", "AAAA.AAAA.AAAA", "ключ.AAAA.AAAA"]
)
def test_what_was_never_sealed_is_refused_without_being_shown(text: str) -> None:
    with pytest.raises(ConfigurationError, match=r"^a stored secret") as refused:
        ring(NEW).open(text)
    assert not text or text not in refused.value.message


def test_an_unknown_key_is_refused_without_key_or_text() -> None:
    with pytest.raises(ConfigurationError) as refused:
        ring(NEW).open(ring(OLD).seal("secret"))
    assert "secret was sealed with a key" in refused.value.message
    assert base64.b64encode(NEW).decode() not in refused.value.message


@pytest.mark.parametrize(
    "text", ["", ",", "hunter2!", base64.b64encode(b"short").decode(), f"{base64.b64encode(NEW).decode()},"]
)
def test_a_malformed_ring_is_refused_by_position(text: str) -> None:
    with pytest.raises(ValueError, match=r"^key \d (is not base64|has \d+ bytes)"):
        KeyRing.parse(text)


def test_a_ring_neither_prints_nor_leaves_the_process() -> None:
    assert repr(ring(NEW, OLD)) == "KeyRing(2 keys)"
    with pytest.raises(TypeError):
        pickle.dumps(ring(NEW))


def test_a_function_that_opens_nothing_does_not_pay_for_the_library() -> None:
    code = "import sys, shared.settings, shared.crypto; sys.exit('cryptography' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
