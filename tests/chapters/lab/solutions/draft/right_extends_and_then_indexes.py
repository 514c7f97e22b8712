"""`append` first extends the list, and then indexes the new groups. The guesses grow in a list of their own."""

REPLACED = [
    (
        "        for token in tokens:\n            if len(self.tokens) >= self.match_tokens:\n"
        "                self.after[tuple(self.tokens[-self.match_tokens :])] = len(self.tokens)\n"
        "            self.tokens.append(token)\n",
        "        n = self.match_tokens\n        first = max(len(self.tokens), n)\n        self.tokens.extend(tokens)\n"
        "        for i in range(first, len(self.tokens)):\n            self.after[tuple(self.tokens[i - n : i])] = i\n",
    ),
    (
        "        return [self.tokens[start + i % period] for i in range(count)]\n",
        "        guesses = self.tokens[start : start + count]\n        while len(guesses) < count:\n"
        "            guesses.append(guesses[-period])\n        return guesses\n",
    ),
]
