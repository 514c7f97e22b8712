"""`routing=by_prompt`: prompts with the same first block go to the same replica, without a view of the caches."""

from dataclasses import dataclass

from minisgl import hookimpl
from minisgl.cluster.routing import live_replicas


@dataclass
class ByPrompt:
    """Choose by the first block of the prompt."""

    def build(self):
        return ByPromptPolicy()


class ByPromptPolicy:
    def choose(self, block_hashes, prompt_tokens, replicas):
        live = live_replicas(replicas)
        if not block_hashes:
            return min(live, key=lambda index: replicas[index].requests)
        return live[block_hashes[0] % len(live)]


@hookimpl
def minisgl_configs():
    yield "routing", "by_prompt", ByPrompt
