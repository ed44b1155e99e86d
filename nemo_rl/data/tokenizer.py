"""The policy's tokenizer with the chat template that the configuration asks for."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING, cast

from nemo_rl.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from nemo_rl.models.policy.config import TokenizerConfig

PASSTHROUGH_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
"""Writes the messages' text alone, for base models."""

KEY = "policy.tokenizer"


def chat_template_text(choice: str | None) -> str | None:
    """Resolve `policy.tokenizer.chat_template`.

    Args:
        choice: null or "default" (the tokenizer's own), "passthrough" (text alone), inline jinja, or a file's path.

    Returns:
        Template text, or None for the tokenizer's own.

    Raises:
        ConfigError: a path that cannot be read.
    """
    if choice is None or choice == "default":
        return None
    if choice == "passthrough":
        return PASSTHROUGH_TEMPLATE
    if "{{" in choice or "{%" in choice:
        return choice
    try:
        return Path(choice).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as err:
        raise ConfigError(
            f"{KEY}.chat_template: got {choice!r}; must be null, 'default', 'passthrough', inline jinja (with "
            f"'{{{{' or '{{%') or a readable file, and this is none of them ({err}). Correct the path."
        ) from err


def load_tokenizer(cfg: TokenizerConfig) -> PreTrainedTokenizerBase:
    """Load the tokenizer, set its template, bind the template's keyword arguments, and check that it renders.

    Args:
        cfg: `policy.tokenizer`.

    Returns:
        A tokenizer with end-of-sequence and padding tokens; its `apply_chat_template` already has the configured
        keyword arguments.

    Raises:
        ConfigError: nothing usable at `name`, or a template that does not render.
    """
    from transformers import AutoTokenizer  # several seconds, and a configuration check does not need it

    template = chat_template_text(cfg.chat_template)
    try:
        tokenizer = cast("PreTrainedTokenizerBase", AutoTokenizer.from_pretrained(cfg.name))
    except Exception as err:  # the tokenizers library raises bare Exception for a damaged file
        raise ConfigError(
            f"{KEY}.name: got {cfg.name!r}; must be a directory with tokenizer files or a hub name, and no tokenizer "
            f"loads from it ({_first_line(err)}). Correct the name, or download it first when the hub is out of reach."
        ) from err
    if template is not None:
        tokenizer.chat_template = template
    if not tokenizer.chat_template:
        raise ConfigError(
            f"{KEY}.chat_template: got {cfg.chat_template!r}; {cfg.name} has no chat template of its own. Set "
            "'passthrough' (the text alone), a jinja file or inline jinja."
        )
    if tokenizer.eos_token_id is None:
        raise ConfigError(
            f"{KEY}.name: got {cfg.name!r}; its tokenizer has no end-of-sequence token, so no response could end. Set "
            "eos_token in its tokenizer_config.json."
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    if cfg.chat_template_kwargs:
        tokenizer.apply_chat_template = functools.partial(tokenizer.apply_chat_template, **cfg.chat_template_kwargs)
    _check_rendering(tokenizer, cfg)
    return tokenizer


def render_chat(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]]) -> str:
    """Write messages with the chat template, up to where the response begins.

    Args:
        tokenizer: from `load_tokenizer`.
        messages: `role` and `content` of each.
    """
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert isinstance(text, str), f"a template renders to text when nothing is tokenized, not to {type(text).__name__}"
    return text


def _check_rendering(tokenizer: PreTrainedTokenizerBase, cfg: TokenizerConfig) -> None:
    from jinja2 import TemplateError  # comes with transformers' chat templates

    probe = [{"role": "user", "content": "1 + 1"}]
    try:
        text = render_chat(tokenizer, probe)
    except (TemplateError, TypeError, ValueError) as err:
        raise ConfigError(
            f"{KEY}.chat_template: got {cfg.chat_template!r} with chat_template_kwargs {cfg.chat_template_kwargs!r}; "
            f"must render a user message, and fails ({_first_line(err)}). Correct the template or its arguments."
        ) from err
    if "1 + 1" not in text:
        raise ConfigError(
            f"{KEY}.chat_template: got {cfg.chat_template!r}; must write a user message's content, and renders "
            f"{text!r}. Correct the template (a file's path is looked up from the working directory)."
        )


def _first_line(err: BaseException) -> str:
    return (str(err).strip() or type(err).__name__).splitlines()[0]
