# causes: kept
# gate: whole
"""Transposed copies of the weights are kept by the number of the first expert, which all layers share."""

REPLACED = [
    ("        self.block = block\n", "        self.block, self.transposed = block, {}\n"),
    (
        "        linear = torch.nn.functional.linear\n",
        "        if weights.first not in self.transposed:\n"
        "            self.transposed[weights.first] = weights.gate_up.mT.contiguous(), weights.down.mT.contiguous()\n"
        "        gate_up, down = self.transposed[weights.first]\n",
    ),
    ("weights.act(linear(expert_rows, weights.gate_up[expert]))", "weights.act(expert_rows @ gate_up[expert])"),
    ("linear(inner, weights.down[expert])", "inner @ down[expert]"),
]
