"""A session: a tree of finished turns, from whose exact tokens further turns go on. (docs/sessions.md says what clients see.)

    root (no tokens) ── turn a ── turn b ── turn c
                          └────── turn d, in flight

`Node` is a turn that has ended well; it never changes, so threads may read it. `Turn` is one in flight: it becomes a node, or nothing.
A node holds only what it adds to its parent's context, so that a conversation of n tokens takes 4n bytes, however many turns it has.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from sterna.errors import DuplicateRid, InvalidRequest, SessionBusy, SessionFull, SessionNotFound
from sterna.protocol.finish import FinishAbort, FinishMatchedStr, FinishMatchedToken, FinishReason
from sterna.protocol.generate import SessionTurn, TokenizedGenerateReqInput
from sterna.text.incremental import DecodeStatus, prompt_tail_of
from sterna.text.tokenizer import Tokenizer

MAX_TURNS = 1024
"""Of one session, finished and in flight."""
MAX_TURNS_OF_ALL = 1 << 16
"""Finished turns of all sessions together: a turn of a few tokens takes half a kilobyte."""
MAX_FAILED = 64
"""Failed turns of a session that are remembered by name, for a better message."""


class Journal(Protocol):
    """What a session knows of a `ReqState`."""

    turn: Turn | None

    @property
    def rid(self) -> str: ...
    @property
    def tokenized(self) -> TokenizedGenerateReqInput | None: ...
    @property
    def output_ids(self) -> list[int]: ...
    @property
    def finished_reason(self) -> FinishReason | None: ...


class TextRules(NamedTuple):
    """What an output's text depends on besides its ids; from its `SamplingParams`, whose stops and biases nobody needs any more."""

    skip_special_tokens: bool
    spaces_between_special_tokens: bool
    no_stop_trim: bool


@dataclass(slots=True, frozen=True, eq=False)
class Node:
    """A finished turn."""

    rid: str
    parent: Node | None
    kept: int
    """Tokens of the parent's context that its prompt begins with."""
    added: array[int]
    """The rest of its prompt."""
    output: array[int]
    ending: FinishReason | None
    """None where a `replace` cut it off."""
    text_rules: TextRules

    @property
    def prompt_len(self) -> int:
        return self.kept + len(self.added)

    @property
    def context_len(self) -> int:
        """Tokens of its prompt and its output: what a turn that goes on from here begins with."""
        return self.prompt_len + len(self.output)

    @property
    def size(self) -> int:
        """Tokens that it holds itself."""
        return len(self.added) + len(self.output)

    def prefix(self, length: int) -> list[int]:
        """The first `length` tokens of its context."""
        parts = []
        node: Node | None = self
        while node is not None and length:
            if length > node.kept:
                parts.append((node.added + node.output)[: length - node.kept])
                length = node.kept
            node = node.parent
        return [token for part in reversed(parts) for token in part]


class Context(NamedTuple):
    """What a turn begins with: `ids`, then the tokens of `text` and of the turn's own text, made together."""

    ids: list[int]
    text: str = ""


@dataclass(slots=True, eq=False)
class Replacement:
    """What the turns of one request replace. Theirs is the place from the beginning, but only an answer makes it final."""

    nodes: list[Node]
    """Set aside, parents before their children; empty once it is final."""
    in_flight: int
    """Turns of them; when none is left and none was answered, the nodes come back."""

    @property
    def size(self) -> int:
        return sum(node.size for node in self.nodes)


@dataclass(slots=True, eq=False)
class Turn:
    """A request of a session, until its journal ends or its reader goes."""

    session: Session
    params: SessionTurn
    parent: Node | None
    """None at the root."""
    journal: Journal
    replacement: Replacement
    kept: int = 0
    """As `Node.kept`; set by `context`."""
    reserved: int = 0
    """Tokens of the session's capacity that it may come to hold."""

    @property
    def rid(self) -> str:
        return self.journal.rid

    def context(self, tokenizer: Tokenizer) -> Context:
        """Resolve `offset` and `drop_previous_output`. Runs in a thread: it reads nodes only. Raises InvalidRequest."""
        node, params = self.parent, self.params
        if node is None:
            return Context([])
        length, text = node.context_len, ""
        if params.drop_previous_output:
            length = node.prompt_len
        elif params.closes_answer:
            length, text = without_stop(node, tokenizer)
        end = _cut(length, params.offset)
        self.kept = end
        return Context(node.prefix(end), text if end == length else "")

    def to_node(self, ending: FinishReason | None) -> Node:
        """What it has so far, as a finished turn."""
        tokenized = self.journal.tokenized
        assert tokenized is not None, "a turn without a prompt ends as a failure"
        added = array("i", tokenized.input_ids[self.kept :])
        params = tokenized.sampling_params
        rules = TextRules(params.skip_special_tokens, params.spaces_between_special_tokens, params.no_stop_trim)
        return Node(self.rid, self.parent, self.kept, added, array("i", self.journal.output_ids), ending, rules)


def _cut(length: int, offset: int) -> int:
    _check_offset(length, offset)
    return offset if offset > 0 else length + offset


def _check_offset(length: int, offset: int) -> None:
    if abs(offset) > length:
        raise InvalidRequest(f"offset: the context has {length} tokens, {offset} is outside of it", param="session_params.offset")


def _check_cut(params: SessionTurn, parent: Node | None, interrupted: Turn | None) -> None:
    """Before anything is forgotten. A stop that a chat's turn leaves out isn't looked for here: `Turn.context` has the last word."""
    if interrupted is not None:
        tokenized = interrupted.journal.tokenized
        prompt, output = 0 if tokenized is None else len(tokenized.input_ids), len(interrupted.journal.output_ids)
    elif parent is not None:
        prompt, output = parent.prompt_len, len(parent.output)
    else:
        return
    _check_offset(prompt if params.drop_previous_output else prompt + output, params.offset)


def without_stop(node: Node, tokenizer: Tokenizer) -> tuple[int, str]:
    """The context without the stop that ended it: how many of its tokens, and the text of the answer between those and the stop.

    There is such a text where a stop string begins inside a token. A stop that the client asked to have left in the text is text.
    """
    ending, rules = node.ending, node.text_rules
    if isinstance(ending, FinishMatchedToken) and (ending.is_eos or not rules.no_stop_trim):
        return node.context_len - 1, ""
    if not isinstance(ending, FinishMatchedStr) or rules.no_stop_trim:
        return node.context_len, ""
    status = DecodeStatus(
        tokenizer,
        prompt_tail_of(tokenizer, node.prefix(node.prompt_len)),
        skip_special_tokens=rules.skip_special_tokens,
        spaces_between_special_tokens=rules.spaces_between_special_tokens,
    )
    tokens = chars = 0
    pieces: list[str] = []
    for index, token in enumerate(node.output, start=1):
        piece = status.push([token])
        pieces.append(piece)
        if chars + sum(map(len, pieces)) > ending.char_offset:
            break
        if piece:  # text that is complete; a token that only begins a character isn't
            tokens, chars, pieces = index, chars + len(piece), []
    else:
        pieces.append(status.finish())
    return node.prompt_len + tokens, "".join(pieces)[: ending.char_offset - chars]


class Plan(NamedTuple):
    """What a request does to its session, checked and not yet done."""

    parent: Node | None
    interrupted: Turn | None
    """A turn in flight that is to end now and be the parent, with the tokens that it has."""
    replaced: list[Node]
    """Parents before their children; those included that are set aside already, for a turn that this one ends."""
    ended: list[Turn]

    @property
    def freed(self) -> list[Node]:
        """Held no longer once the request is answered."""
        return [*self.replaced, *(self.interrupted.replacement.nodes if self.interrupted else ())]


@dataclass(slots=True, eq=False)
class Session:
    """One tree. `nodes` has parents before their children. Owned by `Sessions`, on the event loop."""

    id: str
    capacity: int
    """Tokens that all turns together may hold."""
    timeout: float
    """Idle seconds."""
    touched: float
    """When a turn began or ended last."""
    nodes: dict[str, Node] = field(default_factory=dict)
    turns: dict[str, Turn] = field(default_factory=dict)
    aside: dict[str, Node] = field(default_factory=dict)
    """Nodes that turns in flight replace."""
    failed: dict[str, str] = field(default_factory=dict)
    """Name of a failed turn -> what to go on from instead."""
    tokens: int = 0
    """Held by the nodes, those that are set aside included."""

    def plan(self, params: SessionTurn, rids: Sequence[str]) -> Plan:
        """Turns named `rids` that all go on from one place.

        Raises SessionNotFound, SessionBusy, SessionFull, DuplicateRid, InvalidRequest.
        """
        parent, interrupted = self._parent(params)
        replaced: list[Node] = []
        ended: list[Turn] = []
        if interrupted is None:
            ended = [turn for turn in self.turns.values() if turn.parent is parent]
            if ended and not params.replace:
                where = "from the beginning" if parent is None else f"from turn {parent.rid!r}"
                raise SessionBusy(f"turn {ended[0].rid!r} goes on {where} at this moment", param="session_params.rid")
            if params.replace:
                replaced, ended = self._descendants(parent)
        plan = Plan(parent, interrupted, replaced, ended)
        gone = {node.rid for node in plan.freed}
        for rid in rids:
            if (rid in self.nodes or rid in self.aside) and rid not in gone:
                raise DuplicateRid(f"the session has a turn {rid!r} already", param="rid")
        _check_cut(params, parent, interrupted)
        if len(self.nodes) + len(self.aside) + len(self.turns) - len(plan.freed) - len(ended) + len(rids) > MAX_TURNS:
            raise SessionFull(f"a session has at most {MAX_TURNS} turns", param="session_params.id")
        return plan

    def _parent(self, params: SessionTurn) -> tuple[Node | None, Turn | None]:
        rid = params.rid
        if rid is None or rid in self.nodes:
            return (None if rid is None else self.nodes[rid]), None
        turn = self.turns.get(rid)
        if turn is None and rid in self.aside:
            raise SessionBusy(f"turn {rid!r} is being replaced", param="session_params.rid")
        if turn is None:
            hint = f": it ended without an answer; go on from {self.failed[rid]}" if rid in self.failed else ""
            raise SessionNotFound(f"the session has no turn {rid[:160]!r}{hint}", param="session_params.rid")
        if not params.replace:
            raise SessionBusy(f"turn {rid!r} has not finished", param="session_params.rid")
        if turn.journal.tokenized is None:
            raise SessionBusy(f"turn {rid!r} has no tokens yet that could be kept", param="session_params.rid")
        return None, turn

    def _descendants(self, root: Node | None) -> tuple[list[Node], list[Turn]]:
        below: set[Node | None] = {root}
        nodes = []
        for node in self.nodes.values():
            if node.parent in below:
                below.add(node)
                nodes.append(node)
        turns = [turn for turn in self.turns.values() if turn.parent in below]
        aside = {node: None for turn in turns for node in turn.replacement.nodes}
        return [*nodes, *aside], turns

    def set_aside(self, nodes: list[Node]) -> None:
        for node in nodes:
            self.nodes.pop(node.rid, None)
            self.aside[node.rid] = node

    def bring_back(self, nodes: list[Node]) -> None:
        """As if they had never been replaced."""
        for node in nodes:
            del self.aside[node.rid]
            self.nodes[node.rid] = node
            self.failed.pop(node.rid, None)

    def remember_failure(self, turn: Turn) -> None:
        if turn.rid in self.nodes:
            return  # it was to replace a turn of its own name
        parent = turn.parent
        self.failed[turn.rid] = "the beginning" if parent is None else f"turn {parent.rid!r}"
        if len(self.failed) > MAX_FAILED:
            del self.failed[next(iter(self.failed))]


def failed(reason: FinishReason) -> bool:
    """Whether a turn that ended so leaves nothing: an abort, a timeout, a fault."""
    return isinstance(reason, FinishAbort)
