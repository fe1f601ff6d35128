"""The command line: ``runtime serve | check | config | bench``. What a command doesn't need is not imported."""

import argparse
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from runtime import __version__

if TYPE_CHECKING:
    from runtime.config import Config

_EPILOG = """\
MODEL is a TOML file, or a model itself: a folder, a .gguf file, a hub id (owner/name) or pypi:NAME==VERSION.
Without one, a small chat model is served. `runtime config` prints every setting with its default.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command. Returns the exit code: 0, 1 for a failure, 2 for a configuration or command line that is wrong."""
    arguments = _parser().parse_args(argv)
    from runtime.config import ConfigError

    try:
        config = _config(arguments)
    except ConfigError as error:
        print(f"runtime: {error.where} can't be used:", file=sys.stderr)
        for problem in error.problems:
            print(f"  {problem}", file=sys.stderr)
        return 2
    command = {"serve": _serve, "check": _check, "config": _show, "bench": _bench}[arguments.command]
    return command(config, arguments)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="runtime", description="Serve a language model over an OpenAI-compatible HTTP API.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"runtime {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, words in (
        ("serve", "start the server"),
        ("check", "validate the configuration and the model's files, without starting"),
        ("config", "print the complete configuration, with defaults and explanations"),
        ("bench", "measure throughput, latency and start-up, next to the machine's limit"),
    ):
        command = commands.add_parser(
            name,
            help=words,
            description=words[0].upper() + words[1:] + ".",
            epilog=_EPILOG,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        command.add_argument("model", nargs="?", metavar="MODEL", help="a TOML file or a model source")
        if name != "bench":
            command.add_argument("--host", help="address to listen on (http.host)")
            command.add_argument("--port", help="port to listen on (http.port)")
        command.add_argument(
            "--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="override a setting; repeatable"
        )
    _add_bench_options(command)
    return parser


def _add_bench_options(command: argparse.ArgumentParser) -> None:
    command.set_defaults(host=None, port=None)
    command.add_argument(
        "--only",
        action="append",
        choices=("throughput", "latency", "startup"),
        help="run this bench; repeatable; without it, all",
    )
    command.add_argument(
        "--requests", type=_positive, default=256, metavar="N", help="of the throughput bench (default 256)"
    )
    for name in ("input", "output"):
        command.add_argument(
            f"--{name}", type=_positive, default=0, metavar="N", help=f"fixed {name} tokens, instead of 100 to 1024"
        )
    command.add_argument("--dummy", action="store_true", help="random weights; config.json alone is enough")
    command.add_argument("--json", action="store_true", help="print JSON instead of a table")


def _positive(word: str) -> int:
    number = int(word)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} was given; at least 1 is allowed")
    return number


def _config(arguments: argparse.Namespace) -> "Config":
    from runtime.config import load_config

    overrides = list(arguments.set)
    overrides += [f"http.host={arguments.host}"] if arguments.host is not None else []
    overrides += [f"http.port={arguments.port}"] if arguments.port is not None else []
    overrides += ["model.dummy_weights=true"] if arguments.command == "bench" and arguments.dummy else []
    path: str | None = arguments.model
    if path is not None and _is_source(path):
        overrides.insert(0, f"model.source={path}")
        path = None
    return load_config(path, overrides)


def _is_source(word: str) -> bool:
    """Whether the positional names a model rather than a TOML file."""
    from runtime.names import kind_of

    return not word.endswith(".toml") and (word.startswith("pypi:") or kind_of(word) != "unknown")


def _serve(config: "Config", arguments: argparse.Namespace) -> int:
    from runtime.serve import main as serve

    return serve(config, lambda: _config(arguments))


def _check(config: "Config", arguments: argparse.Namespace) -> int:
    from runtime.engine.build import choose_quantization
    from runtime.models.config import ModelConfig, ModelError
    from runtime.sources import SourceError, cached, describe
    from runtime.tokenizer import TemplateError, Tokenizer, TokenizerError

    model, note = config.model, ""
    where, weights = model.tokenizer, not model.dummy_weights
    try:
        found = describe(model.source, tokenizer=where, weights=weights)
        if files := cached(model.source, tokenizer=where, weights=weights):
            ModelConfig.from_folder(files.folder).with_context(model.context_tokens)
            Tokenizer(files.tokenizer, model.chat_template, files.folder)
            if config.engine.device != "cuda" and model.quantization == "auto":
                note = f"; on a CPU model.quantization is {choose_quantization(config, files, 'cpu')}"
    except (SourceError, ModelError, TokenizerError, TemplateError) as error:
        print(f"runtime: {error}", file=sys.stderr)
        return 1
    print(f"{arguments.model or 'the built-in configuration'} is fine: {model.name}: {found}{note}")
    return 0


def _show(config: "Config", arguments: argparse.Namespace) -> int:
    from runtime.config import to_toml

    print(to_toml(config), end="")
    return 0


def _bench(config: "Config", arguments: argparse.Namespace) -> int:
    from runtime.bench import BENCHES, Options
    from runtime.bench import main as bench

    benches = tuple(arguments.only or BENCHES)
    options = Options(benches, arguments.requests, arguments.input, arguments.output, arguments.json)
    return bench(config, options)
