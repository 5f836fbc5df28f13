"""The suite's own guard against leaks finds what it has to find."""

from __future__ import annotations

import base64

import pytest

from shared.ids import new_token
from tests.leaks import leaks_in

KEY_OF_THE_TESTS = base64.b64encode(bytes(range(32))).decode()


@pytest.mark.parametrize(
    "secret",
    [
        new_token(),
        f"Bearer {new_token()}",
        "lin_wh_invented_secret_for_tests",
        "the-cron-of-the-tests",
        KEY_OF_THE_TESTS,
        "postgresql://postgres:hunter2@127.0.0.1:5432/dispatch",
        '"title": "Fix the rounding"',
    ],
    ids=[
        "token",
        "header",
        "webhook secret",
        "cron secret",
        "encryption key",
        "database password",
        "payload",
    ],
)
def test_a_log_line_with_a_secret_is_found(secret: str) -> None:
    line = f'{{"severity": "INFO", "message": "x {secret}"}}'
    assert leaks_in(f"noise\n{line}\n") == [line]


def test_what_is_no_log_line_is_not_looked_at() -> None:
    assert leaks_in(f"token, shown once: {new_token()}") == []


def test_an_ordinary_log_line_passes() -> None:
    assert (
        leaks_in('{"severity": "INFO", "message": "answered", "route": "/api/dispatch/poll", "status": 200}')
        == []
    )
