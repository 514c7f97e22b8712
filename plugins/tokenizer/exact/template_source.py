"""What the source of a chat template says about the texts, roles and fields that the template reads.

The functions walk Jinja's syntax tree, and know nothing about messages.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from jinja2 import nodes

_SEPARATING = frozenset({"split", "rsplit", "partition", "rpartition", "find", "rfind", "index", "rindex"})


def texts_below(node: nodes.Node) -> Iterator[str]:
    """Yield all texts below a node, also those outside expressions."""
    for const in node.find_all(nodes.Const):
        if isinstance(const.value, str):
            yield const.value
    for data in node.find_all(nodes.TemplateData):
        yield data.data


def sought_texts(template: nodes.Template) -> Iterator[str]:
    """Yield the texts that a template may look for: in comparisons, calls, filters, tests and assignments."""
    for node in template.find_all((nodes.Compare, nodes.Call, nodes.Filter, nodes.Test, nodes.Assign)):
        yield from filter(None, _operands(node))


def compared_roles(template: nodes.Template) -> Iterator[str]:
    """Yield the words with which a template compares a role."""
    for node in template.find_all(nodes.Compare):
        if _names_role(node):
            yield from (text for text in _operands(node) if re.fullmatch(r"\w[\w-]*", text))


def read_fields(template: nodes.Template) -> Iterator[str]:
    """Yield the names of fields that a template reads in some object: ``a.name``, ``a['name']``, ``a.get('name')``."""
    for node in template.find_all((nodes.Getattr, nodes.Getitem, nodes.Call, nodes.Compare, nodes.Filter)):
        if isinstance(node, nodes.Getattr):
            yield node.attr
        else:
            yield from _operands(node)


def separators(template: nodes.Template) -> Iterator[str]:
    """Yield the texts by which a template splits a string, such as ``</think>``."""
    variables: dict[str, set[str]] = {}
    for node in template.find_all(nodes.Assign):
        if isinstance(node.target, nodes.Name):
            variables.setdefault(node.target.name, set()).update(_operands(node))
    for call in template.find_all(nodes.Call):
        if isinstance(call.node, nodes.Getattr) and call.node.attr in _SEPARATING:
            for argument in call.args:
                found = variables.get(argument.name, set()) if isinstance(argument, nodes.Name) else _operands(call)
                yield from (text for text in found if text.strip())


def _operands(node: nodes.Node) -> Iterator[str]:
    """Yield the texts that are part of an expression: a comparison's operands, a call's arguments, a list's items."""
    for child in node.iter_child_nodes():
        if isinstance(child, nodes.Const):
            if isinstance(child.value, str):
                yield child.value
        elif isinstance(child, nodes.TemplateData):
            yield child.data
        elif isinstance(child, nodes.Operand | nodes.Keyword | nodes.List | nodes.Tuple):
            yield from _operands(child)


def _names_role(node: nodes.Node) -> bool:
    """Return whether an expression reads a role: a variable, a field or a key with this name."""
    keys = {child.attr for child in node.find_all(nodes.Getattr)} | {child.name for child in node.find_all(nodes.Name)}
    return "role" in keys or any(
        isinstance(child.arg, nodes.Const) and child.arg.value == "role" for child in node.find_all(nodes.Getitem)
    )
