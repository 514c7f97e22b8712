"""A text process works once before it is ready, so that no request waits for work that is done once."""

from __future__ import annotations

from minisgl.core import Finished, Output, SamplingParams
from minisgl.message import ChatPrompt, Limits, NewRequest, Outputs, Prompt, Submit, TextPrompt
from minisgl.server.text_process import TextWorker
from minisgl.tokenizer.tokenizer import Tokenizer


def warm_up(tokenizer: Tokenizer | None) -> None:
    """Handle a message of each kind and drop the replies.

    A tokenizer lists its vocabulary at its first prompt, which takes 0.2 s for 151,000 tokens.
    """
    worker = TextWorker(tokenizer, lambda message: None, lambda message: None)
    params = SamplingParams(stop=("stop",))
    worker.handle(Limits(1 << 20, 1 << 20))
    if tokenizer is not None:
        prompts: list[Prompt] = [TextPrompt("Hello")]
        if tokenizer.template is not None:
            prompts.append(ChatPrompt([{"role": "user", "content": "Hello"}]))
        for prompt in prompts:
            worker.handle(Submit([0], prompt, params))
    end = Finished(0, "length")
    worker.handle(Outputs([NewRequest(0, [1, 2], params)], Output([0], [1], [end])))
