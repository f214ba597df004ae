"""Messages of a peer cannot write lines of their own into our log."""

from __future__ import annotations

import asyncio
import logging

import pytest
from session_peers import Events, RawPeer, closing, node

from segue.kv.session import frames


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
