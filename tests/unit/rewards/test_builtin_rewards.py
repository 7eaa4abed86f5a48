from __future__ import annotations

import pytest

from sao.rewards.builtin import exact_match, last_number


@pytest.mark.parametrize("row", [{"answer": "18"}, {"ground_truth": 18}, {"reward_model": {"style": "rule", "ground_truth": "18"}}])
def test_the_reference_answer_is_found_in_every_convention(row: dict[str, object]) -> None:
    assert exact_match(" 18\n", row) == 1.0
    assert exact_match("The answer is 18", row) == 0.0
    assert last_number("The answer is 18.", row) == 1.0
    with pytest.raises(KeyError):
        exact_match("18", {"prompt": "?"})


@pytest.mark.parametrize(
    ("completion", "answer", "right"),
    [
        ("3 + 4 = 7", "7", True),
        ("so it costs $1,200.00", "1200", True),
        ("#### 18", "9 eggs a day, 9 * 2 = 18\n#### 18", True),
        ("x = -5", "-5", True),
        ("3-5", "5", True),
        ("3 - -5", "-5", True),
        ("0.5", ".50 is 0.50", True),
        ("7 of 8", "7", False),
        ("no idea", "7", False),
        ("", "7", False),
        ("1,2", "2", True),
    ],
)
def test_last_number(completion: str, answer: str, right: bool) -> None:
    assert last_number(completion, {"answer": answer}) == float(right)


def test_a_reference_without_a_number_is_an_error() -> None:
    with pytest.raises(ValueError, match="holds no number"):
        last_number("7", {"answer": "seven"})
