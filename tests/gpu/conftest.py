"""Options of the tests that need a GPU."""

from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--carried-model", type=Path, help="A folder made by `python -m tests.gpu.carry_model unpack`.")
