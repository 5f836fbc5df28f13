"""An agent's group is ended whole and recognised for sure: real processes, and numbers that were given to somebody else."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from orchestrator.processes import PROC, birth, end, is_alive, is_ours

NOBODY = 2**22 + 1  # above what Linux gives out
linux = pytest.mark.skipif(not PROC.is_dir(), reason="what only /proc tells")
Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts a script of /bin/sh in a group of its own and waits for its first line."""
    started: list[subprocess.Popen[str]] = []

    def begin(*command: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            command if len(command) > 1 else ["/bin/sh", "-c", *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        started.append(process)
        return process

    yield begin
    for process in started:
        with process, suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def let_go(process: subprocess.Popen[str]) -> None:
    """Closes its input, which ends a script that reads it, and buries it."""
    assert process.stdin is not None
    process.stdin.close()
    process.wait()


def unburied(process: subprocess.Popen[str]) -> None:
    """Waits until it is dead, and leaves it a zombie."""
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)


def is_running(pid: int) -> bool:
    return birth(pid) is not None


# -- ending -------------------------------------------------------------------------------------------------------------


def test_a_shell_with_a_grandchild_is_ended_whole(start: Start) -> None:
    group = start("sh -c 'sleep 60 & echo $!; wait' & wait")
    grandchild = int(line(group))
    assert is_running(grandchild)
    asyncio.run(end(group.pid, 10))
    assert not is_alive(group.pid)
    assert not is_running(grandchild)
    assert group.wait() == -signal.SIGTERM


def test_what_a_dead_leader_has_left_is_ended(start: Start) -> None:
    group = start("sleep 60 & echo $!; read go")
    grandchild = int(line(group))
    let_go(group)
    assert is_alive(group.pid)
    asyncio.run(end(group.pid, 10))
    assert not is_alive(group.pid)
    assert not is_running(grandchild)


def test_who_does_not_hear_sigterm_is_killed_when_patience_is_over(start: Start) -> None:
    deaf = start("trap '' TERM; echo ready; while :; do sleep 60; done")
    assert line(deaf) == "ready"
    began = time.monotonic()
    asyncio.run(end(deaf.pid, 0.2))
    assert 0.2 <= time.monotonic() - began < 5
    assert deaf.wait() == -signal.SIGKILL


def test_who_needs_a_moment_gets_it(start: Start) -> None:
    tidy = start("trap 'echo tidy; exit 3' TERM; echo ready; while :; do sleep 0.01; done")
    assert line(tidy) == "ready"
    asyncio.run(end(tidy.pid, 10))
    assert tidy.wait() == 3
    assert line(tidy) == "tidy"


def test_without_patience_there_is_no_moment(start: Start) -> None:
    deaf = start("trap '' TERM; echo ready; while :; do sleep 60; done")
    assert line(deaf) == "ready"
    asyncio.run(end(deaf.pid, 0))
    assert deaf.wait() == -signal.SIGKILL


def test_ending_what_has_ended_is_no_error(start: Start) -> None:
    over = start("exit 0")
    over.wait()
    asyncio.run(end(over.pid, 10))
    asyncio.run(end(NOBODY, 10))


def test_a_group_is_ended_and_its_neighbour_is_not(start: Start) -> None:
    group, neighbour = start("echo; sleep 60"), start("echo; sleep 60")
    line(group), line(neighbour)
    asyncio.run(end(group.pid, 10))
    assert is_alive(neighbour.pid)


# -- who lives ----------------------------------------------------------------------------------------------------------


@linux
def test_the_dead_that_nobody_has_buried_do_not_count(start: Start) -> None:
    over = start("exit 0")
    unburied(over)
    os.killpg(over.pid, 0)  # the kernel still knows the group
    assert not is_alive(over.pid)
    assert birth(over.pid) is None


@linux
def test_a_zombie_leader_does_not_hide_who_lives(start: Start) -> None:
    group = start("sleep 60 & echo $!; read go")
    line(group)
    assert group.stdin is not None
    group.stdin.close()
    unburied(group)
    assert is_alive(group.pid)
    asyncio.run(end(group.pid, 10))
    assert not is_alive(group.pid)


def test_a_number_that_names_nobody_lives_not() -> None:
    assert not is_alive(NOBODY)
    assert birth(NOBODY) is None


def test_a_stranger_whose_group_may_not_be_signalled_counts_as_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(group: int, number: int) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "killpg", refuse)
    assert is_alive(NOBODY)


@linux
def test_a_name_with_parentheses_and_spaces_does_not_confuse_the_reading(
    start: Start, tmp_path: Path
) -> None:
    program = tmp_path / "a) Z 0 0 (b"
    shutil.copy("/bin/sh", program)
    odd = start(str(program), "-c", "echo ready; read go")
    assert line(odd) == "ready"
    assert (PROC / str(odd.pid) / "comm").read_text() == "a) Z 0 0 (b\n"
    assert is_alive(odd.pid)
    assert is_ours(odd.pid, birth(odd.pid))


# -- who is ours --------------------------------------------------------------------------------------------------------


def test_the_recorded_process_is_ours_and_its_birth_does_not_change(start: Start) -> None:
    group = start("echo ready; read go")
    recorded = birth(group.pid)
    assert recorded is not None
    assert line(group) == "ready"
    assert birth(group.pid) == recorded
    assert is_ours(group.pid, recorded)


def test_another_process_with_that_number_is_not(start: Start) -> None:
    group = start("read go")
    recorded = birth(group.pid)
    assert recorded is not None
    assert not is_ours(group.pid, recorded + "0")
    assert not is_ours(group.pid, f"another-boot {recorded.rpartition(' ')[2]}")
    assert not is_ours(group.pid, "")
    assert not is_ours(group.pid, None)


def test_a_group_whose_leader_is_dead_is_ours_while_a_grandchild_lives(start: Start) -> None:
    group = start("sleep 60 & echo $!; read go")
    grandchild = int(line(group))
    recorded = birth(group.pid)
    let_go(group)
    assert is_running(grandchild)
    assert is_ours(group.pid, recorded)
    os.kill(grandchild, signal.SIGKILL)
    asyncio.run(end(group.pid, 10))
    assert not is_ours(group.pid, recorded)


@linux
def test_but_not_after_the_machine_was_started_again(start: Start) -> None:
    group = start("sleep 60 & echo $!; read go")
    line(group)
    let_go(group)
    assert is_alive(group.pid)
    assert not is_ours(group.pid, "another-boot 5")


def test_who_has_ended_is_not_ours_any_more(start: Start) -> None:
    group = start("read go")
    recorded = birth(group.pid)
    let_go(group)
    assert not is_ours(group.pid, recorded)


@linux
def test_two_processes_do_not_share_a_birth_with_their_parent(start: Start) -> None:
    group = start("read go")
    mine, its = birth(os.getpid()), birth(group.pid)
    assert mine is not None
    assert its is not None
    assert mine != its
    assert mine.split(" ", maxsplit=1)[0] == its.split(" ", maxsplit=1)[0]  # the boot
