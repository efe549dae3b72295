"""A certificate and its key, or why they cannot be used."""

import socket
import ssl
import threading

import pytest
from certificates import self_signed

from deployments.config import ConfigError
from deployments.config.settings import parse


def config(made):
    return parse({"tls": {"certificate": str(made.certificate), "key": str(made.key)}}).tls


@pytest.fixture
def made(tmp_path):
    return self_signed(tmp_path)


def test_serve_is_told_the_files(made):
    assert config(made).http_options() == {
        "ssl_certfile": str(made.certificate),
        "ssl_keyfile": str(made.key),
    }


def test_a_key_of_another_certificate_and_what_is_no_key(made, tmp_path):
    (tmp_path / "other").mkdir()
    other = self_signed(tmp_path / "other")
    with pytest.raises(ConfigError, match=r"^tls: .* cannot be used \(KEY_VALUES_MISMATCH\)"):
        config(made._replace(key=other.key)).http_options()
    made.key.write_text("secret that is no key")
    with pytest.raises(ConfigError, match=r"^tls: .* cannot be used") as refused:
        config(made).http_options()
    assert "secret" not in str(refused.value)


def test_a_key_with_a_passphrase_is_refused_and_nobody_asked(tmp_path):
    with pytest.raises(ConfigError, match=r"^tls: .* cannot be used"):
        config(self_signed(tmp_path, b"a phrase")).http_options()


@pytest.mark.parametrize(
    ("begins_in_days", "why"), [(-2, "certificate has expired"), (2, "certificate is not yet valid")]
)
def test_a_certificate_that_is_not_valid_now_is_refused(tmp_path, begins_in_days, why):
    made = self_signed(tmp_path, begins_in_days=begins_in_days)
    with pytest.raises(ConfigError, match=rf"^tls\.certificate: .* refuse .*server\.pem \({why}\)"):
        config(made).http_options()


def test_whether_this_machine_knows_a_certificate(made, monkeypatch):
    assert not config(made).is_known()
    monkeypatch.setenv("SSL_CERT_FILE", str(made.certificate))
    assert config(made).is_known()


@pytest.mark.parametrize("name", ["certificate", "key"])
def test_a_file_that_is_not_there_is_named(made, tmp_path, name):
    gone = made._replace(**{name: tmp_path / "gone.pem"})
    with pytest.raises(ConfigError, match=rf"^tls\.{name}: .*gone\.pem cannot be read \(No such file"):
        config(gone).http_options()


def test_grpc_beside_it_would_be_in_the_open(made):
    values = {"tls": {"certificate": str(made.certificate), "key": str(made.key)}, "grpc": {"port": 9000}}
    with pytest.raises(ConfigError, match="speaks gRPC without TLS"):
        parse(values)


def test_the_server_trusts_itself_and_nobody_else(made, tmp_path):
    (tmp_path / "other").mkdir()
    other = self_signed(tmp_path / "other")

    def shake(certificate):
        ours, theirs = socket.socketpair()
        server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        server.load_cert_chain(certificate.certificate, certificate.key)

        def serve():
            try:
                server.wrap_socket(theirs, server_side=True).close()
            except ssl.SSLError:
                theirs.close()

        serving = threading.Thread(target=serve)
        serving.start()
        try:
            config(made).trust().wrap_socket(ours, server_hostname="localhost").close()
        finally:
            ours.close()
            serving.join()

    shake(made)
    with pytest.raises(ssl.SSLCertVerificationError):
        shake(other)
