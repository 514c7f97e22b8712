"""Shell completion of options: ``eval "$(minisgl --shell-completion bash)"``.

The shell's completion script calls ``minisgl --complete WORD LINE…``, which prints the completions of WORD. They come
from the same dataclasses as ``--help``, and include the options of the plugins that LINE names with ``plugins=``.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import resources
from types import MappingProxyType
from typing import TYPE_CHECKING

from minisgl.config import DEVICES, DTYPES, GROUPS, LOAD_FORMATS, LOG_FORMATS, LOG_LEVELS, QUANTIZE
from minisgl.options.describe import PRESETS, core_options, group_options, presets

if TYPE_CHECKING:
    from minisgl.plugin_manager.manager import PluginManager

VALUES = MappingProxyType(
    {
        "load_format": LOAD_FORMATS,
        "dtype": DTYPES,
        "quantize": QUANTIZE,
        "device": DEVICES,
        "log_level": LOG_LEVELS,
        "log_format": LOG_FORMATS,
    }
)


def completions(manager: PluginManager, word: str) -> Iterator[str]:
    """Return the completions of ``word``, a partly written argument of the command line.

    Before the ``=`` these are options, and after it the values of an option that has a known set of values.
    """
    key, equals, _ = word.partition("=")
    if not equals:
        keys = [o.key for o in core_options()] + [*GROUPS, *PRESETS, *group_options(manager)]
        words = [f"{k}=" for k in keys] + ["--help", "--cfg", "--version", "--shell-completion"]
    elif key in PRESETS:
        words = [f"{key}={name}" for name in presets(key)]
    elif key in manager.configs:
        manager.load_all(key)
        words = [f"{key}={name}" for name in sorted(manager.configs[key])]
    else:
        options = {o.key: o for o in core_options()} | group_options(manager)
        values = VALUES.get(key, ())
        if key in options and options[key].type is bool:
            values = ("true", "false")
        elif key == "model":
            values = _shipped_models()
        words = [f"{key}={value}" for value in values]
    return (w for w in words if w.startswith(word))


def _shipped_models() -> tuple[str, ...]:
    found: list[str] = []
    for package, folder, ending in (("minisgl.models", "shipped", ""), ("minisgl.models", "shapes", ".json")):
        place = resources.files(package) / folder
        if place.is_dir():
            found += [p.name.removesuffix(ending) for p in place.iterdir() if not p.name.startswith(("_", "."))]
    return tuple(sorted(found))


SCRIPTS = MappingProxyType(
    {
        "bash": """\
_minisgl() {
    local line="${COMP_LINE:0:COMP_POINT}" word
    word="${line##*[[:space:]]}"
    local IFS=$' \\n' choice skip="${word%"${COMP_WORDS[COMP_CWORD]#=}"}"
    COMPREPLY=()
    for choice in $("$1" --complete "$word" $line 2>/dev/null); do
        COMPREPLY+=("${choice#"$skip"}")
    done
    if [[ ${#COMPREPLY[@]} -eq 0 && "$word" == *=* ]]; then
        COMPREPLY=($(compgen -f -- "${word#*=}"))
        compopt -o filenames
        [[ "$skip" == *= ]] || COMPREPLY=("${COMPREPLY[@]/#/${word%%=*}=}")
    fi
    [[ ${#COMPREPLY[@]} -eq 1 && "${COMPREPLY[0]}" == *= ]] && compopt -o nospace
    return 0
}
complete -F _minisgl minisgl
""",
        "zsh": """\
#compdef minisgl
_minisgl() {
    local word="${words[CURRENT]}"
    local -a choices
    choices=("${(@f)$(minisgl --complete "$word" "${(@)words[2,-1]}" 2>/dev/null)}")
    choices=("${(@)choices:#}")
    if (( ${#choices} )); then
        compadd -S '' -- $choices
    elif [[ "$word" == *=* ]]; then
        compset -P '*='
        _files
    fi
}
(( $+functions[compdef] )) || { autoload -Uz compinit && compinit }
compdef _minisgl minisgl
""",
        "fish": """\
complete -c minisgl -n 'not string match -qr "^(model|plugins)=" -- (commandline -ct)' -f
complete -c minisgl -a '(minisgl --complete (commandline -ct) (commandline -opc)[2..-1] 2>/dev/null)'
""",
    }
)
