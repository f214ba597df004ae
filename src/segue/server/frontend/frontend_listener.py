"""The public port from the first moment on: `STARTING` until there is an application to ask.

Importing the tokenizer takes seconds, and a frontend that is told neither model nor name waits for an
instance first. This module imports no tokenizer.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable

from segue.kv.errors import Starting
from segue.kv.session import url_of
from segue.server.frontend.client_tls import ClientTls
from segue.server.frontend.http_call import HttpCall, Receive, Scope, Send
from segue.server.frontend.http_server import HttpServer, bind, error_bytes
from segue.server.frontend.keys import ApiKeys, KeyCheck
from segue.server.frontend.origins import Origins
from segue.server.http.host_check import HostCheck
from segue.server.http.readiness import readiness
from segue.server.observe.metrics import Metrics
from segue.server.settings.shared_config import ClientsConfig

_App = Callable[[Scope, Receive, Send], Awaitable[None]]


class FrontendListener:
    """Listens at `host:port` and answers at once; `open` gives it the application, which checks keys by
    itself. `reason` says what it waits for until then. `hosts` are further names of this server, for clients
    without a key. Make it in the loop that it serves in. Raises ConfigError if it cannot listen, or for a
    certificate that cannot be used."""

    def __init__(
        self,
        host: str,
        port: int,
        *,
        drain_s: float,
        keys: ApiKeys,
        metrics: Metrics,
        clients: ClientsConfig | None = None,
        hosts: Iterable[str] = (),
    ) -> None:
        clients = clients or ClientsConfig()
        self.reason = "the frontend is loading the tokenizer"
        self._app: _App = KeyCheck(self._starting, keys, metrics) if keys else self._starting

        async def serve(scope: Scope, receive: Receive, send: Send) -> None:
            await self._app(scope, receive, send)

        tls = None
        if clients.https_cert is not None and clients.https_key is not None:
            tls = ClientTls(clients.https_cert, clients.https_key).context
        app: _App = Origins(serve, clients.origins) if clients.origins else serve
        app = HostCheck(
            app,
            hosts=None if keys else (host, *hosts),
            origins=clients.origins,
            body_of=error_bytes,
            origins_hint="give --allowed-origins {}",
        )
        self._server = HttpServer(app, bind(host, port), drain_s=drain_s, server_tls=tls)
        self.url = url_of("http" if tls is None else "https", *self._server.address)
        #: ends with the server
        self.serving = self._server.start()

    def open(self, app: _App) -> None:
        """Have `app` answer from now on."""
        self._app = app

    async def close(self) -> None:
        """Accept nobody; running answers have `drain_s`. Idempotent."""
        await self._server.stop()

    async def _starting(self, scope: Scope, receive: Receive, send: Send) -> None:
        call, path = HttpCall(scope, receive), scope["path"]
        error = Starting(f"segue is starting: {self.reason}")
        if path in ("/", "/health"):
            await call.answer(200, {"status": "ok"})
        elif path == "/ready":
            again = ((b"retry-after", b"%d" % error.retry_after_s),)
            await call.answer(*readiness(error.info.text), headers=again)
        else:
            await call.fail(error)
