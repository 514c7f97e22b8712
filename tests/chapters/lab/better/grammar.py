"""Drafts the text that must follow, as the tokenizer cuts it, and guesses where there are two ways to go on."""


class MyMatcher:
    tokenizer = None

    def forced(self, count):
        automaton, state, text, most = self.masks_of.automaton, self.state, b"", 64
        while len(text) < most and state and not automaton.is_final(state):
            after = [(byte, s) for byte in range(256) if (s := automaton.after(state, byte))]
            if len(after) > 2:
                break
            if len(after) == 2:
                most = min(most, len(text) + 10)
            byte, state = max(after, key=lambda each: chr(each[0]).isalpha())
            text += bytes([byte])
        return self.tokenizer.encode(text.decode(errors="ignore"), add_special_tokens=False)[:count]


class MyGrammars:
    def __init__(self, tokenizer, max_work):
        super().__init__(tokenizer)
        self.max_work, self.tokens, self.shared = max_work, [], OrderedDict()
        MyMatcher.tokenizer = tokenizer
