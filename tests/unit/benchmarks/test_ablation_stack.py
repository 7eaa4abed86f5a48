"""The stacked model of the ablation is the reference's model, copy by copy, and its optimiser torch's."""

from __future__ import annotations

import copy

import pytest
import torch
from ablation_parts.sampler import rollout, shape_of
from ablation_parts.stack import ATTENTION, AdamW, Stack, as_engines_hold_them, clone, reference, stack
from ablation_parts.tasks import PAD, POLICY, TASKS, Chain, Dial, Lookup, draw

SHAPE = reference.Shape(vocabulary=9, width=16, layers=2, heads=2, feed_forward=24)


@pytest.fixture
def policies():
    made = []
    for seed in range(3):
        torch.manual_seed(seed)
        made.append(reference.Policy(SHAPE))
    return made


def ids(rows: int = 12, tokens: int = 10, seed: int = 0) -> torch.Tensor:
    return torch.randint(1, SHAPE.vocabulary, (rows, tokens), generator=torch.Generator().manual_seed(seed))


def test_logprobs_of_every_copy_are_the_references(policies):
    got = Stack(SHAPE, 16).logprobs(stack(policies), ids())
    want = torch.cat([policy.logprobs(part) for policy, part in zip(policies, ids().chunk(3), strict=True)])
    torch.testing.assert_close(got, want, atol=2e-5, rtol=1e-5)


def test_values_of_every_copy_are_the_references(policies):
    critics = [reference.Critic(policy) for policy in policies]
    for number, critic in enumerate(critics):
        torch.nn.init.normal_(critic.value_head.weight)
        torch.nn.init.constant_(critic.value_head.bias, float(number))
    got = Stack(SHAPE, 16).values(stack(critics), ids())
    want = torch.cat([critic(part) for critic, part in zip(critics, ids().chunk(3), strict=True)])
    torch.testing.assert_close(got, want, atol=2e-5, rtol=1e-5)


def test_a_cache_changes_nothing(policies):
    net, weights = Stack(SHAPE, 16), stack(policies)
    whole = net.logits(weights, ids())
    cache: dict = {}
    parts = [net.logits(weights, ids()[:, :4], cache)] + [net.logits(weights, ids()[:, t : t + 1], cache) for t in range(4, 10)]
    torch.testing.assert_close(torch.cat(parts, 1), whole, atol=2e-5, rtol=1e-5)


def test_steps_of_every_copy_are_torchs_with_its_own_rate_and_clipping(policies):
    rates, clip = (1e-3, 1e-2, 3e-3), 0.5
    weights, net = stack(policies), Stack(SHAPE, 16)
    ours = AdamW(weights, torch.tensor(rates), clip)
    theirs = [reference.adamw(policy, rate) for policy, rate in zip(policies, rates, strict=True)]
    for step in range(5):
        batch = ids(seed=step)
        sizes = torch.tensor([0.01, 3.0, 30.0]).repeat_interleave(4)[:, None]  # copy 0 is never clipped, copy 2 always
        (net.logprobs(weights, batch) * sizes).mean().backward()
        norms = ours.step()
        for number, (policy, optimizer, part) in enumerate(zip(policies, theirs, batch.chunk(3), strict=True)):
            loss = (policy.logprobs(part) * sizes[4 * number]).sum() / (batch.shape[0] * (batch.shape[1] - 1))
            assert reference.descend(optimizer, loss, clip) == pytest.approx(float(norms[number]), rel=1e-4)
    for name, value in stack(policies).items():
        torch.testing.assert_close(weights[name].detach(), value, atol=1e-5, rtol=1e-3)
    assert float(norms[0]) < clip < float(norms[2])


def test_frozen_parts_stay(policies):
    weights = stack(policies)
    before = clone(weights)
    optimizer = AdamW(weights, torch.full((3,), 1e-2), 1.0, ATTENTION)
    Stack(SHAPE, 16).logprobs(weights, ids()).sum().backward()
    optimizer.step()
    assert {name.partition(".")[0] for name in weights if torch.equal(weights[name], before[name])} == set(ATTENTION)


def test_a_copy_without_a_finite_gradient_leaves_the_others_alone(policies):
    weights = stack(policies)
    optimizer = AdamW(weights, torch.full((3,), 1e-2), 1.0)
    factor = torch.tensor([1.0, torch.nan, 1.0]).repeat_interleave(4)[:, None]
    (Stack(SHAPE, 16).logprobs(weights, ids()) * factor).sum().backward()
    norms = optimizer.step()
    assert torch.isfinite(norms).tolist() == [True, False, True]
    assert all(torch.isfinite(value).all() for value in weights.values())


@pytest.mark.parametrize("task", TASKS.values(), ids=list(TASKS))
def test_the_sampler_logs_what_it_sampled_under_and_a_copy_does_not_depend_on_its_neighbours(task):
    models = []
    for seed in (3, 4):
        torch.manual_seed(seed)
        models.append(reference.Policy(shape_of(task)))
    net = Stack(shape_of(task), task.max_tokens)
    payloads = [draw(task, 5, torch.Generator().manual_seed(seed), heldout=False) for seed in (0, 1)]
    weights = as_engines_hold_them(stack(models))
    both = rollout(net, weights, task(torch.cat(payloads)), [torch.Generator().manual_seed(s) for s in (7, 8)])
    alone = rollout(net, {k: v[1:] for k, v in weights.items()}, task(payloads[1]), [torch.Generator().manual_seed(8)])
    width = alone.ids.shape[1]
    assert torch.equal(both.ids[5:, :width], alone.ids) and bool((both.ids[5:, width:] == PAD).all())
    again = net.logprobs(weights, both.ids)
    torch.testing.assert_close(both.behaviour[both.mask], again[both.mask], atol=2e-5, rtol=0)
    assert torch.isnan(both.behaviour[~both.mask]).all() and both.mask.any(1).all()


def test_the_engines_weights_are_rounded(policies):
    weights = stack(policies)
    rounded = as_engines_hold_them(weights)
    gap = float((rounded["embed"] - weights["embed"]).abs().max())
    assert 0 < gap < 0.01 * float(weights["embed"].abs().max()) and torch.equal(as_engines_hold_them(rounded)["embed"], rounded["embed"])


@pytest.mark.parametrize("task", TASKS.values(), ids=list(TASKS))
def test_demonstrations_are_mostly_right_and_masks_mark_moves_of_the_policy(task):
    generator = torch.Generator().manual_seed(0)
    episodes = task(draw(task, 200, generator, heldout=False))
    ids, mask = episodes.demonstrations(generator)
    assert 0.3 < float(episodes.rewards(ids).mean()) < 0.99
    for column in range(episodes.prompt.shape[1] - 1, mask.shape[1]):
        assert torch.equal(mask[:, column], episodes.next(ids[:, : column + 1]) == POLICY), column


@pytest.mark.parametrize("task", [Chain, Dial])
def test_held_out_payloads_are_never_trained_on(task):
    drawn = [draw(task, 400, torch.Generator().manual_seed(0), heldout=flag) for flag in (False, True)]
    trained, kept = ({tuple(row) for row in part.tolist()} for part in drawn)
    assert len(drawn[0]) == len(drawn[1]) == 400 and not trained & kept


def test_chain_rewards_the_last_digit_whatever_came_before():
    task = Chain(torch.tensor([[3, 2, 5, 6, 0, 1, 2]] * 5))  # ((3 + 2) * 5 - 6) mod 7 = 5
    d, stop = Chain.DIGITS, Chain.STOP
    tails = [[d + 5, stop, 0], [d, d + 5, stop], [d + 5, d, stop], [stop, 0, 0], [d + 5, Chain.PLUS, stop]]
    assert task.rewards(torch.cat([task.prompt, torch.tensor(tails)], 1)).tolist() == [1, 1, 0, 0, 1]
    assert task.next(torch.cat([task.prompt, torch.tensor(tails)[:, :2]], 1)).tolist() == [PAD, POLICY, POLICY, PAD, POLICY]


def test_lookup_plays_its_turns():
    table = [3, 0, 0, 6, 0, 0, 0, 0]
    d = Lookup.DIGITS
    task = Lookup(torch.tensor([[0, *table, 1, 1, 1, 0, 1, 0]]))
    ids = [Lookup.QUERY, d]
    for move in (Lookup.ASK, d, *[None] * 5, Lookup.ASK, d + 3, *[None] * 5, Lookup.SAY, d + 6):
        answer = int(task.next(torch.tensor([ids])))
        assert (answer == POLICY) == (move is not None)
        ids.append(answer if move is None else move)
    assert ids[4:9] == [Lookup.OBS, d, d + 3, d + 1, d] and ids[11:16] == [Lookup.OBS, d + 4, d, d + 3, d + 6]
    assert int(task.next(torch.tensor([ids]))) == PAD and task.rewards(torch.tensor([ids])).tolist() == [1.0]
    assert task.rewards(torch.tensor([[*ids[:-1], d]])).tolist() == [0.0]
    assert int(task.next(torch.tensor([[Lookup.QUERY, d, d]]))) == PAD  # neither ASK nor SAY
    early = [Lookup.QUERY, d, Lookup.SAY, d + 6, PAD]
    assert int(task.next(torch.tensor([early]))) == PAD and task.rewards(torch.tensor([early])).tolist() == [1.0]


def test_dial_wants_every_decision_right():
    task = Dial(torch.tensor([[1, 2, 3, 4]]))
    right = torch.cat([task.prompt, task.right()], 1)
    assert task.right()[0, :4].tolist() == [Dial.DIGITS + x for x in (3, 0, 4, 0)]
    wrong = copy.deepcopy(right)
    wrong[0, 9] = Dial.DIGITS + (wrong[0, 9] - Dial.DIGITS + 1) % 6
    assert task.rewards(right).tolist() == [1.0] and task.rewards(wrong).tolist() == [0.0]
