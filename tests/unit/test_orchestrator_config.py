"""What the owner decides: which source wins, what a refusal names, and that the token is neither shown nor taken elsewhere."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from orchestrator.__main__ import main
from orchestrator.config import Config, Misconfigured, load
from orchestrator.journal import Journal
from orchestrator.options import OPTIONS, PREFIX

URL = "https://dispatch.example"
TOKEN = "dp_orch_" + "h" * 43
OTHER_TOKEN = "dp_orch_" + "o" * 43


@dataclass(frozen=True)
class Owner:
    """Somebody with a home, in which there may be a file."""

    home: Path

    @property
    def file(self) -> Path:
        return self.home / ".config" / "devpilot-dispatch" / "orchestrator.toml"

    def write(self, text: str, mode: int = 0o600) -> Path:
        self.file.parent.mkdir(parents=True, exist_ok=True)
        self.file.touch()
        self.file.chmod(mode)
        self.file.write_text(text)
        return self.file

    def load(self, flags: dict[str, Any] | None = None, /, **variables: str) -> Config:
        return load(flags or {}, {"HOME": str(self.home), **variables}, None)

    def refusal(self, flags: dict[str, Any] | None = None, /, **variables: str) -> str:
        with pytest.raises(Misconfigured) as refused:
            self.load(flags, **variables)
        assert TOKEN not in str(refused.value)
        assert OTHER_TOKEN not in str(refused.value)
        return str(refused.value)


@pytest.fixture
def owner(tmp_path: Path) -> Owner:
    return Owner(tmp_path)


GIVEN = f'url = "{URL}"\ntoken = "{TOKEN}"\n'


# -- which source wins --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "given", "read"),
    [
        ("name", ('"of-file"', "of-environment", "of-flag"), ["of-file", "of-environment", "of-flag"]),
        ("directory", ('"/file"', "/environment", "/flag"), ["/file", "/environment", "/flag"]),
        ("max_jobs", ("1", "2", "3"), [1, 2, 3]),
        ("repos", ('["a/b", "c/d"]', "e/f, g/h", "i/j"), [["a/b", "c/d"], ["e/f", "g/h"], ["i/j"]]),
        ("transport", ('"poll"', "listen", "realtime"), ["poll", "listen", "realtime"]),
        ("interactive", ("true", "no", True), [True, False, True]),
        ("env", ('["A_B"]', "C,D", "E"), [["A_B"], ["C", "D"], ["E"]]),
        ("exec", ('["a b", "c"]', "'d e' f", "g"), [["a b", "c"], ["d e", "f"], ["g"]]),
        ("timeout", ("10", "20", "30"), [10, 20, 30]),
    ],
)
def test_a_flag_wins_over_the_environment_and_that_over_the_file(
    name: str, given: tuple[str, str, Any], read: list[Any], owner: Owner
) -> None:
    in_file, variable, flag = given
    owner.write(f"{GIVEN}{name} = {in_file}\n")
    of_environment = {PREFIX + name.upper(): variable}
    assert getattr(owner.load(), name) == read[0]
    assert getattr(owner.load(**of_environment), name) == read[1]
    assert getattr(owner.load({name: flag}, **of_environment), name) == read[2]


def test_what_nobody_says_is_the_default(owner: Owner) -> None:
    config = owner.load({"url": URL, "token": TOKEN})
    for name, option in OPTIONS.items():
        if name not in ("url", "token", "name", "state"):
            assert getattr(config, name) == option.default


def test_the_file_may_be_elsewhere_and_must_be_there_when_it_is_named(owner: Owner) -> None:
    elsewhere = owner.write(GIVEN).rename(owner.home / "mine.toml")
    assert load({}, {"HOME": str(owner.home)}, elsewhere).url == URL
    with pytest.raises(Misconfigured, match=r"none\.toml does not exist"):
        load({}, {"HOME": str(owner.home)}, owner.home / "none.toml")
    folder = owner.home / "xdg" / "devpilot-dispatch"
    folder.mkdir(parents=True)
    elsewhere.rename(folder / "orchestrator.toml")
    assert owner.load(XDG_CONFIG_HOME=str(owner.home / "xdg")).url == URL


@pytest.mark.parametrize("name", ["url", "token"])
def test_what_must_be_said_is_asked_for_with_all_the_ways_to_say_it(name: str, owner: Owner) -> None:
    said = owner.refusal({key: value for key, value in (("url", URL), ("token", TOKEN)) if key != name})
    assert f"{name} is missing: give --{name}, {PREFIX}{name.upper()}, or {name} in {owner.file}" in said


def test_a_command_is_words_or_a_line_that_is_split_like_a_shell_does(owner: Owner) -> None:
    owner.write(GIVEN + """exec = "claude -p 'two words' \\"$HOME\\""\n""")
    assert owner.load().exec == ["claude", "-p", "two words", "$HOME"]
    owner.write(GIVEN + """exec = ["claude", "-p", "two words", ""]\n""")
    assert owner.load().exec == ["claude", "-p", "two words", ""]


# -- what a refusal names -----------------------------------------------------------------------------------------------


def test_an_unknown_key_is_named_with_those_that_are_known(owner: Owner) -> None:
    owner.write(GIVEN + "max_job = 3\n")
    said = owner.refusal()
    assert f"max_job in {owner.file} is unknown" in said
    assert all(name in said for name in OPTIONS)


def test_an_unknown_variable_is_named_with_those_that_are_known(owner: Owner) -> None:
    owner.write(GIVEN)
    said = owner.refusal(ORCHESTRATOR_MAX_JOB="3")
    assert "ORCHESTRATOR_MAX_JOB is unknown" in said
    assert all(PREFIX + name.upper() in said for name in OPTIONS)


def test_the_file_can_be_named_by_a_variable_that_is_no_option(owner: Owner) -> None:
    owner.write(GIVEN)
    assert owner.load(ORCHESTRATOR_CONFIG="/mine.toml", ORCHESTRA="x", PATH="/bin").url == URL


ODD: list[tuple[str, str, str]] = [
    ("max_jobs", "0", "a whole number from 1 to 64"),
    ("max_jobs", "65", "a whole number from 1 to 64"),
    ("max_jobs", "four", "a whole number from 1 to 64"),
    ("max_jobs", "1.5", "a whole number from 1 to 64"),
    ("max_jobs", "9" * 5000, "a whole number from 1 to 64"),
    ("timeout", "-1", "a whole number from 1 to"),
    ("transport", "carrier pigeon", "one of poll, listen, realtime"),
    ("repos", "a/b,widget", "'widget' is not owner/name"),
    ("repos", "a/b/c", "'a/b/c' is not owner/name"),
    ("name", "x" * 121, "at most 120 characters"),
    ("name", "two\nlines", "must be text"),
    ("name", " ", "must be text"),
    ("exec", "an 'open quote", "cannot be split into words"),
    ("exec", "", "a command and its words"),
    ("env", "A=1", "'A=1' is no name of a variable"),
    ("env", "ORCHESTRATOR_TOKEN", "ORCHESTRATOR_TOKEN is not passed on"),
    ("url", "dispatch.example", "an address like https://host/path"),
    ("url", "ftp://dispatch.example", "an address like https://host/path"),
    ("url", "https://", "an address like https://host/path"),
    ("url", "https://me:secret@dispatch.example", "an address like https://host/path"),
    ("url", "https://:secret@dispatch.example", "an address like https://host/path"),
    ("url", "https://dispatch.example/?a=b", "an address like https://host/path"),
    ("url", "https://dispatch.example/#a", "an address like https://host/path"),
    ("url", "https://dispatch.example:port", "an address like https://host/path"),
    ("url", "https://dispatch.example:99999", "an address like https://host/path"),
    ("url", "https://[::1", "an address like https://host/path"),
    ("url", "http://dispatch.example", "must begin with https://"),
    ("token", "short", "is no token"),
    ("token", "with a space in the middle", "is no token"),
    ("token", "hunter2-hunter2-hunter2\nX: y", "is no token"),
]


@pytest.mark.parametrize(
    ("name", "value", "why"), ODD, ids=[f"{name}-{value[:30]}" for name, value, _ in ODD]
)
def test_a_malformed_value_names_its_source(name: str, value: str, why: str, owner: Owner) -> None:
    quoted = value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    others = "".join(line for line in GIVEN.splitlines(keepends=True) if not line.startswith(name))
    owner.write(f'{others}{name} = "{quoted}"\n')
    flag, variable = "--" + name.replace("_", "-"), PREFIX + name.upper()
    for said, label in (
        (owner.refusal(), f"{name} in {owner.file} "),
        (owner.refusal(**{variable: value}), f"{variable} "),
        (owner.refusal({name: value}, **{variable: value}), f"{flag} "),
    ):
        assert said.startswith(label)
        assert why in said
        assert name != "token" or value not in said


@pytest.mark.parametrize(
    "line",
    [
        "max_jobs = true", "max_jobs = 4.0", "max_jobs = [4]", "repos = 5", "repos = [5]", "repos = { a = 1 }",
        "exec = 5", "exec = [5]", "exec = []", "exec = { a = 1 }", 'exec = ["a", "nul\\u0000"]', "interactive = 2", "env = [1]",
        "directory = 1", "transport = 1", "state = false", "name = 1979-05-27",
    ],
)  # fmt: skip
def test_a_value_of_another_type_is_named(line: str, owner: Owner) -> None:
    owner.write(f"{GIVEN}{line}\n")
    assert owner.refusal().startswith(f"{line.split(maxsplit=1)[0]} in {owner.file} ")


@pytest.mark.parametrize("text", ["url = ", "= 1", 'url = "a"\nurl = "b"', "[", "url = \ufffe\x00"])
def test_a_file_that_is_no_toml_is_named(text: str, owner: Owner) -> None:
    owner.write(text)
    assert owner.refusal().startswith(f"{owner.file} is no TOML: ")


def test_a_file_in_another_encoding_is_named(owner: Owner) -> None:
    owner.write("").write_bytes(b'name = "\xff"')
    assert owner.refusal().startswith(f"{owner.file} is no TOML: ")


def test_a_folder_in_the_place_of_the_file_is_named(owner: Owner) -> None:
    owner.file.mkdir(parents=True, mode=0o700)
    assert owner.refusal().startswith(f"{owner.file} cannot be read: ")


# -- the token ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o660, 0o606, 0o620, 0o601])
def test_a_file_that_others_can_reach_is_refused_with_the_command_that_mends_it(
    mode: int, owner: Owner
) -> None:
    owner.write(GIVEN, mode=mode)
    said = owner.refusal()
    assert said.endswith(f"chmod 600 {owner.file}")
    owner.file.chmod(0o600)
    assert owner.load().token == TOKEN


@pytest.mark.parametrize("mode", [0o600, 0o400])
def test_a_file_of_the_owner_alone_is_read(mode: int, owner: Owner) -> None:
    owner.write(GIVEN, mode=mode)
    assert owner.load().token == TOKEN


def test_a_file_of_somebody_else_is_refused(owner: Owner, monkeypatch: pytest.MonkeyPatch) -> None:
    owner.write(GIVEN)
    me = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: me + 1)
    assert "must be yours alone" in owner.refusal()


@pytest.mark.parametrize(
    "url", ["http://localhost:8080", "http://127.0.0.1", "http://[::1]:80", "HTTP://LOCALHOST"]
)
def test_the_token_goes_over_plain_http_to_this_machine(url: str, owner: Owner) -> None:
    assert owner.load({"url": url, "token": TOKEN}).url == url


@pytest.mark.parametrize(
    "url",
    [
        "http://10.0.0.1",
        "http://localhost.example",
        "http://127.0.0.1.example",
        "http://0.0.0.0",
        "http://[::2]",
    ],
)
def test_and_to_no_other(url: str, owner: Owner) -> None:
    assert "the token would be readable on the way" in owner.refusal({"url": url, "token": TOKEN})


def test_the_token_of_the_file_is_not_taken_to_another_url(owner: Owner) -> None:
    owner.write(GIVEN)
    elsewhere = "https://elsewhere.example"
    for said in (owner.refusal({"url": elsewhere}), owner.refusal(ORCHESTRATOR_URL=elsewhere)):
        assert f"the token in {owner.file} belongs to {URL}; for {elsewhere} give its own" in said


def test_nor_is_that_of_the_environment(owner: Owner) -> None:
    said = owner.refusal({"url": "https://elsewhere.example"}, ORCHESTRATOR_URL=URL, ORCHESTRATOR_TOKEN=TOKEN)
    assert f"the token in the environment belongs to {URL}" in said


def test_it_is_when_the_url_is_the_same_or_the_other_brings_its_own(owner: Owner) -> None:
    owner.write(GIVEN)
    assert owner.load({"url": URL + "/"}).token == TOKEN
    assert owner.load(ORCHESTRATOR_URL=URL + "//").token == TOKEN
    owner.write(f'url = " {URL}/ "\ntoken = "{TOKEN}"\n')
    assert owner.load({"url": URL}).token == TOKEN
    elsewhere = "https://elsewhere.example"
    assert owner.load({"url": elsewhere, "token": OTHER_TOKEN}).token == OTHER_TOKEN
    assert owner.load(ORCHESTRATOR_URL=elsewhere, ORCHESTRATOR_TOKEN=OTHER_TOKEN).token == OTHER_TOKEN
    assert owner.load({"url": elsewhere}, ORCHESTRATOR_TOKEN=OTHER_TOKEN).token == OTHER_TOKEN


@pytest.mark.parametrize("beside", ['"ftp://x"', "5", '"https://dispatch.example:port"'])
def test_a_malformed_url_beside_the_token_is_named_although_another_is_used(
    beside: str, owner: Owner
) -> None:
    owner.write(f'url = {beside}\ntoken = "{TOKEN}"\n')
    assert owner.refusal({"url": URL}).startswith(f"url in {owner.file} must be ")
    variables = {"ORCHESTRATOR_URL": "ftp://x", "ORCHESTRATOR_TOKEN": TOKEN}
    assert owner.refusal({"url": URL}, **variables).startswith("ORCHESTRATOR_URL must be ")


@pytest.mark.parametrize("shown", [repr, str, "{}".format, lambda config: repr([config])])
def test_the_token_is_not_shown(shown: Callable[[Config], str], owner: Owner) -> None:
    assert TOKEN not in shown(owner.load({"url": URL, "token": TOKEN}))


def test_the_agent_sees_what_the_owner_names_and_the_usual(owner: Owner) -> None:
    config = owner.load({"url": URL, "token": TOKEN, "env": "API_KEY,NOT_SET"})
    variables = {"PATH": "/bin", "HOME": "/h", "API_KEY": "k", "SECRET": "s", "ORCHESTRATOR_TOKEN": TOKEN}
    assert config.environment(variables) == {"PATH": "/bin", "HOME": "/h", "API_KEY": "k"}


# -- the name and the state folder --------------------------------------------------------------------------------------


def test_a_name_is_made_once_and_kept_although_the_host_is_renamed(
    owner: Owner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "Anns-laptop.local")
    first = owner.load({"url": URL, "token": TOKEN})
    assert first.name.startswith("Anns-laptop-")
    monkeypatch.setattr(socket, "gethostname", lambda: "dhcp-7")
    assert owner.load({"url": URL, "token": TOKEN}).name == first.name
    assert stat.S_IMODE(first.state.stat().st_mode) == 0o700


@pytest.mark.parametrize("host", ["", "x" * 300, "a b\n/..", "\u202e"])
def test_any_host_gives_a_name_that_the_protocol_takes(
    host: str, owner: Owner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: host)
    name = owner.load({"url": URL, "token": TOKEN}).name
    assert OPTIONS["name"].read(name) == name


def test_two_machines_of_one_host_name_get_two_names(owner: Owner) -> None:
    names = {
        owner.load({"url": URL, "token": TOKEN, "state": str(owner.home / str(n))}).name for n in range(4)
    }
    assert len(names) > 1


@pytest.mark.parametrize("kept", [b"", b"\n", b"\xff", b"two\nlines\n", b"x" * 121])
def test_a_kept_name_that_is_none_is_made_again(kept: bytes, owner: Owner) -> None:
    (owner.home / "name").write_bytes(kept)
    flags = {"url": URL, "token": TOKEN, "state": str(owner.home)}
    made = owner.load(flags).name
    assert owner.load(flags).name == made
    assert kept != made.encode()


def test_a_state_folder_is_the_same_for_an_agent_that_runs_elsewhere(
    owner: Owner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files that an agent is given lie below it."""
    monkeypatch.chdir(owner.home)
    found = owner.load({"url": URL, "token": TOKEN, "state": "here"})
    assert found.state == owner.home / "here"


def test_each_server_has_its_state_folder_below_the_owners(owner: Owner) -> None:
    urls = [
        URL,
        URL + ":8443",
        URL + "/a",
        URL + "/a/b",
        "https://other.example",
        "http://localhost",
        "http://[::1]",
    ]
    folders = [owner.load({"url": url, "token": TOKEN}).state for url in urls]
    assert len(set(folders)) == len(urls)
    assert {folder.parent for folder in folders} == {owner.home / ".local/state/devpilot-dispatch"}
    xdg = owner.load({"url": URL, "token": TOKEN}, XDG_STATE_HOME=str(owner.home / "xdg")).state
    assert xdg.parent == owner.home / "xdg" / "devpilot-dispatch"


def test_a_state_folder_that_cannot_be_made_is_named_with_the_way_out(owner: Owner) -> None:
    (owner.home / "file").write_text("")
    said = owner.refusal({"url": URL, "token": TOKEN, "state": str(owner.home / "file" / "state")})
    assert str(owner.home / "file" / "state") in said
    assert "--state" in said


# -- the program --------------------------------------------------------------------------------------------------------


@pytest.fixture
def at_home(owner: Owner, monkeypatch: pytest.MonkeyPatch) -> Owner:
    """The program's own environment is that of `owner`."""
    for name in [name for name in os.environ if name.startswith((PREFIX, "XDG_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(owner.home))
    return owner


@pytest.mark.parametrize("command", ["connect", "once", "status", "doctor"])
@pytest.mark.parametrize(
    "wrong",
    [
        ("", 0o600, "url is missing"),
        (GIVEN, 0o644, "chmod 600"),
        (GIVEN + "nonsense = 1\n", 0o600, "nonsense in"),
        (GIVEN + "max_jobs = 0\n", 0o600, "max_jobs in"),
        (f'url = "{URL}"\ntoken = "{TOKEN} x"\n', 0o600, "is no token"),
        (f'url = "{URL}"\ntoken = "{TOKEN}\n', 0o600, "is no TOML"),
    ],
)
def test_a_wrong_configuration_is_exit_code_2_and_one_line_without_the_token(
    command: str, wrong: tuple[str, int, str], at_home: Owner, capsys: pytest.CaptureFixture[str]
) -> None:
    text, mode, why = wrong
    at_home.write(text, mode=mode)
    assert main([command]) == 2
    said = capsys.readouterr()
    (line,) = said.err.splitlines()
    assert line.startswith("orchestrator: ")
    assert why in line
    assert "dp_orch_hh" not in said.out + said.err


@pytest.mark.parametrize("command", ["connect", "once"])
@pytest.mark.parametrize(
    ("exec_", "why"), [("", "exec is missing"), ('exec = "no-such-agent"\n', "'no-such-agent'")]
)
def test_so_is_a_command_that_is_not_there(
    command: str, exec_: str, why: str, at_home: Owner, capsys: pytest.CaptureFixture[str]
) -> None:
    at_home.write(GIVEN + exec_)
    assert main([command]) == 2
    assert why in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments", [[], ["conect"], ["connect", "--max-job", "3"], ["connect", "--max", "3"], ["connect", "x"]]
)
def test_so_is_an_unknown_word_and_flags_are_not_guessed(
    arguments: list[str], at_home: Owner, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2


def test_a_second_orchestrator_with_the_same_state_folder_is_exit_code_4(
    at_home: Owner, capsys: pytest.CaptureFixture[str]
) -> None:
    at_home.write(GIVEN + 'exec = "true"\n')
    journal = Journal(at_home.load().state)
    try:
        assert main(["connect"]) == 4
    finally:
        journal.close()
    assert f"process {os.getpid()}" in capsys.readouterr().err


def test_the_variable_names_the_file_and_the_flag_wins(
    at_home: Owner, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    one = at_home.write(GIVEN + 'name = "one"\n').rename(at_home.home / "one.toml")
    other = at_home.write(GIVEN + 'name = "other"\n').rename(at_home.home / "other.toml")
    monkeypatch.setenv("ORCHESTRATOR_CONFIG", str(one))
    assert main(["status"]) == 0
    assert main(["status", "--config", str(other)]) == 0
    assert [line.split(maxsplit=1)[0] for line in capsys.readouterr().out.splitlines() if URL in line] == [
        "one",
        "other",
    ]
