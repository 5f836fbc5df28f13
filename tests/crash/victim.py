"""All functions in one process that dies at a chosen place: `python -m tests.crash.victim PORT [module:name:before|after[:n]]`.

The product has no hook for this: the named function is wrapped from outside, and the n-th call of it ends the process with SIGKILL, before
or after it has done its work.
"""

from __future__ import annotations

import functools
import importlib
import os
import signal
import sys
from typing import Any

from werkzeug.serving import make_server

from infra.local.serve import application


def die_at(place: str) -> None:
    """Wraps the function that `place` names."""
    module_name, name, moment, *nth = place.split(":")
    module, left = importlib.import_module(module_name), [int(nth[0]) if nth else 1]
    original = getattr(module, name)

    @functools.wraps(original)
    def dying(*args: Any, **kwargs: Any) -> Any:
        left[0] -= 1
        if left[0] == 0 and moment == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        result = original(*args, **kwargs)
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(module, name, dying)


if __name__ == "__main__":
    app = application()
    for chosen in sys.argv[2:]:
        die_at(chosen)
    make_server("127.0.0.1", int(sys.argv[1]), app, threaded=True).serve_forever()
