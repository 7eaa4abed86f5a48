import asyncio
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sao.errors import EngineFailure, PublishFailure
from sao.inference.failures import RequestRefused
from sao.inference.pool import EnginePool, LocalHandle, complete
from sao.inference.protocol import Canary, GenerateRequest
from sao.inference.router import EngineLoad, StickyLeastLoaded
from sao.inference.scripted import ScriptedEngine
from sao.trajectory import SamplingSpec
from sao.weights.bundle import WeightBundle

BUNDLE = WeightBundle((), np.zeros(0, np.uint8))


def request(name="r", budget=20, tokens=(1, 2, 3), session=None, stop=()):
    return GenerateRequest(name, np.asarray(tokens, np.int32), SamplingSpec(max_tokens=budget, stop=stop), session or name)


def pool_of(*engines, **options):
    return EnginePool([LocalHandle(engine, engine.name) for engine in engines], **options)


def test_a_session_stays_and_a_new_one_goes_where_least_runs():
    router = StickyLeastLoaded()
    loads = [EngineLoad("a", 2, 0), EngineLoad("b", 1, 0)]
    assert router.choose(request("x"), loads) == "b"
    assert router.choose(request("x"), [EngineLoad("a", 0, 0), EngineLoad("b", 9, 0)]) == "b"
    assert router.choose(request("y"), [EngineLoad("b", 1, 0), EngineLoad("a", 1, 0)]) == "a"
    router.forget("b")
    assert router.choose(request("x"), [EngineLoad("a", 0, 0), EngineLoad("b", 9, 0)]) == "a"


def test_a_router_forgets_the_longest_idle_sessions():
    router = StickyLeastLoaded(sessions=2)
    loads = [EngineLoad("a", 0, 0)]
    for name in "xyz":
        router.choose(request(name), loads)
    assert router.choose(request("x"), [EngineLoad("b", 0, 0), EngineLoad("a", 1, 0)]) == "b"


def test_requests_spread_over_engines_and_sessions_stay():
    async def run():
        pool = pool_of(ScriptedEngine("a", tick=1), ScriptedEngine("b", tick=1))
        first = await asyncio.gather(*(pool.generate(request(f"{i}", session=f"s{i}")) for i in range(6)))
        second = await asyncio.gather(*(pool.generate(request(f"{i}", session=f"s{i}", tokens=(4, i))) for i in range(6)))
        return [g.engine for g in first], [g.engine for g in second]

    first, second = asyncio.run(run())
    assert first.count("a") == first.count("b") == 3
    assert first == second


@settings(max_examples=60)
@given(budget=st.integers(1, 60), drains=st.lists(st.integers(1, 12), max_size=6), stop=st.sampled_from([(), (7,)]), engines=st.integers(1, 3))
def test_a_drained_turn_continues_within_its_budget_and_loses_nothing(budget, drains, stop, engines):
    async def run():
        members = [ScriptedEngine(f"e{i}", tick=1, stop_one_in=30) for i in range(engines)]
        pool = pool_of(*members)
        ask = request(budget=budget, stop=stop)
        task = asyncio.create_task(pool.generate(ask))
        for index, ticks in enumerate(drains):
            for _ in range(ticks):
                await asyncio.sleep(0)
            for member in members if index % 2 else members[:1]:
                await pool.drain(member.name)
            for _ in range(3):
                await asyncio.sleep(0)
            for member in members:
                await pool.wake(member.name)
        whole = await complete(ScriptedEngine("reference", stop_one_in=30), ask)
        return await task, whole

    turn, whole = asyncio.run(run())
    assert len(turn.token_ids) <= budget
    assert turn.token_ids.tolist() == whole.token_ids.tolist()
    assert turn.finish == whole.finish and turn.prompt_tokens == 3
    np.testing.assert_array_equal(turn.logprobs, whole.logprobs)


def test_a_failing_engine_leaves_and_its_request_runs_once_more_elsewhere():
    async def run():
        events = []
        dying, sound = ScriptedEngine("a", tick=1), ScriptedEngine("b", tick=1)
        pool = pool_of(dying, sound, on_event=events.append)
        tasks = [asyncio.create_task(pool.generate(request(f"{i}", session=f"s{i}", budget=50))) for i in range(4)]
        for _ in range(6):
            await asyncio.sleep(0)
        dying.kill("kill -9")
        results = await asyncio.gather(*tasks)
        whole = await complete(ScriptedEngine(), request(budget=50))
        return pool, events, results, whole

    pool, events, results, whole = asyncio.run(run())
    assert pool.live == ("b",)
    assert all(g.engine == "b" and g.token_ids.tolist() == whole.token_ids.tolist() for g in results)
    assert [e.kind for e in events].count("left") == 1 and [e.kind for e in events].count("reissued") == 2
    assert pool.counters.reissued == pool.counters.lost_requests == 2
    assert pool.counters.lost_tokens == sum(e.tokens for e in events if e.kind == "lost") > 0


def test_a_request_is_issued_again_only_once():
    async def run():
        def fault(request, tokens):
            raise EngineFailure("broken")

        pool = pool_of(*(ScriptedEngine(name, fault=fault) for name in "abc"))
        with pytest.raises(EngineFailure, match="broken"):
            await pool.generate(request())
        return pool

    pool = asyncio.run(run())
    assert len(pool.live) == 1 and pool.counters.reissued == 1


def test_a_refused_request_costs_no_engine():
    async def run():
        pool = pool_of(ScriptedEngine("a", context=8))
        for bad in (request(budget=0), request(tokens=range(9))):
            with pytest.raises(RequestRefused):
                await pool.generate(bad)
        return pool.live

    assert asyncio.run(run()) == ("a",)


def test_a_hung_engine_times_out_and_leaves():
    async def run():
        async def forever(seconds):
            await asyncio.Event().wait()

        pool = pool_of(ScriptedEngine("a", token_s=lambda r: 1.0, sleep=forever), ScriptedEngine("b"), request_timeout_s=0.05)
        return await pool.generate(request()), pool.live

    generation, live = asyncio.run(run())
    assert generation.engine == "b" and live == ("b",)


def test_without_an_engine_a_request_waits_for_a_replacement_or_fails():
    async def run():
        pool = pool_of(wait_s=0.05)
        with pytest.raises(EngineFailure, match="no engine"):
            await pool.generate(request())
        pool = pool_of(wait_s=5.0)
        task = asyncio.create_task(pool.generate(request()))
        await asyncio.sleep(0)
        await pool.join(LocalHandle(ScriptedEngine("late"), "late"))
        return (await task).engine

    assert asyncio.run(run()) == "late"


def test_publication_reaches_every_live_engine_and_a_failing_one_leaves():
    async def run():
        good, bad = ScriptedEngine("a"), ScriptedEngine("b", canary_gap=lambda canary: 1.0)
        pool = pool_of(good, bad, wait_s=0.05)
        first = await pool.publish(BUNDLE, 1, gather_s=0.5)
        second = await pool.publish(BUNDLE, 2, Canary((1, 2), (-1.0,)))
        live = pool.live
        with pytest.raises(PublishFailure, match="older"):
            await pool.publish(BUNDLE, 1)
        good.kill()
        with pytest.raises(PublishFailure, match="reached no engine"):
            await pool.publish(BUNDLE, 3)
        return first, second, live, pool

    first, second, live, pool = asyncio.run(run())
    assert [(r.engine, r.version, r.gather_s) for r in first] == [("a", 1, 0.5), ("b", 1, 0.5)]
    assert [r.engine for r in second] == ["a"] and live == ("a",) and pool.live == ()


def test_an_engine_rejoins_only_with_current_weights():
    async def run():
        pool = pool_of(ScriptedEngine("a"))
        await pool.publish(BUNDLE, 4)
        fresh = ScriptedEngine("b")
        await pool.join(LocalHandle(fresh, "b"))
        versions = [s.version for s in await pool.snapshots()]
        broken = ScriptedEngine("c", canary_gap=lambda canary: float("nan"))
        await pool.publish(BUNDLE, 5, Canary((1, 2), (-1.0,)))
        with pytest.raises(PublishFailure):
            await pool.join(LocalHandle(broken, "c"))
        resumed = pool_of(version=7)
        with pytest.raises(PublishFailure, match="no weights of version 7"):
            await resumed.join(LocalHandle(ScriptedEngine("d"), "d"))
        return versions, pool.live

    assert asyncio.run(run()) == ([4, 4], ("a", "b"))


def test_an_engine_that_joins_during_a_publication_gets_it_too():
    async def run():
        pool = pool_of(ScriptedEngine("a", publish_s=0.02))
        publication = asyncio.create_task(pool.publish(BUNDLE, 1))
        await asyncio.sleep(0)
        late = ScriptedEngine("b")
        await pool.join(LocalHandle(late, "b"))
        await publication
        return late.version

    assert asyncio.run(run()) == 1


def test_a_new_incarnation_reaches_every_engine_and_one_that_cannot_hear_leaves():
    async def run():
        engines = [ScriptedEngine("a"), ScriptedEngine("b")]
        pool = pool_of(*engines)
        await pool.publish(BUNDLE, 6)
        await pool.begin_incarnation(1)
        await pool.publish(BUNDLE, 7)
        return [(e.incarnation, e.published) for e in engines], pool.version

    assert asyncio.run(run()) == ([(1, [6, 7])] * 2, 7)


def test_a_publication_that_reaches_nobody_is_complete_when_an_engine_joins_with_it():
    async def run():
        dead, fresh = ScriptedEngine("a"), ScriptedEngine("b")
        pool = pool_of(dead, wait_s=5.0)
        dead.kill()
        publication = asyncio.create_task(pool.publish(BUNDLE, 3))
        await asyncio.sleep(0.01)
        waits = not publication.done()
        await pool.join(LocalHandle(fresh, "b"))
        return waits, await publication, fresh.version

    assert asyncio.run(run()) == (True, [], 3)


def test_an_admitted_engine_takes_the_place_of_the_dead_one_of_its_name():
    async def run():
        dead, fresh = ScriptedEngine("a"), ScriptedEngine("a")
        pool = pool_of(dead, wait_s=5.0)
        dead.kill()
        asked = asyncio.create_task(pool.generate(request()))
        await asyncio.sleep(0.01)
        waits = not asked.done()
        pool.admit(LocalHandle(fresh, "a"))
        return waits, len((await asked).token_ids)

    waits, tokens = asyncio.run(run())
    assert waits and tokens > 0


def eval_request(name, pinned):
    return replace(request(name), purpose="eval", pinned_version=pinned)


def test_a_lent_engine_keeps_its_weights_and_serves_evaluation_alone():
    async def run():
        engines = [ScriptedEngine("a", tick=1), ScriptedEngine("b", tick=1)]
        driver, worker = pool_of(*engines), pool_of(*engines)
        await driver.publish(BUNDLE, 1)
        homes = await asyncio.gather(*(worker.generate(request(f"h{i}", session=f"s{i}")) for i in range(2)))
        for pool in (worker, driver):
            await pool.lend("b")
        reports = await driver.publish(BUNDLE, 2)
        training = await asyncio.gather(*(worker.generate(request(f"t{i}", session=f"s{i}")) for i in range(6)))
        evaluated = await asyncio.gather(*(worker.generate(eval_request(f"e{i}", pinned=1)) for i in range(4)))
        lent = [e.version for e in engines]
        for pool in (driver, worker):
            await pool.restore("b")
        back = await asyncio.gather(*(worker.generate(request(f"u{i}")) for i in range(4)))
        after = await driver.publish(BUNDLE, 3)
        return homes, reports, training, evaluated, lent, back, after, [e.version for e in engines]

    homes, reports, training, evaluated, lent, back, after, versions = asyncio.run(run())
    assert {g.engine for g in homes} == {"a", "b"}  # one session has its home on the engine that will be lent
    assert [r.engine for r in reports] == ["a"] and lent == [2, 1]
    assert {g.engine for g in training} == {"a"} and all((g.versions == 2).all() for g in training)
    assert {g.engine for g in evaluated} == {"b"} and all((g.versions == 1).all() for g in evaluated)
    assert {g.engine for g in back} == {"a", "b"} and all((g.versions == 2).all() for g in back)
    assert [r.engine for r in after] == ["a", "b"] and versions == [3, 3]


def test_requests_that_run_on_an_engine_when_it_is_lent_end_there():
    async def run():
        engines = [ScriptedEngine("a", tick=1), ScriptedEngine("b", tick=1)]
        pool = pool_of(*engines)
        tasks = [asyncio.create_task(pool.generate(request(f"{i}", session=f"s{i}"))) for i in range(2)]
        await asyncio.sleep(0)
        await pool.lend("b")
        return {g.engine for g in await asyncio.gather(*tasks)}, pool.counters

    engines, counters = asyncio.run(run())
    assert engines == {"a", "b"} and counters.reissued == counters.continued == 0


def test_a_lent_engine_that_cannot_come_back_leaves():
    async def run():
        events = []
        engines = [ScriptedEngine("a"), ScriptedEngine("b")]
        pool = pool_of(*engines, on_event=events.append)
        await pool.lend("b")
        await pool.publish(BUNDLE, 1)
        engines[1].kill("kill -9")
        await pool.restore("b")
        await pool.restore("b")
        await pool.restore("a")
        await pool.lend("gone")
        assert pool.lent == ()
        return pool.live, [(e.kind, e.engine) for e in events]

    assert asyncio.run(run()) == (("a",), [("left", "b")])


def test_weights_are_tried_on_in_a_lent_engine_and_serve_nobody():
    """Requests that run there are handed back and go on once the publication ends the loan, under weights that serve."""

    async def run():
        engines = [ScriptedEngine("a", tick=1)]
        driver, worker = pool_of(*engines, wait_s=0.01), pool_of(*engines, wait_s=0.01)
        training = asyncio.create_task(worker.generate(request("t", budget=40)))
        await asyncio.sleep(0)
        await driver.lend("a")
        await worker.lend("a")
        await driver.try_on("a", BUNDLE, 1)
        evaluated = await worker.generate(eval_request("e", pinned=1))
        await asyncio.sleep(0.05)
        waits = not training.done()  # longer than wait_s: a lent engine comes back by itself
        await driver.begin_incarnation(1)
        reports = await driver.publish(BUNDLE, 1)
        await worker.restore("a")
        stood = [pool.outage_s() for pool in (driver, worker)]
        await asyncio.sleep(0.02)
        assert stood == [pool.outage_s() for pool in (driver, worker)] and min(stood) >= 0.05  # the clocks of episodes stood, and go on
        return evaluated, waits, reports, await training, driver.lent

    evaluated, waits, reports, trained, lent = asyncio.run(run())
    assert (evaluated.versions == 1).all() and waits
    assert [(r.engine, r.version) for r in reports] == [("a", 1)] and lent == ()
    assert len(trained.token_ids) == 40 and set(trained.versions.tolist()) <= {0, 1}


def test_a_publication_still_passes_an_engine_by_that_is_lent_for_an_evaluation():
    async def run():
        engines = [ScriptedEngine("a"), ScriptedEngine("b")]
        pool = pool_of(*engines)
        await pool.lend("b")
        await pool.lend("a")
        await pool.try_on("a", BUNDLE, 1)
        await pool.publish(BUNDLE, 1)
        return [e.version for e in engines], pool.lent

    assert asyncio.run(run()) == ([1, 0], ("b",))


def test_weights_are_not_tried_on_in_an_engine_that_serves():
    async def run():
        pool = pool_of(ScriptedEngine("a"))
        with pytest.raises(EngineFailure, match="left the pool"):
            await pool.try_on("a", BUNDLE, 1)

    asyncio.run(run())


def test_an_outage_is_counted_for_those_who_have_no_engine():
    async def run():
        pool = pool_of(ScriptedEngine("a"), ScriptedEngine("b"))
        await pool.lend("b")
        pool.remove("a", "killed")
        await asyncio.sleep(0.05)
        during = pool.outage_s("train"), pool.outage_s("eval")
        pool.admit(LocalHandle(ScriptedEngine("a"), "a"))
        after = pool.outage_s("train")
        await asyncio.sleep(0.05)
        return during, after, pool.outage_s("train")

    (train, evaluation), after, later = asyncio.run(run())
    assert train >= 0.05 and evaluation == 0 and train <= after == later


def test_an_engine_that_comes_late_still_has_the_requests_whole_time():
    """Time without an engine is not passed on to the engine as time used."""
    seen = []

    async def run():
        pool = EnginePool([])
        engine = ScriptedEngine("a", fault=lambda request, tokens: seen.append(request.time_limit_s))
        asyncio.get_running_loop().call_later(0.3, lambda: pool.admit(LocalHandle(engine, "a")))
        return await pool.generate(replace(request(), time_limit_s=0.2))

    assert asyncio.run(run()).finish == "length" and 0.1 < seen[0] <= 0.2
