"""dist/orchestrator.pyz on a machine that has Python and nothing else: no repository, no packages, an empty folder."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from sqlalchemy import Engine

from infra.package.orchestrator import CannotBePacked, build
from tests.contract.programs import Program
from tests.given import a_machine, a_tenant, session_of, work

BARE = ("-I", "-S")
"""Python without the packages that are installed, the current folder and the environment's Python settings."""


@pytest.fixture(scope="module")
def single_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("elsewhere") / "orchestrator.pyz"
    build(target)
    return target


def test_it_takes_and_completes_work(url: str, engine: Engine, tmp_path: Path, single_file: Path) -> None:
    tenant = a_tenant(engine)
    machine = a_machine(engine, tenant, name="bare")
    queued = work(engine, tenant, machine)
    program = Program(
        tmp_path / "home", url, machine.token, "--name", "bare", "--exec", "/bin/cat", command="once"
    )
    program.starts_as(*BARE, str(single_file))
    with program:
        assert program.ends() == 0
    assert session_of(engine, queued).status == "complete"


def test_it_describes_a_service_that_starts_this_very_file(tmp_path: Path, single_file: Path) -> None:
    words = [sys.executable, *BARE, str(single_file), "service", "systemd"]
    said = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    assert f"{single_file} connect --config" in said


def test_the_same_input_gives_the_same_bytes(tmp_path: Path, single_file: Path) -> None:
    again = tmp_path / "again.pyz"
    build(again)
    assert again.read_bytes() == single_file.read_bytes()


def test_a_package_in_another_version_than_the_pinned_one_is_not_packed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pinned = tmp_path / "requirements.txt"
    pinned.write_text("httpx==0.1\n")
    monkeypatch.setattr("infra.package.orchestrator.PINNED", pinned)
    with pytest.raises(CannotBePacked, match=r"httpx is .* here, 0\.1 is pinned"):
        build(tmp_path / "never.pyz")


def test_a_compiled_package_is_not_packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from importlib.metadata import version  # noqa: PLC0415

    pinned = tmp_path / "requirements.txt"
    pinned.write_text(f"pydantic-core=={version('pydantic-core')}\n")
    monkeypatch.setattr("infra.package.orchestrator.PINNED", pinned)
    with pytest.raises(CannotBePacked, match="pydantic-core is compiled"):
        build(tmp_path / "never.pyz")
