"""`segue keys`: files that the parts of a deployment accept from each other, and from nobody else."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from cryptography import x509

from segue.cli.main import main
from segue.kv.errors import ConfigError, SegueError
from segue.kv.limits import Limits
from segue.kv.session import tls_from_files
from segue.kv.session.tls import load_tls
from segue.server.registry.client import RegistryClient
from segue.server.registry.registry_server import serve
from segue.server.settings.shared_config import TlsConfig

SECRET = b"a-secret-of-some-length"


def files(folder: Path, name: str) -> TlsConfig:
    return TlsConfig(
        tls_cert=str(folder / f"{name}.pem"),
        tls_key=str(folder / f"{name}.key"),
        tls_ca=str(folder / "ca.pem"),
    )


def serial(folder: Path, name: str) -> int:
    return x509.load_pem_x509_certificate((folder / f"{name}.pem").read_bytes()).serial_number


def test_a_registry_and_its_client_accept_each_other_and_no_stranger(tmp_path: Path) -> None:
    ours, others = tmp_path / "ours", tmp_path / "others"
    assert main(["keys", str(ours), "--part", "prefill=127.0.0.1,localhost", "--part", "decode=::1"]) == 0
    assert main(["keys", str(others), "--part", "decode=::1"]) == 0
    assert {file.stat().st_mode & 0o777 for file in ours.iterdir()} == {0o600}
    assert ours.stat().st_mode & 0o077 == 0

    async def registry() -> None:
        limits = Limits()
        mine = tls_from_files(files(ours, "prefill"), "127.0.0.1")
        server = await serve("127.0.0.1", 0, secret=SECRET, limits=limits, tls=mine)
        for folder, ca in ((ours, ours), (others, ours), (others, others)):
            where = folder / "decode.pem", folder / "decode.key", ca / "ca.pem"
            tls = load_tls(*map(str, where))
            client = RegistryClient(server.url, secret=SECRET, limits=limits, tls=tls)
            asking = client.backend.instances(None, None, 0.0)
            if folder is ours:
                assert (await asking).instances == []
            else:
                with pytest.raises(SegueError, match=r"certificate|--tls-cert"):
                    await asking
            await client.aclose()
        await server.close()

    asyncio.run(registry())


def test_a_certificate_is_good_for_the_given_addresses_alone(tmp_path: Path) -> None:
    assert (
        main(["keys", str(tmp_path), "--part", "decode=10.0.0.2,fd00::1,decode.example,*.ranks.example"]) == 0
    )
    for host in ("10.0.0.2", "fd00::1", "decode.example", "a.ranks.example", None):
        assert tls_from_files(files(tmp_path, "decode"), host) is not None
    for host in ("10.0.0.3", "prefill.example"):
        with pytest.raises(ConfigError, match="was not issued for"):
            tls_from_files(files(tmp_path, "decode"), host)


def test_a_renewal_keeps_the_authority_and_the_addresses(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hosts = "10.0.0.1,prefill.example"
    assert main(["keys", str(tmp_path), "--part", f"prefill={hosts}", "--days", "1"]) == 0
    before = {name: serial(tmp_path, name) for name in ("ca", "prefill")}
    key = (tmp_path / "prefill.key").read_bytes()
    assert main(["keys", str(tmp_path), "--part", "prefill=10.0.0.9"]) == 2
    assert "add --renew" in capsys.readouterr().err
    assert main(["keys", str(tmp_path), "--part", "decode=10.0.0.2"]) == 0
    assert serial(tmp_path, "prefill") == before["prefill"]
    assert main(["keys", str(tmp_path), "--renew", "--part", "decode=10.0.0.5"]) == 0
    assert serial(tmp_path, "ca") == before["ca"]
    assert serial(tmp_path, "prefill") != before["prefill"]
    assert (tmp_path / "prefill.key").read_bytes() != key
    for name, host in (("prefill", "10.0.0.1"), ("prefill", "prefill.example"), ("decode", "10.0.0.5")):
        assert tls_from_files(files(tmp_path, name), host) is not None


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "nothing to issue"),
        (["--renew"], "nothing to issue"),
        (["--part", "ca=10.0.0.1"], "another NAME than ca"),
        (["--part", "../x=10.0.0.1"], "must look like NAME=HOST"),
        (["--part", "decode="], "must look like NAME=HOST"),
        (["--part", "decode=10.0.0.256"], "must look like NAME=HOST"),
        (["--part", "decode=a b"], "must look like NAME=HOST"),
        (["--part", "decode=10.0.0.1", "--days", "0"], "--days must be"),
        (["--part", "decode=10.0.0.1", "--days", "soon"], "--days"),
    ],
)
def test_what_cannot_be_issued_is_one_sentence_and_writes_nothing(
    tmp_path: Path, words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "tls"
    assert main(["keys", str(folder), *words]) == 2
    text = capsys.readouterr().err
    assert said in text
    assert text.count("\n") == 1
    assert not folder.exists()


@pytest.mark.parametrize("spoilt", ["ca.pem", "ca.key", "decode.pem"])
def test_files_that_are_not_ours_are_refused_by_name(
    tmp_path: Path, spoilt: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["keys", str(tmp_path), "--part", "decode=10.0.0.1"]) == 0
    (tmp_path / spoilt).write_text("nothing")
    assert main(["keys", str(tmp_path), "--renew"]) == 2
    assert spoilt in capsys.readouterr().err
