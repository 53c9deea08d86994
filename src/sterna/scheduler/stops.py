"""Text stops of one request, by the same decoder and matcher that the detokenizer runs, one token at a time."""

from __future__ import annotations

from collections.abc import Sequence

from sterna.protocol.finish import FinishMatchedStr
from sterna.protocol.sampling import SamplingParams
from sterna.text.incremental import PROMPT_TAIL_TOKENS, DecodeStatus
from sterna.text.stop import StopMatch, StopMatcher
from sterna.text.tokenizer import Tokenizer


class TextStops:
    """Push every output token, in order. Cost per token doesn't grow with the output."""

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int], resumed: Sequence[int], params: SamplingParams) -> None:
        """`resumed` is output that the request came with: a stop may begin in it and none ends in it.

        It is pushed as if it had just been made: text, offsets and what has begun are those of a request that was never interrupted.
        """
        self._matcher = StopMatcher(params.stop)
        self._status = DecodeStatus(
            tokenizer,
            prompt_ids[-PROMPT_TAIL_TOKENS:],
            skip_special_tokens=params.skip_special_tokens,
            spaces_between_special_tokens=params.spaces_between_special_tokens,
        )
        self._matcher.push(self._status.push(resumed))

    def push(self, token: int, index: int, *, held_off: bool) -> FinishMatchedStr | None:
        """Output token `index`. While stops are held off a match is passed over."""
        match = self._matcher.push(self._status.push([token]))
        return None if held_off else _finish(match, index)

    def finish(self, index: int) -> FinishMatchedStr | None:
        """The output ends after token `index`: a stop in text that was held for want of more."""
        return _finish(self._matcher.push(self._status.finish()), index)


def special_token_id(tokenizer: Tokenizer, text: str) -> int | None:
    """The id of the special token that is spelled exactly so."""
    token = tokenizer.token_to_id(text)
    return token if token is not None and tokenizer.is_special(token) else None


def _finish(match: StopMatch | None, index: int) -> FinishMatchedStr | None:
    return None if match is None else FinishMatchedStr(match.stop, index, match.start)
