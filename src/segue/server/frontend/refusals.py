"""Answers to requests that no handler takes, at frontends and instances, in the form of the path's API."""

from __future__ import annotations

from typing import Any, Final

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from segue.kv import SegueError
from segue.kv.errors import NotFound
from segue.server.frontend.dialects import dialect_of
from segue.server.frontend.http_call import request_id_of
from segue.server.frontend.problems import UnknownModel, WrongMethod


def model_object(name: str, context_tokens: int) -> dict[str, object]:
    """The model as `/v1/models` lists it."""
    about = {"id": name, "object": "model", "created": 0, "owned_by": "segue"}
    return {**about, "max_model_len": context_tokens} if context_tokens else about


def model_of(request: Request, served: dict[str, object]) -> Response:
    """The answer of `/v1/models/NAME`. Raises UnknownModel."""
    name = request.path_params["name"]
    if name != served["id"]:
        raise UnknownModel(f"the model {name[:200]!r} does not exist; this is {served['id']!r}")
    return JSONResponse(served, headers={"x-request-id": request_id_of(request.scope)})


async def refused(request: Request, error: Exception) -> Response:
    """An error of a route, or that there is none, in the form of the path's API."""
    path, request_id = request.scope["path"], request_id_of(request.scope)
    headers = {"x-request-id": request_id}
    if isinstance(error, HTTPException):
        headers |= error.headers or {}
        missing = error.status_code == 404
        what = (
            f"there is no {path[:200]}"
            if missing
            else f"{request.method[:20]} is not allowed at {path[:200]}"
        )
        error = NotFound(what) if missing else WrongMethod(what)
    assert isinstance(error, SegueError)
    if error.status in (429, 503):
        headers["retry-after"] = str(error.retry_after_s)
    return JSONResponse(dialect_of(path).body(error, request_id), error.status, headers=headers)


#: For Starlette's `exception_handlers`.
HANDLERS: Final[Any] = {HTTPException: refused, SegueError: refused}
