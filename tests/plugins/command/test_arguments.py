"""The command line as people write it: text without quotes, advice for wrong arguments, and flags."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from minisgl.options.compose import compose, run_cli
from minisgl.plugin_manager.manager import PluginManager
from minisgl.plugins.command.describe import core_options
from minisgl.plugins.command.print_config import as_yaml

from ...options.own_cache import refused, write_plugin


@pytest.fixture(scope="module")
def plugin(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_plugin(tmp_path_factory.mktemp("plugins"))


@pytest.fixture(scope="module")
def manager() -> PluginManager:
    return PluginManager.load(light=True)


@pytest.fixture(scope="module")
def mine(plugin: str) -> PluginManager:
    return PluginManager.load([plugin], light=True)


@settings(max_examples=25, deadline=None)
@given(st.text(st.sampled_from("ab /\\'\"=[](){},:$#\u00e9\n\t+~@*"), min_size=1, max_size=8))
@example("\\")
@example("\\\n")
@example("it's")
@example("a\\'b\\\\'")
def test_text_needs_no_quotes(mine: PluginManager, text: str) -> None:
    """The value of a text option is the argument's text, unless it is quoted or contains an interpolation."""
    if "${" not in text and not (len(text) > 1 and text[0] == text[-1] and text[0] in "'\""):
        config = compose(mine, [f"model={text}", "cache=mine", f"cache.path={text}"])
        assert config.model == text
        assert config.cache.path == text


def test_options_of_a_section_without_its_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are those of the core."""
    missing = dict.fromkeys(("server", "kv_events", "multi_node"), ("missing.options", "Options"))
    monkeypatch.setattr("minisgl.config.SECTIONS", missing)
    keys = {option.key for option in core_options()}
    assert "server.port" in keys
    assert "server.tls_cert" not in keys


def test_without_this_folder_arguments_are_in_hydra_syntax(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong one is refused, with Hydra's own words."""
    manager = PluginManager.load(light=True)
    monkeypatch.setattr("minisgl.options.compose._command", lambda name: None)
    config = compose(manager, ["stage='3'", "model='a=b'", "cache=naive", "server.port=0"])
    assert (config.model, manager.name_of("cache", config.cache), config.server.port) == ("a=b", "naive", 0)
    for word in ("foo=1", "cache=rad", "cache.x=1", "tp=two", "tp", "stage=3", "--help", "router=smg"):
        assert refused(manager, word)


# ---- wrong arguments ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("foo=1", "There is no option 'foo'."),
        ("+foo=1", "There is no option 'foo'."),
        ("++foo=1", "There is no option 'foo'."),
        ("modell=x", "There is no option 'modell'. Did you mean model?"),
        ("port=8000", "Did you mean server.port?"),
        ("order=lpm", "Did you mean scheduler.order?"),
        ("server.prot=1", "Did you mean server.port? It has: server.host, server.port"),
        ("server=1", "It has: server.host"),
        (
            "scheduler.foo=1",
            "There is no option 'scheduler.foo' in scheduler=prefill_first. It has: scheduler.order, "
            "scheduler.max_pause.",
        ),
        ("+scheduler.foo=1", "There is no option 'scheduler.foo' in scheduler=prefill_first."),
        ("scheduler.odrer=lpm", "Did you mean scheduler.order?"),
        ("scheduler.patience=1", "It is an option of scheduler=decode_first; did you mean to choose that?"),
        ("cache.x=1", "There is no option 'cache.x' in cache=radix"),
        ("hydra.run.dir=/tmp", "There is no option 'hydra.run.dir'"),
        ("cache@foo=radix", "There is no option 'cache@foo'. Did you mean cache?"),
        ("cache=rad", "cache=rad: there is no such cache. Did you mean radix? Known: groups, naive, radix, states."),
        ("cache=null", "cache=null: there is no such cache."),
        ("stage=10", "stage=10: there is no such stage. Did you mean 1? Known: 1, 2, 3, 4, 5, 6, 7, 8, 9."),
        ("experiment=laptpo", "Did you mean laptop? Known: laptop, latency, throughput."),
        ("tp=two", "tp=two: tp must be a whole number."),
        ("tp=1.5", "tp must be a whole number."),
        ("tp=null", "tp must be a whole number."),
        ("tp=", "tp must be a whole number."),
        ("num_pages=x", "num_pages must be a whole number or null."),
        ("memory_ratio=much", "memory_ratio must be a number."),
        ("overlap=maybe", "overlap must be true or false."),
        ("tp=1,2", "tp=1,2: give one value. A list is written in brackets"),
        ("tp=0", "tp=0: tp must be at least 1."),
        ("page_size=0", "page_size must be at least 1."),
        ("page_size=-1", "page_size must be at least 1."),
        ("num_pages=0", "num_pages must be at least 1, or null"),
        ("memory_ratio=1.5", "memory_ratio must be above 0 and at most 1."),
        ("memory_ratio=nan", "memory_ratio must be above 0 and at most 1."),
        ("dtype=foo", "dtype must be one of auto, float32, bfloat16, float16."),
        ("device=gpu", "device must be one of auto, cpu, cuda."),
        ("load_format=fast", "load_format must be one of auto, dummy."),
        ("model=", "model must be a shipped model's name"),
        ("max_prefill_tokens=0", "max_prefill_tokens must be at least 1."),
        ("max_running_requests=0", "max_running_requests must be at least 1."),
        ("starvation_steps=0", "starvation_steps must be at least 1."),
        ("max_draft_tokens=0", "max_draft_tokens must be at least 1."),
        ("verification_rounds=0", "verification_rounds must be at least 1."),
        ("verification_rounds=-1", "verification_rounds must be at least 1."),
        ("seed=99999999999999999999", "seed must be a 64-bit integer."),
        ("server.port=70000", "server.port must be between 0"),
        ("server.max_connections=0", "server.max_connections must be at least 1."),
        *(
            (f"server.io_timeout={seconds}", "server.io_timeout must be a number of seconds above 0.")
            for seconds in ("0", "-1", "nan", "inf")
        ),
        ("server.tokenizers=-1", "server.tokenizers must be at least 0."),
        ("server.drain_timeout=inf", "server.drain_timeout must be a number of seconds"),
        ("server.watchdog=-1", "server.watchdog must be a number of seconds"),
        ("log_level=loud", "log_level must be one of critical"),
        ("log_format=xml", "log_format must be one of text, json"),
        ("server.api_key=", "server.api_key must be a key, or null"),
        ("tp", "tp: write key=value."),
        ("radix", "radix: write key=value. Did you mean cache=radix?"),
        ("my.py", "To load a plugin: plugins=my.py"),
        ("--tp=2", "Options are written without dashes: tp=2"),
        ("--tp", "there is no such flag"),
        ("~cache", "options can't be removed"),
        ("tp=[1", "tp=[1: this can't be read"),
        ("model=${nothing}", "Interpolation key 'nothing' not found"),
    ],
)
def test_wrong_argument(manager: PluginManager, word: str, expected: str) -> None:
    message = refused(manager, word)
    assert expected in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["cache=mine"], "cache.path has no default. Set it: cache.path=…"),
        (["cache=mine", "cache.path=a", "cache.max_nodes=x"], "cache.max_nodes must be a whole number."),
        (["cache=mine", "cache.path=a", "cache.max_nodes=3"], "cache.max_nodes=3: it must be even."),
        (["cache=mine", "cache.path=a", "cache.ratio=x"], "cache.ratio must be a number or null."),
        (["cache=mine", "cache.path=a", "cache.colour=GREEN"], "cache.colour must be one of RED, BLUE."),
        (["cache=mine", "cache.path=a", "cache.sizes=[a]"], "cache.sizes"),
        (["cache=mine", "cache.path=a", "cache.nodes=1"], "Did you mean cache.max_nodes?"),
        (["max_nodes=1"], "Did you mean cache.max_nodes?"),
        (["cache=naive", "cache.max_nodes=1"], "It is an option of cache=mine"),
    ],
)
def test_wrong_plugin_option(mine: PluginManager, words: list[str], expected: str) -> None:
    assert expected in refused(mine, *words)


# ---- the command line --------------------------------------------------------------------------------


def test_run_cli(capsys: pytest.CaptureFixture[str], plugin: str) -> None:
    assert run_cli(["tp=2", "cache=naive"])[0].tp == 2
    with pytest.raises(SystemExit) as ended:
        run_cli(["tp=two"])
    assert ended.value.code == 2
    assert capsys.readouterr().err == "minisgl: tp=two: tp must be a whole number.\n"
    for words, expected in (
        (["--help"], "scheduler.patience=8"),
        (["--help", f"plugins={plugin}"], "cache.path=(required)"),
        (["--version"], "minisgl 0."),
        (["--cfg", "job", "tp=2"], "tp: 2\n"),
        (["--shell-completion", "bash"], "complete -F"),
    ):
        with pytest.raises(SystemExit) as ended:
            run_cli(words)
        assert ended.value.code == 0
        assert expected in capsys.readouterr().out
    for words in (["--cfg"], ["--cfg", "hydra"], ["--shell-completion"], ["--shell-completion", "cmd"]):
        with pytest.raises(SystemExit) as ended:
            run_cli(words)
        assert ended.value.code == 2


def test_as_yaml_shows_choices(manager: PluginManager) -> None:
    shown = as_yaml(manager, ["cache=naive", "scheduler=mixed"])
    assert "cache: {}  # cache=naive\n" in shown
    assert "scheduler:  # scheduler=mixed\n  order: fcfs\n" in shown
