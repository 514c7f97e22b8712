"""`GET /echo/<word>` returns the word, and a request with an empty `User-Agent` is refused."""

from minisgl import hookimpl


@hookimpl
def minisgl_http(config):
    from starlette.responses import JSONResponse

    from minisgl.server.extension import HttpExtension

    class Echo(HttpExtension):
        def add_routes(self, router, api):
            @router.get("/echo/{word}")
            async def echo(word: str):
                return JSONResponse({"word": word, "model": api.model})

        def wrap(self, app):
            async def checked(scope, receive, send):
                if dict(scope["headers"]).get(b"user-agent") == b"":
                    await JSONResponse({"error": "Say who you are."}, 403)(scope, receive, send)
                else:
                    await app(scope, receive, send)

            return checked

    return Echo()
