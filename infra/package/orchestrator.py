"""`make orchestrator`: the program and all that it needs in one file, which any Python from 3.11 on runs.

`python -m infra.package.orchestrator FILE`. The packages are taken from this environment, in exactly the versions of
orchestrator/requirements.txt. The same input gives the same bytes.
"""

from __future__ import annotations

import re
import sys
import zipfile
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path, PurePosixPath
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
PINNED: Final = ROOT / "orchestrator" / "requirements.txt"
COMPILED: Final = frozenset({".so", ".pyd", ".dylib", ".dll"})
STARTED_WITH: Final = b"#!/usr/bin/env python3\n"
MAIN: Final = """\
import sys

if sys.version_info < (3, 11):
    sys.exit("orchestrator: this needs Python 3.11 or newer; this is " + sys.version.split()[0])

from orchestrator.__main__ import main

sys.exit(main())
"""


class CannotBePacked(Exception):
    """A package is missing here, has another version than the pinned one, or is compiled for one kind of machine."""


def build(target: Path) -> int:
    """Writes the file; returns its size in bytes. Raises CannotBePacked."""
    files = dict(_program())
    for line in PINNED.read_text().splitlines():
        if found := re.match(r"([A-Za-z0-9._-]+)==([^\s;]+)", line):
            files |= dict(_package(found[1], found[2]))
    files["__main__.py"] = MAIN.encode()
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.open("wb") as file:
        file.write(STARTED_WITH)
        with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
            for name in sorted(files):
                entry = zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0))
                entry.compress_type, entry.external_attr = zipfile.ZIP_DEFLATED, 0o644 << 16
                archive.writestr(entry, files[name])
    target.chmod(0o755)
    return target.stat().st_size


def _program() -> Iterator[tuple[str, bytes]]:
    for path in (ROOT / "orchestrator").rglob("*.py"):
        yield path.relative_to(ROOT).as_posix(), path.read_bytes()


def _package(name: str, version: str) -> Iterator[tuple[str, bytes]]:
    try:
        package = distribution(name)
    except PackageNotFoundError:
        raise CannotBePacked(f"{name} is not installed here: make setup") from None
    if package.version != version:
        raise CannotBePacked(
            f"{name} is {package.version} here, {version} is pinned in {PINNED.name}: make setup"
        )
    for file in package.files or ():
        path = PurePosixPath(file.as_posix())
        if path.suffix in COMPILED:
            raise CannotBePacked(
                f"{name} is compiled ({path.name}): it would run on this kind of machine only"
            )
        # Outside of the packages' folder lie commands; of the metadata only the licence has to travel along.
        if path.parts[0] == ".." or path.suffix == ".pyc":
            continue
        if (
            path.parts[0].endswith(".dist-info")
            and "licen" not in path.as_posix().lower()
            and path.name != "METADATA"
        ):
            continue
        yield path.as_posix(), Path(str(file.locate())).read_bytes()


def main(target: Path) -> int:
    """Builds it and says how large it is."""
    try:
        size = build(target)
    except CannotBePacked as error:
        print(f"orchestrator: {error}", file=sys.stderr)
        return 1
    print(
        f"{target}: {size / 1_000_000:.1f} MB; run it with any Python from 3.11 on: python3 {target.name} --help"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1] if len(sys.argv) > 1 else "dist/orchestrator.pyz")))
