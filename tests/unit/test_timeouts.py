"""A time limit whose clock can stand still, in virtual time."""

from __future__ import annotations

import asyncio

import pytest

from sao.timeouts import time_limit
from tests.virtual_time import run


@pytest.mark.parametrize(("stood", "takes", "late"), [((0, 0), 9.0, False), ((0, 0), 11.0, True), ((5, 25), 29.0, False), ((5, 25), 31.0, True)])
def test_time_in_which_the_clock_stood_does_not_count(stood, takes, late):
    async def main() -> bool:
        now = asyncio.get_running_loop().time
        began, end = stood
        try:
            async with time_limit(10.0, lambda: min(max(now() - began, 0.0), end - began)) as scope:
                await asyncio.sleep(takes)
        except TimeoutError:
            assert scope.expired()
            return True
        return scope.expired()

    assert run(main()) is late


def test_a_timeout_of_another_is_not_taken_for_its_own():
    async def main() -> None:
        async with time_limit(10.0) as scope:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(asyncio.sleep(5.0), 1.0)
            assert not scope.expired()

    run(main())
