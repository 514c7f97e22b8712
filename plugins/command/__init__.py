"""Programs of the command line that the engine does not need: help, completion, the chat in the terminal, the demo."""
