"""The door: which bytes are Linear's, and which are too old, from the future, or from nobody."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest

from shared.errors import Unauthenticated
from shared.linear import age_of, envelope, verify

SAMPLES = Path(__file__).parents[1] / "data" / "linear"
MANIFEST = json.loads((SAMPLES / "signatures.manifest").read_text())
SECRET = MANIFEST["secret"]
NAMES = sorted(MANIFEST["payloads"])
NOW_MS = 1_796_030_509_065
HOUR = 3600
EIGHT_HOURS = 8 * HOUR
BODY = '{"type":"Issue","webhookTimestamp":1796030509065,"title":"¥/€ “edge” 🧾"}'.encode()


def signature(body: bytes, secret: str = SECRET) -> str:
    return hmac.new(secret.encode(), body, hashlib.sha256).hexdigest()


@pytest.mark.parametrize("name", NAMES)
def test_the_bytes_of_every_sample_verify_and_their_other_spelling_does_not(name: str) -> None:
    signed = MANIFEST["payloads"][name]
    body = (SAMPLES / f"{name}.json").read_bytes()
    compact = json.dumps(json.loads(body), ensure_ascii=False, separators=(",", ":")).encode()

    assert verify(body, signed["Linear-Signature_of_file_bytes"], [SECRET])
    assert verify(compact, signed["Linear-Signature_of_compact_bytes"], [SECRET])
    assert not verify(compact, signed["Linear-Signature_of_file_bytes"], [SECRET])


@pytest.mark.parametrize("name", NAMES)
def test_every_sample_is_fresh_at_the_time_in_its_header(name: str) -> None:
    now_ms = float(MANIFEST["payloads"][name]["Linear-Timestamp"])
    event = json.loads((SAMPLES / f"{name}.json").read_bytes())

    assert age_of(event, now_ms=now_ms, max_age_seconds=EIGHT_HOURS) == 0


@pytest.mark.parametrize("position", [0, 1, len(BODY) // 2, len(BODY) - 1])
def test_one_changed_byte_breaks_the_signature(position: int) -> None:
    changed = bytearray(BODY)
    changed[position] ^= 1
    assert verify(BODY, signature(BODY), [SECRET])
    assert not verify(bytes(changed), signature(BODY), [SECRET])


@pytest.mark.parametrize(
    "body",
    [b"", b"\xff\xfe not utf-8", b'{"a":', "🧾".encode() * 1000, bytes(5 * 1024 * 1024 + 1)],
    ids=["empty", "invalid utf-8", "invalid json", "emoji", "over 5 MiB"],
)
def test_verification_is_about_bytes_and_not_about_what_they_mean(body: bytes) -> None:
    assert verify(body, signature(body), [SECRET])
    assert not verify(body + b" ", signature(body), [SECRET])


def test_the_base64_of_an_event_is_other_bytes_than_the_event() -> None:
    assert not verify(base64.b64encode(BODY), signature(BODY), [SECRET])
    assert not verify(BODY, base64.b64encode(bytes.fromhex(signature(BODY))).decode(), [SECRET])


def test_the_prefix_is_optional() -> None:
    assert verify(BODY, "sha256=" + signature(BODY), [SECRET])


@pytest.mark.parametrize(
    "given",
    [
        None,
        "",
        signature(BODY)[:-1],
        signature(BODY) + "0",
        signature(BODY).upper(),
        "SHA256=" + signature(BODY),
        "sha256=sha256=" + signature(BODY),
        "sha1=" + signature(BODY),
        " " + signature(BODY),
        signature(BODY) + "\n",
        signature(BODY)[:-1] + "é",
        "0" * 64,
    ],
)
def test_nothing_else_is_a_signature(given: str | None) -> None:
    assert not verify(BODY, given, [SECRET])


def test_the_old_secret_is_good_while_a_rotation_is_under_way_and_not_after() -> None:
    old = signature(BODY, "old secret")
    assert verify(BODY, old, ["new secret", "old secret"])
    assert verify(BODY, signature(BODY, "new secret"), ["new secret", "old secret"])
    assert not verify(BODY, old, ["new secret"])


def test_another_organizations_secret_does_not_verify() -> None:
    assert not verify(BODY, signature(BODY, "their secret"), [SECRET])


def test_without_a_secret_nothing_verifies_not_even_what_an_empty_one_signed() -> None:
    assert not verify(BODY, signature(BODY), [])
    assert not verify(BODY, signature(BODY, ""), [""])


@pytest.mark.parametrize(
    "sent",
    [
        None,
        "1796030509065",
        True,
        False,
        float("nan"),
        float("inf"),
        float("-inf"),
        0,
        -NOW_MS,
        NOW_MS // 1000,  # epoch seconds
        NOW_MS * 1000,  # epoch microseconds
        10**400,
        [NOW_MS],
        {"ms": NOW_MS},
    ],
)
def test_a_timestamp_that_is_not_epoch_milliseconds_is_refused_however_much_age_is_allowed(
    sent: object,
) -> None:
    with pytest.raises(Unauthenticated):
        age_of({"webhookTimestamp": sent}, now_ms=NOW_MS, max_age_seconds=10**12)


@pytest.mark.parametrize("event", [{}, None, [], "text", 7, [{"webhookTimestamp": NOW_MS}]])
def test_an_event_without_a_timestamp_is_refused(event: object) -> None:
    with pytest.raises(Unauthenticated):
        age_of(event, now_ms=NOW_MS, max_age_seconds=10**12)


@pytest.mark.parametrize("age", [-60, -59, 0, 59, 60, 61, 7 * HOUR, EIGHT_HOURS])
def test_an_age_within_the_bounds_is_returned_in_seconds(age: int) -> None:
    event = {"webhookTimestamp": NOW_MS - age * 1000}
    assert age_of(event, now_ms=NOW_MS, max_age_seconds=EIGHT_HOURS) == age


@pytest.mark.parametrize("age", [-61, -HOUR, EIGHT_HOURS + 1, 9 * HOUR])
def test_an_age_outside_the_bounds_is_refused(age: int) -> None:
    with pytest.raises(Unauthenticated):
        age_of({"webhookTimestamp": NOW_MS - age * 1000}, now_ms=NOW_MS, max_age_seconds=EIGHT_HOURS)


def test_fractions_of_a_millisecond_are_numbers_too() -> None:
    assert age_of({"webhookTimestamp": NOW_MS - 500.0}, now_ms=NOW_MS, max_age_seconds=60) == 0.5


def test_the_envelope_names_tenant_agent_and_time() -> None:
    event = json.loads((SAMPLES / "09-agent-session-created.json").read_bytes())
    outside = envelope(event)

    assert (outside.type, outside.action) == ("AgentSessionEvent", "created")
    assert outside.linear_organization_id == "9d62b5b1-b138-49e2-882f-8c502d869d12"
    assert outside.app_user_id == "d946757b-a673-4404-8c25-c53811a33e4e"
    assert outside.event_time == datetime(2026, 11, 30, 9, 21, 48, 655_000, UTC)


@pytest.mark.parametrize(
    "created_at", [None, 7, "", "yesterday", "0001-01-01T00:00:00+14:00", ["2026-11-30T09:00:00Z"]]
)
def test_an_event_without_a_readable_date_happened_when_it_was_signed(created_at: object) -> None:
    event = {"createdAt": created_at, "webhookTimestamp": NOW_MS}
    assert envelope(event).event_time == datetime.fromtimestamp(NOW_MS / 1000, UTC)


def test_a_date_without_a_zone_is_utc_and_one_with_a_zone_is_turned_into_it() -> None:
    assert envelope({"createdAt": "2026-11-30T09:00:00"}).event_time == datetime(2026, 11, 30, 9, tzinfo=UTC)
    assert envelope({"createdAt": "2026-11-30T09:00:00+02:00"}).event_time == datetime(
        2026, 11, 30, 7, tzinfo=UTC
    )


@pytest.mark.parametrize(
    "event",
    [None, [], "text", 7, {}, {"type": 1, "action": None, "organizationId": {}, "createdAt": 10**400}],
)
def test_the_envelope_of_anything_else_is_blank_and_overrules_nothing(event: object) -> None:
    outside = envelope(event)
    assert outside == ("unknown", "unknown", None, None, datetime(1970, 1, 1, tzinfo=UTC))


def test_the_door_costs_the_cold_start_no_database_and_no_model_library() -> None:
    heavy = "{'sqlalchemy', 'pydantic', 'pg8000', 'httpx', 'cryptography'}"
    program = (
        "import sys, shared.linear, shared.linear_events; "
        f"sys.exit(' '.join({heavy} & set(sys.modules)) or 0)"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=root, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
