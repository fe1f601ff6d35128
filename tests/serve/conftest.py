"""Real servers, shared by the tests that leave them as they were."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from servekit import Server

PLACEMENTS = {
    "tasks": (),
    "processes": ("supervision.placement.frontend=process", "supervision.placement.detokenizer=process"),
}


@pytest.fixture(scope="session", params=PLACEMENTS)
def placement(request: pytest.FixtureRequest) -> tuple[str, ...]:
    """Settings that make the actors beside the scheduler tasks of the root, or processes."""
    return PLACEMENTS[request.param]


@pytest.fixture(scope="session")
def server(placement: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A ready server for requests that leave it as it was."""
    with Server(tmp_path_factory.mktemp("server"), settings=placement) as running:
        yield running.wait_ready()


@pytest.fixture
def fresh(placement: tuple[str, ...], tmp_path: Path) -> Iterator[Server]:
    """A ready server of the test's own."""
    with Server(tmp_path, settings=placement) as running:
        yield running.wait_ready()
