"""A proxy before an S3 server: it sees every request and may answer in the server's place, change or hold answers."""

import asyncio
import contextlib
import io
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import aiohttp
from aiohttp import web

MIB = 2**20
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass
class Proxy:
    """Forwards to the server; ``tamper`` may answer in its place, or change what comes back.

    The signature covers the Host header, so clients sign for the proxy and the server hears the proxy's name.
    """

    target: str
    seen: list[str] = field(default_factory=list)
    """Method and query keys of every request."""
    tamper: Callable[[web.Request, Handler], Awaitable[web.StreamResponse]] | None = None
    url: str = ""

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.seen.append(f"{request.method} {','.join(sorted(request.query))}".strip())
        try:
            if self.tamper is not None:
                return await self.tamper(request, self.forward)
            return await self.forward(request)
        except aiohttp.ClientConnectionError:  # the server is gone, and with it, for the client, its connection
            return hang_up(request)

    async def forward(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        headers = {name: value for name, value in request.headers.items() if name.lower() != "expect"}
        async with (
            aiohttp.ClientSession(auto_decompress=False, skip_auto_headers=["Content-Type", "User-Agent"]) as session,
            session.request(
                request.method, self.target + request.raw_path, headers=headers, data=io.BytesIO(body)
            ) as answer,
        ):
            kept = {
                name: value
                for name, value in answer.headers.items()
                if name.lower() not in {"transfer-encoding", "content-length", "connection"}
            }
            content = await answer.read()
            if request.method == "HEAD":
                kept["Content-Length"] = answer.headers.get("Content-Length", "0")
            return web.Response(status=answer.status, headers=kept, body=content)

    @contextlib.asynccontextmanager
    async def serving(self):
        """Serve on this loop while the context lasts; ``url`` is then where."""
        application = web.Application(client_max_size=64 * MIB)
        application.router.add_route("*", "/{path:.*}", self.handle)
        runner = web.AppRunner(application, shutdown_timeout=1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"
        try:
            yield self
        finally:
            await runner.cleanup()

    @contextlib.contextmanager
    def serving_in_thread(self):
        """Serve on a loop of its own in a thread, for callers that block."""
        ready, done = threading.Event(), threading.Event()

        async def serve():
            async with self.serving():
                ready.set()
                await asyncio.to_thread(done.wait)

        thread = threading.Thread(target=asyncio.run, args=(serve(),), name="s3-proxy", daemon=True)
        thread.start()
        assert ready.wait(10)
        try:
            yield self
        finally:
            done.set()
            thread.join(10)


def error_answer(status, code):
    return web.Response(
        status=status, content_type="application/xml", text=f"<Error><Code>{code}</Code><Message>m</Message></Error>"
    )


def hang_up(request):
    request.transport.abort()
    return web.Response()


async def cut_answer(request, forward):
    """Answer with half of the body and break the connection."""
    answer = await forward(request)
    stream = web.StreamResponse(status=answer.status, headers=answer.headers)
    stream.content_length = len(answer.body)
    await stream.prepare(request)
    await stream.write(answer.body[: len(answer.body) // 2])
    return hang_up(request)


async def stall_answer(request, forward, seconds=30.0):
    """Answer with half of the body and say no more, until the client gives up."""
    answer = await forward(request)
    stream = web.StreamResponse(status=answer.status, headers=answer.headers)
    stream.content_length = len(answer.body)
    await stream.prepare(request)
    await stream.write(answer.body[: len(answer.body) // 2])
    await asyncio.sleep(seconds)
    return hang_up(request)
