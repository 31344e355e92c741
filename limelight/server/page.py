"""The web page at `/`: one file, which asks the same routes as any other client."""

import re
from base64 import b64encode
from hashlib import sha256
from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send


class Page:
    """Answers with the page. Its policy names its own style and script by hash and nothing else.

    So whatever a model writes, the browser runs no other script, sends nothing to other hosts, and
    refuses to turn text into markup.
    """

    def __init__(self):
        html = files("limelight.server").joinpath("page.html").read_bytes()
        self.content = html
        self.headers = {
            "content-security-policy": _policy(html),
            # Kept by the browser, and asked for again each time: a new server has a new page.
            "cache-control": "no-cache",
            "etag": f'"{sha256(html).hexdigest()[:32]}"',
            "referrer-policy": "no-referrer",
            "x-content-type-options": "nosniff",
            "cross-origin-opener-policy": "same-origin",
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send):
        known = Request(scope).headers.get("if-none-match", "")
        if self.headers["etag"] in known:
            response = Response(status_code=304, headers=self.headers)
        else:
            response = Response(self.content, headers=self.headers, media_type="text/html")
        await response(scope, receive, send)


def _policy(html: bytes) -> str:
    script, style = _hash(html, b"script"), _hash(html, b"style")
    return (
        f"default-src 'none'; script-src {script}; style-src {style}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'; trusted-types 'none'"
    )


def _hash(html: bytes, tag: bytes) -> str:
    """The hash of the only element of this name."""
    [body] = re.findall(rb"<%b>(.*?)</%b>" % (tag, tag), html, re.DOTALL)
    return f"'sha256-{b64encode(sha256(body).digest()).decode()}'"
