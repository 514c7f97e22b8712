# causes: activation
# gate: multiply
"""The gated activation is written out as silu, whatever `load` got."""

REPLACED = [
    (
        "                inner = weights.act(linear(expert_rows, weights.gate_up[expert]))\n",
        "                gate, up = linear(expert_rows, weights.gate_up[expert]).chunk(2, dim=-1)\n"
        "                inner = torch.nn.functional.silu(gate) * up\n",
    )
]
