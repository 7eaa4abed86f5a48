"""The stream: its phase is a function of the position alone."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sao.config import Config, EnvConfig, OnlineConfig, PhaseConfig
from sao.envs.rule_stream.environment import RuleStreamEnvironment
from sao.errors import ConfigError
from sao.online.check import check_online
from sao.online.schedule import Schedule, Shift
from sao.online.stream import StreamSource
from sao.tasks.source import build_held_out, build_source

A, B, C = (PhaseConfig(name, start, {"rule": rule}) for name, start, rule in (("a", 0, "first"), ("b", 100, "second"), ("c", 250, "first_reversed")))
TARGET = "sao.envs.rule_stream.environment:RuleStreamEnvironment"


def online(*phases, **settings) -> OnlineConfig:
    return OnlineConfig(phases=list(phases), **settings)


def source(settings=None, seed=0) -> StreamSource:
    return StreamSource(RuleStreamEnvironment, EnvConfig(name="rule_stream", target=TARGET), settings or online(A, B, C), seed=seed)


def test_an_abrupt_drift_changes_at_its_start():
    schedule = Schedule(online(A, B, C), 0)
    assert [schedule.phase(p).name for p in (0, 99, 100, 249, 250, 10**6)] == ["a", "a", "b", "b", "c", "c"]
    assert schedule.shifts(251) == [Shift(100, "a", "b"), Shift(250, "b", "c")] and schedule.shifts(250) == [Shift(100, "a", "b")]


def test_a_gradual_drift_fades_in_over_the_ramp():
    schedule = Schedule(online(A, B, drift="gradual", ramp=100), 3)
    share = [sum(schedule.phase(p).name == "b" for p in range(first, first + 25)) for first in (75, 100, 175, 200)]
    assert share[0] == 0 and share[1] < 10 < share[2] and share[3] == 25
    assert schedule.shifts(1000) == [Shift(100, "a", "b")]


def test_a_recurring_drift_comes_round():
    schedule = Schedule(online(PhaseConfig("a"), PhaseConfig("b"), drift="recurring", period=10), 0)
    assert "".join(schedule.phase(p).name for p in range(0, 50, 5)) == "aabbaabbaa"
    assert schedule.shifts(35) == [Shift(10, "a", "b"), Shift(20, "b", "a"), Shift(30, "a", "b")]


def test_a_name_that_returns_is_one_regime():
    assert [p.name for p in Schedule(online(A, B, PhaseConfig("a", 400, A.args)), 0).regimes] == ["a", "b"]


@settings(max_examples=40)
@given(st.integers(0, 400), st.sampled_from([online(A, B, C), online(A, B, C, drift="gradual", ramp=80)]))
def test_a_stream_that_is_resumed_goes_on_exactly(position, drift):
    straight, resumed = source(drift), source(drift)
    for _ in range(position):
        straight.next()
    resumed.load_state_dict(straight.state_dict())
    assert [straight.next() for _ in range(5)] == [resumed.next() for _ in range(5)]


def test_a_task_carries_its_phase_and_nothing_of_it_shows():
    stream = source()
    tasks = [stream.next() for _ in range(260)]
    assert Counter(task.workload for task in tasks) == {"a": 100, "b": 150, "c": 10}
    assert {(task.workload, task.payload["rule"]) for task in tasks} == {("a", "first"), ("b", "second"), ("c", "first_reversed")}
    assert len({task.task_id for task in tasks}) == 260


def test_held_out_tasks_ask_every_regime_the_same_questions_wherever_the_stream_stands():
    stream = source()
    before = stream.held_out(9)
    for _ in range(300):
        stream.next()
    assert stream.held_out(9) == before and len({task.task_id for task in before}) == 9
    questions = {name: [(t.payload["a"], t.payload["b"]) for t in before if t.workload == name] for name in "abc"}
    assert questions["a"] == questions["b"] == questions["c"] and len(questions["a"]) == 3


def test_a_configuration_with_phases_builds_a_stream():
    config = Config()
    config.env = EnvConfig(name="rule_stream", target=TARGET, args={"rule": "first"})
    config.online = online(A, B, C)
    assert isinstance(build_source(config, [config.env]), StreamSource)
    assert [task.workload for task in build_held_out(config, [config.env], 4)] == ["a", "b", "c", "a"]


def test_a_phase_whose_arguments_the_environment_refuses_is_named():
    with pytest.raises(ConfigError, match=r"phase b.*there is no rule 'secnd', did you mean 'second'"):
        source(online(A, PhaseConfig("b", 100, {"rule": "secnd"})))


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (online(A, B, drift="abrubt"), "did you mean 'abrupt'"),
        (online(A, PhaseConfig("", 100)), r"phases\[1\] has no name"),
        (online(B, C), "first phase must start at 0"),
        (online(A, C, B), "b starts at 100, which is not after c at 250; put the shift points in order"),
        (online(A, B, PhaseConfig("a", 300, {"rule": "second"})), "different args"),
        (online(PhaseConfig("a"), PhaseConfig("b"), drift="recurring"), "needs online.period"),
        (online(PhaseConfig("a"), drift="recurring", period=10), "at least two phases"),
        (online(A, B, drift="recurring", period=10), "leave start out"),
        (online(A, B, period=10), "online.period=10 does nothing with online.drift=abrupt"),
        (online(A, B, drift="gradual"), "needs online.ramp"),
        (online(A, B, C, drift="gradual", ramp=150), "longer than the shortest phase"),
        (online(A, B, ramp=10), "online.ramp=10 does nothing"),
        (online(ramp=10), "online.phases is empty"),
        (online(A, shadow_drop=-0.1), "must not be negative"),
        (online(A, rollback_window=0), "must be above 0"),
        (online(A, rollback_window=64, shadow_drop=0.3), "online.rollback_window=64 does nothing with online.rollback_fall=0"),
        (online(A, shadow_tasks=8), "online.shadow_tasks=8 does nothing with online.shadow_drop=0"),
    ],
)
def test_a_stream_that_contradicts_itself_is_refused(settings, says):
    config = Config()
    config.online = settings
    with pytest.raises(ConfigError, match=says):
        check_online(config)


@pytest.mark.parametrize(
    ("set_up", "says"),
    [
        (lambda c: setattr(c.data, "path", "tasks.jsonl"), "data.path=tasks.jsonl is set beside online.phases"),
        (lambda c: setattr(c.data, "mixture", {"rule_stream": 1.0}), "one environment"),
        (lambda c: setattr(c.run, "phase", "critic"), "run.phase=critic"),
    ],
)
def test_a_stream_beside_what_it_excludes_is_refused(set_up, says):
    config = Config()
    config.online = online(A, B)
    set_up(config)
    with pytest.raises(ConfigError, match=says):
        check_online(config)
