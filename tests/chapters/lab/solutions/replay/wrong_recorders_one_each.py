# causes: recorders
# gate: capture
"""Each bucket has a recorder of its own. A list of the buckets, which `capture` fills, is right."""

REPLACED = [
    ("self.replays = self.padded_rows = 0\n", "self.replays = self.padded_rows = 0\n        self.order = []\n"),
    ("return min((key for key in self.recordings if", "return min((key for key in self.order if"),
    ("= recorder.record(", "= Recorder(self.device).record("),
    (
        "    def run(self, key: GraphKey)",
        """        self.order = sorted(self.recordings)

    def run(self, key: GraphKey)""",
    ),
    ("        self.recordings.clear()\n", "        self.recordings.clear()\n        self.order = []\n"),
]
