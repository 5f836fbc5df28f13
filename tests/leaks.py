"""What no log line may ever hold: looked for in the log lines of every test of the suite (see conftest.py)."""

from __future__ import annotations

import re

# Tokens and signatures by their form, the tests' own secrets and the texts of their payloads by what they are.
FORBIDDEN = re.compile(
    r"dp_orch_[A-Za-z0-9_-]{20}"
    r"|lin_(?:wh|api|oauth)_[A-Za-z0-9_-]{8}"
    r"|Bearer [A-Za-z0-9]"
    r"|eyJ[A-Za-z0-9_-]{10,}\.eyJ"
    r"|the-cron-of-the-tests"
    r"|AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8"
    r"|postgresql://[^:\s]+:[^@\s]+@"
    r"|Fix the rounding|Rounding drops a cent|assert sum\(parts\)|never push to main|cover the ¥ case",
    re.IGNORECASE,
)


def leaks_in(output: str) -> list[str]:
    """The log lines in captured output that hold a token, a secret or a part of a payload."""
    lines = (line for line in output.splitlines() if line.startswith('{"severity"'))
    return [line for line in lines if FORBIDDEN.search(line)]
