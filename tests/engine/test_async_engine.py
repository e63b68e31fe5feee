"""Streams behind asyncio: order, cancellation, errors, clean ends."""

import asyncio

import pytest

from deepinfer import LLM, SamplingParams
from deepinfer.engine import AsyncEngine, Composition
from deepinfer.errors import InvalidRequest, RequestError

PARAMS = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
PROMPTS = [list(range(5 + i, 40 + i)) for i in range(6)]


@pytest.fixture
def engine(tiny_llama_folder):
    return Composition(model=str(tiny_llama_folder), weights="float32", max_rows=4, lag=1).build()


def test_streams_grow_and_end_with_what_offline_gives(engine, tiny_llama_folder) -> None:
    expected = [o.token_ids for o in LLM(str(tiny_llama_folder), weights="float32").generate(PROMPTS, PARAMS)]

    async def one(served: AsyncEngine, prompt: list[int]) -> tuple[int, ...]:
        seen: tuple[int, ...] = ()
        async for output in served.stream(prompt, PARAMS):
            assert output.token_ids[: len(seen)] == seen
            seen = output.token_ids
        assert output.finished
        return seen

    async def main() -> list[tuple[int, ...]]:
        async with AsyncEngine(engine) as served:
            return await asyncio.gather(*(one(served, prompt) for prompt in PROMPTS))

    assert asyncio.run(main()) == expected


def test_leaving_a_stream_cancels_its_request_alone(engine) -> None:
    async def main() -> None:
        async with AsyncEngine(engine) as served:
            async for output in served.stream(PROMPTS[0], SamplingParams(temperature=0, max_tokens=200)):
                if len(output.token_ids) >= 3:
                    break
            task = asyncio.create_task(served.generate(PROMPTS[1], SamplingParams(temperature=0, max_tokens=200)))
            await asyncio.sleep(0.05)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            done = await served.generate(PROMPTS[2], PARAMS)
            assert len(done.token_ids) == 24

    asyncio.run(main())
    assert not engine.has_work
    assert engine.metrics.finished["cancelled"] == 2
    engine.scheduler.book.check()


def test_a_refused_request_raises_in_its_own_stream(engine) -> None:
    async def main() -> None:
        async with AsyncEngine(engine) as served:
            good = asyncio.create_task(served.generate(PROMPTS[0], PARAMS))
            with pytest.raises(InvalidRequest, match="empty"):
                await served.generate([], PARAMS)
            assert len((await good).token_ids) == 24

    asyncio.run(main())


def test_closing_with_streams_open_ends_them(engine) -> None:
    async def main() -> str:
        async with AsyncEngine(engine) as served:
            stream = served.stream(PROMPTS[0], SamplingParams(temperature=0, max_tokens=200))
            await anext(stream)
        rest = [output async for output in stream]
        return str(rest[-1].completions[0].finish_reason)

    assert asyncio.run(asyncio.wait_for(main(), 60)) == "cancelled"


def test_nobody_waits_for_an_engine_that_has_failed_or_closed(engine, monkeypatch) -> None:
    def broken() -> None:
        raise RuntimeError("the engine itself broke")

    async def main() -> None:
        async with AsyncEngine(engine) as served:
            await served.generate(PROMPTS[0], PARAMS)
            monkeypatch.setattr(engine, "step", broken)
            with pytest.raises(RuntimeError, match="itself broke"):
                await served.generate(PROMPTS[1], PARAMS)
            with pytest.raises(RequestError, match="no more requests"):
                await served.generate(PROMPTS[2], PARAMS)
        with pytest.raises(RequestError, match="no more requests"):
            await served.generate(PROMPTS[2], PARAMS)

    asyncio.run(asyncio.wait_for(main(), 60))
