"""The type checker refuses what would reopen the window."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

MISUSE = Path(__file__).with_name("misuse.py")
ROOT = MISUSE.parents[2]


def test_every_marked_misuse_and_nothing_else_is_a_type_error() -> None:
    expected = {
        (number, marked.group(1))
        for number, line in enumerate(MISUSE.read_text().splitlines(), start=1)
        if (marked := re.search(r"# error: ([a-z-]+)", line))
    }
    checked = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--no-error-summary", "--hide-error-context", str(MISUSE)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    found = {
        (int(match.group(1)), match.group(2))
        for match in re.finditer(r"misuse\.py:(\d+): error: .*\[([a-z-]+)\]", checked.stdout)
    }
    assert found == expected, checked.stdout + checked.stderr
