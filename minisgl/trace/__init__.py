"""Traces of a scheduler: the file format, a reader, a checker of the promises, drawings and a viewer."""
