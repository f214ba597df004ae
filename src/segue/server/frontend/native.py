"""SGLang's own endpoint, `POST /generate`: its body in OpenAI's terms, and its form of an answer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import msgspec

from segue.engine.request import FinishReason, TokenLogprob
from segue.server.frontend.answers import Answer, Choice, Json, append_items
from segue.server.frontend.body_reader import names_in, read_body, same_fields
from segue.server.frontend.generate import Piece
from segue.server.frontend.params import ModelCard
from segue.server.frontend.plan import Plan, Planner
from segue.server.frontend.problems import BadParam, renamed
from segue.server.frontend.request_fields import BodyPart, CompletionBody, NativeBody

_DEFAULT_TOKENS = 128
_encode: Final = msgspec.json.Encoder().encode


def read_native(raw: bytes) -> NativeBody:
    """Raises BadParam for what is no such body, or asks for what is not built."""
    body = read_body(raw, NativeBody)
    if (body.text is None) == (body.input_ids is None):
        raise BadParam("either text or input_ids is needed", "text")
    return body


class PromptLogprobs(NamedTuple):
    """The log-probabilities that one prompt's answer shows: of so many alternatives, and of the prompt from a
    token on (-1: of none of its tokens)."""

    shown: bool = False
    start: int = -1
    top: int = 0


def _logprobs(body: NativeBody) -> list[PromptLogprobs]:
    """The log-probabilities that each prompt's answer shows. Raises BadParam for lists of another length."""
    count = _prompt_count(body)
    each = []
    for name, default in (("return_logprob", False), ("logprob_start_len", -1), ("top_logprobs_num", 0)):
        value = getattr(body, name)
        values = value if isinstance(value, list) else [default if value is None else value] * count
        if len(values) != count:
            raise BadParam(f"{name}: one for each of {count} prompts, not {len(values)}", name)
        each.append(values)
    return [
        PromptLogprobs(shown, start, top) if shown else PromptLogprobs()
        for shown, start, top in zip(*each, strict=True)
    ]


def _prompt_count(body: NativeBody) -> int:
    prompts = body.text if body.input_ids is None else body.input_ids
    return len(prompts) if isinstance(prompts, list) and prompts and not isinstance(prompts[0], int) else 1


def as_completion(body: NativeBody) -> CompletionBody:
    """The same request in OpenAI's terms. Raises BadParam."""
    s = body.sampling_params
    chosen = {} if s is None else same_fields(s, BodyPart.SAMPLING_PARAMS, BodyPart.COMPLETIONS)
    if chosen.get("max_tokens") is None:
        chosen["max_tokens"] = _DEFAULT_TOKENS
    logprobs = _logprobs(body)
    of_prompts = any(one.start >= 0 for one in logprobs)
    prompt: Any = body.text if body.input_ids is None else body.input_ids
    return CompletionBody(
        **chosen,
        **same_fields(body, BodyPart.GENERATE, BodyPart.COMPLETIONS),
        prompt=prompt,
        logprobs=max(one.top for one in logprobs) if any(one.shown for one in logprobs) else None,
        echo=of_prompts or chosen["max_tokens"] == 0,
        return_token_ids=True,
    )


#: Names of `CompletionBody`'s fields in this API.
_NAMES: Final = names_in(BodyPart.SAMPLING_PARAMS, BodyPart.COMPLETIONS) | {"logprobs": "top_logprobs_num"}


def native_plan(
    planner: Planner, native: NativeBody, body: CompletionBody, card: ModelCard, call_id: str
) -> Plan:
    """The plan of `body`, which is `native` in OpenAI's terms, answered in SGLang's form. Raises BadParam."""
    try:
        plan = planner.completion(body, card, call_id, keeps_streamed=True)
    except BadParam as error:
        raise renamed(
            error, _NAMES | {"prompt": "text" if native.input_ids is None else "input_ids"}
        ) from None
    prompts = native.text if native.input_ids is None else native.input_ids
    many = isinstance(prompts, list) and not isinstance(prompts[0], int)
    logprobs = _logprobs(native)
    for choice in plan.answer.choices:
        start, tokens = logprobs[choice.prompt].start, len(choice.sample.request.prompt)
        if start >= tokens:
            raise BadParam(
                f"logprob_start_len: at most {tokens - 1} with a prompt of {tokens} tokens, not {start}",
                "logprob_start_len",
            )
    answer = NativeAnswer(
        plan.answer,
        native.rid or call_id,
        batch=many or len(plan.samples) > 1,
        logprobs=logprobs,
        with_text=bool(native.return_text_in_logprobs),
        prompt_only=body.max_tokens == 0,
    )
    return Plan(answer, plan.stream, include_usage=False)


#: Bytes of events that a stream may send for each token, on average. An event repeats all so far: where that
#: is more, events come for several tokens at once, and the bytes of a stream grow as its tokens and not as
#: their square.
EVENT_BYTES: Final = 32 * 2**10
#: Bytes that small events may leave over for large ones.
_MAX_CREDIT: Final = 2**20


class _SoFar:
    """The output of one sample so far, as JSON: each piece is encoded once."""

    def __init__(self) -> None:
        self.text, self.ids = bytearray(), bytearray()
        #: items of lists of log-probabilities, by the list's name
        self.logprobs: defaultdict[str, bytearray] = defaultdict(bytearray)
        self.credit = 0

    @property
    def nbytes(self) -> int:
        return len(self.text) + len(self.ids) + sum(map(len, self.logprobs.values()))

    def due(self, tokens: int) -> bool:
        """Whether an event of all so far may be sent, with so many new tokens."""
        self.credit = min(self.credit + EVENT_BYTES * max(1, tokens), max(_MAX_CREDIT, self.nbytes))
        if self.credit < self.nbytes:
            return False
        self.credit -= self.nbytes
        return True


def _list(items: bytearray) -> msgspec.Raw:
    return msgspec.Raw(b"[" + items + b"]")


class NativeAnswer(Answer):
    """`{"text", "output_ids", "meta_info"}`; a list of them for several prompts or samples. In a stream the
    text and the log-probabilities so far are repeated in each event, as SGLang does; see `EVENT_BYTES`."""

    keeps_streamed = True

    def __init__(
        self,
        answer: Answer,
        rid: str | list[str],
        *,
        batch: bool,
        logprobs: Sequence[PromptLogprobs],
        with_text: bool = False,
        prompt_only: bool = False,
    ) -> None:
        super().__init__(answer.shape, answer.choices, answer.tokenizer)
        self._rid = rid
        self._batch = batch
        self._logprobs = logprobs
        self._with_text = with_text
        self._prompt_only = prompt_only
        self._so_far = [_SoFar() for _ in answer.choices]

    @property
    def repeated_bytes(self) -> int:
        """See `Answer.repeated_bytes`."""
        return 0

    def add(self, index: int, piece: Piece) -> None:
        """See `Answer.add`."""
        choice, so_far = self.choices[index], self._so_far[index]
        if not self._prompt_only:
            so_far.text += _encode(piece.text)[1:-1]
            append_items(so_far.ids, piece.token_ids)
        for name, items in self.shown_logprobs(choice, piece).items():
            append_items(so_far.logprobs[name], items)
        if piece.finish is not None:
            choice.finish, choice.stop_reason = piece.finish, piece.stop_reason

    def chunks(self, index: int, piece: Piece) -> list[Json]:
        self.add(index, piece)
        if not piece.text and not piece.token_ids and piece.finish is None:
            return []
        if not self._so_far[index].due(len(piece.token_ids)) and piece.finish is None:
            return []
        one = self._one(index, self.choices[index])
        return [{**one, "index": index} if self._batch else one]

    def shown_logprobs(self, choice: Choice, piece: Piece) -> dict[str, list[Any]]:
        """See `Answer.shown_logprobs`: by SGLang's names, a token as its log-probability, id and text."""
        asked = self._logprobs[choice.prompt]
        shown: dict[str, list[Any]] = {}
        if asked.start >= 0 and piece.prompt_logprobs is not None:
            # The first token that is shown has no probability, wherever it stands.
            ids = choice.sample.request.prompt[asked.start :]
            after = piece.prompt_logprobs[asked.start + 1 :]
            shown["input_token_logprobs"] = [self._token(ids[0], None), *map(self._chosen, after)]
            shown["input_top_logprobs"] = [None, *(self._top(one, asked.top) for one in after)]
        if asked.shown and not self._prompt_only:
            shown["output_token_logprobs"] = [self._chosen(one) for one in piece.logprobs]
            shown["output_top_logprobs"] = [self._top(one, asked.top) for one in piece.logprobs]
        return shown

    def _token(self, token: int, logprob: float | None) -> tuple[float | None, int, str | None]:
        return logprob, token, self.tokenizer.token_text(token) if self._with_text else None

    def _chosen(self, one: TokenLogprob | None) -> tuple[float | None, int, str | None] | None:
        return None if one is None else self._token(one.token, one.logprob)

    def _top(self, one: TokenLogprob | None, count: int) -> list[tuple[float | None, int, str | None]] | None:
        return None if one is None else [self._token(token, value) for token, value in one.top[:count]]

    def whole(self) -> Any:
        found = [self._one(i, choice) for i, choice in enumerate(self.choices)]
        return found if self._batch else found[0]

    def usage_chunk(self) -> Json:
        return {}

    def _one(self, index: int, choice: Choice) -> Json:
        sample, rid, so_far = choice.sample, self._rid, self._so_far[index]
        if isinstance(rid, list):
            rid = rid[choice.prompt] if choice.prompt < len(rid) else self.shape.id
        tokens = 0 if self._prompt_only else sample.tokens
        meta: Json = {
            "id": rid,
            "finish_reason": _finish(choice, tokens),
            "prompt_tokens": len(sample.request.prompt),
            "completion_tokens": tokens,
            "cached_tokens": sample.usage.decode_cached + sample.usage.prefill_cached,
        }
        asked = self._logprobs[choice.prompt]
        if asked.shown:
            sides = ("input", "output")
            meta |= {
                f"{side}_token_logprobs": _list(so_far.logprobs[f"{side}_token_logprobs"]) for side in sides
            }
            meta |= {f"{side}_top_logprobs": _list(so_far.logprobs[f"{side}_top_logprobs"]) for side in sides}
        text = msgspec.Raw(b'"' + so_far.text + b'"')
        return {"text": text, "output_ids": _list(so_far.ids), "meta_info": meta}


def _finish(choice: Choice, tokens: int) -> Json | None:
    if choice.finish is None:
        return None
    if choice.finish is FinishReason.LENGTH or not tokens:
        return {"type": "length", "length": tokens}
    return {"type": "stop", "matched": choice.stop_reason}
