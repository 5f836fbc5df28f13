"""Reading JSON that anybody may have sent: every surprise is an InvalidRequest that names the field, at the door.

What passes here can be stored: `jsonb` takes no U+0000, no half of a surrogate pair and no infinity.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from math import isinf
from typing import Any, NoReturn

from shared.errors import InvalidRequest

MAX_DEPTH = 64
"""Levels of nesting: Linear's deepest event has 7; the interpreter's own limit is reached below 1 000, in the middle of some later step."""

_MAX_INTEGER = 2**63
_UNSTORABLE = re.compile("[\x00\ud800-\udfff]")

Path = tuple["Path", "str | int"] | tuple[()]


def parse_object(body: bytes, *, storable: bool = True) -> dict[str, Any]:
    """The JSON object in `body`; `{}` when there is nothing in it.

    Args:
        storable: whether what cannot be stored, and what two readers could read differently, is refused.

    Raises InvalidRequest for anything else, with the path of the offending field, or `body`.
    """
    if not body.strip():
        return {}
    try:
        text = body.decode("utf-8")
        value = (
            json.loads(text, parse_constant=_no_constant, object_pairs_hook=_unique)
            if storable
            else json.loads(text)
        )
    except UnicodeDecodeError:
        raise InvalidRequest("the body is not UTF-8", field="body") from None
    except json.JSONDecodeError as error:
        raise InvalidRequest(
            f"the body is not JSON: {error.msg} at character {error.pos}", field="body"
        ) from None
    except ValueError:  # an integer of more than 4 300 digits, which Python refuses to read
        raise InvalidRequest("the body holds a number that is too large", field="body") from None
    except RecursionError:
        raise InvalidRequest(f"the body is nested more than {MAX_DEPTH} levels deep", field="body") from None
    if not isinstance(value, dict):
        raise InvalidRequest("the body must be a JSON object", field="body")
    if storable:
        _check(value)
    return value


def path_text(path: Sequence[str | int]) -> str:
    """`labels[2].name`; `body` for the whole. Keys are the sender's: shortened, and harmless in a header or a terminal."""
    text = ""
    for part in path:
        text += (
            f"[{part}]"
            if isinstance(part, int)
            else f".{ascii(part[:40])[1:-1]}"
            if text
            else ascii(part[:40])[1:-1]
        )
    return text[:200] or "body"


def _no_constant(name: str) -> NoReturn:
    raise InvalidRequest(f"the body holds {name}, which is not JSON", field="body")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """RFC 8259 leaves open which of two equal names counts; two readers of one request must not disagree about it."""
    members = dict(pairs)
    if len(members) != len(pairs):
        left = dict(pairs)
        twice = next(name for name, _ in pairs if left.pop(name, left) is left)
        raise InvalidRequest(f"{path_text([twice])} is in one object twice", field=path_text([twice]))
    return members


def _check(root: dict[str, Any]) -> None:
    """Looks at every value once, without recursion; a path is a linked list, spelt out only for the one that is refused."""
    todo: list[tuple[Any, Path, int]] = [(root, (), 1)]
    while todo:
        value, path, depth = todo.pop()
        if isinstance(value, dict | list):
            if depth > MAX_DEPTH:
                raise InvalidRequest(f"the body is nested more than {MAX_DEPTH} levels deep", field="body")
            if isinstance(value, list):
                todo.extend((member, (path, index), depth + 1) for index, member in enumerate(value))
                continue
            for name, member in value.items():
                if _UNSTORABLE.search(name):
                    _refuse((path, name), "has a name with U+0000 or half of a surrogate pair")
                todo.append((member, (path, name), depth + 1))
        elif reason := _unstorable(value):
            _refuse(path, reason)


def _unstorable(value: Any) -> str | None:
    if isinstance(value, str):
        return "holds U+0000 or half of a surrogate pair" if _UNSTORABLE.search(value) else None
    if isinstance(value, float):
        return "is too large a number" if isinf(value) else None  # 1e999 is read as infinity
    if isinstance(value, int) and not -_MAX_INTEGER <= value < _MAX_INTEGER:
        return "is an integer of more than 64 bits"
    return None


def _refuse(path: Path, reason: str) -> NoReturn:
    parts: list[str | int] = []
    while path:
        path, part = path
        parts.append(part)
    name = path_text(parts[::-1])
    raise InvalidRequest(f"{name} {reason}", field=name)
