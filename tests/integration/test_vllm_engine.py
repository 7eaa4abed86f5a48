"""The real engine against Hugging Face on the same tokens, and what publications do to requests in flight."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
import torch

from sao.errors import PublishFailure
from sao.inference.failures import GenerationLost, RequestRefused
from sao.inference.pool import EnginePool, LocalHandle
from sao.inference.protocol import Canary
from sao.weights.bundle import WeightBundle
from sao.weights.torch_bundle import pack
from tests.integration.tiny import CONTEXT, log_softmax, reference

pytestmark = pytest.mark.integration

MEAN, MAXIMUM = 2e-5, 5e-4


def assert_matches(model, pairs, temperature=1.0):
    gaps = np.concatenate([np.abs(g.logprobs - reference(model, r.token_ids, g.token_ids, temperature)) for r, g in pairs])
    assert gaps.mean() <= MEAN and gaps.max() <= MAXIMUM, f"mean {gaps.mean():.2e}, max {gaps.max():.2e}"


async def ask_all(served, requests):
    return list(zip(requests, await asyncio.gather(*(served.ask(r) for r in requests)), strict=True))


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_of_the_sampled_distribution(served, temperature):
    pairs = asyncio.run(ask_all(served, [served.request(temperature=temperature, max_tokens=60) for _ in range(12)]))
    assert_matches(served.model, pairs, temperature)
    assert all(g.finish == "length" and len(g.token_ids) == 60 and g.prompt_tokens == 20 for _, g in pairs)
    assert len({tuple(g.token_ids.tolist()) for _, g in pairs}) == 12


def test_greedy_takes_the_likeliest_token_and_reports_its_raw_logprob(served):
    pairs = asyncio.run(ask_all(served, [served.request(temperature=0.0), served.request(temperature=1.0), served.request(temperature=0.0)]))
    for request, generation in pairs[::2]:
        whole = np.concatenate([request.token_ids, generation.token_ids])
        assert log_softmax(served.model, whole)[len(request.token_ids) - 1 : -1].argmax(-1).tolist() == generation.token_ids.tolist()
    assert_matches(served.model, pairs)


def test_a_seed_repeats_the_draw_in_any_batch(served):
    async def run():
        prompt = served.prompt()
        alone = await served.ask(served.request(prompt, seed=11))
        crowd = await asyncio.gather(*(served.ask(served.request(prompt, seed=seed)) for seed in (11, 12, None)))
        return alone.token_ids.tolist(), [g.token_ids.tolist() for g in crowd]

    alone, (same, other, free) = asyncio.run(run())
    assert alone == same and len({tuple(alone), tuple(other), tuple(free)}) == 3


def test_a_stop_id_is_a_sampled_token_and_eos_of_the_model_is_not_one(served):
    async def run():
        prompt = served.prompt()
        free = await served.ask(served.request(prompt, temperature=0.0, max_tokens=40))
        stop = int(free.token_ids[5])
        return free, stop, await served.ask(served.request(prompt, temperature=0.0, max_tokens=40, stop=(stop,)))

    free, stop, stopped = asyncio.run(run())
    end = free.token_ids.tolist().index(stop) + 1
    assert stopped.finish == "stop" and stopped.token_ids.tolist() == free.token_ids[:end].tolist()
    assert np.isfinite(stopped.logprobs).all() and len(free.token_ids) == 40


def test_what_cannot_be_served_is_refused_with_its_numbers(served):
    async def run():
        version = (await served.engine.snapshot()).version
        for request, words in (
            (served.request(max_tokens=0), "budget is 0"),
            (served.request(np.full(CONTEXT, 5)), f"{CONTEXT} tokens, the context holds {CONTEXT}"),
            (served.request(np.zeros(0)), "the prompt has 0 tokens"),
            (served.request([5, 256]), "vocabulary of 256"),
            (served.request(temperature=0.001), "temperature 0.001"),
            (served.request(pinned=version + 1), f"pinned to version {version + 1}"),
        ):
            with pytest.raises(RequestRefused, match=words):
                await served.ask(request)
        full = await served.ask(served.request(np.full(CONTEXT - 3, 5), max_tokens=50))
        pinned = await served.ask(served.request(pinned=version))
        return full, pinned, version

    full, pinned, version = asyncio.run(run())
    assert full.finish == "length" and len(full.token_ids) == 3
    assert set(pinned.versions.tolist()) == {version}


@pytest.mark.parametrize("kind", ["served", "served_untied"])
def test_a_publication_aborts_nobody_and_marks_the_switch(kind, request):
    served = request.getfixturevalue(kind)
    old, new = served.model, served.other_model(101)

    async def run():
        before = await served.engine.snapshot()
        asks = [served.request(max_tokens=220, stream=i % 4 == 0) for i in range(16)]

        async def stream(ask):
            chunks = [chunk async for chunk in served.engine.generate(ask)]
            return replace(
                chunks[-1], **{field: np.concatenate([getattr(c, field) for c in chunks]) for field in ("token_ids", "logprobs", "versions")}
            )

        tasks = [asyncio.create_task(stream(ask) if ask.stream else served.ask(ask)) for ask in asks]
        await served.until(lambda s: s.running == 16 and s.generated_tokens > before.generated_tokens + 160)
        publication = asyncio.create_task(served.publish(new))
        await asyncio.sleep(0)
        late_ask = served.request()
        late = asyncio.create_task(served.ask(late_ask))
        report = await publication
        pairs = list(zip(asks, await asyncio.gather(*tasks), strict=True))
        after = await ask_all(served, [served.request() for _ in range(4)])
        return before, report, pairs, [(late_ask, await late), *after], await served.engine.snapshot()

    before, report, pairs, after, snapshot = asyncio.run(run())
    first, second = before.version, before.version + 1
    assert report.in_flight == 16 and report.version == snapshot.version == second
    assert snapshot.aborted_requests == before.aborted_requests and snapshot.publish_stall_s > before.publish_stall_s
    assert report.canary_gap <= MAXIMUM and report.tensors > 10 and report.transfer_s > 0
    for ask, generation in pairs:
        switch = int((generation.versions == first).sum())
        assert 0 < switch < 220 and generation.versions.tolist() == [first] * switch + [second] * (220 - switch)
        head = generation.token_ids[:switch]
        gap = np.abs(generation.logprobs[:switch] - reference(old, ask.token_ids, head))
        assert gap.max() <= MAXIMUM
        rest = reference(new, np.concatenate([ask.token_ids, head]), generation.token_ids[switch:])
        gap = np.abs(generation.logprobs[switch:] - rest).max()
        if kind == "served_untied":
            assert gap <= MAXIMUM, "recomputed KV must give the new weights' log-probs"
        else:
            assert gap > 0.05, "kept KV is the old weights', so the log-probs are of neither model alone"
    assert_matches(new, after)
    assert all(set(g.versions.tolist()) == {second} for _, g in after)


def test_versions_only_grow_and_the_same_one_is_a_no_op(served):
    async def run():
        report = await served.publish(served.other_model(102))
        bundle = pack(served.other_model(103).named_parameters())
        again = await served.engine.publish(bundle, report.version)
        with pytest.raises(PublishFailure, match="older"):
            await served.engine.publish(bundle, report.version - 1)
        return again, await ask_all(served, [served.request()])

    again, pairs = asyncio.run(run())
    assert again.tensors == 0
    assert_matches(served.model, pairs)


def test_a_bundle_that_does_not_fit_is_refused_before_anything_changes(served):
    bundle = pack(served.other_model(104).named_parameters())
    renamed = WeightBundle(tuple(s._replace(name=s.name.replace("layers.1.mlp.up", "layers.1.mlp.upp")) for s in bundle.specs), bundle.buffer)
    missing = WeightBundle(tuple(s for s in bundle.specs if "layers.0.self_attn.k_proj" not in s.name), bundle.buffer)
    reshaped = WeightBundle(tuple(s._replace(shape=s.shape[::-1]) if "down_proj" in s.name else s for s in bundle.specs), bundle.buffer)

    async def run():
        version = (await served.engine.snapshot()).version
        for wrong, words in (
            (renamed, r"model\.layers\.1\.mlp\.upp_proj\.weight.*model\.layers\.1\.mlp\.up_proj\.weight"),
            (missing, r"nothing for the engine's model\.layers\.0\.self_attn\.k_proj\.weight"),
            (reshaped, r"model\.layers\.0\.mlp\.down_proj\.weight has shape \[256, 96\], the engine's model has \[96, 256\]"),
        ):
            with pytest.raises(PublishFailure, match=words):
                await served.engine.publish(wrong, version + 1)
        return version, (await served.engine.snapshot()).version, await ask_all(served, [served.request()])

    before, after, pairs = asyncio.run(run())
    assert before == after
    assert_matches(served.model, pairs)


def test_a_canary_that_differs_stops_the_engine_until_it_is_confirmed(served):
    model = served.other_model(105)
    told = served.canary(served.other_model(106))

    async def run():
        version = (await served.engine.snapshot()).version
        running = asyncio.create_task(served.ask(served.request(max_tokens=900)))
        await served.until(lambda s: s.running == 1)
        with pytest.raises(PublishFailure, match="canary"):
            await served.engine.publish(pack(model.named_parameters()), version + 1, told)
        with pytest.raises(GenerationLost, match="unconfirmed") as lost:
            await running
        with pytest.raises(Exception, match="unconfirmed"):
            await served.ask(served.request())
        nan = Canary(told.token_ids, (float("nan"),) * len(told.logprobs))
        with pytest.raises(PublishFailure, match="canary"):
            await served.engine.publish(pack(model.named_parameters()), version + 1, nan)
        assert (await served.engine.snapshot()).version == version
        report = await served.publish(model)
        return lost.value.tokens, version, report, await ask_all(served, [served.request()])

    tokens, version, report, pairs = asyncio.run(run())
    assert tokens > 0 and report.version == version + 1 and report.canary_gap <= MAXIMUM
    assert_matches(model, pairs)


def test_the_prefix_cache_never_serves_kv_of_older_weights(served):
    prompt = served.prompt(300)

    async def run():
        start = await served.engine.snapshot()
        first = await served.ask(served.request(prompt, session="turns"))
        history = np.concatenate([prompt, first.token_ids, served.prompt(5)])
        second_ask = served.request(history, session="turns")
        second = await served.ask(second_ask)
        middle = await served.engine.snapshot()
        await served.publish(served.other_model(107))
        third_ask = served.request(history, session="turns")
        third = await served.ask(third_ask)
        fourth_ask = served.request(history, session="turns")
        fourth = await served.ask(fourth_ask)
        return start, middle, await served.engine.snapshot(), (first, second, third, fourth), (third_ask, fourth_ask)

    start, middle, end, answers, asks = asyncio.run(run())
    assert [g.cached_tokens for g in answers] == [0, 256, 0, 256]
    assert middle.prefix_hits - start.prefix_hits == 256 and middle.reprefill_tokens == start.reprefill_tokens
    assert end.reprefill_tokens - middle.reprefill_tokens == 256
    assert_matches(served.model, list(zip(asks, answers[2:], strict=True)))


def test_a_drained_turn_continues_within_its_budget(served):
    async def run():
        pool = EnginePool([LocalHandle(served.engine, "e0")])
        asks = [served.request(temperature=0.0, max_tokens=400, session=f"drain{i}") for i in range(3)]
        calm = await asyncio.gather(*(pool.generate(ask) for ask in asks))
        before = await served.engine.snapshot()
        tasks = [asyncio.create_task(pool.generate(ask)) for ask in asks]
        given_back = []
        for share in (1, 2):
            await served.until(lambda s, share=share: s.running == 3 and s.generated_tokens > before.generated_tokens + 250 * share)
            given_back.append(await pool.drain("e0"))
            assert (await served.engine.snapshot()).running == 0
            await pool.wake("e0")
        return calm, await asyncio.gather(*tasks), given_back, pool.counters.continued

    calm, turns, given_back, continued = asyncio.run(run())
    assert given_back == [3, 3] and continued == 6
    for one, other in zip(calm, turns, strict=True):
        assert one.token_ids.tolist() == other.token_ids.tolist() and other.finish == "length"
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=MAXIMUM)


def test_closing_the_gate_lets_running_requests_end_and_holds_new_ones(served):
    async def run():
        running = asyncio.create_task(served.ask(served.request(max_tokens=100)))
        await served.until(lambda s: s.running == 1)
        closing = asyncio.create_task(served.engine.drain(export=False))
        await asyncio.sleep(0)
        held = asyncio.create_task(served.ask(served.request()))
        assert await closing == 0
        assert len((await running).token_ids) == 100 and not held.done()
        await served.engine.wake()
        return await held

    assert asyncio.run(run()).finish == "length"


def test_a_request_ends_on_time_with_what_it_sampled_wherever_it_is(served):
    async def run():
        ask = served.request(temperature=0.0, max_tokens=900, session="calm")
        calm = asyncio.create_task(served.ask(ask))
        before = await served.engine.snapshot()
        late = await served.ask(replace(ask, session="late", time_limit_s=0.3))
        whole = await calm
        after = await served.engine.snapshot()
        await served.engine.drain(export=False)  # the gate is closed: what comes now waits there
        held = await served.ask(replace(ask, session="held", time_limit_s=0.2))
        await served.engine.wake()
        return late, whole, held, after.aborted_requests - before.aborted_requests, after.running

    late, whole, held, aborted, running = asyncio.run(run())
    assert late.finish == held.finish == "time" and whole.finish == "length" and (aborted, running) == (0, 0)
    count = len(late.token_ids)
    assert 0 < count < 900 and late.token_ids.tolist() == whole.token_ids[:count].tolist()
    np.testing.assert_allclose(late.logprobs, whole.logprobs[:count], atol=MAXIMUM)
    assert (late.versions == whole.versions[0]).all() and len(held.token_ids) == 0


def test_cancelling_a_request_frees_it(served):
    async def run():
        before = await served.engine.snapshot()
        tasks = [asyncio.create_task(served.ask(served.request(max_tokens=900))) for _ in range(70)]
        await served.until(lambda s: s.running == 64 and s.waiting == 6)
        for task in tasks:
            task.cancel()
        after = await served.until(lambda s: s.running == 0 and s.waiting == 0)
        assert (await served.ask(served.request())).finish == "length"
        return before, after

    before, after = asyncio.run(run())
    assert after.aborted_requests - before.aborted_requests == 64


def test_scoring_agrees_and_is_not_counted_as_generation(served):
    ids = served.prompt(200)

    async def run():
        before = await served.engine.snapshot()
        return await served.engine.score(ids.tolist()), before, await served.engine.snapshot()

    scores, before, after = asyncio.run(run())
    assert np.abs(scores - reference(served.model, ids[:1], ids[1:])).max() <= MAXIMUM
    assert (after.generated_tokens, after.prompt_tokens) == (before.generated_tokens, before.prompt_tokens)


def test_counters_add_up(served):
    async def run():
        before = await served.engine.snapshot()
        pairs = await ask_all(served, [served.request() for _ in range(5)])
        return before, pairs, await served.engine.snapshot()

    before, pairs, after = asyncio.run(run())
    assert after.generated_tokens - before.generated_tokens == sum(len(g.token_ids) for _, g in pairs)
    assert after.prompt_tokens - before.prompt_tokens == sum(len(r.token_ids) for r, _ in pairs)
    assert before.busy_s < after.busy_s < after.uptime_s and after.running == 0


def test_sampled_speculation_keeps_the_distribution(served_speculative):
    """Second and third token after a prompt that makes n-gram drafts certain, against exact marginals. Without the plugin's repair the
    second and third are far off while the first, which is not speculative, is right."""
    served, samples, temperature = served_speculative, 1536, 0.7
    everything = np.arange(32, dtype=np.int32)
    prompt = np.concatenate([served.prompt(8) % 32, everything, everything])

    async def run():
        asks = [served.request(prompt, temperature=temperature, max_tokens=4) for _ in range(samples)]
        return await ask_all(served, asks)

    pairs = asyncio.run(run())
    drafted, accepted = served.engine.drafts()
    assert drafted > samples and accepted > 0

    first = log_softmax(served.model, prompt, temperature)[-1].exp()
    after_one = np.concatenate([np.tile(prompt, (32, 1)), everything[:, None]], 1)
    second_given = log_softmax(served.model, after_one, temperature)[:, -1].exp()
    after_two = np.concatenate([np.repeat(after_one, 32, 0), np.tile(everything, 32)[:, None]], 1)
    third_given = log_softmax(served.model, after_two, temperature)[:, -1].exp().view(32, 32, 32)
    second = first @ second_given
    third = torch.einsum("a,ab,abc->c", first, second_given, third_given)
    tokens = np.stack([g.token_ids for _, g in pairs])
    observed = np.stack([np.bincount(tokens[:, position], minlength=32) / samples for position in range(3)])
    distances = 0.5 * np.abs(observed - torch.stack([first, second, third]).numpy()).sum(-1)
    assert (distances < 0.1).all(), f"total variation {distances.round(3).tolist()}"
    assert_matches(served.model, pairs[:64], temperature)


def test_a_roll_back_goes_back_in_version_under_another_salt(served):
    prompt = served.prompt(200)

    async def run():
        version = (await served.publish(served.other_model(108))).version
        await served.ask(served.request(prompt))
        await served.engine.sleep()
        await served.engine.wake()
        await served.ask(served.request(prompt))
        await served.engine.begin_incarnation(1)
        model = served.other_model(109)
        await served.engine.publish(pack(model.named_parameters()), version - 1, served.canary(model))
        await served.engine.publish(pack(model.named_parameters()), version, served.canary(model))
        served.model = model
        pairs = await ask_all(served, [served.request(prompt)])
        return version, (await served.engine.snapshot()).version, pairs

    before, after, pairs = asyncio.run(run())
    assert before == after and pairs[0][1].cached_tokens == 0
    assert_matches(served.model, pairs)
