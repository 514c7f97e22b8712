"""How models write what they think: the group ``reasoning_parser`` (`minisgl.server.answer.ReasoningParser`)."""
