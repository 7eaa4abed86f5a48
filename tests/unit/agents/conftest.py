from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from agents_kit import make_tokenizer

from sao.agents.renderer import Renderer, load_renderer


@pytest.fixture(scope="session", params=["special", "added", "text"])
def tags(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="session")
def any_chatml(tags: str) -> Renderer:
    """ChatML over each way a vocabulary can hold the tool tags."""
    return _with_ends(load_renderer("chatml", make_tokenizer(tags)))


@pytest.fixture(scope="session")
def tokenizer():  # type: ignore[no-untyped-def]
    return make_tokenizer()


@pytest.fixture(scope="session")
def chatml(tokenizer) -> Renderer:  # type: ignore[no-untyped-def]
    return _with_ends(load_renderer("chatml", tokenizer))


def _with_ends(renderer):  # type: ignore[no-untyped-def]
    """The ids that tests of ChatML name most."""
    renderer.start, renderer.end = (renderer.encoder.control[token] for token in ("<|im_start|>", "<|im_end|>"))
    return renderer
