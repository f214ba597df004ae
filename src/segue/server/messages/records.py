"""The events of a request in one process: records of the latest requests, for `segue explain` and for traces.

A record is kept as the bytes that would be sent, so that its cost in memory is known and it holds nothing
else.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice

import msgspec

from segue.kv import ErrorInfo, InvalidRequest

#: Steps of one record; what comes later is counted.
MAX_STEPS = 64
#: Records that a process keeps, and their bytes.
MAX_RECORDS = 8192
MAX_RECORDS_BYTES = 8 * 2**20
#: Characters of a name that records are looked for by: a client's id, its sample and its attempt.
MAX_NAME_CHARS = 160
#: Records that one answer holds at most.
MAX_FOUND = 64
#: Records among which the latest ones of a role are looked for.
MAX_SEARCHED = 256


class Step(msgspec.Struct, frozen=True, array_like=True):
    """One phase: its name, when it began, in seconds since the record's `began`, and what there is to say of
    it. It ends where the next one begins."""

    name: str
    at_s: float
    text: str = ""


#: The value of a span's attribute.
Attribute = bool | int | float | str | list[str]


class InnerSpan(msgspec.Struct, frozen=True, kw_only=True):
    """A span within a record's own, from `at_s` seconds after the record's `began` to its end. `span` is the
    `traceparent` that the workers got."""

    span: str
    name: str
    at_s: float
    attributes: dict[str, Attribute]


class RequestRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The life of one request in one process, or of one attempt there.

    `request_id` is that of the sample or attempt: what the client knows it by, then `-N` and `~ATTEMPT`.
    `where` names the process and `role` its kind (`http` for a whole HTTP request). `began` is when it got
    the request, on its own monotonic clock. `seconds` is the time until its end, or so far while it is not
    `ended`. `facts` are counts (tokens, bytes), `traceparent` (W3C) is the span above this one, `span` its
    own if it is passed on. `tenant` is the API key of the client where a frontend has several. `attributes`
    and `inner` are for traces alone.
    """

    request_id: str
    where: str
    began: float
    seconds: float
    role: str = ""
    steps: list[Step] = []
    omitted: int = 0
    room: int = 0
    attempt: int = 0
    pair: str = ""
    facts: dict[str, int] = {}
    error: ErrorInfo | None = None
    ended: bool = True
    traceparent: str = ""
    span: str = ""
    tenant: str = ""
    attributes: dict[str, Attribute] = {}
    inner: InnerSpan | None = None

    def timed(self) -> Iterator[tuple[Step, float]]:
        """Each step, and when it ended, in seconds since `began`."""
        ends = [step.at_s for step in self.steps[1:]] + [self.seconds]
        return zip(self.steps, ends, strict=False)  # a record without steps has an end all the same


class Path:
    """The steps of a request that goes on."""

    __slots__ = ("_began", "_steps", "omitted")

    def __init__(self, began: float) -> None:
        self._began = began
        self._steps: list[tuple[str, float, str]] = []
        self.omitted = 0

    def enter(self, name: str, now: float, text: str = "") -> None:
        """The step `name` begins."""
        if len(self._steps) < MAX_STEPS:
            self._steps.append((name, now, text))
        else:
            self.omitted += 1

    def steps(self) -> list[Step]:
        """The steps so far."""
        return [Step(name, now - self._began, text) for name, now, text in self._steps]


class Records:
    """The latest records, at most `max_count` and `max_bytes`; the oldest go first. `on_record` is called
    with each."""

    def __init__(
        self,
        max_count: int = MAX_RECORDS,
        max_bytes: int = MAX_RECORDS_BYTES,
        on_record: Callable[[RequestRecord], None] | None = None,
    ) -> None:
        self._max_count = max_count
        self._max_bytes = max_bytes
        self.on_record = on_record
        self._kept: deque[tuple[str, bytes]] = deque()
        self._encode = msgspec.msgpack.Encoder().encode
        self._decoder = msgspec.msgpack.Decoder(RequestRecord)
        self.nbytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def put(self, record: RequestRecord) -> None:
        """Keep `record`; one that is larger than all that may be kept is dropped."""
        data = self._encode(record)
        self._kept.append((record.request_id, data))
        self.nbytes += len(data)
        while len(self._kept) > self._max_count or self.nbytes > self._max_bytes:
            self.nbytes -= len(self._kept.popleft()[1])
        if self.on_record is not None:
            self.on_record(record)

    def find(self, request_id: str) -> list[RequestRecord]:
        """The latest records of a request, of its samples and of their attempts, oldest first."""
        fits = matcher(request_id)
        found = [data for name, data in self._kept if fits(name)]
        return [self._decoder.decode(data) for data in found[-MAX_FOUND:]]

    def latest(self, role: str, count: int, tenant: str = "") -> list[RequestRecord]:
        """The latest records of one `role`, the newest first, of the last `MAX_SEARCHED`; with `tenant` only
        its own."""
        newest = (self._decoder.decode(data) for _, data in islice(reversed(self._kept), MAX_SEARCHED))
        found = (record for record in newest if record.role == role and tenant in ("", record.tenant))
        return list(islice(found, count))


def check_name(request_id: str) -> None:
    """Raises InvalidRequest for a name that no request has, before anybody is asked for it."""
    if len(request_id) > MAX_NAME_CHARS:
        raise InvalidRequest(f"a request's id has at most {MAX_NAME_CHARS} characters, not {len(request_id)}")


def matcher(request_id: str) -> Callable[[str], bool]:
    """Whether an id is that of `request_id` (a client's `X-Request-ID`), of a sample of it or an attempt."""

    def fits(name: str) -> bool:
        if not name.startswith(request_id):
            return False
        sample, tilde, attempt = name[len(request_id) :].partition("~")
        dash, number = sample[:1], sample[1:]
        return (not dash or (dash == "-" and _is_number(number))) and (not tilde or _is_number(attempt))

    return fits


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit()
