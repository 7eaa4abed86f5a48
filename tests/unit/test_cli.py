"""The command itself: what it prints, and what it does when nobody reads it."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from sao.cli import main, parser
from sao.config_load import leaf_keys


def test_keys_come_with_type_and_default(capsys):
    assert main(["config", "--keys"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(leaf_keys())
    assert any(line.split() == ["train.steps", "int", "100"] for line in lines)
    assert any(re.fullmatch(r"algo\.lambda_policy +float \| None +null", line) for line in lines)
    assert len({re.match(r"\S+ +", line).end() for line in lines}) == 1


def test_a_reader_that_goes_away_ends_the_command_quietly():
    read, write = os.pipe()
    os.close(read)
    try:
        done = subprocess.run([sys.executable, "-m", "sao.cli", "config", "--keys"], stdout=write, stderr=subprocess.PIPE, text=True)
    finally:
        os.close(write)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize(("text", "episode"), [("6674", (6674, None)), ("6674.0", (6674, 0)), ("6674.12", (6674, 12))])
def test_an_episode_is_named_as_the_table_names_it(text, episode):
    assert parser().parse_args(["inspect", "run", text]).episode == episode


@pytest.mark.parametrize("text", ["x", "6674.", ".0", "-1", "1.2.3"])
def test_what_is_no_episode_is_refused(text, capsys):
    with pytest.raises(SystemExit):
        parser().parse_args(["inspect", "run", "--", text])
    assert "is not an episode" in capsys.readouterr().err
