# causes: shared
# gate: capture
"""All engines of a process record with the same recorder."""

REPLACED = [
    (
        "        recorder = Recorder(self.device)\n",
        "        recorder = MyRunner.recorder = getattr(MyRunner, 'recorder', None) or Recorder(self.device)\n",
    ),
]
