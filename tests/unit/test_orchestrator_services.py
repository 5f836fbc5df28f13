"""What `orchestrator service` prints is what systemd and launchd read, whatever the folders are called."""

from __future__ import annotations

import plistlib
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from orchestrator.__main__ import main
from orchestrator.services import DESCRIPTIONS, LABEL, launchd, systemd

ANALYZE = shutil.which("systemd-analyze")
VARIABLES = {
    "HOME": "/home/ann",
    "PATH": "/usr/bin:/opt/a b/bin",
    "ORCHESTRATOR_TOKEN": "hunter2-hunter2-hunter2",
}
ODD = [
    "plain",
    "with space",
    "100%d",
    "$HOME",
    "${HOME} and $x",
    "it's",
    'say "hi"',
    "back\\slash",
    "<&>",
    "ü",
]


def settings(unit: str) -> dict[str, str]:
    return dict(line.split("=", 1) for line in unit.splitlines() if re.match(r"[A-Z]\w+=", line))


def a_program(folder: Path) -> list[str]:
    """An interpreter that can be started, and a single file beside it."""
    folder.mkdir()
    shutil.copy("/bin/true", folder / "python")
    return [str(folder / "python"), str(folder / "orchestrator.pyz")]


@pytest.mark.skipif(ANALYZE is None, reason="asks systemd itself")
@pytest.mark.parametrize("name", ODD)
def test_systemd_reads_the_unit_without_a_complaint(name: str, tmp_path: Path) -> None:
    program = a_program(tmp_path / name)
    if set(name) & {'"', "'", "\\"}:  # systemd starts no program whose path has these, however it is written
        program[0] = "/bin/true"
    unit = tmp_path / "dispatch-orchestrator.service"
    unit.write_text(systemd(program, tmp_path / name / "orchestrator.toml", VARIABLES))
    said = subprocess.run(
        [str(ANALYZE), "verify", "--man=no", str(unit)], capture_output=True, text=True, check=False
    )
    assert (said.returncode, said.stderr) == (0, "")


@pytest.mark.parametrize("name", ODD)
def test_systemd_gets_each_word_as_it_was(name: str) -> None:
    program = ["/usr/bin/python3", f"/opt/{name}/orchestrator.pyz"]
    line = settings(systemd(program, Path(f"/etc/{name}.toml"), VARIABLES))["ExecStart"]
    # Where systemd's words differ from a shell's: a percent sign and a dollar stand for themselves when they are doubled.
    assert not re.search(r"(?<!%)%(%%)*(?!%)", line)
    assert not re.search(r"(?<!\$)\$(\$\$)*(?!\$)", line)
    words = [word.replace("%%", "%").replace("$$", "$") for word in shlex.split(line)]
    assert words == [*program, "connect", "--config", f"/etc/{name}.toml"]


def test_a_dollar_is_doubled_only_where_systemd_replaces_variables() -> None:
    unit = settings(systemd(["/opt/$a/python", "/opt/$b%/x.pyz"], Path("/$c.toml"), {"PATH": "/$d/%e f"}))
    assert unit["ExecStart"] == "/opt/$a/python /opt/$$b%%/x.pyz connect --config /$$c.toml"
    assert unit["WorkingDirectory"] == "/opt/$b%%"
    assert unit["Environment"] == '"PATH=/$d/%%e f"'


def test_a_unit_that_cannot_work_is_not_started_again_and_agents_do_not_hear_the_end_first() -> None:
    unit = settings(systemd(["python", "-m", "orchestrator"], Path("/c.toml"), VARIABLES))
    assert (unit["Restart"], unit["RestartPreventExitStatus"], unit["KillMode"]) == ("always", "2 3", "mixed")


@pytest.mark.parametrize("name", ODD)
def test_launchd_gets_each_word_as_it_was(name: str) -> None:
    program = ["/usr/bin/python3", f"/opt/{name}/orchestrator.pyz"]
    variables = {"HOME": f"/Users/{name}", "PATH": f"/{name}/bin"}
    found: dict[str, Any] = plistlib.loads(launchd(program, Path(f"/{name}.toml"), variables).encode())
    assert found["Label"] == LABEL
    assert found["ProgramArguments"] == [*program, "connect", "--config", f"/{name}.toml"]
    assert found["WorkingDirectory"] == f"/opt/{name}"
    assert found["EnvironmentVariables"] == {"PATH": f"/{name}/bin"}
    log = f"/Users/{name}/Library/Logs/dispatch-orchestrator.log"
    assert found["StandardOutPath"] == found["StandardErrorPath"] == log
    assert found["KeepAlive"] == {"SuccessfulExit": False}


@pytest.mark.parametrize("kind", DESCRIPTIONS)
def test_a_module_is_started_where_it_lies(kind: str) -> None:
    found = DESCRIPTIONS[kind]([sys.executable, "-m", "orchestrator"], Path("/c.toml"), VARIABLES)
    assert str(Path(__file__).resolve().parents[2]) in found


@pytest.mark.parametrize("kind", DESCRIPTIONS)
def test_the_description_names_the_file_and_holds_no_token(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('token = "hunter2-hunter2-hunter2"\n')
    monkeypatch.setenv("ORCHESTRATOR_TOKEN", "hunter2-hunter2-hunter2")
    assert main(["service", kind, "--config", str(file)]) == 0
    said = capsys.readouterr()
    assert str(file) in said.out
    assert "hunter2" not in said.out + said.err


@pytest.mark.parametrize("kind", DESCRIPTIONS)
def test_a_relative_file_is_named_from_the_root(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    main(["service", kind, "--config", "mine.toml"])
    assert str(tmp_path / "mine.toml") in capsys.readouterr().out
