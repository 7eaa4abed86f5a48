"""A learner that is lost and replaced: what the new one is given."""

from __future__ import annotations

import asyncio
from pathlib import Path

from sao.errors import LearnerFailure
from sao.runtime.checkpoints import Checkpoint
from sao.runtime.remote import RemoteLearner, lost


class Method:
    def __init__(self, function):
        self.remote = function


class Actor:
    """Its weights are the list of what made them; a call after its death ends as a lost actor's does."""

    def __init__(self):
        self.dead, self.weights = False, []

    def __getattr__(self, name):
        async def run(*arguments):
            if self.dead:
                raise lost(LearnerFailure, "died")
            if name in ("restore", "go_back"):
                self.weights = [arguments[0]]
            elif name == "step":
                self.weights.append(arguments[0])
            return list(self.weights)

        return Method(run)


class Cluster:
    def __init__(self):
        self.actors = {"learner": Actor()}

    async def replace(self, name, dead, reason):
        self.actors[name] = Actor()

    def forgive(self, name): ...


class Store:
    newest: Checkpoint | None = None

    def checkpoint(self):
        return self.newest

    def handles(self, step):
        return [f"stored {step}"]


def make_learner():
    async def revived(): ...

    return RemoteLearner(Cluster(), Store(), 10.0, revived)


async def train(learner, *steps):
    for step in steps:
        await learner.step(["batch"], step)


async def weights_after_death(learner):
    """Those of the replacement, once it has been asked for something."""
    learner.cluster.actors["learner"].dead = True
    await learner.export("somewhere")
    return learner.cluster.actors["learner"].weights


def test_a_replacement_goes_on_from_the_newest_checkpoint():
    learner = make_learner()

    async def main():
        await train(learner, 0, 1, 2)
        learner.store.newest = Checkpoint(Path("step-2"), 2)
        assert await weights_after_death(learner) == ["step-2", 2]

    asyncio.run(main())


def test_one_that_dies_after_a_roll_back_does_not_train_again_what_was_undone():
    """Until the checkpoint that follows a roll-back is written, the newest one and the stored batches lead to the weights that were refused."""
    learner = make_learner()

    async def main():
        await train(learner, 0, 1, 2, 3)
        learner.store.newest = Checkpoint(Path("step-2"), 2)
        await learner.go_back("good", 4)
        assert await weights_after_death(learner) == ["good"]
        await train(learner, 4)
        assert await weights_after_death(learner) == ["good", 4]
        learner.store.newest = Checkpoint(Path("step-4"), 4)  # the one that follows it
        assert await weights_after_death(learner) == ["step-4", 4]

    asyncio.run(main())
