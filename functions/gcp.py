"""Google Cloud Functions: the entry points `webhook`, `claim` and `sweep` for functions-framework.

Deployed with GOOGLE_FUNCTION_SOURCE=functions/gcp.py and one entry point per function. Everything else is in the neutral handlers.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final

# functions-framework executes this file by its path and knows only its folder.
if (_root := str(Path(__file__).resolve().parent.parent)) not in sys.path:
    sys.path.insert(0, _root)

import flask
from werkzeug.exceptions import RequestEntityTooLarge

from functions.app import App, app
from functions.web import Request, Response, error_response
from shared.errors import BodyTooLarge, ConfigurationError, InvalidRequest
from shared.log import log, log_exception

if TYPE_CHECKING:
    webhook: Callable[[flask.Request], flask.Response]
    claim: Callable[[flask.Request], flask.Response]
    sweep: Callable[[flask.Request], flask.Response]

MOST_BYTES: Final = 5 * 1024 * 1024 + 64 * 1024
"""More than any route accepts, so that the routes' own limits decide; what is beyond is not read to its end."""

MOST_DISCARDED: Final = 32 * 1024 * 1024
"""What Cloud Run takes of a request at most."""

BODY_TOO_LARGE: Final = 413


def _webhook(one: App) -> None:
    _ = one.keys  # the signatures' secrets are sealed with it


def _claim(one: App) -> None:
    """Needs nothing besides the database."""


def _sweep(one: App) -> None:
    one.settings.require_scheduler()


_NEEDS: Final[dict[str, Callable[[App], None]]] = {"webhook": _webhook, "claim": _claim, "sweep": _sweep}
"""The entry points, and what each must have been configured with."""


def __getattr__(target: str) -> Callable[[flask.Request], flask.Response]:
    """Builds the entry point that the framework asks this module for, while the instance starts.

    Only that one: a claim's cold start does not import what the webhook needs, nor is it given the webhook's keys. And at once: a
    setting that is missing or malformed stops the start, so that a bad deployment never takes traffic.
    """
    if target not in _NEEDS:
        raise AttributeError(f"module {__name__!r} has no attribute {target!r}")
    try:
        one = app()
        _NEEDS[target](one)
    except ConfigurationError as error:
        log_exception("the configuration is wrong", error, severity="CRITICAL", target=target)
        raise
    handle = importlib.import_module(f"functions.{target}").handle

    def entry_point(request: flask.Request) -> flask.Response:
        try:
            response = handle(one, _received(request))
        except (BodyTooLarge, InvalidRequest) as error:
            response = error_response(error)
            log("INFO", "refused at the door", method=request.method, status=response.status)
        return _sent(response)

    globals()[target] = entry_point
    return entry_point


def _received(request: flask.Request) -> Request:
    """The neutral request. The bytes are read first: a signature is over them, and Flask's parsers would consume them."""
    request.max_content_length = MOST_BYTES
    try:
        body = request.get_data(cache=False, parse_form_data=False)
    except RequestEntityTooLarge:
        body = None
    # A body without an announced length is cut off at the limit, not refused.
    if body is None or len(body) >= MOST_BYTES:
        _discard(request)
        raise BodyTooLarge(
            f"the body is larger than {MOST_BYTES - 1} bytes", field="body", limitBytes=MOST_BYTES - 1
        )
    # Nor does the server say that the sender hung up: half of a body must not pass for one.
    if len(body) < (request.content_length or 0):
        raise InvalidRequest("the body ended before its announced length", field="body")
    return Request(
        method=request.method,
        path=request.path,
        query=request.args.to_dict(),
        headers={name.lower(): value for name, value in request.headers.items()},
        body=body,
    )


def _discard(request: flask.Request) -> None:
    """Takes the rest off the wire: a sender that is cut off in the middle sees a broken connection instead of the answer."""
    left = MOST_DISCARDED
    while left > 0 and (piece := request.environ["wsgi.input"].read(64 * 1024)):
        left -= len(piece)


def _sent(response: Response) -> flask.Response:
    body, headers = response.encoded()
    if response.status != BODY_TOO_LARGE:
        return flask.Response(body, response.status, headers)
    # Before it sends an answer that is not a stream, the framework reads the request to its end: here that fails, the end is too far.
    return flask.Response(iter((body,)), response.status, headers)
