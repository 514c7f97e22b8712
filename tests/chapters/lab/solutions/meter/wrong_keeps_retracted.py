# causes: keeps
# gate: kept
"""This meter never forgets a request that was retracted, in a set of the module."""

RETRACTED = set()


class MyMeter:
    @hookimpl
    def minisgl_request_retracted(self, req) -> None:
        RETRACTED.add(req.uid)
