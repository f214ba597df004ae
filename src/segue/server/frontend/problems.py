"""How an error looks to a client: OpenAI's error body and an honest status.

The error tree is `kv.errors`; this file adds only what a client's library wants to know besides:
which parameter was wrong and OpenAI's own code where one exists.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec

from segue.kv import ErrorInfo, InvalidRequest, SegueError, Unauthorized
from segue.kv.errors import NotFound, status_of

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "invalid_request_error",
    409: "invalid_request_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    431: "invalid_request_error",
    429: "rate_limit_error",
    499: "request_cancelled",
    500: "server_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}

_PATH = re.compile(r"`\$\.?([^`]*)`\s*$")


class BadParam(InvalidRequest):
    """A request that is wrong in one parameter. `openai_code` is OpenAI's name for it, if any."""

    def __init__(self, text: str, param: str | None = None, openai_code: str | None = None) -> None:
        super().__init__(text)
        self.param = param
        self.openai_code = openai_code


def renamed(error: BadParam, names: Mapping[str, str]) -> BadParam:
    """`error` with fields by their names in another API. Places within the field are left out: they are those
    of the chat that was made of it."""
    place, text = error.param or "", error.info.text
    field = place.partition("[")[0].partition(".")[0]
    if (name := names.get(field)) is not None:
        text = text.replace(place, name, 1)
    others = [word for word in names if "_" in word and word != field]
    if others:  # in a hint; names without an underscore are words, too
        text = re.sub(rf"\b({'|'.join(others)})\b", lambda found: names[found[0]], text)
    return BadParam(text, name or error.param, error.openai_code)


class WrongMethod(InvalidRequest):
    """A method that a path does not have."""

    status = 405


class UnknownEncoding(InvalidRequest):
    """A body that is compressed in a way that is not known here. HTTP has a status of its own for it."""

    status = 415


class UnknownModel(NotFound):
    """A model this frontend does not serve."""

    param = "model"
    openai_code = "model_not_found"


class BadKey(Unauthorized):
    """No API key, or a wrong one."""

    param = None
    openai_code = "invalid_api_key"


def unparsable(error: msgspec.DecodeError | UnicodeDecodeError) -> BadParam:
    """The client's view of a body that msgspec refused: the parameter named, no internals."""
    if isinstance(error, UnicodeDecodeError):
        return BadParam(f"the body is not valid UTF-8: {error.reason} at byte {error.start}")
    text = str(error)
    if not isinstance(error, msgspec.ValidationError):
        return BadParam(f"the body is not valid JSON: {text}")
    path = _PATH.search(text)
    if path is None:
        return BadParam(f"the body has a wrong shape: {text}")
    what = text[: path.start()].removesuffix("at ").removesuffix(" - ").removesuffix("`key` in ").strip(" -")
    return BadParam(f"{path[1] or 'the body'}: {what}", path[1] or None)


def error_body(
    info: ErrorInfo, *, param: str | None = None, code: str | None = None, status: int | None = None
) -> dict[str, object]:
    """OpenAI's `{"error": {…}}` for a record; the message says where it began, if that is known."""
    status = status_of(info.code) if status is None else status
    where = ", ".join(part for part in (info.origin, info.phase) if part)
    return {
        "error": {
            "message": f"{info.text} ({where})" if where else info.text,
            "type": _TYPES.get(status, "server_error"),
            "param": param,
            "code": code or info.code.value,
        }
    }


def body_of(error: SegueError) -> dict[str, object]:
    """`error_body` of an exception, with the parameter it names."""
    if isinstance(error, BadParam | UnknownModel | BadKey):
        return error_body(error.info, param=error.param, code=error.openai_code)
    return error_body(error.info, status=error.status)
