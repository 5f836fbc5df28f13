"""Process groups: an agent and everything that it has started are one group, ended together, and recognised after a restart."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Final

PROC: Final = Path("/proc")
LOOK_AGAIN_SECONDS: Final = 0.05


def birth(pid: int) -> str | None:
    """When that process began, so that a number which was given out again is not taken for it; None when there is none.

    On Linux its start in clock ticks and the boot's id, elsewhere what `ps` says.
    """
    if PROC.is_dir():
        stat = _stat(pid)
        if stat is None or stat[0] == "Z":
            return None
        return f"{_boot()} {stat[19]}"
    found = subprocess.run(  # noqa: S603 - a number of ours
        ["/bin/ps", "-o", "lstart=", "-p", str(pid)], capture_output=True, text=True, check=False
    )
    return found.stdout.strip() or None


def is_alive(group: int) -> bool:
    """Whether any process of the group still runs. The dead that nobody has buried do not count."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    if not PROC.is_dir():
        return True
    return any(
        (stat := _stat(int(entry.name))) is not None and int(stat[2]) == group and stat[0] not in "ZX"
        for entry in PROC.iterdir()
        if entry.name.isdigit()
    )


def is_ours(pid: int, recorded: str | None) -> bool:
    """Whether the group that was started as `pid` is still the one that was recorded.

    While a group has members its number is given to no new process, so a leader that is gone leaves the group ours; a leader with
    another birth means that our group had ended before.
    """
    if recorded is None or not is_alive(pid):
        return False
    current = birth(pid)
    if current is not None:
        return current == recorded
    return not PROC.is_dir() or recorded.split(" ")[0] == _boot()


async def end(group: int, patience: float) -> None:
    """SIGTERM, and SIGKILL for what is left after `patience` seconds. Returns when nobody of the group runs."""
    clock = asyncio.get_running_loop().time
    for how, until in ((signal.SIGTERM, clock() + patience), (signal.SIGKILL, clock() + patience + 5)):
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(group, how)
        while is_alive(group) and clock() < until:  # noqa: ASYNC110 - nobody tells when a group of others is empty
            await asyncio.sleep(LOOK_AGAIN_SECONDS)
        if not is_alive(group):
            return


def _stat(pid: int) -> list[str] | None:
    """`/proc/PID/stat` behind the name, which may contain anything: state, parent, group, session, … start time at 19."""
    try:
        return (PROC / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()
    except (OSError, ValueError):
        return None


def _boot() -> str:
    try:
        return (PROC / "sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return "unknown"
