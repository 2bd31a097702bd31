"""A streaming server that is never busy with more than so many requests: what it can do is known."""

import asyncio
import json
from contextlib import asynccontextmanager

from aiohttp import web


class StandIn:
    """An OpenAI-compatible server over HTTP with `slots` places.

    Args:
        slots: requests that are worked on at once; the others wait, or are turned away.
        tokens: of each answer.
        token_seconds: between two of them, and before the first.
        turn_away: whether to answer 429 instead of letting a request wait.
        status: of every answer.
        usage: tokens that it says an answer had.
        fail_after: break off after so many tokens.
    """

    def __init__(
        self, slots=4, *, tokens=8, token_seconds=0.005, turn_away=False, status=200, usage=None, fail_after=None
    ):
        self.slots, self.tokens, self.token_seconds = slots, tokens, token_seconds
        self.turn_away, self.status, self.usage, self.fail_after = turn_away, status, usage, fail_after
        self.bodies, self.keys, self.open, self.most_open = [], [], 0, 0
        self.places = None

    @asynccontextmanager
    async def running(self):
        """Serves on a free port; gives the base URL."""
        self.places = asyncio.Semaphore(self.slots)
        application = web.Application()
        application.router.add_post("/v1/chat/completions", self.answer)
        application.router.add_get("/v1/models", self.models)
        runner = web.AppRunner(application, access_log=None)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0, backlog=4096)
        await site.start()
        try:
            yield f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"
        finally:
            await runner.cleanup()

    async def models(self, _request):
        return web.json_response({"data": [{"id": "m"}]})

    async def answer(self, request):
        self.bodies.append(await request.json())
        self.keys.append(request.headers.get("Authorization"))
        if self.status != 200:
            return web.Response(status=self.status, text="not today")
        if self.turn_away and self.places.locked():
            return web.Response(status=429, text="busy")
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        try:
            async with self.places:
                return await self.stream(request)
        finally:
            self.open -= 1

    async def stream(self, request):
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)

        async def send(event):
            await response.write(f"data: {json.dumps(event)}\n\n".encode())

        await send({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
        for number in range(self.tokens):
            await asyncio.sleep(self.token_seconds)
            if number == self.fail_after:
                await send({"error": {"message": "the engine died"}})
                return response
            await send({"choices": [{"delta": {"content": "x"}}]})
        await send({"choices": [], "usage": {"completion_tokens": self.usage or self.tokens}})
        await response.write(b"data: [DONE]\n\n")
        return response
