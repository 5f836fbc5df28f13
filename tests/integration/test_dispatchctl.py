"""The operator's commands, in this process for most, as a real process where that is the point."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from uuid import UUID

import pytest
from sqlalchemy import Engine

from infra.admin import doctor, views
from infra.admin.__main__ import main
from shared import dispatch_queue, orchestrators, routing, sessions, workspaces
from shared.crypto import KeyRing
from shared.db import OPERATOR, sql, transaction
from shared.dispatch_queue import RetryPolicy
from shared.errors import Unauthenticated
from shared.ids import new_id
from shared.sessions import NewSession
from shared.settings import Settings
from tests import steps
from tests.databases import Databases
from tests.given import (
    REPO,
    Machine,
    Queued,
    Tenant,
    a_machine,
    a_message,
    a_tenant,
    claimed,
    history_of,
    row_of,
    session_of,
    the_backoff_has_passed,
    the_claim_is_older_by,
    the_machine_was_last_heard,
    violations,
    work,
)
from tests.steps import committed

ROOT = Path(__file__).resolve().parents[2]
SECRET = "lin_wh_0123456789abcdefghij"
NEW_SECRET = "lin_wh_9876543210jihgfedcba"
OTHER_KEY = "QUFBQUFBQUFBQUFBQUFBQUFBQUFBQUFBQUFBQUFBQUE="
HOSTILE = "\x1b[31mred\x1b[0m \x07bell \u202eevil\u202c \u05e9\u05dc\u05d5\u05dd\r\nsecond line\x00".replace(
    "\x00", ""
)


class Answer(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


Run = Callable[..., Answer]


@pytest.fixture
def environment(settings: Settings) -> dict[str, str]:
    assert settings.bridge_encryption_key is not None
    return {
        "DATABASE_URL": settings.database_url.get_secret_value(),
        "DATABASE_TLS": "off",
        "BRIDGE_ENCRYPTION_KEY": settings.bridge_encryption_key.get_secret_value(),
    }


@pytest.fixture
def dispatchctl(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Run:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)

    def run(*words: object, stdin: str = "") -> Answer:
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        capsys.readouterr()
        code = main([str(word) for word in words])
        return Answer(code, *capsys.readouterr())

    return run


def process(environment: dict[str, str], *words: str, stdin: str = "") -> Answer:
    done = subprocess.run(
        [sys.executable, "-m", "infra.admin", *words],
        cwd=ROOT,
        env={"PATH": os.environ["PATH"], **environment},
        input=stdin,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return Answer(done.returncode, done.stdout, done.stderr)


@pytest.fixture
def connected(dispatchctl: Run) -> UUID:
    """An organization `acme` with a workspace `linear`, made by the commands."""
    assert dispatchctl("org", "create", "acme").code == 0
    made = dispatchctl(
        "workspace", "connect", "linear", "--linear-organization-id", "lin-1", "--json", stdin=f"{SECRET}\n"
    )
    assert made.code == 0
    return UUID(made.json["id"])


STORED = sql(
    "select webhook_secret, webhook_secret_previous, linear_token, app_user_id, status from workspaces"
)


def stored(engine: Engine) -> Any:
    with transaction(engine) as tx:
        return tx.first(STORED)


def a_titled(engine: Engine, tenant: Tenant, machine: Machine, title: str, identifier: str) -> Queued:
    """Work whose title somebody else has written."""
    with transaction(engine, OPERATOR) as tx:
        session_id = sessions.open_session(
            tx,
            NewSession(
                org_id=tenant.org_id,
                workspace_id=tenant.workspace_id,
                linear_issue_id=str(new_id()),
                linear_identifier=identifier,
                team_id="team",
                title=title,
                repo=REPO,
                orchestrator_id=machine.id,
            ),
        )
        assert session_id is not None
        queue_id = dispatch_queue.enqueue_dispatch(
            tx,
            org_id=tenant.org_id,
            orchestrator_id=machine.id,
            session_id=session_id,
            message=a_message(title),
        )
    return Queued(tenant.org_id, session_id, queue_id)


# -- as a process -------------------------------------------------------------------------------------------------------


def test_a_tenant_is_made_from_nothing_by_commands_alone(environment: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "token").write_text("lin_api_0123456789abcdef\n")
    assert process(environment, "migrate").out == "nothing to do: the schema is up to date\n"
    assert process(environment, "org", "create", "acme").code == 0
    connect = process(
        environment,
        *("workspace", "connect", "linear", "--linear-organization-id", "lin-1"),
        *("--token-file", str(tmp_path / "token")),
        stdin=f"{SECRET}\n",
    )
    assert connect.code == 0
    assert "connected" in connect.out
    token = process(environment, "token", "mint", "--label", "laptop")
    assert token.out.startswith("dp_orch_")
    assert token.out.count("\n") == 1
    assert SECRET not in connect.out + connect.err


def test_a_database_that_is_down_is_named_by_host_and_port_without_its_password(
    environment: dict[str, str],
) -> None:
    down = {**environment, "DATABASE_URL": "postgresql://operator:geheim@127.0.0.1:1/dispatch"}
    for words in (("org", "list"), ("migrate",), ("doctor", "--json")):
        answer = process(down, *words)
        said = answer.out + answer.err
        assert answer.code == 3
        assert "the database at 127.0.0.1:1 cannot be used: Connection refused" in said
        assert "geheim" not in said
        assert "Traceback" not in said


@pytest.mark.parametrize("secret", [SECRET, "0123456789abcdefghij"])
def test_a_secret_on_the_command_line_is_refused_and_not_repeated(dispatchctl: Run, secret: str) -> None:
    connect = ("workspace", "connect", "linear", "--linear-organization-id", "lin-1")
    for words in (
        (*connect, "--secret", secret),
        (*connect, f"--secret={secret}"),
        (*connect, "--token", secret),
        (*connect, "--webhook-secret", secret),
        (*connect, f"--webhook-secret={secret}"),
        (*connect, "--secret-file", secret),
        (*connect, secret),
    ):
        answer = dispatchctl(*words)
        assert answer.code in (1, 2), words
        assert secret not in answer.out + answer.err
    assert "--secret-file" in dispatchctl(*connect, "--secret", secret).err


def test_settings_that_are_wrong_are_named(environment: dict[str, str]) -> None:
    answer = process({**environment, "DISPATCH_MAX_ATTEMPTS": "many"}, "org", "list")
    assert (answer.code, "DISPATCH_MAX_ATTEMPTS" in answer.err) == (2, True)
    answer = process({}, "org", "list")
    assert (answer.code, answer.err) == (2, "DATABASE_URL is missing\n")


def test_a_reader_that_leaves_early_is_no_error_to_talk_about(
    environment: dict[str, str], engine: Engine
) -> None:
    a_tenant(engine)
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-m", "infra.admin", "org", "list"],
        cwd=ROOT,
        env={"PATH": os.environ["PATH"], **environment},
        stdout=writer,
        stderr=subprocess.PIPE,
        timeout=60,
        check=False,
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, b"")


# -- words --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("org",),
        ("fly",),
        ("org", "create"),
        ("org", "create", ""),
        ("org", "create", "two\nlines"),
        ("org", "create", "x" * 121),
        ("org", "list", "--limit", "0"),
        ("org", "list", "--limit", "99999999999999999999"),
        ("token", "mint", "--expires-days", "-1"),
        ("sessions", "list", "--status", "gone"),
        ("redrive", "PAY-1", "--repo", "no-slash"),
        ("repo-route", "set", "acme/api"),
        ("org", "list", "--lim", "3"),
    ],
)
def test_words_that_make_no_sense_are_exit_code_2_and_show_the_usage(
    dispatchctl: Run, words: tuple[str, ...]
) -> None:
    answer = dispatchctl(*words)
    assert answer.code == 2
    assert "usage:" in answer.err
    assert answer.out == ""


def test_help_lists_the_commands(dispatchctl: Run) -> None:
    answer = dispatchctl("--help")
    assert answer.code == 0
    assert all(name in answer.out for name in ("migrate", "workspace", "redrive", "doctor"))


def test_the_only_organization_need_not_be_named_and_of_several_one_must(dispatchctl: Run) -> None:
    none = dispatchctl("token", "list")
    assert (none.code, none.err) == (1, "there is no organization yet\n")
    dispatchctl("org", "create", "acme")
    assert dispatchctl("token", "list").code == 0
    other = dispatchctl("org", "create", "quartz", "--json").json["id"]
    answer = dispatchctl("token", "list")
    assert answer.code == 2
    assert "acme, quartz" in answer.err
    assert dispatchctl("--org", "quartz", "token", "list").code == 0
    assert dispatchctl("token", "list", "--org", other).code == 0


def test_an_unknown_name_is_answered_with_those_that_exist(dispatchctl: Run, connected: UUID) -> None:
    assert dispatchctl("token", "list", "--org", "x").err == 'no organization "x"; there are: acme\n'
    assert (
        dispatchctl("team-route", "list", "--workspace", "x").err == 'no workspace "x"; there are: linear\n'
    )
    assert dispatchctl("orchestrators", "remove", "x").err == 'no orchestrator "x"; there is none\n'
    assert dispatchctl("sessions", "show", new_id()).code == 1
    assert dispatchctl("org", "create", "acme").code == 1


def test_what_works_on_all_organizations_takes_no_org_and_says_so(dispatchctl: Run, connected: UUID) -> None:
    for words in (
        ("migrate",),
        ("doctor",),
        ("sweep",),
        ("reencrypt",),
        ("org", "list"),
        ("org", "create", "quartz"),
        ("listen", "on"),
    ):
        for given in (("--org", "nope", *words), (*words, "--org", "acme")):
            answer = dispatchctl(*given)
            assert (answer.code, answer.out) == (2, ""), given
            assert "this works on all organizations: it takes no --org\nusage:" in answer.err
        assert "--org" not in dispatchctl(*words, "--help").out
    assert [row["name"] for row in dispatchctl("org", "list", "--json").json] == ["acme"]
    assert "--org" in dispatchctl("token", "list", "--help").out


# -- secrets ------------------------------------------------------------------------------------------------------------


def test_secrets_are_stored_sealed(
    dispatchctl: Run, connected: UUID, engine: Engine, settings: Settings
) -> None:
    row = stored(engine)
    assert SECRET not in row.webhook_secret
    assert KeyRing.of(settings).open(row.webhook_secret) == SECRET


def test_secrets_can_come_from_files(
    dispatchctl: Run, engine: Engine, settings: Settings, tmp_path: Path
) -> None:
    (tmp_path / "secret").write_text(SECRET + "\n")
    (tmp_path / "token").write_text("lin_api_0123456789abcdef")
    dispatchctl("org", "create", "acme")
    connect = (
        "workspace",
        "connect",
        "linear",
        "--linear-organization-id",
        "lin-1",
        "--app-user-id",
        "agent",
    )
    made = dispatchctl(*connect, "--secret-file", tmp_path / "secret", "--token-file", tmp_path / "token")
    assert made.code == 0
    row, keys = stored(engine), KeyRing.of(settings)
    assert (keys.open(row.webhook_secret), keys.open(row.linear_token)) == (
        SECRET,
        "lin_api_0123456789abcdef",
    )
    assert row.app_user_id == "agent"


@pytest.mark.parametrize(
    "given", ["", "\n", "short\n", "with space in the middle\n", "x" * 5000, "sécret-sécret-sécret\n"]
)
def test_a_secret_that_cannot_be_one_is_refused(dispatchctl: Run, engine: Engine, given: str) -> None:
    dispatchctl("org", "create", "acme")
    answer = dispatchctl("workspace", "connect", "linear", "--linear-organization-id", "lin-1", stdin=given)
    assert answer.code == 2
    assert "--secret-file" in answer.err
    assert stored(engine) is None


def test_what_is_missing_on_standard_input_is_said_to_be_missing_there_and_it_is_read_for_one_secret_only(
    dispatchctl: Run, engine: Engine
) -> None:
    dispatchctl("org", "create", "acme")
    connect = ("workspace", "connect", "linear", "--linear-organization-id", "lin-1")
    assert "there is no webhook secret on standard input" in dispatchctl(*connect).err
    for both in (("--token-file", "-"), ("--secret-file", "-", "--token-file", "-")):
        answer = dispatchctl(*connect, *both, stdin=f"{SECRET}\nlin_api_0123456789abcdef\n")
        assert (answer.code, "only one can be standard input" in answer.err) == (2, True)
    assert stored(engine) is None


def test_a_rotation_to_the_secret_that_is_valid_already_is_refused(
    dispatchctl: Run, connected: UUID, engine: Engine
) -> None:
    before = stored(engine)
    answer = dispatchctl("workspace", "rotate-secret", stdin=SECRET)
    assert (answer.code, "valid already" in answer.err) == (1, True)
    assert SECRET not in answer.err
    assert stored(engine) == before


def test_a_workspace_is_connected_once(dispatchctl: Run, connected: UUID) -> None:
    again = dispatchctl("workspace", "connect", "twice", "--linear-organization-id", "lin-1", stdin=SECRET)
    assert again.code == 1
    assert "rotate-secret" in again.err


def test_the_old_webhook_secret_verifies_until_the_rotation_is_finished(
    dispatchctl: Run, connected: UUID, engine: Engine, settings: Settings
) -> None:
    keys = KeyRing.of(settings)
    assert dispatchctl("workspace", "rotate-secret", stdin=NEW_SECRET).code == 0
    row = stored(engine)
    assert (keys.open(row.webhook_secret), keys.open(row.webhook_secret_previous)) == (NEW_SECRET, SECRET)
    assert dispatchctl("workspace", "rotate-secret", stdin=NEW_SECRET).code == 1
    assert dispatchctl("workspace", "rotate-secret", "linear", "--finish").code == 0
    row = stored(engine)
    assert (keys.open(row.webhook_secret), row.webhook_secret_previous) == (NEW_SECRET, None)
    assert dispatchctl("workspace", "rotate-secret", "--finish").code == 1


def test_of_two_rotations_at_once_the_second_changes_nothing(
    connected: UUID, engine: Engine, settings: Settings
) -> None:
    keys = KeyRing.of(settings)
    with transaction(engine) as tx:
        (organization,) = views.organizations(tx, limit=2)
        rotated = [
            workspaces.rotate_secret(
                tx, keys, org_id=organization.id, workspace_id=connected, webhook_secret=secret
            )
            for secret in (NEW_SECRET, "lin_wh_another_new_secret")
        ]
    assert rotated == [True, False]
    assert keys.open(stored(engine).webhook_secret_previous) == SECRET


def test_a_rotation_can_be_taken_back(
    dispatchctl: Run, connected: UUID, engine: Engine, settings: Settings
) -> None:
    dispatchctl("workspace", "rotate-secret", stdin=NEW_SECRET)
    assert dispatchctl("workspace", "rotate-secret", "--undo").code == 0
    row = stored(engine)
    assert (KeyRing.of(settings).open(row.webhook_secret), row.webhook_secret_previous) == (SECRET, None)
    assert dispatchctl("workspace", "rotate-secret", "--undo", "--finish").code == 2


def test_a_new_token_makes_a_revoked_workspace_active(
    dispatchctl: Run, connected: UUID, engine: Engine
) -> None:
    org_id = UUID(dispatchctl("org", "list", "--json").json[0]["id"])
    committed(engine, routing.mark_revoked, org_id=org_id, workspace_id=connected, reason="uninstalled")
    assert dispatchctl("doctor").code == 1
    assert dispatchctl("workspace", "set-token", stdin="lin_api_0123456789abcdef").code == 0
    assert stored(engine).status == "active"
    assert dispatchctl("doctor").code == 0


def test_reencrypting_lets_the_old_key_go(
    dispatchctl: Run,
    connected: UUID,
    engine: Engine,
    environment: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dispatchctl("workspace", "rotate-secret", stdin=NEW_SECRET)
    monkeypatch.setenv("BRIDGE_ENCRYPTION_KEY", f"{OTHER_KEY},{environment['BRIDGE_ENCRYPTION_KEY']}")
    assert "reencrypt" in dispatchctl("doctor").out
    assert dispatchctl("reencrypt", "--json").json == {"secrets": 2, "workspaces": 1}
    assert dispatchctl("reencrypt", "--json").json == {"secrets": 0, "workspaces": 1}
    monkeypatch.setenv("BRIDGE_ENCRYPTION_KEY", OTHER_KEY)
    row, keys = stored(engine), KeyRing.parse(OTHER_KEY)
    assert (keys.open(row.webhook_secret), keys.open(row.webhook_secret_previous)) == (NEW_SECRET, SECRET)
    assert dispatchctl("doctor").code == 0


def test_a_key_that_does_not_fit_changes_nothing_and_is_said(
    dispatchctl: Run, connected: UUID, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = stored(engine)
    monkeypatch.setenv("BRIDGE_ENCRYPTION_KEY", OTHER_KEY)
    answer = dispatchctl("reencrypt")
    assert (answer.code, "BRIDGE_ENCRYPTION_KEY" in answer.err) == (2, True)
    assert stored(engine) == before
    assert dispatchctl("doctor").code == 1
    monkeypatch.delenv("BRIDGE_ENCRYPTION_KEY")
    assert "BRIDGE_ENCRYPTION_KEY is missing" in dispatchctl("doctor").out


# -- tokens and machines ------------------------------------------------------------------------------------------------


def test_a_minted_token_works_until_it_is_revoked_and_is_never_shown_again(
    dispatchctl: Run, engine: Engine
) -> None:
    dispatchctl("org", "create", "acme")
    token = dispatchctl("token", "mint", "--label", "laptop", "--expires-days", "30").out.strip()
    assert committed(engine, orchestrators.authenticate, token).orchestrator_id is None
    listed = dispatchctl("token", "list")
    assert token not in listed.out + dispatchctl("token", "list", "--json").out
    assert token[:12] in listed.out
    assert dispatchctl("token", "revoke", token[:12]).code == 0
    with pytest.raises(Unauthenticated):
        committed(engine, orchestrators.authenticate, token)
    assert dispatchctl("token", "list", "--json").json[0]["status"] == "revoked"


def test_a_token_given_instead_of_its_id_is_not_repeated(dispatchctl: Run) -> None:
    dispatchctl("org", "create", "acme")
    token = dispatchctl("token", "mint").out.strip()
    for words in (
        ("token", "revoke", token),
        ("sessions", "show", token),
        ("orchestrators", "remove", token),
    ):
        answer = dispatchctl(*words)
        assert answer.code in (1, 2)
        assert token not in answer.out + answer.err


def test_a_token_is_named_by_as_much_of_its_beginning_as_names_only_one(
    dispatchctl: Run, engine: Engine
) -> None:
    dispatchctl("org", "create", "acme")
    none = dispatchctl("token", "revoke", "dp_orch_")
    assert (none.code, none.err.splitlines()[0]) == (
        2,
        'every token begins with "dp_orch_", give the id of one: there is none',
    )
    ids = {
        prefix: dispatchctl("token", "mint", "--label", prefix, "--json").json["id"]
        for prefix in ("dp_orch_abcd", "dp_orch_abxy")
    }
    with transaction(engine, OPERATOR) as tx:
        for prefix, token_id in ids.items():
            tx.run(
                sql("update orchestrator_tokens set prefix = :prefix where id = :id"),
                prefix=prefix,
                id=token_id,
            )
    for wanted, code in (("dp_orch_", 2), ("dp_orch_ab", 1), ("dp_orch_zz", 1), ("dp", 1)):
        answer = dispatchctl("token", "revoke", wanted)
        assert answer.code == code
        assert f'"{wanted}"' in answer.err
        for prefix, token_id in ids.items():
            assert f"{prefix} {token_id} ({prefix}) active" in answer.err
    answer = dispatchctl("token", "revoke", "dp_orch_abc")
    assert answer.out == (
        f"token dp_orch_abcd {ids['dp_orch_abcd']} (dp_orch_abcd) is revoked: its next request is refused\n"
    )
    statuses = {row["id"]: row["status"] for row in dispatchctl("token", "list", "--json").json}
    assert statuses == {ids["dp_orch_abcd"]: "revoked", ids["dp_orch_abxy"]: "active"}


def test_a_tokens_end_is_said_when_it_is_made(dispatchctl: Run) -> None:
    dispatchctl("org", "create", "acme")
    assert "it does not expire" in dispatchctl("token", "mint").err
    made = dispatchctl("token", "mint", "--expires-days", "30")
    (row,) = (row for row in dispatchctl("token", "list", "--json").json if row["expires_at"])
    assert f"it expires {row['expires_at'][:19].replace('T', ' ')} UTC" in made.err
    assert dispatchctl("token", "mint", "--json").json["expires_at"] is None


def test_a_token_can_be_revoked_by_its_id_and_an_unknown_one_is_not_found(dispatchctl: Run) -> None:
    dispatchctl("org", "create", "acme")
    token_id = dispatchctl("token", "mint", "--json").json["id"]
    assert dispatchctl("token", "revoke", token_id).code == 0
    assert dispatchctl("token", "revoke", new_id()).code == 1


def test_machines_are_listed_with_what_they_hold_and_what_waits(
    dispatchctl: Run, engine: Engine, tenant: Tenant, machine: Machine, queued: Queued
) -> None:
    claimed(engine, machine, work(engine, tenant, machine))
    the_machine_was_last_heard(engine, machine, 3600)
    (row,) = dispatchctl("orchestrators", "list", "--json").json
    assert (row["online"], row["held"], row["waiting"], row["repos"]) == (False, 1, 1, [REPO])
    assert row["heartbeat_age_seconds"] > 3599
    assert "1 h 0 min" in dispatchctl("orchestrators", "list").out


def test_a_machine_with_work_is_not_removed_and_the_way_out_is_said(
    dispatchctl: Run, engine: Engine, tenant: Tenant, machine: Machine, queued: Queued
) -> None:
    claimed(engine, machine, work(engine, tenant, machine))
    answer = dispatchctl("orchestrators", "remove", machine.id)
    assert answer.code == 1
    assert "holds 1 row and 1 waits for it: nothing was removed. Stop its program" in answer.err
    assert f"No other machine serves {REPO}" in answer.err
    assert f"`queue list --machine {machine.id}` shows it, `cancel SESSION` ends it" in answer.err
    assert row_of(engine, queued) is not None
    the_machine_was_last_heard(engine, machine, 3600)
    a_machine(engine, tenant)
    answer = dispatchctl("orchestrators", "remove", machine.id)
    assert answer.code == 1
    assert "Stop its program" not in answer.err
    assert "No other machine" not in answer.err


def test_a_machine_without_work_is_removed_with_its_tokens_and_its_history_stays(
    dispatchctl: Run, engine: Engine, tenant: Tenant, machine: Machine, queued: Queued
) -> None:
    claimed(engine, machine, queued)
    committed(engine, steps.complete, machine, queued)
    assert dispatchctl("orchestrators", "remove", machine.id).code == 0
    assert dispatchctl("orchestrators", "list", "--json").json == []
    with pytest.raises(Unauthenticated):
        committed(engine, orchestrators.authenticate, machine.token)
    assert dispatchctl("sessions", "show", queued.session_id).code == 0
    assert violations(engine) == []


# -- routes -------------------------------------------------------------------------------------------------------------


def test_a_team_route_keeps_what_is_not_named(dispatchctl: Run, connected: UUID) -> None:
    assert dispatchctl("team-route", "set", "team-1", "--key", "PAY", "--repo", "acme/pay").code == 0
    assert dispatchctl("team-route", "set", "team-1", "--no-auto-dispatch").code == 0
    assert dispatchctl("team-route", "list", "--json").json == [
        {"team_id": "team-1", "team_key": "PAY", "default_repo": "acme/pay", "auto_dispatch": False}
    ]
    assert dispatchctl("team-route", "set", "team-1", "--auto-dispatch").code == 0
    assert dispatchctl("team-route", "list", "--json").json[0]["auto_dispatch"] is True
    assert dispatchctl("team-route", "remove", "team-1").code == 0
    assert dispatchctl("team-route", "remove", "team-1").code == 1


def test_setting_a_route_says_what_holds_now_and_refuses_to_be_told_both(
    dispatchctl: Run, connected: UUID
) -> None:
    both = dispatchctl("team-route", "set", "team-1", "--auto-dispatch", "--no-auto-dispatch")
    assert (both.code, both.out) == (2, "")
    assert "not allowed with" in both.err
    assert dispatchctl("team-route", "list", "--json").json == []
    dispatchctl("team-route", "set", "team-1", "--key", "PAY", "--no-auto-dispatch")
    said = dispatchctl("team-route", "set", "team-1", "--repo", "acme/pay")
    assert said.out == "linear: team team-1 (PAY): default repo acme/pay, auto-dispatch off\n"
    facts = dispatchctl("team-route", "set", "team-1", "--auto-dispatch", "--json").json
    assert (facts["default_repo"], facts["auto_dispatch"]) == ("acme/pay", True)
    said = dispatchctl("label-route", "set", "Backend", "--team", "team-1", "--repo", "acme/api")
    assert said.out == "linear: label Backend of team team-1 goes to acme/api\n"


def test_a_label_is_named_by_its_id_or_by_its_name_in_a_team(dispatchctl: Run, connected: UUID) -> None:
    label_id = str(new_id())
    assert dispatchctl("label-route", "set", "Backend", "--repo", "acme/api").code == 2
    assert dispatchctl("label-route", "set", "Backend", "--team", "team-1", "--repo", "acme/api").code == 0
    assert dispatchctl("label-route", "set", label_id, "--repo", "acme/web").code == 0
    rows = {
        row["label"]: (row["team_id"], row["repo"])
        for row in dispatchctl("label-route", "list", "--json").json
    }
    assert rows == {"Backend": ("team-1", "acme/api"), label_id: (None, "acme/web")}
    assert dispatchctl("label-route", "remove", label_id).code == 0
    gone = dispatchctl("label-route", "remove", label_id)
    assert (gone.code, "Backend" in gone.err) == (1, True)


def test_a_project_route_is_set_changed_and_removed(dispatchctl: Run, connected: UUID) -> None:
    dispatchctl("project-route", "set", "Refunds 2.0", "--repo", "acme/api")
    dispatchctl("project-route", "set", "Refunds 2.0", "--repo", "acme/web")
    assert dispatchctl("project-route", "list", "--json").json == [
        {"project": "Refunds 2.0", "repo": "acme/web"}
    ]
    assert dispatchctl("project-route", "remove", "Refunds 2.0").code == 0
    assert dispatchctl("project-route", "remove", "Refunds 2.0").code == 1


def test_an_operators_repo_route_outlives_a_registration_and_a_machines_own_is_not_removed_for_it(
    dispatchctl: Run, engine: Engine, tenant: Tenant, machine: Machine
) -> None:
    assert dispatchctl("repo-route", "set", "acme/web", "--machine", machine.id).code == 0
    rows = dispatchctl("repo-route", "list", "--json").json
    assert [(row["repo"], row["source"]) for row in rows] == [(REPO, "machine"), ("acme/web", "operator")]
    own = dispatchctl("repo-route", "remove", REPO, "--machine", machine.id)
    assert (own.code, "configuration" in own.err) == (1, True)
    assert dispatchctl("repo-route", "remove", "acme/web", "--machine", machine.id).code == 0
    assert len(dispatchctl("repo-route", "list", "--json").json) == 1


# -- work ---------------------------------------------------------------------------------------------------------------


def test_sessions_are_listed_newest_first_and_filtered(
    dispatchctl: Run, engine: Engine, tenant: Tenant, machine: Machine
) -> None:
    first = a_titled(engine, tenant, machine, "first", "PAY-1")
    second = a_titled(engine, tenant, machine, "second", "PAY-2")
    claimed(engine, machine, first)
    listed = dispatchctl("sessions", "list", "--json").json
    assert [row["id"] for row in listed] == [str(second.session_id), str(first.session_id)]
    assert [row["attempts"] for row in listed] == [0, 1]

    def only(*words: str) -> list[str]:
        return [row["linear_identifier"] for row in dispatchctl("sessions", "list", "--json", *words).json]

    assert only("--status", "dispatched") == ["PAY-1"]
    assert only("--status", "open") == ["PAY-2", "PAY-1"]
    assert only("--status", "complete", "--status", "error") == []
    assert only("--issue", "PAY-2") == ["PAY-2"]
    assert only("--machine", str(machine.id)) == ["PAY-2", "PAY-1"]
    assert only("--limit", "1") == ["PAY-2"]
    assert "--limit shows more" in dispatchctl("sessions", "list", "--limit", "1").err


def test_a_session_is_shown_with_its_attempts_and_its_timeline(
    dispatchctl: Run, engine: Engine, tenant: Tenant, machine: Machine, queued: Queued
) -> None:
    claimed(engine, machine, queued)
    committed(engine, steps.release, machine, queued, error="exit status 7")
    the_backoff_has_passed(engine, queued)
    claimed(engine, machine, queued)
    shown = dispatchctl("sessions", "show", "PAY-1")
    assert shown.code == 0
    assert "exit status 7" in shown.out
    assert str(queued.session_id) in shown.out
    facts = dispatchctl("sessions", "show", queued.session_id, "--json").json
    assert [(each["attempt"], each["outcome"]) for each in facts["attempts"]] == [(1, "released"), (2, None)]
    assert [each["type"] for each in facts["timeline"]] == ["created", "claimed", "released", "claimed"]
    assert facts["attempts"][0]["took_seconds"] >= 0
    assert (facts["queue"]["state"], facts["queue"]["attempts"]) == ("claimed", 2)


def test_a_history_shows_no_payload(
    dispatchctl: Run, engine: Engine, machine: Machine, queued: Queued
) -> None:
    claimed(engine, machine, queued)
    committed(engine, steps.release, machine, queued, policy=RetryPolicy(max_attempts=1))
    for words in (
        ("sessions", "show", "PAY-1"),
        ("sessions", "show", "PAY-1", "--json"),
        ("dead-letters", "list", "--json"),
    ):
        answer = dispatchctl(*words)
        assert answer.code == 0
        assert "workspaceId" not in answer.out


def test_the_queue_is_listed_with_states_and_the_time_to_the_next_attempt(
    dispatchctl: Run, engine: Engine, tenant: Tenant, machine: Machine, queued: Queued
) -> None:
    held, backing_off = work(engine, tenant, machine), work(engine, tenant, machine)
    claimed(engine, machine, held)
    claimed(engine, machine, backing_off)
    committed(engine, steps.release, machine, backing_off, error="exit status 1")
    rows = {row["queue_id"]: row for row in dispatchctl("queue", "list", "--json").json}
    assert {key: row["state"] for key, row in rows.items()} == {
        str(queued.queue_id): "waiting",
        str(held.queue_id): "claimed",
        str(backing_off.queue_id): "backing off",
    }
    assert 0 < rows[str(backing_off.queue_id)]["next_attempt_in_seconds"] <= 60
    assert rows[str(backing_off.queue_id)]["last_error"] == "exit status 1"
    assert len(dispatchctl("queue", "list", "--state", "claimed", "--json").json) == 1
    assert (
        len(dispatchctl("queue", "list", "--state", "waiting", "--machine", machine.id, "--json").json) == 2
    )


def test_a_dead_letter_is_listed_and_redriven(
    dispatchctl: Run, engine: Engine, machine: Machine, queued: Queued
) -> None:
    assert dispatchctl("redrive", "PAY-1").code == 1
    claimed(engine, machine, queued)
    committed(engine, steps.release, machine, queued, error="no disk", policy=RetryPolicy(max_attempts=1))
    (letter,) = dispatchctl("dead-letters", "list", "--json").json
    assert (letter["session_id"], letter["error"]) == (str(queued.session_id), "no disk")
    assert "no machine serves acme/none" in dispatchctl("redrive", "PAY-1", "--repo", "acme/none").err
    redriven = dispatchctl("redrive", "PAY-1", "--json").json
    assert redriven["outcome"] == "redriven"
    assert session_of(engine, queued).status == "pending"
    assert dispatchctl("dead-letters", "list").out == "no dead letters\n"
    assert violations(engine) == []


def test_cancelling_ends_waiting_work_and_asks_a_machine_that_has_it(
    dispatchctl: Run, engine: Engine, tenant: Tenant, machine: Machine, queued: Queued
) -> None:
    held = work(engine, tenant, machine)
    claimed(engine, machine, held)
    cancelled = dispatchctl("cancel", queued.session_id, "--reason", "duplicate", "--json").json
    assert cancelled["outcome"] == "cancelled"
    assert session_of(engine, queued).status == "cancelled"
    assert dispatchctl("cancel", held.session_id, "--json").json["outcome"] == "stop_requested"
    assert history_of(engine, held)[-1] == "stop_requested"
    over = dispatchctl("cancel", queued.session_id)
    assert (over.code, "over already: cancelled" in over.err) == (1, True)


WANTED_AGAIN = sql("update dispatch_queue set wanted_again = true where id = :id")


def test_a_stop_that_is_under_way_is_seen_everywhere_and_not_asked_for_twice(
    dispatchctl: Run, engine: Engine, machine: Machine, queued: Queued
) -> None:
    lists = (("queue", "list"), ("sessions", "list"), ("sessions", "show", "PAY-1"))
    claimed(engine, machine, queued)
    for words in lists:
        assert "to be stopped" not in dispatchctl(*words).out
    assert dispatchctl("cancel", "PAY-1").out.startswith("PAY-1 is to be stopped: ")
    for words in lists:
        assert re.search(r"(claimed|dispatched), to be stopped( |\n)", dispatchctl(*words).out)
    assert dispatchctl("cancel", "PAY-1").out.startswith("PAY-1 was asked to stop already: ")
    assert dispatchctl("cancel", "PAY-1", "--json").json["asked_before"] is True
    assert history_of(engine, queued).count("stop_requested") == 1
    with transaction(engine, OPERATOR) as tx:
        tx.run(WANTED_AGAIN, id=queued.queue_id)
    for words in lists:
        assert ", to be stopped, wanted again" in dispatchctl(*words).out
    (row,) = dispatchctl("queue", "list", "--json").json
    assert (row["state"], row["stop_requested"], row["wanted_again"]) == ("claimed", True, True)
    assert dispatchctl("cancel", "PAY-1").out.startswith("PAY-1 is to be stopped: ")


def test_of_an_issues_sessions_cancel_means_the_open_one_and_redrive_the_dead_letter(
    dispatchctl: Run, engine: Engine, tenant: Tenant, machine: Machine
) -> None:
    dead, done, waiting = (work(engine, tenant, machine) for _ in range(3))
    claimed(engine, machine, dead)
    committed(engine, steps.release, machine, dead, policy=RetryPolicy(max_attempts=1))
    claimed(engine, machine, done)
    committed(engine, steps.complete, machine, done)
    assert dispatchctl("cancel", "PAY-1", "--json").json["session_id"] == str(waiting.session_id)
    again = dispatchctl("cancel", "PAY-1")
    assert (again.code, "PAY-1 has no open session; name the session: " in again.err) == (1, True)
    for each, status in ((dead, "error"), (done, "complete"), (waiting, "cancelled")):
        assert f"{each.session_id} ({status}, " in again.err
    assert dispatchctl("redrive", "PAY-1", "--json").json["session_id"] == str(dead.session_id)
    again = dispatchctl("redrive", "PAY-1")
    assert (again.code, "PAY-1 has no dead letter; name the session: " in again.err) == (1, True)


def test_a_sessions_id_says_whose_it_is(
    dispatchctl: Run, engine: Engine, queued: Queued, tenant: Tenant, machine: Machine
) -> None:
    a_tenant(engine)
    held = work(engine, tenant, machine)
    claimed(engine, machine, held)
    committed(engine, steps.release, machine, held, policy=RetryPolicy(max_attempts=1))
    assert dispatchctl("sessions", "show", queued.session_id).code == 0
    assert dispatchctl("cancel", queued.session_id).code == 0
    assert dispatchctl("redrive", held.session_id).code == 0
    assert dispatchctl("cancel", "PAY-1").code == 2
    other = dispatchctl("org", "create", "other", "--json").json["id"]
    elsewhere = dispatchctl("cancel", held.session_id, "--org", other)
    assert elsewhere.code == 1
    assert elsewhere.err == f'no session "{held.session_id}"; this organization has none\n'


def test_an_identifier_that_two_workspaces_have_names_the_candidates(
    dispatchctl: Run, engine: Engine, tenant: Tenant, machine: Machine, queued: Queued
) -> None:
    other = sql(
        "insert into workspaces (org_id, id, linear_organization_id, name, webhook_secret) values (:o, :i, 'x', 'x', 'x')"
    )
    second = Tenant(tenant.org_id, new_id())
    with transaction(engine, OPERATOR) as tx:
        tx.run(other, o=second.org_id, i=second.workspace_id)
    twin = work(engine, second, machine)
    answer = dispatchctl("cancel", "PAY-1")
    assert answer.code == 1
    assert str(twin.session_id) in answer.err
    assert str(queued.session_id) in answer.err


def test_a_sweep_recovers_and_reports_its_counts(
    dispatchctl: Run, engine: Engine, machine: Machine, queued: Queued
) -> None:
    claimed(engine, machine, queued)
    the_claim_is_older_by(engine, queued, 3600)
    report = dispatchctl("sweep", "--json")
    assert report.code == 0
    assert (report.json["released"], report.json["finished"]) == (1, True)
    assert "released" in dispatchctl("sweep").out


# -- output -------------------------------------------------------------------------------------------------------------


def test_titles_of_strangers_neither_reach_the_terminal_raw_nor_break_the_table(
    dispatchctl: Run, engine: Engine, tenant: Tenant, machine: Machine
) -> None:
    a_titled(engine, tenant, machine, HOSTILE, "PAY-1")
    a_titled(engine, tenant, machine, "x" * 10_000, "PAY-2")
    a_titled(engine, tenant, machine, "\N{COMBINING ACUTE ACCENT}" * 10_000, "PAY-3")
    for words in (
        ("sessions", "list"),
        ("sessions", "show", "PAY-1"),
        ("sessions", "show", "PAY-2"),
        ("queue", "list"),
    ):
        answer = dispatchctl(*words)
        assert answer.code == 0
        assert not {character for character in answer.out if not character.isprintable()} - {"\n"}
        assert max(map(len, answer.out.splitlines())) < 400
    assert len(dispatchctl("sessions", "list").out.splitlines()) == 4
    answer = dispatchctl("sessions", "list", "--json")
    assert answer.out.isascii()
    assert {row["linear_identifier"]: row["title"] for row in answer.json}["PAY-1"] == HOSTILE


def test_every_list_is_an_array_with_stable_keys(
    dispatchctl: Run, engine: Engine, tenant: Tenant, machine: Machine, queued: Queued
) -> None:
    dead = work(engine, tenant, machine)
    claimed(engine, machine, dead)
    committed(engine, steps.release, machine, dead, policy=RetryPolicy(max_attempts=1))
    dispatchctl("team-route", "set", "team")
    dispatchctl("label-route", "set", "bug", "--team", "team", "--repo", REPO)
    dispatchctl("project-route", "set", "p", "--repo", REPO)
    keys = {
        ("org", "list"): {"id", "name", "workspaces", "machines", "created_at"},
        ("workspace", "list"): {
            *("id", "name", "linear_organization_id", "app_user_id", "status", "status_reason", "rotating"),
            *("has_linear_token", "created_at"),
        },
        ("team-route", "list"): {"team_id", "team_key", "default_repo", "auto_dispatch"},
        ("label-route", "list"): {"label", "team_id", "repo"},
        ("project-route", "list"): {"project", "repo"},
        ("repo-route", "list"): {"repo", "machine", "source"},
        ("token", "list"): {
            *(
                "id",
                "prefix",
                "label",
                "machine",
                "status",
                "created_at",
                "expires_at",
                "last_used_at",
                "revoked_at",
            ),
        },
        ("orchestrators", "list"): {
            *(
                "id",
                "name",
                "online",
                "max_concurrent_jobs",
                "active_jobs",
                "held",
                "waiting",
                "heartbeat_age_seconds",
            ),
            *("last_heartbeat_at", "repos"),
        },
        ("sessions", "list"): {
            *(
                "id",
                "linear_identifier",
                "status",
                "stop_requested",
                "wanted_again",
                "error_code",
                "repo",
                "orchestrator_id",
                "machine",
                "attempts",
            ),
            *("progress_percent", "age_seconds", "created_at", "ended_at", "pr_url", "title"),
        },
        ("queue", "list"): {
            *(
                "queue_id",
                "session_id",
                "linear_identifier",
                "machine",
                "state",
                "stop_requested",
                "wanted_again",
                "attempts",
                "age_seconds",
            ),
            *("claim_age_seconds", "next_attempt_in_seconds", "last_error", "title"),
        },
        ("dead-letters", "list"): {
            *("session_id", "linear_identifier", "title", "repo", "attempts", "reason", "error", "died_at"),
        },
        ("doctor",): {"check", "state", "detail"},
    }
    for words, expected in keys.items():
        rows = dispatchctl(*words, "--json").json
        assert rows, words
        assert all(set(row) == expected for row in rows), words
        assert dispatchctl(*words).out.strip()


# -- doctor -------------------------------------------------------------------------------------------------------------


def test_a_healthy_deployment_has_nothing_wrong(dispatchctl: Run, connected: UUID) -> None:
    answer = dispatchctl("doctor")
    assert answer.code == 0, answer.out
    assert "nothing is wrong" in answer.err
    assert all(
        name in answer.out
        for name in ("connection", "server", "clocks", "schema", "invariants", "queue", "sweep")
    )


def test_the_doctor_finds_work_that_no_machine_will_take_and_a_sweep_that_nobody_calls(
    dispatchctl: Run, engine: Engine, machine: Machine, queued: Queued, tenant: Tenant
) -> None:
    wrong = _wrong(dispatchctl)
    assert not any(name.startswith("machines of") for name in wrong)
    held = work(engine, tenant, machine)
    claimed(engine, machine, held)
    the_claim_is_older_by(engine, held, 3600)
    the_machine_was_last_heard(engine, machine, 3600)
    the_backoff_has_passed(engine, queued)
    wrong = _wrong(dispatchctl)
    assert {"queue", "sweep"} <= wrong
    assert any(name.startswith("machines of") for name in wrong)


def test_the_doctor_finds_a_violated_invariant(dispatchctl: Run, connected: UUID, engine: Engine) -> None:
    assert "invariants" not in _wrong(dispatchctl)
    org_id = UUID(dispatchctl("org", "list", "--json").json[0]["id"])
    tenant = Tenant(org_id, connected)
    queued = work(engine, tenant, a_machine(engine, tenant))
    with transaction(engine, OPERATOR) as tx:
        tx.run(sql("update dispatch_sessions set status = 'running' where id = :id"), id=queued.session_id)
    assert "invariants" in _wrong(dispatchctl)


def test_the_doctor_counts_in_english_and_says_what_to_do_to_the_end_of_the_line(
    dispatchctl: Run, engine: Engine, machine: Machine, queued: Queued, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BRIDGE_ENCRYPTION_KEY", OTHER_KEY)
    with transaction(engine, OPERATOR) as tx:
        tx.run(sql("update workspaces set webhook_secret = 'no secret of ours'"))
    answer = dispatchctl("doctor")
    assert answer.err == "1 of these is wrong\n"
    assert "…" not in answer.out
    assert "a stored secret is not in the form iv.ciphertext.tag\n" in answer.out
    assert "1 row; the oldest" in answer.out
    with transaction(engine, OPERATOR) as tx:
        tx.run(sql("update workspaces set status = 'revoked', status_reason = :why"), why="x" * 150)
    answer = dispatchctl("doctor")
    assert answer.err == "2 of these are wrong\n"
    assert "x; `workspace set-token`\n" in answer.out
    assert dispatchctl("doctor", "--json").err == ""


def test_the_doctor_names_machines_that_no_token_lets_in(
    dispatchctl: Run, engine: Engine, tenant: Tenant
) -> None:
    a_machine(engine, tenant, name="laptop")
    locked_out = a_machine(engine, tenant, name="desktop")
    assert "no valid token" not in dispatchctl("doctor").out
    committed(engine, orchestrators.revoke_token, org_id=tenant.org_id, token_id=locked_out.token_id)
    assert "no valid token, so it can ask for nothing: desktop; `token mint`" in dispatchctl("doctor").out


@pytest.fixture
def listens(environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATABASE_LISTEN_URL", environment["DATABASE_URL"])


def test_listening_is_off_until_it_is_turned_on(dispatchctl: Run) -> None:
    assert dispatchctl("listen", "status") == (0, "off\n", "")
    assert dispatchctl("listen", "on", "--json").json == {"state": "on", "changed": True}
    assert dispatchctl("listen", "status", "--json").json == {"state": "on"}
    again = dispatchctl("listen", "on")
    assert (again.code, again.out) == (0, "on already\n")
    assert "DATABASE_LISTEN_URL" in again.err
    assert dispatchctl("listen", "off").out == "off now\n"
    assert dispatchctl("listen", "status").out == "off\n"


def test_turning_listening_on_needs_the_migration(dispatchctl: Run, engine: Engine) -> None:
    with transaction(engine, OPERATOR) as tx:
        tx.run(sql("drop function tell_the_machine cascade"))
    for word in ("on", "off", "status"):
        answer = dispatchctl("listen", word)
        assert (answer.code, "run `migrate`" in answer.err) == (1, True)


def test_the_doctor_says_when_one_half_of_listening_is_missing(
    dispatchctl: Run, request: pytest.FixtureRequest
) -> None:
    assert _states(dispatchctl, "listen") == ["ok"]
    dispatchctl("listen", "on")
    assert _states(dispatchctl, "listen") == ["note"]
    request.getfixturevalue("listens")
    assert _states(dispatchctl, "listen") == ["ok", "ok"]
    dispatchctl("listen", "off")
    assert _states(dispatchctl, "listen") == ["wrong", "ok"]


def test_the_doctor_finds_a_listening_connection_that_hears_nothing(
    dispatchctl: Run, postgres: Databases, listens: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    dispatchctl("listen", "on")
    monkeypatch.setenv("DATABASE_POOL_SIZE", "1")
    monkeypatch.setattr(doctor, "HEARD_WITHIN_SECONDS", 0.2)
    assert _states(dispatchctl, "listen") == ["ok", "ok"]
    monkeypatch.setenv("DATABASE_LISTEN_URL", postgres.url)
    assert _states(dispatchctl, "listen") == ["ok", "wrong"]
    monkeypatch.setenv("DATABASE_LISTEN_URL", "postgresql://u:hunter2@127.0.0.1:1/d")
    assert _states(dispatchctl, "listen") == ["ok", "wrong"]
    assert "hunter2" not in "".join(map(str, dispatchctl("doctor")))


def test_a_database_without_the_schema_is_said_to_need_migrate(dispatchctl: Run, engine: Engine) -> None:
    with transaction(engine, OPERATOR) as tx:
        tx.run(sql("alter table organizations rename to gone"))
        tx.run(sql("drop table alembic_version"))
    answer = dispatchctl("org", "list")
    assert (answer.code, "run `migrate`" in answer.err) == (1, True)
    answer = dispatchctl("doctor")
    assert (answer.code, "run `migrate`" in answer.out) == (1, True)


def _states(dispatchctl: Run, check: str) -> list[str]:
    return [row["state"] for row in dispatchctl("doctor", "--json").json if row["check"] == check]


def _wrong(dispatchctl: Run) -> set[str]:
    return {row["check"] for row in dispatchctl("doctor", "--json").json if row["state"] == "wrong"}
