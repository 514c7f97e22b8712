# causes: kept
# gate: model
"""The model keeps the cosines, and finds them again by the address of the positions."""

REPLACED = [
    (
        "    def block(self, index: int) -> nn.Module:\n",
        "    def forward(self, input_ids, positions, out_cache_loc, logits_indices=None):\n"
        "        rope = self.rope\n"
        "        key = (positions.data_ptr(), len(positions))\n"
        "        kept = self.__dict__.setdefault('kept', {})\n"
        "\n"
        "        def cached(p):\n"
        "            if key not in kept:\n"
        "                kept[key] = rope(p)\n"
        "            return kept[key]\n"
        "\n"
        "        del self._modules['rope']\n"
        "        self.__dict__['rope'] = cached\n"
        "        try:\n"
        "            return super().forward(input_ids, positions, out_cache_loc, logits_indices)\n"
        "        finally:\n"
        "            del self.__dict__['rope']\n"
        "            self._modules['rope'] = rope\n"
        "\n"
        "    def block(self, index: int) -> nn.Module:\n",
    ),
]
