"""The section `tls`: HTTPS at the server's own port.

Owns which files it takes and that they fit together, and how the server trusts itself. Each ingress reads the
files when it starts; Serve's proxy for gRPC knows no TLS.
"""

import ssl
from contextlib import suppress
from pathlib import Path

from pydantic import Field

from deployments.config import ConfigError
from slo.files.strict_yaml import Section


class TLSConfig(Section):
    """A certificate and its key, both in PEM, and the key without a passphrase."""

    certificate: Path = Field(
        description="The certificate, with those between it and its authority behind it."
    )
    key: Path = Field(description="Its private key; keep it readable by the server's user only.")

    def http_options(self) -> dict[str, str]:
        """What the server is told, by uvicorn's names, which are Ray Serve's too.

        Raises:
            ConfigError: when a file cannot be read, the key is not the certificate's, or clients would refuse
                the certificate because it is not valid now.
        """
        for name, path in (("certificate", self.certificate), ("key", self.key)):
            try:
                path.read_bytes()
            except OSError as error:
                raise ConfigError(f"tls.{name}: {path} cannot be read ({error.strerror})") from None
        try:
            context = self._server()
        except ssl.SSLError as error:
            why = error.reason or "no certificate and key in PEM"
            raise ConfigError(f"tls: {self.certificate} and {self.key} cannot be used ({why})") from None
        try:
            _shake_hands(context, self.trust())
        except ssl.SSLCertVerificationError as error:
            msg = (
                f"tls.certificate: clients would refuse {self.certificate} ({error.verify_message}); give "
                "one of a server that is valid now"
            )
            raise ConfigError(msg) from None
        return {"ssl_certfile": str(self.certificate), "ssl_keyfile": str(self.key)}

    def is_known(self) -> bool:
        """Whether this machine's clients trust the certificate without being given it, for its names."""
        client = ssl.create_default_context()
        client.check_hostname = False
        try:
            _shake_hands(self._server(), client)
        except ssl.SSLCertVerificationError:
            return False
        return True

    def _server(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        # A passphrase that is asked for would be asked for on the terminal.
        context.load_cert_chain(self.certificate, self.key, password="")
        return context

    def trust(self) -> ssl.SSLContext:
        """Trusts this certificate alone, whatever names it is for: the server calls itself by an address."""
        context = ssl.create_default_context(cafile=str(self.certificate))
        context.check_hostname = False
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        return context


def _shake_hands(server: ssl.SSLContext, client: ssl.SSLContext) -> None:
    """Have a client look at a server's certificate, in memory.

    Raises:
        ssl.SSLCertVerificationError: The client does not trust it.
    """
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    asking = client.wrap_bio(to_client, to_server)
    answering = server.wrap_bio(to_server, to_client, server_side=True)
    for side in (asking, answering, asking):
        with suppress(ssl.SSLWantReadError):
            side.do_handshake()
