"""Shell completion of options: ``eval "$(minisgl --shell-completion bash)"``.

The shell's completion script calls ``minisgl --complete WORD LINE…``, which prints the completions of WORD. They come
from the same dataclasses as ``--help``, and include the options of the plugins that LINE names with ``plugins=``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from importlib import resources
from types import MappingProxyType

from minisgl.config import DEVICES, DTYPES, GROUPS, LOAD_FORMATS, LOG_FORMATS, LOG_LEVELS, QUANTIZE, Config, ConfigError
from minisgl.options.compose import split_plugins
from minisgl.plugin_manager.manager import PluginManager
from minisgl.plugins.command.describe import PRESETS, core_options
from minisgl.plugins.command.listing import group_options, presets

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


def run(words: Sequence[str], kind: type[Config], usage: str) -> None:
    """Print a shell's script, or the completions of the word after ``--complete``.

    The words after it are the whole command line, read for ``plugins=``. A plugin that can't be loaded is ignored
    without an error, because the command line may be only partly written.
    """
    if words[:1] != ["--complete"]:
        flag = "--shell-completion" if "--shell-completion" in words else "-sc"
        rest = list(words)[list(words).index(flag) + 1 :]
        if not rest or rest[0] not in SCRIPTS:
            raise ConfigError(f"--shell-completion: name the shell: {', '.join(SCRIPTS)}.")
        print(SCRIPTS[rest[0]], end="")
        return
    manager = PluginManager.load(light=True)
    for name in split_plugins(words[2:])[0]:
        with contextlib.suppress(ConfigError):
            manager.add(name)
    for choice in completions(manager, words[1] if words[1:] else ""):
        print(choice)


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
