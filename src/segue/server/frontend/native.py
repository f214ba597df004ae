"""SGLang's own endpoint, `POST /generate`: its body in OpenAI's terms, and its form of an answer."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from segue.kv import FinishReason
from segue.server.frontend.answers import Answer, Choice, Json, append_items
from segue.server.frontend.generate import Piece
from segue.server.frontend.openai_types import CompletionBody, Number, read_float
from segue.server.frontend.params import ModelCard, check_kept_logprobs
from segue.server.frontend.plan import Plan, Planner
from segue.server.frontend.problems import BadParam, unparsable
from segue.server.frontend.unsupported import Refused, refuse, with_refused

_DEFAULT_TOKENS = 128
_encode: Final = msgspec.json.Encoder().encode
_OFF: Final[tuple[object, ...]] = (False, 0, "", [], {})

#: Fields refused in `/generate`.
REFUSED_IN_GENERATE: Final[Refused] = {
    "audio_data": _OFF,
    "custom_logit_processor": _OFF,
    "image_data": _OFF,
    "input_embeds": _OFF,
    "lora_path": _OFF,
    "return_hidden_states": _OFF,
    "return_routed_experts": _OFF,
    "session_params": _OFF,
    "video_data": _OFF,
}
#: Fields refused in its `sampling_params`.
REFUSED_IN_SAMPLING_PARAMS: Final[Refused] = {
    "custom_params": _OFF,
    "ebnf": _OFF,
    "spaces_between_special_tokens": (True,),
    "stop_regex": _OFF,
    "structural_tag": _OFF,
}


class NativeSampling(msgspec.Struct, frozen=True, kw_only=True):
    """`sampling_params`, by SGLang's names."""

    max_new_tokens: int | None = None
    min_new_tokens: int | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    top_k: int | None = None
    min_p: Number | None = None
    frequency_penalty: Number | None = None
    presence_penalty: Number | None = None
    repetition_penalty: Number | None = None
    logit_bias: dict[int, Number] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    no_stop_trim: bool | None = None
    n: int | None = None
    json_schema: str | None = None
    regex: str | None = None
    sampling_seed: int | None = None


_Sampling: type[NativeSampling] = with_refused(NativeSampling, REFUSED_IN_SAMPLING_PARAMS)  # type: ignore[assignment]


class NativeBody(msgspec.Struct, frozen=True, kw_only=True):
    """`POST /generate`: a text or token ids, or a list of either."""

    text: str | list[str] | None = None
    input_ids: list[int | list[int]] | None = None
    sampling_params: _Sampling | None = None  # type: ignore[valid-type]
    stream: bool | None = None
    return_logprob: bool | list[bool] | None = None
    top_logprobs_num: int | list[int] | None = None
    rid: str | list[str] | None = None
    cache_salt: str | None = None
    routed_dp_rank: int | None = None
    data_parallel_rank: int | None = None
    disagg_prefill_dp_rank: int | None = None


_decoder: Final[msgspec.json.Decoder[Any]] = msgspec.json.Decoder(
    with_refused(NativeBody, REFUSED_IN_GENERATE), float_hook=read_float
)


def read_native(raw: bytes) -> NativeBody:
    """Raises BadParam for what is no such body, or asks for what is not built."""
    try:
        body: NativeBody = _decoder.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise unparsable(error) from None
    refuse(body, REFUSED_IN_GENERATE)
    refuse(body.sampling_params, REFUSED_IN_SAMPLING_PARAMS, "sampling_params.")
    if (body.text is None) == (body.input_ids is None):
        raise BadParam("either text or input_ids is needed", "text")
    return body


def as_completion(body: NativeBody) -> CompletionBody:
    """The same request in OpenAI's terms."""
    s: NativeSampling = body.sampling_params or _Sampling()
    logprobs = any(body.return_logprob) if isinstance(body.return_logprob, list) else body.return_logprob
    top = (
        max(body.top_logprobs_num, default=0)
        if isinstance(body.top_logprobs_num, list)
        else body.top_logprobs_num
    )
    prompt: Any = body.text if body.input_ids is None else body.input_ids
    return CompletionBody(
        prompt=prompt,
        stream=body.stream,
        max_tokens=_DEFAULT_TOKENS if s.max_new_tokens is None else s.max_new_tokens,
        min_tokens=s.min_new_tokens,
        temperature=s.temperature,
        top_p=s.top_p,
        top_k=s.top_k,
        min_p=s.min_p,
        frequency_penalty=s.frequency_penalty,
        presence_penalty=s.presence_penalty,
        repetition_penalty=s.repetition_penalty,
        logit_bias=s.logit_bias,
        stop=s.stop,
        stop_token_ids=s.stop_token_ids,
        ignore_eos=s.ignore_eos,
        skip_special_tokens=s.skip_special_tokens,
        include_stop_str_in_output=s.no_stop_trim,
        n=s.n,
        json_schema=s.json_schema,
        regex=s.regex,
        seed=s.sampling_seed,
        logprobs=(top or 0) if logprobs else None,
        return_token_ids=True,
        cache_salt=body.cache_salt,
        routed_dp_rank=body.routed_dp_rank,
        data_parallel_rank=body.data_parallel_rank,
        disagg_prefill_dp_rank=body.disagg_prefill_dp_rank,
    )


def native_plan(
    planner: Planner, native: NativeBody, body: CompletionBody, card: ModelCard, call_id: str
) -> Plan:
    """The plan of `body`, which is `native` in OpenAI's terms, answered in SGLang's form. Raises BadParam."""
    plan = planner.completion(body, card, call_id)
    prompts = native.text if native.input_ids is None else native.input_ids
    many = isinstance(prompts, list) and not isinstance(prompts[0], int)
    # Its streams keep what they have said, too.
    check_kept_logprobs([sample.request for sample in plan.samples], whole=True)
    answer = NativeAnswer(plan.answer, native.rid or call_id, batch=many or len(plan.samples) > 1)
    return Plan(answer, plan.stream, include_usage=False)


#: Bytes of events that a stream may send for each token, on average. An event repeats all so far: where that
#: is more, events come for several tokens at once, and the bytes of a stream grow as its tokens and not as
#: their square.
EVENT_BYTES: Final = 32 * 2**10
#: Bytes that small events may leave over for large ones.
_MAX_CREDIT: Final = 2**20


class _SoFar:
    """The output of one sample so far, as JSON: each piece is encoded once."""

    __slots__ = ("credit", "ids", "logprobs", "text", "top")

    def __init__(self) -> None:
        self.text, self.ids, self.logprobs, self.top = (bytearray() for _ in range(4))
        self.credit = 0

    @property
    def nbytes(self) -> int:
        return len(self.text) + len(self.ids) + len(self.logprobs) + len(self.top)

    def add(self, piece: Piece) -> None:
        """Append what a piece brings."""
        self.text += _encode(piece.text)[1:-1]
        append_items(self.ids, piece.token_ids)
        append_items(self.logprobs, [(lp.logprob, lp.token, None) for lp in piece.logprobs])
        append_items(self.top, [[(value, token, None) for token, value in lp.top] for lp in piece.logprobs])

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

    def __init__(self, answer: Answer, rid: str | list[str], *, batch: bool) -> None:
        super().__init__(answer.shape, answer.choices, answer.tokenizer)
        self._rid = rid
        self._batch = batch
        self._so_far = [_SoFar() for _ in answer.choices]

    @property
    def repeated_bytes(self) -> int:
        """See `Answer.repeated_bytes`."""
        return 0

    def add(self, index: int, piece: Piece) -> None:
        """See `Answer.add`."""
        self._so_far[index].add(piece)
        if piece.finish is not None:
            choice = self.choices[index]
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
        """None: `add` keeps them in SGLang's form."""
        return {}

    def whole(self) -> Any:
        found = [self._one(i, choice) for i, choice in enumerate(self.choices)]
        return found if self._batch else found[0]

    def usage_chunk(self) -> Json:
        return {}

    def _one(self, index: int, choice: Choice) -> Json:
        sample, rid, so_far = choice.sample, self._rid, self._so_far[index]
        if isinstance(rid, list):
            rid = rid[choice.prompt] if choice.prompt < len(rid) else self.shape.id
        meta: Json = {
            "id": rid,
            "finish_reason": _finish(choice, sample.tokens),
            "prompt_tokens": len(sample.request.prompt),
            "completion_tokens": sample.tokens,
            "cached_tokens": sample.usage.decode_cached + sample.usage.prefill_cached,
        }
        if self.shape.logprobs:
            meta["input_token_logprobs"] = []
            meta["output_token_logprobs"] = _list(so_far.logprobs)
            meta["output_top_logprobs"] = _list(so_far.top)
        text = msgspec.Raw(b'"' + so_far.text + b'"')
        return {"text": text, "output_ids": _list(so_far.ids), "meta_info": meta}


def _finish(choice: Choice, tokens: int) -> Json | None:
    if choice.finish is None:
        return None
    if choice.finish is FinishReason.LENGTH:
        return {"type": "length", "length": tokens}
    return {"type": "stop", "matched": choice.stop_reason}
