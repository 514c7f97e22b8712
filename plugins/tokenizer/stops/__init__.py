"""Stop strings: a request's parameter ``stop`` ends its text, also if a stop string spans several tokens."""
