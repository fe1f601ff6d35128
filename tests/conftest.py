"""Options of the whole suite."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--full",
        action="store_true",
        help="whole sizes where a test normally takes a seeded share: hundreds of prompts on the real model (make test-full)",
    )


@pytest.fixture(scope="session")
def full(request: pytest.FixtureRequest) -> bool:
    """Whether the whole size of a test is wanted."""
    return bool(request.config.getoption("--full"))
