import asyncio

import numpy as np
import pytest

from sao.errors import EngineFailure, PublishFailure
from sao.inference.failures import GenerationLost, RequestRefused
from sao.inference.pool import complete
from sao.inference.protocol import Canary, GenerateRequest
from sao.inference.scripted import ScriptedEngine
from sao.trajectory import SamplingSpec
from sao.weights.bundle import WeightBundle

BUNDLE = WeightBundle((), np.zeros(0, np.uint8))


def request(tokens=(1, 2, 3), budget=20, **fields):
    sampling = SamplingSpec(max_tokens=budget, stop=fields.pop("stop", ()), seed=fields.pop("seed", None))
    return GenerateRequest("r", np.asarray(tokens, np.int32), sampling, fields.pop("session", "s"), **fields)


def test_tokens_depend_on_ids_and_seed_alone():
    async def run():
        one, other = ScriptedEngine("a"), ScriptedEngine("b", version=3, tick=1)
        return [await complete(e, request(**k)) for e in (one, other) for k in ({}, {"seed": 5}, {"tokens": (1, 2, 4)})]

    results = asyncio.run(run())
    assert [g.token_ids.tolist() for g in results[:3]] == [g.token_ids.tolist() for g in results[3:]]
    assert len({tuple(g.token_ids.tolist()) for g in results}) == 3
    assert (results[3].versions == 3).all()


def test_continuing_where_it_stopped_gives_the_same_tokens_and_score_agrees():
    async def run():
        engine = ScriptedEngine()
        whole = await complete(engine, request(budget=12))
        first = await complete(engine, request(budget=5))
        rest = await complete(engine, request(tokens=[1, 2, 3, *first.token_ids], budget=7))
        return whole, first, rest, await engine.score([1, 2, 3, *whole.token_ids])

    whole, first, rest, scored = asyncio.run(run())
    assert whole.token_ids.tolist() == first.token_ids.tolist() + rest.token_ids.tolist()
    np.testing.assert_allclose(scored[2:], whole.logprobs)
    assert (whole.logprobs < 0).all() and whole.finish == "length"


def test_a_stop_token_ends_the_turn_and_is_sampled():
    async def run():
        return [await complete(ScriptedEngine(), request(tokens=(i, i), budget=200, stop=(7,))) for i in range(20)]

    for generation in asyncio.run(run()):
        assert generation.finish == "stop"
        assert generation.token_ids[-1] == 7 and 7 not in generation.token_ids[:-1]


def test_chunks_of_a_stream_join_to_the_whole():
    async def run():
        chunks = [chunk async for chunk in ScriptedEngine(tick=4).generate(request(budget=10, stream=True))]
        return chunks, await complete(ScriptedEngine(), request(budget=10))

    chunks, whole = asyncio.run(run())
    assert [c.finish for c in chunks] == [None, None, "length"]
    assert np.concatenate([c.token_ids for c in chunks]).tolist() == whole.token_ids.tolist()


def test_refusals_carry_the_numbers():
    async def run():
        engine = ScriptedEngine(context=8, version=2)
        with pytest.raises(RequestRefused, match="budget 0"):
            await complete(engine, request(budget=0))
        with pytest.raises(RequestRefused, match="prompt of 8 tokens, context 8"):
            await complete(engine, request(tokens=range(8)))
        with pytest.raises(RequestRefused, match="pinned to version 1"):
            await complete(engine, request(pinned_version=1))

    asyncio.run(run())


def test_publication_in_flight_switches_versions_and_waits_at_the_gate():
    async def run():
        engine = ScriptedEngine(tick=1, publish_s=0.001)
        running = asyncio.create_task(complete(engine, request(budget=2000)))
        await asyncio.sleep(0)
        publication = asyncio.create_task(engine.publish(BUNDLE, 1))
        await asyncio.sleep(0)
        late = await complete(engine, request(budget=3))
        report, old = await publication, await running
        return report, old, late, await engine.snapshot()

    report, old, late, snapshot = asyncio.run(run())
    assert report.in_flight == 1 and snapshot.version == 1 and snapshot.aborted_requests == 0
    assert set(old.versions.tolist()) == {0, 1} and (np.diff(old.versions) >= 0).all()
    assert late.versions.tolist() == [1, 1, 1]


def test_versions_only_grow_and_the_same_one_is_a_no_op():
    async def run():
        loaded = []
        engine = ScriptedEngine(on_publish=lambda bundle, version: loaded.append(version), canary_gap=lambda canary: canary.logprobs[0])
        await engine.publish(BUNDLE, 2)
        assert (await engine.publish(BUNDLE, 2)).tensors == 0
        with pytest.raises(PublishFailure, match="version 1 is older"):
            await engine.publish(BUNDLE, 1)
        with pytest.raises(PublishFailure, match="canary"):
            await engine.publish(BUNDLE, 3, Canary((1, 2), (0.1,)))
        with pytest.raises(PublishFailure, match="canary"):
            await engine.publish(BUNDLE, 3, Canary((1, 2), (float("nan"),)))
        await engine.begin_incarnation(1)
        await engine.publish(BUNDLE, 1)
        return engine.version, engine.published

    assert asyncio.run(run()) == (1, [2, 1])


def test_prefix_counters_are_salted_by_version():
    async def run():
        engine = ScriptedEngine(block=4, vocabulary=50)
        first = await complete(engine, request(tokens=range(10), budget=6))
        history = [*range(10), *first.token_ids.tolist(), 1, 2]
        again = await complete(engine, request(tokens=history, budget=1))
        assert again.cached_tokens == 12  # whole blocks of the 15 tokens whose KV was computed
        assert (await engine.snapshot()).reprefill_tokens == 0
        await engine.publish(BUNDLE, 1)
        new = await complete(engine, request(tokens=history, budget=1))
        assert new.cached_tokens == 0
        await complete(engine, request(tokens=history, budget=1, session="other"))
        return await engine.snapshot()

    snapshot = asyncio.run(run())
    assert snapshot.reprefill_tokens == 16  # the other session lost nothing, it was never here
    assert snapshot.prefix_queries == 10 + 3 * 18 and snapshot.prefix_hits == 12 + 16


def test_faults_deaths_and_cancellation_free_the_request():
    async def run():
        def fault(request, tokens):
            if tokens == 3:
                raise EngineFailure("boom")

        with pytest.raises(EngineFailure, match="boom"):
            await complete(ScriptedEngine(fault=fault), request())
        engine = ScriptedEngine(tick=1)
        dying = asyncio.create_task(complete(engine, request(budget=1000)))
        leaving = asyncio.create_task(complete(engine, request(budget=1000)))
        await asyncio.sleep(0)
        leaving.cancel()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert (await engine.snapshot()).running == 1
        engine.kill()
        with pytest.raises(GenerationLost) as lost:
            await dying
        assert lost.value.tokens > 0
        with pytest.raises(EngineFailure):
            await engine.snapshot()

    asyncio.run(run())


def test_a_policy_may_sample():
    async def run():
        return await complete(ScriptedEngine(policy=lambda ids: (len(ids), -float(len(ids)))), request(budget=3))

    generation = asyncio.run(run())
    assert generation.token_ids.tolist() == [3, 4, 5] and generation.logprobs.tolist() == [-3, -4, -5]


def test_draining_gives_back_what_runs_and_what_waits():
    async def run():
        engine = ScriptedEngine(tick=1, publish_s=0.001)
        running = asyncio.create_task(complete(engine, request(budget=2000)))
        await asyncio.sleep(0)
        publication = asyncio.create_task(engine.publish(BUNDLE, 1))
        await asyncio.sleep(0)
        waiting = asyncio.create_task(complete(engine, request()))
        await asyncio.sleep(0)
        count = await engine.drain()
        held = asyncio.create_task(complete(engine, request(budget=3)))
        results = await running, await waiting
        await publication
        assert not held.done()
        await engine.wake()
        return count, results, await held

    count, (running, waiting), held = asyncio.run(run())
    assert count == 2 and running.finish == waiting.finish == "drained"
    assert 0 < len(running.token_ids) < 2000 and len(waiting.token_ids) == 0 and len(held.token_ids) == 3


def test_a_request_whose_time_is_up_ends_with_what_it_has():
    now = 0.0

    async def sleep(seconds):
        nonlocal now
        now += seconds

    async def run():
        engine = ScriptedEngine(token_s=lambda request: 1.0, sleep=sleep, clock=lambda: now)
        return await complete(engine, request(budget=50, time_limit_s=5.5)), (await engine.snapshot()).aborted_requests

    generation, aborted = asyncio.run(run())
    assert generation.finish == "time" and len(generation.token_ids) == 5 and aborted == 0
