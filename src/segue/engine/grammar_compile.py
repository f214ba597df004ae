"""Compiles one grammar with llguidance, within its counts of work."""

from __future__ import annotations

import json
import re

import llguidance
import msgspec
from llguidance.gbnf_to_lark import gbnf_to_lark, is_lark_syntax

from segue.engine.request import CallGrammar, Grammar
from segue.kv import InvalidRequest

#: Items in a row, and items per mask. A schema has four items for each optional property that may follow: 500
#: such properties need 2,007, and 5,000 to 10,000; a mask then takes 16 ms at most and 2 ms on average. The
#: dearest schemas that were found take 40 ms.
_ITEMS_JSON = 3_000, 12_000
#: The work per token grows with the cube of the items in an ambiguous Lark grammar: 13 ms here.
_ITEMS_OTHER = 400, 5_000


def _limits(kind: str) -> llguidance.LLParserLimits:
    """Work per grammar, per mask and per token, in llguidance's counts. Schemas with 128 tools, 1,800 enum
    values or 500 optional properties pass; the library's own limits let a mask take 520 ms."""
    row, mask = _ITEMS_JSON if kind.startswith("json") or kind == "tool_calls" else _ITEMS_OTHER
    return llguidance.LLParserLimits(
        max_grammar_size=250_000,
        max_items_in_row=row,
        step_max_items=mask,
        step_lexer_fuel=50_000,
        max_lexer_states=20_000,
        verbose_errors=False,
    )


#: Bounded white space: a small model otherwise likes to end a JSON text in blanks without end.
_JSON_OPTIONS = {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,20}"}
_MAX_REASON = 500


def make_tokenizer(text: str, words: int, eos: list[int]) -> llguidance.LLTokenizer:
    """llguidance's tokenizer from the text of a tokenizer.json."""
    return llguidance.LLTokenizer(text, n_vocab=words, eos_token=eos or None)


def compile_grammar(tokenizer: llguidance.LLTokenizer, grammar: Grammar) -> llguidance.LLMatcher:
    """A matcher in its first state. InvalidRequest if `grammar` is not valid or admits nothing."""
    build = llguidance.LLMatcher
    try:
        match grammar.kind:
            case "json_object":
                source = build.grammar_from_json_schema('{"type": "object"}', overrides=_JSON_OPTIONS)
            case "json_schema":
                # `true` means {}; the library takes no options for a schema that is no object.
                text = "{}" if grammar.text.strip() == "true" else grammar.text
                source = build.grammar_from_json_schema(text, overrides=_JSON_OPTIONS)
            case "regex":
                source = build.grammar_from_regex(grammar.text)
            case "lark":
                source = build.grammar_from_lark(_as_lark(grammar.text))
            case "tool_calls":
                calls = msgspec.json.decode(grammar.text, type=CallGrammar)
                source = build.grammar_from_lark(_lark(tokenizer, calls))
    except ValueError as exc:  # text that is not JSON, or not UTF-8
        raise InvalidRequest(f"The output format ({grammar.kind}) is not valid: {one_line(exc)}") from exc
    matcher = build(tokenizer, source, log_level=0, limits=_limits(grammar.kind))
    if matcher.is_error():
        hint = "" if grammar.kind != "lark" or is_lark_syntax(grammar.text) else _NOTATIONS
        raise InvalidRequest(
            f"The output format ({grammar.kind}) is not valid: {one_line(matcher.get_error())}{hint}"
        )
    first = matcher.deep_copy()
    if not any(first.compute_bitmask()) or first.is_error():
        reason = one_line(first.get_error())
        if "NoExtensionBias" in reason or not reason:
            reason = "no text satisfies it"
        raise InvalidRequest(f"The output format ({grammar.kind}) admits no first token: {reason}")
    return matcher


_NOTATIONS = '; a grammar is written in Lark (start: "yes" | "no") or in GBNF (root ::= "yes" | "no")'
_GBNF_RULE = re.compile(r"^\s*[\w-]+\s*::=", re.MULTILINE)
_GBNF_PIECE = re.compile(
    r"""("(?:\\.|[^"\\])*"|\[(?:\\.|[^]\\])*\])|'((?:\\.|[^'\\])*)'|\#[^\n]*|\s*\n\s*(?=\|)""", re.DOTALL
)
_GBNF_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))", re.DOTALL)


def _as_lark(text: str) -> str:
    """`text` in Lark: GBNF, as llama.cpp has it and vLLM and SGLang show it, is converted. InvalidRequest for
    one that cannot be."""
    if is_lark_syntax(text) or not _GBNF_RULE.search(text):
        return text
    try:
        return str(gbnf_to_lark(_GBNF_PIECE.sub(_gbnf_piece, text)))
    except Exception as exc:  # the converter raises any
        raise InvalidRequest(
            f"The output format (lark) is not valid: as GBNF: {one_line(exc)}{_NOTATIONS}"
        ) from exc


def _gbnf_piece(found: re.Match[str]) -> str:
    """A text or a class of characters as llguidance's converter reads it. Comments, and the end of a line
    before `|`, become a space."""
    if found[2] is not None:
        return '"' + _GBNF_ESCAPE.sub(_gbnf_letter, found[2].replace('"', '\\"')) + '"'
    return _GBNF_ESCAPE.sub(_gbnf_letter, found[1]) if found[1] is not None else " "


def _gbnf_letter(found: re.Match[str]) -> str:
    if found[3] is not None:
        return "'" if found[3] == "'" else found[0]
    letter = chr(int(found[1] or found[2], 16))
    return f"\\x{ord(letter):02x}" if ord(letter) < 128 else letter


def _lark(tokenizer: llguidance.LLTokenizer, grammar: CallGrammar) -> str:
    """The Lark source of free text with calls. A special token is not text: Lark names it by its number."""

    def sequence(pieces: list[str]) -> str:
        return " ".join(name for piece in pieces if (name := _special(tokenizer, piece) or _text(piece)))

    mark, *rest = grammar.open
    special = _special(tokenizer, mark)
    opened = f"opened: TEXT {special}" if special else f"opened[lazy]: TEXT {_text(mark)}"
    more = "" if grammar.between is None else f"({sequence(grammar.between)} call)*"
    lines = [
        "start: block* TEXT",
        f"block: opened {sequence(rest)} call {more} {sequence(grammar.close)}",
        opened,
        r"TEXT: /(.|\n)*/",
        f"call: {' | '.join(f'call_{at}' for at in range(len(grammar.calls)))}",
    ]
    for at, call in enumerate(grammar.calls):
        schema = json.dumps(call.schema | {"x-guidance": _JSON_OPTIONS})
        lines.append(f"call_{at}: {sequence(call.before)} %json {schema} {sequence(call.after)}")
    return "\n".join(lines)


def _special(tokenizer: llguidance.LLTokenizer, text: str) -> str:
    """The Lark name of the special token that `text` is; empty if it is none."""
    ids = tokenizer.tokenize_str(text, parse_special=True)
    return f"<[{ids[0]}]>" if len(ids) == 1 and tokenizer.is_special_token(ids[0]) else ""


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""


def one_line(text: object) -> str:
    """The library's message in one line of bounded length."""
    return " ".join(str(text).split())[:_MAX_REASON]
