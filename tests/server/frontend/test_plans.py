"""Bodies to requests: every limit at its edge, every field under every name, and what a prompt is made of."""

from __future__ import annotations

import itertools
import json
from typing import Any

import msgspec
import pytest
from frontend_rig import CHATML, make_tokenizer
from tokenizers.processors import TemplateProcessing

from segue.engine.request import FinishReason, Output, Request, SamplingParams
from segue.server.frontend.body_reader import USED_FIELDS, read_body
from segue.server.frontend.chat import MAX_TOOLS
from segue.server.frontend.generate import Sample
from segue.server.frontend.native import as_completion, native_plan, read_native
from segue.server.frontend.params import (
    MAX_GRAMMAR_CHARS,
    MAX_STOP_CHARS,
    MAX_STOPS,
    ModelCard,
    header_rank,
    waiting_order,
)
from segue.server.frontend.past_messages import MAX_MESSAGES, checked
from segue.server.frontend.plan import Plan, Planner
from segue.server.frontend.problems import BadParam, renamed
from segue.server.frontend.reply_parts import ReplyParser, ToolCall
from segue.server.frontend.request_fields import MAX_LOGPROBS, MAX_SAMPLES, BodyPart, ChatBody, CompletionBody
from segue.server.frontend.tokenizer import ModelTokenizer

VOCAB = 2000
CARD = ModelCard("tiny", 1000, VOCAB)
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
TEXT: dict[str, Any] = {"prompt": "hi"}
PLAIN = "{% for m in messages %}{{ m.content }}{% endfor %}"


def tool(name: str, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **more}}


def planned(tokenizer: ModelTokenizer, body: dict[str, Any]) -> Plan:
    kind: Any = ChatBody if "messages" in body else CompletionBody
    planner = Planner(tokenizer, today=lambda: 0)
    make: Any = planner.chat if kind is ChatBody else planner.completion
    plan: Plan = make(read_body(json.dumps(body).encode(), kind), CARD, "id")
    return plan


def requests(tokenizer: ModelTokenizer, body: dict[str, Any]) -> list[Request]:
    return [sample.request for sample in planned(tokenizer, body).samples]


def text_of(tokenizer: ModelTokenizer, sample: Sample, text: str, stop_token: int | None = None) -> str:
    """The text that a client gets of a whole answer with the tokens of `text`."""
    finish = FinishReason.LENGTH if stop_token is None else FinishReason.STOP
    ids = tokenizer.encode(text, special=False)
    return sample.feed(Output(request_id="r", token_ids=ids, finish=finish, stop_token=stop_token)).text


def sampled(tokenizer: ModelTokenizer, body: dict[str, Any]) -> SamplingParams:
    return requests(tokenizer, body)[0].sampling


# ---- limits ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("base", [CHAT, TEXT], ids=["chat", "text"])
@pytest.mark.parametrize(
    ("name", "lowest", "highest", "beyond"),
    [
        ("n", 1, MAX_SAMPLES, [0, MAX_SAMPLES + 1]),
        ("stop", ["a"], ["a"] * MAX_STOPS, [["a"] * (MAX_STOPS + 1), "", ["a", ""]]),
        ("stop", "a", "a" * MAX_STOP_CHARS, ["a" * (MAX_STOP_CHARS + 1)]),
        ("stop_token_ids", [0], [VOCAB - 1] * 128, [[VOCAB], [-1], [1] * (128 + 1)]),
        (
            "logit_bias",
            {"0": -100},
            {str(i + VOCAB - 1024): 100 for i in range(1024)},
            [
                {"-1": 1},
                {str(VOCAB): 1},
                {"1": 101},
                {"1": -101},
                {str(i): 1 for i in range(1024 + 1)},
            ],
        ),
        ("guided_regex", "a", "a" * MAX_GRAMMAR_CHARS, ["a" * (MAX_GRAMMAR_CHARS + 1)]),
        ("guided_choice", ["a"], ["b", "c"], [[]]),
        ("temperature", 0, 2, [-0.1, 2.1]),
        ("top_p", 0.001, 1, [0, -1, 1.1]),
        ("top_k", -1, VOCAB, [-2, VOCAB + 1]),
        ("min_p", 0, 1, [-0.1, 1.1]),
        ("presence_penalty", -2, 2, [-2.1, 2.1]),
        ("frequency_penalty", -2, 2, [-2.1, 2.1]),
        ("repetition_penalty", 0.001, 10, [0, -1, 10.1]),
        ("max_tokens", 1, 300, [0, -1, 1000]),
        ("min_tokens", 0, 300, [-1, 301]),
        ("routed_dp_rank", 0, 2**16 - 1, [-1, 2**16]),
        ("data_parallel_rank", 0, 2**16 - 1, [-1, 2**16]),
        ("disagg_prefill_dp_rank", 0, 2**16 - 1, [-1, 2**16]),
    ],
)
def test_what_is_at_a_limit_is_taken_and_what_is_beyond_it_is_refused_by_name(
    tokenizer: ModelTokenizer, base: dict[str, Any], name: str, lowest: Any, highest: Any, beyond: list[Any]
) -> None:
    room = {"max_tokens": 300} if name == "min_tokens" else {}
    for value in (lowest, highest):
        assert requests(tokenizer, base | room | {name: value})
    for value in beyond:
        with pytest.raises(BadParam) as caught:
            requests(tokenizer, base | room | {name: value})
        assert caught.value.param == name, value


def test_prompts_samples_messages_tools_and_alternatives_are_bounded(tokenizer: ModelTokenizer) -> None:
    half = MAX_SAMPLES // 2
    assert len(requests(tokenizer, {"prompt": [[5]] * half, "n": 2})) == MAX_SAMPLES
    assert len(requests(tokenizer, {"prompt": ["a"] * MAX_SAMPLES})) == MAX_SAMPLES
    for body in ({"prompt": [[5]] * (half + 1), "n": 2}, {"prompt": ["a"] * (MAX_SAMPLES + 1)}):
        with pytest.raises(BadParam, match=f"at most {MAX_SAMPLES}"):
            requests(tokenizer, body)
    message = {"role": "user", "content": ""}
    assert len(checked([message] * MAX_MESSAGES)) == MAX_MESSAGES
    with pytest.raises(BadParam, match="messages: at most"):
        checked([message] * (MAX_MESSAGES + 1))
    with pytest.raises(BadParam, match="tools: at most"):
        requests(tokenizer, CHAT | {"tools": [tool("f")] * (MAX_TOOLS + 1), "tool_choice": "none"})
    assert requests(tokenizer, CHAT | {"tools": [tool("f")] * MAX_TOOLS, "tool_choice": "none"})
    for body in (TEXT | {"logprobs": MAX_LOGPROBS}, CHAT | {"logprobs": True, "top_logprobs": MAX_LOGPROBS}):
        assert sampled(tokenizer, body).logprobs == MAX_LOGPROBS
    for body in (TEXT | {"logprobs": -1}, CHAT | {"logprobs": True, "top_logprobs": MAX_LOGPROBS + 1}):
        with pytest.raises(BadParam):
            requests(tokenizer, body)


def test_the_header_s_rank_has_sixteen_bits_as_the_body_s() -> None:
    assert (header_rank("0"), header_rank("65535")) == (0, 65535)
    for text in ("100000", "1.0", " 1", "+1", "0x1"):
        with pytest.raises(BadParam):
            header_rank(text)


# ---- fields ------------------------------------------------------------------------------------------


def test_a_seed_is_the_client_s_also_0_and_each_sample_has_one_that_fits(tokenizer: ModelTokenizer) -> None:
    for base in (CHAT, TEXT):
        assert sampled(tokenizer, base | {"seed": 0}).seed == 0
        seeds = [r.sampling.seed for r in requests(tokenizer, base | {"seed": 2**63 - 1, "n": 3})]
        assert seeds == [2**63 - 1, 0, 1]
        assert sampled(tokenizer, base | {"seed": -1}).seed == 2**63 - 1
        drawn = {sampled(tokenizer, base).seed for _ in range(4)}
        assert len(drawn) == 4


@pytest.mark.parametrize(
    ("body", "logprobs", "prompt_logprobs"),
    [
        (CHAT, None, None),
        (CHAT | {"logprobs": False}, None, None),
        (CHAT | {"logprobs": True}, 0, None),
        (CHAT | {"logprobs": True, "top_logprobs": 0}, 0, None),
        (CHAT | {"logprobs": True, "top_logprobs": 3}, 3, None),
        (TEXT, None, None),
        (TEXT | {"logprobs": 0}, 0, None),
        (TEXT | {"logprobs": 2}, 2, None),
        (TEXT | {"logprobs": 2, "echo": True}, 2, 2),
        (TEXT | {"echo": True}, None, None),
    ],
)
def test_which_log_probabilities_are_computed(
    tokenizer: ModelTokenizer, body: dict[str, Any], logprobs: int | None, prompt_logprobs: int | None
) -> None:
    params = sampled(tokenizer, body)
    assert (params.logprobs, params.prompt_logprobs) == (logprobs, prompt_logprobs)
    assert planned(tokenizer, body).answer.shape.logprobs is (logprobs is not None)


@pytest.mark.parametrize(
    ("extra", "kind", "text"),
    [
        ({"response_format": {"type": "text"}}, None, None),
        ({"response_format": {"type": "json_object"}}, "json_object", ""),
        ({"guided_regex": "a+"}, "regex", "a+"),
        ({"guided_choice": ["a.b", "c"]}, "regex", r"(a\.b)|(c)"),
        ({"structured_outputs": {"grammar": "start: A"}}, "lark", "start: A"),
        ({"guided_grammar": "start: A"}, "lark", "start: A"),
        ({"structured_outputs": {"json": {"type": "integer"}}}, "json_schema", '{"type": "integer"}'),
        ({"structured_outputs": {"regex": "a+"}}, "regex", "a+"),
        ({"structured_outputs": {"choice": ["a.b"]}}, "regex", r"(a\.b)"),
        ({"structured_outputs": {"json_object": True}}, "json_object", ""),
        ({"structured_outputs": {"json_object": False}}, None, None),
        ({"structured_outputs": {}}, None, None),
        ({"guided_json": '{"type":   "integer"}'}, "json_schema", '{"type": "integer"}'),
        ({"json_schema": {"type": "null"}}, "json_schema", '{"type": "null"}'),
        ({"json_schema": True}, "json_schema", "{}"),
        ({"guided_json": "true"}, "json_schema", "{}"),
        ({"guided_json": {}}, "json_schema", "{}"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "any", "schema": True}}},
            "json_schema",
            "{}",
        ),
        ({"regex": "b"}, "regex", "b"),
    ],
)
def test_each_name_of_a_constraint_is_the_constraint(
    tokenizer: ModelTokenizer, extra: dict[str, Any], kind: str | None, text: str | None
) -> None:
    for base in (CHAT, TEXT):
        grammar = sampled(tokenizer, base | extra).grammar
        assert (grammar and grammar.kind, grammar and grammar.text) == (kind, text)


@pytest.mark.parametrize("schema", [False, "false", "[1]", "3"])
def test_a_schema_that_admits_nothing_or_is_none_is_refused_by_name(
    tokenizer: ModelTokenizer, schema: str | bool
) -> None:
    with pytest.raises(BadParam, match="guided_json"):
        requests(tokenizer, TEXT | {"guided_json": schema})


def test_two_constraints_are_one_too_many_also_where_one_is_a_forced_call(tokenizer: ModelTokenizer) -> None:
    forced = {"tools": [tool("f")], "tool_choice": "required"}
    for extra in (
        forced | {"guided_regex": "a"},
        {"guided_regex": "a", "structured_outputs": {"json_object": True}},
        {"response_format": {"type": "json_object"}, "regex": "a"},
    ):
        with pytest.raises(BadParam):
            requests(tokenizer, CHAT | extra)


def test_how_text_is_shown_and_ranks_are_asked_for(tokenizer: ModelTokenizer) -> None:
    for base in (CHAT, TEXT):
        ranks = requests(tokenizer, base | {"routed_dp_rank": 0, "data_parallel_rank": 5})[0].ranks
        assert ranks.routed_dp_rank == 0, "the newer name, also where it says 0"
        assert sampled(tokenizer, base | {"top_k": -1}).top_k == 0
        for asked, shown in ((None, False), (True, False), (False, True)):
            (sample,) = planned(tokenizer, base | {"skip_special_tokens": asked, "stop": "x"}).samples
            assert text_of(tokenizer, sample, "b<|im_start|>axc") == ("b<|im_start|>a" if shown else "ba")
        for asked in (None, True, False):
            (sample,) = planned(tokenizer, base | {"include_stop_str_in_output": asked}).samples
            [last] = tokenizer.encode("b", special=False)
            assert text_of(tokenizer, sample, "ab", stop_token=last) == ("ab" if asked else "a")
        usage = [
            planned(tokenizer, base | {"stream": True, "stream_options": options}).include_usage
            for options in (None, {}, {"include_usage": False}, {"include_usage": True})
        ]
        assert usage == [False, False, False, True]
        for include, continuous in itertools.product((None, False, True), repeat=2):
            options = {"include_usage": include, "continuous_usage_stats": continuous}
            plan = planned(tokenizer, base | {"stream": True, "stream_options": options})
            assert plan.answer.shape.continuous_usage is bool(include and continuous), "as in vLLM"


@pytest.mark.parametrize(
    ("key", "user", "expected"),
    [("key 1", "alice", "key 1"), ("key 1", None, "key 1"), ("", None, ""), ("", "", "")],
)
def test_who_waits_is_the_key_s_owner_and_only_without_one_the_user(
    key: str, user: str | None, expected: str
) -> None:
    assert waiting_order(CompletionBody(prompt="x", user=user), key, trusted=True) == (0, expected)


def test_users_are_told_apart_and_not_shown_and_a_priority_has_32_bits() -> None:
    names = ["a-user-with-a-long-name", "a-user-with-a-long-name-2", "Alice", "alice"]
    tenants = [waiting_order(CompletionBody(prompt="x", user=name), "", trusted=True)[1] for name in names]
    assert len(set(tenants)) == len(names)
    assert not any(tenant in name for tenant in tenants for name in names)
    for priority in (-(2**31), 2**31 - 1):
        assert waiting_order(CompletionBody(prompt="x", priority=priority), "", trusted=True)[0] == priority
    for priority in (-(2**31) - 1, 2**31):
        with pytest.raises(BadParam, match=r"^priority: from -2147483648 to 2147483647, not "):
            read_body(json.dumps(TEXT | {"priority": priority}).encode(), CompletionBody)


# ---- SGLang's own endpoint ---------------------------------------------------------------------------

#: Each field of `sampling_params`: a value, and what it is in OpenAI's terms.
NATIVE: dict[str, tuple[Any, str, Any]] = {
    "max_new_tokens": (9, "max_tokens", 9),
    "min_new_tokens": (2, "min_tokens", 2),
    "temperature": (0.5, "temperature", 0.5),
    "top_p": (0.25, "top_p", 0.25),
    "top_k": (7, "top_k", 7),
    "min_p": (0.125, "min_p", 0.125),
    "frequency_penalty": (0.75, "frequency_penalty", 0.75),
    "presence_penalty": (-0.75, "presence_penalty", -0.75),
    "repetition_penalty": (1.5, "repetition_penalty", 1.5),
    "logit_bias": ({"5": 3}, "logit_bias", {5: 3}),
    "stop": (["x"], "stop", ["x"]),
    "stop_token_ids": ([5], "stop_token_ids", [5]),
    "ignore_eos": (True, "ignore_eos", True),
    "skip_special_tokens": (False, "skip_special_tokens", False),
    "no_stop_trim": (True, "include_stop_str_in_output", True),
    "n": (2, "n", 2),
    "json_schema": ("{}", "json_schema", "{}"),
    "regex": ("a", "regex", "a"),
    "sampling_seed": (0, "seed", 0),
}


SCORED = {"text": "a", "return_logprob": True}


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"text": []}, "text", "text: the prompt is empty"),
        ({"input_ids": []}, "input_ids", "input_ids: the prompt is empty"),
        ({"input_ids": [[]]}, "input_ids", "input_ids: the prompt is empty"),
        (
            {"text": "a", "sampling_params": {"max_new_tokens": -1}},
            "max_new_tokens",
            "max_new_tokens: at lea",
        ),
        (
            {"text": "a", "sampling_params": {"max_new_tokens": 10**6}},
            "max_new_tokens",
            "the model's context",
        ),
        (
            {"text": "a", "sampling_params": {"min_new_tokens": -1}},
            "min_new_tokens",
            "^min_new_tokens: at least 0, not -1",
        ),
        (SCORED | {"top_logprobs_num": 21}, "top_logprobs_num", "top_logprobs_num: from 0 to 20"),
        (SCORED | {"top_logprobs_num": -1}, "top_logprobs_num", "from 0 to 20, not -1"),
        (SCORED | {"top_logprobs_num": [1, 2]}, "top_logprobs_num", "one for each of 1 prompts, not 2"),
        (SCORED | {"text": ["a", "b"], "logprob_start_len": [0]}, "logprob_start_len", "each of 2 prompts"),
        (
            SCORED | {"logprob_start_len": 1},
            "logprob_start_len",
            "at most 0 with a prompt of 1 tokens, not 1",
        ),
        (SCORED | {"logprob_start_len": -2}, "logprob_start_len", "at least -1, not -2"),
        (SCORED | {"token_ids_logprob": [1]}, "token_ids_logprob", "not supported"),
        (
            SCORED | {"top_logprobs_num": 20, "sampling_params": {"n": 128, "max_new_tokens": 400}},
            "top_logprobs_num",
            "lower n, max_new_tokens or the number of alternatives$",  # its streams keep them, too
        ),
    ],
)
def test_what_generate_refuses_is_named_as_its_clients_name_it(
    tokenizer: ModelTokenizer, body: Any, param: str, words: str
) -> None:
    def planned() -> None:
        asked = read_native(json.dumps(body).encode())
        native_plan(Planner(tokenizer), asked, as_completion(asked), CARD, "id")

    with pytest.raises(BadParam, match=words) as caught:
        planned()
    assert caught.value.param == param


def test_an_error_names_all_fields_as_the_asked_api_does() -> None:
    error = BadParam("logprobs: too many; lower n or max_tokens, of max_tokens", "logprobs", "code")
    other = renamed(error, {"max_tokens": "max_output_tokens", "logprobs": "top_logprobs"})
    assert other.info.text == "top_logprobs: too many; lower n or max_output_tokens, of max_output_tokens"
    assert (other.param, other.openai_code) == ("top_logprobs", "code")


def native(**body: Any) -> CompletionBody:
    return as_completion(read_native(json.dumps({"text": "hi", **body}).encode()))


def test_a_native_body_may_have_a_cache_salt() -> None:
    assert (native().cache_salt, native(cache_salt="a").cache_salt) == (None, "a")


@pytest.mark.parametrize("name", NATIVE)
def test_each_of_sglang_s_sampling_parameters_is_openai_s_of_another_name(name: str) -> None:
    value, other, expected = NATIVE[name]
    plain, asked = native(), native(sampling_params={name: value})
    changed = {
        field for field in CompletionBody.__struct_fields__ if getattr(plain, field) != getattr(asked, field)
    }
    assert changed - ({"echo"} if asked.max_tokens == 0 else set()) == {other}
    assert getattr(asked, other) == expected


def test_the_table_has_all_of_them_and_the_rest_of_the_body_is_passed_on() -> None:
    assert set(NATIVE) == {
        row.names[BodyPart.SAMPLING_PARAMS] for row in USED_FIELDS if BodyPart.SAMPLING_PARAMS in row.names
    }
    assert (native().max_tokens, native(sampling_params={"max_new_tokens": 0}).max_tokens) == (128, 0)
    for name in ("routed_dp_rank", "data_parallel_rank", "disagg_prefill_dp_rank"):
        assert getattr(native(**{name: 3}), name) == 3
    for asked, top, expected in (
        (True, None, 0),
        (True, 4, 4),
        ([True], [5], 5),
        ([False], [5], None),
        (None, 4, None),
        (False, 4, None),
    ):
        assert native(return_logprob=asked, top_logprobs_num=top).logprobs == expected
    two = {"text": ["a", "b"], "return_logprob": [False, True], "top_logprobs_num": [5, 1]}
    assert (native(**two).logprobs, native(**two).echo) == (1, False)
    assert native(**two, logprob_start_len=[0, -1]).echo is False, "nothing of the first is shown"
    assert native(**two, logprob_start_len=0).echo
    assert native(stream=True).stream


@pytest.mark.parametrize(
    ("body", "many"),
    [
        ({"text": "a"}, False),
        ({"text": ["a"]}, True),
        ({"text": ["a", "b"]}, True),
        ({"input_ids": [5, 6]}, False),
        ({"input_ids": [[5, 6]]}, True),
        ({"text": "a", "sampling_params": {"n": 2}}, True),
    ],
)
def test_a_list_is_answered_by_a_list_also_of_one(
    tokenizer: ModelTokenizer, body: dict[str, Any], many: bool
) -> None:
    asked = read_native(json.dumps(body).encode())
    plan = native_plan(Planner(tokenizer), asked, as_completion(asked), CARD, "id")
    answer: Any = plan.answer.whole()
    assert isinstance(answer, list) is many
    assert not plan.include_usage


# ---- prompts and tools -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def with_bos() -> ModelTokenizer:
    """A tokenizer that begins each text with a token, and that a trainer has left cut and padded."""
    hf = make_tokenizer()
    fast = hf.backend_tokenizer
    bos = ("<|endoftext|>", fast.token_to_id("<|endoftext|>"))
    fast.post_processor = TemplateProcessing(single=f"{bos[0]} $A", special_tokens=[bos])
    fast.enable_truncation(8)
    fast.enable_padding(length=16)
    return ModelTokenizer(hf)


@pytest.mark.parametrize("times", [1, 12, 400])
def test_a_text_is_encoded_whole_and_begins_as_the_model_expects_if_that_is_asked_for(
    with_bos: ModelTokenizer, times: int
) -> None:
    text = "the answer is " * times
    plain, special = (with_bos.encode(text, special=on) for on in (False, True))
    assert special == [0, *plain]
    assert with_bos.decode(plain, skip_special=True) == text


def test_a_template_writes_the_special_tokens_itself_and_a_completion_has_them(
    with_bos: ModelTokenizer,
) -> None:
    for text in ("hi", "hi " * 100):
        (request,) = requests(with_bos, {"messages": [{"role": "user", "content": text}]})
        assert 0 not in request.prompt
        for special, first in ((None, True), (True, True), (False, False)):
            (request,) = requests(with_bos, {"prompt": text, "add_special_tokens": special})
            assert (request.prompt[0] == 0) is first


def shown(tokenizer: ModelTokenizer, body: dict[str, Any]) -> str:
    (request,) = requests(tokenizer, body)
    return tokenizer.decode(request.prompt, skip_special=False)


def test_what_a_client_says_of_the_template_reaches_it(tokenizer: ModelTokenizer) -> None:
    moody = ModelTokenizer(make_tokenizer(template="{{ mood }}" + CHATML))
    assert shown(moody, CHAT | {"chat_template_kwargs": {"mood": "gay"}}).startswith("gay")
    head = "<|im_start|>user\nhi"
    assert shown(tokenizer, CHAT) == f"{head}<|im_end|>\n<|im_start|>assistant\n"
    assert shown(tokenizer, CHAT | {"add_generation_prompt": False}) == f"{head}<|im_end|>\n"
    goes_on = {"messages": [*CHAT["messages"], {"role": "assistant", "content": "the"}]}
    assert shown(tokenizer, goes_on | {"continue_final_message": True}).endswith("assistant\nthe")


def test_a_developer_is_the_system_of_templates_that_know_no_developer(tokenizer: ModelTokenizer) -> None:
    said = {"messages": [{"role": "developer", "content": "Be brief."}, *CHAT["messages"]]}
    assert shown(tokenizer, said).startswith("<|im_start|>system\nBe brief.<|im_end|>")
    knows = ModelTokenizer(make_tokenizer(template=PLAIN + "{# developer #}{{ messages[0].role }}"))
    assert shown(knows, said).endswith("developer")


def test_a_model_with_a_template_of_its_own_for_tools_is_parsed_by_that_one() -> None:
    hf = make_tokenizer()
    hf.chat_template = {"default": CHATML, "tool_use": "[TOOL_CALLS]" + PLAIN}
    parser = planned(ModelTokenizer(hf), CHAT | {"tools": [tool("f")]}).answer.choices[0].parser
    assert parser is not None
    parts = [*parser.feed("[TOOL_CALLS]f[ARGS]{}"), *parser.finish()]
    assert [type(part) for part in parts] == [ToolCall]


def test_tools_are_shown_without_nulls_and_the_one_that_is_named_is_forced(tokenizer: ModelTokenizer) -> None:
    schemas = {name: {"type": "object", "title": name} for name in ("get_all", "get", "other")}
    tools = [tool(name, parameters=schema) for name, schema in schemas.items()]
    named = {"tools": tools, "tool_choice": {"type": "function", "function": {"name": "get"}}}
    grammar = sampled(tokenizer, CHAT | named).grammar
    assert grammar is not None
    assert json.loads(grammar.text) == schemas["get"]
    grammar = sampled(tokenizer, CHAT | {"tools": tools, "tool_choice": "required"}).grammar
    assert grammar is not None
    items = json.loads(grammar.text)
    assert items["minItems"] == 1
    for call, (name, schema) in zip(items["items"]["anyOf"], schemas.items(), strict=True):
        assert call["properties"] == {"name": {"const": name}, "arguments": schema}
        assert call["additionalProperties"] is False
        assert call["required"] == ["name", "arguments"]
    text = shown(tokenizer, CHAT | {"tools": [tool("f")]})
    assert '"name": "f"' in text
    assert "null" not in text
    assert '"description": ""' in text


@pytest.mark.parametrize("template", ["[TOOL_CALLS]", "<|python_tag|>", "<tool_call>"])
@pytest.mark.parametrize("parallel", [True, False])
def test_marks_of_calls_that_are_special_tokens_are_decoded_and_stop_strings_stay(
    template: str, parallel: bool
) -> None:
    tokenizer = ModelTokenizer(make_tokenizer(template=template + PLAIN))
    asked = {"tools": [tool("f")], "parallel_tool_calls": parallel, "stop": "x", "n": 2}
    plan = planned(tokenizer, CHAT | asked)
    parsers: list[ReplyParser] = []
    for choice in plan.answer.choices:
        parser = choice.parser
        assert parser is not None
        parsers.append(parser)
        special = template != "<tool_call>"
        assert text_of(tokenizer, choice.sample, "b[TOOL_CALLS]axc") == (
            "b[TOOL_CALLS]a" if special else "ba"
        )
    assert parsers[0] is not parsers[1], "each sample has one of its own"


@pytest.mark.parametrize(
    ("body", "echo"),
    [
        ({"prompt": "the answer"}, ["the answer"]),
        ({"prompt": ["the", "answer"]}, ["the", "answer"]),
        ({"prompt": ["the"]}, ["the"]),
    ],
)
def test_a_prompt_is_repeated_as_it_was_sent_and_of_token_ids_as_their_text(
    tokenizer: ModelTokenizer, body: dict[str, Any], echo: list[str]
) -> None:
    for asked in (body, {"prompt": [tokenizer.encode(text, special=False) for text in echo]}):
        answer: Any = planned(tokenizer, asked | {"echo": True, "max_tokens": 0}).answer.whole()
        assert [choice["text"] for choice in answer["choices"]] == echo
    ids = tokenizer.encode("the<|im_end|>", special=False)
    for prompt in (ids, [ids]):
        answer = planned(tokenizer, {"prompt": prompt, "echo": True, "max_tokens": 0}).answer.whole()
        assert [choice["text"] for choice in answer["choices"]] == ["the<|im_end|>"]


def test_a_plan_is_one_to_the_next_and_shares_no_list(tokenizer: ModelTokenizer) -> None:
    """Bans and stop strings of one client reach no other's request."""
    planner = Planner(tokenizer, today=lambda: 0)
    body = msgspec.json.decode(json.dumps(TEXT | {"logit_bias": {"5": 1}, "n": 2}), type=CompletionBody)
    found = [s.request for _ in range(2) for s in planner.completion(body, CARD, "id").samples]
    assert len({r.request_id for r in found}) == 4
    (other,) = planner.completion(CompletionBody(prompt="hi"), CARD, "id").samples
    assert other.request.sampling.logit_bias == {}
