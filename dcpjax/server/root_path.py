"""The path under which a proxy shows the server. Some proxies remove it from what they pass on, some do not."""

from starlette.responses import RedirectResponse
from starlette.types import ASGIApp, Receive, Scope, Send


class RootPath:
    """An ASGI application in front of another, which sees paths without the root path."""

    def __init__(self, app: ASGIApp, *, path: str) -> None:
        self._app, self._path = app, path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] == self._path:  # the page's own links begin at the slash
            await RedirectResponse(f"{self._path}/")(scope, receive, send)
            return
        if scope["type"] == "http" and scope["path"].startswith(f"{self._path}/"):
            scope = {**scope, "path": scope["path"].removeprefix(self._path)}
        await self._app(scope, receive, send)
