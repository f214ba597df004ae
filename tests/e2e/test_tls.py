"""A whole deployment under mutual TLS: registry, sessions and the KV on tcp; and who is kept out of it."""

from __future__ import annotations

import socket
from pathlib import Path

import httpx2 as httpx
import pytest
from served import Served, refused

from ports import HeldPort
from segue.cli.main import main
from tls_files import Authority, TlsFiles

pytestmark = [pytest.mark.model, pytest.mark.timeout(300)]

SMALL = ("--dtype", "float32", "--kv-gib", "0.1", "--threads-per-worker", "1", "--port", "0")
BODY = {"model": "tiny", "prompt": "The capital of France is", "max_tokens": 4, "temperature": 0}


def of(tiny: Path) -> tuple[str, ...]:
    """The model in this folder, by its name."""
    return ("--model", str(tiny), "--served-model-name", "tiny")


def speaks_tls(port: int) -> bool:
    """Whether a TLS server listens at `port`: it does not answer plain bytes, while a session, a transport or
    plain HTTP would send bytes of their own."""
    import ssl

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with socket.create_connection(("127.0.0.1", port), 60) as sock:
        try:
            with context.wrap_socket(sock) as wrapped:
                return wrapped.version() == "TLSv1.3"
        except (ssl.SSLError, OSError):
            return False


@pytest.mark.slow
def test_a_deployment_under_mutual_tls_answers_and_every_inner_port_is_tls(
    tiny: Path, tmp_path: Path
) -> None:
    assert main(["keys", str(tmp_path), "--part", "all=127.0.0.1"]) == 0
    flags = TlsFiles(tmp_path / "all.pem", tmp_path / "all.key", tmp_path / "ca.pem").flags()
    with Served(*of(tiny), *SMALL, "--transport", "tcp", *flags) as served:
        answer = httpx.post(f"{served.url}/v1/completions", json=BODY, timeout=60)
        assert answer.status_code == 200, answer.text
        # Doors for HTTP are for whoever has no certificate: the frontend's and each instance's own.
        doors = {int(url.rsplit(":", 1)[1]) for url in [served.url, *served.doors(2).values()]}
        ports = {
            c.laddr.port
            for process in served.family()
            for c in process.net_connections("tcp")
            if c.status == "LISTEN" and c.laddr.port not in doors
        }
        # The registry, a session listener and a data port for each of the two instances.
        assert len(ports) >= 5
        assert {port: speaks_tls(port) for port in ports} == dict.fromkeys(ports, True)
        assert served.stop() == 0


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--tls-cert", "cert.pem"], "--tls-key and --tls-ca missing"),
        (["--tls-cert", "no.pem", "--tls-key", "no.pem", "--tls-ca", "no.pem"], "cannot be read"),
    ],
)
def test_wrong_tls_settings_are_one_sentence(flags: list[str], says: str) -> None:
    told = refused("serve", *SMALL, *flags)
    assert says in told
    assert told.count("\n") == 1


@pytest.mark.slow
def test_a_part_with_the_secret_and_without_a_certificate_stays_out(tiny: Path, tmp_path: Path) -> None:
    authority, stranger = Authority(tmp_path), Authority(tmp_path, "stranger")
    secret = tmp_path / "secret"
    secret.write_text("x" * 64)
    held = HeldPort()
    port = held.port
    trust = (*of(tiny), "--secret-file", str(secret))
    small = SMALL[:-2]
    flags = authority.issue().flags()
    with Served("--bootstrap-port", str(port), *trust, *small, *flags, command="prefill"):
        plain = f"http://127.0.0.1:{port}"
        common = ("decode", *trust, *small, "--registry")
        assert "only TLS is spoken here" in refused(*common, plain, status=1)
        shown = (*stranger.issue(trust=authority).flags()[:4], "--tls-ca", str(authority.file))
        assert "is not accepted by --tls-ca" in refused(*common, plain.replace("http:", "https:"), *shown)
