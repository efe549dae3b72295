"""Certificates of our own making."""

from __future__ import annotations

import datetime as dt
import ipaddress
from pathlib import Path
from typing import NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

_PEM = serialization.Encoding.PEM


class Certificate(NamedTuple):
    """Files of a certificate and its key."""

    certificate: Path
    key: Path


def self_signed(directory: Path, passphrase: bytes | None = None, begins_in_days: float = 0.0) -> Certificate:
    """For 127.0.0.1, for a day from a minute before then."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "slackserve")])
    begins = dt.datetime.now(dt.UTC) + dt.timedelta(days=begins_in_days)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(begins - dt.timedelta(minutes=1))
        .not_valid_after(begins + dt.timedelta(days=1))
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False
        )
        .sign(key, hashes.SHA256())
    )
    made = Certificate(directory / "server.pem", directory / "server.key")
    made.certificate.write_bytes(certificate.public_bytes(_PEM))
    sealed = (
        serialization.NoEncryption()
        if passphrase is None
        else serialization.BestAvailableEncryption(passphrase)
    )
    made.key.write_bytes(key.private_bytes(_PEM, serialization.PrivateFormat.PKCS8, sealed))
    return made
