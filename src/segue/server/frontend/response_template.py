"""A model's own response template (transformers): which parts its output has, and how each is marked.

transformers validates the template and reads what stands in a region. Its parser keeps the whole text and
searches in all that it holds back, which takes quadratic time for some outputs: here what is held back is
bounded, and the parts do not depend on how the text was cut.
"""

from __future__ import annotations

import json
from typing import Any, Final

from transformers.utils.chat_parsing.content_parsers import process_field
from transformers.utils.chat_parsing.response_templates import load_response_template

from segue.server.frontend.call_bodies import MAX_CALLS_READ, Tools, as_call, one_call, typed
from segue.server.frontend.call_families import FAMILIES
from segue.server.frontend.reply_parts import Part, ReplyParser, Thought, ToolCall, TrailingSpace
from segue.server.frontend.tools import call_parser

#: The longest delimiter that is found.
MAX_DELIMITER_CHARS: Final = 256
_REASONING: Final = frozenset({"reasoning_content", "reasoning", "thinking"})
_CALLS: Final = "tool_calls"


class ResponseForm:
    """A model's response template. Raises ValueError for one that transformers refuses."""

    def __init__(self, template: dict[str, Any]) -> None:
        self.template = load_response_template(template)
        calls = self.template.fields.get(_CALLS)
        opens = "" if calls is None or calls.open_re is None else calls.open_re.pattern.replace("\\", "")
        #: the family whose mark begins a call in the template
        self.family = next((f for f in FAMILIES if f.open and f.open in opens), None)

    def parser(self, prompt: str, tools: Tools | None) -> ReplyParser:
        """A fresh parser for an answer to `prompt`, in which the template may have begun the answer.
        Without `tools`, the functions that may be called, calls are text. Calls of a known family are read in
        its form; the template reads the rest, and what that form does not take."""
        begun = self.template.truncate_past_last_anchor(prompt)
        parser = ResponseParser(self, "" if begun == prompt else begun, tools)
        return parser if self.family is None or tools is None else call_parser(self.family, tools, parser)


class ResponseParser(ReplyParser):
    """The parts of one answer. `begun` is the beginning of it that the prompt has already."""

    def __init__(self, form: ResponseForm, begun: str, tools: Tools | None) -> None:
        self._template = form.template
        self._tools = tools
        self._held = ""
        self._field: str | None = self._template.implicit
        self._captures: dict[str, str] = {}
        #: the first delimiter of a region that is read at its end, and its text
        self._raw: list[str] = []
        self._space = TrailingSpace()
        self._said = False
        ends = (f.close_literals for name, f in self._template.fields.items() if name in _REASONING)
        self.thought_end = next((literals[0] for literals in ends if literals), "")
        self.feed(begun)

    @property
    def thinking(self) -> bool:
        return self._field in _REASONING

    @property
    def undecided(self) -> bool:
        return bool(self._held)

    def feed(self, text: str) -> list[Part]:
        parts: list[Part] = []
        # Each sign of a delimiter lets the rest be searched for the others.
        for at in range(0, len(text), MAX_DELIMITER_CHARS):
            self._feed(parts, text[at : at + MAX_DELIMITER_CHARS])
        return parts

    def _feed(self, parts: list[Part], text: str) -> None:
        at = 0
        while at < len(text):
            if not self._held:
                first = self._first_sign(text, at)
                self._take(parts, text[at:first])
                at = first
            if at < len(text):
                # One by one: the result is the same, however the text was cut.
                self._held += text[at]
                at += 1
                self._look(parts, end=False)

    def finish(self) -> list[Part]:
        parts: list[Part] = []
        self._look(parts, end=True)
        self._close(parts, "")
        return parts

    def _watched(self) -> list[tuple[bool, Any]]:
        """The fields whose beginning (True) or end may come next."""
        fields, implicit = self._template.fields, self._template.implicit
        if self._field is not None and self._field != implicit:
            field = fields[self._field]
            return [(False, field)] if field.close_re is not None else []
        watched = [(True, field) for field in fields.values() if field.open_re is not None]
        if implicit is not None and fields[implicit].close_re is not None:
            watched.append((False, fields[implicit]))
        return watched

    def _first_sign(self, text: str, at: int) -> int:
        """Where in `text`, from `at` on, a delimiter begins or may begin."""
        first = len(text)
        for opens, field in self._watched():
            found = (field.open_re if opens else field.close_re).search(text, at, partial=True)
            if found is not None:
                first = min(first, found.start())
        return first

    def _look(self, parts: list[Part], *, end: bool) -> None:
        """Take delimiters and text from what is held, until the rest may be a delimiter's beginning."""
        while self._held:
            pending = len(self._held)
            best: tuple[tuple[int, int, bool], bool, Any, Any] | None = None
            for opens, field in self._watched():
                pattern = field.open_re if opens else field.close_re
                found = pattern.search(self._held) if end else pattern.search(self._held, partial=True)
                if found is None or (found.start() == found.end() and not end):
                    continue
                if not end and (found.partial or self._may_grow(opens, field, found)):
                    pending = min(pending, found.start())
                    continue
                key = (found.start(), -found.end(), not opens)
                if found.end() > found.start() and (best is None or key < best[0]):
                    best = key, opens, field, found
            if best is not None and best[0][0] < pending:
                _, opens, field, found = best
                self._take(parts, self._held[: found.start()])
                self._held = self._held[found.end() :]
                self._close(parts, "" if opens else found.group())
                if opens:
                    self._open(field, found)
                continue
            pending = max(pending, len(self._held) - MAX_DELIMITER_CHARS)
            self._take(parts, self._held[:pending])
            self._held = self._held[pending:]
            return

    def _may_grow(self, opens: bool, field: Any, found: Any) -> bool:
        """Whether more text could make a delimiter at the end of what is held longer."""
        if found.end() < len(self._held):
            return False
        literals = field.open_literals if opens else field.close_literals
        return literals is None or bool(
            field.open_literal_can_extend if opens else field.close_literal_can_extend
        )

    def _open(self, field: Any, found: Any) -> None:
        self._field = field.name
        self._captures = {k: v for k, v in found.groupdict().items() if v is not None}
        self._raw = [found.group()]

    def _take(self, parts: list[Part], text: str) -> None:
        """Text of the region that is open. Outside of all regions it is dropped, as transformers does."""
        if not text or self._field is None:
            return
        if self._field == _CALLS:
            self._raw.append(text)
            return
        strips = self._template.fields[self._field].content_args.get("strip", True)
        if strips:
            text = self._space.feed(text if self._said else text.lstrip())
        if text:
            self._said = True
            self._say(parts, text)

    def _say(self, parts: list[Part], text: str) -> None:
        parts.append(Thought(text) if self._field in _REASONING else text)

    def _close(self, parts: list[Part], delimiter: str) -> None:
        """The region that is open ends, with this delimiter."""
        if self._field == _CALLS:
            calls = self._calls() if self._tools is not None else []
            parts += calls or ["".join((*self._raw, delimiter))]
        self._space.take()
        self._said = False
        self._field, self._captures, self._raw = self._template.implicit, {}, []

    def _calls(self) -> list[ToolCall]:
        """The calls of the region; none where it does not hold what the template says."""
        try:
            value = process_field("".join(self._raw[1:]), self._template.fields[_CALLS], self._captures)
        except (ValueError, KeyError, TypeError, RecursionError):
            return []
        items = value if isinstance(value, list) else [value]
        if not items or len(items) > MAX_CALLS_READ:
            return []
        calls = [self._call(item) for item in items]
        return [call for call in calls if call is not None] if None not in calls else []

    def _call(self, item: Any) -> ToolCall | None:
        call = as_call(item)
        if call is None or self._tools is None:
            return None
        schemas = self._tools.get(call.name)
        if not schemas:
            return call
        try:
            arguments = json.loads(call.arguments)
        except (ValueError, RecursionError):
            return call
        if not isinstance(arguments, dict):
            return call
        return one_call(call.name, typed(arguments, schemas))
