"""The next turn of a conversation whose tokens are kept: what a chat template puts after an answer.

A template renders whole conversations. Here a stand-in conversation of a question and an answer takes the place of what came before, the
new messages follow, and everything up to the end of that answer is cut off. What is left begins with what closes the assistant's
turn (`<|im_end|>` and a newline, say), and holds no BOS and no system prompt that the template puts first.

So the text is that of the whole conversation from the answer's end on, wherever the template renders messages without looking back at
those before. A template that moves part of the new messages to the front is refused: that part would be lost.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from sterna.errors import InvalidRequest
from sterna.text.chat_template import ChatTemplate

QUESTION = {"role": "user", "content": "?"}


def render_turn(template: ChatTemplate, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
    """The text that follows an answer when `messages` do; `options` are `ChatTemplate.render`'s.

    Raises InvalidRequest as `render` does, and where the template can't be cut.
    """
    answer = "answer" + secrets.token_hex(8)  # nothing that a message holds
    before = [QUESTION, {"role": "assistant", "content": answer}]
    opening, closing = _cut(template.render([*before, *messages], **options), answer)
    plain = {**options, "add_generation_prompt": False, "continue_final_message": False}
    # Templates may render the last answer otherwise than earlier ones, hence two ways in which it can begin.
    for others in ([QUESTION], []):
        if opening == _cut(template.render([*before, *others], **plain), answer)[0]:
            return closing
    raise InvalidRequest("the chat template shows these messages before the conversation's end: send all of it instead", param="messages")


def _cut(text: str, answer: str) -> tuple[str, str]:
    opening, found, closing = text.partition(answer)
    if not found or answer in closing:
        raise InvalidRequest("the chat template doesn't show an answer once, as it is: a session can't go on from one", param="messages")
    return opening, closing
