"""The page at "/": the server's numbers, and a box to chat in. One file, which asks nobody but this server.

What it may do is bounded by its Content-Security-Policy: whatever a model's answer or name holds, no script runs but
the page's own, and nothing is sent elsewhere.
"""

import re
from base64 import b64encode
from hashlib import sha256
from importlib.resources import files

from starlette.responses import Response

HTML = files("dcpjax.server").joinpath("page.html").read_text("utf-8")


def page_response() -> Response:
    return Response(HTML, headers=HEADERS, media_type="text/html")


def _policy(html: str) -> str:
    script, style = (_hash(html, tag) for tag in ("script", "style"))
    allowed = {
        "default-src": "'none'",
        "script-src": script,
        "style-src": style,
        "connect-src": "'self'",
        "img-src": "data:",  # the icon
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
        "require-trusted-types-for": "'script'",  # no text becomes HTML
        "trusted-types": "'none'",
    }
    return "; ".join(f"{name} {value}" for name, value in allowed.items())


def _hash(html: str, tag: str) -> str:
    """Of the only element of this kind."""
    (text,) = re.findall(rf"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
    return f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"


HEADERS = {
    "Content-Security-Policy": _policy(HTML),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
