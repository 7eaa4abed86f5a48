"""The ledger closes after any history of moves, and refuses moves that cannot happen."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from sao.ledger import Ledger, LedgerError
from sao.trajectory import EpisodeId
from tests.fakes import make_trajectory


class Histories(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger()
        self.next = 0

    def ids(self, state: str) -> list[EpisodeId]:
        return [entry.episode_id for entry in self.ledger.entries.values() if entry.state == state]

    @rule(workload=st.sampled_from(["a", "b"]))
    def submit(self, workload: str) -> None:
        self.ledger.submit(EpisodeId(self.next), f"task-{self.next % 3}", "env", workload, version=self.next // 5)
        self.next += 1

    @precondition(lambda self: self.ids("running"))
    @rule(data=st.data(), tokens=st.integers(1, 9))
    def finish(self, data: st.DataObject, tokens: int) -> None:
        episode = data.draw(st.sampled_from(self.ids("running")))
        self.ledger.finish(make_trajectory(episode, versions=(1,) * tokens).meta())

    @precondition(lambda self: self.ids("running"))
    @rule(data=st.data(), tokens=st.integers(0, 9))
    def retry(self, data: st.DataObject, tokens: int) -> None:
        episode = data.draw(st.sampled_from(self.ids("running")))
        assert self.ledger.retry(episode, "engine", tokens, version=2) == (episode.ordinal, episode.attempt + 1)

    @precondition(lambda self: self.ledger.entries)
    @rule(data=st.data(), tokens=st.integers(0, 9))
    def drop(self, data: st.DataObject, tokens: int) -> None:
        episode = data.draw(st.sampled_from([entry.episode_id for entry in self.ledger.entries.values()]))
        self.ledger.drop(episode, "overdue", tokens)

    @precondition(lambda self: len(self.ids("buffered")) >= 2)
    @rule(published=st.booleans())
    def train(self, published: bool) -> None:
        batch = self.ids("buffered")[:2]
        self.ledger.take(batch)
        self.ledger.settle(batch, awaits_publication=True)
        if published:
            self.ledger.published()

    @invariant()
    def closes(self) -> None:
        audit = self.ledger.audit()
        assert audit["closes"], audit
        assert self.ledger.outstanding >= len(self.ledger.entries)


TestHistories = Histories.TestCase


def test_impossible_moves_are_refused():
    ledger = Ledger()
    ledger.submit(EpisodeId(0), "t", "e", "w", 0)
    with pytest.raises(LedgerError):
        ledger.submit(EpisodeId(0), "t", "e", "w", 0)
    with pytest.raises(LedgerError):
        ledger.take([EpisodeId(0)])
    with pytest.raises(LedgerError):
        ledger.drop(EpisodeId(0, 1), "x")
    ledger.drop(EpisodeId(0), "x")
    with pytest.raises(LedgerError):
        ledger.drop(EpisodeId(0), "x")


@given(st.integers(1, 20))
def test_a_lost_entry_is_noticed(count):
    """The guard itself: an entry that vanishes without a reason breaks the account."""
    ledger = Ledger()
    for ordinal in range(count):
        ledger.submit(EpisodeId(ordinal), "t", "e", "w", 0)
    assert ledger.audit()["closes"]
    ledger.entries.pop(0)
    assert not ledger.audit()["closes"]


def test_a_finished_episode_goes_by_the_task_it_was():
    """A batch that is trained again may hold another task than the curriculum draws in its place on a resume."""
    ledger = Ledger()
    ledger.submit(EpisodeId(0), "drawn again", "fake", "default", 0)
    ledger.finish(make_trajectory(0, task="trained").meta())
    assert ledger.entries[0].task_id == "trained"
