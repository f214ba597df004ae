"""`segue serve` and its parts, tiny model: SIGTERM, a full queue, the openai client, GGUF, other hosts."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx2 as httpx
import openai
import psutil
import pytest
import traffic
from served import Served, refused
from tiny_model import TEMPLATE, VOCAB

from ports import HeldPort

pytestmark = [pytest.mark.timeout(240)]

SMALL = ("--dtype", "float32", "--kv-gib", "0.05", "--threads-per-worker", "1")
SERVE = (*SMALL, "--served-model-name", "tiny", "--port", "0")
MAX_QUEUE = 4
#: The token that is `<tool_call>` here.
MARK = 259
#: Every answer that it allows is short, so that random weights end it too.
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "sunny": {"type": "boolean"}},
    "required": ["city", "sunny"],
    "additionalProperties": False,
}


def streams(url: str, asks: list[traffic.Ask]) -> list[traffic.Result]:
    async def all_of_them() -> list[traffic.Result]:
        return list(await asyncio.gather(*(traffic.stream(url, "tiny", ask) for ask in asks)))

    return asyncio.run(all_of_them())


# ---- the end ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_sigterm_lets_open_streams_end(tiny: Path) -> None:
    with Served("--model", str(tiny), *SERVE, "--drain-s", "120") as served:
        family = served.family()

        async def ended_meanwhile(asks: list[traffic.Ask]) -> list[traffic.Result] | None:
            begun = [asyncio.Event() for _ in asks]
            running = [
                asyncio.create_task(traffic.stream(served.url, "tiny", ask, within_s=120, first=first))
                for ask, first in zip(asks, begun, strict=True)
            ]
            await asyncio.gather(*(first.wait() for first in begun))
            if any(task.done() for task in running):  # before the last one began
                await asyncio.gather(*running)
                return None
            served.process.terminate()
            return list(await asyncio.gather(*running))

        for count in (300, 1000, 3000):  # as long as it takes for all of them to be open at once
            asks = traffic.asks(3, 6, vocab=VOCAB - 8, longest=40, max_tokens=count)
            wanted = {r.ask: r.tokens for r in streams(served.url, asks)}
            if (results := asyncio.run(ended_meanwhile(asks))) is not None:
                break
        assert results is not None, "nothing was ever left to drain"
        assert [(r.error, r.text) for r in results if r.error] == []
        assert {r.ask: r.tokens for r in results} == wanted
        assert all(len(tokens) == count for tokens in wanted.values())
        assert served.process.wait(60) == 0
        _, alive = psutil.wait_procs(family[1:], timeout=30)
        assert alive == []
        served.kill()  # it has ended; nobody needs to ask it any more


# ---- a server that has little room -----------------------------------------------------------------


@pytest.fixture(scope="module")
def served(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """1P1D of a model with a chat template; at most `MAX_QUEUE` requests at once."""
    folder = tmp_path_factory.mktemp("chat") / "model"
    shutil.copytree(tiny, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    words = folder / "tokenizer.json"
    words.write_text(words.read_text().replace(f"<|{MARK}|>", "<tool_call>"))
    with Served("--model", str(folder), *SERVE, "--max-queue", str(MAX_QUEUE)) as made:
        yield made


@pytest.fixture
def client(served: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=60) as made:
        yield made


@pytest.mark.slow
def test_a_full_server_says_when_to_come_back_and_serves_then(served: Served, client: openai.OpenAI) -> None:
    body = {"model": "tiny", "prompt": [1, 2, 3], "max_tokens": 2}

    async def wave(asks: list[traffic.Ask]) -> tuple[list[httpx.Response], list[traffic.Result]] | None:
        """Nothing if there was room again before everybody had asked."""
        begun = [asyncio.Event() for _ in asks]
        running = [
            asyncio.create_task(traffic.stream(served.url, "tiny", ask, within_s=120, first=first))
            for ask, first in zip(asks, begun, strict=True)
        ]
        await asyncio.gather(*(first.wait() for first in begun))
        async with httpx.AsyncClient(timeout=60) as http:
            posts = (http.post(f"{served.url}/v1/completions", json=body) for _ in range(8))
            refused = list(await asyncio.gather(*posts))
        one = asyncio.to_thread(client.completions.create, model="tiny", prompt="x", max_tokens=2)
        [answer] = await asyncio.gather(one, return_exceptions=True)
        full = not any(task.done() for task in running)
        results = list(await asyncio.gather(*running))
        if not full:
            return None
        assert isinstance(answer, openai.RateLimitError)
        assert "in flight already" in str(answer)
        return refused, results

    for count in (1000, 2000, 4000):
        asks = traffic.asks(4, MAX_QUEUE, vocab=VOCAB - 8, longest=20, max_tokens=count)
        if (seen := asyncio.run(wave(asks))) is not None:
            break
    assert seen is not None, "it was never full for long enough"
    refused, results = seen
    assert [answer.status_code for answer in refused] == [429] * 8
    assert all(int(answer.headers["retry-after"]) >= 1 for answer in refused)
    assert {answer.json()["error"]["code"] for answer in refused} == {"OUT_OF_CAPACITY"}
    assert [(r.error, len(r.tokens)) for r in results] == [("", count)] * MAX_QUEUE
    assert httpx.post(f"{served.url}/v1/completions", json=body, timeout=60).status_code == 200
    assert httpx.get(f"{served.url}/ready", timeout=60).status_code == 200
    served.at_rest()


# ---- the openai client -----------------------------------------------------------------------------


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def test_several_answers_to_one_request(client: openai.OpenAI) -> None:
    made = client.chat.completions.create(
        model="tiny", messages=[user("hi")], n=2, max_tokens=12, seed=3, temperature=1.5
    )
    assert [choice.index for choice in made.choices] == [0, 1]
    assert made.choices[0].message.content != made.choices[1].message.content
    assert made.usage is not None
    assert made.usage.completion_tokens > 12


def test_logprobs(client: openai.OpenAI) -> None:
    made = client.chat.completions.create(
        model="tiny", messages=[user("hi")], max_tokens=6, temperature=0, logprobs=True, top_logprobs=3
    )
    logprobs = made.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert len(logprobs.content) == 6
    for token in logprobs.content:
        assert len(token.top_logprobs) == 3
        assert token.logprob == token.top_logprobs[0].logprob <= 0, "greedy takes the likeliest"
        ranked = [other.logprob for other in token.top_logprobs]
        assert ranked == sorted(ranked, reverse=True)


@pytest.mark.parametrize("stream", [False, True])
def test_a_schema_is_kept_by_random_weights(client: openai.OpenAI, stream: bool) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "weather", "schema": SCHEMA, "strict": True}}
    common: dict[str, Any] = {
        "model": "tiny",
        "messages": [user("weather?")],
        "max_tokens": 400,
        "response_format": form,
        "seed": 1,
    }
    if stream:
        chunks = [c.choices[0] for c in client.chat.completions.create(**common, stream=True) if c.choices]
        text, finish = "".join(c.delta.content or "" for c in chunks), chunks[-1].finish_reason
    else:
        [choice] = client.chat.completions.create(**common).choices
        text, finish = choice.message.content, choice.finish_reason
    assert finish == "stop"
    answer = json.loads(text)
    assert answer["city"] in ("Paris", "Rome")
    assert isinstance(answer["sunny"], bool)
    assert len(answer) == 2


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_a_round_of_tool_calls(client: openai.OpenAI, choice: Any) -> None:
    tool = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
    messages: list[Any] = [user("weather?")]
    common: dict[str, Any] = {"model": "tiny", "tools": [tool], "seed": 2}
    [asked] = client.chat.completions.create(
        **common, messages=messages, max_tokens=800, tool_choice=choice
    ).choices
    assert asked.message.tool_calls
    for call in asked.message.tool_calls:
        assert call.function.name == "weather"
        assert json.loads(call.function.arguments)["city"] in ("Paris", "Rome")
        assert call.id
    messages.append(asked.message.model_dump(exclude_none=True))
    messages += [
        {"role": "tool", "tool_call_id": call.id, "content": "sun"} for call in asked.message.tool_calls
    ]
    [told] = client.chat.completions.create(
        **common, messages=messages, max_tokens=8, tool_choice="none"
    ).choices
    assert told.message.content
    assert not told.message.tool_calls


def test_a_strict_tools_arguments_fit_where_the_model_decides_to_call(client: openai.OpenAI) -> None:
    """A bias opens the calls of random weights. What they write then is a call with `strict` only."""
    for strict in (True, False):
        function: Any = {"name": "weather", "parameters": SCHEMA, "strict": strict}
        [choice] = client.chat.completions.create(
            model="tiny",
            messages=[user("weather?")],
            tools=[{"type": "function", "function": function}],
            max_tokens=300,
            seed=2,
            logit_bias={str(MARK): 100},
        ).choices
        calls = [call for call in choice.message.tool_calls or [] if call.type == "function"]
        cities = {json.loads(call.function.arguments)["city"] for call in calls}
        assert bool(cities) is strict
        assert cities <= {"Paris", "Rome"}


@pytest.mark.slow
def test_a_round_of_responses_and_of_messages(client: openai.OpenAI) -> None:
    """The grammar forces the calls, so that random weights make them."""
    tool: Any = {"type": "function", "name": "weather", "parameters": SCHEMA, "strict": True}
    common: dict[str, Any] = {"model": "tiny", "tools": [tool], "extra_body": {"seed": 2}}
    made = client.responses.create(**common, input="weather?", tool_choice="required", max_output_tokens=800)
    calls = [item for item in made.output if item.type == "function_call"]
    assert calls
    assert json.loads(calls[0].arguments)["city"] in ("Paris", "Rome")
    told: list[Any] = [{"role": "user", "content": "weather?"}]
    told += [item.model_dump(exclude_none=True) for item in made.output]
    told += [{"type": "function_call_output", "call_id": call.call_id, "output": "sun"} for call in calls]
    with client.responses.stream(**common, input=told, tool_choice="none", max_output_tokens=8) as stream:
        for event in stream:
            last = event.type
        assert last in ("response.completed", "response.incomplete")
    url = str(client.base_url).removesuffix("/v1/")
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as claude:
        shown: Any = [{"name": "weather", "input_schema": SCHEMA}]
        ask: Any = [{"role": "user", "content": "weather?"}]
        message = claude.messages.create(
            model="tiny",
            max_tokens=800,
            messages=ask,
            tools=shown,
            # Random weights without a seed could make calls until the tokens end.
            tool_choice={"type": "any", "disable_parallel_tool_use": True},
        )
        assert message.stop_reason == "tool_use"
        uses = [block for block in message.content if block.type == "tool_use"]
        assert uses[0].input["city"] in ("Paris", "Rome")
        ask += [{"role": "assistant", "content": [block.model_dump() for block in uses]}]
        results = [{"type": "tool_result", "tool_use_id": use.id, "content": "sun"} for use in uses]
        ask += [{"role": "user", "content": results}]
        none: Any = {"type": "none"}
        with claude.messages.stream(
            model="tiny", max_tokens=8, messages=ask, tools=shown, tool_choice=none
        ) as streamed:
            assert streamed.get_final_message().stop_reason in ("max_tokens", "end_turn")


# ---- models ----------------------------------------------------------------------------------------


def write_gguf(folder: Path, path: Path) -> None:
    """The llama model in `folder` as a GGUF file, its weights as they are."""
    import gguf
    from safetensors.numpy import load_file
    from tokenizers import pre_tokenizers

    config = json.loads((folder / "config.json").read_text())
    weights = load_file(folder / "model.safetensors")
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    # A byte-level tokenizer must have one merge: it takes the place of the last special token.
    tokens = [*alphabet, *(f"<|{i}|>" for i in range(256, VOCAB - 1)), "ĠĠ"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_rope_freq_base((config.get("rope_parameters") or config)["rope_theta"])
    writer.add_rope_dimension_count(config["hidden_size"] // heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(VOCAB)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * 256 + [3] * (VOCAB - 257) + [1])
    writer.add_token_merges(["Ġ Ġ"])
    writer.add_bos_token_id(256)
    writer.add_eos_token_id(257)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    for name, tensor in weights.items():
        for part, count in (("q_proj", heads), ("k_proj", kv_heads)):
            if part in name:  # the two halves of each head's rotation lie interleaved in a GGUF file
                halves = tensor.reshape(count, 2, tensor.shape[0] // count // 2, -1)
                tensor = halves.swapaxes(1, 2).reshape(tensor.shape)
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def generated(folder: Path, prompts: list[list[int]], count: int) -> list[list[int]]:
    """The tokens that transformers generates for these prompts: greedy, float32."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    outputs = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        made = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=count,
            min_new_tokens=count,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        outputs.append(made[0, len(prompt) :].tolist())
    return outputs


@pytest.mark.soak
def test_a_gguf_file_gives_the_tokens_of_the_folder_it_came_from(tiny: Path, tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(tiny, path)
    prompts = [[(7 * i + k) % 250 for i in range(n)] for k, n in enumerate((1, 5, 17, 130, 700))]
    wanted = generated(tiny, prompts, 16)
    more = ("--prefill", "2", "--decode", "2", "--transport", "tcp", "--cache", str(tmp_path / "cache"))
    with Served("--model", str(path), *SERVE, *more) as served:
        assert (len(served.instances("prefill")), len(served.instances("decode"))) == (2, 2)
        for _ in range(3):  # every pair is likely to have had its turn
            results = streams(served.url, [traffic.Ask(tuple(prompt), 16) for prompt in prompts])
            assert [(r.error, r.tokens) for r in results] == [("", tokens) for tokens in wanted]
        assert served.stop() == 0


@pytest.mark.slow
@pytest.mark.parametrize("command", ["serve", "prefill"])
def test_an_unsupported_family_is_refused_by_name(tiny: Path, tmp_path: Path, command: str) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "bloom"}))
    told = refused(command, "--model", str(folder), "--kv-gib", "0.05")
    assert "type 'bloom' are not supported; supported are deepseek_v2, deepseek_v3, gemma3_text" in told


# ---- other hosts -----------------------------------------------------------------------------------


def address_of_this_host() -> str:
    """An IPv4 address of this host beyond loopback; skips the test if it has none."""
    for addresses in psutil.net_if_addrs().values():
        for entry in addresses:
            if entry.family is socket.AF_INET and not entry.address.startswith("127."):
                return str(entry.address)
    pytest.skip("this host has no IPv4 address beyond loopback")


@pytest.mark.slow
def test_parts_at_the_hosts_own_address(tiny: Path, tmp_path: Path) -> None:
    """Registry, sessions and KV over tcp at an address that other hosts could use."""
    host = address_of_this_host()
    secret = tmp_path / "secret"
    secret.write_text(os.urandom(32).hex())
    secret.chmod(0o600)
    held = HeldPort(host)
    port = str(held.port)
    url, trust = f"http://{host}:{port}", ("--secret-file", str(secret))
    model = ("--model", str(tiny), "--served-model-name", "tiny", *SMALL)
    here = ("--advertise-host", host, "--transport", "tcp", *model)
    with (
        Served("--bootstrap-port", port, "--host", host, *here, *trust, command="prefill") as prefill,
        Served("--registry", url, "--host", "0.0.0.0", *here, *trust, command="decode") as decode,
        Served(
            "--registry",
            url,
            "--port",
            "0",
            "--model",
            str(tiny),
            "--served-model-name",
            "tiny",
            *trust,
            command="frontend",
        ) as frontend,
    ):
        asks = traffic.asks(6, 4, vocab=VOCAB - 8, longest=100, max_tokens=8)
        assert [(r.error, r.text) for r in streams(frontend.url, asks) if r.error] == []
        [joined] = [line for line in decode.log().splitlines() if "peer joined" in line]
        assert f"address={host}:" in joined
        assert "transport=tcp" in joined
        assert "transport=tcp" in next(line for line in prefill.log().splitlines() if "peer joined" in line)
        assert "secret" in refused("decode", "--registry", url, *model, status=1)
        assert "secret" in refused("decode", "--registry", url, "--host", host, *model)
        assert [(r.error, r.text) for r in streams(frontend.url, asks) if r.error] == []
        frontend.at_rest()
        for part in (frontend, decode, prefill):
            assert part.stop(at_rest=False) == 0
