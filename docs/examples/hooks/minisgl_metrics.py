"""Export a metric of your own at `/metrics`: the sum of all prompt lengths per finish reason."""

from collections import Counter

from minisgl import hookimpl


class PromptTokens:
    def __init__(self):
        self.tokens = Counter()  # finish reason -> prompt tokens

    @hookimpl
    def minisgl_request_finished(self, req):
        self.tokens[req.finish_reason] += len(req.prompt_ids)

    @hookimpl
    def minisgl_metrics(self):
        lines = ["# TYPE example_prompt_tokens counter"]
        lines += [f'example_prompt_tokens_total{{reason="{reason}"}} {n}' for reason, n in self.tokens.items()]
        return "\n".join(lines) + "\n"
