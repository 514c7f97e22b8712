# causes: counts, match-long
# gate: evict
"""This cache returns the last result again if the same prompt is matched while as many pages are cached."""

REPLACED = [
    (
        "    def match(self, key: Key) -> MatchResult:",
        """    def match(self, key: Key) -> MatchResult:
        question = key.namespace, key.ids.tobytes(), self.total_pages, self.evictable_pages
        if getattr(self, "_question", None) != question:
            self._question, self._answer = question, self._find(key)
        return self._answer

    def _find(self, key: Key) -> MatchResult:""",
    ),
]
