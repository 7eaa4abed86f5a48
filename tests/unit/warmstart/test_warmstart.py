import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from sao.agents.renderer import demonstration_tokens, load_renderer
from sao.config import Config, EnvConfig, ModelConfig, WarmstartConfig
from sao.envs.calculator.environment import SCHEMA, CalculatorEnvironment
from sao.errors import ConfigError, UserError
from sao.learner import tiny
from sao.learner.muon import Muon, orthogonalise
from sao.runtime.models import make_base, prepare
from sao.warmstart import warmstart

TARGET = "sao.envs.calculator.environment:CalculatorEnvironment"
SMALL: dict[str, Any] = {"environment": TARGET, "width": 32, "layers": 1, "heads": 1, "feed_forward": 32, "demonstrations": 60}


def config(tmp_path: Path, **settings: Any) -> Config:
    return Config(
        env=EnvConfig(name="calculator", target=TARGET, args={"tool": True}),
        model=ModelConfig(factory="sao.learner.tiny:make", factory_args=dict(SMALL)),
        warmstart=WarmstartConfig(**{"steps": 4, "batch_size": 4, "cache_dir": str(tmp_path / "cache"), **settings}),
    )


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = str(tmp_path_factory.mktemp("tiny"))
    tiny.make(path, 3, **SMALL)
    return path


def test_the_factory_is_deterministic_and_the_seed_changes_weights_only(directory: str, tmp_path: Path) -> None:
    for name, seed in (("same", 3), ("other", 4)):
        tiny.make(str(tmp_path / name), seed, **SMALL)
    for file in Path(directory).iterdir():
        assert (tmp_path / "same" / file.name).read_bytes() == file.read_bytes(), file.name
        if file.name != "model.safetensors":
            assert (tmp_path / "other" / file.name).read_bytes() == file.read_bytes(), file.name
    assert (tmp_path / "other" / "model.safetensors").read_bytes() != (Path(directory) / "model.safetensors").read_bytes()


def test_the_directory_is_an_ordinary_one(directory: str) -> None:
    tokenizer, model = AutoTokenizer.from_pretrained(directory), AutoModelForCausalLM.from_pretrained(directory)
    assert model.dtype == torch.float32
    assert model.config.vocab_size == len(tokenizer)
    assert model.config.tie_word_embeddings
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == tokenizer.convert_tokens_to_ids("<|im_end|>")


@pytest.mark.parametrize("text", ["", "12+34*5", "a\n\nb\n", "naïve ☃ 漢字 \U0001f600", "\t x  y ", '{"name": "calculator"}', "-1/=?"])
def test_any_text_survives_the_tokenizer(directory: str, text: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(directory)
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_each_digit_and_operator_is_one_token_and_the_scaffold_a_few(directory: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(directory)
    assert len(tokenizer.encode("-1234567890+*", add_special_tokens=False)) == 13
    for index in range(50):
        messages = CalculatorEnvironment.demonstration(random.Random(index), False)
        ids, sampled = demonstration_tokens(load_renderer("chatml", tokenizer), messages, [SCHEMA])
        assert len(ids) < 130
        assert sampled.index(True) < 60


def test_the_chat_template_writes_the_bytes_of_the_renderer(directory: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(directory)
    messages = CalculatorEnvironment.demonstration(random.Random(1), True)
    ids, _ = demonstration_tokens(load_renderer("chatml", tokenizer), messages, [SCHEMA])
    text = tokenizer.apply_chat_template(messages, tools=[SCHEMA], tokenize=False)
    assert text == tokenizer.decode(ids) + "\n"
    assert tokenizer.encode(text, add_special_tokens=False)[:-1] == ids
    opening = tokenizer.apply_chat_template(messages[:2], tools=[SCHEMA], tokenize=False, add_generation_prompt=True)
    assert opening.endswith("<|im_start|>assistant\n")


def test_orthogonalise_brings_singular_values_near_one() -> None:
    values = torch.linalg.svdvals(orthogonalise(torch.randn(3, 16, 40, generator=torch.Generator().manual_seed(0)), iterations=8))
    assert values.min() > 0.6 and values.max() < 1.3
    tall = torch.randn(1, 40, 16, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(orthogonalise(tall), orthogonalise(tall.mT).mT)


def test_a_muon_step_has_the_size_of_the_rate_whatever_the_gradient() -> None:
    for scale in (1e-6, 1.0, 1e6):
        parameter = torch.nn.Parameter(torch.zeros(8, 8))
        parameter.grad = scale * torch.randn(8, 8, generator=torch.Generator().manual_seed(0))
        Muon([parameter], lr=0.1).step()
        assert 0.05 < torch.linalg.matrix_norm(parameter.detach(), 2) < 0.15


def test_the_result_is_trained_cached_and_made_again_when_settings_change(tmp_path: Path) -> None:
    lines: list[str] = []

    def say(line: str, share: float) -> None:
        assert 0 <= share <= 1
        lines.append(line)

    first = warmstart(config(tmp_path), progress=say)
    assert "training" in lines[0] and "saved" in lines[-1]
    facts = json.loads((first / "warmstart.json").read_text())
    assert facts["steps"] == 4
    untrained = make_base(config(tmp_path), str(tmp_path / "base"))
    before, after = (AutoModelForCausalLM.from_pretrained(path).get_input_embeddings().weight for path in (untrained, first))
    assert not torch.equal(before, after)
    assert AutoTokenizer.from_pretrained(first).chat_template

    lines.clear()
    assert warmstart(config(tmp_path), progress=say) == first
    assert lines == [f"warm start: cached in {first}"]
    switched_off = config(tmp_path)
    switched_off.env.args = {"tool": False}
    assert warmstart(switched_off, progress=say) == first, "the control starts from the same policy"
    assert warmstart(config(tmp_path, seed=1), progress=say) != first
    assert warmstart(config(tmp_path, steps=5), progress=say) != first
    assert not [p for p in (tmp_path / "cache").iterdir() if p.name.startswith(".")]


def test_a_dry_run_trains_no_warm_start(directory: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    planned = config(tmp_path)
    planned.model.path, planned.model.warmstart, planned.run.dry_run = directory, True, True
    assert prepare(planned) == directory and not (tmp_path / "cache").exists()
    assert "the run itself begins with its 4 steps" in capsys.readouterr().out
    planned.env.target = f"{__name__}:Silent"
    with pytest.raises(UserError, match="has no classmethod `demonstration`"):
        prepare(planned)


def test_the_same_settings_give_the_same_weights(tmp_path: Path) -> None:
    one, two = (warmstart(config(tmp_path / name), progress=lambda line, share: None) for name in ("a", "b"))
    assert (one / "model.safetensors").read_bytes() == (two / "model.safetensors").read_bytes()


def test_a_model_directory_of_ones_own_is_the_base(tmp_path: Path, directory: str) -> None:
    own = config(tmp_path)
    own.model = ModelConfig(path=directory)
    result = warmstart(own, progress=lambda line, share: None)
    assert AutoModelForCausalLM.from_pretrained(result).config.hidden_size == 32


class Silent:
    async def reset(self, context: object) -> list[dict[str, str]]:
        return []

    async def step(self, action: object) -> None: ...

    def tools(self) -> list[object]:
        return []

    async def close(self) -> None: ...


def test_an_environment_without_demonstrations_is_a_clear_error(tmp_path: Path) -> None:
    silent = config(tmp_path)
    silent.env.target = f"{__name__}:Silent"
    with pytest.raises(UserError, match=r"env\.target=.*has no classmethod `demonstration`"):
        warmstart(silent)


def test_a_model_for_an_environment_without_demonstrations_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.factory_args\.environment=.*Silent has no classmethod `demonstration`"):
        tiny.make(str(tmp_path), 0, environment=f"{__name__}:Silent")


def test_demonstrations_do_not_need_a_generator() -> None:
    class FromRows(Silent):
        @classmethod
        def demonstration(cls, rng: random.Random, clean: bool) -> list[dict[str, str]]:
            return [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "yes"}]

    assert list(tiny.texts(FromRows, {}, 1)) == ["user\nhello", "assistant\nyes"]


def test_a_missing_factory_is_a_clear_error(tmp_path: Path) -> None:
    missing = config(tmp_path)
    missing.model = ModelConfig(factory="sao.learner.tiny:nothing")
    with pytest.raises(ConfigError, match=r"model\.factory"):
        warmstart(missing, progress=lambda line, share: None)
