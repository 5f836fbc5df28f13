"""Serves the real functions as infra/local/serve.py does, and stops living at one named function of the product.

`python -m tests.crash.victim DESCRIPTOR THREADS [MODULE:FUNCTION before|after SIGKILL|SIGSTOP FUSE]`. The product has no hook for this:
that one function is replaced here. It strikes once, when the file FUSE is there: the instance that comes after it lives.
"""

from __future__ import annotations

import functools
import importlib
import signal
import sys
import threading
from pathlib import Path
from typing import Any

from functions_framework._http.gunicorn import GunicornApplication

from infra.local.serve import application


def strike(fuse: Path, how: signal.Signals) -> None:
    """Ends or freezes this process, unless another has been struck by this fuse before."""
    try:
        fuse.unlink()
    except FileNotFoundError:
        return
    # To this thread: a SIGSTOP to the process is taken by its main thread, and this one runs on until that is scheduled.
    signal.pthread_kill(threading.get_ident(), how)


def patch(point: str, when: str, how: signal.Signals, fuse: Path) -> None:
    """Replaces the function where it is looked up, e.g. `shared.one_flight:Connection.commit`."""
    module, _, names = point.partition(":")
    *parents, name = names.split(".")
    owner: Any = functools.reduce(getattr, parents, importlib.import_module(module))
    original = getattr(owner, name)

    @functools.wraps(original)
    def struck(*args: Any, **kwargs: Any) -> Any:
        if when == "before":
            strike(fuse, how)
        result = original(*args, **kwargs)
        if when == "after":
            strike(fuse, how)
        return result

    setattr(owner, name, struck)


if __name__ == "__main__":
    descriptor, threads, *point = sys.argv[1:]
    if point:
        patch(point[0], point[1], signal.Signals[point[2]], Path(point[3]))
    # The socket is the test's: it outlives the process, as a cloud's front end outlives an instance.
    GunicornApplication(
        application(), "", 0, debug=False, bind=f"fd://{descriptor}", threads=int(threads), graceful_timeout=1
    ).run()
