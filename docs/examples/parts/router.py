"""`router=redirect`: passes nothing on, but tells each client the address of a replica (HTTP 307)."""

import asyncio
from dataclasses import dataclass

from minisgl import hookimpl


@dataclass
class Redirect:
    """Tell each client the address of the next replica."""

    def build(self, cluster, status):
        return RedirectRouter(cluster, status)


class RedirectRouter:
    status_url = ""

    def __init__(self, cluster, status):
        self.cluster, self.status = cluster, status
        self.urls, self.turn = {}, 0

    def options(self, index):
        return []

    async def start(self):
        from minisgl.cluster.http_server import HttpServer
        from minisgl.server.serve import listen

        server = self.cluster.server
        self.http = HttpServer(self.answer, listen(server.host, server.port), server)
        await self.http.start()
        self.status_url = self.http.url
        return self.http.url

    async def answer(self, scope, receive, send):
        from starlette.responses import RedirectResponse

        if scope["path"] in ("/health", "/ready", "/replicas", "/metrics") or not self.urls:
            response = await self.status.response(scope["path"])
        else:
            self.turn += 1
            index = sorted(self.urls)[self.turn % len(self.urls)]
            self.status.replicas[index].requests += 1
            response = RedirectResponse(self.urls[index] + scope["path"], 307)
        await response(scope, receive, send)

    async def add(self, index, url):
        self.urls[index] = url

    async def remove(self, index):
        self.urls.pop(index, None)

    def set_healthy(self, index, healthy):
        pass

    async def drain(self, seconds):
        await asyncio.sleep(0)  # the replicas finish their requests themselves

    async def wait_until_ended(self):
        return await self.http.wait_until_ended()

    async def close(self):
        await self.http.close()


@hookimpl
def minisgl_configs():
    yield "router", "redirect", Redirect
