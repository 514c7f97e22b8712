"""The arena: policies or caches play against each other on hidden traces, in the simulated engine.

Every number is counted or calculated, so a match with the same seed has the same result on every machine.
"""
