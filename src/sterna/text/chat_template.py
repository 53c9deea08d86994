"""A model's chat template: messages in, prompt text out, as transformers' `apply_chat_template` renders it.

The environment is transformers' (sandboxed and immutable, with its overrides of `tojson`, `dict` and `namespace`), plus limits,
because a template renders in a thread of the server and a thread can't be killed:

- every pass through a loop and every call of a macro looks at a deadline (`RENDER_SECONDS`);
- the text ends at `MAX_RENDERED_CHARS`;
- `*` and `**` refuse to make something huge.

Concatenation in a loop and padding filters can still take memory. A template of a model that the operator chose is held by this;
one that comes with a request would need a process of its own.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.runtime
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from sterna.config.model_config import ModelConfig
from sterna.errors import InvalidRequest, ModelError

MAX_RENDERED_CHARS = 1 << 25
"""Characters of rendered text: twice the default limit of a request's body in bytes."""
RENDER_SECONDS = 5.0
"""A thread is taken for so long at most; templates take milliseconds."""

_TICK = "_sterna_tick"
_CONTINUE_TAG = "CONTINUE_FINAL_MESSAGE_TAG "
_REASONING_NAMES = ("reasoning_content", "thinking", "reasoning")


class ChatTemplate:
    """A compiled template and the special tokens that it may name. Safe for concurrent renders from threads."""

    def __init__(self, source: str, tokens: Mapping[str, str]) -> None:
        """`tokens` maps `bos_token` and the like to their spelling. Raises ModelError where `source` doesn't compile."""
        self.source = source
        self._tokens = dict(tokens)
        environment = _environment()
        try:
            tree = environment.parse(source)
            self.takes_parts: bool = iterates_over_parts(tree)
            """Whether it iterates over a message's content; else a list of text parts is joined with newlines for it."""
            _add_ticks(tree)
            tree.set_environment(environment)
            code = environment.compile(tree)
        except (jinja2.TemplateError, RecursionError, SyntaxError, ValueError) as fault:
            raise ModelError(f"the chat template doesn't compile: {fault}") from fault
        self._template = jinja2.Template.from_code(environment, code, environment.make_globals(None))

    @staticmethod
    def load(folder: Path, model: ModelConfig) -> ChatTemplate | None:
        """`chat_template.jinja` of a resolved model folder; None where the model has none. Raises ModelError where it is damaged."""
        path = folder / "chat_template.jinja"
        try:
            source = path.read_text(encoding="utf-8")
        except FileNotFoundError:
            return None
        except (OSError, UnicodeDecodeError) as fault:
            raise ModelError(f"{path}: {fault}") from fault
        named = {"bos_token": model.bos_token, "eos_token": model.eos_token}
        return ChatTemplate(source, {**model.template_tokens, **{name: token for name, token in named.items() if token is not None}})

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **template_kwargs: Any,
    ) -> str:
        """The prompt's text, special tokens spelled out. `messages` are plain JSON values and stay as they are.

        `template_kwargs` are more variables for the template; they go before the model's tokens. With `continue_final_message` the
        text ends where the last message's does. Raises InvalidRequest, `param` "messages", where the template raises, where it
        can't take these messages, and at the limits.
        """
        if continue_final_message and add_generation_prompt:
            raise _refusal("continue_final_message and add_generation_prompt exclude each other")
        if continue_final_message and "content" not in self.source:
            raise _refusal("continue_final_message: the chat template doesn't show contents")
        chat = [_prepared(message, flatten=not self.takes_parts) for message in messages]
        final = _tag_final(chat) if continue_final_message else None
        variables = {
            **self._tokens,
            **template_kwargs,
            "messages": chat,
            "tools": None if tools is None else list(tools),
            "documents": template_kwargs.get("documents"),
            "add_generation_prompt": add_generation_prompt,
        }
        text = self._run(variables)
        return text if final is None else _cut_after(text, final)

    def _run(self, variables: dict[str, Any]) -> str:
        pieces: list[str] = []
        length = 0
        tick = _deadline(RENDER_SECONDS)
        try:
            for piece in self._template.generate({**variables, _TICK: tick}):
                tick()
                length += len(piece)
                if length > MAX_RENDERED_CHARS:
                    raise _refusal(f"the chat template makes more than {MAX_RENDERED_CHARS} characters of these messages")
                pieces.append(piece)
        except InvalidRequest:
            raise
        except jinja2.TemplateError as fault:
            raise _refusal(fault.message or "the chat template refuses these messages") from fault
        except Exception as fault:  # whatever the template's own expressions raise: its author's types, not ours
            raise _refusal(f"the chat template fails on these messages: {fault}") from fault
        return "".join(pieces)


def _refusal(message: str) -> InvalidRequest:
    return InvalidRequest(message, param="messages")


# ---- messages ----


def _prepared(message: Mapping[str, Any], *, flatten: bool) -> dict[str, Any]:
    """A copy as transformers prepares one: null keys left out, reasoning under each of its names; parts joined where `flatten`."""
    prepared = {key: value for key, value in message.items() if value is not None}
    reasoning = next((prepared[name] for name in _REASONING_NAMES if name in prepared), None)
    if reasoning is not None:
        prepared = {"thinking": reasoning, **prepared, "reasoning_content": reasoning}
    content = prepared.get("content")
    if isinstance(content, list):
        prepared["content"] = _joined(content) if flatten else [dict(p) if isinstance(p, Mapping) else p for p in content]
    return prepared


def _joined(parts: Sequence[Any]) -> str:
    """Text parts for a template that concatenates: joined with newlines."""
    texts = []
    for part in parts:
        text = part if isinstance(part, str) else part.get("text") if isinstance(part, Mapping) else None
        if not isinstance(text, str):
            raise _refusal("this model takes text parts only")
        texts.append(text)
    return "\n".join(texts)


def _tag_final(chat: list[dict[str, Any]]) -> str:
    """Mark the end of the last message's text; return that text."""
    content = chat[-1].get("content") if chat else None
    if isinstance(content, str):
        chat[-1]["content"] = content + _CONTINUE_TAG
        return content
    for part in reversed(content if isinstance(content, list) else []):
        if isinstance(part, dict) and isinstance(text := part.get("text"), str):
            part["text"] = text + _CONTINUE_TAG
            return text
    raise _refusal("continue_final_message: the last message has no text to continue")


def _cut_after(text: str, final: str) -> str:
    """What is before the mark; where the template trimmed the message, without the white space at its end."""
    at = text.rfind(_CONTINUE_TAG.strip())
    if at < 0 or final.strip() not in text:
        raise _refusal("continue_final_message: the chat template doesn't show the last message as it is")
    return text[:at] if text.startswith(_CONTINUE_TAG, at) else text[:at].rstrip()


# ---- the environment, as transformers has it ----


class _Generation(jinja2.ext.Extension):
    """`{% generation %}`: marks what the assistant said, for training; here only its body counts."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it an instance variable)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: jinja2.runtime.Macro) -> str:
        return str(caller())


class _Sandbox(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        sizes = [len(side) if isinstance(side, str | list | tuple) else side for side in (left, right)]
        if all(isinstance(size, int) for size in sizes):
            first, second = abs(int(sizes[0])), abs(int(sizes[1]))
            sequence = isinstance(left, str | list | tuple) or isinstance(right, str | list | tuple)
            bits = first * second if sequence else first.bit_length() * (second if operator == "**" else 1)
            if bits > MAX_RENDERED_CHARS:
                raise SecurityError(f"the chat template makes something huge with {operator}")
        return super().call_binop(context, operator, left, right)


class _Dict:
    """`dict` without what hangs off the type."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(Namespace):
    """`namespace` that takes no name with an underscore in front."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, values = args[0], dict(*args[1:], **kwargs)
        for name in values:
            _Namespace._check(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _Namespace._check(name)
        super().__setitem__(name, value)

    @staticmethod
    def _check(name: object) -> None:
        if isinstance(name, str) and name.startswith("_"):
            raise SecurityError(f"a namespace can't hold {name!r}: names that begin with an underscore are kept back")


def _environment() -> _Sandbox:
    environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols])
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.globals["dict"] = _Dict()
    environment.globals["namespace"] = _Namespace
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """jinja2's own escapes HTML, which no model was trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


# ---- reading and guarding the syntax tree ----


def iterates_over_parts(tree: nodes.Template) -> bool:
    """Whether some loop of the template goes over a message's content: over `x.content` or `x['content']`, or over a variable or
    macro parameter that holds it."""
    holders = {"content"} if any(arg.name == "content" for macro in tree.find_all(nodes.Macro) for arg in macro.args) else set()
    for assignment in tree.find_all(nodes.Assign):
        if isinstance(assignment.target, nodes.Name) and _is_content(assignment.node):
            holders.add(assignment.target.name)
    return any(
        _is_content(loop.iter) or (isinstance(loop.iter, nodes.Name) and loop.iter.name in holders) for loop in tree.find_all(nodes.For)
    )


def _is_content(node: nodes.Node) -> bool:
    if isinstance(node, nodes.Getattr):
        return node.attr == "content"
    return isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const) and node.arg.value == "content"


def _add_ticks(tree: nodes.Template) -> None:
    """Have each pass through a loop and each macro call look at the deadline first."""
    blocks: list[nodes.For | nodes.Macro] = [*tree.find_all(nodes.For), *tree.find_all(nodes.Macro)]
    for block in blocks:
        tick = nodes.Call(nodes.Name(_TICK, "load"), [], [], None, None)
        block.body.insert(0, nodes.ExprStmt(tick).set_lineno(block.lineno))


def _deadline(seconds: float) -> Callable[[], str]:
    end = time.monotonic() + seconds

    def tick() -> str:
        if time.monotonic() > end:
            raise _refusal(f"the chat template took more than {seconds:g} s on these messages")
        return ""

    return tick
