"""A whole learner step on two gloo ranks gives what one process gives, for algorithms with and without a critic, and with a rank that has nothing."""

import multiprocessing
from typing import Any

import pytest
import torch
import torch.distributed as dist

from sao.learner.learner import TorchLearner
from sao.trajectory import FinishReason
from tests.unit.learner.learner_builders import exact, save_model
from tests.unit.learner.test_algorithms import episodes, settings

ALGORITHMS = ["sao", "icepop", "vapo", "grpo", "running_mean", "batch_mean"]
SHARES = {"uneven": ([0, 1, 2, 4], [3, 5]), "one rank has nothing": ([], [0, 1, 2, 3, 4, 5]), "one rank's are all dropped": ([0, 1], [2, 3, 4, 5])}


def two_steps(name: str, path: str, share: list[int]) -> dict[str, Any]:
    """Policy and critic after two steps on this rank's share of each batch; episodes 0 and 1 were cut off and are left out of every loss."""
    made = settings(name, model__dtype="float64", algo__truncation="drop", learner__tokens_per_micro_batch=30)
    learner = TorchLearner(made, path, total_steps=8)
    for model in (learner.policy.model, learner.critic and learner.critic.model, learner._ring and learner._ring._scratch):
        if model is not None:
            exact(model)
    for step in range(2):
        batch = episodes(step)
        cut = [type(t)(**{**t.__dict__, "finish": FinishReason.truncated("tokens")}) if i < 2 else t for i, t in enumerate(batch)]
        report = learner.step([cut[i] for i in share], step)
    models = [learner.policy.model, *([learner.critic.model] if learner.critic else [])]
    shared = (
        "actor/pg_loss",
        "actor/grad_norm",
        "critic/vf_loss",
        "critic/vf_explained_var",
        "sao/ess",
        "off_policy/kl",
        "actor/zero_advantage_frac",
    )
    return {
        "weights": torch.cat([p.detach().reshape(-1) for model in models for p in model.parameters()]).tolist(),
        "metrics": {key: report.metrics[key] for key in shared if key in report.metrics},
        "state": learner.baseline.state if learner.baseline else None,
    }


def worker(rank: int, path: str, store: str, queue: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    queue.put((rank, {(name, case): two_steps(name, path, shares[rank]) for name in ALGORITHMS for case, shares in SHARES.items()}))
    dist.destroy_process_group()


@pytest.mark.integration
def test_two_ranks_take_the_step_of_one(tmp_path):
    path = save_model(tmp_path / "model")
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    processes = [context.Process(target=worker, args=(rank, path, str(tmp_path / "store"), queue)) for rank in range(2)]
    for process in processes:
        process.start()
    alone = {name: two_steps(name, path, list(range(6))) for name in ALGORITHMS}
    ranks = dict(queue.get(timeout=400) for _ in processes)
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    for rank in range(2):
        for (name, case), got in ranks[rank].items():
            expected = alone[name]
            torch.testing.assert_close(torch.tensor(got["weights"]), torch.tensor(expected["weights"]), atol=1e-7, rtol=0, msg=f"{name}, {case}")
            assert got["metrics"] == pytest.approx(expected["metrics"], abs=1e-7), (name, case)
            assert got["state"] == expected["state"], (name, case)
