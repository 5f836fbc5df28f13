"""Writes docs/configuration.md from the settings themselves: `python -m infra.admin.configuration > docs/configuration.md`."""

from __future__ import annotations

from pydantic_core import PydanticUndefined

from shared.settings import Settings

HEAD = """# Configuration

For whoever deploys it. Generated from [shared/settings.py](../shared/settings.py). A variable that is unknown, missing or malformed stops
the start with its name.

| variable | default | meaning |
|---|---|---|
"""


def markdown() -> str:
    """The page."""
    rows = []
    for name, field in Settings.model_fields.items():
        required = field.is_required() or field.default is PydanticUndefined
        default = "required" if required else "–" if field.default is None else f"`{field.default}`"
        rows.append(f"| `{name.upper()}` | {default} | {field.description} |")
    return HEAD + "\n".join(rows) + "\n"


if __name__ == "__main__":
    print(markdown(), end="")
