"""Two ranks over gloo give what one rank gives: sums of gradients, counts, whitening, with an uneven and with an empty share."""

import multiprocessing
from typing import Any

import pytest
import torch
import torch.distributed as dist

from sao.algorithms.advantages import whiten
from sao.algorithms.off_policy import ratio_metrics
from sao.algorithms.value_loss import explained_variance
from sao.learner.batching import make_batch, pack
from sao.learner.critic import Critic, CriticBatch
from sao.learner.optimizer import world_group
from sao.learner.policy import Policy, PolicyBatch
from tests.unit.learner.learner_builders import batch, causal_model, config, critic_model


def outcome(share: list[int]) -> dict[str, Any]:
    """Gradients of policy and critic, and batch statistics, from this rank's samples."""
    made = make_batch(batch(5, seed=3))
    advantages = torch.linspace(-1, 2, made.action_tokens, dtype=torch.float64)
    mine = torch.cat([torch.zeros(0, dtype=torch.long), *(pack([made.samples[i]]).slots for i in share)])
    settings = config()
    policy = Policy(causal_model(), settings.algo, settings.optim.policy, total_steps=2)
    critic = Critic(critic_model(), settings.optim.critic, total_steps=2)
    for index in share:
        packed = pack([made.samples[index]])
        everything = torch.ones(len(packed.slots), dtype=torch.bool)
        policy.accumulate(PolicyBatch(packed, made.behaviour[packed.slots].double(), advantages[packed.slots], everything))
        critic.accumulate(CriticBatch(packed, advantages[packed.slots], everything))
    result: dict[str, Any] = {}
    for name, part in (("policy", policy), ("critic", critic)):
        part.reduce()
        result[name] = [p.grad.reshape(-1).tolist() for p in part.gradients.parameters]
        result[f"{name}_metrics"] = dict(part.apply())
        result[f"{name}_weights"] = float(sum(p.detach().abs().sum() for p in part.gradients.parameters))
    group = world_group()
    everything = torch.ones(len(mine), dtype=torch.bool)
    nothing = torch.zeros(len(mine), dtype=torch.bool)
    result["whitened"] = dict(zip(mine.tolist(), whiten(advantages[mine], everything, group=group).tolist(), strict=True))
    result["explained"] = explained_variance(advantages[mine] * 0.5, advantages[mine], everything, group=group)
    result["ratios"] = ratio_metrics(advantages[mine], everything, nothing, advantages[mine] > 1, made.versions[mine], group=group)
    return result


def worker(rank: int, shares: list[list[int]], path: str, queue: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    queue.put((rank, [outcome(share) for share in (shares[rank], [0, 1, 2, 3, 4] if rank == 0 else [])]))
    dist.destroy_process_group()


@pytest.mark.integration
def test_two_ranks_equal_one(tmp_path):
    """C66, C67."""
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    processes = [context.Process(target=worker, args=(r, [[0, 2, 3], [1, 4]], str(tmp_path / "store"), queue)) for r in range(2)]
    for process in processes:
        process.start()
    alone = outcome([0, 1, 2, 3, 4])
    ranks = dict(queue.get(timeout=300) for _ in processes)
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    for case in range(2):
        for rank in range(2):
            got = ranks[rank][case]
            for name in ("policy", "critic"):
                for a, b in zip(alone[name], got[name], strict=True):
                    torch.testing.assert_close(torch.tensor(a), torch.tensor(b), atol=1e-9, rtol=0)
                assert got[f"{name}_weights"] == pytest.approx(alone[f"{name}_weights"], abs=1e-9)
                assert got[f"{name}_metrics"] == pytest.approx(alone[f"{name}_metrics"], abs=1e-9)
            assert got["explained"] == pytest.approx(alone["explained"])
            assert got["ratios"] == pytest.approx(alone["ratios"])
        assert ranks[0][case]["whitened"] | ranks[1][case]["whitened"] == pytest.approx(alone["whitened"])
