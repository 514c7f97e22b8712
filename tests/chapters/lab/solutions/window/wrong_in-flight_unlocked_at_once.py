# causes: in-flight
# gate: behind
REPLACED = [
    (
        "        self.unlock_later(unlocked)\n",
        "        self.allocator.decref(np.array(unlocked, np.int32))\n        self.cache.unlock(Path([], unlocked))\n",
    ),
]
