"""The orchestrator, killed at one named function of its own: `python -m tests.crash.orchestrator_victim POINT before|after FUSE WORDS…`."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

from orchestrator.__main__ import main
from tests.crash.victim import patch

if __name__ == "__main__":
    point, when, fuse, *words = sys.argv[1:]
    patch(point, when, signal.SIGKILL, Path(fuse))
    sys.exit(main(words))
