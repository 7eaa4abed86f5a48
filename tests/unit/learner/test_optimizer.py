"""Schedules that never start at 0 (C86), and what a plan is refused for."""

import pytest
import torch

from sao.config import OptimizerConfig
from sao.errors import ConfigError
from sao.learner.optimizer import GradientSums, check_optimizer, learning_rate


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
@pytest.mark.parametrize("warmup", [0, 1, 3])
@pytest.mark.parametrize("total", [4, 5, 100])
def test_schedules(schedule, warmup, total):
    config = OptimizerConfig(lr=1.0, schedule=schedule, warmup_ratio=(warmup + 0.5) / total, final_lr_ratio=0.1)
    check_optimizer(config, total, "optim.policy")
    rates = [learning_rate(config, n, total) for n in range(total + 3)]
    assert rates[0] > 0 and max(rates) <= 1.0
    assert rates[:warmup] == [(n + 1) / warmup for n in range(warmup)]
    assert rates[warmup] == 1.0
    after = rates[warmup:]
    assert after == sorted(after, reverse=True)
    if total - 1 > warmup:
        assert after[-1] == pytest.approx(1.0 if schedule == "constant" else 0.1)


@pytest.mark.parametrize(
    ("changes", "total", "message"),
    [
        ({}, -1, "train.steps"),
        ({}, 0, "train.steps"),
        ({"schedule": "step"}, 5, "schedule"),
        ({"warmup_ratio": 1.0}, 5, "warmup_ratio"),
        ({"warmup_ratio": -0.1}, 5, "warmup_ratio"),
        ({"lr": -1.0}, 5, "lr"),
        ({"lr": float("nan")}, 5, "lr"),
        ({"final_lr_ratio": 2.0}, 5, "final_lr_ratio"),
        ({"betas": [0.9]}, 5, "betas"),
        ({"grad_clip": -1.0}, 5, "grad_clip"),
    ],
)
def test_refusals_name_the_key(changes, total, message):
    with pytest.raises(ConfigError, match=message):
        check_optimizer(OptimizerConfig(**changes), total, "optim.policy")


def test_a_rate_of_zero_is_allowed_when_asked_for():
    check_optimizer(OptimizerConfig(lr=0.0), 5, "optim.policy")


def test_reset_forgets_the_moments_and_keeps_the_schedule():
    layer = torch.nn.Linear(2, 1)
    sums = GradientSums(layer, OptimizerConfig(lr=0.1, schedule="linear"), total_steps=10, key="optim.policy", names=("counted",))
    layer(torch.ones(1, 2)).sum().backward()
    assert sums.apply(1.0)["lr"] == pytest.approx(0.1)
    assert sums.optimizer.state
    sums.reset()
    assert not sums.optimizer.state and sums.steps == 1
    layer(torch.ones(1, 2)).sum().backward()
    assert sums.apply(1.0)["lr"] == pytest.approx(0.09)


def test_only_matrices_decay():
    layer = torch.nn.Linear(2, 1)
    sums = GradientSums(layer, OptimizerConfig(weight_decay=0.5), total_steps=10, key="optim.policy", names=())
    assert [(len(g["params"]), g["weight_decay"]) for g in sums.optimizer.param_groups] == [(1, 0.5), (1, 0.0)]
