"""Messages to a prompt, through the Jinja template that a checkpoint brings."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, NoReturn

from jinja2 import Template, TemplateError

from ..errors import ChatTemplateError, CheckpointError
from .sandbox import Budget, ChatEnvironment
from .sandbox_filters import chat_filters

if TYPE_CHECKING:
    from .checkpoint import Checkpoint

__all__ = ["JinjaChatFormat", "jinja_chat_format"]

MAX_SOURCE_CHARS = 262_144
#: Room for any real template; a conversation that is itself larger gets more.
BASE_CHARS, CHARS_PER_INPUT = 16_000_000, 32
CPU_SECONDS = 0.8
MAX_MESSAGE_DEPTH = 64
#: Names under which a message's reasoning travels; templates read the first or the second.
REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")


class JinjaChatFormat:
    """A `ChatFormat` over a template that need not be trusted, see `deepinfer.models.sandbox`.

    Immutable; safe to share between threads: every rendering has an environment and a budget of its own.

    Args:
        template: the template, or several by name (`default`, and `tool_use` for requests with tools).
        bos_token: text of the token, for the template; so `eos_token` and others in `tokens`.
        clock: what `strftime_now` shows; the wall clock by default.

    Raises:
        ChatTemplateError: a template is not valid or too long.

    Example:
        >>> chat = JinjaChatFormat("{% for m in messages %}{{ m.role }}: {{ m.content }}\\n{% endfor %}")
        >>> chat.render([{"role": "user", "content": "Hi"}])
        'user: Hi\\n'
    """

    def __init__(
        self,
        template: str | Mapping[str, str],
        *,
        bos_token: str | None = None,
        eos_token: str | None = None,
        tokens: Mapping[str, str] | None = None,
        clock: Callable[[], datetime] = datetime.now,
    ) -> None:
        self.templates = {"default": template} if isinstance(template, str) else dict(template)
        named = {"bos_token": bos_token, "eos_token": eos_token}
        self._tokens = {**(tokens or {}), **{k: v for k, v in named.items() if v is not None}}
        self._environment = ChatEnvironment(chat_filters())
        self._environment.add_function("raise_exception", _raise_exception)
        self._environment.add_function("strftime_now", _strftime(clock))
        self._code = {name: _compile(self._environment, source) for name, source in self.templates.items()}

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt of a conversation.

        Args:
            messages: mappings with `role`, `content` and whatever the template reads; JSON-like values.
            tools: JSON schemas of the functions on offer.
            add_generation_prompt: end with what makes the model answer.
            variables: further variables of the template (`enable_thinking`, `documents`, ...).

        Raises:
            ChatTemplateError: the template failed, refused the conversation, or passed its limits (about a second
                of CPU time; text of thirty times the conversation).
        """
        shown = {
            **self._tokens,
            **_plain(dict(variables or {}), "variables"),
            "messages": [_with_reasoning(message) for message in _plain(list(messages), "messages")],
            "tools": _plain(None if tools is None else list(tools), "tools"),
            "add_generation_prompt": add_generation_prompt,
        }
        environment = self._environment.overlay()
        environment.budget = Budget(chars=BASE_CHARS + CHARS_PER_INPUT * _num_chars(shown), seconds=CPU_SECONDS)
        try:
            return _run(environment, self._choose(tools), shown)
        except Exception as error:
            raise _as_chat_error(error, "rendering") from error

    def config(self) -> dict[str, Any]:
        return {"templates": dict(self.templates), "tokens": dict(self._tokens)}

    def _choose(self, tools: Any) -> Any:
        if tools and "tool_use" in self._code:
            return self._code["tool_use"]
        if "default" in self._code:
            return self._code["default"]
        raise TemplateError(f"no template is named default; there are {', '.join(sorted(self._code)) or 'none'}")


def jinja_chat_format(*, checkpoint: Checkpoint) -> JinjaChatFormat:
    """Factory of the registry: the chat format of an opened checkpoint.

    Raises:
        CheckpointError: it has no template.
    """
    found = checkpoint.chat_template
    if found is None:
        raise CheckpointError(
            f"{checkpoint.path} has no chat template (chat_template.jinja, tokenizer_config.json or "
            "tokenizer.chat_template); it is a base model, or pass JinjaChatFormat(template) yourself"
        )
    return JinjaChatFormat(found, tokens=checkpoint.special_tokens)


def _compile(environment: ChatEnvironment, source: str) -> Any:
    if len(source) > MAX_SOURCE_CHARS:
        raise ChatTemplateError(
            f"the chat template has {len(source)} characters (limit {MAX_SOURCE_CHARS}); pass a shorter one"
        )
    try:
        return environment.compile(source)
    except Exception as error:
        raise _as_chat_error(error, "compiling") from error


def _run(environment: ChatEnvironment, code: Any, variables: dict[str, Any]) -> str:
    template = Template.from_code(environment, code, environment.make_globals(None))
    # Piece by piece, so that the budget ends a flood and not the memory.
    pieces = []
    for piece in template.root_render_func(template.new_context(variables)):
        environment.budget.spend(len(piece))
        pieces.append(piece)
    return "".join(pieces)


def _as_chat_error(error: Exception, doing: str) -> ChatTemplateError:
    if isinstance(error, ChatTemplateError):
        return error
    line = getattr(error, "lineno", None)
    where = f" (line {line})" if line else ""
    return ChatTemplateError(
        f"{doing} the chat template failed{where}: {type(error).__name__}: {str(error)[:500]}. "
        "Check the messages against what the template expects, or pass another template"
    )


def _raise_exception(message: Any) -> NoReturn:
    raise TemplateError(str(message)[:500])


def _strftime(clock: Callable[[], datetime]) -> Callable[[str], str]:
    def strftime_now(pattern: str) -> str:
        # The C library pads to any width that a pattern names.
        if len(pattern) > 200 or re.search(r"%[^%a-zA-Z]*\d", pattern):
            raise TemplateError("strftime_now takes a pattern of at most 200 characters without widths")
        return clock().strftime(pattern)

    return strftime_now


def _with_reasoning(message: Any) -> Any:
    """Offer a message's reasoning under the names that templates read."""
    if not isinstance(message, dict):
        raise ChatTemplateError(f"a message is {str(message)[:80]!r}; expected a mapping with role and content")
    reasoning = next((message[key] for key in REASONING_KEYS if message.get(key) is not None), None)
    return message if reasoning is None else {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _plain(value: Any, path: str, depth: int = 0) -> Any:
    """A private copy made of JSON's types: templates see no methods but those of the built-in types."""
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, str):
        return str(value)
    if depth == MAX_MESSAGE_DEPTH:
        raise ChatTemplateError(f"{path[:200]} is nested more than {MAX_MESSAGE_DEPTH} deep; expected JSON-like values")
    if isinstance(value, Mapping):
        return {str(key): _plain(inner, f"{path}.{key}", depth + 1) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner, f"{path}[{i}]", depth + 1) for i, inner in enumerate(value)]
    raise ChatTemplateError(f"{path[:200]} is a {type(value).__name__}; expected JSON-like values (convert it to text)")


def _num_chars(value: Any) -> int:
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(len(key) + _num_chars(inner) for key, inner in value.items())
    return 1 + sum(map(_num_chars, value)) if isinstance(value, list) else 1
