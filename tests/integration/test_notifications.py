"""The driver's connection as a listener: whatever comes, in whatever pieces, in clear or through TLS, no name is lost."""

from __future__ import annotations

import select
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from pg8000.exceptions import InterfaceError
from pydantic import SecretStr
from sqlalchemy import Engine
from sqlalchemy.engine import make_url

from shared import one_flight
from shared.db import listener_for, sql, transaction
from shared.settings import Settings

MANY = 5_000
SAY = sql("select pg_notify('dispatch_queue', 'machine ' || n) from generate_series(1, :many) n")
END = sql(
    "select pg_terminate_backend(pid, 5000) from pg_stat_activity where application_name = 'devpilot-dispatch listen'"
)


@pytest.fixture
def listener(settings: Settings) -> Iterator[one_flight.Connection]:
    with closing(listener_for(listening(settings))) as connection:
        yield connection


def listening(settings: Settings, **changes: object) -> Settings:
    return settings.model_copy(update={"database_listen_url": settings.database_url, **changes})


def said(engine: Engine, many: int = 1) -> set[str]:
    with transaction(engine) as tx:
        tx.all(SAY, many=many)
    return {f"machine {n}" for n in range(1, many + 1)}


def heard(listener: one_flight.Connection, count: int) -> set[str]:
    """Everything up to that many names; fewer if nothing more comes for 10 s."""
    names = set[str]()
    while len(names) < count and (more := listener.notified(10)):
        names |= more
    return names


def test_every_name_of_a_commit_that_names_thousands_is_heard(
    listener: one_flight.Connection, engine: Engine
) -> None:
    assert said(engine, MANY) == heard(listener, MANY)
    assert listener.notified(0) == set()


def test_names_that_arrive_with_the_answer_to_a_probe_are_heard(
    listener: one_flight.Connection, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(one_flight, "IDLE_SECONDS", 0)
    names = said(engine, 50)
    assert listener.answers()
    assert heard(listener, 50) == names


def test_a_message_that_has_come_in_part_is_put_together(listener: one_flight.Connection) -> None:
    message = b"A" + (4 + 4 + len(b"dispatch_queue\0m\0")).to_bytes(4) + bytes(4) + b"dispatch_queue\0m\0"
    listener._left = message[:7]
    assert listener.notified(0) == set()
    listener._left += message[7:] + message[:3]
    assert listener.notified(0) == {"m"}
    assert listener._left == message[:3]


def test_what_follows_an_answer_in_the_same_packet_is_kept(
    listener: one_flight.Connection, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    message = b"A" + (4 + 4 + len(b"dispatch_queue\0m\0")).to_bytes(4) + bytes(4) + b"dispatch_queue\0m\0"
    real = listener._sock.read1
    monkeypatch.setattr(listener._sock, "read1", lambda size: real(size) + message, raising=False)
    listener.execute_simple("")
    assert listener.notified(0) == {"m"}


def test_a_listener_that_was_ended_says_so_and_is_not_used_again(
    listener: one_flight.Connection, engine: Engine
) -> None:
    with transaction(engine) as tx:
        tx.all(END)
    for _ in range(2):
        with pytest.raises(InterfaceError):
            listener.notified(10)


def test_the_server_ends_a_listener_that_is_frozen(listener: one_flight.Connection) -> None:
    found = listener.run(
        "select name, setting from pg_settings where name in ('idle_session_timeout', 'tcp_user_timeout')"
    )
    assert dict(found) == {"idle_session_timeout": "300000", "tcp_user_timeout": "30000"}


# -- TLS: the server of the tests has none, so that a gate in front of it does what a server with TLS does ---------------------


def a_certificate(folder: Path) -> tuple[Path, Path]:
    """A key and a certificate of its own for 127.0.0.1's name."""
    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.now(UTC)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    made = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    certificate, private = folder / "certificate.pem", folder / "key.pem"
    certificate.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    private.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
    )
    return certificate, private


@contextmanager
def a_gate(url: str, certificate: Path, private: Path) -> Iterator[int]:
    """Takes one connection, answers its request for TLS, and forwards what is in it. Yields its port."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, private)
    target = make_url(url)

    def forward() -> None:
        client, _ = gate.accept()
        with socket.create_connection((target.host or "", target.port or 5432)) as server, suppress(OSError):
            client.recv(8)
            client.sendall(b"S")
            with context.wrap_socket(client, server_side=True) as inside:
                while True:
                    ready = [inside] if inside.pending() else select.select([inside, server], [], [])[0]
                    for source in ready:
                        data = source.recv(65536)
                        if not data:
                            return
                        (server if source is inside else inside).sendall(data)

    with socket.create_server(("127.0.0.1", 0)) as gate:
        thread = threading.Thread(target=forward)
        thread.start()
        yield gate.getsockname()[1]
        thread.join()


def test_through_verified_tls_every_name_is_heard_too(
    settings: Settings, engine: Engine, database_url: str, tmp_path: Path
) -> None:
    certificate, private = a_certificate(tmp_path)
    with a_gate(database_url, certificate, private) as port:
        url = make_url(database_url).set(host="localhost", port=port).render_as_string(hide_password=False)
        far = listening(
            settings,
            database_listen_url=SecretStr(url),
            database_tls="verify",
            database_ca_file=str(certificate),
        )
        with closing(listener_for(far)) as listener:
            assert said(engine, MANY) == heard(listener, MANY)
            assert listener.answers()
            assert said(engine, 3) == heard(listener, 3)
