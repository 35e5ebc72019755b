from __future__ import annotations

import base64
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringway.config import SETTINGS, Config, resolve, schema
from ringway.errors import ConfigError

DEEPSPEED = {
    "train_batch_size": 8,
    "zero_optimization": {"stage": 2},
    "comms_logger": {
        "enabled": True,
        "verbose": False,
        "prof_all": False,
        "debug": True,
        "prof_ops": ["all_reduce", "x"],
    },
}


def test_defaults() -> None:
    config = resolve(environ={})
    assert (config.timeout, config.stall_after, config.recorder_size) == (1800.0, 30.0, 4096)
    assert (config.max_object_bytes, config.check, config.backend, config.policy) == (
        1 << 30,
        "sample",
        None,
        None,
    )
    assert {config.source(key) for key in SETTINGS} == {"default"}
    assert config == resolve({}, {})


def test_a_whole_deepspeed_configuration() -> None:
    logger = resolve(DEEPSPEED, {}).comms_logger
    assert (logger.enabled, logger.prof_all, logger.debug) == (True, False, True)
    assert logger.prof_ops == ("all_reduce", "x")


def test_later_sources_override_earlier_ones(tmp_path: Path) -> None:
    file = tmp_path / "base.json"
    file.write_text(json.dumps({"ringway": {"timeout": 1, "stall_after": 2, "recorder_size": 3}}))
    environ = {"RINGWAY_CONFIG": str(file), "RINGWAY_RECORDER_SIZE": "9"}
    config = resolve({"ringway": {"stall_after": 5}}, environ)
    assert (config.timeout, config.stall_after, config.recorder_size) == (1.0, 5.0, 9)
    assert config.source("timeout") == f"{file} (RINGWAY_CONFIG)"
    assert config.source("stall_after") == "config argument"
    assert config.source("recorder_size") == "RINGWAY_RECORDER_SIZE"
    assert config.source("check") == "default"


def test_toml_and_json_files_are_equivalent(tmp_path: Path) -> None:
    toml, text = tmp_path / "c.toml", tmp_path / "c.json"
    toml.write_text('[ringway]\ntimeout = 7\n[ringway.policy]\nall_reduce = "shm"\n[comms_logger]\nenabled = true\n')
    text.write_text('{"ringway": {"timeout": 7, "policy": {"all_reduce": "shm"}}, "comms_logger": {"enabled": true}}')
    first, second = resolve(toml, {}), resolve(str(text), {})
    for key in SETTINGS:
        assert first.value(key) == second.value(key)
    assert first.policy == {"all_reduce": "shm"}
    assert first.source("timeout") == str(toml)


def test_variables_of_the_logger() -> None:
    environ = {"RINGWAY_COMMS_LOGGER_ENABLED": "1", "RINGWAY_COMMS_LOGGER_PROF_OPS": "all_reduce, barrier"}
    logger = resolve(environ=environ).comms_logger
    assert logger.enabled is True
    assert logger.prof_ops == ("all_reduce", "barrier")


@pytest.mark.parametrize(
    ("config", "key", "words"),
    [
        ({"ringway": {"timeot": 3}}, "timeot", "did you mean 'timeout'?"),
        ({"comms_logger": {"enable": True}}, "enable", "did you mean 'enabled'?"),
        ({"ringway": {"timeout": "soon"}}, "timeout", "a number of seconds"),
        ({"ringway": {"timeout": 0}}, "timeout", "above 0"),
        ({"ringway": {"timeout": float("nan")}}, "timeout", "above 0"),
        ({"ringway": {"timeout": True}}, "timeout", "a number of seconds"),
        ({"ringway": {"timeout": 10**400}}, "timeout", "at most"),
        ({"ringway": {"recorder_size": 1.5}}, "recorder_size", "a whole number"),
        ({"ringway": {"check": "never"}}, "check", "always, sample, stall"),
        ({"ringway": {"backend": ""}}, "backend", "a name"),
        ({"ringway": {"policy": 3}}, "policy", "a path or a table"),
        ({"comms_logger": {"prof_ops": "all_reduce"}}, "comms_logger.prof_ops", "a list of names"),
        ({"comms_logger": {"enabled": 2}}, "comms_logger.enabled", "true or false"),
        ({"ringway": {"parallel": {"bucket_md": 1}}}, "parallel", "did you mean 'bucket_mb'?"),
        ({"ringway": {"parallel": {"bucket_mb": 0}}}, "parallel", "above 0"),
        ({"ringway": {"parallel": {"plan": {"0": 1}}}}, "parallel", "layers and styles"),
        ({"ringway": [1]}, "ringway", "not a table"),
    ],
)
def test_wrong_values_are_named(config: dict[str, Any], key: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(config, {})
    assert caught.value.key == key
    assert caught.value.source == "config argument"
    assert words in str(caught.value)


@pytest.mark.parametrize("value", ["ten", "1_0", "\u0661\u0662", "\u00b2", "9" * 5000, "inf", "nan"])
def test_wrong_variable_names_itself(value: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(environ={"RINGWAY_TIMEOUT": value})
    assert caught.value.source == "RINGWAY_TIMEOUT"
    assert f"'{value}'" in str(caught.value)


@pytest.mark.parametrize("name", ["c.json", "c.toml"])
def test_file_with_a_byte_order_mark(tmp_path: Path, name: str) -> None:
    text = '{"ringway": {"timeout": 7}}' if name == "c.json" else "[ringway]\ntimeout = 7\n"
    (tmp_path / name).write_text(text, encoding="utf-8-sig")
    assert resolve(tmp_path / name, {}).timeout == 7


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("c.json", '{"ringway": {"timeout": 7, "timeout": 8}}'),
        ("c.json", '{"ringway": {"timeout": 7}, "ringway": {"stall_after": 8}}'),
        ("c.toml", "[ringway]\ntimeout = 7\ntimeout = 8\n"),
    ],
)
def test_a_duplicate_key_is_refused(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=r"twice|overwrite"):
        resolve(tmp_path / name, {})


def test_a_misspelled_variable_is_reported() -> None:
    assert resolve(environ={"RINGWAY_TIMEOT": "3"}).notes == (
        "RINGWAY_TIMEOT is not a setting; did you mean RINGWAY_TIMEOUT?",
    )
    assert resolve(environ={"RINGWAY_RUN_ID": "3", "RINGWAY_SOAK": "1", "RINGWAY_BACKEND": ""}).notes == ()


@pytest.mark.parametrize("content", [b"{", b"[1, 2]", b"\xff\xfe", b"3", b"[" * 100_000])
@pytest.mark.parametrize("suffix", ["json", "toml"])
def test_broken_files(tmp_path: Path, content: bytes, suffix: str) -> None:
    file = tmp_path / f"c.{suffix}"
    file.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        resolve(environ={"RINGWAY_CONFIG": str(file)})
    assert caught.value.source == str(file)


def test_missing_file_and_wrong_type(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        resolve(tmp_path / "none.json", {})
    with pytest.raises(ConfigError, match="dictionary"):
        resolve(3, {})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="did you mean 'timeout'"):
        Config().source("timeot")


def test_the_logger_is_as_tolerant_as_deepspeeds() -> None:
    for value, means in ((1, True), ("true", True), ("Off", False), (0, False), (True, True)):
        assert resolve({"comms_logger": {"enabled": value, "debug": value}}, {}).comms_logger.debug is means
    assert resolve({"comms_logger": {"prof_all": False}}, {}).comms_logger.enabled, "the block turns it on"
    assert not resolve({"comms_logger": {"enabled": False}}, {}).comms_logger.enabled
    assert not resolve({}, {}).comms_logger.enabled


HJSON = """// a DeepSpeed configuration
{
  # with comments
  "ringway": {"timeout": 7,}, /* and
  commas */ "comms_logger": {"prof_ops": ["a // b", "c, ]", "# d"],},
  "url": "http://x",
}
"""


def test_comments_and_base64_as_deepspeed_takes_them(tmp_path: Path) -> None:
    file = tmp_path / "ds_config.json"
    file.write_text(HJSON)
    for config in (str(file), base64.urlsafe_b64encode(HJSON.encode()).decode()):
        found = resolve(config, {})
        assert found.timeout == 7
        assert found.comms_logger.prof_ops == ("a // b", "c, ]", "# d")
        assert found.others == {"url": "http://x"}
    assert resolve(base64.urlsafe_b64encode(b'{"ringway": {"timeout": 8}}').decode(), {}).timeout == 8
    file.write_text("{ringway: {timeout: 7}}")
    if importlib.util.find_spec("hjson") is None:
        with pytest.raises(ConfigError, match="install the package hjson"):
            resolve(str(file), {})
    else:
        assert resolve(str(file), {}).timeout == 7


def test_schema_lists_every_setting_with_its_default() -> None:
    document = json.loads(json.dumps(schema()))
    ours, logger = (document["properties"][block] for block in ("ringway", "comms_logger"))
    assert ours["additionalProperties"] is False
    assert document["additionalProperties"] is True
    listed = set(ours["properties"]) | {f"comms_logger.{name}" for name in logger["properties"]}
    assert listed == set(SETTINGS)
    assert ours["properties"]["timeout"]["default"] == 1800.0
    assert logger["properties"]["prof_ops"]["default"] == []
    assert all(entry["description"] for entry in [*ours["properties"].values(), *logger["properties"].values()])


KEYS = st.sampled_from([key.rpartition(".")[2] for key in SETTINGS])
JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)),
    max_leaves=6,
)
VARIABLES = [setting.variable for setting in SETTINGS.values() if setting.key != "policy"] + [
    "RINGWAY_CONFIG",
    "RINGWAY_X",
]


@settings(max_examples=400)
@given(
    st.one_of(
        st.dictionaries(st.sampled_from(["ringway", "comms_logger", "other"]), JSON, max_size=3),
        st.dictionaries(
            st.sampled_from(["ringway", "comms_logger"]),
            st.dictionaries(st.one_of(KEYS, st.text(max_size=4)), JSON),
        ),
    ),
    st.dictionaries(st.sampled_from(VARIABLES), st.text(max_size=8), max_size=4),
)
def test_any_configuration_gives_a_value_or_a_config_error(config: dict[str, Any], environ: dict[str, str]) -> None:
    try:
        resolved = resolve(config, environ)
    except ConfigError:
        return
    assert resolved.timeout > 0
    for key in SETTINGS:
        assert resolved.source(key)
