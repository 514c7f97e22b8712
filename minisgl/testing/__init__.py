"""What proves the promises: the simulated engine, and kits that a plugin can be tested with."""
