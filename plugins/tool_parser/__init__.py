"""How families of models write tool calls: the group ``tool_parser`` (`minisgl.server.answer.ToolParser`)."""
