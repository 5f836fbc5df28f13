"""Reading one field of an event that somebody else shapes: what is not as expected reads as absent.

Linear adds keys and enum values every few weeks and leaves null optionals out; a webhook that answers 500 to
that is retried for hours and then lost. A field of the wrong type is therefore a missing field, and the
decision says what was missing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

ID_LENGTH: Final = 64
"""Linear's ids are UUIDs (36 characters); the columns that keep them are checked at 64."""

NAME_LENGTH: Final = 200

_LONE_SURROGATE = re.compile("[\ud800-\udfff]")
_NOTHING: Final[Mapping[str, object]] = {}


def record(value: object) -> Mapping[str, object]:
    """The JSON object, or an empty one."""
    return value if isinstance(value, dict) else _NOTHING


def records(value: object) -> list[Mapping[str, object]]:
    """The objects in a JSON list; anything else in it is left out."""
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def text(value: object, limit: int = NAME_LENGTH) -> str | None:
    """The string, cut at `limit` characters with a visible mark; None when absent or blank.

    U+0000 is dropped and a lone surrogate replaced: JSON can carry both, PostgreSQL's text and jsonb refuse
    both, and one such character in a description would turn every retry of the delivery into the same
    failure.
    """
    if not isinstance(value, str):
        return None
    kept = _LONE_SURROGATE.sub("\ufffd", value[:limit].replace("\x00", ""))
    if not kept.strip():
        return None
    return kept if len(value) <= limit else f"{kept}\n[truncated: {len(value) - limit} characters left out]"


def name(value: object) -> str | None:
    """A one-line name; longer than any that Linear accepts is cut without a mark."""
    shown = text(value[:NAME_LENGTH] if isinstance(value, str) else None)
    return shown and " ".join(shown.split())


def ident(value: object) -> str | None:
    """An id; None for what cannot be one (empty, or longer than the column)."""
    given = text(value, ID_LENGTH)
    return given if given is not None and len(given) <= ID_LENGTH else None


def link(value: object) -> str | None:
    """An http or https URL; it becomes a link on the operator's page, and `javascript:` is a URL too."""
    given = text(value, 2_000)
    return (
        given
        if given is not None and len(given) <= 2_000 and re.match(r"https?://", given, re.IGNORECASE)
        else None
    )
