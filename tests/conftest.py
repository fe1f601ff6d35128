"""Settings and options of all tests."""

import pytest
from hypothesis import settings

# How long an example takes says more about the machine than about the code.
settings.register_profile("runtime", deadline=None)
settings.load_profile("runtime")


def pytest_addoption(parser: pytest.Parser) -> None:
    chaos = parser.getgroup("chaos")
    chaos.addoption("--chaos-whole", action="store_true", help="every fault at every moment, not a few of them")
    chaos.addoption("--chaos-like", default="", help="of these, only those that this is a part of: 'stop detokenizer'")
    chaos.addoption("--chaos-seed", type=int, default=1, help="their order, and which a few are")
    chaos.addoption("--soak-minutes", type=float, default=0.0, help="how long the soak test runs; 0 = not at all")
    parser.addoption(
        "--full",
        action="store_true",
        help="whole sizes where a test takes a seeded share otherwise: hundreds of prompts on the real model",
    )


@pytest.fixture(scope="session")
def full(request: pytest.FixtureRequest) -> bool:
    """Whether the whole size of a test is wanted."""
    return bool(request.config.getoption("--full"))
