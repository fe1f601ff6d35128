"""Servers to test against: the front with a scripted service, or any server given by ``--base-url``."""

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import pytest
from frontkit import Server, running
from scripted import ScriptedService


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--base-url", help="run the behaviour tests against this server (needs --model)")
    parser.addoption("--model", help="the model that it serves")


@pytest.fixture
def start() -> Iterator[Callable[..., Server]]:
    """Start a server with options of its own; it is stopped after the test, and must leave nothing open."""
    before = open_files()
    with ExitStack() as stack:

        def start_one(service: ScriptedService | None = None, **options: Any) -> Server:
            return stack.enter_context(running(service or ScriptedService(), **options))

        yield start_one
    assert open_files() <= before, "file descriptors were left open"


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture(scope="session")
def double(request: pytest.FixtureRequest) -> Iterator[Server | None]:
    """The scripted server that all behaviour tests share; None where another server is tested."""
    if request.config.getoption("--base-url", default=None):
        yield None
        return
    with running(ScriptedService()) as server:
        yield server


@pytest.fixture(scope="session")
def base_url(request: pytest.FixtureRequest, double: Server | None) -> str:
    return double.url if double is not None else request.config.getoption("--base-url").rstrip("/")


@pytest.fixture(scope="session")
def model(request: pytest.FixtureRequest, double: Server | None) -> str:
    return "scripted" if double is not None else request.config.getoption("--model")


@pytest.fixture(scope="session")
def scripted(double: Server | None) -> Server:
    """For tests that need the script's commands."""
    if double is None:
        pytest.skip("needs the scripted service")
    return double


@pytest.fixture(scope="session")
def http(base_url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=base_url, timeout=300, trust_env=False) as client:
        yield client
