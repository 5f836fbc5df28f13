"""What the owner decides: flag before environment before file, each value with a name that its error message carries."""

from __future__ import annotations

import os
import re
import secrets
import shlex
import socket
import stat
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from orchestrator.options import OPTIONS, PREFIX, Option

ALWAYS_PASSED: Final = (
    "PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "TMPDIR",
)  # fmt: skip
"""The variables that every agent sees; the owner names the others."""


class Misconfigured(Exception):
    """A value is unknown, missing or malformed; the message names it and where it stands."""


@dataclass(frozen=True, slots=True)
class Config:
    """All of it, read and checked. `state` exists when the program has started."""

    url: str
    token: str
    name: str
    repos: list[str]
    max_jobs: int
    transport: str
    exec: list[str] | None
    directory: str | None
    interactive: bool
    env: list[str]
    timeout: int
    patience: int
    grace: int
    keep_days: int
    state: Path

    def __repr__(self) -> str:
        return f"Config(url={self.url!r}, token=…)"

    def environment(self, variables: Mapping[str, str]) -> dict[str, str]:
        """What the agent may see of `variables`."""
        return {name: variables[name] for name in (*ALWAYS_PASSED, *self.env) if name in variables}


def file_path(variables: Mapping[str, str]) -> Path:
    """Where the file is looked for when no flag names one."""
    base = variables.get("XDG_CONFIG_HOME") or str(Path(variables.get("HOME", "~")).expanduser() / ".config")
    return Path(base) / "devpilot-dispatch" / "orchestrator.toml"


def load(flags: Mapping[str, Any], variables: Mapping[str, str], file: Path | None) -> Config:
    """Args:
        flags: by option; None for what was not given.
        file: the file that a flag named; None: the usual one, if it is there.

    Raises Misconfigured.
    """
    path = file or file_path(variables)
    sources = {
        "flag": {name: value for name, value in flags.items() if value is not None},
        "environment": _of_environment(variables),
        "file": _of_file(path, required=file is not None),
    }
    labels = {"flag": "--{flag}", "environment": PREFIX + "{variable}", "file": f"{{name}} in {path}"}
    found, origin = {}, {}
    for name, option in OPTIONS.items():
        for source, values in sources.items():
            if name in values:
                label = labels[source].format(flag=name.replace("_", "-"), variable=name.upper(), name=name)
                found[name], origin[name] = _read(option, values[name], label), source
                break
        else:
            found[name] = option.default
    for name in ("url", "token"):
        if found[name] is None:
            raise Misconfigured(
                f"{name} is missing: give --{name}, {PREFIX}{name.upper()}, or {name} in {path}"
            )
    _stays_with_its_url(found, origin, sources, path)
    state = (
        Path(found["state"]).expanduser().absolute()
        if found["state"]
        else _state_folder(variables, found["url"])
    )
    return Config(**{**found, "state": state, "name": found["name"] or _kept_name(state)})


def _stays_with_its_url(
    found: Mapping[str, Any], origin: Mapping[str, str], sources: Mapping[str, Mapping[str, Any]], path: Path
) -> None:
    """A token is given to one server. Another URL from a flag must not carry the file's token there."""
    beside = sources[origin["token"]].get("url")
    if beside is None:
        return
    where, label = str(path), f"url in {path}"
    if origin["token"] != "file":  # noqa: S105
        where, label = "the environment", PREFIX + "URL"
    its_url = _read(OPTIONS["url"], beside, label)
    if its_url != found["url"]:
        raise Misconfigured(
            f"the token in {where} belongs to {its_url}; for {found['url']} give its own, beside its URL"
        )


def _read(option: Option, value: Any, label: str) -> Any:
    try:
        return option.read(value)
    except ValueError as error:
        raise Misconfigured(f"{label} {error}") from None


def _of_environment(variables: Mapping[str, str]) -> dict[str, str]:
    found = {
        name.removeprefix(PREFIX).lower(): value
        for name, value in variables.items()
        if name.startswith(PREFIX)
    }
    found.pop("config", None)
    for name in found:
        if name not in OPTIONS:
            raise Misconfigured(f"{PREFIX}{name.upper()} is unknown; known are {_known(PREFIX, str.upper)}")
    return found


def _of_file(path: Path, *, required: bool) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            if status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o077:
                raise Misconfigured(
                    f"{path} holds a token and must be yours alone: chmod 600 {shlex.quote(str(path))}"
                )
            found = tomllib.load(file)
    except FileNotFoundError:
        if required:
            raise Misconfigured(f"{path} does not exist") from None
        return {}
    except OSError as error:
        raise Misconfigured(f"{path} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise Misconfigured(f"{path} is no TOML: {error}") from None
    for name in found:
        if name not in OPTIONS:
            raise Misconfigured(f"{name} in {path} is unknown; known are {_known('', str)}")
    return found


def _known(prefix: str, spelled: Callable[[str], str]) -> str:
    return ", ".join(prefix + spelled(name) for name in OPTIONS)


def _state_folder(variables: Mapping[str, str], url: str) -> Path:
    """One for each server: what was claimed at one is not another's to hear of."""
    base = variables.get("XDG_STATE_HOME") or str(
        Path(variables.get("HOME", "~")).expanduser() / ".local" / "state"
    )
    parts = urlsplit(url)
    place = "_".join(
        filter(None, (parts.hostname, str(parts.port or ""), parts.path.strip("/").replace("/", "_")))
    )
    return Path(base) / "devpilot-dispatch" / re.sub(r"[^A-Za-z0-9._-]", "_", place)


def _kept_name(state: Path) -> str:
    """Made once: a host that is renamed by its network stays the same machine, and two of one name stay two."""
    kept = state / "name"
    try:
        kept_name: str = OPTIONS["name"].read(kept.read_text().strip())
        return kept_name  # noqa: TRY300
    except (OSError, ValueError):
        pass
    host = re.sub(r"[^A-Za-z0-9-]", "-", socket.gethostname().split(".")[0]) or "machine"
    made = f"{host[:60]}-{secrets.token_hex(2)}"
    try:
        state.mkdir(parents=True, exist_ok=True, mode=0o700)
        kept.write_text(made + "\n")
    except OSError as error:
        raise Misconfigured(
            f"the state folder {state} cannot be written: {error.strerror}; name another with --state"
        ) from None
    return made


def words(command: Sequence[str] | None) -> str:
    """The command as its owner would type it."""
    return shlex.join(command or [])
