"""What the documentation names exists: tests, files, settings."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from infra.admin.configuration import markdown
from orchestrator.options import OPTIONS, PREFIX

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "SECURITY.md",
    ROOT / "CHANGELOG.md",
    *ROOT.glob("docs/**/*.md"),
]


def test_the_page_of_settings_is_what_the_settings_say() -> None:
    assert (ROOT / "docs" / "configuration.md").read_text() == markdown(), (
        "run: python -m infra.admin.configuration > docs/configuration.md"
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_test_that_a_page_names_exists(page: Path) -> None:
    for file, name in re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", page.read_text()):
        tree = ast.parse((ROOT / file).read_text())
        assert name in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}, (
            f"{file}::{name}"
        )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_of_a_page_leads_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        if not target.startswith(("http://", "https://", "mailto:")):
            assert (page.parent / target).exists(), target


# What tests/contract/test_orchestrator.py finds in an agent's environment.
GIVEN_TO_AN_AGENT = {
    f"DISPATCH_{name}"
    for name in (
        "ID",
        "ATTEMPT",
        "SESSION_ID",
        "ISSUE",
        "ISSUE_URL",
        "REPO",
        "MESSAGE_FILE",
        "PROMPT_FILE",
        "LOG_FILE",
    )
}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_variable_that_a_page_names_is_a_setting(page: Path) -> None:
    known = set(re.findall(r"`([A-Z_]+)`", markdown()))
    if page.name == "orchestrator.md":
        known = {PREFIX + name.upper() for name in OPTIONS} | GIVEN_TO_AN_AGENT
    prefixes = (
        "DATABASE_",
        "DISPATCH_",
        "ORCHESTRATOR_",
        "WEBHOOK_",
        "SWEEP_",
        "SCHEDULER_",
        "BRIDGE_",
        "SUPABASE_",
    )
    named = {
        name for name in re.findall(r"`([A-Z][A-Z_]{3,})`", page.read_text()) if name.startswith(prefixes)
    }
    assert {name for name in named if not name.endswith("_")} <= known
