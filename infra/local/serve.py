"""All functions on one port, each made by the real functions-framework, behind the server that it uses in the cloud."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from functions_framework import create_app
from functions_framework._http.gunicorn import GunicornApplication

WSGI = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]

SOURCE = str(Path(__file__).resolve().parents[2] / "functions" / "gcp.py")
MOUNTS = {"/linear": "webhook", "/sweep": "sweep", "/api": "claim"}


def application() -> WSGI:
    """Routes by the first part of the path; in a cloud each function has an address of its own."""
    apps: dict[str, WSGI] = {prefix: create_app(target, SOURCE) for prefix, target in MOUNTS.items()}

    def route(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        path = environ.get("PATH_INFO") or "/"
        for prefix, app in apps.items():
            if path == prefix or path.startswith(prefix + "/"):
                # The orchestrators' paths begin with /api wherever they are served; the others are the root of their function.
                if prefix != "/api":
                    environ = {**environ, "SCRIPT_NAME": prefix, "PATH_INFO": path[len(prefix) :] or "/"}
                return app(environ, start_response)
        start_response("404 Not Found", [("Content-Type", "text/plain; charset=utf-8")])
        return [
            f"nothing here; there are: {', '.join(f'{prefix} ({target})' for prefix, target in MOUNTS.items())}\n".encode()
        ]

    return route


if __name__ == "__main__":
    # Two processes would need two pools; one process with threads is what the cloud runs. Eight of them may be waiting polls.
    GunicornApplication(
        application(), "127.0.0.1", int(sys.argv[1]), debug=False, threads=16, graceful_timeout=5
    ).run()
