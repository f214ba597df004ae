"""Strangers cannot write lines of their own into our log, nor as many as they like."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from pathlib import Path

import pytest
from session_peers import Events, RawPeer, closing, node

from segue.kv.session import frames
from tls_files import Authority


def framed(body: bytes) -> bytes:
    kind = frames.KIND_SESSION
    return (
        frames.HEADER.pack(len(body), kind, frames.lead_check(len(body), kind), frames.body_check(body))
        + body
    )


@pytest.mark.parametrize("text", [b"x\nERROR all is lost", b"x\x1b[2J", b"x\r\n\r\n", b"x" * 3000])
def test_text_of_a_stranger_stays_on_its_line(text: bytes, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)

    async def main() -> None:
        listener = node("a", Events())
        async with closing(listener):
            peer = await RawPeer.dial(*await listener.listen("127.0.0.1", 0))
            await peer.preamble()
            tag = bytes([0xA0 + len(text)]) if len(text) < 32 else b"\xda" + len(text).to_bytes(2)
            peer.writer.write(framed(b"\x81\xa4type" + tag + text))
            await peer.ended()
            await peer.close()

    asyncio.run(main())
    told = [r.getMessage() for r in caplog.records]
    assert any("does not decode" in line for line in told)
    assert not [line for line in told if set(line) & set("\n\r\x1b")]
    assert max(map(len, told)) < 1000, "nor a line of any length"


@pytest.mark.parametrize("said", [b"\x16\x03\x01\0\4text", b"", b"\0" * 64])
def test_strangers_that_fail_alike_are_one_line_of_each_logger_a_minute(
    said: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Under TLS: each failed handshake; without: who says nothing, or nonsense."""
    caplog.set_level(logging.INFO)

    async def main() -> None:
        tls = Authority(tmp_path).issue().load() if said.startswith(b"\x16") else None
        listener = node("a", Events(), tls=tls)
        async with closing(listener):
            where = await listener.listen("127.0.0.1", 0)
            for _ in range(5):
                reader, writer = await asyncio.open_connection(*where)
                writer.write(said)
                writer.write_eof()
                with contextlib.suppress(ConnectionError):
                    await reader.read()
                writer.close()

    asyncio.run(main())
    lines = [record.levelname for record in caplog.records if "127.0.0.1" in record.getMessage()]
    assert sorted(lines) == sorted(set(lines)), caplog.messages
    assert lines
