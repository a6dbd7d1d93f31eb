from __future__ import annotations

from collections.abc import AsyncIterator

import aiohttp
import pytest_asyncio

from tests.front.pod import Pod, running_pod


@pytest_asyncio.fixture
async def pod() -> AsyncIterator[Pod]:
    async with running_pod() as pod:
        yield pod


@pytest_asyncio.fixture
async def client() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as session:
        yield session
