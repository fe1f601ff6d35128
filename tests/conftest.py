"""Settings and options of all tests."""

import pytest
from hypothesis import settings

# How long an example takes says more about the machine than about the code.
settings.register_profile("runtime", deadline=None)
settings.load_profile("runtime")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--full",
        action="store_true",
        help="whole sizes where a test takes a seeded share otherwise: hundreds of prompts on the real model",
    )


@pytest.fixture(scope="session")
def full(request: pytest.FixtureRequest) -> bool:
    """Whether the whole size of a test is wanted."""
    return bool(request.config.getoption("--full"))
