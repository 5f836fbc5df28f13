"""Descriptions of a service that runs `connect` when the machine is up: systemd's and launchd's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final
from xml.sax.saxutils import escape

LABEL: Final = "com.devpilot.dispatch.orchestrator"


def systemd(program: Sequence[str], config: Path, variables: Mapping[str, str]) -> str:
    """A user's unit: `~/.config/systemd/user/dispatch-orchestrator.service`."""
    words = (*program[1:], "connect", "--config", str(config))
    command = " ".join([_quoted(program[0], dollar="$"), *map(_quoted, words)])
    return f"""# Save as ~/.config/systemd/user/dispatch-orchestrator.service, then:
#   systemctl --user daemon-reload && systemctl --user enable --now dispatch-orchestrator
#   loginctl enable-linger        # so that it runs while nobody is logged in
[Unit]
Description=DevPilot dispatch orchestrator
Wants=network-online.target
After=network-online.target

[Service]
ExecStart={command}
WorkingDirectory={_folder(program).replace("%", "%%")}
Environment={_quoted("PATH=" + variables.get("PATH", "/usr/local/bin:/usr/bin:/bin"), dollar="$")}
Restart=always
RestartSec=5
# The configuration or the token is wrong: starting again would not mend it.
RestartPreventExitStatus=2 3
# Only the orchestrator hears SIGTERM: it decides how long its agents may go on (grace), and releases what is not done.
KillMode=mixed
TimeoutStopSec=120

[Install]
WantedBy=default.target
"""


def launchd(program: Sequence[str], config: Path, variables: Mapping[str, str]) -> str:
    """A user's agent: `~/Library/LaunchAgents/com.devpilot.dispatch.orchestrator.plist`."""
    words = "\n".join(
        f"    <string>{escape(word)}</string>" for word in (*program, "connect", "--config", str(config))
    )
    log = escape(
        str(Path(variables.get("HOME", "~")).expanduser() / "Library/Logs/dispatch-orchestrator.log")
    )
    return f"""<?xml version="1.0" encoding="UTF-8"?>
<!-- Save as ~/Library/LaunchAgents/{LABEL}.plist, then:
     launchctl bootstrap gui/$(id -u) ~/Library/LaunchAgents/{LABEL}.plist -->
<!DOCTYPE plist PUBLIC "-//Apple//DTD PLIST 1.0//EN" "http://www.apple.com/DTDs/PropertyList-1.0.dtd">
<plist version="1.0">
<dict>
  <key>Label</key>
  <string>{LABEL}</string>
  <key>ProgramArguments</key>
  <array>
{words}
  </array>
  <key>WorkingDirectory</key>
  <string>{escape(_folder(program))}</string>
  <key>EnvironmentVariables</key>
  <dict>
    <key>PATH</key>
    <string>{escape(variables.get("PATH", "/usr/local/bin:/usr/bin:/bin"))}</string>
  </dict>
  <key>RunAtLoad</key>
  <true/>
  <key>KeepAlive</key>
  <dict>
    <key>SuccessfulExit</key>
    <false/>
  </dict>
  <key>ThrottleInterval</key>
  <integer>30</integer>
  <key>ExitTimeOut</key>
  <integer>120</integer>
  <key>StandardOutPath</key>
  <string>{log}</string>
  <key>StandardErrorPath</key>
  <string>{log}</string>
</dict>
</plist>
"""


DESCRIPTIONS: Final[dict[str, Callable[[Sequence[str], Path, Mapping[str, str]], str]]] = {
    "systemd": systemd,
    "launchd": launchd,
}


def _folder(program: Sequence[str]) -> str:
    """A single file can be started from anywhere, a module only from where it lies."""
    return str(
        Path(program[-1]).parent if program[-1].endswith(".pyz") else Path(__file__).resolve().parents[1]
    )


def _quoted(word: str, dollar: str = "$$") -> str:
    """systemd.syntax(7): double quotes, and a percent sign is written twice; so is a dollar in the words of a command."""
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", dollar)
    return f'"{escaped}"' if any(sign in word for sign in " \t\"'") else escaped
