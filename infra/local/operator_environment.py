"""The settings of a running stack in a file, so that the operator's commands need no secret on a command line."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def kept(environment: Mapping[str, str], file: Path) -> Iterator[Path]:
    """Assignments for a shell, readable by this user alone, for as long as the block runs: the port of the next run is another one.

    Args:
        environment: the settings by the variable's name.
        file: replaced if an earlier run was killed and left it.
    """
    file.unlink(missing_ok=True)
    file.touch(mode=0o600)
    file.write_text("".join(f"{name}={shlex.quote(value)}\n" for name, value in environment.items()))
    try:
        yield file
    finally:
        file.unlink(missing_ok=True)
