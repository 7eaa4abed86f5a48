import json
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sao.errors import DataError, UserError
from sao.swe.predictions import KINDS, read_predictions

KNOWN = {"a", "b", "c"}


def line(name: str, patch: object = "diff", **more: object) -> str:
    return json.dumps({"instance_id": name, "model_name_or_path": "m", "model_patch": patch, **more})


def written(folder: Path, *lines: str) -> Path:
    path = folder / "predictions.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return path


def test_every_bad_line_is_named_and_the_rest_is_evaluated(tmp_path: Path):
    rows = [line("a"), "", line("a", "other"), line("z"), "{", "[]", "{}", line("b", None), line("c", 3), '{"instance_id": "c"}', line("c", "")]
    found = read_predictions(written(tmp_path, *rows), KNOWN)
    assert [(b.line, b.kind) for b in found.bad] == [
        (2, "blank"),
        (3, "duplicate"),
        (4, "unknown_id"),
        (5, "not_json"),
        (6, "not_an_object"),
        (7, "missing_field"),
        (9, "wrong_type"),
        (10, "missing_field"),
    ]
    assert [(p.instance_id, p.model_patch) for p in found.good] == [("a", "diff"), ("b", ""), ("c", "")]
    assert found.lines == len(found.good) + len(found.bad) == 11
    assert found.unanswered == ()
    assert "line 1" in found.bad[1].text


def test_a_patch_keeps_its_bytes(tmp_path: Path):
    patch = "--- a/m\n+++ b/m\n@@ -1 +1 @@\n-a\r\n+b\r\n \n\n"
    (found,) = read_predictions(written(tmp_path, line("a", patch)), KNOWN).good
    assert found.model_patch == patch and json.loads(found.line())["model_patch"] == patch


@pytest.mark.parametrize("document", [[json.loads(line("a"))], {"a": json.loads(line("a"))}])
def test_a_json_document_is_read_as_well(tmp_path: Path, document: object):
    path = tmp_path / "predictions.json"
    path.write_text(json.dumps(document))
    assert [p.instance_id for p in read_predictions(path, KNOWN).good] == ["a"]


def test_a_file_that_is_no_file_of_predictions_is_refused(tmp_path: Path):
    with pytest.raises(UserError, match="cannot be read"):
        read_predictions(tmp_path / "none.jsonl", KNOWN)
    path = tmp_path / "predictions.json"
    path.write_text("3")
    with pytest.raises(DataError, match="neither a list nor a mapping"):
        read_predictions(path, KNOWN)


@given(st.lists(st.one_of(st.just(""), st.text(max_size=12), st.sampled_from(["a", "b", "z"]).map(line))))
def test_the_counts_add_up_whatever_the_file_holds(lines: list[str]):
    with tempfile.NamedTemporaryFile(suffix=".jsonl") as file:
        file.write("".join(text.replace("\n", " ") + "\n" for text in lines).encode())
        file.flush()
        found = read_predictions(Path(file.name), KNOWN)
    assert found.lines == len(lines) == len(found.good) + len(found.bad)
    assert {b.kind for b in found.bad} <= set(KINDS)
    assert len({p.instance_id for p in found.good}) == len(found.good)
