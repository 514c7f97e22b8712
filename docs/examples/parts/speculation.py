"""`speculation=again`: drafts the last answer to the same prompt, for clients that ask the same again."""

from dataclasses import dataclass

from minisgl import hookimpl
from minisgl.plugins.speculation import DraftProposer


@dataclass
class Again:
    """Draft the last answer to the same prompt."""

    max_answers: int = 1000
    """Number of answers to remember."""

    def build(self):
        return AgainProposer(self.max_answers)


class AgainProposer(DraftProposer):
    max_drafts = 8

    def __init__(self, max_answers):
        self.max_answers, self.answers = max_answers, {}

    def key(self, req):
        return req.params.cache_salt, req.prompt_ids.tobytes()

    def removed(self, req):
        if req.finish_reason in ("stop", "length"):
            self.answers[self.key(req)] = list(req.output_ids)
            if len(self.answers) > self.max_answers:
                del self.answers[next(iter(self.answers))]

    def propose(self, reqs, positions, limits):
        drafts = []
        for req, position, limit in zip(reqs, positions, limits):
            first = position - len(req.prompt_ids)
            drafts.append(self.answers.get(self.key(req), [])[first : first + limit])
        return drafts


@hookimpl
def minisgl_configs():
    yield "speculation", "again", Again
