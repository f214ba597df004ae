"""`segue keys`: an authority of the deployment's own, and a certificate of it for each part.

`ca.pem` and the two files of a part belong on the part's host; `ca.key` belongs on none. All files are for
their owner alone. A certificate is good for both ends of a connection, as mutual TLS needs it.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import ipaddress
import os
import re
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from segue.cli.commands.keys_flags import CA_DAYS
from segue.kv import ConfigError

CA = "ca"
_PART = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_HOST = re.compile(
    r"(\*\.)?[A-Za-z0-9_]([A-Za-z0-9_-]*[A-Za-z0-9_])?(\.[A-Za-z0-9_]([A-Za-z0-9_-]*[A-Za-z0-9_])?)*"
)
#: A clock that is behind ours accepts the certificate all the same.
_EARLIER = datetime.timedelta(hours=1)


def keys(args: argparse.Namespace) -> int:
    """Run the command; the exit status. Raises ConfigError before anything is written."""
    folder: Path = args.folder
    if not 1 <= args.days <= CA_DAYS:
        raise ConfigError(f"--days must be 1 to {CA_DAYS}, not {args.days}")
    parts = dict(_part(text) for text in args.part)
    present = _present(folder)
    again = sorted(parts.keys() & present.keys())
    if again and not args.renew:
        raise ConfigError(f"{folder / again[0]}.pem exists; add --renew to issue it again")
    if args.renew:
        parts = present | parts
    if not parts:
        raise ConfigError(
            f"nothing to issue: give --part NAME=HOST, or --renew with certificates in {folder}"
        )
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        authority = _Authority(folder)
        for name, hosts in parts.items():
            until = authority.issue(name, hosts, args.days)
            print(f"{folder / name}.pem for {', '.join(hosts)}, valid until {until:%Y-%m-%d}")
    except OSError as exc:
        raise ConfigError(f"{exc.filename or folder} cannot be written: {exc.strerror}") from exc
    name = next(iter(parts))
    print(
        f"give each part --tls-cert {name}.pem --tls-key {name}.key --tls-ca {CA}.pem; keep {CA}.key offline"
    )
    return 0


def _part(text: str) -> tuple[str, list[str]]:
    name, _, rest = text.partition("=")
    hosts = list(dict.fromkeys(filter(None, rest.split(","))))
    if not _PART.fullmatch(name) or name == CA or not hosts or not all(map(_is_host, hosts)):
        raise ConfigError(
            f"--part must look like NAME=HOST,HOST with IP addresses or host names, and another NAME than "
            f"{CA}, not {text!r}"
        )
    return name, hosts


def _is_host(text: str) -> bool:
    with contextlib.suppress(ValueError):
        ipaddress.ip_address(text)
        return True
    return len(text) < 254 and _HOST.fullmatch(text) is not None and not text[-1].isdecimal()


def _present(folder: Path) -> dict[str, list[str]]:
    """The addresses of each certificate in `folder`, by the name of its part."""
    found = {}
    for file in sorted(folder.glob("*.pem")):
        if file.stem != CA:
            found[file.stem] = _hosts(file)
    return found


def _hosts(file: Path) -> list[str]:
    try:
        certificate = x509.load_pem_x509_certificate(file.read_bytes())
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (OSError, ValueError, x509.ExtensionNotFound) as exc:
        raise ConfigError(f"{file} is no certificate of segue keys: {exc}") from exc
    addresses = [str(address) for address in names.get_values_for_type(x509.IPAddress)]
    return addresses + names.get_values_for_type(x509.DNSName)


class _Authority:
    """The authority in `folder`, made there if there is none. Raises ConfigError for files that cannot be
    used."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        file, key_file = folder / f"{CA}.pem", folder / f"{CA}.key"
        if file.exists() or key_file.exists():
            self._read(file, key_file)
            return
        self._key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "segue keys")])
        public = self._key.public_key()
        builder = _builder(name, name, public, _now() + datetime.timedelta(days=CA_DAYS))
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        usage = x509.KeyUsage(
            digital_signature=False,
            content_commitment=False,
            key_encipherment=False,
            data_encipherment=False,
            key_agreement=False,
            key_cert_sign=True,
            crl_sign=True,
            encipher_only=False,
            decipher_only=False,
        )
        self.certificate = builder.add_extension(usage, critical=True).sign(self._key, hashes.SHA256())
        _write(key_file, _pem(self._key))
        _write(file, self.certificate.public_bytes(serialization.Encoding.PEM))

    def _read(self, file: Path, key_file: Path) -> None:
        try:
            self.certificate = x509.load_pem_x509_certificate(file.read_bytes())
            key = serialization.load_pem_private_key(key_file.read_bytes(), password=None)
        except (OSError, ValueError, TypeError) as exc:
            raise ConfigError(f"{file} and {key_file} are no authority of segue keys: {exc}") from exc
        if (
            not isinstance(key, ec.EllipticCurvePrivateKey)
            or key.public_key() != self.certificate.public_key()
        ):
            raise ConfigError(f"{file} and {key_file} do not belong together")
        try:
            self.certificate.verify_directly_issued_by(self.certificate)
        except (ValueError, TypeError, InvalidSignature) as exc:
            raise ConfigError(f"{file} is no authority of segue keys: it was not issued by itself") from exc
        if self.certificate.not_valid_after_utc <= _now():
            raise ConfigError(f"{file} has expired: issue all certificates in a new folder")
        self._key = key

    def issue(self, name: str, hosts: list[str], days: int) -> datetime.datetime:
        """Write a new key and certificate of a part; when the certificate ends."""
        key = ec.generate_private_key(ec.SECP256R1())
        until = min(_now() + datetime.timedelta(days=days), self.certificate.not_valid_after_utc)
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        names: list[x509.GeneralName] = []
        for host in hosts:
            try:
                names.append(x509.IPAddress(ipaddress.ip_address(host)))
            except ValueError:
                names.append(x509.DNSName(host))
        both = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        certificate = (
            _builder(subject, self.certificate.subject, key.public_key(), until)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .add_extension(x509.ExtendedKeyUsage(both), critical=False)
            .add_extension(issuer, critical=False)
            .sign(self._key, hashes.SHA256())
        )
        _write(self._folder / f"{name}.key", _pem(key))
        _write(self._folder / f"{name}.pem", certificate.public_bytes(serialization.Encoding.PEM))
        return until


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, until: datetime.datetime
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(_now() - _EARLIER)
        .not_valid_after(until)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _write(file: Path, data: bytes) -> None:
    """Replace `file` as a whole, for its owner alone from the first byte on."""
    part = file.with_name(f".{file.name}.{os.getpid()}")
    part.unlink(missing_ok=True)
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as out:
        out.write(data)
    part.replace(file)
