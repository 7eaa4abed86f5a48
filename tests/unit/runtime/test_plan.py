"""Whether a machine computes in bfloat16, and what is refused where it does not."""

import pytest

from sao.config import Config, ModelConfig
from sao.errors import ConfigError
from sao.runtime.plan import Machine, _check_bf16, _computes_bf16


@pytest.mark.parametrize(
    ("model", "mend"), [(ModelConfig(autocast=True), "model.autocast=false"), (ModelConfig(dtype="bfloat16"), "model.dtype=float32")]
)
def test_bfloat16_on_a_cpu_without_it_is_refused(model, mend):
    config = Config(model=model)
    with pytest.raises(ConfigError, match=f"does not compute in it.*set {mend}"):
        _check_bf16(config, Machine(2, 64000, 60000, 0, bf16=False))
    _check_bf16(config, Machine(2, 64000, 60000, 0, bf16=True))
    _check_bf16(config, Machine(2, 64000, 60000, 1, bf16=False))


@pytest.mark.parametrize(
    ("text", "can"),
    [("flags\t\t: fpu avx2\n", False), ("flags\t\t: fpu avx2 avx512bw\n", True), ("Features\t: fp asimd bf16\n", True), ("processor : 0\n", True)],
)
def test_what_a_processor_says_of_bfloat16(tmp_path, text, can):
    (tmp_path / "cpuinfo").write_text(text)
    assert _computes_bf16(tmp_path / "cpuinfo") is can
    assert _computes_bf16(tmp_path / "missing")
