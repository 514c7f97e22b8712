"""`moe=asking`: looks up the tokens of each chosen expert instead of sorting tokens by expert."""

from dataclasses import dataclass

from minisgl import hookimpl


@dataclass
class Asking:
    """Computes one expert after another."""

    def build(self):
        return AskingMoe()


class AskingMoe:
    def load(self, gate_up, down, experts, activation):
        from minisgl.layers.linear import activation as find

        return gate_up, down, experts, find(activation)

    def forward(self, weights, x, ids, scale, out):
        gate_up, down, here, act = weights
        out.zero_()
        for expert in ids.unique().tolist():
            if expert in here:
                tokens, choices = (ids == expert).nonzero(as_tuple=True)
                answer = act(x[tokens] @ gate_up[expert - here.start].T) @ down[expert - here.start].T
                out.index_add_(0, tokens, answer * scale[tokens, choices, None].to(answer.dtype))
        return out


@hookimpl
def minisgl_configs():
    yield "moe", "asking", Asking
