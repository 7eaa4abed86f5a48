"""The model families whose layout is written down, and how `model.renderer=auto` chooses among them."""

from __future__ import annotations

from typing import Any

from jinja2 import TemplateError

from sao.agents.chatml import ChatML
from sao.agents.glm45 import GLM45
from sao.agents.layout import Layout, LayoutRenderer
from sao.agents.llama3 import Llama3
from sao.agents.qwen3 import Qwen3
from sao.errors import UserError

FAMILIES: dict[str, type[Layout]] = {family.name: family for family in (ChatML, Qwen3, Llama3, GLM45)}

_PROBE = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
_TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {}}}}


def choose(tokenizer: Any) -> tuple[str, str]:
    """The renderer for a tokenizer, and why: the family whose control tokens it has, if the tokenizer's own chat template (where it has one) writes
    that family's text; else `template`. Raises UserError where two families fit, or none and there is no chat template."""
    vocabulary = tokenizer.get_vocab().keys()
    fit = [family for family in FAMILIES.values() if vocabulary >= set(family.required)]
    # Qwen3 holds all of ChatML's tokens: the family that asks for more is meant.
    fit = [family for family in fit if not any(set(family.required) < set(other.required) for other in fit)]
    if len(fit) > 1:
        names = " and ".join(family.name for family in fit)
        raise UserError(f"model.renderer=auto: the tokenizer in model.path has the control tokens of {names}; say which, or use template")
    template = getattr(tokenizer, "chat_template", None)
    if fit and (not template or _writes_alike(fit[0], tokenizer)):
        return fit[0].name, f"the tokenizer has {', '.join(fit[0].required)}"
    if template:
        return (
            "template",
            f"the tokenizer's chat template is not that of {fit[0].name}" if fit else "the tokenizer has no known family's control tokens",
        )
    raise UserError(
        f"model.renderer=auto: the tokenizer in model.path has the control tokens of none of {', '.join(FAMILIES)} and no chat template; add one there"
    )


def _writes_alike(family: type[Layout], tokenizer: Any) -> bool:
    """Whether the chat template writes a probe as the family does; a template that ignores tools is compared without."""
    renderer = LayoutRenderer(family(), tokenizer)

    def rendered(tools: list[dict[str, Any]]) -> str:
        # Llama's templates take today's date where they are not given one.
        options = {"tokenize": False, "add_generation_prompt": True, "date_string": "26 Jul 2024"}
        return str(tokenizer.apply_chat_template(_PROBE, tools=tools or None, **options))

    try:
        plain, listed = rendered([]), rendered([_TOOL])
    except (TemplateError, TypeError, ValueError, KeyError, AttributeError):
        return False
    return all(
        renderer.encoder.decode(renderer.open(_PROBE, tools)) == text
        for tools, text in (([], plain), ([_TOOL], listed))
        if not tools or listed != plain
    )
